"""Measures placement in a large yard: 1,000 nodes x 8 cards, and fifty models that are wanted at once.

Prints CPU milliseconds, median of several runs, beside a bare loop over the same structs in the same run; it
asserts nothing. Targets are in the performance notes: a pass over 5,000 placed models under 50 ms, at most
0.5 ms for each model to place, afterwards in proportion to what changed.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec.structs import replace

from bench.reconcile import build, live_of
from controlplane.domain.decision import Live
from controlplane.domain.index import StepIndex
from controlplane.domain.step import Step, next_decision
from controlplane.live import LiveTracker
from schemas.activation import Activation, ActivationWanted
from schemas.beacons import AgentBeacon, GatewayBeacon
from schemas.model import ModelChanged
from tests.support.worlds import SETTINGS, T0, Yard, counting_ids

WANTED = 50


def cpu_ms(run: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    run()
    return (time.process_time() - begin) * 1000


def show(what: str, spans: list[float], each: int = 1, beside: float | None = None) -> float:
    spans = [span / each for span in spans]
    median = statistics.median(spans)
    ratio = f"   {median / beside:6.2f} x the bare loop" if beside else ""
    print(f"  {what:<58} {median:9.3f} ms   ({min(spans):.3f} .. {max(spans):.3f}){ratio}")
    return median


def want(y: Yard, first: int) -> None:
    """Fifty models nobody runs are asked for, in order of their names."""
    for n in range(WANTED):
        name = f"model-{first + n:05d}"
        entry = y.world.models[name]
        asked_at = T0 + timedelta(milliseconds=n)
        y.append(
            "activation",
            (name, "any"),
            ActivationWanted(by="bench"),
            Activation(
                model=name,
                incarnation=entry.incarnation,
                phase="wanted",
                wanted_at=asked_at,
                since=asked_at,
            ),
        )


def bare_places(y: Yard, needed_bytes: int) -> object:
    """What no placement can do without, were it to look at every card: who holds it and what is left."""
    best: tuple[int, str, str] | None = None
    for card in y.world.cards.values():
        free = card.memory_bytes
        for lease in card.leases:
            free -= lease.memory_bytes
        if card.waiters or card.claims or card.vm is not None or free < needed_bytes:
            continue
        key = (-free, card.node, card.id)
        if best is None or key < best:
            best = key
    return best


def bare_pass(y: Yard) -> object:
    """Each model with its item, replica, activation and record, and nothing decided of them."""
    world, index = y.world, StepIndex()
    index.sync(world)
    items = index.items_of
    count = 0

    def run() -> None:
        nonlocal count
        for name, entry in world.models.items():
            for id_, planned in items.get(name, {}).items():
                replica = world.replicas[id_]
                activation = world.activations[(name, "any")]
                known = world.records[name]
                count += (
                    replica.phase == "ready"
                    and planned.item.stop is None
                    and activation.phase == "ready"
                    and not known.failures
                    and entry.scaling.max > 0
                )

    return run


class Beacons:
    """What a leader hears of such a yard while it decides 200 times a second: five agents before each decision,
    and before each tenth one a gateway, which tells of fifty models used just now."""

    def __init__(self, live: Live) -> None:
        self.clock_s = 100.0
        self.tracker = LiveTracker(lambda: self.clock_s, row_gap_s=30.0, now=self.now)
        self.heard = self.told = 0
        uses = live.gateways[0].last_use_age_s
        self.used_at_s = {model: self.clock_s - age_s for model, age_s in uses.items()}
        self.nodes = [a.node for a in live.agents]
        self.inflight = live.gateways[0].inflight
        for n in range(len(self.nodes)):
            self._agent(n)
        for _ in live.gateways:
            self._gateway()

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.clock_s)

    def _agent(self, n: int) -> None:
        node = self.nodes[n % len(self.nodes)]
        self.tracker.on_agent(node, AgentBeacon(node=node, epoch=1, position=1))

    def _gateway(self) -> None:
        self.heard += 1
        name = f"gw{self.heard % 2}"
        names = sorted(self.used_at_s)
        for n in range(50):
            self.used_at_s[names[(self.heard * 50 + n) % len(names)]] = self.clock_s
        ages = {model: self.clock_s - at_s for model, at_s in self.used_at_s.items()}
        beacon = GatewayBeacon(
            gateway=name,
            incarnation="1",
            n=self.heard,
            position=1,
            inflight=self.inflight,
            last_use_age_s=ages,
        )
        self.tracker.on_gateway(name, beacon)

    def come(self) -> None:
        self.clock_s += 0.005
        self.told += 5
        if self.told % 50 == 0:
            self._gateway()
        for n in range(5):
            self._agent(self.told + n)

    def view(self) -> Live:
        return self.tracker.view(leading_since=0.0)


class Series:
    """One leader, from the first of the fifty to the last. `beacons`: some come between two decisions, and to
    look at them is part of each."""

    def __init__(self, y: Yard, live: Live, beacons: Beacons | None) -> None:
        self.y = y
        self.live = live
        self.beacons = beacons
        self.now = T0 + timedelta(seconds=100)
        self.index = StepIndex()
        self.ids = counting_ids({})
        self.ask()
        # Once per leader: what is on each card. Afterwards only cards that changed are looked at.
        self.first_ms = cpu_ms(lambda: self.index.book(self.y.world))
        self.base_ms = min(cpu_ms(self.ask) for _ in range(5))

    def ask(self) -> Step:
        if self.beacons is not None:
            self.now = self.beacons.now()
            self.live = self.beacons.view()
        return next_decision(self.y.world, self.live, (), self.now, self.ids, SETTINGS, self.index)

    def serve(self) -> tuple[float, list[str]]:
        """CPU milliseconds of all decisions until nothing is left, and what they were."""
        spent = 0.0
        made: list[str] = []
        while True:
            if self.beacons is not None:
                self.beacons.come()
            begin = time.process_time()
            step = self.ask()
            spent += (time.process_time() - begin) * 1000
            if step.decision is None:
                return spent, made
            made.append(step.decision.what)
            self.y.carry_out(step.decision)


def fifty(what: str, make: Callable[[], Yard], models: int, runs: int, renewed: bool) -> None:
    spans: list[float] = []
    looks: list[float] = []
    firsts: list[float] = []
    bases: list[float] = []
    bare: list[float] = []
    made: list[str] = []
    for _ in range(runs):
        y = make()
        live = live_of(y, models)
        series = Series(y, live, Beacons(live) if renewed else None)
        want(y, models)
        gc.collect()
        gc.disable()
        spent, made = series.serve()
        spans.append(spent - series.base_ms * (len(made) + 1))
        firsts.append(series.first_ms)
        bases.append(series.base_ms)
        looks.append(cpu_ms(series.ask))
        bare.append(cpu_ms(lambda y=y: [bare_places(y, 22 << 30) for _ in range(WANTED)]))
        gc.enable()
    print(f"{what}: {len(made)} decisions, such as: {made[-1] if made else 'none'}")
    beside = show("a bare loop over the cards, a model", bare, WANTED)
    show("a model more: its share of all passes, over the empty ones", spans, WANTED, beside)
    show("a pass with nothing to do before, once for each decision", bases)
    show("one look at all fifty afterwards", looks)
    show("once per leader: what is on each card", firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    y = build(1000, 5000, 0)
    live = live_of(y, 5000)
    index = StepIndex()
    now = T0 + timedelta(seconds=100)

    def ask() -> Step:
        return next_decision(y.world, live, (), now, counting_ids({}), SETTINGS, index)

    assert ask().decision is None
    bare_spans: list[float] = []
    spans: list[float] = []
    for _ in range(args.runs):
        run = bare_pass(y)
        bare_spans.append(cpu_ms(run))  # type: ignore[arg-type]
        index.dirty.update(y.world.models)
        spans.append(cpu_ms(ask))
    print("1,000 nodes x 8 cards, 5,000 models, everything placed")
    beside = show("a bare loop over the models", bare_spans)
    show("a pass, every model looked at", spans, beside=beside)
    show("a pass, nothing changed", [cpu_ms(ask) for _ in range(args.runs)])
    for renewed in (False, True):
        beacons = ", new beacons for each" if renewed else ""
        fifty(
            f"50 wanted, 4,000 cards in use, 4,000 free{beacons}",
            lambda: build(1000, 4000, WANTED),
            4000,
            args.runs,
            renewed,
        )
        fifty(
            f"50 wanted, 4,000 cards in use, only drains are left{beacons}",
            lambda: build(500, 4000, WANTED, held_gib=70),
            4000,
            args.runs,
            renewed,
        )

    def kept() -> Yard:
        y = build(500, 4000, WANTED, held_gib=70)
        for name in [f"model-{n:05d}" for n in range(4000)]:
            entry = y.world.models[name]
            scaled = replace(entry, scaling=replace(entry.scaling, min=1))
            y.append("model", (name,), ModelChanged(by="bench", fields=("scaling",)), scaled)
        return y

    fifty("50 wanted, 4,000 cards kept by their models' min", kept, 4000, 1, False)


if __name__ == "__main__":
    main()
