"""Measures the log beside bare NATS in the same run, in alternating rounds: latency, decisions, replay.

Prints three rows of the performance targets, each the median of `--rounds` rounds with its spread:
* append -> applied in another process, against a bare publish -> subscriber pair on a stream of the same server
  (same fsync; the bare subscriber hears the republished, stored message);
* a decision of four events stored, one after the other;
* replay through the follower into memory, against a bare standing-pull loop that decodes the same JSON.

    python bench/log.py [--rounds 5] [--messages 400] [--decisions 200] [--events 60000]

Not a test: it asserts nothing.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import nats  # noqa: E402
import uvloop  # noqa: E402

from events.connection import Connection, connect  # noqa: E402
from events.jetstream import JetStreamLog  # noqa: E402
from events.log import Fence, Recorded  # noqa: E402
from events.provision import ensure_streams  # noqa: E402
from schemas.settings import NatsSettings  # noqa: E402
from tests.support import drafts  # noqa: E402
from tests.support.natsserver import NatsServer  # noqa: E402


async def yard(url: str) -> Connection:
    connection = await connect(
        NatsSettings(url=url), name="bench", user="", password="", inbox_prefix="_INBOX_bench"
    )
    await ensure_streams(connection, "bench", 1)
    return connection


# --- the reading process ---


async def read_ours(url: str, subject: str, count: int) -> dict[str, int]:
    """When each event, named by its revision, was applied to a dict of states."""
    connection = await yard(url)
    follower = JetStreamLog(connection, source="/cp/reader").follow([subject])
    while not (await follower.next()).synced:
        continue  # what earlier rounds left
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    states: dict[str, object] = {}
    applied: dict[str, int] = {}
    while len(applied) < count:
        for item in (await follower.next()).items:
            assert isinstance(item, Recorded)
            states[item.subject] = item.state
            applied[str(item.rev)] = time.monotonic_ns()
    await follower.close()
    await connection.close()
    return applied


async def read_bare(url: str, subject: str, count: int) -> dict[str, int]:
    client = await nats.connect(url)
    heard: dict[str, int] = {}
    done = asyncio.Event()

    async def on_message(message: Any) -> None:
        heard[str(json.loads(message.data)["rev"])] = time.monotonic_ns()
        if len(heard) == count:
            done.set()

    await client.subscribe(subject, cb=on_message)
    await client.flush()
    await client.flush()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await done.wait()
    await client.close()
    return heard


# --- the writing process ---


class Reader:
    """The other process; `applied` are its clock readings by revision (one clock for the machine)."""

    def __init__(self, kind: str, url: str, subject: str, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--read", kind, url, subject, str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def applied(self) -> dict[str, int]:
        out, _ = self._process.communicate(timeout=60)
        times: dict[str, int] = json.loads(out)
        return times


async def latency_ours(url: str, name: str, count: int) -> list[float]:
    reader = await asyncio.to_thread(Reader, "ours", url, "yard.evt.model.*", count)
    connection = await yard(url)
    log = JetStreamLog(connection, source="/cp/writer")
    began: dict[str, int] = {}
    last = [0] * 8
    for n in range(1, count + 1):
        # The revision counts over all subjects here: it is the name of the event for both processes.
        draft = drafts.model(f"{name}-{n % 8}", last[n % 8], n)
        began[str(n)] = time.monotonic_ns()
        last[n % 8] = (await log.append(draft, epoch=1)).seqs[0]
    await connection.close()
    return _between(began, await asyncio.to_thread(reader.applied))


async def latency_bare(url: str, name: str, count: int, size: int) -> list[float]:
    client = await nats.connect(url)
    js = client.jetstream()
    reader = await asyncio.to_thread(Reader, "bare", url, f"heard.{name}", count)
    began: dict[str, int] = {}
    for rev in range(1, count + 1):
        body = json.dumps({"rev": rev, "filler": "x" * size}).encode()
        began[str(rev)] = time.monotonic_ns()
        await js.publish(f"bare.{name}", body)
    await client.close()
    return _between(began, await asyncio.to_thread(reader.applied))


def _between(began: dict[str, int], ended: dict[str, int]) -> list[float]:
    return [(ended[k] - began[k]) / 1e6 for k in began]


async def decisions(log: JetStreamLog, round_: int, count: int, fence: Fence) -> list[float]:
    """A decision as the leader stores it: plan, activation and record stood for by models, and the line."""
    took: list[float] = []
    last: dict[str, int] = {}
    for n in range(count):
        batch = [drafts.model(f"d{round_}-{i}", last.get(f"{i}", 0), n + 1) for i in range(3)]
        batch.append(drafts.line(fence.seq, 0))
        began = time.perf_counter()
        done = await log.append_batch(batch, epoch=fence.seq, fence=fence)
        took.append((time.perf_counter() - began) * 1e3)
        last = {f"{i}": done.seqs[i] for i in range(3)}
    return took


async def fill(log: JetStreamLog, count: int) -> None:
    last: dict[str, tuple[int, int]] = {}
    names = [f"r{n}" for n in range(1000)]
    for _ in range(0, count, 1000):
        batch = [drafts.model(n, *_next(last.get(n))) for n in names]
        done = await log.append_batch(batch, epoch=1)
        last = {n: (s, d.rev) for n, s, d in zip(names, done.seqs, batch, strict=True)}


def _next(known: tuple[int, int] | None) -> tuple[int, int]:
    return (0, 1) if known is None else (known[0], known[1] + 1)


async def replay_ours(log: JetStreamLog) -> float:
    """Events per second from the first to the last stored, decoded and folded into a dict."""
    identity = await log.identity()
    states: dict[str, object] = {}
    count = 0
    began = time.perf_counter()
    follower = log.follow(["yard.evt.>"], after=0, identity=identity)
    position = 0
    while position < identity.last_seq:
        batch = await follower.next()
        for item in batch.items:
            assert isinstance(item, Recorded)
            states[item.subject] = item.state
        count += len(batch.items)
        position = batch.position
    took = time.perf_counter() - began
    await follower.close()
    return count / took


async def replay_bare(url: str) -> float:
    """The least a reader can do: a pull kept standing, JSON decoded, kept by subject."""
    client = await nats.connect(url)
    js = client.jetstream()
    info = await js.stream_info("YARD_EVENTS")
    inbox = client.new_inbox()
    states: dict[str, object] = {}
    done = asyncio.Event()
    count = 0
    decode = msgspec.json.Decoder().decode
    name = f"bare{time.monotonic_ns()}"
    ask = f"$JS.API.CONSUMER.MSG.NEXT.YARD_EVENTS.{name}"
    body = json.dumps({"batch": 1000, "expires": 30_000_000_000}).encode()

    async def on_message(message: Any) -> None:
        nonlocal count
        if not message.reply:
            return
        count += 1
        states[message.subject] = decode(message.data)
        if count % 500 == 0 and count >= 1000:
            await client.publish(ask, body_half, reply=inbox)
        if message.reply.endswith(".0"):
            done.set()

    body_half = json.dumps({"batch": 500, "expires": 30_000_000_000}).encode()
    began = time.perf_counter()
    await client.subscribe(inbox, cb=on_message)
    await js.add_consumer(
        "YARD_EVENTS",
        name=name,
        deliver_policy=nats.js.api.DeliverPolicy.ALL,
        ack_policy=nats.js.api.AckPolicy.NONE,
        mem_storage=True,
        filter_subject="yard.evt.>",
    )
    await client.publish(ask, body, reply=inbox)
    await done.wait()
    took = time.perf_counter() - began
    assert count == info.state.messages
    await js.delete_consumer("YARD_EVENTS", name)
    await client.close()
    return count / took


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def show(values: Sequence[float], digits: int = 2) -> str:
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


async def measure(url: str, args: argparse.Namespace) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(
        name="BARE",
        subjects=["bare.>"],
        republish=nats.js.api.RePublish(src="bare.>", dest="heard.>"),
    )
    await client.close()
    connection = await yard(url)
    log = JetStreamLog(connection, source="/cp/bench")
    won = await log.append(drafts.elected("bench", 0), epoch=0)
    fence = Fence(subject=drafts.LEADER, seq=won.seqs[0])

    rows: dict[str, list[float]] = {}

    def note(row: str, value: float) -> None:
        rows.setdefault(row, []).append(value)

    for n in range(args.rounds):
        ours = await latency_ours(url, f"m{n}", args.messages)
        bare = await latency_bare(url, f"b{n}", args.messages, 520)
        for q in (50, 99):
            note(f"ours p{q}", quantile(ours, q / 100))
            note(f"bare p{q}", quantile(bare, q / 100))
            note(f"ratio p{q}", quantile(ours, q / 100) / quantile(bare, q / 100))
        took = await decisions(log, n, args.decisions, fence)
        note("decision p50", quantile(took, 0.5))
        note("decision p99", quantile(took, 0.99))
    await fill(log, args.events)
    for _ in range(args.rounds):
        ours_rate, bare_rate = await replay_ours(log), await replay_bare(url)
        note("replay ours", ours_rate)
        note("replay bare", bare_rate)
        note("replay ratio", ours_rate / bare_rate)
    await connection.close()

    print(f"median of {args.rounds} rounds (spread)")
    for q, target in ((50, "under 2"), (99, "under 5")):
        print(
            f"append -> applied elsewhere p{q}  {show(rows[f'ours p{q}'])} ms   "
            f"bare {show(rows[f'bare p{q}'])} ms   ratio {show(rows[f'ratio p{q}'])}   target {target}"
        )
    print(
        f"decision of four stored p50      {show(rows['decision p50'])} ms   "
        f"p99 {show(rows['decision p99'])} ms   target p50 under 5 ms"
    )
    print(
        f"replay into memory               {show(rows['replay ours'], 0)} /s   "
        f"bare {show(rows['replay bare'], 0)} /s   ratio {show(rows['replay ratio'])}   target 0.7 or more"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        kind, url, subject, count = args.read
        read = read_ours if kind == "ours" else read_bare
        sys.stdout.write(json.dumps(uvloop.run(read(url, subject, int(count)))))
        return 0
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        uvloop.run(measure(server.url, args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
