"""What a gateway says of accounts that no log took for as long as one keeps them."""

from datetime import UTC, datetime, timedelta

import pytest

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from gateway.accounting import Accounting
from gateway.domain.tally import MAX_DAYS, Sum
from gateway.metrics import Metrics
from tests.support.aio import run

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
