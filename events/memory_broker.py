"""Answers like a JetStream server for one yard, in memory: streams, checks, batches, and faults on demand.

The appender and the readers above it are the real ones; only the server is a twin, held to the same
contract suite. It is for tests and demonstrations: nothing survives the process.
"""

import asyncio
import base64
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from events.codec import StoredMessage
from events.envelope import (
    BATCH_COMMIT,
    BATCH_ID,
    BATCH_SEQUENCE,
    EXPECTED_SEQ,
    EXPECTED_SEQ_SUBJECT,
    EXPECTED_STREAM,
    MSG_ID,
    ROLLUP,
    TRACEPARENT,
    TTL,
    traceparent_of,
)
from events.ids import new_id, utc_now
from events.lookup import NO_MESSAGE
from events.retry import ServerError
from events.streams import SCHEMA, STREAM_ID, stream_name
from events.subjects import PREFIX
from events.transport import Answers, NoAnswer, NoResponders, NotSent, Outgoing

MAX_PER_SUBJECT: Final = 64

_WRONG_LAST = ServerError(code=400, err_code=10071, description="wrong last sequence")
_INCOMPLETE = ServerError(
    code=400, err_code=10176, description="atomic publish batch is incomplete"
)
_FULL = ServerError(code=503, err_code=10077, description="maximum bytes exceeded")


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject lies under a pattern with `*` and a final `>`."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or part not in ("*", tokens[index]):
            return False
    return len(wanted) == len(tokens)


@dataclass(slots=True)
class MemoryStream:
    """One stream: messages by sequence, newest per subject, dedupe ids, batches under way."""

    name: str
    per_subject: int
    stream_id: str
    created: str
    schema: int
    copies: list[StoredMessage]
    """Where every message is kept, whatever becomes of it here."""
    last_seq: int = 0
    full: bool = False
    messages: dict[int, StoredMessage] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ids: dict[str, int] = field(default_factory=dict)
    expires: dict[int, datetime] = field(default_factory=dict)
    batches: dict[str, list[tuple[str, bytes, dict[str, str]]]] = field(default_factory=dict)

    def last_of(self, subject: str) -> int:
        """The last sequence of a literal subject, 0 when it is empty."""
        seqs = self.subjects.get(subject)
        return seqs[-1] if seqs else 0

    def after(self, seq: int) -> list[int]:
        """Sequences behind `seq` that were ever stored, in order; trimmed ones included."""
        return self.order[bisect_right(self.order, seq) :]

    def remove(self, seq: int) -> None:
        """Takes one message away."""
        message = self.messages.pop(seq, None)
        self.expires.pop(seq, None)
        if message is None:
            return
        seqs = self.subjects[message.subject]
        seqs.remove(seq)
        if not seqs:
            del self.subjects[message.subject]

    def store(self, subject: str, payload: bytes, headers: Mapping[str, str], now: datetime) -> int:
        """Appends without any check; rollup, TTL and the limit per subject take effect."""
        self.last_seq += 1
        seq = self.last_seq
        if headers.get(ROLLUP) == "sub":
            for old in list(self.subjects.get(subject, ())):
                self.remove(old)
        message = StoredMessage(
            seq=seq,
            subject=subject,
            payload=payload,
            stored_at=now,
            traceparent=traceparent_of(headers.get(TRACEPARENT)),
        )
        self.messages[seq] = message
        self.copies.append(message)
        self.order.append(seq)
        self.subjects[subject].append(seq)
        if MSG_ID in headers:
            self.ids[headers[MSG_ID]] = seq
        if TTL in headers:
            self.expires[seq] = now + timedelta(seconds=int(headers[TTL]))
        if 0 < self.per_subject < len(self.subjects[subject]):
            self.remove(self.subjects[subject][0])
        return seq

    def expire(self, now: datetime) -> None:
        """Forgets what outlived its TTL."""
        for seq in [s for s, at in self.expires.items() if at <= now]:
            self.remove(seq)


class MemoryBroker:
    """The server of one in-memory yard; every `connect` stands for one process.

    Switches for faults, each consumed by the next publish it applies to:
    `lose_acks` stored, but the answer never comes; `lose_messages` neither; `refusals` answered with that
    error; `no_responders` nobody there; `before_publish` runs first (another writer comes between).
    `lose_reads` counts unanswered reads of single messages. `audit_lags` until it is unset; `audit_asked`
    counts who wanted to know.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], datetime] = utc_now,
        mint: Callable[[], str] = new_id,
        prefix: str = PREFIX,
        schema: int = 1,
    ) -> None:
        self.clock = clock
        self.mint = mint
        self.prefix = prefix
        self.schema = schema
        self.audit: list[StoredMessage] = []
        self.audit_lags = False
        self.audit_asked = 0
        self.events = self._stream("EVENTS", MAX_PER_SUBJECT)
        self.commands = self._stream("COMMANDS", -1)
        self.usage = self._stream("USAGE", -1)
        self.lose_acks = 0
        self.lose_messages = 0
        self.lose_reads = 0
        self.no_responders = 0
        self.refusals: deque[ServerError] = deque()
        self.before_publish: Callable[[str], None] | None = None
        self.published = 0
        self._connections: set[MemoryConnection] = set()
        self._subscribers: list[tuple[str, MemoryConnection, Callable[[str, bytes], None]]] = []
        self._responders: dict[
            str, tuple[MemoryConnection, Callable[[bytes], Awaitable[bytes]]]
        ] = {}

    def connect(self, name: str = "memory", user: str = "") -> "MemoryConnection":
        """A new connection, connected."""
        connection = MemoryConnection(self, name, user)
        self._connections.add(connection)
        return connection

    def put(self, subject: str, payload: bytes) -> int:
        """Stores any bytes on an event subject, past every check: how tests make junk."""
        seq = self.events.store(subject, payload, {}, self.clock())
        self.notify()
        return seq

    def replace_events(self) -> None:
        """The events stream is deleted and made anew, empty."""
        self.events = self._stream("EVENTS", MAX_PER_SUBJECT)
        self.notify()

    def replace_usage(self) -> None:
        """The usage stream is deleted and made anew, empty."""
        self.usage = self._stream("USAGE", -1)
        self.notify()

    def lose_tail(self, after: int) -> None:
        """The events stream goes back to `after`, as a restored backup does."""
        for seq in [s for s in self.events.messages if s > after]:
            self.events.remove(seq)
        self.events.order = [s for s in self.events.order if s <= after]
        self.events.ids = {i: s for i, s in self.events.ids.items() if s <= after}
        self.events.last_seq = after
        self.notify()

    def drop_batches(self) -> None:
        """Forgets batches under way, as a server does that was restarted in between."""
        self.events.batches.clear()

    def notify(self) -> None:
        """Wakes every waiting follower."""
        for connection in self._connections:
            connection.tell()

    def forget(self, connection: "MemoryConnection") -> None:
        """A closed connection."""
        self._connections.discard(connection)
        self._subscribers = [s for s in self._subscribers if s[1] is not connection]

    def listen(
        self, pattern: str, connection: "MemoryConnection", handler: Callable[[str, bytes], None]
    ) -> Callable[[], None]:
        """Core subscription; the result ends it."""
        entry = (pattern, connection, handler)
        self._subscribers.append(entry)
        return lambda: self._subscribers.remove(entry) if entry in self._subscribers else None

    def deliver(self, subject: str, payload: bytes) -> None:
        """Hands a core message to whoever listens and is connected."""
        loop = asyncio.get_running_loop()
        for pattern, connection, handler in self._subscribers:
            if connection.connected and matches(pattern, subject):
                loop.call_soon(handler, subject, payload)

    def respond(
        self,
        subject: str,
        connection: "MemoryConnection",
        answer: Callable[[bytes], Awaitable[bytes]],
    ) -> Callable[[], None]:
        """Answers requests on a literal subject; the result ends it."""
        self._responders[subject] = (connection, answer)

        def end() -> None:
            self._responders.pop(subject, None)

        return end

    def responder(self, subject: str) -> Callable[[bytes], Awaitable[bytes]] | None:
        """Who answers there now."""
        found = self._responders.get(subject)
        return found[1] if found is not None and found[0].connected else None

    def answer(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> bytes:
        """What the server answers to a request. Raises NoAnswer, NoResponders."""
        for stream in (self.events, self.commands, self.usage):
            stream.expire(self.clock())
            if subject == f"$JS.API.STREAM.INFO.{stream.name}":
                return self._info(stream)
            if subject == f"$JS.API.STREAM.MSG.GET.{stream.name}":
                return self._get(stream, msgspec.json.decode(payload))
        for kind, stream in (("evt", self.events), ("cmd", self.commands), ("use", self.usage)):
            if subject.startswith(f"{self.prefix}.{kind}."):
                return self._publish(stream, subject, payload, dict(headers))
        raise NoResponders(subject)

    def _stream(self, kind: str, per_subject: int) -> MemoryStream:
        return MemoryStream(
            name=stream_name(kind, self.prefix),
            per_subject=per_subject,
            stream_id=self.mint(),
            created=self.clock().isoformat(),
            schema=self.schema,
            copies=self.audit if kind == "EVENTS" else [],
        )

    def _publish(
        self, stream: MemoryStream, subject: str, payload: bytes, headers: dict[str, str]
    ) -> bytes:
        self.published += 1
        hook, self.before_publish = self.before_publish, None
        if hook is not None:
            hook(subject)
        if self.no_responders > 0:
            self.no_responders -= 1
            raise NoResponders(subject)
        if self.lose_messages > 0:
            self.lose_messages -= 1
            raise NoAnswer(subject)
        if self.refusals:
            return _error(self.refusals.popleft())
        raw = self._accept(stream, subject, payload, headers)
        if self.lose_acks > 0 and (BATCH_ID not in headers or BATCH_COMMIT in headers):
            self.lose_acks -= 1
            raise NoAnswer(subject)
        return raw

    def _accept(
        self, stream: MemoryStream, subject: str, payload: bytes, headers: dict[str, str]
    ) -> bytes:
        if headers.get(EXPECTED_STREAM, stream.name) != stream.name:
            return _error(ServerError(code=400, err_code=10060, description="expected stream"))
        batch_id = headers.get(BATCH_ID)
        if batch_id is None:
            # A single server looks at the expected sequence before it looks for a duplicate.
            if not _expected_holds(stream, subject, headers):
                return _error(_WRONG_LAST)
            known = stream.ids.get(headers.get(MSG_ID, ""))
            if known is not None:
                return _ack(stream, known, duplicate=True)
            if stream.full:
                return _error(_FULL)
            seq = stream.store(subject, payload, headers, self.clock())
            self.notify()
            return _ack(stream, seq)
        position = int(headers[BATCH_SEQUENCE])
        if position == 1:
            stream.batches[batch_id] = []
        batch = stream.batches.get(batch_id)
        if batch is None or len(batch) != position - 1:
            stream.batches.pop(batch_id, None)
            return _error(_INCOMPLETE)
        batch.append((subject, payload, headers))
        if headers.get(BATCH_COMMIT) != "1":
            return b""
        del stream.batches[batch_id]
        if any(MSG_ID in h and h[MSG_ID] in stream.ids for _, _, h in batch):
            return _error(ServerError(code=400, err_code=10201, description="duplicate"))
        if not all(_expected_holds(stream, s, h) for s, _, h in batch):
            return _error(_WRONG_LAST)
        if stream.full:
            return _error(_FULL)
        now = self.clock()
        seq = [stream.store(s, p, h, now) for s, p, h in batch][-1]
        self.notify()
        return _ack(stream, seq, batch=batch_id, count=len(batch))

    def _info(self, stream: MemoryStream) -> bytes:
        return msgspec.json.encode(
            {
                "config": {
                    "name": stream.name,
                    "metadata": {STREAM_ID: stream.stream_id, SCHEMA: str(stream.schema)},
                },
                "created": stream.created,
                "state": {"last_seq": stream.last_seq, "messages": len(stream.messages)},
            }
        )

    def _get(self, stream: MemoryStream, query: dict[str, Any]) -> bytes:
        if self.lose_reads > 0:
            self.lose_reads -= 1
            raise NoAnswer(stream.name)
        found: int | None
        if "last_by_subj" in query:
            found = stream.last_of(query["last_by_subj"]) or None
        elif "next_by_subj" in query:
            seqs = stream.subjects.get(query["next_by_subj"], [])
            found = next((s for s in seqs if s >= query["seq"]), None)
        else:
            found = query["seq"] if query["seq"] in stream.messages else None
        if found is None:
            return _error(
                ServerError(code=404, err_code=NO_MESSAGE, description="no message found")
            )
        message = stream.messages[found]
        return msgspec.json.encode(
            {
                "message": {
                    "subject": message.subject,
                    "seq": message.seq,
                    "data": base64.b64encode(message.payload).decode(),
                    "time": message.stored_at,
                }
            }
        )


class MemoryConnection:
    """A Transport to the broker: one process's connection, cut and restored by a test."""

    def __init__(self, broker: MemoryBroker, name: str, user: str) -> None:
        self.broker = broker
        self.name = name
        self.user = user
        self._watching: set[asyncio.Event] = set()
        self._up = True
        self.generation = 1

    @property
    def prefix(self) -> str:
        return self.broker.prefix

    @property
    def connected(self) -> bool:
        return self._up

    def disconnect(self) -> None:
        """The connection is lost; nothing is sent or heard until `reconnect`."""
        self._up = False
        self.tell()

    def reconnect(self) -> None:
        """A new connection in its place."""
        self._up = True
        self.generation += 1
        self.tell()

    async def close(self) -> None:
        """Ends it for good."""
        self.disconnect()
        self.broker.forget(self)

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Core publish, or a middle message of a batch. Raises NotSent."""
        if not self._up:
            raise NotSent(subject)
        if subject.startswith((f"{self.prefix}.evt.", f"{self.prefix}.cmd.")):
            self.broker.answer(subject, payload, headers or {})
        else:
            self.broker.deliver(subject, payload)

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """See Transport.request; a lost answer is lost at once, nobody waits for `timeout_s`."""
        if not self._up:
            raise NotSent(subject)
        # Others may run in between, as they do while a real answer is under way.
        await asyncio.sleep(0)
        if not self._up:
            raise NoAnswer(subject)
        return self.broker.answer(subject, payload, headers or {})

    async def request_all(self, messages: Sequence[Outgoing], *, timeout_s: float) -> Answers:
        """See Transport.request_all; what a fault lets happen between two messages happens there."""
        if not self._up:
            raise NotSent(messages[-1].subject)
        await asyncio.sleep(0)
        first: bytes | None = None
        last: bytes | None = None
        for index, one in enumerate(messages):
            if not self._up:
                return Answers(first=None, last=None)
            asks = index in (0, len(messages) - 1)
            raw: bytes | None = None
            try:
                raw = self.broker.answer(one.subject, one.payload, one.headers)
            except NoAnswer:
                pass
            except NoResponders:
                if asks:
                    raise
            if index == 0:
                first = raw
            last = raw
        return Answers(first=first, last=last) if self._up else Answers(first=None, last=None)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is a connection, waiting for one at most `timeout_s`."""
        event = self.watch()
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while not self._up:
                    event.clear()
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            self.unwatch(event)
        return self._up

    def watch(self) -> asyncio.Event:
        """An event set whenever something was stored or the connection changed; its owner clears it."""
        event = asyncio.Event()
        self._watching.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Ends a watch."""
        self._watching.discard(event)

    def tell(self) -> None:
        """Sets every watched event."""
        for event in self._watching:
            event.set()


def _expected_holds(stream: MemoryStream, subject: str, headers: Mapping[str, str]) -> bool:
    expected = headers.get(EXPECTED_SEQ)
    if expected is None:
        return True
    return stream.last_of(headers.get(EXPECTED_SEQ_SUBJECT, subject)) == int(expected)


def _ack(stream: MemoryStream, seq: int, **more: Any) -> bytes:
    return msgspec.json.encode({"stream": stream.name, "seq": seq, **more})


def _error(error: ServerError) -> bytes:
    return msgspec.json.encode({"error": error})
