"""The gateway's state on a loop but without a network: waits leave nothing, each has one answer."""

import asyncio

from gateway.clock import LoopClock
from gateway.domain.answers import Answer
from gateway.gateway import Gateway, Ticket
from schemas.settings import GatewaySettings
from tests.support.aio import run
from tests.support.gateway_world import Story, a_model, changes, folded


def a_gateway(story: Story, **settings: int) -> Gateway:
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
