"""Streams the log to HTTP clients as SSE or lines of JSON, from any position, as long as they listen.

Each client has a follower of its own with the filters done by the server; a slow one slows nobody else
down. Nothing is kept for a client that left: it resumes by the last sequence it saw.
"""

import asyncio
import contextlib
import fnmatch
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import msgspec
from msgspec import Struct

from controlplane.metrics import Metrics
from events.lines import line_of, models_of
from events.log import Batch, Broken, EventLog, Follower, Recorded
from events.settings import parse_seconds
from events.subjects import EVT
from schemas.api import ErrorBody, ErrorDetail, EventLine, GapLine

KEEP_ALIVE_S: Final = 15.0
MOST_STREAMS: Final = 100

Format = Literal["sse", "ndjson"]


class BadQuery(ValueError):
    """A parameter of the request makes no sense; the sentence is for the person who sent it."""


class TooManyStreams(Exception):
    """As many clients as this control plane serves at once are already listening."""


class Query(Struct, frozen=True, kw_only=True):
    """What a client wants to see. `after` None: the last event per subject first, then live.

    `after` is told from the whole history, also what was trimmed or ended; `live`: only what comes from
    now on. `since` compares the server's time of storing.
    """

    subjects: tuple[str, ...]
    types: tuple[str, ...] = ()
    model: str | None = None
    after: int | None = None
    live: bool = False
    since: datetime | None = None
    follow: bool = True


def parse_query(
    *,
    subjects: list[str],
    types: list[str],
    model: str | None,
    from_seq: int | None,
    since: str | None,
    state: bool,
    follow: bool,
    last_event_id: str | None,
    prefix: str,
    now: datetime,
) -> Query:
    """The query of a request. The first that is given wins: Last-Event-ID, from_seq, since, state.

    Without any of them: only new events when following, else the whole history.
    Raises BadQuery.
    """
    after: int | None = None
    moment: datetime | None = None
    live = False
    if last_event_id:
        if not last_event_id.isdecimal():
            raise BadQuery(f"Last-Event-ID is a sequence number, not {last_event_id!r}")
        after = int(last_event_id)
    elif from_seq is not None:
        if from_seq < 0:
            raise BadQuery("from_seq is a sequence number, 0 or more")
        after = max(0, from_seq - 1)
    elif since is not None:
        after, moment = 0, parse_since(since, now)
    elif not state:
        live, after = follow, 0
    return Query(
        subjects=tuple(_subject(s, prefix) for s in subjects) or (f"{prefix}.{EVT}.>",),
        types=tuple(types),
        model=model,
        after=after,
        live=live,
        since=moment,
        follow=follow,
    )


def _subject(text: str, prefix: str) -> str:
    """A filter on events. `yard.live.…`, the spelling of tailing tools, means the same events."""
    for head in (f"{prefix}.{EVT}.", f"{prefix}.live."):
        rest = text.removeprefix(head)
        tokens = rest.split(".")
        if text != rest and all(tokens) and not any(c.isspace() for c in rest):
            return f"{prefix}.{EVT}.{rest}"
    raise BadQuery(f"{text!r} is no subject of events; they begin with {prefix}.{EVT}.")


def parse_since(text: str, now: datetime) -> datetime:
    """`10m`, or a point in time as RFC 3339 writes it. Raises BadQuery."""
    with contextlib.suppress(ValueError):
        return now - timedelta(seconds=parse_seconds(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadQuery(
            f"since is a duration such as 10m or a time such as 2026-01-31T12:00:00Z, not {text!r}"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def wanted(item: Recorded | Broken, query: Query) -> bool:
    """Whether the client asked for this event, beyond its subject. Broken ones are always told."""
    if isinstance(item, Broken):
        return True
    if query.since is not None and item.stored_at < query.since:
        return False
    if query.types and not any(fnmatch.fnmatchcase(item.type, t) for t in query.types):
        return False
    return query.model is None or query.model in models_of(item)


def written(line: EventLine | GapLine | ErrorBody | None, kind: Format) -> bytes:
    """One line of the stream; None is a sign of life."""
    if line is None:
        return b": keep-alive\n\n" if kind == "sse" else b"{}\n"
    text = msgspec.json.encode(line)
    if kind == "ndjson":
        return text + b"\n"
    match line:
        case EventLine():
            head = f"id: {line.seq}\nevent: {line.type}\n"
        case GapLine():
            head = "event: gap\n"
        case ErrorBody():
            head = "event: error\n"
    return head.encode() + b"data: " + text + b"\n\n"


class EventStreams:
    """All clients that follow events. `close` ends their streams and deletes their consumers."""

    def __init__(
        self, events: EventLog, metrics: Metrics, *, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self._events = events
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._closing = asyncio.Event()
        self._closers: set[asyncio.Task[None]] = set()
        self._open = 0

    async def open(self, query: Query, kind: Format) -> AsyncIterator[bytes]:
        """The stream of one client. Raises TooManyStreams, and Unavailable when `live` cannot be placed."""
        if self._open >= MOST_STREAMS:
            raise TooManyStreams
        end = (await self._events.identity()).last_seq if query.live else None
        return self._lines(query, end, kind)

    def _follower(self, query: Query, end: int | None) -> Follower:
        """`end`: where the log ended when a `live` query came."""
        if end is not None or query.after is None:
            return self._events.follow(query.subjects, after=end)
        return self._events.history(query.subjects, after=query.after, since=query.since)

    async def _lines(self, query: Query, end: int | None, kind: Format) -> AsyncIterator[bytes]:
        self._open += 1
        self._metrics.event_streams.set(self._open)
        follower = self._follower(query, end)
        closing = asyncio.ensure_future(self._closing.wait())
        coming = asyncio.ensure_future(follower.next())
        try:
            yield b"retry: 2000\n\n" if kind == "sse" else b""
            while True:
                done, _ = await asyncio.wait(
                    {coming, closing},
                    timeout=self._keep_alive_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if closing in done:
                    return
                if not done:
                    yield written(None, kind)
                    continue
                batch = coming.result()
                coming = asyncio.ensure_future(follower.next())
                if batch.reset:
                    gap = "the history was replaced; what follows is the last event per subject"
                    yield written(GapLine(gap=gap), kind)
                for item in batch.items:
                    if wanted(item, query):
                        yield written(line_of(item), kind)
                if not query.follow:
                    if not batch.connected:
                        sentence = "NATS went away before everything was read"
                        error = ErrorDetail(code="nats_unavailable", sentence=sentence)
                        yield written(ErrorBody(error=error), kind)
                        return
                    if batch.synced:
                        return
        finally:
            # No await here: this runs while the client's request is being cancelled.
            self._open -= 1
            self._metrics.event_streams.set(self._open)
            closing.cancel()
            task = asyncio.ensure_future(_end(coming, follower))
            self._closers.add(task)
            task.add_done_callback(self._closers.discard)

    async def close(self) -> None:
        """Ends every stream; returns when their consumers are gone, at most after two seconds."""
        self._closing.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while self._open or self._closers:
                    if self._closers:
                        await asyncio.wait(set(self._closers))
                    else:
                        await asyncio.sleep(0.01)


async def _end(coming: "asyncio.Future[Batch]", follower: Follower) -> None:
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    await follower.close()
