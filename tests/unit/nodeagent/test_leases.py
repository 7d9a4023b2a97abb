"""The ledger of a node's cards by value."""

from datetime import UTC, datetime, timedelta

from nodeagent.domain.leases import (
    Granted,
    NoRoom,
    claim,
    conform,
    gib,
    newer,
    parked_to_evict,
    release,
    reserve,
    returning,
)
from schemas.card import Card, Lease
from schemas.cardstate import held_bytes
from schemas.node import CardInfo
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_held

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def card(id: str = "gpu0", memory_gib: float = 8, **fields) -> Card:
    given = {"node": "n1", "kind": "gpu", "rev": 3, **fields}
    return Card(id=id, memory_bytes=int(memory_gib * GIB), **given)


def granted(cards: dict[str, Card], holder: str, wanted: list[str], memory_gib: float) -> Granted:
    answer = reserve(cards, holder, wanted, int(memory_gib * GIB), NOW, {})
    assert isinstance(answer, Granted), answer
    return answer


def test_a_grant_raises_the_revision_and_takes_it_as_its_fence():
    (after,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    assert after.rev == 4
    assert [(x.holder, x.memory_bytes, x.fence) for x in after.leases] == [("r-1", 5 * GIB, 4)]


def test_inv_9_a_refusal_names_every_card_without_room_with_its_numbers():
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    cards = {"gpu0": one, "gpu1": card("gpu1", 2)}
    answer = reserve(cards, "r-2", ["gpu0", "gpu1"], 4 * GIB, NOW, {})
    assert answer == NoRoom(
        reason="gpu0: needs 4.0 GiB, 3.0 GiB free of 8.0 GiB;"
        " gpu1: needs 4.0 GiB, 2.0 GiB free of 2.0 GiB",
        card_revs={"gpu0": 4, "gpu1": 3},
    )


def test_several_cards_are_granted_together_or_not_at_all():
    cards = {"gpu0": card(), "gpu1": card("gpu1", 2)}
    assert isinstance(reserve(cards, "r-1", ["gpu0", "gpu1"], 4 * GIB, NOW, {}), NoRoom)
    both = granted(cards, "r-1", ["gpu0", "gpu1"], 2).cards
    assert [c.id for c in both] == ["gpu0", "gpu1"]


def test_a_card_that_does_not_exist_is_refused_at_revision_0():
    answer = reserve({}, "r-1", ["gpu7"], GIB, NOW, {})
    assert answer == NoRoom(reason="gpu7: no such card on this node", card_revs={"gpu7": 0})
    assert isinstance(reserve({"gpu0": card()}, "r-1", [], GIB, NOW, {}), NoRoom)


def test_a_holder_that_uses_more_than_it_reserved_counts_with_what_it_uses():
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 2).cards
    assert held_bytes(one, {}) == 2 * GIB
    assert held_bytes(one, {"r-1": 6 * GIB}) == 6 * GIB
    assert isinstance(
        reserve({"gpu0": one}, "r-2", ["gpu0"], 3 * GIB, NOW, {"r-1": 6 * GIB}), NoRoom
    )


def test_asking_again_for_the_same_holder_changes_nothing():
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    assert granted({"gpu0": one}, "r-1", ["gpu0"], 5).cards == (one,)


def test_memory_on_its_way_back_is_not_given_again_before_it_is_released():
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    one = returning(one, "r-1")
    assert one.leases[0].returning
    assert isinstance(reserve({"gpu0": one}, "r-2", ["gpu0"], 5 * GIB, NOW, {}), NoRoom)
    free = release(one, "r-1")
    assert free is not None
    assert (free.leases, free.rev) == ((), 5)
    granted({"gpu0": free}, "r-2", ["gpu0"], 5)


def test_a_lease_ends_once():
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    free = release(one, "r-1")
    assert free is not None
    assert release(free, "r-1") is None


def test_an_adopted_engine_keeps_its_place_even_on_a_full_card():
    full = claim(card(memory_gib=1), "r-1", 3 * GIB, NOW)
    assert full.leases[0].memory_bytes == 3 * GIB
    assert claim(full, "r-1", 3 * GIB, NOW) == full
    assert isinstance(reserve({"gpu0": full}, "r-2", ["gpu0"], 1, NOW, {}), NoRoom)


def test_a_changed_inventory_keeps_leases_and_revision():
    info = CardInfo(id="gpu0", kind="gpu", memory_bytes=4 * GIB)
    assert conform(None, info, "n1").rev == 0
    (one,) = granted({"gpu0": card()}, "r-1", ["gpu0"], 5).cards
    after = conform(one, info, "n1")
    assert (after.memory_bytes, after.rev, after.leases) == (4 * GIB, one.rev, one.leases)


def test_of_journal_and_log_the_later_revision_counts_and_the_journal_on_a_tie():
    old, new = card(rev=3), card(rev=4)
    assert newer(old, new) == new
    assert newer(new, old) == new
    assert newer(None, old) == old
    kept = card(rev=3, used_bytes=5)
    assert newer(kept, old) == kept


def test_numbers_are_written_as_a_person_reads_them():
    assert gib(int(9.2 * GIB)) == "9.2 GiB"
    assert gib(256 * MIB) == "256 MiB"


def test_of_a_card_that_is_gone_nothing_can_be_had():
    for exclusive in (True, False):
        answer = reserve(
            {"gpu0": card(memory_gib=0)}, "r-1", ["gpu0"], 0, NOW, {}, exclusive=exclusive
        )
        assert isinstance(answer, NoRoom)
        assert answer.reason == "gpu0: the card is not there any more"


def test_parked_copies_make_way_the_longest_parked_first_and_only_those_at_rest():
    def copy(name: str, hours: int) -> Lease:
        since = NOW - timedelta(hours=hours)
        return Lease(holder=name, memory_bytes=2 * GIB, fence=1, since=since, kind="parked")

    names = {"r-1": 1, "r-2": 3, "r-3": 2, "r-4": 9}
    cpu = card("cpu", 8, leases=tuple(copy(name, hours) for name, hours in names.items()))
    held = {name: a_held(name, "parked") for name in names}
    held["r-4"] = a_held("r-4", "starting")
    assert parked_to_evict(cpu, held, 0, {}) == ()
    assert parked_to_evict(cpu, held, GIB, {}) == ("r-2",)
    assert parked_to_evict(cpu, held, 3 * GIB, {}) == ("r-2", "r-3")
    assert parked_to_evict(cpu, held, 6 * GIB, {}) == ("r-2", "r-3", "r-1")
    # The one that is coming back to its cards needs its RAM for that.
    assert parked_to_evict(cpu, held, 7 * GIB, {}) is None
    # One is on its way out: its memory comes by itself.
    held["r-2"] = a_held("r-2", "parked", ending=True)
    assert parked_to_evict(cpu, held, GIB, {}) == ()
    assert parked_to_evict(cpu, held, 3 * GIB, {}) == ("r-3",)
