"""Measures the log beside bare NATS in the same run, in alternating rounds: latency, decisions, replay.

Prints these rows of the performance targets, each the median of `--rounds` rounds with its spread:
* append -> applied in another process, against a bare publish -> subscriber pair on a stream of the same server
  (same fsync; the bare subscriber hears the republished, stored message);
* a decision of four events stored, one after the other, against a bare atomic batch of four on a stream of
  the same configuration, sent by the client library without any code of ours; both once more on a server
  whose store is in memory, which leaves what is not the disk's;
* replay through the follower into memory and into the control plane's sqlite file, against a bare
  standing-pull loop that decodes the same JSON.

    python bench/log.py [--rounds 5] [--messages 400] [--decisions 200] [--events 100000]

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
import psutil  # noqa: E402
import uvloop  # noqa: E402

from controlplane.metrics import Metrics  # noqa: E402
from controlplane.projections.database import Checkpoint, Database  # noqa: E402
from controlplane.projections.readmodel import ReadModel  # noqa: E402
from events.connection import Connection, connect  # noqa: E402
from events.ids import utc_now  # noqa: E402
from events.jetstream import JetStreamLog  # noqa: E402
from events.log import Fence, Recorded  # noqa: E402
from events.provision import ensure_streams  # noqa: E402
from events.streams import stream_specs  # noqa: E402
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


class Took(msgspec.Struct):
    """What single decisions took, and the CPU of all of them: this process, and the server."""

    ms: list[float] = []
    cpu_s: float = 0.0
    server_cpu_s: float = 0.0

    def note(self, rows: "Rows", name: str) -> None:
        rows.note(f"{name} p50", quantile(self.ms, 0.5))
        rows.note(f"{name} p99", quantile(self.ms, 0.99))
        rows.note(f"{name} cpu", self.cpu_s / len(self.ms) * 1e3)
        rows.note(f"{name} server cpu", self.server_cpu_s / len(self.ms) * 1e3)


def server_cpu_s(server: psutil.Process) -> float:
    times = server.cpu_times()
    return times.user + times.system


async def decisions(
    log: JetStreamLog, server: psutil.Process, name: str, count: int, fence: Fence
) -> Took:
    """A decision as the leader stores it: plan, activation and record stood for by models, and the line."""
    took = Took()
    last: dict[int, int] = {}
    before = server_cpu_s(server)
    for n in range(count):
        batch = [drafts.model(f"{name}-{i}", last.get(i, 0), n + 1) for i in range(3)]
        batch.append(drafts.line(fence.seq, 0))
        began, cpu = time.perf_counter(), time.process_time()
        done = await log.append_batch(batch, epoch=fence.seq, fence=fence)
        took.ms.append((time.perf_counter() - began) * 1e3)
        took.cpu_s += time.process_time() - cpu
        last = {i: done.seqs[i] for i in range(3)}
    took.server_cpu_s = server_cpu_s(server) - before
    return took


async def make_batch_streams(url: str) -> None:
    """Streams as the yard's own, for batches of the bare client: events, and the audit that copies them."""
    client = await nats.connect(url)
    specs = {spec.name: spec.config for spec in stream_specs("batch")}
    events = {**specs["BATCH_EVENTS"], "name": "BATCH_EVENTS"}
    audit = {**specs["BATCH_AUDIT"], "name": "BATCH_AUDIT", "sources": [{"name": "BATCH_EVENTS"}]}
    for config in (events, audit):
        config["max_bytes"] = 256 * 1024 * 1024  # what is reserved must fit beside the yard's own
        answer = await client.request(
            f"$JS.API.STREAM.CREATE.{config['name']}", json.dumps(config).encode(), timeout=5
        )
        assert "error" not in json.loads(answer.data), answer.data
    await client.close()


async def batches_bare(url: str, server: psutil.Process, name: str, count: int, size: int) -> Took:
    """The least a writer can do: four messages in one go, and one answer awaited."""
    client = await nats.connect(url)
    took = Took()
    last = dict.fromkeys(range(4), 0)
    before = server_cpu_s(server)
    for n in range(count):
        bodies = [json.dumps({"rev": n, "filler": "x" * size}).encode() for _ in range(4)]
        began, cpu = time.perf_counter(), time.process_time()
        for i, body in enumerate(bodies):
            subject = f"batch.evt.{name}-{i}"
            headers = {
                "Nats-Expected-Stream": "BATCH_EVENTS",
                "Nats-Expected-Last-Subject-Sequence": str(last[i]),
                "Nats-Batch-Id": f"{name}-{n}",
                "Nats-Batch-Sequence": str(i + 1),
            }
            if i < 3:
                await client.publish(subject, body, headers=headers)
            else:
                headers["Nats-Batch-Commit"] = "1"
                answer = await client.request(subject, body, timeout=5, headers=headers)
        seq: int = json.loads(answer.data)["seq"]
        took.ms.append((time.perf_counter() - began) * 1e3)
        took.cpu_s += time.process_time() - cpu
        last = {i: seq - 3 + i for i in range(4)}
    took.server_cpu_s = server_cpu_s(server) - before
    await client.close()
    return took


async def measure_decisions(
    url: str, server: psutil.Process, args: argparse.Namespace, rows: "Rows", where: str
) -> None:
    """Rounds of ours and bare in turns on one server."""
    connection = await yard(url)
    await make_batch_streams(url)
    log = JetStreamLog(connection, source="/cp/bench")
    won = await log.append(drafts.elected("bench", 0), epoch=0)
    fence = Fence(subject=drafts.LEADER, seq=won.seqs[0])
    for n in range(args.rounds):
        ours = await decisions(log, server, f"d{n}", args.decisions, fence)
        bare = await batches_bare(url, server, f"d{n}", args.decisions, 520)
        ours.note(rows, f"{where} ours")
        bare.note(rows, f"{where} bare")
        rows.note(f"{where} ratio", quantile(ours.ms, 0.5) / quantile(bare.ms, 0.5))
    await connection.close()


async def fill(log: JetStreamLog, count: int) -> None:
    """Every subject gets less than the 64 events that the stream keeps of one."""
    last: dict[str, tuple[int, int]] = {}
    names = [f"r{n}" for n in range(1000 * (1 + count // 50_000))]
    for at in range(0, count, 1000):
        some = [names[(at + n) % len(names)] for n in range(1000)]
        batch = [drafts.model(n, *_next(last.get(n))) for n in some]
        done = await log.append_batch(batch, epoch=1)
        last |= {n: (s, d.rev) for n, s, d in zip(some, done.seqs, batch, strict=True)}


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


async def replay_sqlite(log: JetStreamLog, path: Path) -> float:
    """Events per second until the control plane's read model has all of them in its file."""
    identity = await log.identity()
    fresh = await Database.open(path)
    # A checkpoint before the first event: without one, only the last of each subject would be read.
    start = Checkpoint(
        stream_id=identity.stream_id,
        stream_created=identity.created,
        applied_seq=0,
        event_seq=0,
        event_subject="",
        event_id="",
        caught_up_at=time.time(),
    )
    await fresh.commit([], start)
    await fresh.close()
    model = ReadModel(
        events=log,
        path=path,
        prefix="yard",
        now=utc_now,
        monotonic=time.monotonic,
        metrics=Metrics(),
    )
    await model.open()
    began = time.perf_counter()
    running = asyncio.create_task(model.run())
    assert await model.reached(identity.last_seq, 120)
    took = time.perf_counter() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await model.close()
    return identity.last_seq / took


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


class Rows:
    """Values by row, one for each round."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def note(self, row: str, value: float) -> None:
        self._values.setdefault(row, []).append(value)

    def show(self, row: str, digits: int = 2) -> str:
        return show(self._values[row], digits)


async def measure(url: str, folder: Path, args: argparse.Namespace, rows: Rows) -> None:
    """Latency and replay."""
    client = await nats.connect(url)
    await client.jetstream().add_stream(
        name="BARE",
        subjects=["bare.>"],
        republish=nats.js.api.RePublish(src="bare.>", dest="heard.>"),
    )
    await client.close()
    connection = await yard(url)
    log = JetStreamLog(connection, source="/cp/bench")
    for n in range(args.rounds):
        ours = await latency_ours(url, f"m{n}", args.messages)
        bare = await latency_bare(url, f"b{n}", args.messages, 520)
        for q in (50, 99):
            rows.note(f"ours p{q}", quantile(ours, q / 100))
            rows.note(f"bare p{q}", quantile(bare, q / 100))
            rows.note(f"ratio p{q}", quantile(ours, q / 100) / quantile(bare, q / 100))
    await fill(log, args.events)
    events = (await log.identity()).last_seq
    for n in range(args.rounds):
        rates: dict[str, float] = {}
        for name, replay in (
            ("memory", replay_ours(log)),
            ("sqlite", replay_sqlite(log, folder / f"replay{n}.sqlite")),
            ("bare", replay_bare(url)),
        ):
            cpu = time.process_time()
            rates[name] = await replay
            rows.note(f"replay {name}", rates[name])
            rows.note(f"replay {name} cpu", (time.process_time() - cpu) / events * 1e6)
        for name in ("memory", "sqlite"):
            rows.note(f"replay {name} ratio", rates[name] / rates["bare"])
    await connection.close()


def tell(rows: Rows, args: argparse.Namespace, places: Sequence[str]) -> None:
    print(f"median of {args.rounds} rounds (spread)")
    for q, target in ((50, "under 2"), (99, "under 5")):
        print(
            f"append -> applied elsewhere p{q}  {rows.show(f'ours p{q}')} ms   "
            f"bare {rows.show(f'bare p{q}')} ms   ratio {rows.show(f'ratio p{q}')}   target {target}"
        )
    for where in places:
        target = "   target p50 under 5 ms" if where == "disk" else ""
        print(
            f"decision of four, store on {where:8} p50 {rows.show(f'{where} ours p50')} ms   "
            f"bare batch {rows.show(f'{where} bare p50')} ms   "
            f"ratio {rows.show(f'{where} ratio')}{target}"
        )
        print(
            f"  p99 {rows.show(f'{where} ours p99')} ms, bare {rows.show(f'{where} bare p99')} ms; "
            f"CPU {rows.show(f'{where} ours cpu')} ms, bare {rows.show(f'{where} bare cpu')} ms, "
            f"server {rows.show(f'{where} ours server cpu')} and "
            f"{rows.show(f'{where} bare server cpu')} ms"
        )
    for name in ("memory", "sqlite"):
        print(
            f"replay of {args.events:,} into {name}  {rows.show(f'replay {name}', 0)} /s   "
            f"bare {rows.show('replay bare', 0)} /s   "
            f"ratio {rows.show(f'replay {name} ratio')}   target 0.7 or more"
        )
        print(
            f"  CPU per event {rows.show(f'replay {name} cpu', 1)} us, "
            f"bare {rows.show('replay bare cpu', 1)} us"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        kind, url, subject, count = args.read
        read = read_ours if kind == "ours" else read_bare
        sys.stdout.write(json.dumps(uvloop.run(read(url, subject, int(count)))))
        return 0
    rows = Rows()
    places = {"disk": None, "memory": Path("/dev/shm")}
    for where, base in places.items():
        with (
            tempfile.TemporaryDirectory(dir=base) as folder,
            NatsServer(Path(folder)) as server,
        ):
            process = psutil.Process().children()[0]
            uvloop.run(measure_decisions(server.url, process, args, rows, where))
            if where == "disk":
                uvloop.run(measure(server.url, Path(folder), args, rows))
    tell(rows, args, tuple(places))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
