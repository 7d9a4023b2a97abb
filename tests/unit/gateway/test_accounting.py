"""What a gateway says of accounts that no log took for as long as one keeps them."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from events.log import Unavailable
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from gateway import accounting as accounts
from gateway.accounting import Accounting
from gateway.domain.tally import MAX_DAYS, Sum
from gateway.metrics import Metrics
from schemas.usage import UsageBatch
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LOST = "usage is lost: the log took none for longer than it keeps any"


def test_what_is_lost_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        metrics = Metrics()
        log = MemoryLog(MemoryBroker(), source="/gateway/gw")
        log.connection.disconnect()
        accounting = Accounting("gw", "i", log, metrics)

        def add(days: range) -> None:
            for day in days:
                at = NOW + timedelta(days=day)
                accounting.add(Sum(), model="m", key="", adapter="", now=at)

        def lost() -> float:
            line = next(
                text
                for text in metrics.render().decode().splitlines()
                if text.startswith("yard_gateway_usage_lost_total ")
            )
            return float(line.split()[1])

        add(range(MAX_DAYS))
        assert lost() == 0
        add(range(MAX_DAYS, MAX_DAYS + 3))
        assert lost() == 3
        said = [r for r in caplog.records if r.message == LOST]
        assert len(said) == 1
        log.connection.reconnect()
        await accounting.close()
        assert accounting.rows == 0
        (back,) = [r for r in caplog.records if r.message == "usage is stored again"]
        assert back.__dict__["rows_lost"] == 3

    run(story())


def test_what_was_used_is_added_up_while_the_log_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "EVERY_S", 0.01)

    class Refusing(MemoryLog):
        tries = 0

        async def account(self, batch: UsageBatch) -> int:
            self.tries += 1
            raise Unavailable("no such stream")

    async def story() -> None:
        log = Refusing(MemoryBroker(), source="/gateway/gw")
        told = Accounting("gw", "i", log, Metrics())
        told.add(Sum(), model="m", key="", adapter="", now=NOW)
        times = 0

        def add_up() -> None:
            nonlocal times
            times += 1

        told.before_telling = add_up
        running = asyncio.create_task(told.run())
        await until(lambda: times >= 30, "thirty turns")
        running.cancel()
        # At the turns 1, 3, 7, 15, 31.
        assert log.tries <= 5

    run(story())
