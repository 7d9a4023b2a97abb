"""Where a start goes, and the reasons when it goes nowhere."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.domain import placement
from controlplane.domain.decision import Live
from controlplane.domain.index import StepIndex
from controlplane.domain.placement import (
    Claims,
    Demand,
    NoNode,
    NoRoom,
    Placed,
    Verdict,
    Wait,
    place,
)
from controlplane.domain.rehearsal import rehearse
from controlplane.domain.scene import MOST_STATE_BYTES, Scene
from events.log import Broken
from events.subjects import event_subject
from schemas.commands import ModelLoad, NodeCordon
from schemas.model import Model, ModelChanged
from schemas.node import EngineInfo, NodeChanged
from schemas.record import Failures, Measured, Record, RecordMeasured
from schemas.replica import ReplicaStopped
from tests.support.worlds import GIB, Yard, counting_ids, model, profile, yard


def scene_of(y: Yard, frozen: str = "") -> Scene:
    index = StepIndex()
    index.sync(y.world)
    live: Live = y.live()
    return Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
        frozen=frozen,
    )


def placed(y: Yard, entry: Model, claimed: Sequence[tuple[str, str]] = ()) -> Verdict:
    if entry.name not in y.world.models:
        y.add(entry)
    claims = Claims(frozenset(claimed))
    return place(scene_of(y), Demand(model=entry, wanted_at=y.now), claims)


def loaded(y: Yard, *entries: Model) -> Yard:
    """These models run, were answered, and are past their residency."""
    y.add(*entries)
    for entry in entries:
        y.request(entry.name)
        y.until(lambda name=entry.name: y.ready(name), 20)
    y.advance(12)
    return y


def chosen(verdict: Verdict) -> tuple[str, str, int]:
    assert isinstance(verdict, Placed), verdict
    return verdict.node, verdict.card, verdict.rank


def test_a_free_card_comes_before_room_beside_others() -> None:
    y = loaded(yard(gpu0=8, gpu1=8), model("a", 1))
    assert chosen(placed(y, model("b", 1))) == ("n1", "gpu1", 2)


def test_room_beside_others_comes_before_draining() -> None:
    y = loaded(yard(gpu0=8, gpu1=8), model("a", 6), model("b", 3))
    assert chosen(placed(y, model("c", 4))) == ("n1", "gpu1", 3)


def test_an_exclusive_profile_takes_an_empty_card_only() -> None:
    y = loaded(yard(gpu0=8), model("a", 1))
    alone = model("b", profiles=[profile(gib=1, exclusive=True)])
    verdict = placed(y, alone)
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["a"]


def test_nobody_is_placed_beside_an_exclusive_replica() -> None:
    y = loaded(yard(gpu0=8), model("a", profiles=[profile(gib=1, exclusive=True)]))
    verdict = placed(y, model("b", 1))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["a"]


def test_inv_9_reasons_name_the_numbers() -> None:
    y = loaded(yard(gpu0=8), model("a", 6, minimum=1))
    verdict = placed(y, model("b", 4))
    assert isinstance(verdict, Wait)
    assert verdict.report.misses[0].reason == (
        "gpu0: needs 4.0 GiB, 2.0 GiB free; r-0001 is kept by the min of a"
    )
    too_big = placed(y, model("c", 9.2))
    assert isinstance(too_big, NoRoom)
    assert too_big.report.misses[0].reason == "gpu0: needs 9.2 GiB, has 8.0 GiB"
    assert too_big.report.counts == {"memory": 1}


def test_measured_memory_and_a_tenth_replace_what_the_profile_states() -> None:
    y = yard(gpu0=8).add(model("a", 1))
    y.append(
        "record",
        ("a",),
        RecordMeasured(replica="r", memory_bytes=5 * GIB, load_s=1),
        Record(
            model="a",
            incarnation="i-a",
            measured=(Measured(profile="p", card_kind="gpu", memory_bytes=5 * GIB),),
        ),
    )
    verdict = placed(y, model("a", 1))
    assert isinstance(verdict, Placed)
    assert verdict.memory_bytes == 5 * GIB * 110 // 100


def test_higher_priority_is_tried_first_at_the_same_rank() -> None:
    y = yard(gpu0=8, gpu1=8)
    profiles = [
        profile("low", priority=1, card=("n1/gpu0",)),
        profile("high", priority=2, card=("n1/gpu1",)),
    ]
    verdict = placed(y, model("a", profiles=profiles))
    assert isinstance(verdict, Placed)
    assert verdict.profile.name == "high"


def test_a_better_rank_beats_priority() -> None:
    y = loaded(yard(gpu0=8, gpu1=8), model("x", profiles=[profile(card=("n1/gpu1",))]))
    profiles = [
        profile("low", priority=1, card=("n1/gpu0",)),
        profile("high", priority=2, card=("n1/gpu1",)),
    ]
    verdict = placed(y, model("a", profiles=profiles))
    assert isinstance(verdict, Placed)
    assert (verdict.profile.name, verdict.rank) == ("low", 2)


def test_ties_go_by_place_in_the_node_then_least_recently_given_then_node() -> None:
    y = Yard()
    for node in ("n2", "n1"):
        y.node(node, {"b": 8, "a": 8})
    y.settle()
    assert chosen(placed(y, model("m", 1)))[:2] == ("n1", "b")
    y.request("m")
    y.until(lambda: y.ready("m"), 10)
    assert chosen(placed(y, model("n", 1)))[:2] == ("n2", "b")
    y.until(lambda: not y.items(), 200)
    assert chosen(placed(y, model("n", 1)))[:2] == ("n2", "b"), "n1/b was given more recently"


def test_a_pattern_names_the_card() -> None:
    y = yard(gpu0=8, gpu1=8)
    assert chosen(placed(y, model("a", profiles=[profile(card=("n*/gpu1",))])))[1] == "gpu1"
    elsewhere = placed(y, model("b", profiles=[profile(card=("n2/gpu0", "cpu"))]))
    assert isinstance(elsewhere, NoRoom)
    assert elsewhere.report.misses[0].reason == "gpu0: profile p wants n2/gpu0 or cpu"


def test_a_command_runs_only_where_the_node_allows_it() -> None:
    y = Yard().node("n1", allow_commands=False)
    y.settle()
    verdict = placed(y, model("a", profiles=[profile(engine="command", command=("x",))]))
    assert isinstance(verdict, NoRoom)
    assert "does not allow commands" in verdict.report.misses[0].reason


def test_an_engine_the_node_lacks_excludes_it() -> None:
    y = yard(gpu0=8)
    node = y.world.nodes["n1"]
    engines = (EngineInfo(name="vllm", version="1"),)
    y.append("node", ("n1",), NodeChanged(), replace(node, engines=engines))
    verdict = placed(y, model("a"))
    assert isinstance(verdict, NoRoom)
    assert "no engine llamacpp" in verdict.report.misses[0].reason


def test_a_model_with_adapters_goes_where_the_engine_loads_them() -> None:
    """A node's agent may be older than its engine: it runs models as before, and loads no adapters."""
    y = Yard().node("n1", {"gpu0": 8}).node("n2", {"gpu0": 4})
    y.settle()
    for node, loads in (("n1", False), ("n2", True)):
        engine = EngineInfo(name="vllm", version="1", card_kinds=("gpu",), adapters=loads)
        state = replace(y.world.nodes[node], engines=(engine,))
        y.append("node", (node,), NodeChanged(), state)
    ways = [profile("p", 2, engine="vllm")]
    assert chosen(placed(y, model("plain", profiles=ways)))[0] == "n1"
    served = model("served", profiles=ways, max_loaded_adapters=8)
    assert chosen(placed(y, served))[0] == "n2"
    assert placement.cards_possible(scene_of(y), served) == 1
    large = placed(
        y, model("large", profiles=[profile("p", 6, engine="vllm")], max_loaded_adapters=8)
    )
    assert isinstance(large, NoRoom)
    assert "gpu0: the vllm of n1 loads no adapters, and max_loaded_adapters is 8" in [
        miss.reason for miss in large.report.misses
    ]
    told = rehearse(scene_of(y), served)
    assert [fit.node for fit in told.fits] == ["n2"]
    assert "n1/gpu0: the vllm of n1 loads no adapters" in told.misses[0].reason


def test_a_cordoned_a_stopped_and_a_silent_node_are_no_candidates() -> None:
    for what, reason in (("cordon", "is cordoned"), ("silence", "is unreachable")):
        y = Yard().node("n1", {"gpu0": 8}).node("n2", {"gpu0": 1})
        y.settle()
        if what == "cordon":
            y.do(NodeCordon(node="n1"))
        else:
            y.fall_silent("n1")
            y.advance(40)
        verdict = placed(y, model("a", 4))
        assert isinstance(verdict, NoRoom)
        assert f"n1: {reason}" in [miss.reason for miss in verdict.report.misses]


def test_without_any_node_nothing_is_judged() -> None:
    assert isinstance(placed(Yard(), model("a")), NoNode)
    y = yard(gpu0=8).add(model("a"))
    frozen = place(
        scene_of(y, frozen="placement is frozen"), Demand(model=model("a"), wanted_at=y.now)
    )
    assert frozen == NoNode(reason="placement is frozen")


def test_a_refused_card_is_left_out_until_its_revision_changes() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a"))
    y.refuses.add("a")
    y.request("a")
    y.turn()
    assert [r.phase for r in y.world.replicas.values()] == ["refused", "refused"]
    assert {r.cards for r in y.world.replicas.values()} == {("gpu0",), ("gpu1",)}
    assert y.phase("a") == "waiting"
    assert "a" not in y.world.records, "no failure and no backoff"
    y.advance(30)
    assert len(y.world.replicas) == 2
    y.accept_again("a")
    y.until(lambda: y.ready("a"), 10)


def test_a_card_that_failed_last_comes_last_in_its_rank() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a"))
    failed = Failures(
        profile="p",
        node="n1",
        card="gpu0",
        revision="x",
        count=1,
        last_at=y.now,
        next_allowed_at=y.now,
    )
    y.append(
        "record",
        ("a",),
        RecordMeasured(replica="r", memory_bytes=0, load_s=0),
        Record(model="a", incarnation="i-a", failures=(failed,)),
    )
    assert chosen(placed(y, model("a")))[1] == "gpu1"
    y = loaded(yard(gpu0=8, gpu1=8), model("b", profiles=[profile(card=("n1/gpu1",))]))
    assert chosen(placed(y, model("a"))) == ("n1", "gpu0", 2)


def test_victims_are_without_requests_then_least_recently_used_then_by_id() -> None:
    y = loaded(yard(gpu0=8), model("a", 2), model("b", 2), model("c", 2))
    y.request("b", stream_s=0.1)
    y.advance(1)
    y.request("a", stream_s=100)
    verdict = placed(y, model("d", 4))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["c"]
    verdict = placed(y, model("e", 6))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["c", "b"]
    verdict = placed(y, model("f", 8))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["c", "b", "a"]


def test_no_more_victims_than_needed() -> None:
    y = loaded(yard(gpu0=8), model("small", 1), model("large", 5))
    verdict = placed(y, model("b", 7))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["large"]


def test_req_a9_replicas_at_min_are_no_victims() -> None:
    y = loaded(yard(gpu0=8), model("kept", 6, minimum=1))
    y.advance(60)
    verdict = placed(y, model("b", 6))
    assert isinstance(verdict, Wait)
    assert verdict.victims == ()
    assert len(verdict.waiting_for) == 1


def test_minimum_residency_protects_until_somebody_waited_too_long() -> None:
    y = yard(gpu0=8).add(model("a", 6), model("b", 6))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(1)
    scene = scene_of(y)
    fresh = place(scene, Demand(model=y.world.models["b"], wanted_at=y.now))
    assert isinstance(fresh, Wait)
    assert fresh.victims == ()
    assert fresh.look_at is not None
    assert y.now < fresh.look_at <= y.now + timedelta(seconds=10)
    long_ago = y.now - timedelta(seconds=31)
    starved = place(scene_of(y), Demand(model=y.world.models["b"], wanted_at=long_ago))
    assert isinstance(starved, Wait)
    assert len(starved.victims) == 1


def test_a_held_model_is_no_victim() -> None:
    y = yard(gpu0=8).add(model("a", 6))
    y.do(ModelLoad(model="a", for_s=3600))
    y.until(lambda: y.ready("a"), 10)
    y.advance(90)
    verdict = placed(y, model("b", 6))
    assert isinstance(verdict, Wait)
    assert verdict.victims == ()


def test_memory_others_wait_for_is_left_alone_but_not_where_they_never_fit() -> None:
    y = yard(gpu0=8, gpu1=2)
    small = model("s", 1)
    assert chosen(placed(y, small, claimed=[("n1", "gpu0")])) == ("n1", "gpu1", 2)
    alone = placed(y, model("t", 4), claimed=[("n1", "gpu0")])
    assert isinstance(alone, Wait)
    assert alone.victims == ()


def test_an_unanswered_item_counts_as_use() -> None:
    y = yard(gpu0=8).add(model("a", 6), model("b", 6))
    y.request("a")
    y.settle()
    assert y.world.cards[("n1", "gpu0")].leases == ()
    verdict = placed(y, y.world.models["b"])
    assert isinstance(verdict, Wait)
    assert verdict.waiting_for == ("r-0001",)


def test_memory_that_was_not_read_back_counts_as_use() -> None:
    y = loaded(yard(gpu0=8), model("a", 6))
    replica = y.world.replicas[y.ready("a")[0]]
    y._tell(replace(replica, phase="stopped"), ReplicaStopped())
    y.settle()
    assert y.items() == []
    verdict = placed(y, model("b", 6))
    assert isinstance(verdict, Wait)
    assert verdict.waiting_for == (replica.id,)


def test_a_profile_of_several_cards_needs_a_node_that_has_them() -> None:
    y = yard(gpu0=8, gpu1=8)
    verdict = placed(y, model("a", profiles=[profile(cards=3)]))
    assert isinstance(verdict, NoRoom)
    assert "n1: needs 3 cards at once, 2 of 2 would do" in verdict.report.misses[0].reason


def test_a_victim_whose_demand_cannot_be_ended_is_left_alone() -> None:
    y = loaded(yard(gpu0=8), model("a", 6), model("z", 1))
    y._seq += 1
    y.world.apply(Broken(seq=y._seq, subject=event_subject("activation", "a", "any"), why="junk"))
    y.add(model("b", 6))
    y.request("b")
    y.advance(5)
    assert y.phase("b") == "waiting"
    assert all(item.stop is None for _, item in y.items())


def test_one_without_requests_goes_before_one_that_was_used_less_recently() -> None:
    y = loaded(yard(gpu0=8), model("a", 3), model("b", 3))
    y.request("a", stream_s=900)
    y.advance(30)
    y.request("b", stream_s=0.1)
    y.advance(1)
    verdict = placed(y, model("c", 4))
    assert isinstance(verdict, Wait)
    assert [v.item.launch.model for v in verdict.victims] == ["b"]


def test_a_second_replica_that_loads_is_no_victim_of_others() -> None:
    y = loaded(yard(gpu0=4, gpu1=8), model("a", 4, maximum=2))
    [(_, first)] = y.items("a")
    y.engine("a").load_s = 900
    y.do(ModelLoad(model="a"))
    y.advance(20)
    assert len(y.items("a")) == 2
    verdict = placed(y, model("b", 8))
    assert isinstance(verdict, Wait)
    assert verdict.victims == ()
    assert first.replica not in verdict.waiting_for


def test_a_full_plan_takes_no_more_and_the_refusal_says_so() -> None:
    y = Yard().node("n1", {"gpu0": 80})
    y.settle()
    long = [model(f"m{n:02}", profiles=[profile(gib=1, args=("x" * 7000,))]) for n in range(40)]
    y.add(*long)
    for entry in long:
        y.request(entry.name)
        y.turn()
    y.advance(5)
    assert len(msgspec.json.encode(y.world.plans["n1"])) < MOST_STATE_BYTES
    assert y.phase("m00") == "ready"
    refused = y.activation("m39")
    assert (refused.phase, refused.code) == ("refused", "no_capacity")
    assert "n1: its plan is full" in refused.reason
    y.add(model("small", 1))
    y.request("m39")
    y.turn()
    y.advance(70)
    assert y.step().stuck == (), "and the others are stopped when they are idle"
    assert y.ready("m00") == []


def test_a_state_that_fits_no_event_stops_its_own_model_only() -> None:
    y = Yard().node("n1", {"gpu0": 80})
    y.add(model("big", profiles=[profile(gib=1, args=("x" * 250_000,))]), model("a", 1))
    y.request("big")
    y.request("a")
    y.until(lambda: y.ready("a"), 10, "others go on")
    assert y.started("big") == 0


def test_those_who_wait_are_not_judged_again_for_every_one_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 8, minimum=1), model("b", 8, minimum=1))
    y.compares = True
    y.advance(15)
    y.add(*(model(f"w{n:02}", 8) for n in range(12)))
    for n in range(10):
        y.request(f"w{n:02}")
        y.turn()
    y.compares = False
    judged: list[str] = []
    judge = placement._place

    def counted(scene: Scene, demand: Demand, *rest: Any) -> Any:
        judged.append(demand.model.name)
        return judge(scene, demand, *rest)

    monkeypatch.setattr(placement, "_place", counted)
    y.request("w10")
    y.turn()
    assert y.phase("w10") == "waiting"
    assert set(judged) == {"w10"}
    judged.clear()
    y.compares = True
    y.append("model", ("a",), ModelChanged(by="test", fields=("scaling",)), model("a", 8))
    y.until(lambda: y.ready("w00"), 20, "a change of what they wait for is seen")
