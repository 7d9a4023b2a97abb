"""Measures what an adapter costs a request: one that is loaded beside the base model, and a cold one beside its engine.

Everything is a process of its own, as in service; the engine is the fake vLLM, so its own work is next to
nothing and what is left is ours. Requests alternate in one run, one at a time:

* hit: adapter and base model, through the gateway and straight to its engine. What a hit adds is the first
  difference less the second, in time and in processor time of the gateway; and how many messages the gateway
  sent to NATS per request, for both.
* cold: an adapter that nobody had yet, through the gateway, beside a load and a request straight to another
  engine of the same kind. First with free places, then with all taken, so that one must be given back, and
  then without a rest between them, when each waits for the place the one before gives back.

    python bench/adapters.py [--hits 2000] [--cold 50]

Not a test: it asserts nothing.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.activation import interval
from controlplane.ctl.supervisor import become_subreaper, bury_orphans
from events.secrets import engine_key, node_secret, read_secret, yard_secret_path
from tests.support.fake_vllm import fake_vllm
from tests.system.adapters import BASE, add_adapters, base_entry, replicas_ready, settings_for
from tests.system.yard import SystemYard, system_yard

ROOM = 64
"""Places of the engine the first cold ones find free."""

REST_S = 0.1


class Caller:
    """One connection that is kept, without a library's own time in it."""

    def __init__(self, url: str, key: str = "") -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"Host: {host}\r\nContent-Type: application/json\r\n"
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"

    def post(self, path: str, body: dict[str, object]) -> bytes:
        """The body of a 200; ends the bench at anything else."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._more()
        head_bytes, _, rest = got.partition(b"\r\n\r\n")
        fields = dict(
            line.lower().split(b":", 1) for line in head_bytes.split(b"\r\n")[1:] if b":" in line
        )
        length = int(fields[b"content-length"])
        while len(rest) < length:
            rest += self._more()
        if head_bytes.split(b" ", 2)[1] != b"200":
            raise SystemExit(f"{path}: {head_bytes.decode()}\n{rest.decode()}")
        return rest

    def _more(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise SystemExit("the connection was closed")
        return data

    def close(self) -> None:
        self._socket.close()


def ask(caller: Caller, model: str) -> float:
    """Seconds one completion of one word took; it must be that model's own."""
    begun = time.perf_counter()
    got = caller.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1})
    took = time.perf_counter() - begun
    name = "base" if model == BASE else model.partition("@")[0]
    if f"[{name}] " not in got.decode():
        raise SystemExit(f"{model} was answered by another: {got.decode()}")
    return took


def cpu_s(pid: int) -> float:
    """Processor seconds of all its threads, to the microsecond."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        spent += int(task.read_text().split()[0])
    return spent / 1e9


def sent_to_nats(monitoring: str) -> int:
    """Messages the gateway's connection has sent so far."""
    told = httpx.get(f"{monitoring}/connz?auth=1&limit=1024", trust_env=False).json()
    return sum(
        one["in_msgs"] for one in told["connections"] if one.get("authorized_user") == "gateway"
    )


def questions(yard: SystemYard) -> int:
    """How often the gateway has asked an agent about an adapter."""
    page = httpx.get(f"{yard.gateway()}/metrics", trust_env=False).text
    lines = [
        line for line in page.splitlines() if line.startswith("yard_gateway_adapter_asks_total")
    ]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def row(name: str, values: Sequence[float], unit: str, target: str = "") -> str:
    low, high = interval(values, times=2000)
    told = f"   target {target}" if target else ""
    return f"{name:58} {statistics.median(values):8.1f} {unit}  [{low:.1f} .. {high:.1f}]{told}"


class Engine:
    """The replica's own door, for requests past the gateway."""

    def __init__(self, yard: SystemYard) -> None:
        ready = yard.of("replica.ready")[-1]
        secret = node_secret(read_secret(yard_secret_path(yard.data)), "local")
        self.url: str = ready.state.endpoint
        self.key = engine_key(secret, ready.key[1])

    def caller(self) -> Caller:
        return Caller(self.url, self.key)

    def adapters(self) -> list[str]:
        """The names it serves adapters under."""
        answer = httpx.get(
            f"{self.url}/v1/models",
            headers={"Authorization": f"Bearer {self.key}"},
            trust_env=False,
        )
        return [card["id"] for card in answer.json()["data"] if card["parent"]]


def hits(yard: SystemYard, adapter: str, rounds: int) -> None:
    """Prints what a request for a loaded adapter costs above one for its base."""
    engine = Engine(yard)
    through, straight = Caller(yard.gateway()), engine.caller()
    gateway = psutil.Process(yard.running.supervisor.pids["gateway"]).pid
    monitoring = f"http://127.0.0.1:{yard.running.yard.monitoring_port}"
    ask(through, adapter)
    name = next(n for n in engine.adapters() if n.partition("@")[0] == adapter)
    for _ in range(200):
        for caller, model in ((through, adapter), (through, BASE), (straight, name)):
            ask(caller, model)
    ways: dict[str, list[float]] = {"adapter": [], "base": [], "its name": [], "its base": []}
    order = [
        ("adapter", through, adapter),
        ("base", through, BASE),
        ("its name", straight, name),
        ("its base", straight, BASE),
    ]
    draw = random.Random(2)
    for _ in range(rounds):
        draw.shuffle(order)
        for way, caller, model in order:
            ways[way].append(ask(caller, model) * 1e6)
    added = [
        (a - b) - (n - o)
        for a, b, n, o in zip(
            ways["adapter"], ways["base"], ways["its name"], ways["its base"], strict=True
        )
    ]
    print(row("gateway: base model", ways["base"], "us"))
    print(row("gateway: loaded adapter", ways["adapter"], "us"))
    print(row("engine alone: base model", ways["its base"], "us"))
    print(row("engine alone: loaded adapter", ways["its name"], "us"))
    print(row("a hit adds", added, "us", "under 50 us"))
    blocks: dict[str, list[float]] = {BASE: [], adapter: []}
    messages = {BASE: 0, adapter: 0}
    took = {BASE: 0.0, adapter: 0.0}
    each = max(rounds // 10, 1)
    asked = questions(yard)
    for _ in range(10):
        for model in (BASE, adapter):
            before, sent, begun = cpu_s(gateway), sent_to_nats(monitoring), time.perf_counter()
            for _ in range(each):
                ask(through, model)
            took[model] += time.perf_counter() - begun
            blocks[model].append((cpu_s(gateway) - before) / each * 1e6)
            messages[model] += sent_to_nats(monitoring) - sent
    extra = [a - b for a, b in zip(blocks[adapter], blocks[BASE], strict=True)]
    print(row("processor time of the gateway, base model", blocks[BASE], "us"))
    print(row("a hit adds to it", extra, "us"))
    for model, told in ((BASE, "base model"), (adapter, "hits")):
        # Beacons: every second, and when requests begin or end.
        print(f"{'messages to NATS a second, ' + told:58} {messages[model] / took[model]:8.1f}")
    print(f"{'questions to the agent in all of them':58} {questions(yard) - asked:8d}")
    through.close()
    straight.close()


def cold(
    yard: SystemYard, folder: Path, names: Sequence[str], what: str, rest_s: float = REST_S
) -> None:
    """Prints what a cold adapter's first request costs above a load and a request by hand.

    Before each there is a rest, in which what the one before left to do is done: telling the log, giving a
    place back.
    """
    by_hand: list[float] = []
    ours: list[float] = []
    flags = ("--max-cpu-loras", str(ROOM + 8), "--max-loras", "8")
    processes = yard.running.supervisor.pids
    before = {name: cpu_s(pid) for name, pid in processes.items()}
    with fake_vllm(*flags, model=BASE, adapters=True, sleeps=False) as url:
        through, other = Caller(yard.gateway()), Caller(url)
        for number, name in enumerate(names):
            for way in ("gateway", "hand") if number % 2 else ("hand", "gateway"):
                time.sleep(rest_s)
                begun = time.perf_counter()
                if way == "gateway":
                    ask(through, name)
                    ours.append((time.perf_counter() - begun) * 1e3)
                else:
                    body = {"lora_name": name, "lora_path": str(folder / name)}
                    other.post("/v1/load_lora_adapter", body)
                    ask(other, name)
                    by_hand.append((time.perf_counter() - begun) * 1e3)
        through.close()
        other.close()
    target = "under 3 ms" if rest_s else ""
    print(row(f"cold, {what}: load and request by hand", by_hand, "ms"))
    print(row(f"cold, {what}: request through the gateway", ours, "ms"))
    added = [a - b for a, b in zip(ours, by_hand, strict=True)]
    print(row(f"cold, {what}: added", added, "ms", target))
    spent = {
        name: (cpu_s(pid) - before[name]) / len(names) * 1e3 for name, pid in processes.items()
    }
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(spent.items()))
    print(f"{'    processor time for each, ms':58} {told}")


async def main(rounds: int, count: int) -> None:
    become_subreaper()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, bury_orphans)
    count = min(count, ROOM - 1)
    names = [f"a{number:03}" for number in range(ROOM + count)]
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as place:
        folder = Path(place)
        async with system_yard(folder, settings=settings_for(folder, 1)) as yard:
            entry = base_entry(folder, "--max-loras", "8", replicas=1, limit=ROOM)
            entry["profiles"][0]["env"].pop("FAKE_VLLM_LORA_LOG")
            await yard.add(entry)
            await add_adapters(yard, folder / "adapters", names)
            await replicas_ready(yard, 1)
            print(
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; [95 % interval of the median]"
            )
            # In a thread: the log is followed here meanwhile.
            await asyncio.to_thread(hits, yard, names[0], rounds)
            free, taken = names[1 : 1 + count], names[ROOM : ROOM + count]
            again = free[: count // 2]
            await asyncio.to_thread(cold, yard, folder / "adapters", free, "places free")
            filling = names[1 + count : ROOM]
            await asyncio.to_thread(fill, yard, filling)
            await asyncio.to_thread(cold, yard, folder / "adapters", taken, "all places taken")
            await asyncio.to_thread(
                cold, yard, folder / "adapters", again, "one straight after the other", 0.0
            )


def fill(yard: SystemYard, names: Sequence[str]) -> None:
    """Has these loaded."""
    through = Caller(yard.gateway())
    for name in names:
        ask(through, name)
    through.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hits", type=int, default=2000)
    parser.add_argument("--cold", type=int, default=50)
    given = parser.parse_args()
    asyncio.run(main(given.hits, given.cold))
