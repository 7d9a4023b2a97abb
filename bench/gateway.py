"""Compares the gateway as it is run with nginx and with other gateways: requests, latency, CPU, streams.

The gateway is the real process on a real nats-server, with a key and its limits, two replicas to choose from, metrics,
usage and its access log on. The peers forward to the same two engines and do none of that. All stand at once in front
of the same engines on this machine and take turns, round by round: only ratios carry over to another machine.

    make bench-peers                                       the others, once
    python bench/gateway.py [--rounds 5] [--seconds 3] [--clients 32] [--streams 300] [--tokens 100]
                            [--only unary|stream] [--peers nginx,vllm-router,…] [--print]

It prints the rows, and writes them to docs/performance.md unless `--print` is given. It needs nginx (Debian:
`apt-get install nginx-light`). CPU is that of the process in question with all its threads and children, kernel included.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import load, rig
from bench.gatewayscene import Scene, scene
from bench.peers.peers import PEERS

PAGE: Final = rig.ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- measured: written by bench/gateway.py -->"
END: Final = "<!-- end of measured -->"

STREAM_MODEL: Final = "stream"
MODELS: Final = json.dumps({"object": "list", "data": [{"id": load.MODEL, "object": "model"}]})
GAP_S: Final = 0.02
OURS: Final = "gateway"

Columns = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something to ask: `processes` are whose CPU counts, `asks` what bench/load.py is told besides."""

    port: int
    processes: Sequence[psutil.Process] = ()
    asks: tuple[str, ...] = ()
    clients: int | None = None

    def cpu_s(self) -> float:
        return rig.cpu_s(self.processes)


@dataclass
class Rows:
    """What each target showed, by metric, in the order of the rounds."""

    by_target: dict[str, Columns] = field(default_factory=dict)

    def add(self, target: str, **values: float) -> None:
        columns = self.by_target.setdefault(target, {})
        for name, value in values.items():
            columns.setdefault(name, []).append(value)

    def ratio(self, metric: str, of: str, to: str) -> list[float]:
        """Round by round."""
        pairs = zip(self.by_target[of][metric], self.by_target[to][metric], strict=True)
        return [ours / theirs for ours, theirs in pairs if theirs]


@contextmanager
def peers(
    wanted: Sequence[str], engines: Sequence[int], folder: Path
) -> Iterator[dict[str, Target]]:
    """The others, all running, each in front of `engines`."""
    found: dict[str, Target] = {}
    with contextlib.ExitStack() as stack:
        if "nginx" in wanted:
            port = rig.free_port()
            worker = stack.enter_context(rig.nginx_proxy(port, engines))
            found["nginx"] = Target(port=port, processes=[worker])
        for peer in PEERS:
            if peer.name not in wanted:
                continue
            if not peer.is_there:
                raise SystemExit(f"{peer.name} is not installed: make bench-peers")
            port = rig.free_port()
            own = folder / f"{peer.name}-{port}"
            own.mkdir()
            argv = peer.argv(port, rig.free_port(), engines, own)
            process = stack.enter_context(
                rig.running(port, argv, log=own / "log", env=dict(peer.env))
            )
            found[peer.name] = Target(
                port=port, processes=rig.family(process), clients=peer.clients
            )
        yield found


@contextmanager
def ours(made: Scene, name: str, asks: tuple[str, ...]) -> Iterator[dict[str, Target]]:
    """The gateway, alone and as two workers on one port: routers with threads use two cores too."""
    with (
        made.gateway(name) as (port, one),
        made.gateway(f"{name}2", workers=2) as (port2, two),
    ):
        yield {
            OURS: Target(port=port, processes=[one], asks=asks),
            f"{OURS}, 2 workers": Target(port=port2, processes=rig.family(two), asks=asks),
        }


def rest(target: Target, patience_s: float = 30.0) -> None:
    """Until it answers: a router that has just begun asks its engines first."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            rig.load("unary", target.port, 1, 0.05, *target.asks, quiet=True)
        except SystemExit:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def unary_round(name: str, target: Target, options: argparse.Namespace, rows: Rows) -> None:
    clients = options.clients
    before = target.cpu_s()
    row = rig.load("unary", target.port, clients, options.seconds, *target.asks)
    used = target.cpu_s() - before
    values = {metric: row[metric] for metric in ("rate", "p50_ms", "p99_ms")}
    if used:
        values["cpu_us"] = used / row["count"] * 1e6
        values["per_cpu_s"] = row["count"] / used
    rows.add(name, **values)


def stream_round(name: str, target: Target, options: argparse.Namespace, rows: Rows) -> None:
    """Streams begin spread over the time one takes, so that as many as asked for run at once in the middle."""
    clients = target.clients or options.streams
    spread_s = options.tokens * GAP_S
    more = (*target.asks, "--spread", spread_s)
    before = target.cpu_s()
    row = rig.load("stream", target.port, clients, options.tokens, *more)
    used = target.cpu_s() - before
    if row["errors"]:
        raise SystemExit(f"{name}: {row['errors']} streams failed: {row['problems']}")
    rows.add(
        name,
        first_ms=row["first_p50_ms"],
        first_p99_ms=row["first_p99_ms"],
        token_us=used / row["tokens"] * 1e6,
    )


def rounds(
    targets: dict[str, Target],
    options: argparse.Namespace,
    one: Callable[[str, Target, argparse.Namespace, Rows], None],
) -> Rows:
    rows = Rows()
    for index in range(options.rounds):
        order = list(targets)
        for name in order[index % len(order) :] + order[: index % len(order)]:
            one(name, targets[name], options, rows)
    return rows


async def unary(made: Scene, folder: Path, options: argparse.Namespace) -> Rows:
    engines = [rig.free_port(), rig.free_port()]
    with (
        rig.nginx_engine(engines, load.ANSWER, MODELS),
        peers(options.peers, engines, folder) as others,
    ):
        await made.model(load.MODEL, engines)
        with ours(made, "unary", as_key(made)) as gateways:
            targets = {"direct": Target(port=engines[0]), **others, **gateways}
            for target in targets.values():
                await asyncio.to_thread(rest, target)
            return await asyncio.to_thread(rounds, targets, options, unary_round)


async def stream(made: Scene, folder: Path, options: argparse.Namespace) -> Rows:
    engines = [rig.free_port(), rig.free_port()]
    with (
        rig.streaming_engine(engines, options.tokens, GAP_S),
        peers(options.peers, engines, folder) as others,
    ):
        await made.model(STREAM_MODEL, engines)
        with ours(made, "stream", (*as_key(made), "--model", STREAM_MODEL)) as gateways:
            targets = {"direct": Target(port=engines[0]), **others, **gateways}
            await asyncio.sleep(3.0)  # routers that have just begun ask their engines first
            return await asyncio.to_thread(rounds, targets, options, stream_round)


def as_key(made: Scene) -> tuple[str, ...]:
    return ("--header", f"authorization: Bearer {made.key}")


def pairs(rows: Rows) -> list[tuple[str, str]]:
    """Each of ours with each of the others."""
    others = [n for n in rows.by_target if n != "direct" and not n.startswith(OURS)]
    return [(own, n) for own in rows.by_target if own.startswith(OURS) for n in others]


def unary_table(rows: Rows, options: argparse.Namespace) -> list[str]:
    head = f"unary req/s ({options.clients} clients)"
    out = [
        f"| in front of the engine | {head} | p50 ms | p99 ms | CPU per request, us | requests per CPU second |",
        "|---|---|---|---|---|---|",
    ]
    for name, columns in rows.by_target.items():
        cpu = columns.get("cpu_us")
        out.append(
            f"| {name} | {rig.spread(columns['rate'], 0)} | {rig.spread(columns['p50_ms'])} "
            f"| {rig.spread(columns['p99_ms'])} | {rig.spread(cpu, 1) if cpu else '-'} "
            f"| {rig.spread(columns['per_cpu_s'], 0) if cpu else '-'} |"
        )
    for own, other in pairs(rows):
        rate, p99, cpu = (
            rig.spread(rows.ratio(metric, own, other)) for metric in ("rate", "p99_ms", "cpu_us")
        )
        out.append(f"| {own} / {other} | {rate} | | {p99} | {cpu} | |")
    return out


def stream_table(rows: Rows, options: argparse.Namespace) -> list[str]:
    what = f"{options.streams} streams x {options.tokens} tokens at {GAP_S * 1000:.0f} ms"
    out = [
        f"| {what} | CPU per token, us | first token, p50 ms | added, p50 ms | first token, p99 ms |",
        "|---|---|---|---|---|",
    ]
    direct = rows.by_target["direct"]["first_ms"]
    few = {peer.name: peer.clients for peer in PEERS if peer.clients}
    for name, columns in rows.by_target.items():
        added = [a - b for a, b in zip(columns["first_ms"], direct, strict=True)]
        label = f"{name} ({few[name]} streams)" if name in few else name
        out.append(
            f"| {label} | {rig.spread(columns['token_us'], 1) if name != 'direct' else '-'} "
            f"| {rig.spread(columns['first_ms'])} | {rig.spread(added) if name != 'direct' else '-'} "
            f"| {rig.spread(columns['first_p99_ms'])} |"
        )
    for own, other in pairs(rows):
        ratio = rig.spread(rows.ratio("token_us", own, other))
        out.append(f"| {own} / {other} | {ratio} | | | |")
    return out


async def measure(options: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with scene(folder / "yard") as made:
            if options.only != "stream":
                rows = await unary(made, folder, options)
                lines += [*unary_table(rows, options), ""]
            if options.only != "unary":
                rows = await stream(made, folder, options)
                lines += [*stream_table(rows, options), ""]
    asked = " ".join(sys.argv[1:])
    lines.append(
        f"`python bench/gateway.py{' ' + asked if asked else ''}`: the median of {options.rounds} alternating rounds "
        f"of one run (extremes), {os.cpu_count()} cores that clients and engines share, load before it "
        f"{options.load_before:.1f}."
    )
    return lines


def write(lines: Sequence[str]) -> None:
    before, _, rest_of = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest_of.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--only", choices=("unary", "stream"))
    parser.add_argument("--peers", default=",".join(["nginx", *(peer.name for peer in PEERS)]))
    parser.add_argument("--print", action="store_true", help="write nothing")
    options: Any = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    options.load_before = os.getloadavg()[0]
    lines = asyncio.run(measure(options))
    print("\n".join(lines))
    if not options.print:
        write(lines)


if __name__ == "__main__":
    main()
