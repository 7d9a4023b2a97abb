"""Takes what arrives of one request's body to the body, and finds where it ends, by its length or by its chunks.

It decides what such a body may cost: how slowly it may come, how much framing it may have, how much of it is read when
nobody wants it any more. It ends nothing itself: that is the connection's, in server_protocol.py.
"""

from typing import Final

from gateway.domain.chunked import ChunkedBody, ChunkError
from gateway.domain.http_rules import CHUNKED
from gateway.http.bodies import Body
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits
from gateway.http.request_head import bad_request

FRAMING_BYTES: Final = 64 * 1024
FRAMING_PER_BYTE: Final = 8
"""What a chunked body may cost beyond its payload: so much, and so much for every byte of it. Chunks of one byte
stay below; chunk extensions, which mean nothing here, do not.
"""


class Arriving:
    """A body that is still being received. `discarding`: the request is over, the rest is only read to pass it.

    `done`: its end was seen. `lost`: nothing that follows can be understood. `rest`: bytes still to come as declared,
    0 for chunks, of which nobody knows.
    """

    __slots__ = (
        "_chunks",
        "_discarded",
        "_limits",
        "_raw",
        "_until_s",
        "body",
        "discarding",
        "done",
        "lost",
        "rest",
    )

    def __init__(self, body: Body, framing: int, limits: ServerLimits, now_s: float) -> None:
        """`framing`: the declared length, not 0, or CHUNKED; `now_s`: seconds of the clock that `bound_s` is given."""
        self.body = body
        self.discarding = False
        self.done = False
        self.lost = False
        self.rest = max(framing, 0)
        self._limits = limits
        self._chunks = ChunkedBody() if framing == CHUNKED else None
        self._raw = 0  # bytes of a chunked body, framing included
        self._discarded = 0
        # When one that comes too slowly is given up; every byte puts it off.
        self._until_s = now_s + limits.body_idle_timeout_s

    def bound_s(self, now_s: float, came: int = 0) -> float:
        """How many seconds may pass from now without a byte; `came`: bytes that came now, they earn it time.

        It is bounded by its silences, and as a whole by the least rate it must have.
        """
        timeout_s = self._limits.body_idle_timeout_s
        if rate := self._limits.body_bytes_per_s:
            self._until_s += came / rate
            timeout_s = min(timeout_s, max(self._until_s - now_s, 0.001))
        return timeout_s

    def receive(self, data: bytes) -> int:
        """Takes the next bytes; returns how many of them are the body's: all, or fewer once `done`.

        When they are no such body, or nearly nothing of them is, whoever reads it hears that (400) and it is `lost`.
        """
        chunks = self._chunks
        if chunks is None:
            used = min(self.rest, len(data))
            self.rest -= used
            self._keep(data if used == len(data) else data[:used])
            self.done = not self.rest
            return used
        out: list[bytes] = []
        try:
            used = chunks.feed(data, out)
        except ChunkError as problem:
            self._lose(f"The request body is not properly chunked: {problem}.")
            return len(data)
        self._raw += used
        if out:
            # One block for all of them: a chunk of one byte would cost fifty in memory.
            self._keep(out[0] if len(out) == 1 else b"".join(out))
        payload = self._discarded if self.discarding else self.body.size
        if self._raw > FRAMING_BYTES + FRAMING_PER_BYTE * payload and not self.body.failed:
            self._lose("The request body is nearly nothing but chunk framing.")
        else:
            self.done = chunks.done
        return used

    def discard(self) -> None:
        """The request is over: from here on bytes are only counted."""
        self.discarding = True
        self._raw = 0

    def too_slow(self) -> None:
        """The time it had is over: whoever reads it hears that (408)."""
        self.body.fail(
            RequestError(
                408,
                "request_timeout",
                "The request body stopped arriving, or came too slowly.",
                close=True,
            )
        )

    @property
    def is_too_much(self) -> bool:
        """Whether more was read for nobody than the connection is worth."""
        return self._discarded > self._limits.discard_bytes

    def _lose(self, message: str) -> None:
        self.lost = True
        self.body.fail(bad_request(message))

    def _keep(self, block: bytes) -> None:
        if self.discarding:
            self._discarded += len(block)
        else:
            self.body.feed(block)
