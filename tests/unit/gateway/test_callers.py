"""Who sent a request is worked out once for the headers of a connection, and looked at again whenever it may differ."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from gateway.callers import Callers
from gateway.domain.answers import Answer
from gateway.domain.http_rules import Headers
from gateway.domain.keytable import Caller
from gateway.domain.table import Table
from gateway.gateway import Gateway
from gateway.http.messages import Request
from schemas.settings import GatewaySettings
from tests.support.gateway_keys import ID, a_key, text_of


class _Clock:
    """Both clocks stand still; `at` is the wall's."""

    def __init__(self) -> None:
        self.at = datetime(2026, 3, 1, tzinfo=UTC)

    def now_s(self) -> float:
        return 0.0

    def now(self) -> datetime:
        return self.at

    def wall_ms(self, at_s: float) -> float:
        return at_s


def _asking(text: str) -> Request:
    """One request of a connection whose head stays the same."""
    headers = Headers([(b"host", b"a"), (b"authorization", b"Bearer " + text.encode())])
    return cast(Request, SimpleNamespace(headers=headers, peer="127.0.0.1"))


def _set_up(**fields: Any) -> tuple[Gateway, Callers, _Clock]:
    clock = _Clock()
    gateway = Gateway("gw", GatewaySettings(), clock)
    table = Table()
    table.keys.put(a_key(**fields))
    gateway.install(table, synced=True)
    return gateway, Callers(gateway, "auto", beyond_loopback=False), clock


def _told(found: Caller | Answer) -> str:
    return found.code if isinstance(found, Answer) else found.id


def test_a_key_that_expires_ends_the_requests_of_an_open_connection_too() -> None:
    clock_end = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=1)
    _, callers, clock = _set_up(expires_at=clock_end)
    request = _asking(text_of())
    assert [
        _told(callers.identify("inference", request.headers, request.peer)) for _ in range(2)
    ] == [ID, ID]
    clock.at = clock_end
    assert _told(callers.identify("inference", request.headers, request.peer)) == "invalid_api_key"


def test_a_key_that_changes_or_goes_is_looked_at_anew() -> None:
    gateway, callers, _ = _set_up()
    table = gateway.table
    assert table is not None
    request = _asking(text_of())
    assert _told(callers.identify("inference", request.headers, request.peer)) == ID
    table.keys.put(a_key(rpm=5))
    changed = callers.identify("inference", request.headers, request.peer)
    assert isinstance(changed, Caller)
    assert changed.key is not None
    assert changed.key.rpm == 5
    table.keys.put(a_key(hash="0" * 64))
    assert _told(callers.identify("inference", request.headers, request.peer)) == "invalid_api_key"
    table.keys.drop(ID)
    table.keys.had_any = True
    assert _told(callers.identify("inference", request.headers, request.peer)) == "invalid_api_key"


def test_who_was_refused_is_not_remembered() -> None:
    gateway, callers, _ = _set_up(hash="0" * 64)
    request = _asking(text_of())
    assert _told(callers.identify("inference", request.headers, request.peer)) == "invalid_api_key"
    table = gateway.table
    assert table is not None
    table.keys.put(a_key())
    assert _told(callers.identify("inference", request.headers, request.peer)) == ID
