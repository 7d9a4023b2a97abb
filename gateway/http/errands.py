"""What a request that is served without a handler's task, and the connection it came on, need of each other.

Types only: who takes such a request is gateway/express.py's, how it is served gateway/errand.py's; when one ends, server_protocol.py's.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.http.messages import Begun, Responder, Wire
from gateway.http.request_head import RequestHead


class Errand(Protocol):
    """A request that is served without a handler's task, as long as nothing needs one."""

    def left(self) -> None:
        """The client is gone: ends it."""
        ...

    def hand_over(self) -> bool:
        """The handler shall go on with it: calls `ErrandWire.hand_over`. False: its answer has begun."""
        ...

    def dismiss(self) -> bool:
        """The gateway ends, and so does this; whether its client was told so, of whose answer nothing was written."""
        ...


class ErrandWire(Wire, Protocol):
    """The connection it came on, and its answer goes out by."""

    peer: str
    """The client's address."""

    def run(self, errand: Errand) -> None:
        """The request that just came is an errand, until `errand_done` or `hand_over`."""
        ...

    def errand_done(self, *, finished: bool = True) -> None:
        """The whole answer was written; or, not `finished`, what there will ever be of it."""
        ...

    def errand_failed(self, responder: Responder | None) -> None:
        """It cannot be answered as it should, and is by `responder`; None: something of an answer was written."""
        ...

    def hand_over(self, head: RequestHead, whole: bytes, received_at: float, begun: Begun) -> None:
        """The handler goes on with it, which had this head and body."""
        ...


Take = Callable[[ErrandWire, RequestHead, bytes, float], bool]
"""Of a head, its whole body, and `loop.time()` when they were there: begins an errand (`ErrandWire.run`), or leaves it to
the handler (False)."""


def take_none(wire: ErrandWire, head: RequestHead, body: bytes, received_at: float) -> bool:
    """Leaves everything to the handler."""
    return False
