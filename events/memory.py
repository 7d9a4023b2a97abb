"""The log and the wire in memory, for tests of everything above the log: fast, with faults on demand.

The appender, the codec, the reads and the epoch rule are the real ones over `events/memory_broker.py`; only
followers and beacons are written anew, because without a network they are short.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec import Struct

from events.appender import Appender, RetryBudget
from events.codec import UNREADABLE, StoredMessage, command_name, decode_command
from events.ids import new_id
from events.log import (
    Appended,
    Batch,
    Broken,
    Draft,
    Fence,
    Recorded,
    StoredCommand,
    StreamIdentity,
    Unavailable,
    UsagePage,
)
from events.lookup import StreamReads
from events.memory_broker import MemoryBroker, MemoryConnection, MemoryStream, matches
from events.reading import Reader, read_last
from events.subjects import (
    NotASubject,
    beacon_subject,
    command_subject,
    decode_token,
    progress_subject,
    rpc_subject,
    usage_subject,
)
from events.usage import decode_usage, is_other
from schemas.commands import Command
from schemas.usage import UsageBatch

B = TypeVar("B", bound=Struct)

MAX_ITEMS = 1000
DEFAULT_BUDGET = RetryBudget(ack_timeout_s=0.2, budget_s=2.0)


class MemoryLog:
    """The EventLog of one process on a shared broker; `log.connection` cuts and restores its connection."""

    def __init__(
        self,
        broker: MemoryBroker | MemoryConnection,
        *,
        source: str = "/cp/memory",
        clock: Callable[[], datetime] | None = None,
        mint: Callable[[], str] = new_id,
        budget: RetryBudget = DEFAULT_BUDGET,
    ) -> None:
        self.connection = broker.connect(source) if isinstance(broker, MemoryBroker) else broker
        self.broker = self.connection.broker
        self._reads = StreamReads(self.connection, self.broker.events.name)
        self._appender = Appender(
            self.connection,
            source=source,
            clock=clock or self.broker.clock,
            mint=mint,
            events_stream=self.broker.events.name,
            budget=budget,
        )

    @property
    def connected(self) -> bool:
        return self.connection.connected

    async def append(self, draft: Draft, *, epoch: int) -> Appended:
        """See EventLog.append."""
        return await self._appender.append(draft, epoch=epoch)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        """See EventLog.append_batch."""
        return await self._appender.append_batch(drafts, epoch=epoch, fence=fence)

    async def last(self, subject: str) -> Recorded | Broken | None:
        """See EventLog.last."""
        return await read_last(self._reads, subject, self.broker.prefix)

    async def identity(self) -> StreamIdentity:
        """See EventLog.identity."""
        return await self._reads.identity()

    def follow(
        self,
        filters: Sequence[str],
        *,
        after: int | None = None,
        identity: StreamIdentity | None = None,
    ) -> "MemoryFollower":
        """See EventLog.follow."""
        return MemoryFollower(self.connection, tuple(filters), after, identity)

    def history(
        self, filters: Sequence[str], *, after: int = 0, since: datetime | None = None
    ) -> "MemoryHistoryFollower":
        """See EventLog.history."""
        return MemoryHistoryFollower(self.connection, tuple(filters), after, since)

    async def audited(self, age_s: float) -> bool:
        """See EventLog.audited; `broker.audit_lags` says so."""
        if not self.connected:
            raise Unavailable("not connected")
        self.broker.audit_asked += 1
        return not self.broker.audit_lags

    async def send(
        self,
        actor: str,
        command: Command,
        *,
        message_id: str | None = None,
        ttl_s: int | None = None,
        traceparent: str = "",
    ) -> int:
        """See EventLog.send."""
        return await self._appender.send(
            command_subject(actor, command_name(command), self.broker.prefix),
            command,
            message_id=message_id,
            ttl_s=ttl_s,
            traceparent=traceparent,
        )

    def follow_commands(self, *, after: int) -> "MemoryCommandFollower":
        """See EventLog.follow_commands."""
        return MemoryCommandFollower(self.connection, after)

    async def account(self, batch: UsageBatch) -> int:
        """See EventLog.account."""
        subject = usage_subject(batch.gateway, self.broker.prefix)
        return await self._appender.account(subject, batch)

    def follow_usage(
        self, *, after: int, identity: StreamIdentity | None = None
    ) -> "MemoryUsageFollower":
        """See EventLog.follow_usage."""
        return MemoryUsageFollower(self.connection, after, identity)


class MemoryFollower:
    """The Follower of one reader; the same steps as events/follower.py without a network between."""

    def __init__(
        self,
        connection: MemoryConnection,
        filters: tuple[str, ...],
        after: int | None,
        identity: StreamIdentity | None,
    ) -> None:
        self._connection = connection
        self._wake = connection.watch()
        self._filters = filters
        self._reader = Reader(connection.prefix)
        self._position = after or 0
        self._first_pass = after is None
        self._started = after is not None
        self._identity = identity
        self._last_read: tuple[int, int] | None = None
        self._generation = -1
        self._first: list[int] = []
        self._floor = 0
        self._reset = False
        self._synced = False
        self._told_down = False

    async def next(self) -> Batch:
        """See Follower.next."""
        while True:
            self._wake.clear()
            if not self._connection.connected:
                if not self._told_down:
                    self._told_down = True
                    return Batch(items=(), position=self._position, synced=False, connected=False)
                await self._wake.wait()
                continue
            self._told_down = False
            if self._generation != self._connection.generation or self._replaced():
                self._open()
            batch = self._read()
            if batch is not None:
                return batch
            await self._wake.wait()

    async def close(self) -> None:
        """Ends it."""
        self._connection.unwatch(self._wake)

    @property
    def _stream(self) -> MemoryStream:
        return self._connection.broker.events

    def _replaced(self) -> bool:
        """Whether the history is another one than was read so far."""
        stream, known = self._stream, self._identity
        if known is not None and (known.stream_id, known.created) != (
            stream.stream_id,
            stream.created,
        ):
            return True
        if stream.last_seq < self._position:
            return True
        if self._last_read is None:
            return False
        stored = stream.messages.get(self._last_read[0])
        return stored is not None and hash(stored.payload) != self._last_read[1]

    def _open(self) -> None:
        stream = self._stream
        if self._started and self._replaced():
            self._reset = True
            self._started = False
            self._last_read = None
            self._reader.forget()
        self._generation = self._connection.generation
        self._identity = StreamIdentity(
            stream_id=stream.stream_id,
            created=stream.created,
            last_seq=stream.last_seq,
            schema=stream.schema,
        )
        self._floor = stream.last_seq
        self._synced = False
        if not self._started:
            self._started = True
            self._first_pass = True
            self._first = sorted(
                seqs[-1] for subject, seqs in stream.subjects.items() if self._wanted(subject)
            )
            self._position = 0

    def _read(self) -> Batch | None:
        """What is there now, at most 1,000 items; None when everything was told already."""
        stream = self._stream
        stream.expire(self._connection.broker.clock())
        behind = [s for s in self._first if s > self._position]
        last_of_first = behind[-1] if behind else self._position
        later = (s for s in stream.after(max(last_of_first, self._floor if behind else 0)))
        wanted = [
            s
            for s in (*behind, *later)
            if s in stream.messages and self._wanted(stream.messages[s].subject)
        ]
        taken = wanted[:MAX_ITEMS]
        items = tuple(self._item(stream, seq) for seq in taken)
        complete = len(taken) == len(wanted)
        if not taken and self._synced:
            return None
        if taken:
            self._position = taken[-1]
            self._last_read = (taken[-1], hash(stream.messages[taken[-1]].payload))
        if complete:
            self._first = []
            self._first_pass = False
            self._synced = True
            self._position = max(self._position, self._floor)
        reset, self._reset = self._reset, False
        return Batch(items=items, position=self._position, synced=complete, reset=reset)

    def _item(self, stream: MemoryStream, seq: int) -> Recorded | Broken:
        message = stream.messages[seq]
        item = self._reader.read(message)
        if isinstance(item, Broken) and self._first_pass:
            history = [stream.messages[s] for s in stream.subjects[message.subject]]
            return self._reader.newest_valid(item, history)
        return item

    def _wanted(self, subject: str) -> bool:
        return any(matches(f, subject) for f in self._filters)


class MemoryHistoryFollower:
    """The past from the broker's audit, then a MemoryFollower."""

    def __init__(
        self,
        connection: MemoryConnection,
        filters: tuple[str, ...],
        after: int,
        since: datetime | None,
    ) -> None:
        self._connection = connection
        self._filters = filters
        self._after = after
        self._since = since
        self._told_down = False
        self._live: MemoryFollower | None = None

    async def next(self) -> Batch:
        """See Follower.next; the past is one batch, however much it is."""
        while self._live is None:
            if not self._connection.connected:
                if not self._told_down:
                    self._told_down = True
                    return Batch(items=(), position=self._after, synced=False, connected=False)
                await self._connection.wait_connected(60)
                continue
            past = [m for m in self._connection.broker.audit if self._wanted(m)]
            position = past[-1].seq if past else self._after
            self._live = MemoryFollower(self._connection, self._filters, position, None)
            reader = Reader(self._connection.prefix)
            items = tuple(reader.read(message) for message in past)
            if items:
                return Batch(items=items, position=position, synced=False)
        return await self._live.next()

    async def close(self) -> None:
        """Ends it."""
        if self._live is not None:
            await self._live.close()

    def _wanted(self, message: StoredMessage) -> bool:
        return (
            message.seq > self._after
            and (self._since is None or message.stored_at >= self._since)
            and any(matches(f, message.subject) for f in self._filters)
        )


class MemoryCommandFollower:
    """The CommandFollower of one reader."""

    def __init__(self, connection: MemoryConnection, after: int) -> None:
        self._connection = connection
        self._wake = connection.watch()
        self._position = after

    async def next(self) -> Sequence[StoredCommand]:
        """See CommandFollower.next."""
        while True:
            self._wake.clear()
            stream = self._connection.broker.commands
            if self._connection.connected:
                stream.expire(self._connection.broker.clock())
                if stream.last_seq < self._position:
                    self._position = 0
                found = [
                    stream.messages[s] for s in stream.after(self._position) if s in stream.messages
                ]
                if found:
                    taken = found[:MAX_ITEMS]
                    self._position = taken[-1].seq
                    return [decode_command(m, self._connection.prefix) for m in taken]
            await self._wake.wait()

    async def close(self) -> None:
        """Ends it."""
        self._connection.unwatch(self._wake)


class MemoryUsageFollower:
    """The UsageFollower of one reader."""

    def __init__(
        self, connection: MemoryConnection, after: int, identity: StreamIdentity | None
    ) -> None:
        self._connection = connection
        self._wake = connection.watch()
        self._position = after
        self._identity = identity
        self._told = False

    async def next(self) -> UsagePage:
        """See UsageFollower.next."""
        while True:
            self._wake.clear()
            if self._connection.connected:
                stream = self._connection.broker.usage
                found = StreamIdentity(
                    stream_id=stream.stream_id,
                    created=stream.created,
                    last_seq=stream.last_seq,
                    schema=stream.schema,
                )
                reset = is_other(found, self._identity, self._position)
                if reset:
                    self._position = 0
                self._identity = found
                wanted = [s for s in stream.after(self._position) if s in stream.messages]
                taken = wanted[:MAX_ITEMS]
                if taken or reset or not self._told:
                    self._told = True
                    self._position = taken[-1] if taken else self._position
                    return UsagePage(
                        items=tuple(decode_usage(stream.messages[s]) for s in taken),
                        position=self._position,
                        identity=found,
                        synced=len(taken) == len(wanted),
                        reset=reset,
                    )
            await self._wake.wait()

    async def close(self) -> None:
        """Ends it."""
        self._connection.unwatch(self._wake)


class MemorySubscription:
    """Ends with `close`; answers under way are cancelled."""

    def __init__(self) -> None:
        self.end: Callable[[], None] = _nothing
        self.tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self.end()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class MemoryWire:
    """The Wire of one process. `undecodable` counts what was dropped."""

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection
        self.undecodable = 0

    async def beacon(self, kind: str, name: str, body: Struct) -> None:
        """See Wire.beacon."""
        self._say(beacon_subject(kind, name, self._connection.prefix), body)

    async def progress(self, writer: str, kind: str, name: str, body: Struct) -> None:
        """See Wire.progress."""
        self._say(progress_subject(writer, kind, name, self._connection.prefix), body)

    def _say(self, subject: str, body: Struct) -> None:
        if self._connection.connected:
            self._connection.broker.deliver(subject, msgspec.json.encode(body))

    async def on_beacon(
        self, kind: str, body_type: type[B], handler: Callable[[str, B], None]
    ) -> MemorySubscription:
        """See Wire.on_beacon."""
        return self._listen(
            f"{self._connection.prefix}.beacon.{kind}.*",
            body_type,
            lambda tokens, body: handler(tokens[-1], body),
        )

    async def on_progress(
        self, kind: str, body_type: type[B], handler: Callable[[str, str, B], None]
    ) -> MemorySubscription:
        """See Wire.on_progress."""
        return self._listen(
            f"{self._connection.prefix}.prog.*.{kind}.*",
            body_type,
            lambda tokens, body: handler(tokens[-3], tokens[-1], body),
        )

    def _listen(
        self, pattern: str, body_type: type[B], handler: Callable[[list[str], B], None]
    ) -> MemorySubscription:
        decoder = msgspec.json.Decoder(body_type)

        def heard(subject: str, payload: bytes) -> None:
            try:
                tokens = [decode_token(token) for token in subject.split(".")[-3:]]
                body = decoder.decode(payload)
            except (*UNREADABLE, NotASubject):
                self.undecodable += 1
                return
            handler(tokens, body)

        subscription = MemorySubscription()
        subscription.end = self._connection.broker.listen(pattern, self._connection, heard)
        return subscription

    async def request(
        self, what: str, node: str, body: Struct, reply_type: type[B], *, timeout_s: float
    ) -> B:
        """See Wire.request."""
        subject = rpc_subject(what, node, self._connection.prefix)
        if not self._connection.connected:
            raise Unavailable("not connected")
        responder = self._connection.broker.responder(subject)
        if responder is None:
            raise Unavailable(f"nobody answers {what} for {node}")
        try:
            async with asyncio.timeout(timeout_s):
                answer = await responder(msgspec.json.encode(body))
        except TimeoutError as error:
            raise Unavailable(f"no answer to {what} from {node} within {timeout_s} s") from error
        except Exception as error:
            raise Unavailable(f"{what} of {node} failed: {error}") from error
        try:
            return msgspec.json.decode(answer, type=reply_type)
        except UNREADABLE as error:
            raise Unavailable(f"{what} of {node} answered something else: {error}") from error

    async def serve(
        self,
        what: str,
        node: str,
        body_type: type[B],
        handler: Callable[[B], Awaitable[Struct]],
    ) -> MemorySubscription:
        """See Wire.serve."""
        decoder = msgspec.json.Decoder(body_type)

        async def answer(payload: bytes) -> bytes:
            return msgspec.json.encode(await handler(decoder.decode(payload)))

        subscription = MemorySubscription()
        subject = rpc_subject(what, node, self._connection.prefix)
        subscription.end = self._connection.broker.respond(subject, self._connection, answer)
        return subscription


def _nothing() -> None:
    """Before it began there is nothing to end."""
