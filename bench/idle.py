"""Holds very many idle connections open at one gateway and says what they cost: memory each, CPU, and others' answers.

Half of them never sent a byte, half have had an answer. While they stand, a client asks for /v1/models again and again;
how long it waits is compared with before. The gateway is the real process of bench/gatewayscene.py. It ends with 1 when a
connection was lost or a request failed.

    python bench/idle.py [--connections 10000] [--seconds 20]
"""

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import rig
from bench.gatewayscene import scene

KIB: Final = 1024
MIB: Final = 1024**2
AT_ONCE: Final = 200
"""Connections made at the same time; more would only overrun the queue of the listening socket."""

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def asked(pair: Pair, key: str) -> float:
    """Seconds until the answer was there; ConnectionError when it was no 200."""
    reader, writer = pair
    began = time.perf_counter()
    writer.write(
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %b\r\n\r\n" % key.encode()
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ConnectionError(head.partition(b"\r\n")[0].decode())
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    await reader.readexactly(length)
    return time.perf_counter() - began


async def opened(port: int, count: int, key: str) -> list[Pair]:
    """So many connections; each other one has had an answer."""
    made: list[Pair] = []

    async def one(used: bool) -> Pair:
        pair = await asyncio.open_connection("127.0.0.1", port)
        if used:
            await asked(pair, key)
        return pair

    while len(made) < count:
        now = min(AT_ONCE, count - len(made))
        made += await asyncio.gather(*(one(bool(index % 2)) for index in range(now)))
    return made


async def waits(port: int, key: str, seconds: float) -> list[float]:
    """How long each of a client's requests waited, a hundred a second."""
    pair = await asyncio.open_connection("127.0.0.1", port)
    until = time.monotonic() + seconds
    found: list[float] = []
    while time.monotonic() < until:
        found.append(await asked(pair, key))
        await asyncio.sleep(0.01)
    pair[1].close()
    return found


def said(found: list[float]) -> str:
    ordered = sorted(found)
    middle, late = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    return f"median {middle * 1e3:.2f} ms, p99 {late * 1e3:.2f} ms"


async def main(options: argparse.Namespace) -> bool:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        async with scene(Path(folder)) as made:
            await made.model("m", [rig.free_port()])
            with made.gateway("idle") as (port, process):
                before = await waits(port, made.key, 3.0)
                empty = process.memory_info().rss
                pairs = await opened(port, options.connections, made.key)
                used = rig.cpu_s([process])
                beside = await waits(port, made.key, options.seconds)
                used = (rig.cpu_s([process]) - used) / options.seconds
                full = process.memory_info().rss
                lost = sum(reader.at_eof() for reader, _ in pairs)
                for _, writer in pairs:
                    writer.transport.abort()
    print(
        f"{options.connections:,} idle connections: {lost} lost; memory {empty / MIB:.0f} MiB grew to "
        f"{full / MIB:.0f} MiB ({(full - empty) / options.connections / KIB:.1f} KiB each); CPU {used:.1%} of a core "
        f"with 100 requests a second beside them\n"
        f"a request without them: {said(before)}; with them: {said(beside)}"
    )
    return not lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    sys.exit(0 if asyncio.run(main(parser.parse_args())) else 1)
