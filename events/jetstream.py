"""The log on NATS JetStream: puts appender, single reads and followers behind the one interface.

Only wiring: how an append retries is `events/appender.py`, how a reader stays complete `events/pull.py`
and `events/follower.py`.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

from events.appender import DEFAULT_BUDGET, Appender, RetryBudget
from events.codec import command_name
from events.connection import Connection
from events.follower import EventFollower, JetStreamCommandFollower
from events.history import HistoryFollower
from events.ids import new_id, utc_now
from events.log import Appended, Broken, Draft, Fence, Recorded, StreamIdentity
from events.lookup import StreamReads
from events.pull import DEFAULT_TIMES, PullTimes, StandingPull
from events.reading import read_last
from events.streams import stream_name
from events.subjects import command_subject, usage_subject
from events.usage import JetStreamUsageFollower
from events.wire import JetStreamWire
from schemas.commands import Command
from schemas.usage import UsageBatch

__all__ = ["JetStreamLog", "JetStreamWire"]


class JetStreamLog:
    """The EventLog of one process. `source` is who writes: `/cp/<instance>` or `/agent/<node>`."""

    def __init__(
        self,
        connection: Connection,
        *,
        source: str,
        clock: Callable[[], datetime] = utc_now,
        mint: Callable[[], str] = new_id,
        budget: RetryBudget = DEFAULT_BUDGET,
        times: PullTimes = DEFAULT_TIMES,
    ) -> None:
        self._connection = connection
        self._times = times
        self._events = stream_name("EVENTS", connection.prefix)
        self._commands = stream_name("COMMANDS", connection.prefix)
        self._audit = stream_name("AUDIT", connection.prefix)
        self._usage = stream_name("USAGE", connection.prefix)
        self._reads = StreamReads(
            connection, self._events, timeout_s=budget.ack_timeout_s, tries=budget.tries
        )
        self._command_reads = StreamReads(
            connection, self._commands, timeout_s=budget.ack_timeout_s, tries=budget.tries
        )
        self._audit_reads = StreamReads(
            connection, self._audit, timeout_s=budget.ack_timeout_s, tries=budget.tries
        )
        self._usage_reads = StreamReads(
            connection, self._usage, timeout_s=budget.ack_timeout_s, tries=budget.tries
        )
        self._appender = Appender(
            connection,
            source=source,
            clock=clock,
            mint=mint,
            events_stream=self._events,
            budget=budget,
        )

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def append(self, draft: Draft, *, epoch: int) -> Appended:
        """See EventLog.append."""
        return await self._appender.append(draft, epoch=epoch)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        """See EventLog.append_batch."""
        return await self._appender.append_batch(drafts, epoch=epoch, fence=fence)

    async def last(self, subject: str) -> Recorded | Broken | None:
        """See EventLog.last; a broken last message comes with the newest readable one before it."""
        return await read_last(self._reads, subject, self._connection.prefix)

    async def identity(self) -> StreamIdentity:
        """See EventLog.identity. Raises Unavailable."""
        return await self._reads.identity()

    def follow(
        self,
        filters: Sequence[str],
        *,
        after: int | None = None,
        identity: StreamIdentity | None = None,
    ) -> EventFollower:
        """See EventLog.follow. To be called on the event loop."""
        return EventFollower(
            StandingPull(self._connection, self._events, tuple(filters), self._times),
            self._reads,
            prefix=self._connection.prefix,
            after=after,
            identity=identity,
        )

    def history(
        self, filters: Sequence[str], *, after: int = 0, since: datetime | None = None
    ) -> HistoryFollower:
        """See EventLog.history. To be called on the event loop."""
        return HistoryFollower(
            StandingPull(self._connection, self._audit, tuple(filters), self._times),
            self._audit_reads,
            lambda position: self.follow(filters, after=position),
            prefix=self._connection.prefix,
            after=after,
            since=since,
        )

    async def audited(self, age_s: float) -> bool:
        """See EventLog.audited."""
        return await self._audit_reads.has_all_of(self._events, age_s)

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
            command_subject(actor, command_name(command), self._connection.prefix),
            command,
            message_id=message_id,
            ttl_s=ttl_s,
            traceparent=traceparent,
        )

    def follow_commands(self, *, after: int) -> JetStreamCommandFollower:
        """See EventLog.follow_commands. To be called on the event loop."""
        prefix = self._connection.prefix
        return JetStreamCommandFollower(
            StandingPull(self._connection, self._commands, (f"{prefix}.cmd.>",), self._times),
            self._command_reads,
            prefix=prefix,
            after=after,
        )

    async def account(self, batch: UsageBatch) -> int:
        """See EventLog.account."""
        subject = usage_subject(batch.gateway, self._connection.prefix)
        return await self._appender.account(subject, batch)

    def follow_usage(
        self, *, after: int, identity: StreamIdentity | None = None
    ) -> JetStreamUsageFollower:
        """See EventLog.follow_usage. To be called on the event loop."""
        prefix = self._connection.prefix
        return JetStreamUsageFollower(
            StandingPull(self._connection, self._usage, (f"{prefix}.use.>",), self._times),
            self._usage_reads,
            after=after,
            identity=identity,
        )
