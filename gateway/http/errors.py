"""The error tree of the gateway's HTTP: what an engine did wrong, and what a client did wrong.

Everything asyncio, httptools or a socket raises is mapped to one of these where it was called; a
handler never sees an OSError. It holds no policy: whether to try elsewhere is the caller's decision.
"""


class EngineError(Exception):
    """An exchange with an engine failed. `reason` is a sentence for people, without secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConnectFailed(EngineError):
    """No connection to the engine: refused, unreachable or no answer within the connect timeout.

    Nothing of the request was sent, so trying elsewhere is always safe.
    """


class EngineGone(EngineError):
    """The engine ended the connection (or the exchange was aborted) before its answer was complete.

    `before_first_byte`: nothing of the answer had been passed to the client, so the caller may send
    the request elsewhere. `aborted`: it was our own `Exchange.abort`, not the engine.
    """

    def __init__(self, reason: str, *, before_first_byte: bool, aborted: bool = False) -> None:
        super().__init__(reason)
        self.before_first_byte = before_first_byte
        self.aborted = aborted


class BadEngineAnswer(EngineError):
    """The engine broke HTTP: a malformed or oversized head, or framing that contradicts itself.

    `before_first_byte` as in EngineGone.
    """

    def __init__(self, reason: str, *, before_first_byte: bool = True) -> None:
        super().__init__(reason)
        self.before_first_byte = before_first_byte


class ReadTimeout(EngineGone):
    """The engine was silent for longer than ClientLimits allows: before its first byte, or between two."""


class RequestError(Exception):
    """A request that cannot be served as it came; the server answers it if the handler does not.

    `status` and `code` are those of the client-facing table, `message` a sentence. `close` says
    that the connection cannot be used again. `retry_after_s` becomes Retry-After.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        close: bool = False,
        retry_after_s: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.close = close
        self.retry_after_s = retry_after_s
        self.param = param


class BodyTooLarge(RequestError):
    """The request body is larger than the configured cap (413), whatever its framing."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            413,
            "request_too_large",
            f"The request body is larger than the limit of {limit_bytes} bytes.",
            close=True,
        )


class BudgetFull(RequestError):
    """All bodies this gateway keeps together reached their budget (503 `queue_full`)."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "queue_full",
            "This gateway is holding as many request bodies as it may; try again shortly.",
            close=True,
            retry_after_s=1,
        )


class NoDescriptors(RequestError):
    """This process has no descriptor left for one connection more (503 `queue_full`); the engine is not to blame."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "queue_full",
            "This gateway has as many connections open as it may; try again shortly.",
            retry_after_s=1,
        )


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""
