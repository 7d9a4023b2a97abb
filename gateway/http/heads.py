"""Finds the heads of requests in what a client sends, and reads them; one like the head before it is not read again.

It knows no request and no body: what comes behind a head is handed back as it is. What it cannot accept is a RequestError,
behind which the connection ends.
"""

from gateway.domain.known_heads import KnownHead, known_head
from gateway.http.errors import RequestError
from gateway.http.limits import ServerLimits
from gateway.http.request_head import RequestHead, read_request_head


class Heads:
    """The heads of one connection."""

    __slots__ = (
        "_known",
        "_latest",
        "_latest_length",
        "_limits",
        "_parsed",
        "_partial",
        "_searched",
    )

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._partial = bytearray()  # an unfinished head
        self._searched = 0
        self._known: KnownHead | None = None  # the head before, and what was read of it
        self._latest = b""  # the same, as it was
        self._latest_length = 0
        self._parsed: RequestHead | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a part of a head is here, and not all of it."""
        return bool(self._partial)

    def clear(self) -> None:
        """Forgets an unfinished head."""
        self._partial.clear()

    def cut(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The next head with its empty line, and what came behind it, once `data` ends it; None: more has to come.

        Raises RequestError (431) when it is too large.
        """
        if self._partial:
            self._partial += data
            end = self._partial.find(b"\r\n\r\n", max(0, self._searched - 3))
            self._searched = len(self._partial)
            if end >= 0:
                data = bytes(self._partial)
                self._partial.clear()
        else:
            if data[0] in b"\r\n":  # empty lines before a request are let pass (RFC 9112, 2.2)
                data = data.lstrip(b"\r\n")
                if not data:
                    return None
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._partial += data
                self._searched = len(data)
        if (len(self._partial) if end < 0 else end) > self._limits.head_bytes:
            raise RequestError(
                431,
                "invalid_request",
                f"The request head is larger than the limit of {self._limits.head_bytes} bytes.",
                close=True,
            )
        if end < 0:
            return None
        self._searched = 0
        return data[: end + 4], data[end + 4 :]

    def read(self, head: bytes) -> tuple[RequestHead, int]:
        """What a head says, and the framing of the body behind it. Raises RequestError."""
        known = self._known
        if head == self._latest:
            framing = self._latest_length
        else:
            framing = -1 if known is None else known.length_in(head)
        if framing > 0:
            self._latest, self._latest_length = head, framing
            assert self._parsed is not None, "read when it was first known"
            return self._parsed, framing
        parsed = read_request_head(head, self._limits)
        framing = parsed.facts.framing
        if framing > 0:
            self._known = known_head(head)
            self._parsed = parsed
            self._latest, self._latest_length = head, framing
        return parsed, framing
