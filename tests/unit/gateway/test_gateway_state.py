"""The gateway's state on a loop but without a network: waits leave nothing, each has one answer."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import uvloop

from gateway.clock import LoopClock
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.gateway import Asked, Gateway, Run
from gateway.http.errors import ConnectFailed
from gateway.inhand import Ticket
from gateway.probe import Prober
from schemas.adapternames import pin_name
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_world import NOW, Story, a_model, an_adapter, changes, folded


def a_gateway(story: Story, **settings: Any) -> Gateway:
    gateway = Gateway("gw", GatewaySettings(**settings), LoopClock())
    gateway.is_connected = lambda: True
    gateway.install(folded(story.model()), synced=True)
    return gateway


def join(gateway: Gateway, wait_s: float = 45.0) -> Ticket:
    found = gateway.join(a_model(), "any", size_bytes=10, deadline_s=gateway.clock.now_s() + wait_s)
    assert isinstance(found, Ticket)
    return found


def test_req_a24_ten_thousand_abandoned_requests_leave_no_timer_and_no_future() -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), waiting_requests=20_000)
        loop = asyncio.get_running_loop()
        scheduled: list[object] = loop._scheduled  # type: ignore[attr-defined]
        before = len(scheduled)
        for _ in range(10):
            tickets = [join(gateway) for _ in range(1000)]
            # One timer for the room, whoever waits.
            assert len(scheduled) - before < 150
            for ticket in tickets:
                gateway.leave(ticket)
                ticket.outcome.cancel()
        assert gateway.open_tickets == 0
        assert len(gateway.room) == 0
        assert gateway.room.timers == 0
        # asyncio drops cancelled timers when they are many; no live one is left.
        assert len([h for h in scheduled if not h.cancelled()]) == before  # type: ignore[attr-defined]

    run(story())


def test_who_comes_when_the_next_deadline_is_due_waits_like_others() -> None:
    """On the loop that gateways run on, whose timers that are due at once are of another kind."""

    async def story() -> None:
        gateway = a_gateway(Story())
        due, later = join(gateway, 0.0), join(gateway)
        found = await asyncio.wait_for(due.outcome, 10)
        assert isinstance(found, Answer)
        assert not later.outcome.done()
        gateway.leave(later)
        gateway.close()

    uvloop.run(asyncio.wait_for(story(), 20))


def test_a_ready_replica_gives_every_waiter_its_one_outcome() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        tickets = [join(gateway) for _ in range(1000)]
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        assert all(t.outcome.result() is None for t in tickets)
        # What comes later finds nobody to answer.
        gateway.apply(changes(table, world.replica("r-1", "draining")), position=world.seq)
        gateway.apply(changes(table, world.model_gone()), position=world.seq)
        gateway.dismiss_all()
        assert gateway.open_tickets == 0
        gateway.close()

    run(story())


def wait_as(gateway: Gateway, path: str, name: str = "m") -> tuple[Ticket, list[str]]:
    """A waiting request that is begun with the wake, and the reasons it was aborted for."""
    aborted: list[str] = []
    found = gateway.join(
        a_model(),
        "any",
        size_bytes=10,
        deadline_s=gateway.clock.now_s() + 45.0,
        asked=Asked(name=name, path=path, abort=aborted.append),
    )
    assert isinstance(found, Ticket)
    return found, aborted


CHAT = "/v1/chat/completions"


def test_the_wake_begins_a_run_for_each_waiter_that_asks_what_the_replica_serves() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        tickets = [wait_as(gateway, CHAT)[0] for _ in range(10)]
        other, _ = wait_as(gateway, "/v1/not-published")
        renamed, _ = wait_as(gateway, CHAT, name="no-alias-any-more")
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        runs = [t.outcome.result() for t in tickets]
        assert all(isinstance(r, Run) and r.replica.id == "r-1" for r in runs)
        assert gateway.usage.by_replica == {"r-1": 10}  # counted before any of them goes on
        for ticket, code in ((other, "route_not_forwarded"), (renamed, "model_not_found")):
            told = ticket.outcome.result()
            assert isinstance(told, Answer)
            assert told.code == code
        for ticket in tickets:
            gateway.leave(ticket)
        gateway.close()

    run(story())


def test_a_client_that_leaves_between_the_wake_and_its_turn_gives_the_replica_back() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        ticket, _ = wait_as(gateway, CHAT)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        assert gateway.usage.by_replica == {"r-1": 1}
        gateway.leave(ticket)
        assert gateway.usage.by_replica == {}
        gateway.close()

    run(story())


def test_a_replica_that_ends_between_the_wake_and_its_turn_takes_the_run_back() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        ticket, aborted = wait_as(gateway, CHAT)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        gateway.apply(changes(table, world.replica("r-1", "stopped")), position=world.seq)
        found = ticket.outcome.result()
        assert isinstance(found, Run)
        assert (found.lost, len(aborted)) == ("stopped", 1)
        gateway.leave(ticket)
        gateway.close()

    run(story())


def test_a_deadline_answers_each_at_its_own_time() -> None:
    async def story() -> None:
        gateway = a_gateway(Story())
        short, long = join(gateway, 0.02), join(gateway, 30.0)
        async with asyncio.timeout(5.0):
            told = await short.outcome
        assert isinstance(told, Answer)
        assert told.code == "model_loading"
        assert not long.outcome.done()
        gateway.dismiss_all()
        last = await long.outcome
        assert isinstance(last, Answer)
        assert last.code == "draining"
        gateway.close()

    run(story())


def test_a_batch_is_looked_at_as_a_whole_before_anybody_is_answered() -> None:
    """A start that failed and its successor's readiness in one batch: the waiter is served."""

    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.activation("loading")), position=world.seq)
        ticket = join(gateway)
        batch = changes(
            table,
            world.replica("r-1", "failed", was_ready=False),
            world.replica("r-2", "ready"),
        )
        gateway.apply(batch, position=world.seq)
        assert ticket.outcome.result() is None
        gateway.close()

    run(story())


def a_run(gateway: Gateway, *, has_byte: bool) -> tuple[Run, list[str]]:
    """A request at the one ready replica, and the reasons it was aborted for."""
    aborted: list[str] = []
    found = gateway.admit("m", CHAT, accepted=False)
    assert isinstance(found, Route)
    run = gateway.start(found, aborted.append)
    assert isinstance(run, Run)
    run.has_byte = has_byte
    return run, aborted


def test_inv_1_a_replica_parked_and_ready_again_within_one_batch_gives_its_requests_back() -> None:
    """The last event alone looks as if nothing had happened: same id, same endpoint, same process."""

    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        gone: list[str] = []
        gateway.on_endpoint_gone = gone.append
        gateway.apply(changes(table, world.replica()), position=world.seq)
        quiet, taken_back = a_run(gateway, has_byte=False)
        begun, ended = a_run(gateway, has_byte=True)
        batch = changes(
            table,
            world.replica("r-1", "draining"),
            world.replica("r-1", "parked", reason="lease l-1"),
            world.replica("r-1", "starting"),
            world.replica("r-1", "ready"),
        )
        gateway.apply(batch, position=world.seq)
        assert (quiet.lost, len(taken_back)) == ("stopped", 1)
        assert ended == ["the engine r-1 was parked: lease l-1"]
        # Not one connection of before is used for what comes now.
        assert gone == ["http://127.0.0.1:20001"] * 2
        for run_ in (quiet, begun):
            gateway.finish(run_, used=False)
        assert isinstance(gateway.admit("m", CHAT, accepted=False), Route)
        gateway.close()

    run(story())


def test_inv_1_a_table_read_anew_tells_a_park_by_the_second_readiness() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica(ready_at=NOW)), position=world.seq)
        same, kept = a_run(gateway, has_byte=False)
        gateway.install(
            folded(world.model(), world.replica(ready_at=NOW, taken_back="d-1")), synced=True
        )
        assert (same.lost, kept) == (None, [])
        later = NOW + timedelta(minutes=5)
        gateway.install(folded(world.model(), world.replica(ready_at=later)), synced=True)
        assert (same.lost, len(kept)) == ("stopped", 1)
        gateway.finish(same, used=False)
        gateway.close()

    run(story())


def test_a_suspicion_ends_with_the_park_and_none_begins_while_it_lasts() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        known = table.replicas["r-1"]
        gateway.suspect(known, "broke")
        assert set(gateway.ejected) == {"r-1"}
        gateway.apply(changes(table, world.replica("r-1", "parked")), position=world.seq)
        assert not gateway.ejected
        # The connection of a request may break later than the log told why.
        gateway.suspect(known, "broke")
        gateway.apply(changes(table, world.replica("r-1", "starting")), position=world.seq)
        gateway.suspect(known, "refused_connection")
        assert not gateway.ejected
        gateway.apply(changes(table, world.replica("r-1", "ready")), position=world.seq)
        assert isinstance(gateway.admit("m", CHAT, accepted=False), Route)
        gateway.close()

    run(story())


def test_inv_5_one_answer_ends_when_its_engine_is_gone_whatever_its_connection_says() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica()), position=world.seq)
        begun, ended = a_run(gateway, has_byte=True)
        gateway.apply(changes(table, world.replica("r-1", "draining")), position=world.seq)
        assert ended == []
        gateway.apply(changes(table, world.replica("r-1", "stopped")), position=world.seq)
        assert ended == ["the engine r-1 was stopped"]
        gateway.finish(begun, used=True)
        gateway.close()

    run(story())


class Deaf:
    """An engine nobody can connect to."""

    def __init__(self) -> None:
        self.asked = 0

    async def request(self, *_: object) -> object:
        self.asked += 1
        raise ConnectFailed("nobody is there")


def test_a_parked_engine_is_not_probed_any_more() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None
        tasks: list[asyncio.Task[None]] = []

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        deaf: Any = Deaf()
        prober = Prober(gateway, deaf, engine_key=lambda _: None, spawn=spawn)
        gateway.on_suspect = prober.suspect
        gateway.apply(changes(table, world.replica()), position=world.seq)
        gateway.suspect(table.replicas["r-1"], "broke")
        await until(lambda: deaf.asked > 0, "the first probe")
        assert not tasks[0].done()
        gateway.apply(changes(table, world.replica("r-1", "parked")), position=world.seq)
        async with asyncio.timeout(5.0):
            await tasks[0]
        assert len(tasks) == 1
        gateway.close()

    run(story())


def test_an_adapter_that_a_new_table_does_not_show_any_more_is_nobodys_hit() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        told = [world.model(max_loaded_adapters=4), world.adapter(), world.adapter("other")]
        told += [world.replica(id, adapter_slots=4) for id in ("r-1", "r-2")]
        gateway.install(folded(*told, world.slots("r-1", "poet", "other")), synced=True)
        names = [pin_name(n, an_adapter(n).version) for n in ("poet", "other")]
        held = {n: gateway.pins.begin("n1", "r-1", n, gateway.clock.now_s()) for n in names}
        gone = gateway.pins.begin("n1", "r-2", names[0], gateway.clock.now_s())
        for one in (*held.values(), gone):
            gateway.pins.granted(one, one.pin, gateway.clock.now_s())
        # The history was replaced, or a snapshot gave way to the log.
        gateway.install(folded(*told[:4], world.slots("r-1", "other")), synced=True)
        now_s = gateway.clock.now_s()
        assert [held[n].is_trusted(now_s) for n in names] == [False, True]
        assert not gone.is_trusted(now_s)
        gateway.close()

    run(story())


def test_a_route_that_was_found_is_not_used_once_anything_of_it_changed() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world)
        table = gateway.table
        assert table is not None

        def to(*, accepted: bool = False) -> list[str] | str:
            found = gateway.admit("m", "/v1/completions", accepted=accepted)
            if isinstance(found, Route):
                return [r.id for r in found.candidates]
            return type(found).__name__

        assert to() == "Wait"
        gateway.apply(changes(table, world.replica()), position=world.seq)
        assert to() == to() == ["r-1"]
        gateway.apply(changes(table, world.replica("r-2")), position=world.seq)
        assert to() == ["r-1", "r-2"]
        gateway.suspect(table.replicas["r-1"], "broke")
        assert to() == ["r-2"]
        gateway.trust("r-1")
        assert to() == ["r-1", "r-2"]
        gateway.draining = True
        assert to() == "Answer"
        assert to(accepted=True) == ["r-1", "r-2"]
        gateway.draining = False
        gateway.install(folded(Story().model()), synced=True)
        assert to() == "Wait"
        gateway.close()

    run(story())
