"""The log as the rest of the program sees it: one interface, held by JetStream and by the in-memory twin.

Nothing here does I/O. `events/jetstream.py` is the real log, `events/memory.py` the twin; both pass
tests/contract. Other packages name only what is in this file, `events/subjects.py` and
`events/settings.py`, and get an object in their app.py.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from schemas.commands import Command
from schemas.messages import Event, State
from schemas.usage import UsageBatch

B = TypeVar("B", bound=Struct)


class LogError(Exception):
    """Base of everything the log raises."""


class Conflict(LogError):
    """Another write to `subject` came first; reload and decide again."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"another write to {subject} came first")
        self.subject = subject


class Deposed(LogError):
    """The fence no longer holds: another control plane leads. Nothing of the batch was stored."""


class Unavailable(LogError):
    """No server or no stream leader answered within the retry budget; nothing is known to be stored."""


class OutcomeUnknown(LogError):
    """The batch may or may not be stored: read `leader.log` from the stream leader to find out."""


class LogFull(LogError):
    """The server refuses writes for space (`err_code` kept): read-only until an operator acts."""

    def __init__(self, err_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.err_code = err_code


class Misconfigured(LogError):
    """A bug or a wrong configuration; retrying cannot help (permissions, batch limits, wrong stream)."""


class Unstorable(Misconfigured):
    """No log could store this very draft or batch (subject, size, shape); others it can."""


class Draft(Struct, frozen=True, kw_only=True):
    """An event about to be appended: the aggregate's literal subject, what changed, the state after.

    `expected_seq` is the sequence of the subject's last message (0: there is none). `state` is None
    only for a tombstone (`<noun>.deleted`), which gets rollup and TTL headers by itself.
    """

    subject: str
    event: Event
    state: State | None
    expected_seq: int
    rev: int
    reason: str = ""
    actor: str = "system"
    causationid: str | None = None
    correlationid: str | None = None
    ttl_s: int | None = None
    traceparent: str | None = None
    """The trace of the request it was decided for, as W3C Trace Context has it."""
    time: datetime | None = None
    """The event's own time when it is reported later than it happened; None = now."""


class Fence(Struct, frozen=True, kw_only=True):
    """A check carried by one message of a batch: the last sequence of `subject` must still be `seq`."""

    subject: str
    seq: int


class Appended(Struct, frozen=True, kw_only=True):
    """`seqs` in the order of the drafts; `ids` are the event ids that were given; times as written."""

    seqs: tuple[int, ...]
    ids: tuple[str, ...]


class Recorded(Struct, frozen=True, kw_only=True):
    """A stored event as a reader gets it. `key` are the decoded subject tokens after the noun.

    `event` is None when its type or version is newer than this program (`problem` says which): keep
    the state before, count it. `state` is None for tombstones. `epoch` is the writer's fencing number.
    """

    seq: int
    subject: str
    noun: str
    key: tuple[str, ...]
    id: str
    type: str
    time: datetime
    stored_at: datetime
    rev: int
    epoch: int
    actor: str
    reason: str
    event: Event | None
    state: State | None
    causationid: str | None = None
    correlationid: str | None = None
    traceparent: str | None = None
    problem: str | None = None
    source: str = ""
    """Who wrote it, as a CloudEvents source: `/cp/<instance>` or `/agent/<node>`."""


class Broken(Struct, frozen=True, kw_only=True):
    """A stored message nobody can read as an event: undecodable, of a wrong subject, of a stale epoch.

    Keep the subject's previous valid state, mark it broken, show it; `previous` is that state's event
    when the reader had to look it up (first pass), else None.
    """

    seq: int
    subject: str
    why: str
    previous: Recorded | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """What a follower hands over: items in stream order, then the position.

    `reset`: forget everything read so far; the history was replaced (other stream, lost tail), and a
    full pass of last events per subject follows. `synced`: at `position` nothing more was pending.
    `connected`: False when the batch only reports the loss of the connection (items empty).
    """

    items: tuple[Recorded | Broken, ...]
    position: int
    synced: bool
    reset: bool = False
    connected: bool = True


class Follower(Protocol):
    """One reader of the log. Not shared between tasks; `close` deletes its consumer."""

    async def next(self) -> Batch:
        """Waits without a bound for the next batch (at most 1,000 items)."""
        ...

    async def close(self) -> None: ...


class StoredCommand(Struct, frozen=True, kw_only=True):
    """A command from YARD_COMMANDS. `actor` comes from the subject. `command` is None when undecodable."""

    seq: int
    subject: str
    actor: str
    name: str
    stored_at: datetime
    command: Command | None
    problem: str | None = None
    id: str | None = None
    """The id when it could be read although the rest could not: a rejection can still be addressed."""
    traceparent: str = ""
    """The trace of the request it was sent for, if any."""


class CommandFollower(Protocol):
    async def next(self) -> Sequence[StoredCommand]: ...

    async def close(self) -> None: ...


class StreamIdentity(Struct, frozen=True, kw_only=True):
    """What tells whether this is still the log a cache was built from."""

    stream_id: str
    created: str
    last_seq: int
    schema: int


class StoredUsage(Struct, frozen=True, kw_only=True):
    """A message of YARD_USAGE. `batch` is None when it cannot be read, and `problem` says why."""

    seq: int
    batch: UsageBatch | None
    problem: str = ""


class UsagePage(Struct, frozen=True, kw_only=True):
    """What a usage follower hands over, in stream order: `position` is that of the last of `items`.

    `reset`: forget everything added up so far; it was of another stream. `synced`: nothing more was pending.
    """

    items: tuple[StoredUsage, ...]
    position: int
    identity: StreamIdentity
    synced: bool
    reset: bool = False


class UsageFollower(Protocol):
    async def next(self) -> UsagePage:
        """Waits without a bound for the next page; silent while there is no connection."""
        ...

    async def close(self) -> None: ...


class EventLog(Protocol):
    """Appending, reading and following, with the whole retry table behind it."""

    async def append(self, draft: Draft, *, epoch: int) -> Appended:
        """Stores one event. Raises Conflict, Unavailable, LogFull, Misconfigured (Unstorable)."""
        ...

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        """Stores all or nothing, in order, with consecutive sequences (1 to 1,000 drafts).

        The fence is carried by a draft that has no own expectation to lose: the last one, which must be
        the `leader.log` line. Raises Conflict, Deposed, Unavailable, OutcomeUnknown, LogFull, Misconfigured
        (Unstorable).
        """
        ...

    async def last(self, subject: str) -> Recorded | Broken | None:
        """The subject's last message, read from the stream leader."""
        ...

    async def identity(self) -> StreamIdentity: ...

    def follow(
        self,
        filters: Sequence[str],
        *,
        after: int | None = None,
        identity: StreamIdentity | None = None,
    ) -> Follower:
        """Reads `filters` (subjects, wildcards allowed). `after` None: last event per subject, then live.

        With `after`, resumes behind that sequence when `identity` still matches the stream, else
        starts afresh with `reset`.
        """
        ...

    def history(
        self, filters: Sequence[str], *, after: int = 0, since: datetime | None = None
    ) -> Follower:
        """Everything behind `after`, also what was trimmed or ended since, in order, then as `follow`.

        The past comes from the audit as far back as that goes, else from what the log still holds.
        With `since` it begins about there by the server's time; earlier events may come first. What
        the audit tells has the time at which the audit stored it, a moment after the log did.
        """
        ...

    async def audited(self, age_s: float) -> bool:
        """Whether the audit has all the log had `age_s` ago: then ending a subject that stood still since
        costs it nothing. It is known about once a second.

        Raises Unavailable, and Misconfigured when this user may not know.
        """
        ...

    async def send(
        self,
        actor: str,
        command: Command,
        *,
        message_id: str | None = None,
        ttl_s: int | None = None,
        traceparent: str = "",
    ) -> int:
        """Publishes a command; returns its sequence once durable. Raises Unavailable, LogFull, Misconfigured.

        `message_id` overrides the dedupe id (gateways' activate), `ttl_s` lets the server forget it,
        `traceparent` is the trace of the request it is sent for.
        """
        ...

    def follow_commands(self, *, after: int) -> CommandFollower: ...

    async def account(self, batch: UsageBatch) -> int:
        """Stores what a gateway's requests used; returns the sequence once durable.

        One sent twice within the server's window is stored once. Raises Unavailable, LogFull, Misconfigured.
        """
        ...

    def follow_usage(self, *, after: int, identity: StreamIdentity | None = None) -> UsageFollower:
        """Reads YARD_USAGE behind `after` when `identity` still matches the stream, else all of it with `reset`."""
        ...

    @property
    def connected(self) -> bool: ...


class Subscription(Protocol):
    async def close(self) -> None: ...


class Wire(Protocol):
    """Core NATS: beacons and request/reply. Nothing here is stored."""

    async def beacon(self, kind: str, name: str, body: Struct) -> None:
        """Publishes on `yard.beacon.<kind>.<name>`; dropped silently while disconnected."""
        ...

    async def on_beacon(
        self, kind: str, body_type: type[B], handler: Callable[[str, B], None]
    ) -> Subscription:
        """Calls `handler(name, body)` for each beacon of `kind`; undecodable ones are counted, not raised."""
        ...

    async def progress(self, writer: str, kind: str, name: str, body: Struct) -> None:
        """Publishes on `yard.prog.<writer>.<kind>.<name>`; dropped silently while disconnected."""
        ...

    async def on_progress(
        self, kind: str, body_type: type[B], handler: Callable[[str, str, B], None]
    ) -> Subscription:
        """Calls `handler(writer, name, body)` for each progress of `kind`, as `on_beacon` does."""
        ...

    async def request(
        self, what: str, node: str, body: Struct, reply_type: type[B], *, timeout_s: float
    ) -> B:
        """Asks `yard.rpc.<what>.<node>`. Raises Unavailable when nobody answers in time."""
        ...

    async def serve(
        self,
        what: str,
        node: str,
        body_type: type[B],
        handler: Callable[[B], Awaitable[Struct]],
    ) -> Subscription: ...
