"""Sets of cards for one replica: of one node, ranked as their worst card."""

from typing import Any

from msgspec.structs import replace

from controlplane.domain.placement import NoRoom, Placed, Wait
from schemas.card import CardMeasured
from schemas.model import Model
from schemas.node import NodeChanged
from schemas.record import Measured, Record, RecordMeasured
from tests.support.placing import VM, on, running, scene_of, verdict
from tests.support.worlds import GIB, Yard, model, profile, yard


def several(count: int, gib: float = 4, **fields: Any) -> Model:
    return model("set", profiles=[profile(gib=gib, cards=count, **fields)])


def test_a_set_is_the_best_cards_of_one_node_and_ranks_as_the_worst() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8)
    running(y, "beside", "gpu0", 2)
    found = verdict(y, several(2))
    assert isinstance(found, Placed)
    assert (found.cards, found.rank) == (("gpu1", "gpu2"), 2)
    assert set(found.card_revs) == {"gpu1", "gpu2"}
    three = verdict(y, replace(several(3), name="three"))
    assert isinstance(three, Placed)
    assert (set(three.cards), three.rank) == ({"gpu0", "gpu1", "gpu2"}, 3)


def test_the_cards_of_a_set_are_never_of_two_nodes() -> None:
    y = Yard().node("n1", {"gpu0": 8}).node("n2", {"gpu0": 8})
    y.settle()
    found = verdict(y, several(2))
    assert isinstance(found, NoRoom)
    assert found.report.misses[0].reason == "n1: needs 2 cards at once, 1 of 1 would do"


def test_one_card_comes_before_several_of_the_same_rank() -> None:
    y = yard(gpu0=8, gpu1=8)
    entry = model("m", profiles=[profile("pair", 4, cards=2), profile("one", 4)])
    found = verdict(y, entry)
    assert isinstance(found, Placed)
    assert found.profile.name == "one"


def test_memory_is_per_card_and_the_item_takes_both() -> None:
    y = yard(gpu0=8, gpu1=8).add(several(2, 5))
    y.request("set")
    y.settle()
    [(_, item)] = y.items("set")
    assert (item.cards, item.memory_bytes) == (("gpu0", "gpu1"), 5 * GIB)
    book = scene_of(y).index.book(y.world)
    assert [book.rooms[("n1", c)].free_bytes for c in item.cards] == [3 * GIB, 3 * GIB]


def test_a_set_drains_on_all_its_cards_and_spares_the_min_of_a_model() -> None:
    y = yard(gpu0=8, gpu1=8)
    one = running(y, "x", "gpu0", 8)
    other = running(y, "z", "gpu1", 8)
    found = verdict(y, several(2))
    assert isinstance(found, Wait)
    assert {v.item.replica for v in found.victims} == {one, other}
    assert found.claimed == {("n1", "gpu0"), ("n1", "gpu1")}
    twice = yard(gpu0=8, gpu1=8)
    twice.add(model("two", 8, minimum=2, maximum=2, idle_s=0))
    twice.until(lambda: len(twice.ready("two")) == 2, 30)
    twice.advance(70)
    left = replace(twice.world.models["two"].scaling, min=1)
    twice.add(replace(twice.world.models["two"], scaling=left))
    kept = verdict(twice, several(2))
    assert isinstance(kept, Wait)
    assert kept.victims == (), "one of the two has to stay"
    assert kept.report.misses[0].victims == (), "and the other is not stopped for nothing"


def test_a_card_that_was_asked_for_is_in_the_set() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8)
    found = verdict(y, several(2), "n1~gpu2")
    assert isinstance(found, Placed)
    assert set(found.cards) == {"gpu0", "gpu2"}


def test_a_set_with_a_kept_card_waits_for_it() -> None:
    y = on(yard(gpu0=8, gpu1=8), "gpu1", vm=VM)
    found = verdict(y, several(2))
    assert isinstance(found, Wait)
    assert (found.kept, found.waiting_for) == (True, ("vm windows",))


def test_a_refused_set_is_tried_again_when_one_of_its_cards_changed() -> None:
    y = yard(gpu0=8, gpu1=8).add(several(2))
    y.refuses.add("set")
    y.request("set")
    y.turn()
    assert [r.phase for r in y.world.replicas.values()] == ["refused"]
    y.advance(5)
    assert len(y.world.replicas) == 1, "nothing changed there"
    y.refuses.clear()
    on(y, "gpu0")
    y.until(lambda: y.ready("set"), 10, "that card may be what was missing")


def test_a_set_on_gpus_is_given_what_it_was_measured_to_need_there() -> None:
    y = Yard().node("n1", {"gpu0": 8, "gpu1": 8, "cpu": 8})
    node = y.world.nodes["n1"]
    infos = tuple(replace(c, kind="cpu") if c.id == "cpu" else c for c in node.cards)
    y.append("node", ("n1",), NodeChanged(fields=("cards",)), replace(node, cards=infos))
    y._card(replace(y.world.cards[("n1", "cpu")], kind="cpu"), CardMeasured(used_bytes=0))
    y.settle()
    y.add(several(2, 2, card=("gpu",)))
    used = Measured(profile="p", card_kind="gpu", memory_bytes=10 * GIB)
    known = Record(model="set", incarnation="i-set", measured=(used,))
    y.append("record", ("set",), RecordMeasured(replica="r-0", memory_bytes=1, load_s=1.0), known)
    found = verdict(y, several(2, 2, card=("gpu",)))
    assert isinstance(found, Placed)
    assert (found.cards, found.memory_bytes) == (("gpu0", "gpu1"), 5 * GIB * 11 // 10)
