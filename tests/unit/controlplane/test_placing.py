"""The dry run of placement: it names what would come of a request, with every candidate, and changes nothing."""

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.domain.placement import POLICY_VERSION
from controlplane.placing import NotThere, PlaceAsked, Placer
from controlplane.projections.readmodel import NotSynced
from schemas.api import PlaceView
from schemas.card import Card, CardClaimed, Claim
from schemas.model import Model
from schemas.record import Quarantine, Record, RecordQuarantined
from tests.support.aio import run
from tests.support.worlds import T0, Yard, counting_ids, model, profile, yard


def placer(y: Yard, *, synced: bool = True) -> Placer:
    return Placer(
        world=lambda: y.world,
        live=y.live,
        synced=lambda: synced,
        ids=counting_ids(),
        settings=y.settings,
        now=lambda: y.now,
    )


def asked(y: Yard, name: str, card: str | None = None) -> PlaceView:
    before = (y.world.position, dict(y.world.activations), dict(y.world.plans))
    found = run(placer(y).place(PlaceAsked(model=name, card=card)))
    assert (y.world.position, y.world.activations, y.world.plans) == before, "it changed something"
    assert found.position == y.world.position
    assert found.policy_version == POLICY_VERSION
    return found


def ranks(found: PlaceView) -> list[tuple[str, int | None]]:
    return [(f"{one.node}/{one.cards[0]}", one.rank) for one in found.candidates]


def with_claim(y: Yard, card: str) -> None:
    state = y.world.cards.get(("n1", card)) or Card(
        node="n1", id=card, kind="gpu", memory_bytes=8 * 1024**3, rev=1
    )
    claim = Claim(id="c-1", name="quake", kind="game", since=y.now)
    state = replace(state, claims=(claim,), rev=state.rev + 1)
    y.append("card", ("n1", card), CardClaimed(claim="c-1", name="quake"), state)


def test_inv_9_every_candidate_has_its_rank_or_the_reason_against_it() -> None:
    y = yard(gpu0=8, gpu1=2)
    y.add(model("a", 4))
    found = asked(y, "a")
    assert found.sentence.startswith("a would go to n1/gpu0 (rank 2, p): ")
    assert ranks(found)[:2] == [("n1/gpu0", 2), ("n1/gpu1", None)]
    small = found.candidates[1]
    assert "needs" in small.reason
    assert "GiB" in small.reason


def test_req_d13_a_card_with_a_claim_comes_after_the_free_one() -> None:
    y = yard(gpu0=8, gpu1=8)
    y.add(model("a", 4))
    with_claim(y, "gpu0")
    found = asked(y, "a")
    assert ranks(found) == [("n1/gpu1", 2), ("n1/gpu0", 5)]
    assert "quake" in " ".join((found.candidates[1].reason, *found.candidates[1].waiting_for))


def test_a_request_for_a_kept_card_would_wait() -> None:
    y = yard(gpu0=8, gpu1=8)
    y.add(model("a", 4))
    with_claim(y, "gpu0")
    found = asked(y, "a", "n1/gpu0")
    assert found.scope == "n1~gpu0"
    assert found.sentence.startswith("a would wait for n1/gpu0: ")
    assert ranks(found) == [("n1/gpu0", 5)]


def test_a_model_that_is_up_is_said_to_answer() -> None:
    y = yard(gpu0=8, gpu1=8)
    y.add(model("a", 4))
    y.request("a")
    y.until(lambda: bool(y.ready("a")), 20)
    replica = next(iter(y.world.plans["n1"].items)).replica
    assert asked(y, "a").sentence.startswith(f"a is up: {replica} answers")
    other = "gpu1" if "gpu0" in y.world.replicas[replica].cards else "gpu0"
    assert f"n1/{other}" in asked(y, "a", f"n1/{other}").sentence


def test_a_model_on_its_way_is_said_to_be_joined() -> None:
    y = yard(gpu0=8, gpu1=8)
    y.add(model("a", 4))
    y.request("a")
    y.turn()
    assert asked(y, "a").sentence.startswith("a is on its way: r-0001 on n1/gpu0")
    assert "on its way" not in asked(y, "a", "n1/gpu1").sentence


def test_at_max_a_replica_elsewhere_makes_way_first() -> None:
    y = yard(gpu0=8, gpu1=8)
    y.add(model("a", 4, idle_s=0))
    y.request("a")
    y.until(lambda: bool(y.ready("a")), 20)
    y.advance(15)
    said = asked(y, "a", "n1/gpu1").sentence
    assert said.startswith("a would go to n1/gpu1 (rank 2, p) once r-0001 made way (max 1): ")


def test_who_is_in_line_is_judged_behind_those_before_it_and_not_behind_those_after() -> None:
    y = yard(gpu0=8)
    y.add(model("x", 5), model("large", 7), model("small", 2))
    y.request("x")
    y.until(lambda: bool(y.ready("x")), 20)
    y.request("large")
    y.turn()
    y.advance(1)
    y.request("small")
    y.turn()
    assert (y.phase("large"), y.phase("small")) == ("waiting", "waiting")
    assert asked(y, "small").candidates[0].reason.endswith("others wait for it")
    assert "others wait" not in asked(y, "large").candidates[0].reason


def test_what_is_off_or_given_up_says_so() -> None:
    y = yard(gpu0=8)
    y.add(model("a", 4, maximum=0), model("b", 4))
    assert asked(y, "a").sentence == "a is off and no request starts it; if it were on:"
    given_up = Quarantine(since=T0, until=y.now.replace(year=2030), reason="it failed five times")
    record = Record(model="b", incarnation="i-b", quarantined=given_up)
    y.append("record", ("b",), RecordQuarantined(until=given_up.until), record)
    said = asked(y, "b").sentence
    assert said == "b is not started now: it failed five times [model_quarantined]"


def test_what_fits_nowhere_says_why() -> None:
    y = yard(gpu0=8)
    y.add(model("a", 100))
    found = asked(y, "a")
    assert found.sentence.startswith("a fits nowhere: ")
    assert "110" in found.sentence or "100" in found.sentence
    assert ranks(found) == [("n1/gpu0", None)]


def test_an_alias_is_as_good_as_the_name() -> None:
    y = yard(gpu0=8)
    y.add(model("a", 4, aliases=("x",)))
    assert asked(y, "x").model == "a"


def test_what_is_not_there_is_named() -> None:
    y = yard(gpu0=8)
    y.add(model("a", 4))
    with pytest.raises(NotThere, match="no model 'b'"):
        asked(y, "b")
    for card in ("n1/gpu7", "n2/gpu0", "gpu0", ""):
        with pytest.raises(NotThere, match="no card"):
            asked(y, "a", card)


def test_a_control_plane_that_has_not_read_the_log_does_not_guess() -> None:
    y = yard(gpu0=8)
    with pytest.raises(NotSynced):
        run(placer(y, synced=False).place(PlaceAsked(model="a")))


def test_the_order_of_profiles_and_nodes_is_one_total_order() -> None:
    y = Yard().node("n2", {"gpu0": 8}).node("n1", {"gpu0": 8})
    y.settle()
    two: Model = model("a", profiles=[profile("fast", 4, priority=200), profile("slow", 4)])
    y.add(two)
    first = asked(y, "a")
    again = asked(y, "a")
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first.candidates[0].profile == "fast"
    assert {one.node for one in first.candidates} == {"n1", "n2"}
