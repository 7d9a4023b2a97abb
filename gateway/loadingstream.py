"""Keeps the stream of a request alive while its model loads, for clients that ask for it: comments that say how far it is.

It decides nothing about the request: whoever waits with it is woken and answered as without.
"""

import asyncio
from typing import Final, TypeVar

from events.log import Wire
from gateway.domain import loading
from gateway.domain.request_fields import RequestFields
from gateway.gateway import Gateway
from gateway.http.messages import Request, Responder
from schemas.progress import FileProgress

T = TypeVar("T")

HEADER: Final = b"x-yard-loading"

GRACE_S: Final = 0.25
"""The head goes out this much later: most refusals of a start come within it, and can then still be a status."""

EVERY_S: Final = 1.0
MOST_HEARD: Final = 1000
"""Replicas whose files are remembered; there are never so many on their way."""


class LoadingStreams:
    """All requests that wait so. What others tell of files is listened to only while there are any, by `run`."""

    def __init__(self, gateway: Gateway, wire: Wire) -> None:
        self._gateway = gateway
        self._wire = wire
        self._fetched: dict[str, FileProgress] = {}
        self._waiting = 0
        self._changed = asyncio.Event()

    def wanted(self, request: Request, fields: RequestFields) -> bool:
        """Whether this request asks for it; only one for a stream can. The engine hears nothing of the question."""
        asked = request.headers.get(HEADER) == b"stream"
        if loading.PARAMETER in request.query:
            rest = loading.without_parameter(request.query)
            asked = asked or rest != request.query
            request.query = rest
        return asked and fields.stream

    async def until(
        self, outcome: "asyncio.Future[T]", respond: Responder, model: str, scope: str
    ) -> T:
        """The outcome of a wait that began now, which the client is told of until it is there."""
        clock = self._gateway.clock
        began_s = clock.now_s()
        if not respond.opened:
            done, _ = await asyncio.wait((outcome,), timeout=GRACE_S)
            if done:
                return outcome.result()
            respond.open_stream(((HEADER, b"stream"),))
        self._count(1)
        try:
            while not outcome.done():
                respond.comment(self._progress(model, scope).comment(clock.now_s() - began_s))
                await asyncio.wait((outcome,), timeout=EVERY_S)
            return outcome.result()
        finally:
            self._count(-1)

    async def run(self) -> None:
        """Listens while somebody waits, until cancelled."""
        while True:
            await self._look()
            if not self._waiting:
                continue
            heard = await self._wire.on_progress("fetch", FileProgress, self._on_fetch)
            try:
                while self._waiting:
                    await self._look()
            finally:
                await heard.close()
                self._fetched.clear()

    async def _look(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _count(self, more: int) -> None:
        self._waiting += more
        self._changed.set()

    def _progress(self, model: str, scope: str) -> loading.Progress:
        table = self._gateway.table
        assert table is not None, "without a table nobody waits"
        return loading.progress(table, model, scope, self._fetched, self._gateway.clock.now())

    def _on_fetch(self, node: str, replica: str, told: FileProgress) -> None:
        if replica in self._fetched or len(self._fetched) < MOST_HEARD:
            self._fetched[replica] = told
