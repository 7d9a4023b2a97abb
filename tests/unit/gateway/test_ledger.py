"""How gateways share a key's limits, step by step."""

from typing import Any

import pytest

from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Refused
from gateway.domain.shares import KeyBook
from schemas.beacons import LimitsBeacon
from schemas.key import Key
from tests.support.gateway_keys import a_key


def meet(*ledgers: Ledger, at_s: float) -> None:
    """All hear all, until everybody knows that everybody knows."""
    for _ in range(3):
        told = [(ledger, ledger.tell(at_s, {})) for ledger in ledgers]
        for to in ledgers:
            for of, beacon in told:
                if of is not to:
                    to.hear(beacon, at_s)


def two() -> tuple[Ledger, Ledger]:
    one, other = Ledger("g1", "0001"), Ledger("g2", "0002")
    meet(one, other, at_s=100.0)
    return one, other


def admitted(ledger: Ledger, key: Key, tries: int, at_s: float, tokens: int = 0) -> int:
    return sum(not isinstance(ledger.admit(key, tokens, at_s), Refused) for _ in range(tries))


def test_each_uses_its_part_before_it_tells_and_then_a_part_of_what_is_left() -> None:
    key = a_key(rpm=100)
    one, other = two()
    assert admitted(one, key, 200, 100.0) == 50
    refused = one.admit(key, 0, 100.0)
    assert isinstance(refused, Refused)
    assert (refused.frees_s, refused.asks) == (1, True)
    assert one.pressed
    meet(one, other, at_s=100.0)
    assert admitted(one, key, 200, 100.0) == 25
    assert admitted(other, key, 200, 100.0) == 25


def test_what_was_told_counts_as_unheard_until_the_other_says_that_it_heard_it() -> None:
    key = a_key(rpm=100)
    one, other = two()
    admitted(one, key, 200, 100.0)
    lost = one.tell(100.0, {})
    assert lost.asks
    assert admitted(one, key, 200, 100.0) == 0
    other.hear(lost, 100.5)  # late
    assert admitted(one, key, 200, 100.5) == 0
    one.hear(other.tell(100.5, {}), 100.5)
    assert admitted(one, key, 200, 100.5) == 25


def test_one_request_at_least_goes_on_where_others_know_everything() -> None:
    key = a_key(rpm=3)
    one, other = two()
    assert admitted(one, key, 9, 100.0) == 1
    assert admitted(other, key, 9, 100.0) == 1
    meet(one, other, at_s=100.0)
    assert admitted(one, key, 9, 100.0) == 1
    # The limit and one for the other gateway: the bound.
    assert admitted(other, key, 9, 100.0) == 1
    meet(one, other, at_s=100.0)
    assert admitted(one, key, 9, 100.0) + admitted(other, key, 9, 100.0) == 0


def test_lost_beacons_are_made_up_for_by_the_next() -> None:
    key = a_key(rpm=1000)
    one, other = two()
    for _ in range(5):
        admitted(one, key, 10, 101.0)
        one.tell(101.0, {})
    other.hear(one.tell(101.0, {}), 101.0)
    assert other.read(key, 101.0).requests == 50


def test_a_beacon_that_a_later_one_overtook_changes_nothing() -> None:
    key = a_key(rpm=1000, parallel=1000)
    one, other = two()
    admitted(one, key, 10, 101.0)
    early = one.tell(101.0, {"r-1": 9})
    for _ in range(10):
        one.end(key, 0, 0, 101.0)
    other.hear(one.tell(101.0, {"r-1": 2}), 101.0)
    other.hear(early, 101.0)
    assert other.read(key, 101.0).requests == 10
    assert other.inflight() == {"r-1": 2}
    assert admitted(other, key, 1000, 101.0) > 0


def test_who_hears_of_a_gateway_for_the_first_time_counts_what_it_used_of_late() -> None:
    key = a_key(rpm=100)
    one = Ledger("g1", "0001")
    admitted(one, key, 70, 10.0)
    for _ in range(70):
        one.end(key, 0, 0, 10.0)
    one.tell(100.0, {})
    admitted(one, key, 30, 100.0)
    late = Ledger("g2", "0002")
    assert late.hear(one.tell(100.0, {}), 100.0)
    assert late.read(key, 100.0).requests == 30


def test_a_newcomer_hears_what_those_used_who_ended_before_it_came() -> None:
    key = a_key(rpm=100, tpm=1000)
    one, other = two()
    assert admitted(one, key, 30, 100.0, tokens=10) == 30
    for _ in range(30):
        one.end(key, 10, 10, 100.0)
    other.hear(one.tell(100.0, {}, leaving=True), 100.0)
    late, later = Ledger("g3", "0003"), Ledger("g4", "0004")
    # The one that stayed used nothing of the key itself.
    assert late.hear(other.tell(101.0, {}), 101.0)
    assert late.read(key, 101.0).requests == 30
    assert late.read(key, 101.0).tokens == 300
    other.tell(102.0, {}, leaving=True)
    # It is handed on, and counted once whoever tells it.
    later.hear(late.tell(103.0, {}), 103.0)
    later.hear(other.tell(103.0, {}), 103.0)
    assert later.read(key, 103.0).requests == 30
    assert later.read(key, 170.0).requests == 0


def test_a_newcomer_takes_one_at_a_time_until_the_others_reckon_with_it() -> None:
    key = a_key(rpm=100)
    one, late = Ledger("g1", "0001"), Ledger("g2", "0002")
    late.hear(one.tell(100.0, {}), 100.0)
    assert admitted(late, key, 9, 100.0) == 1
    # The elder is not held up by it.
    assert one.hear(late.tell(100.0, {}), 100.0), "who is new waits for an answer"
    assert one.gateways == 2
    assert admitted(one, key, 200, 100.0) == 49
    late.hear(one.tell(100.0, {}), 100.0)
    assert admitted(late, key, 200, 100.0) == 25


def test_what_a_gateway_that_left_used_stays_used_and_the_others_share_the_rest() -> None:
    key = a_key(rpm=100, parallel=100)
    one, other = two()
    admitted(one, key, 30, 100.0)
    other.hear(one.tell(100.0, {"r-1": 30}), 100.0)
    assert other.inflight() == {"r-1": 30}
    for _ in range(30):
        one.end(key, 0, 0, 100.0)
    assert not other.hear(one.tell(100.0, {}, leaving=True), 100.0)
    assert (other.gateways, other.inflight()) == (1, {})
    assert admitted(other, key, 200, 100.0) == 70


def test_who_is_silent_for_three_seconds_shares_nothing_any_more() -> None:
    key = a_key(rpm=100, parallel=20)
    one, other = two()
    admitted(one, key, 10, 100.0)
    other.hear(one.tell(100.0, {}), 100.0)
    for at_s in (100.0, 101.0, 102.0, 103.0):
        other.look(at_s, connected=True)
        assert other.gateways == 2
    other.look(104.0, connected=True)
    assert other.gateways == 1
    # What ran there is taken to have ended with it; what was used stays used.
    assert other.read(key, 104.0).requests == 10
    assert admitted(other, key, 100, 104.0) == 20
    # It comes back, and nothing counts twice.
    assert other.hear(one.tell(105.0, {}), 105.0)
    assert other.gateways == 2
    assert other.read(key, 105.0).requests == 30
    other.look(300.0, connected=True)
    other.look(301.0, connected=True)
    assert not other.tell(301.0, {}).heard


def test_who_cannot_hear_goes_on_sharing_with_those_it_knew() -> None:
    key = a_key(rpm=100)
    one, _ = two()
    one.look(100.0, connected=True)
    for at_s in (101.0, 110.0, 150.0):
        one.look(at_s, connected=False)
    assert one.gateways == 2
    assert admitted(one, key, 200, 150.0) == 50
    # What nobody heard of is used up for a minute, and no longer.
    one.look(200.0, connected=False)
    assert admitted(one, key, 200, 200.0) == 0
    assert admitted(one, key, 200, 212.0) == 50
    # Back, it gives the others time to be heard.
    one.look(215.0, connected=True)
    one.look(217.0, connected=True)
    assert one.gateways == 2
    one.look(219.0, connected=True)
    assert one.gateways == 1


def test_who_does_not_hear_itself_cannot_hear_others_though_it_is_connected() -> None:
    """As with a server that was halted: every connection to it stands, and nothing comes."""
    key = a_key(rpm=100)
    one, other = two()
    for at_s in (100.0, 101.0):
        one.look(at_s, connected=True)
        one.hear(one.tell(at_s, {}), at_s)
        one.hear(other.tell(at_s, {}), at_s)
    for at_s in (102.0, 110.0, 141.0):
        one.tell(at_s, {})
        one.look(at_s, connected=True)
    assert one.gateways == 2
    assert admitted(one, key, 200, 141.0) == 50
    # All comes at once: the others have as long as ever to be heard again.
    one.hear(one.tell(142.0, {}), 142.0)
    one.look(142.0, connected=True)
    assert one.gateways == 2
    for at_s in (143.0, 144.0, 145.0, 146.0):
        one.hear(one.tell(at_s, {}), at_s)
        one.look(at_s, connected=True)
    assert one.gateways == 1


def test_tokens_that_were_held_and_not_used_are_given_back_everywhere() -> None:
    key = a_key(tpm=100)
    one, other = two()
    assert one.admit(key, 40, 100.0) == 40
    meet(one, other, at_s=100.0)
    assert other.read(key, 100.0).tokens == 40
    one.end(key, 40, 5, 101.0)
    meet(one, other, at_s=101.0)
    assert other.read(key, 101.0).tokens == 5


def test_a_limit_of_requests_at_once_asks_the_others_before_long() -> None:
    """What another says to run may have ended since: it is asked, not believed for a second."""
    key = a_key(parallel=2)
    one, other = two()
    admitted(one, key, 1, 100.0)
    meet(one, other, at_s=100.0)
    admitted(one, key, 1, 100.0)
    meet(one, other, at_s=100.0)
    one.end(key, 0, 0, 100.1)
    refused = other.admit(key, 0, 100.2)
    assert isinstance(refused, Refused)
    assert refused.asks
    asking = other.tell(100.2, {})
    assert asking.asks
    assert one.hear(asking, 100.2), "whoever is asked tells at once"
    other.hear(one.tell(100.2, {}), 100.2)
    assert other.admit(key, 0, 100.2) == 0


def test_of_thousands_of_keys_only_those_are_looked_at_that_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = two()
    keys = [a_key(id=f"{n:012d}", rpm=10) for n in range(3000)]
    for key in keys:
        one.admit(key, 0, 100.0)
        one.end(key, 0, 0, 100.0)
    other.hear(one.tell(100.0, {}), 100.0)
    looked: list[str] = []
    for name in ("tell", "hear", "heard_by_all"):
        plain = getattr(KeyBook, name)

        def counted(self: KeyBook, *given: object, name: str = name, plain: Any = plain) -> Any:
            looked.append(name)
            return plain(self, *given)

        monkeypatch.setattr(KeyBook, name, counted)
    one.hear(other.tell(100.5, {}), 100.5)  # It has heard of all of them.
    looked.clear()
    admitted(one, keys[7], 1, 101.0)
    beacon = one.tell(101.0, {})
    assert (len(beacon.keys), beacon.keys[keys[7].id].requests) == (3000, 2)
    other.hear(beacon, 101.0)
    one.hear(other.tell(101.0, {}), 101.0)
    assert sorted(looked) == ["hear", "heard_by_all", "tell"]
    # And time alone changes all of them at once: they are of the last minute no more.
    assert not any(
        use.recent_requests for use in one.tell(161.0, {}).keys.values() if use.requests == 1
    )


def test_beacons_say_what_they_must_and_no_more() -> None:
    key = a_key(rpm=10)
    one, other = two()
    admitted(one, key, 2, 100.0)
    beacon: LimitsBeacon = one.tell(100.0, {"r-1": 1})
    assert beacon.gateway == "g1"
    assert (beacon.keys[key.id].requests, beacon.keys[key.id].running) == (2, 2)
    assert list(beacon.heard) == ["0002"]
    for _ in range(2):
        one.end(key, 0, 0, 100.0)
    assert key.id in one.tell(150.0, {}).keys
    assert key.id not in one.tell(163.0, {}).keys
    assert not one.hear(beacon, 170.0), "its own is nothing new"
    assert other.gateways == 2
