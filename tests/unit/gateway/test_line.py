"""A model whose replicas run only so many at once: who goes on when, and that nobody's place is left behind."""

import asyncio
from typing import Any

import pytest

from gateway.adapterdesk import Seeking
from gateway.clock import LoopClock
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.domain.cards import CardRef
from gateway.domain.keytable import ANYBODY, Caller
from gateway.domain.turns import Busy
from gateway.gateway import Gateway
from gateway.inhand import Asked, Run
from gateway.line import InLine
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_keys import a_caller
from tests.support.gateway_world import CHAT, Story, a_model, changes, folded


def a_gateway(story: Story, *replicas: str, concurrency: int = 1, **settings: Any) -> Gateway:
    """A gateway whose model `m` runs so many at once at each of these replicas."""
    gateway = Gateway("gw", GatewaySettings(**settings), LoopClock())
    gateway.is_connected = lambda: True
    model = story.model(concurrency=concurrency)
    ready = [story.replica(id) for id in replicas or ("r-1",)]
    gateway.install(folded(model, *ready), synced=True)
    return gateway


def tell(gateway: Gateway, *events: Any) -> None:
    table = gateway.table
    assert table is not None
    gateway.apply(changes(table, *events), position=events[-1].seq)


def begin(gateway: Gateway, **fields: Any) -> Run | Answer | Busy:
    route = gateway.admit("m", CHAT, accepted=True)
    assert isinstance(route, Route)
    return gateway.start(route, lambda _: None, **fields)


def running(gateway: Gateway, **fields: Any) -> Run:
    begun = begin(gateway, **fields)
    assert isinstance(begun, Run)
    return begun


def join(
    gateway: Gateway,
    caller: Caller = ANYBODY,
    *,
    wait_s: float = 45.0,
    accepted: bool = False,
    **fields: Any,
) -> InLine:
    place = enter(gateway, caller, wait_s=wait_s, accepted=accepted, **fields)
    assert isinstance(place, InLine)
    return place


def enter(
    gateway: Gateway, caller: Caller, *, wait_s: float = 45.0, accepted: bool, **fields: Any
) -> InLine | Answer:
    asked = {"name": "m", "path": CHAT, "abort": lambda _: None, "caller": caller} | fields
    return gateway.line.join(
        a_model(),
        Asked(**asked),
        size_bytes=10,
        deadline_s=gateway.clock.now_s() + wait_s,
        accepted=accepted,
    )


def begun(place: InLine) -> Run:
    assert place.outcome.done(), "its turn has come"
    outcome = place.outcome.result()
    assert isinstance(outcome, Run)
    return outcome


def refused(place: InLine) -> Answer:
    assert place.outcome.done()
    outcome = place.outcome.result()
    assert isinstance(outcome, Answer)
    return outcome


def test_a_freed_seat_wakes_exactly_the_next_one() -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), "r-1", "r-2", concurrency=2)
        runs = [running(gateway) for _ in range(4)]
        assert gateway.usage.by_replica == {"r-1": 2, "r-2": 2}
        assert isinstance(begin(gateway), Busy)
        places = [join(gateway) for _ in range(3)]
        assert gateway.waiting() == {"m": 3}
        for place in places:
            assert not place.outcome.done()
            ended = runs.pop(0)
            gateway.finish(ended, used=True)
            assert begun(place).replica == ended.replica
            assert gateway.usage.by_replica == {"r-1": 2, "r-2": 2}
        assert gateway.waiting() == {}
        assert len(gateway.line) == 0
        gateway.close()

    run(story())


def test_nobody_overtakes_the_line_and_a_free_seat_is_used_by_who_comes() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        first = running(gateway)
        place = join(gateway)
        assert isinstance(begin(gateway), Busy)
        gateway.finish(first, used=True)
        gateway.finish(begun(place), used=True)
        gateway.finish(running(gateway), used=True)
        # Who finds one free when it gets in line goes at once.
        gateway.finish(begun(join(gateway)), used=True)
        assert not gateway.usage.by_replica
        gateway.close()

    run(story())


def test_the_keys_take_turns_and_a_high_priority_comes_before_them() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        held = running(gateway)
        a, b = a_caller(id="a" * 12), a_caller(id="b" * 12)
        high = a_caller(id="c" * 12, priority="high")
        first, second, other = join(gateway, a), join(gateway, a), join(gateway, b)
        urgent = join(gateway, high)
        lowered = join(gateway, high, priority=b"low")
        for place in (urgent, first, other, second, lowered):
            gateway.finish(held, used=True)
            held = begun(place)
        gateway.close()

    run(story())


def test_scn_b8_who_leaves_gives_its_place_back_whenever_that_is() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        held = running(gateway)
        loop: Any = asyncio.get_running_loop()
        before = len(loop._scheduled)
        for _ in range(200):
            early, late, last = join(gateway), join(gateway), join(gateway)
            early.outcome.cancel()  # as the end of its task does
            assert gateway.line.leave(early) is None
            gateway.finish(held, used=True)
            # Its turn had come when its client left: the seat is the next one's.
            unseen = gateway.line.leave(late)
            assert unseen is not None
            gateway.finish(unseen, used=False)
            held = begun(last)
            # A client that leaves while its turn comes is passed over.
            gone, there = join(gateway), join(gateway)
            gone.outcome.cancel()
            gateway.finish(held, used=True)
            assert gateway.line.leave(gone) is None
            held = begun(there)
        gateway.finish(held, used=True)
        assert not gateway.usage.by_replica
        assert len(gateway.line) == 0
        timers = [handle for handle in loop._scheduled if not handle.cancelled()]
        assert len(timers) == before
        gateway.close()

    run(story())


def test_inv_5_a_wait_for_a_turn_ends_with_when_to_come_back() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        running(gateway)
        place = join(gateway, wait_s=0.05)
        await until(place.outcome.done, "the wait to end")
        told = refused(place)
        assert (told.status, told.code) == (503, "model_busy")
        assert dict(told.headers()) == {b"retry-after": b"1", b"x-should-retry": b"true"}
        assert len(gateway.line) == 0
        gateway.close()

    run(story())


def test_inv_5_both_refusals_of_a_line_say_how_long_it_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), waiting_requests=4)
        began_s = gateway.clock.now_s()
        ahead_s = 0.0
        monkeypatch.setattr(gateway.clock, "now_s", lambda: began_s + ahead_s)
        held = running(gateway)
        places = [join(gateway) for _ in range(4)]
        for n in (1, 2):  # one every seven seconds
            ahead_s = 7.0 * n
            gateway.finish(held, used=True)
            held = begun(places[n - 1])
        for _ in range(2):
            join(gateway)
        told = enter(gateway, ANYBODY, accepted=False)
        assert isinstance(told, Answer)
        assert (told.code, dict(told.headers())[b"retry-after"]) == ("queue_full", b"35")
        gateway.line._expire(places[2].turn.ticket)
        late = refused(places[2])
        assert (late.code, dict(late.headers())[b"retry-after"]) == ("model_busy", b"28")
        gateway.dismiss_all()
        gateway.close()

    run(story())


def test_scn_b14_a_full_line_is_said_at_once_but_not_to_who_was_let_in_before() -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), waiting_requests=2)
        held = running(gateway)
        for _ in range(2):
            join(gateway)
        told = enter(gateway, ANYBODY, accepted=False)
        assert isinstance(told, Answer)
        assert (told.status, told.code, told.should_retry) == (503, "queue_full", True)
        assert "2 requests" in told.message
        join(gateway, accepted=True)
        assert gateway.waiting() == {"m": 3}
        gateway.finish(held, used=True)
        gateway.dismiss_all()
        assert len(gateway.line) == 0
        gateway.close()

    run(story())


def test_inv_1_who_stands_in_line_looks_again_when_no_replica_is_left() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        running(gateway)
        place = join(gateway)
        tell(gateway, world.replica("r-1", "draining"))
        assert place.outcome.result() is None
        # So does who waits where the only replica does not answer any more.
        tell(gateway, world.replica("r-2"))
        ran = running(gateway)
        place = join(gateway)
        gateway.suspect(ran.replica, "refused_connection")
        assert place.outcome.result() is None
        gateway.close()

    run(story())


def test_more_seats_wake_more_of_the_line() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        running(gateway)
        places = [join(gateway) for _ in range(6)]
        tell(gateway, world.replica("r-2"))
        assert begun(places[0]).replica.id == "r-2"
        assert not places[1].outcome.done()
        tell(gateway, world.model(concurrency=2))
        assert {begun(p).replica.id for p in places[1:3]} == {"r-1", "r-2"}
        assert not places[3].outcome.done()
        tell(gateway, world.model(concurrency=0))
        assert all(begun(p) for p in places[3:])
        gateway.close()

    run(story())


def test_a_model_that_is_removed_or_switched_off_says_so_to_its_line() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        running(gateway)
        place = join(gateway)
        tell(gateway, world.model_gone())
        assert refused(place).code == "model_not_found"
        gateway.close()

    run(story())


def test_who_waits_for_one_card_does_not_hold_up_the_others() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        tell(
            gateway,
            world.cards("n1", "gpu0", "gpu1"),
            world.replica("r-1", cards=("gpu0",)),
            world.replica("r-2", cards=("gpu1",)),
        )
        runs = {r.replica.id: r for r in (running(gateway), running(gateway))}
        first = join(gateway, on=CardRef(node="n1", card="gpu0"))
        second = join(gateway)
        gateway.finish(runs["r-2"], used=True)
        assert not first.outcome.done()
        assert begun(second).replica.id == "r-2"
        gateway.finish(runs["r-1"], used=True)
        assert begun(first).replica.id == "r-1"
        gateway.close()

    run(story())


def test_waiters_for_the_model_get_in_line_where_it_has_fewer_seats() -> None:
    async def story() -> None:
        world = Story()
        gateway = Gateway("gw", GatewaySettings(), LoopClock())
        gateway.is_connected = lambda: True
        gateway.install(folded(world.model(concurrency=2)), synced=True)
        tickets: list[Any] = [
            gateway.join(
                a_model(),
                "any",
                size_bytes=1,
                deadline_s=gateway.clock.now_s() + 45,
                asked=Asked(name="m", path=CHAT, abort=lambda _: None),
            )
            for _ in range(3)
        ]
        tell(gateway, world.replica())
        outcomes = [ticket.outcome.result() for ticket in tickets]
        assert [isinstance(outcome, Run) for outcome in outcomes] == [True, True, False]
        assert outcomes[2] is None
        gateway.close()

    run(story())


def test_what_asks_for_a_response_by_its_id_needs_no_turn() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        running(gateway)
        assert isinstance(begin(gateway), Busy)
        assert isinstance(begin(gateway, needs_seat=False), Run)
        gateway.close()

    run(story())


def test_a_seat_that_is_given_away_costs_one_look_however_many_things_are_wanted() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        names = [f"alias-{n}" for n in range(50)]
        tell(gateway, world.model(concurrency=1, aliases=tuple(names)))
        held = running(gateway)
        places = [join(gateway, name=name) for name in names]
        asked: list[str] = []
        attempt = gateway.line._attempt

        def counted(of: Asked) -> Any:
            asked.append(of.name)
            return attempt(of)

        gateway.line._attempt = counted
        gateway.finish(held, used=True)
        assert begun(places[0])
        assert asked == names[:2]
        # Where something changed, each is asked what it means for it.
        asked.clear()
        tell(gateway, world.model(concurrency=1, aliases=tuple(names[:25])))
        assert asked == names[1:]
        assert {refused(place).code for place in places[25:]} == {"model_not_found"}
        assert not any(place.outcome.done() for place in places[1:25])
        gateway.close()

    run(story())


def test_a_request_for_an_adapter_needs_a_seat_and_takes_a_free_one_before_it_waits() -> None:
    async def story() -> None:
        world = Story()
        gateway = Gateway("gw", GatewaySettings(), LoopClock())
        gateway.is_connected = lambda: True
        told = [world.model(concurrency=1, max_loaded_adapters=4), world.adapter()]
        told += [world.replica(id, adapter_slots=4) for id in ("r-1", "r-2")]
        gateway.install(folded(*told, world.slots("r-1", "poet")), synced=True)

        def begin_poet() -> Run | Answer | Busy:
            route = gateway.admit("poet", CHAT, accepted=True)
            assert isinstance(route, Route)
            return gateway.start(route, lambda _: None, Seeking("poet"))

        first, second = begin_poet(), begin_poet()
        assert isinstance(first, Run)
        assert isinstance(second, Run)
        # Who has it comes first; it is not waited for where another one can have it.
        assert [first.replica.id, second.replica.id] == ["r-1", "r-2"]
        assert (first.why, second.why) == ("adapter", "adapter")
        assert isinstance(begin_poet(), Busy)
        place = join(gateway, name="poet", seeking=Seeking("poet"))
        plain = join(gateway)
        gateway.finish(first, used=True)
        on = begun(place)
        assert on.replica.id == "r-1"
        assert on.adapted is not None
        assert not plain.outcome.done()
        gateway.finish(second, used=True)
        gateway.finish(begun(plain), used=True)
        gateway.finish(on, used=True)
        assert not gateway.usage.by_replica
        gateway.close()

    run(story())
