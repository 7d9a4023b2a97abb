"""Stores events, batches and commands exactly once or says precisely why not: the whole retry procedure.

It holds no state between calls. What a server's code means is decided in `events/retry.py`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from events.codec import UNREADABLE, encode_command, encode_event, is_tombstone
from events.envelope import MSG_ID, TRACEPARENT, TTL, event_headers
from events.log import (
    Appended,
    Conflict,
    Deposed,
    Draft,
    Fence,
    LogError,
    LogFull,
    Misconfigured,
    OutcomeUnknown,
    Unavailable,
    Unstorable,
)
from events.lookup import StreamReads
from events.retry import IN_FLIGHT, Action, ServerError, classify, pause_s
from events.transport import Denied, NoAnswer, NoResponders, NotSent, Outgoing, Transport
from schemas.commands import Command
from schemas.messages import tag_of
from schemas.usage import UsageBatch

MAX_BATCH: Final = 1000


class RetryBudget(Struct, frozen=True, kw_only=True):
    """How long one append tries. `tries` are attempts without an answer while connected."""

    ack_timeout_s: float = 2.0
    budget_s: float = 15.0
    tries: int = 3


DEFAULT_BUDGET: Final = RetryBudget()


class _Ack(Struct, frozen=True, kw_only=True):
    seq: int = 0
    duplicate: bool = False
    error: ServerError | None = None


class _Id(Struct, frozen=True, kw_only=True):
    id: str = ""


class _Refused(Exception):
    def __init__(self, error: ServerError) -> None:
        super().__init__(error.description)
        self.error = error


class Appender:
    """Writes to one yard's streams. `mint` gives event ids, `clock` their times."""

    def __init__(
        self,
        transport: Transport,
        *,
        source: str,
        clock: Callable[[], datetime],
        mint: Callable[[], str],
        events_stream: str,
        budget: RetryBudget = DEFAULT_BUDGET,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._transport = transport
        self._source = source
        self._clock = clock
        self._mint = mint
        self._stream = events_stream
        self._budget = budget
        self._jitter = jitter
        self._reads = StreamReads(
            transport, events_stream, timeout_s=budget.ack_timeout_s, tries=budget.tries
        )

    async def append(self, draft: Draft, *, epoch: int) -> Appended:
        """Stores one event; see EventLog.append."""
        return await self._append_one(draft, epoch, None)

    async def append_batch(
        self, drafts: Sequence[Draft], *, epoch: int, fence: Fence | None = None
    ) -> Appended:
        """Stores all or nothing; see EventLog.append_batch."""
        if not 1 <= len(drafts) <= MAX_BATCH:
            raise Unstorable(f"a batch has 1 to {MAX_BATCH} events, not {len(drafts)}")
        if len(drafts) == 1:
            return await self._append_one(drafts[0], epoch, fence)
        return await self._append_many(tuple(drafts), epoch, fence)

    async def send(
        self,
        actor_subject: str,
        command: Command,
        *,
        message_id: str | None,
        ttl_s: int | None,
        traceparent: str = "",
    ) -> int:
        """Stores one command on its subject; its id (or `message_id`) makes a repetition harmless."""
        body = encode_command(command)

        async def publish() -> Appended:
            headers = {MSG_ID: message_id or command.id}
            if ttl_s is not None:
                headers[TTL] = str(ttl_s)
            if traceparent:
                headers[TRACEPARENT] = traceparent
            ack = await self._publish_acked(actor_subject, body, headers)
            return Appended(seqs=(ack.seq,), ids=(command.id,))

        async def never() -> Appended | None:
            # Nothing to read back: the id alone decides, so the same message is simply sent again.
            return None

        return (await self._settle(publish, never, actor_subject, Unavailable)).seqs[0]

    async def account(self, subject: str, batch: UsageBatch) -> int:
        """Stores what was used; see EventLog.account. Gateway, incarnation and number are the dedupe id."""
        body = msgspec.json.encode(batch)
        headers = {MSG_ID: f"{batch.gateway}-{batch.incarnation}-{batch.n}"}

        async def publish() -> Appended:
            ack = await self._publish_acked(subject, body, dict(headers))
            return Appended(seqs=(ack.seq,), ids=(headers[MSG_ID],))

        async def never() -> Appended | None:
            # It is sent again with its number, and whoever adds up knows each number once.
            return None

        return (await self._settle(publish, never, subject, Unavailable)).seqs[0]

    async def _append_one(self, draft: Draft, epoch: int, fence: Fence | None) -> Appended:
        id_ = self._mint()
        body = self._encode(draft, id_, epoch)
        tag = tag_of(draft.event)

        async def publish() -> Appended:
            headers = event_headers(
                stream=self._stream,
                type_=tag,
                rev=draft.rev,
                expected_seq=draft.expected_seq if fence is None else fence.seq,
                expected_subject=None if fence is None else fence.subject,
                message_id=id_,
                tombstone=is_tombstone(tag),
                ttl_s=draft.ttl_s,
            )
            ack = await self._publish_acked(draft.subject, body, headers)
            return Appended(seqs=(ack.seq,), ids=(id_,))

        async def read_back() -> Appended | None:
            return await self._find((draft,), (id_,), fence)

        return await self._settle(publish, read_back, draft.subject, Unavailable)

    async def _append_many(
        self, drafts: tuple[Draft, ...], epoch: int, fence: Fence | None
    ) -> Appended:
        ids = tuple(self._mint() for _ in drafts)
        bodies = [self._encode(d, i, epoch) for d, i in zip(drafts, ids, strict=True)]

        async def publish() -> Appended:
            seq = await self._publish_batch(drafts, bodies, fence)
            first = seq - len(drafts) + 1
            return Appended(seqs=tuple(range(first, seq + 1)), ids=ids)

        async def read_back() -> Appended | None:
            return await self._find(drafts, ids, fence)

        return await self._settle(publish, read_back, drafts[0].subject, OutcomeUnknown)

    async def _publish_batch(
        self, drafts: tuple[Draft, ...], bodies: list[bytes], fence: Fence | None
    ) -> int:
        """One attempt, sent in one go; the answer to the last message, the commit, decides.

        1 committed: the sequence of the last
        2 the first was refused (too many batches, none allowed): its answer says so, while the commit
          was only told that there is no such batch
        3 the commit was refused
        4 neither was answered: it may be stored

        Event ids are no dedupe ids here: the server would refuse the whole batch for one of them,
        indistinguishable from nothing stored.
        """
        messages = self._batch_messages(drafts, bodies, fence)
        answers = await self._transport.request_all(messages, timeout_s=self._budget.ack_timeout_s)
        committed = None if answers.last is None else _ack_of(answers.last)
        if committed is not None and committed.error is None:  # 1
            return committed.seq
        if answers.first:  # 2
            _raise_refusal(_ack_of(answers.first))
        if committed is None:  # 4
            raise NoAnswer(messages[-1].subject)
        _raise_refusal(committed)  # 3
        raise AssertionError("a commit without an error was returned")

    def _batch_messages(
        self, drafts: tuple[Draft, ...], bodies: list[bytes], fence: Fence | None
    ) -> list[Outgoing]:
        batch = self._mint()
        messages: list[Outgoing] = []
        written: set[str] = set()
        last = len(drafts) - 1
        for index, (draft, body) in enumerate(zip(drafts, bodies, strict=True)):
            fenced = fence if index == last else None
            tag = tag_of(draft.event)
            expected = draft.expected_seq if fenced is None else fenced.seq
            headers = event_headers(
                stream=self._stream,
                type_=tag,
                rev=draft.rev,
                # The server checks a subject at its first message in the batch only.
                expected_seq=None if fenced is None and draft.subject in written else expected,
                expected_subject=None if fenced is None else fenced.subject,
                batch=(batch, index + 1, index == last),
                tombstone=is_tombstone(tag),
                ttl_s=draft.ttl_s,
            )
            written.add(draft.subject)
            messages.append(Outgoing(subject=draft.subject, payload=body, headers=headers))
        return messages

    async def _find(
        self, drafts: tuple[Draft, ...], ids: tuple[str, ...], fence: Fence | None
    ) -> Appended | None:
        """Whether these very events are stored. None: they are not, and nothing stands in their way.

        1 The first message on a checked subject behind the expected sequence is ours: stored.
        2 The fence's subject moved on: Deposed.
        3 A checked subject moved on: Conflict.
        """
        checked: dict[str, int] = {}
        for index, draft in enumerate(drafts):
            if not (fence is not None and index == len(drafts) - 1):
                checked.setdefault(draft.subject, index)
        # A single fenced event has no check of its own, but still follows what was expected there.
        looked = checked or {drafts[0].subject: 0}
        taken: str | None = None
        for subject, index in looked.items():
            found = await self._reads.next(subject, drafts[index].expected_seq + 1)
            if found is None:
                continue
            if _id_of(found.payload) == ids[index]:  # 1
                first = found.seq - index
                return Appended(seqs=tuple(range(first, first + len(drafts))), ids=ids)
            taken = subject
            break
        if fence is not None:  # 2
            leads = await self._reads.last(fence.subject)
            if (0 if leads is None else leads.seq) != fence.seq:
                raise Deposed(f"{fence.subject} is past {fence.seq}")
        if taken is not None and checked:  # 3
            raise Conflict(taken)
        return None

    async def _settle(
        self,
        publish: Callable[[], Awaitable[Appended]],
        read_back: Callable[[], Awaitable[Appended | None]],
        subject: str,
        doubtful: type[LogError],
    ) -> Appended:
        """Publishes until the outcome is known or the budget is spent.

        1 acknowledged (also as a duplicate): done
        2 not connected: Unavailable at once; if an earlier attempt may have arrived, wait for the connection
        3 no responders: again
        4 no answer: again with the same ids and expectations; after `tries` read back
        5 refused: by the table of events/retry.py
        6 budget spent: Unavailable, or `doubtful` when a copy may have arrived
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._budget.budget_s
        attempt = unanswered = abandoned = 0
        doubt = False
        why = "no stream leader answered"
        while True:
            attempt += 1
            try:
                return await publish()  # 1
            except NotSent as error:  # 2
                if not doubt:
                    raise Unavailable("not connected") from error
                why = "the connection was lost"
                await self._transport.wait_connected(deadline - loop.time())
            except NoResponders:  # 3
                why = "no stream leader answered"
            except NoAnswer as error:  # 4
                doubt = True
                why = "no answer to the append"
                unanswered += 1
                if unanswered >= self._budget.tries and self._transport.connected:
                    found, _ = await self._read_back(read_back)
                    if found is not None:
                        return found
                    raise doubtful(f"{subject}: {why}") from error
                if unanswered < self._budget.tries:
                    continue
            except Denied as error:
                raise Misconfigured(str(error)) from error
            except _Refused as refusal:  # 5
                error = refusal.error
                why = error.description
                match classify(error):
                    case Action.AGAIN:
                        pass
                    case Action.ABANDONED:
                        abandoned += 1
                        if abandoned > self._budget.tries:
                            raise Misconfigured(f"{subject}: {why} ({error.err_code})") from refusal
                    case Action.READ_BACK:
                        found, known = await self._read_back(read_back)
                        if found is not None:
                            return found
                        if known and error.err_code != IN_FLIGHT:
                            raise Conflict(subject) from refusal
                        # Refused for a write that may be our own earlier attempt: unknown until read.
                        doubt = doubt or not known
                    case Action.FULL:
                        raise LogFull(error.err_code or 0, why) from refusal
                    case Action.FAULT:
                        raise Misconfigured(f"{subject}: {why} ({error.err_code})") from refusal
            left = deadline - loop.time()
            if left <= 0:  # 6
                raise (doubtful if doubt else Unavailable)(f"{subject}: {why}")
            if not (doubt and not self._transport.connected):
                await asyncio.sleep(min(left, pause_s(attempt, self._jitter())))

    async def _read_back(
        self, read_back: Callable[[], Awaitable[Appended | None]]
    ) -> tuple[Appended | None, bool]:
        """What was read back, and whether it could be read at all."""
        try:
            return await read_back(), True
        except Unavailable:
            return None, False

    async def _publish_acked(self, subject: str, body: bytes, headers: dict[str, str]) -> _Ack:
        raw = await self._transport.request(
            subject, body, headers=headers, timeout_s=self._budget.ack_timeout_s
        )
        ack = _ack_of(raw)
        _raise_refusal(ack)
        return ack

    def _encode(self, draft: Draft, id_: str, epoch: int) -> bytes:
        return encode_event(
            draft,
            id_=id_,
            source=self._source,
            epoch=epoch,
            now=self._clock(),
            prefix=self._transport.prefix,
        )


def _ack_of(raw: bytes) -> _Ack:
    return msgspec.json.decode(raw, type=_Ack)


def _raise_refusal(ack: _Ack) -> None:
    if ack.error is not None:
        raise _Refused(ack.error)


def _id_of(payload: bytes) -> str:
    try:
        return msgspec.json.decode(payload, type=_Id).id
    except UNREADABLE:
        return ""
