"""Measures what a cold start costs over the same engine started by hand, and where that time goes.

Alternates rounds by hand and through the yard in one run, both begun when the machine is quiet; a pair
beside which others worked for more than `--foreign` of the processors is left out and counted. Prints
* both times and their difference per round: the median with a bootstrap interval of it;
* `replica.ready` stored -> first waiting request written to the engine;
* when each event of the start was stored, counted from the request;
* the processor time each process took between the request and the first token.

Nothing of the bench itself follows the log while the clock runs: it would take processor time that a
start by hand does not lose. Needs the model file that `make setup` fetches. Not a test: it asserts
nothing.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # run as a file: `bench` and `tests` are no packages of the venv

from bench.rig import free_port
from controlplane.ctl.supervisor import become_subreaper, bury_orphans, python_argv
from controlplane.ctl.up import RunningYard, UpOptions, start_yard
from events.log import EventLog, Recorded
from tests.support.logs import open_admin_log
from tests.system.yard import SMOLLM2

ENTRY = {
    "name": "smollm2",
    "source": str(SMOLLM2),
    "scaling": {"min": 0, "max": 1, "idle_timeout": "15m"},
    "profiles": [
        {"name": "cpu", "engine": "llamacpp", "args": ["--ctx-size", "2048"], "memory": "1GiB"}
    ],
}
BODY = json.dumps(
    {
        "model": "smollm2",
        "stream": True,
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
)

# The peer: the same library told the same things, and nothing of ours around it.
DIRECT = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path = sys.argv[1]; p.hostnames = ["127.0.0.1"]; p.port = int(sys.argv[2]); p.n_ctx = 2048
p.endpoint_metrics = True
s = xllamacpp.Server(p)
print("listening", flush=True)
time.sleep(600)
"""

SETTLE_S = 0.7
"""Silence before each start, for what the start before left to do."""
QUIET = 0.12
"""The processors may be busy for this share of it."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One start through the yard: seconds, seconds by event, and processor seconds by process.

    `foreign` is the share of the processors that neither the yard nor the bench had.
    """

    took: float
    foreign: float
    ready_to_written: float
    stored: dict[str, float]
    cpu: dict[str, float]


class Pair(NamedTuple):
    """A start through the yard beside one by hand: its seconds, processor seconds, and `foreign`."""

    yard: Round
    took: float
    cpu: float
    foreign: float


def first_token(port: int) -> str:
    """Returns when the first piece of text came, with the request's id; the answer is read later."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/chat/completions", BODY, {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"port {port} answered {answer.status}: {answer.read().decode()}")
        while line := answer.readline():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                "content"
            ):
                return answer.headers.get("x-request-id", "")
    raise SystemExit("no token came")


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads that live, to the microsecond; 0 for a process that is gone."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(task.read_text().split()[0])
    return spent / 1e9


def busy_s() -> float:
    """Processor seconds the whole machine spent, or was refused, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def share(busy: float, took: float) -> float:
    return max(busy, 0.0) / took / (os.cpu_count() or 1)


def settle(patience_s: float) -> None:
    """Returns after a while in which the machine did next to nothing, at the latest after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        before = busy_s()
        time.sleep(SETTLE_S)
        if share(busy_s() - before, SETTLE_S) < QUIET or time.monotonic() >= deadline:
            return


def direct_round(patience_s: float) -> tuple[float, float, float]:
    """Engine start to listening plus the first token of the same request, by hand; its CPU; foreign."""
    port = free_port()
    settle(patience_s)
    before = busy_s() - time.process_time()
    begun = time.perf_counter()
    engine = subprocess.Popen(
        [sys.executable, "-c", DIRECT, str(SMOLLM2), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert engine.stdout is not None
        if not engine.stdout.readline():
            raise SystemExit("the engine did not start")
        first_token(port)
        took = time.perf_counter() - begun
        spent = cpu_s(engine.pid)
        return took, spent, share(busy_s() - time.process_time() - before - spent, took)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()


def of_the_yard(services: dict[str, int]) -> dict[str, float]:
    """Processor seconds until now by process, with the launcher and the engine below the agent."""
    told = {name: cpu_s(pid) for name, pid in services.items()}
    told["bench"] = time.process_time()
    # A launcher may have waited for its engine; one that still waits is told of too.
    for launcher in psutil.Process(services["nodeagent"]).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            engines = launcher.children()
            told["launcher" if engines else "launcher in reserve"] = cpu_s(launcher.pid)
            for engine in engines:
                told["engine"] = cpu_s(engine.pid)
    return told


async def ctl(running: RunningYard, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *python_argv("controlplane.ctl", *arguments),
        env={**os.environ, "YARD_DATA": str(running.yard.data)},
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await process.wait() != 0:
        raise SystemExit(f"yardctl {' '.join(arguments)} failed")


async def read(log: EventLog, after: int, until: str = "") -> list[Recorded]:
    """What was stored after `after`, as far as it is kept: until there is an event of type `until`."""
    found: list[Recorded] = []
    follower = log.follow(["yard.evt.>"], after=after)
    try:
        async with asyncio.timeout(30):
            while True:
                batch = await follower.next()
                found += [item for item in batch.items if isinstance(item, Recorded)]
                if batch.synced and (not until or any(e.type == until for e in found)):
                    return found
    finally:
        await follower.close()


async def yard_round(running: RunningYard, log: EventLog, patience_s: float) -> Round:
    """A cold start through the yard; afterwards the model is unloaded."""
    before = (await log.identity()).last_seq
    services = running.supervisor.pids
    await asyncio.to_thread(settle, patience_s)
    busy = busy_s()
    spent = of_the_yard(services)
    began_at = dt.datetime.now(dt.UTC)
    begun = time.perf_counter()
    # In this very thread: nothing else of the bench may run meanwhile.
    request = first_token(running.yard.gateway_port)
    took = time.perf_counter() - begun
    cpu = {name: s - spent.get(name, 0.0) for name, s in of_the_yard(services).items()}
    foreign = busy_s() - busy
    if "launcher" in cpu:
        cpu["launcher"] -= spent.get("launcher in reserve", 0.0)
    foreign -= sum(cpu.values())
    await asyncio.sleep(0.5)  # measured, answered and recorded
    events = await read(log, before, "replica.ready")
    stored: dict[str, float] = {}
    for event in events:
        stored.setdefault(event.type, (event.stored_at - began_at).total_seconds())
    connection = http.client.HTTPConnection("127.0.0.1", running.yard.gateway_port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", f"/yard/timeline?request={request}")
        timeline = json.loads(connection.getresponse().read())
    written = dt.datetime.fromisoformat(timeline["written_to_engine"])
    stored["(written to the engine)"] = (written - began_at).total_seconds()
    stored["(first token)"] = took
    position = events[-1].seq
    await ctl(running, "model", "unload", "smollm2")
    await read(log, position, "card.released")
    return Round(
        took=took,
        foreign=share(foreign, took),
        ready_to_written=stored["(written to the engine)"] - stored["replica.ready"],
        stored=stored,
        cpu=cpu,
    )


def interval(values: Sequence[float], times: int = 4000) -> tuple[float, float]:
    """Where the median of such rounds lies in 95 of 100 runs, by drawing from these."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(times))
    return medians[int(0.025 * times)], medians[int(0.975 * times)]


def row(name: str, values: list[float]) -> str:
    ms = sorted(v * 1000 for v in values)
    low, high = interval(ms)
    return (
        f"{name:58} median {statistics.median(ms):7.1f} ms  [{low:7.1f} .. {high:7.1f}]"
        f"   min {ms[0]:7.1f}   max {ms[-1]:7.1f}"
    )


def table(title: str, rows: list[dict[str, float]], *, by_value: bool) -> Iterator[str]:
    """Medians by name, of the names that most rounds have."""
    columns: dict[str, list[float]] = defaultdict(list)
    for found in rows:
        for name, value in found.items():
            columns[name].append(value)
    medians = [
        (statistics.median(values) * 1000, name)
        for name, values in columns.items()
        if len(values) * 2 > len(rows)
    ]
    yield title
    for value, name in sorted(medians, reverse=not by_value):
        yield f"    {name:30} {value:8.1f} ms"


async def measure(rounds: int, foreign: float, patience_s: float) -> tuple[list[Pair], int]:
    """`rounds` pairs that were not disturbed, and how many were; at most four times as many are made."""
    kept: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        data = Path(folder)
        catalog = data / "catalog.yaml"
        catalog.write_text(json.dumps([ENTRY]))  # JSON is YAML
        running = await start_yard(
            UpOptions(data=data, gateway_port=0, api_port=0, nats_port=0), lambda _: None
        )
        made = 0
        try:
            async with open_admin_log(data) as log:
                await ctl(running, "apply", "-f", str(catalog))
                await yard_round(
                    running, log, patience_s
                )  # warm the page cache once for both sides
                direct_round(patience_s)
                while len(kept) < rounds and made < rounds * 4:
                    made += 1
                    # Who begins changes from round to round.
                    direct = direct_round(patience_s) if made % 2 else None
                    yard = await yard_round(running, log, patience_s)
                    pair = Pair(yard, *(direct or direct_round(patience_s)))
                    good = max(yard.foreign, pair.foreign) <= foreign
                    if good:
                        kept.append(pair)
                    print(
                        f"{made}: by hand {pair.took * 1000:.0f} ms, foreign {pair.foreign:.0%};"
                        f" yard {yard.took * 1000:.0f} ms, foreign {yard.foreign:.0%}"
                        f"{'' if good else ' - left out'}",
                        file=sys.stderr,
                    )
        finally:
            await running.stop()
            bury_orphans()
    return kept, made - len(kept)


async def main(rounds: int, foreign: float, patience_s: float) -> None:
    become_subreaper()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, bury_orphans)
    pairs, disturbed = await measure(rounds, foreign, patience_s)
    if len(pairs) < 2:
        raise SystemExit("the machine was never quiet for long enough")
    yards = [pair.yard for pair in pairs]
    print(
        f"{os.cpu_count()} cores, {len(pairs)} alternating rounds, {disturbed} disturbed ones left out;"
        " [95 % interval of the median]"
    )
    print(row("by hand: start to listening + first token", [pair.took for pair in pairs]))
    print(row("yard: request in -> first token, model cold", [y.took for y in yards]))
    print(row("difference per round", [pair.yard.took - pair.took for pair in pairs]))
    print(
        row(
            "replica.ready stored -> request written to the engine",
            [y.ready_to_written for y in yards],
        )
    )
    print(*table("stored after the request", [y.stored for y in yards], by_value=True), sep="\n")
    cpu = [{**pair.yard.cpu, "engine by hand": pair.cpu} for pair in pairs]
    print(*table("processor time from request to first token", cpu, by_value=False), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--foreign", type=float, default=0.1, help="share of the processors")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet")
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.foreign, given.patience))
