"""Names what the log needs from a connection: publish, and ask for one answer. Held by NATS and by the twin.

The exceptions tell the one thing that matters afterwards: whether the bytes may have arrived.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class TransportError(Exception):
    """Base; never leaves the package, `events/appender.py` and its like turn it into a LogError."""


class NotSent(TransportError):
    """Not connected: the bytes never left and never will."""


class NoAnswer(TransportError):
    """Sent, but no answer came in time or the connection was lost: it may have arrived."""


class NoResponders(TransportError):
    """The server answered that nobody listens: nothing was stored."""


class Denied(TransportError):
    """The server refused the subject to this user: nothing was stored."""


class Outgoing(Struct, frozen=True, kw_only=True):
    """One message of several that are sent in one go."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class Answers(Struct, frozen=True, kw_only=True):
    """What came back for the first and for the last of them; None for no answer."""

    first: bytes | None
    last: bytes | None


class Transport(Protocol):
    """One connection, from the appender's point of view."""

    @property
    def prefix(self) -> str:
        """First token of every subject."""
        ...

    @property
    def connected(self) -> bool: ...

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Raises NotSent."""
        ...

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The payload of the one answer. Raises NotSent, NoAnswer, NoResponders, Denied."""
        ...

    async def request_all(self, messages: Sequence[Outgoing], *, timeout_s: float) -> Answers:
        """Sends two messages or more back to back; waits for the answer to the last, at most `timeout_s`.

        The first asks as well, and its answer comes before the last one's: it may tell why the rest was
        for nothing. Raises NotSent when the last one never left, NoResponders, Denied.
        """
        ...

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is a connection, waiting for one at most `timeout_s`."""
        ...
