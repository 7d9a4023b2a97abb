"""Measures one reconcile pass of a large yard: 1,000 nodes x 8 cards, 5,000 models, everything placed.

Prints milliseconds, median of several runs; it asserts nothing. Targets are in the performance notes:
a pass under 50 ms, at most 0.5 ms per model to place, afterwards in proportion to what changed.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

from msgspec.structs import replace

from controlplane.domain.decision import AgentLive, GatewayLive, Live
from controlplane.domain.index import StepIndex
from controlplane.domain.revision import profile_revision
from controlplane.domain.step import Step, next_decision
from events.log import StoredCommand
from schemas.activation import Activation, ActivationReady
from schemas.card import Card, CardLeased, Lease
from schemas.commands import Command, ModelActivate
from schemas.model import ModelAdded
from schemas.node import CardInfo, Node, NodeStarted, NodeState, NodeStateJoined
from schemas.plan import Launch, Plan, PlanChanged, PlanItem
from schemas.record import Measured, Record, RecordMeasured
from schemas.replica import Replica, ReplicaReady
from tests.support.worlds import GIB, SETTINGS, T0, Yard, counting_ids, model

CARDS = 8


def build(nodes: int, models: int, cold: int, held_gib: int = 22) -> Yard:
    """Everything placed and idle clocks running; `cold` models more have no replica.

    Each replica holds `held_gib` of the 80 GiB of its card.
    """
    held = held_gib * GIB
    y = Yard()
    for n in range(nodes):
        node = f"n{n:04d}"
        infos = tuple(
            CardInfo(id=f"gpu{c}", kind="gpu", memory_bytes=80 * GIB) for c in range(CARDS)
        )
        y.append(
            "node", (node,), NodeStarted(), Node(id=node, running=True, started_at=T0, cards=infos)
        )
        y.append("nodestate", (node,), NodeStateJoined(), NodeState(node=node, since=T0))
    items: dict[str, list[PlanItem]] = {}
    leases: dict[tuple[str, str], list[Lease]] = {}
    for m in range(models + cold):
        name = f"model-{m:05d}"
        entry = model(name, 20, idle_s=900)
        y.append("model", (name,), ModelAdded(by="bench"), replace(entry, order=m))
        if m >= models:
            continue
        node, card = f"n{m % nodes:04d}", f"gpu{(m // nodes) % CARDS}"
        id_ = f"r-{m:010d}"
        revision = profile_revision(entry, entry.profiles[0])
        launch = Launch(
            model=name,
            incarnation=entry.incarnation,
            profile="p",
            revision=revision,
            engine="llamacpp",
        )
        items.setdefault(node, []).append(
            PlanItem(
                replica=id_,
                launch=launch,
                cards=(card,),
                memory_bytes=held,
                decided_at=T0,
                cause="bench",
            )
        )
        leases.setdefault((node, card), []).append(
            Lease(holder=id_, memory_bytes=held, fence=1, since=T0)
        )
        y.append(
            "replica",
            (node, id_),
            ReplicaReady(load_s=8.0),
            Replica(
                id=id_,
                node=node,
                model=name,
                incarnation=entry.incarnation,
                profile="p",
                revision=revision,
                engine="llamacpp",
                phase="ready",
                since=T0,
                epoch=1,
                cards=(card,),
                card_kind="gpu",
                memory_bytes=held,
                started_at=T0,
                ready_at=T0,
                was_ready=True,
                load_s=8.0,
                measured_memory_bytes=20 * GIB,
            ),
        )
        y.append(
            "record",
            (name,),
            RecordMeasured(replica=id_, memory_bytes=20 * GIB, load_s=8.0),
            Record(
                model=name,
                incarnation=entry.incarnation,
                measured=(
                    Measured(profile="p", card_kind="gpu", memory_bytes=20 * GIB, load_s=(8.0,)),
                ),
                counted=(id_,),
            ),
        )
        y.append(
            "activation",
            (name, "any"),
            ActivationReady(replica=id_),
            Activation(
                model=name,
                incarnation=entry.incarnation,
                phase="ready",
                wanted_at=T0,
                since=T0,
                replica=id_,
                node=node,
                profile="p",
            ),
        )
    for n in range(nodes):
        node = f"n{n:04d}"
        y.append("plan", (node,), PlanChanged(), Plan(node=node, items=tuple(items.get(node, ()))))
        for c in range(CARDS):
            y.append(
                "card",
                (node, f"gpu{c}"),
                CardLeased(holder="", memory_bytes=0, fence=1),
                Card(
                    node=node,
                    id=f"gpu{c}",
                    kind="gpu",
                    memory_bytes=80 * GIB,
                    rev=1,
                    leases=tuple(leases.get((node, f"gpu{c}"), ())),
                ),
            )
    y.log.clear()
    return y


def live_of(y: Yard, models: int) -> Live:
    use = {f"model-{m:05d}": 5.0 for m in range(models)}
    return Live(
        leading_for_s=3600,
        gateways=tuple(
            GatewayLive(
                gateway=f"gw{g}",
                incarnation="1",
                age_s=0.2,
                position=1,
                last_use_age_s=use,
                inflight={f"r-{m:010d}": 1 for m in range(0, models, 10)},
            )
            for g in range(2)
        ),
        agents=tuple(
            AgentLive(
                node=node, epoch=1, age_s=1.0, heard=100, heard_for_s=500.0, trusted_for_s=490.0
            )
            for node in y.world.nodes
        ),
    )


def timed(what: str, runs: int, prepare: Callable[[], Callable[[], object]]) -> float:
    spans: list[float] = []
    for _ in range(runs):
        run = prepare()
        gc.collect()
        begin = time.perf_counter()
        run()
        spans.append((time.perf_counter() - begin) * 1000)
    median = statistics.median(spans)
    print(f"{what:<58} {median:9.3f} ms   ({min(spans):.3f} .. {max(spans):.3f})")
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--models", type=int, default=5000)
    parser.add_argument("--cold", type=int, default=20)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    y = build(args.nodes, args.models, args.cold)
    live = live_of(y, args.models)
    now = T0 + timedelta(seconds=100)
    index = StepIndex()

    def ask(commands: tuple[StoredCommand, ...] = ()) -> Step:
        return next_decision(y.world, live, commands, now, counting_ids(), SETTINGS, index)

    print(f"{args.nodes} nodes x {CARDS} cards, {args.models} models placed, {args.cold} cold")
    first = ask()
    assert first.decision is None, first.decision

    def afresh() -> Callable[[], object]:
        return lambda: next_decision(y.world, live, (), now, counting_ids(), SETTINGS, StepIndex())

    def all_again() -> Callable[[], object]:
        index.dirty.update(y.world.models)
        return ask

    def one_changed() -> Callable[[], object]:
        y.world.touched.append(("replica", ("n0000", "r-0000000000")))
        return ask

    def place_one() -> Callable[[], object]:
        name = f"model-{args.models:05d}"
        body = ModelActivate(model=name)
        stored = StoredCommand(
            seq=1,
            subject="",
            actor="gw",
            name="model.activate",
            stored_at=now,
            command=Command(id="c", body=body),
        )

        def run() -> None:
            step = ask((stored,))
            assert step.decision is not None
            assert step.decision.changes[-1].event.__struct_config__.tag == "activation.placing"

        return run

    timed("a new leader's first pass (index built)", args.runs, afresh)
    timed("one pass, every model looked at", args.runs, all_again)
    timed("one pass, nothing changed", args.runs, lambda: ask)
    timed("one pass, one replica changed", args.runs, one_changed)
    timed("one cold model placed", args.runs, place_one)


if __name__ == "__main__":
    main()
