"""Whose the use of a card is, and what of a holder that ended is still there: decided by value."""

from datetime import UTC, datetime

from nodeagent.cards.attribution import explained, lasting, slack_bytes, still_held_bytes
from nodeagent.cards.provider import Reading, Seen
from schemas.card import Card, Claim, Lease, ProcessRef, Vm
from schemas.settings import GIB, MIB

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def a_card(*leases: Lease, **fields) -> Card:
    return Card(
        node="n", id="gpu0", kind="gpu", memory_bytes=24 * GIB, rev=1, leases=leases, **fields
    )


def a_lease(holder: str = "r-1", memory_bytes: int = 8 * GIB, **fields) -> Lease:
    return Lease(holder=holder, memory_bytes=memory_bytes, fence=1, since=NOW, **fields)


def named(holder: str = "l-1", memory_bytes: int = 8 * GIB, **fields) -> Lease:
    return a_lease(holder, memory_bytes, kind="named", name="ann", **fields)


def seen(pid: int, memory_bytes: int = GIB, *, here: bool = True) -> Seen:
    return Seen(pid=pid, name="python3", memory_bytes=memory_bytes, here=here)


def a_reading(*strangers: Seen, untied: int = 0, of: dict[str, int] | None = None) -> Reading:
    of = of or {}
    other = untied + sum(one.memory_bytes for one in strangers)
    return Reading(
        card="gpu0",
        used_bytes=other + sum(of.values()),
        of=of,
        other_bytes=other,
        strangers=strangers,
        unexplained_bytes=untied,
    )


def test_what_the_driver_ties_to_a_holder_stays_its():
    reading = a_reading(seen(7), untied=100 * MIB, of={"r-1": 5 * GIB})
    alive = {"r-1": frozenset((1,))}
    assert explained(reading, a_card(a_lease()), alive, 100 * MIB) == reading


def test_on_a_card_that_a_claim_or_a_vm_keeps_nobody_is_a_stranger():
    reading = a_reading(seen(7))
    claim = Claim(id="c-1", name="game", kind="game", since=NOW)
    for card in (a_card(claims=(claim,)), a_card(vm=Vm(name="win", since=NOW))):
        kept = explained(reading, card, {}, 0)
        assert (kept.strangers, kept.other_bytes) == ((), GIB)


def test_in_a_container_what_the_driver_shows_elsewhere_is_the_engines():
    reading = a_reading(seen(70001, 5 * GIB, here=False), untied=100 * MIB)
    alive = {"r-1": frozenset((12,))}
    found = explained(reading, a_card(a_lease()), alive, 100 * MIB)
    assert found.of == {"r-1": 5 * GIB}
    assert (found.strangers, found.other_bytes) == ((), 100 * MIB)


def test_in_a_container_without_any_list_what_is_more_than_usual_is_the_engines():
    reading = a_reading(untied=6 * GIB)
    alive = {"r-1": frozenset((12,)), "r-2": frozenset((13,))}
    card = a_card(a_lease("r-1"), a_lease("r-2"))
    found = explained(reading, card, alive, 2 * GIB)
    assert found.of == {"r-1": 2 * GIB, "r-2": 2 * GIB}
    assert (found.other_bytes, found.unexplained_bytes) == (2 * GIB, 2 * GIB)


def test_an_engine_that_has_not_begun_is_not_given_what_is_always_there():
    reading = a_reading(seen(7), untied=300 * MIB)
    found = explained(reading, a_card(a_lease()), {"r-1": frozenset((12,))}, 300 * MIB)
    assert found == reading


def test_nobody_is_given_more_than_he_asked_for():
    reading = a_reading(untied=20 * GIB)
    found = explained(reading, a_card(a_lease()), {"r-1": frozenset((12,))}, 0)
    assert (found.of, found.other_bytes) == ({"r-1": 8 * GIB}, 12 * GIB)


def test_a_parked_engine_is_given_nothing_it_does_not_show():
    reading = a_reading(seen(70001, here=False))
    parked = a_lease(kind="parked", memory_bytes=GIB)
    assert explained(reading, a_card(parked), {"r-1": frozenset((12,))}, 0) == reading


def test_req_d15_who_has_a_lease_without_a_process_is_no_stowaway_while_it_fits():
    reading = a_reading(seen(7, 3 * GIB), seen(8, 4 * GIB), seen(9, 2 * GIB))
    found = explained(reading, a_card(named()), {}, 0)
    assert found.of == {"l-1": 7 * GIB}
    assert [one.pid for one in found.strangers] == [9]
    assert found.other_bytes == 2 * GIB


def test_on_a_card_somebody_has_whole_everybody_is_his():
    reading = a_reading(seen(7, 20 * GIB), seen(8))
    found = explained(reading, a_card(named(memory_bytes=0, exclusive=True)), {}, 0)
    assert (found.of, found.strangers) == ({"l-1": 21 * GIB}, ())


def test_a_lease_with_a_process_has_no_guests():
    ref = ProcessRef(pid=3, started=1, boot="b")
    reading = a_reading(seen(7))
    assert explained(reading, a_card(named(process=ref)), {}, 0) == reading


def test_req_d15_a_stowaway_is_who_was_there_in_two_readings():
    assert lasting(None, a_reading(seen(7))) == ()
    assert lasting(a_reading(seen(7)), a_reading(seen(7), seen(8))) == (seen(7),)
    assert lasting(a_reading(seen(7)), a_reading(seen(8))) == ()


def test_what_may_move_unsaid_is_the_smaller_of_64_mib_and_two_percent():
    assert slack_bytes(a_card()) == 64 * MIB
    small = Card(node="n", id="gpu0", kind="gpu", memory_bytes=GIB, rev=1)
    assert slack_bytes(small) == int(GIB * 0.02)


def test_what_is_tied_to_a_holder_that_ended_is_still_held():
    reading = a_reading(of={"r-1": 3 * GIB})
    assert still_held_bytes("r-1", reading, 0, 8 * GIB, MIB) == 3 * GIB


def test_what_nobody_is_shown_for_and_was_not_so_before_is_still_held_up_to_what_it_had():
    reading = a_reading(untied=9 * GIB)
    assert still_held_bytes("r-1", reading, GIB, 5 * GIB, 64 * MIB) == 5 * GIB
    assert still_held_bytes("r-1", reading, GIB, 20 * GIB, 64 * MIB) == 8 * GIB
    assert still_held_bytes("r-1", reading, 9 * GIB - 60 * MIB, 5 * GIB, 64 * MIB) == 0
    assert still_held_bytes("r-1", reading, 10 * GIB, 5 * GIB, 64 * MIB) == 0
