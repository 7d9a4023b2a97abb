"""Holds many streams open through one gateway and says what that costs: errors, memory, CPU, and what is left behind.

1. `--slow` streams with one chunk a second, for `--seconds`
2. `--fast` streams with one chunk each 20 ms, for as long
3. of `--leaving` streams all clients go away, each somewhere in the middle; afterwards the gateway has nothing in flight
   and no engine runs a request

The gateway is the real process with a key, metrics, usage and its access log, as in bench/gateway.py; engines and
clients are processes of their own. It ends with 1 when anything failed.

    python bench/streams.py [--slow 2000] [--fast 300] [--leaving 200] [--seconds 60]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import rig
from bench.gatewayscene import Scene, scene

MIB: Final = 1024**2
PATIENCE_S: Final = 10.0


class Peak:
    """The largest resident size of a process while the block runs, looked at ten times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.before = self.bytes = process.memory_info().rss

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def asked(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def in_flight(port: int) -> float:
    """Requests at replicas, by the gateway's own numbers."""
    lines = asked(port, "/metrics").splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("yard_gateway_inflight") and not line.startswith("#")
    )


def until_nothing_runs(port: int, engine: int) -> dict[str, float]:
    """What is left once nothing more ends, at the latest after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = {
            "in_flight": in_flight(port),
            "running": float(json.loads(asked(engine, "/running"))["running"]),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


async def held(
    made: Scene, name: str, *, streams: int, seconds: float, gap_s: float, leave: float
) -> bool:
    """One kind of load; says what it came to, and whether all went well."""
    engines = [rig.free_port(), rig.free_port()]
    tokens = max(2, round(seconds / gap_s))
    with rig.streaming_engine(engines, tokens, gap_s):
        await made.model(name, engines)
        with made.gateway(name) as (port, process):
            spread_s = min(5.0, seconds / 4)
            asks = ("--header", f"authorization: Bearer {made.key}", "--model", name)
            before = rig.cpu_s([process])
            with Peak(process) as peak:
                row: dict[str, Any] = await asyncio.to_thread(
                    rig.load,
                    "stream",
                    port,
                    streams,
                    tokens,
                    *("--spread", spread_s, "--leave", leave, *asks),
                )
            used = rig.cpu_s([process]) - before
            left = await asyncio.to_thread(until_nothing_runs, port, engines[0])
    grown = (peak.bytes - peak.before) / streams / 1024
    went_well = not row["errors"] and not any(left.values())
    leaving = "all clients leaving" if leave else f"{row['took_s']:.0f} s"
    print(
        f"{name:8} {streams} streams, a chunk each {gap_s:g} s, {leaving}: "
        f"{row['tokens']:,} tokens, errors {row['errors']} {row['problems'] or ''}\n"
        f"         memory {peak.before / MIB:.0f} MiB grew to {peak.bytes / MIB:.0f} MiB ({grown:.0f} KiB a stream), "
        f"CPU {used / row['tokens'] * 1e6:.1f} us a token; left: in flight {left['in_flight']:.0f}, "
        f"running at engines {left['running']:.0f}",
        flush=True,
    )
    return went_well


async def main(options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        async with scene(Path(folder)) as made:
            seconds = options.seconds
            slow = await held(
                made, "slow", streams=options.slow, seconds=seconds, gap_s=1.0, leave=0.0
            )
            fast = await held(
                made, "fast", streams=options.fast, seconds=seconds, gap_s=0.02, leave=0.0
            )
            leaving = await held(
                made, "leaving", streams=options.leaving, seconds=10.0, gap_s=0.02, leave=1.0
            )
            return slow and fast and leaving


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slow", type=int, default=2000)
    parser.add_argument("--fast", type=int, default=300)
    parser.add_argument("--leaving", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    sys.exit(0 if asyncio.run(main(parser.parse_args())) else 1)
