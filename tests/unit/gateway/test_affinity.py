"""What ties a request to a replica, and when it goes elsewhere all the same."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock import LoopClock
from gateway.domain.admission import Route
from gateway.domain.affinity import (
    PREFIX_BYTES,
    SLACK,
    Affinity,
    by_prefix,
    by_session,
    first_near,
    ranked,
)
from gateway.domain.routing import load_of
from gateway.gateway import Gateway
from gateway.inhand import Run
from schemas.replica import Replica
from schemas.settings import GatewaySettings
from tests.support.aio import run
from tests.support.gateway_world import CHAT, Story, a_replica, folded

FOUR = [a_replica(f"r-{n}") for n in range(4)]


def conversation(*texts: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def session(name: str) -> Affinity:
    found = by_session(name.encode())
    assert found is not None
    return found


def prefer(
    candidates: Sequence[Replica],
    affinity: Affinity,
    inflight: Mapping[str, int],
    others: Mapping[str, int],
) -> Replica:
    """Where a request that is tied like this goes."""
    return first_near(ranked(candidates, affinity), inflight, others)


def test_a_conversation_keeps_its_tie_as_it_grows_and_another_has_another() -> None:
    beginning = "You are a careful assistant. " * 30
    first = by_prefix(conversation(beginning))
    assert first is not None
    assert first.by == "prefix"
    assert by_prefix(conversation(beginning, "more", "and more", temperature=1)) == first
    assert by_prefix(conversation("Another. " * 80)) != first


@pytest.mark.parametrize(
    "body",
    [
        conversation("hi"),
        b'{"model":"m"}',
        b'{"messages":null,"prompt":"' + b"x" * 600 + b'"}',
        b"not JSON",
        b"",
        b"[" * 100_000,
    ],
)
def test_what_is_short_or_has_no_beginning_is_tied_to_nothing(body: bytes) -> None:
    assert by_prefix(body) is None


@pytest.mark.parametrize("field", ["messages", "prompt", "input"])
def test_each_kind_of_request_says_how_it_begins_in_its_own_field(field: str) -> None:
    text = "x" * PREFIX_BYTES
    assert by_prefix(json.dumps({field: text}).encode()) is not None
    assert by_prefix(json.dumps({field: text[:-3]}).encode()) is None


def test_a_session_goes_to_one_replica_whatever_their_order_and_sessions_spread() -> None:
    assert by_session(b"  ") is None
    chosen = {
        prefer(order, session("s"), {}, {}).id for order in (FOUR, FOUR[::-1], FOUR[1:] + FOUR[:1])
    }
    assert len(chosen) == 1
    spread = Counter(prefer(FOUR, session(f"s{n}"), {}, {}).id for n in range(400))
    assert set(spread) == {r.id for r in FOUR}
    assert min(spread.values()) > 60


def test_weights_are_shares_of_the_sessions() -> None:
    replicas = [a_replica("r-1", weight=1), a_replica("r-2", weight=3)]
    spread = Counter(prefer(replicas, session(f"s{n}"), {}, {}).id for n in range(800))
    assert 0.65 < spread["r-2"] / 800 < 0.85


def test_a_replica_that_goes_moves_its_own_sessions_and_no_other() -> None:
    for n in range(100):
        tie = session(f"s{n}")
        before = prefer(FOUR, tie, {}, {})
        after = prefer(FOUR[1:], tie, {}, {})
        assert after == before or before == FOUR[0]


def test_who_is_clearly_busier_is_passed_over_for_the_next_of_the_same_order() -> None:
    tie = session("s")
    home = prefer(FOUR, tie, {}, {})
    assert prefer(FOUR, tie, {home.id: 4}, {}) == home
    second = prefer(FOUR, tie, {home.id: 5}, {})
    assert second != home
    # What runs there of other gateways counts like ours.
    assert prefer(FOUR, tie, {home.id: 2}, {home.id: 3}) == second
    assert prefer([r for r in FOUR if r != home], tie, {}, {}) == second


@given(
    loads=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    weights=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    name=st.text(min_size=1, max_size=8).filter(lambda text: bool(text.strip())),
)
def test_affinity_never_costs_more_than_the_slack(
    loads: list[int], weights: list[int], name: str
) -> None:
    replicas = [a_replica(f"r-{n}", weight=weights[n]) for n in range(len(loads))]
    inflight = {f"r-{n}": load for n, load in enumerate(loads)}
    tie = by_session(name.encode())
    if tie is None:
        return
    chosen = prefer(replicas, tie, inflight, {})
    least = min(load_of(r, inflight, {}) for r in replicas)
    assert load_of(chosen, inflight, {}) <= least + SLACK


def test_a_tie_is_looked_for_only_where_there_is_a_choice() -> None:
    async def story() -> None:
        world = Story()
        gateway = Gateway("gw", GatewaySettings(), LoopClock())
        gateway.is_connected = lambda: True
        model = world.model(concurrency=1)
        gateway.install(folded(model, world.replica("r-1"), world.replica("r-2")), synced=True)
        asked: list[int] = []

        def tie() -> Affinity:
            asked.append(1)
            return session("s")

        def begin() -> Run:
            route = gateway.admit("m", CHAT, accepted=True)
            assert isinstance(route, Route)
            begun = gateway.start(route, lambda _: None, affinity=tie)
            assert isinstance(begun, Run)
            return begun

        first, second = begin(), begin()
        assert (first.why, second.why) == ("session", "only")
        assert first.replica != second.replica
        assert len(asked) == 1
        gateway.close()

    run(story())
