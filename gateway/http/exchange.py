"""One request to one engine as a handle: its times, and a way to end it from outside.

It is made by the caller before the request starts, so that whoever learns that a replica is gone can
end the exchange whatever it is waiting for. It does no I/O itself.
"""

from collections.abc import Callable

from gateway.http.errors import EngineGone


class Exchange:
    """Times are `loop.time()`; None until they happened. `sent_bytes` counts the request's body."""

    __slots__ = (
        "_abort",
        "aborted",
        "explain",
        "head_at",
        "on_written",
        "reused",
        "stalled",
        "written_at",
    )

    def __init__(self, on_written: Callable[[], None] | None = None) -> None:
        self.on_written = on_written
        self.written_at: float | None = None
        self.head_at: float | None = None
        self.reused = False
        """Whether it went over a connection that had served before."""
        self.stalled = False
        """The engine was silent for longer than it may be."""
        self.aborted: str | None = None
        """The reason given to abort()."""
        self.explain: Callable[[], str | None] | None = None
        """Asked when the engine's connection breaks in the middle of an answer: a sentence that says more."""
        self._abort: Callable[[str], None] | None = None

    def abort(self, reason: str) -> None:
        """Closes the engine's connection at any time; `reason` is a sentence the client may see.

        Before the client's first byte request() or relay() raises EngineGone(aborted=True,
        before_first_byte=True); after it a stream ends with an error frame that says `reason`.
        Nothing happens once the answer was complete.
        """
        if self.aborted is None:
            self.aborted = reason
            if self._abort is not None:
                self._abort(reason)

    def check(self) -> None:
        """Raises EngineGone when it was aborted: what it is about to wait for will not come."""
        if self.aborted is not None:
            raise EngineGone(self.aborted, before_first_byte=True, aborted=True)

    def why(self, reason: str) -> str:
        """What a client is told of an answer that broke off for `reason`."""
        if self.aborted is not None or self.explain is None:
            return reason
        return self.explain() or reason

    def bind(self, abort: Callable[[str], None] | None) -> None:
        """The client's: what an abort has to end at this stage."""
        self._abort = abort

    def wrote(self, now: float) -> None:
        """The client's: the first byte was written to the engine at `now`."""
        self.written_at = now
        on_written, self.on_written = self.on_written, None
        if on_written is not None:
            on_written()
