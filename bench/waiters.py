"""Measures a gateway that wakes a thousand waiting requests at one `replica.ready`.

Prints, as the median of `--rounds` rounds with spread: from the event applied to all waiters woken, and to all of their
requests written to the engine. The gateway runs here on the log in memory; engine and clients are processes of
their own, and every request opens a connection of its own to the engine, which had none before.

    python bench/waiters.py [--rounds 5] [--waiters 1000]

Not a test: it asserts nothing.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

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


async def round_of(count: int) -> tuple[float, float]:
    """Milliseconds from the waking event applied to (all woken, all written to the engine)."""
    with tempfile.TemporaryDirectory() as folder, scripted(tokens=1) as endpoint:
        async with memory_yard(Path(folder)) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=60.0, waiting_requests=count)
            gateway.timelines._per_model = count
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
                applied.append(asyncio.get_running_loop().time())
                apply(*given, **more)  # type: ignore[arg-type]

            gateway.gateway.apply = noted  # type: ignore[method-assign]
            await yard.replica(None, "r-1", "ready", endpoint=endpoint)
            out, _ = await asking.communicate()
            if int(out) != count:
                raise SystemExit(f"only {int(out)} of {count} were answered 200")
            marks = [t.marks for t in gateway.timelines._by_model["m"]]
            woken = max(m["woken"] for m in marks)
            written = max(m["written_to_engine"] for m in marks)
            return (woken - applied[0]) * 1000, (written - applied[0]) * 1000


async def main(rounds: int, count: int) -> None:
    found = [await round_of(count) for _ in range(rounds)]
    for name, values, target in (
        ("all woken", [w for w, _ in found], "10"),
        ("all written to the engine", [w for _, w in found], "100"),
    ):
        print(
            f"{count} waiters, ready applied -> {name:26} median {statistics.median(values):6.1f} ms"
            f"   ({min(values):.1f}-{max(values):.1f})   target {target} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiters", type=int, default=1000)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    uvloop.run(
        clients(given.ask, given.waiters) if given.ask else main(given.rounds, given.waiters)
    )
