"""Demands for one card and for any card of the same model, side by side, on the simulated yard."""

from msgspec.structs import replace

from schemas.commands import ModelActivate
from schemas.model import ModelChanged
from tests.support.parking import ParkingYard, parking_yard
from tests.support.worlds import GIB, model, profile


def asks_for(y: ParkingYard, name: str, card: str) -> None:
    y.send(ModelActivate(model=name, scope=f"n1~{card}"), actor="gateway")


def cards_of(y: ParkingYard, name: str) -> list[str]:
    return [card for id_ in y.ready(name) for card in y.world.replicas[id_].cards]


def on_gpu1(y: ParkingYard, name: str) -> str:
    """The model answers there, was answered, and is past its residency; its replica."""
    asks_for(y, name, "gpu1")
    y.until(lambda: y.ready(name), 10)
    y.last_use[name] = y.now
    y.advance(15)
    assert cards_of(y, name) == ["gpu1"]
    return y.ready(name)[0]


def test_req_d18_nobody_leaves_another_card_for_one_that_is_kept() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(model("a", 6, idle_s=0))
    running = on_gpu1(y, "a")
    y.claim("n1", "gpu0")
    asks_for(y, "a", "gpu0")
    y.advance(60, by=1)
    waiting = y.world.activations[("a", "n1~gpu0")]
    assert (waiting.phase, waiting.kept) == ("waiting", True)
    assert y.ready("a") == [running], "whoever asks for any card is answered as before"
    assert y.started("a") == 1
    y.end_claim("n1", "gpu0")
    y.until(lambda: cards_of(y, "a") == ["gpu0"], 60)


def test_req_d2_a_model_kept_at_its_max_moves_to_the_card_that_is_asked_for_and_stays() -> None:
    y = parking_yard(gpu0=8, gpu1=8, gpu2=8).add(
        model("a", 6, minimum=1, idle_s=0), model("b", 6, idle_s=0)
    )
    y.claim("n1", "gpu0")
    y.until(lambda: cards_of(y, "a") == ["gpu1"], 10)
    y.end_claim("n1", "gpu0")
    asks_for(y, "b", "gpu0")
    y.until(lambda: y.ready("b"), 10)
    y.advance(100, by=5)
    asks_for(y, "a", "gpu0")
    y.until(lambda: cards_of(y, "a") == ["gpu0"], 60, "its min is kept there from now on")
    assert y.started("a") == 2, "and was not started elsewhere in between"
    y.advance(120, by=2)
    assert (cards_of(y, "a"), y.started("a")) == (["gpu0"], 2)


def test_inv_5_a_kept_card_somebody_asks_for_does_not_keep_min_from_running_elsewhere() -> None:
    y = parking_yard(gpu0=8, gpu1=8)
    y.claim("n1", "gpu0")
    y.lease("n1", "gpu1", pinned=True)
    y.add(model("a", 6, minimum=1, idle_s=0))
    y.turn()
    asks_for(y, "a", "gpu0")
    y.turn()
    y.end_lease(y.world.cards[("n1", "gpu1")].leases[0].holder)
    y.until(lambda: cards_of(y, "a") == ["gpu1"], 10)
    assert y.phase("a", "n1~gpu0") == "waiting"


def test_scn_a15_an_old_revision_serves_on_while_the_card_of_the_new_one_is_kept() -> None:
    entry = model("a", profiles=[profile(gib=6, card=("n1/gpu1",))], idle_s=0)
    y = parking_yard(gpu0=8, gpu1=8).add(entry)
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    y.advance(15)
    [old] = y.ready("a")
    y.claim("n1", "gpu0")
    moved = replace(entry, profiles=(profile(gib=6, card=("n1/gpu0",)),))
    y.append("model", ("a",), ModelChanged(by="t", fields=("profiles",)), moved)
    y.advance(30)
    assert y.ready("a") == [old], "its end would give the new one nothing"
    y.end_claim("n1", "gpu0")
    y.until(lambda: cards_of(y, "a") == ["gpu0"], 60)


def test_a_model_that_waits_behind_a_pinned_part_keeps_nobody_from_the_rest_of_the_card() -> None:
    y = parking_yard(gpu0=8).add(model("large", 7), model("small", 2))
    y.lease("n1", "gpu0", pinned=True, memory_bytes=4 * GIB)
    y.request("large")
    y.turn()
    assert (y.phase("large"), y.activation("large").kept) == ("waiting", True)
    y.request("small")
    y.until(lambda: y.ready("small"), 10, "what large can never have is nobody else's wait")


def test_a_set_that_waits_for_a_kept_card_leaves_the_free_one_to_others() -> None:
    pair = model("pair", profiles=[profile(gib=4, cards=2)])
    y = parking_yard(gpu0=8, gpu1=8).add(pair, model("one", 4))
    y.claim("n1", "gpu0")
    y.request("pair")
    y.turn()
    assert (y.phase("pair"), y.activation("pair").kept) == ("waiting", True)
    y.advance(1)
    y.request("one")
    y.until(lambda: cards_of(y, "one") == ["gpu1"], 10)


def test_a_set_for_a_kept_card_waits_for_it_although_others_would_do() -> None:
    pair = model("pair", profiles=[profile(gib=4, cards=2)])
    y = parking_yard(gpu0=8, gpu1=8, gpu2=8).add(pair)
    y.claim("n1", "gpu0")
    asks_for(y, "pair", "gpu0")
    y.turn()
    waiting = y.world.activations[("pair", "n1~gpu0")]
    assert (waiting.phase, waiting.kept) == ("waiting", True)
    assert y.items() == []


def test_a_card_is_found_by_its_scope_whatever_its_node_is_called() -> None:
    y = parking_yard(gpu0=8)
    y.node("rack~1", {"gpu~0": 8})
    y.settle()
    y.add(model("a", 4), model("b", 4))
    y.send(ModelActivate(model="a", scope="rack~1~gpu~0"), actor="gateway")
    y.until(lambda: cards_of(y, "a") == ["gpu~0"], 10)
    assert y.phase("a", "rack~1~gpu~0") == "ready"
    y.send(ModelActivate(model="b", scope="rack~1~gpu7"), actor="gateway")
    y.settle()
    refused = y.world.activations[("b", "rack~1~gpu7")]
    assert refused.reason == "rack~1 has no card gpu7; it has gpu~0"
