"""Measures a gateway that wakes a thousand waiting requests at one `replica.ready`.

Prints, as the median of `--rounds` rounds with spread: from the moment the event is applied until every waiting task
has gone on with the replica that was chosen and counted for it (woken), and until the last of their requests, head
and body, was handed to the kernel on a connection of its own to the engine, which had none before (written). Beside
it, in alternating rounds against another engine of the same kind, the floor: a thousand bare tasks of the same loop
that wait for one future each, and then connect and write the same bytes; none of the gateway's code.

The gateway runs here on the log in memory; engine and clients are processes of their own. Times are those of
the monotonic clock as each step happens. The scripted engine gives each connection a thread.

    python bench/waiters.py [--rounds 5] [--waiters 1000]

Not a test: it asserts nothing.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from gateway.app import calm_collector
from tests.support.aio import until
from tests.support.gateway_yard import chat, memory_yard
from tests.support.scripted import scripted

BODY = json.dumps(chat(max_tokens=1)).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


async def ask(port: int) -> bytes:
    """One request on a connection of its own; the status line of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(REQUEST)
        return await reader.readline()
    finally:
        writer.close()


async def clients(port: int, count: int) -> None:
    """The asking process: `count` requests at once; says how many were answered 200."""
    answers = await asyncio.gather(*(ask(port) for _ in range(count)))
    sys.stdout.write(f"{sum(b' 200 ' in a for a in answers)}\n")


@dataclass(frozen=True, kw_only=True)
class Round:
    """Milliseconds until all were woken, and until all were written."""

    woken: float
    written: float


async def round_of(count: int) -> Round:
    """From the waking event applied."""
    with tempfile.TemporaryDirectory() as folder, scripted(tokens=1) as endpoint:
        async with memory_yard(Path(folder)) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=60.0, waiting_requests=count)
            gateway.timelines._per_model = count
            calm_collector()
            asking = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                "--ask",
                str(gateway.port),
                "--waiters",
                str(count),
                stdout=asyncio.subprocess.PIPE,
            )
            room = gateway.gateway.room
            await until(lambda: room.count(("m", "any")) == count, "all to wait", 60.0)
            applied: list[float] = []
            apply = gateway.gateway.apply

            def noted(*given: object, **more: object) -> None:
                applied.append(time.monotonic())
                apply(*given, **more)  # type: ignore[arg-type]

            gateway.gateway.apply = noted  # type: ignore[method-assign]
            await yard.replica(None, "r-1", "ready", endpoint=endpoint)
            out, _ = await asking.communicate()
            if int(out) != count:
                raise SystemExit(f"only {int(out)} of {count} were answered 200")
            marks = [t.marks for t in gateway.timelines._by_model["m"]]
            woken = max(m["woken"] for m in marks)
            written = max(m["written_to_engine"] for m in marks)
            return Round(woken=(woken - applied[0]) * 1000, written=(written - applied[0]) * 1000)


class Answered(asyncio.Protocol):
    """The bare peer's end of a connection: the first bytes of an answer are all it wants."""

    def __init__(self) -> None:
        self.answered = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(data)


async def bare_round_of(count: int) -> Round:
    """The same with bare tasks, from the moment the first future is set."""
    loop = asyncio.get_running_loop()
    # Woken alone: going on to connect would be counted with it.
    futures = [loop.create_future() for _ in range(count)]
    woken: list[float] = []
    written: list[float] = []

    async def wake(future: "asyncio.Future[None]") -> None:
        await future
        woken.append(time.monotonic())

    with scripted(tokens=1) as endpoint:
        port = int(endpoint.rpartition(":")[2])

        async def write(future: "asyncio.Future[None]") -> None:
            await future
            transport, protocol = await loop.create_connection(Answered, "127.0.0.1", port)
            transport.write(REQUEST)
            written.append(time.monotonic())
            try:
                await protocol.answered
            finally:
                transport.abort()

        took: list[float] = []
        for step, marks in ((wake, woken), (write, written)):
            futures = [loop.create_future() for _ in range(count)]
            tasks = [loop.create_task(step(future)) for future in futures]
            await asyncio.sleep(0.2)
            begun = time.monotonic()
            for future in futures:
                future.set_result(None)
            await asyncio.gather(*tasks)
            took.append((max(marks) - begun) * 1000)
        return Round(woken=took[0], written=took[1])


def row(name: str, values: list[float], target: str = "") -> str:
    said = f"   target {target} ms" if target else ""
    return (
        f"{name:52} median {statistics.median(values):6.1f} ms"
        f"   ({min(values):.1f}-{max(values):.1f}){said}"
    )


async def main(rounds: int, count: int) -> None:
    ours: list[Round] = []
    bare: list[Round] = []
    for _ in range(rounds):
        ours.append(await round_of(count))
        bare.append(await bare_round_of(count))
    print(f"{count} waiters, load {os.getloadavg()[0]:.1f}")
    print(row("ready applied -> all woken", [r.woken for r in ours], "10"))
    print(row("    bare tasks, woken by futures", [r.woken for r in bare]))
    print(row("ready applied -> all written to the engine", [r.written for r in ours], "100"))
    print(row("    bare tasks, woken, connecting and writing", [r.written for r in bare]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiters", type=int, default=1000)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    uvloop.run(
        clients(given.ask, given.waiters) if given.ask else main(given.rounds, given.waiters)
    )
