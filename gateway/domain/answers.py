"""The one table of what a client is told when it is not served: status, type, Retry-After, x-should-retry.

Pure: it makes an `Answer` as a value; the shell writes it. The codes are those of schemas/codes.py and
the gateway's own; a code that is not in `CODES` cannot be answered.
"""

import math
from datetime import datetime
from typing import Final, Literal

import msgspec
from msgspec import Struct

from schemas.activation import Activation
from schemas.record import Record

Code = Literal[
    "model_not_found",
    "card_not_found",
    "model_off",
    "model_loading",
    "no_capacity",
    "start_failed",
    "model_quarantined",
    "queue_full",
    "model_busy",
    "card_kept",
    "draining",
    "yard_unavailable",
    "engine_error",
    "invalid_api_key",
    "key_not_allowed",
    "key_may_not_activate",
    "rate_limit_exceeded",
    "route_not_forwarded",
    "endpoint_not_supported",
    "response_not_found",
    "not_found",
    "method_not_allowed",
    "invalid_request",
    "request_too_large",
    "unsupported_media_type",
    "internal_error",
]

RetryRule = Literal["none", "fixed", "load", "backoff", "holders", "limit", "line"]
"""Where Retry-After comes from: nowhere, the table, the time left of this load, the next allowed start,
the measured loads of the replicas whose room is waited for, when the key's limit has room again, or how long
a request that came now would stand in line."""

RETRY_MIN_S: Final = 1
RETRY_MAX_S: Final = 60


class Row(Struct, frozen=True, kw_only=True):
    """One row of the table. `should_retry` None: the header is not sent."""

    status: int
    type: str
    retry: RetryRule = "none"
    retry_s: int | None = None
    should_retry: bool | None = None


_INVALID: Final = "invalid_request_error"
_UNAVAILABLE: Final = "service_unavailable_error"

CODES: Final[dict[Code, Row]] = {
    "model_not_found": Row(status=404, type=_INVALID, should_retry=False),
    "card_not_found": Row(status=404, type=_INVALID, should_retry=False),
    "model_off": Row(status=503, type=_UNAVAILABLE, should_retry=False),
    "model_loading": Row(status=503, type=_UNAVAILABLE, retry="load", should_retry=True),
    # `no_capacity` after a wait in the queue for room; see NO_ROOM_AT_ALL for the refusal at once.
    "no_capacity": Row(status=503, type=_UNAVAILABLE, retry="holders", should_retry=True),
    "start_failed": Row(status=503, type=_UNAVAILABLE, retry="backoff", should_retry=True),
    "model_quarantined": Row(
        status=503, type=_UNAVAILABLE, retry="fixed", retry_s=60, should_retry=False
    ),
    "queue_full": Row(status=503, type=_UNAVAILABLE, retry="load", should_retry=True),
    "model_busy": Row(status=503, type=_UNAVAILABLE, retry="line", should_retry=True),
    "card_kept": Row(status=503, type=_UNAVAILABLE, retry="fixed", retry_s=60, should_retry=True),
    "draining": Row(status=503, type=_UNAVAILABLE, retry="fixed", retry_s=1, should_retry=True),
    "yard_unavailable": Row(
        status=503, type=_UNAVAILABLE, retry="fixed", retry_s=5, should_retry=True
    ),
    "engine_error": Row(status=502, type="engine_error", should_retry=True),
    "invalid_api_key": Row(status=401, type="authentication_error", should_retry=False),
    "key_not_allowed": Row(status=403, type="permission_error", should_retry=False),
    "key_may_not_activate": Row(status=403, type="permission_error", should_retry=False),
    "rate_limit_exceeded": Row(
        status=429, type="rate_limit_error", retry="limit", should_retry=True
    ),
    "route_not_forwarded": Row(status=403, type="permission_error", should_retry=False),
    # Asking again would not help, whatever clients make of a status above 500.
    "endpoint_not_supported": Row(status=501, type="not_supported_error", should_retry=False),
    "response_not_found": Row(status=404, type=_INVALID, should_retry=False),
    "not_found": Row(status=404, type=_INVALID, should_retry=False),
    "method_not_allowed": Row(status=405, type=_INVALID, should_retry=False),
    "invalid_request": Row(status=400, type=_INVALID, should_retry=False),
    "request_too_large": Row(status=413, type=_INVALID, should_retry=False),
    "unsupported_media_type": Row(status=415, type=_INVALID, should_retry=False),
    "internal_error": Row(status=500, type="server_error", should_retry=False),
}

NO_ROOM_AT_ALL: Final = Row(
    status=503, type=_UNAVAILABLE, retry="fixed", retry_s=60, should_retry=False
)
"""`no_capacity` refused at once: it fits on no reachable card even when emptied."""


class Answer(Struct, frozen=True, kw_only=True):
    """What the client gets instead of an engine's answer."""

    status: int
    code: Code
    type: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    should_retry: bool | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After and x-should-retry; openai-python obeys the second before the status. A 401 says how to
        present a key."""
        found: list[tuple[bytes, bytes]] = []
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.should_retry is not None:
            found.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return found

    def body(self) -> bytes:
        """The OpenAI envelope."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def answer(
    code: Code, message: str, *, retry_s: float | None = None, param: str | None = None
) -> Answer:
    """The answer of a row. `retry_s` is the estimate a row with a moving Retry-After needs; it is rounded
    up and clamped to 1..60, because clients give up on longer ones."""
    return _of_row(CODES[code], code, message, retry_s=retry_s, param=param)


def leaving() -> Answer:
    """This gateway ends: for who comes now, and for who still waits then."""
    return answer("draining", "This gateway is shutting down; send the request again.")


def no_room_at_all(message: str) -> Answer:
    return _of_row(NO_ROOM_AT_ALL, "no_capacity", message, retry_s=None, param="model")


def _of_row(
    row: Row, code: Code, message: str, *, retry_s: float | None, param: str | None
) -> Answer:
    if row.retry == "none":
        seconds = None
    elif row.retry == "fixed":
        seconds = row.retry_s
    else:
        seconds = clamp_retry_s(retry_s if retry_s is not None else RETRY_MIN_S)
    return Answer(
        status=row.status,
        code=code,
        type=row.type,
        message=message,
        param=param,
        retry_after_s=seconds,
        should_retry=row.should_retry,
    )


def clamp_retry_s(seconds: float) -> int:
    """Whole seconds from 1 to 60, rounded up."""
    return max(RETRY_MIN_S, min(RETRY_MAX_S, math.ceil(seconds)))


def measured_load_s(record: Record | None, profile: str | None) -> float | None:
    """The longest of the last load times measured for the profile, on any kind of card; None: none yet.

    The longest: a client that comes back too early only waits again.
    """
    if record is None:
        return None
    loads = [
        max(m.load_s)
        for m in record.measured
        if m.load_s and (profile is None or m.profile == profile)
    ]
    return max(loads) if loads else None


def load_left_s(activation: Activation | None, record: Record | None, now: datetime) -> float:
    """How long the load of this activation will still take, at least 1.

    1. the activation says when the engine should be ready, and that is ahead
    2. it is not loading yet: a whole measured load, less what has passed since it was asked for
    3. overdue, or nothing was ever measured: a quarter of what has passed
    """
    if activation is None:
        return float(RETRY_MIN_S)
    elapsed_s = max(0.0, (now - activation.since).total_seconds())
    if activation.expected_ready_at is not None:
        left_s = (activation.expected_ready_at - now).total_seconds()
        if left_s > 0:  # 1
            return max(1.0, left_s)
    else:
        measured_s = measured_load_s(record, activation.profile)
        if measured_s is not None and measured_s > elapsed_s:  # 2
            return max(1.0, measured_s - elapsed_s)
    return max(1.0, elapsed_s / 4)  # 3


def backoff_left_s(activation: Activation | None, record: Record | None, now: datetime) -> float:
    """Until the next start of this model may be tried: the refusal's own time, else the record's earliest."""
    if activation is not None and activation.retry_at is not None and activation.retry_at > now:
        return (activation.retry_at - now).total_seconds()
    ahead = [
        (f.next_allowed_at - now).total_seconds()
        for f in (record.failures if record is not None else ())
        if f.next_allowed_at > now
    ]
    return min(ahead) if ahead else float(RETRY_MIN_S)
