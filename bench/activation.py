"""Measures a cold start and a wake: the gateway's share of the time from request to first token.

Prints two rows of docs/performance.md's targets:
* cold start: request in -> first token through the yard, minus the same engine started and asked by hand, in
  alternating rounds of one run (median of `--rounds`, with spread);
* `replica.ready` stored -> first waiting request written to the engine, over the same rounds.

Needs the model file that `make setup` fetches. Not a test: it asserts nothing.
"""

import argparse
import asyncio
import datetime as dt
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # run as a file: `tests` is no package of the venv

from tests.system.yard import SMOLLM2, SystemYard, system_yard

ENTRY = {
    "name": "smollm2",
    "source": str(SMOLLM2),
    "scaling": {"min": 0, "max": 1, "idle_timeout": "15m"},
    "profiles": [
        {"name": "cpu", "engine": "llamacpp", "args": ["--ctx-size", "2048"], "memory": "1GiB"}
    ],
}
BODY = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Say hello."}],
}

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_token(base: str) -> tuple[float, str]:
    """Seconds from sending the request to the first piece of text, and the request's id."""
    begun = time.perf_counter()
    with (
        httpx.Client(timeout=120) as http,
        http.stream("POST", f"{base}/v1/chat/completions", json=BODY) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            raise SystemExit(f"{base} answered {answer.status_code}: {answer.text}")
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                "content"
            ):
                return time.perf_counter() - begun, answer.headers.get("x-request-id", "")
    raise SystemExit("no token came")


def direct_round() -> float:
    """Engine start to listening plus the first token of the same request, by hand."""
    port = free_port()
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
        listening = time.perf_counter() - begun
        return listening + first_token(f"http://127.0.0.1:{port}")[0]
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()


async def yard_round(yard: SystemYard) -> tuple[float, float]:
    """(cold first token, ready stored -> request written) in seconds, then the model is unloaded."""
    before = yard.position
    took, request = await asyncio.to_thread(first_token, yard.gateway())
    ready = await yard.event("replica.ready", after=before)
    async with httpx.AsyncClient() as http:
        timeline = await http.get(f"{yard.gateway()}/yard/timeline", params={"request": request})
    written = dt.datetime.fromisoformat(timeline.json()["written_to_engine"])
    gap = (written - ready.stored_at).total_seconds()
    await yard.ctl("model", "unload", "smollm2")
    await yard.event("card.released", after=ready.seq)
    return took, gap


def row(name: str, values: list[float]) -> str:
    ms = sorted(v * 1000 for v in values)
    return (
        f"{name:58} median {statistics.median(ms):7.1f} ms   min {ms[0]:7.1f}   max {ms[-1]:7.1f}"
    )


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        async with system_yard(Path(folder)) as yard:
            await yard.add(ENTRY)
            await yard_round(yard)  # warm the page cache once for both sides
            direct_round()
            yards: list[float] = []
            gaps: list[float] = []
            directs: list[float] = []
            for n in range(rounds):
                print(f"round {n + 1} of {rounds}", file=sys.stderr)
                directs.append(direct_round())
                took, gap = await yard_round(yard)
                yards.append(took)
                gaps.append(gap)
    print(f"{os.cpu_count()} cores, {rounds} alternating rounds")
    print(row("by hand: start to listening + first token", directs))
    print(row("yard: request in -> first token, model cold", yards))
    print(row("difference per round", [y - d for y, d in zip(yards, directs, strict=True)]))
    print(row("replica.ready stored -> request written to the engine", gaps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    asyncio.run(main(parser.parse_args().rounds))
