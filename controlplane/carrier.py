"""Stores one decision as one batch and says what became of it, through every way an append can end.

It chooses no decision. It never repeats a batch of unknown fate by itself: the log says first whether it
is stored, and if it is not, the decision is made anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Literal

from msgspec import Struct

from controlplane.alarms import Alarms
from controlplane.domain.decision import Decision, Ids
from controlplane.domain.world import NO_HEAD
from controlplane.drafts import CURRENT, LOG, Line, NotWritable, drafts_of, recorded_batch
from controlplane.metrics import Metrics
from controlplane.worldreader import WorldReader
from events.log import (
    Conflict,
    Deposed,
    EventLog,
    Fence,
    LogError,
    LogFull,
    Misconfigured,
    OutcomeUnknown,
    Recorded,
    StoredCommand,
    Unavailable,
    Unstorable,
)
from events.subjects import event_subject
from schemas.leader import LeaderLine

log = logging.getLogger(__name__)

FULL_RETRY_S = 5.0
FAULT_RETRY_S = 2.0
IN_FLIGHT_RETRY_S = 0.05
AUDIT_WAIT_S = 2.0
"""How long a command that ends subjects waits for the audit to have them; then it goes on without."""
AUDIT_LOOK_S = 0.05
AUDIT_AGAIN_S = 2.0
AUDIT_AGAIN_MOST_S = 60.0
"""What nobody asked to end is left so long when the audit does not have it, twice as long each time."""

PASSING_ALARMS = ("log_full", "misconfigured", "not_writable", "bad_decision")
"""Alarms that a stored batch proves to be over."""


class Carried(Struct, frozen=True, kw_only=True):
    """What became of a decision.

    `stored`: it took effect and the world holds it. `again`: it did not; decide anew after `delay_s`.
    `deposed`: another leads. `unknown`: ask `resolve` until it says something else. `impossible`: no log
    could store it; deciding it anew ends the same way.
    """

    result: Literal["stored", "again", "deposed", "unknown", "impossible"]
    delay_s: float = 0.0


class Carrier:
    """Carries decisions of one instance; owned by the leader's loop.

    `catch_up` waits until everything up to a sequence is applied and says whether that came in time.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        reader: WorldReader,
        instance: str,
        prefix: str,
        ids: Ids,
        now: Callable[[], datetime],
        alarms: Alarms,
        metrics: Metrics,
        catch_up: Callable[[int], Awaitable[bool]],
    ) -> None:
        self._events = events
        self._reader = reader
        self._instance = instance
        self._prefix = prefix
        self._ids = ids
        self._now = now
        self._alarms = alarms
        self._metrics = metrics
        self._catch_up = catch_up
        self._current = event_subject(CURRENT, prefix=prefix)
        self._log_subject = event_subject(LOG, prefix=prefix)
        self._in_doubt: tuple[str, Decision] | None = None
        self.settled: StoredCommand | None = None
        self.conflicts = 0
        """Refusals for another's earlier write, in a row."""
        self._endings_from: datetime | None = None
        self._endings_wait_s = AUDIT_AGAIN_S

    @property
    def in_doubt(self) -> bool:
        return self._in_doubt is not None

    @property
    def audit_behind(self) -> bool:
        """Whether the audit was found behind a moment ago: what nobody asked to end is left for later."""
        return self._endings_from is not None and self._now() < self._endings_from

    def drop(self) -> None:
        """The term is over: nothing of it is waited for."""
        self._in_doubt = None
        self.settled = None
        self.conflicts = 0

    async def carry_out(
        self,
        decision: Decision,
        *,
        term: int,
        commands_position: int,
        consumed: StoredCommand | None,
    ) -> Carried:
        """Appends the decision, fenced by `term`, and applies it to the world."""
        world = self._reader.world
        decision_id = self._ids.decision()
        line = Line(
            instance=self._instance,
            term=term,
            decision=decision_id,
            commands_position=commands_position,
        )
        self.settled = consumed
        if any(change.state is None for change in decision.changes):
            behind = await self._behind(decision)
            if behind and decision.outcome is None:
                return self._put_off(decision, behind)
            self._endings_wait_s = AUDIT_AGAIN_S
            if behind:
                log.warning(
                    "subjects end before the audit has them",
                    extra={"what": decision.what, "error": behind},
                )
        try:
            drafts = drafts_of(
                decision,
                line,
                world.heads,
                self._prefix,
                traceparent="" if consumed is None else consumed.traceparent,
            )
            with self._metrics.append_s.time():
                appended = await self._events.append_batch(
                    drafts, epoch=term, fence=Fence(subject=self._current, seq=term)
                )
        except NotWritable as error:
            return self._pause(
                "not_writable", f"{error}; `yardctl repair` or an upgrade ends this", FAULT_RETRY_S
            )
        except (ValueError, Unstorable) as error:
            self._pause("bad_decision", str(error), FAULT_RETRY_S)
            return Carried(result="impossible", delay_s=FAULT_RETRY_S)
        except Conflict as error:
            self._metrics.refused_batches.labels("conflict").inc()
            return await self._after_conflict(error.subject)
        except Deposed:
            self._metrics.refused_batches.labels("deposed").inc()
            return Carried(result="deposed")
        except (OutcomeUnknown, Unavailable) as error:
            self._metrics.refused_batches.labels("unknown").inc()
            log.warning(
                "a batch of unknown outcome",
                extra={"decision": decision_id, "term": term, "error": str(error)},
            )
            self._in_doubt = (decision_id, decision)
            return Carried(result="unknown")
        except LogFull as error:
            return self._pause(
                "log_full", f"{error}; nothing is changed until there is room", FULL_RETRY_S
            )
        except Misconfigured as error:
            return self._pause("misconfigured", str(error), FULL_RETRY_S)
        # The own events first: the next decision must see them, and the follower may be a while.
        for event in recorded_batch(
            drafts, appended, epoch=term, now=self._now(), prefix=self._prefix
        ):
            world.apply(event)
        self._took_effect(decision, decision_id, term, appended.seqs[-1])
        return Carried(result="stored")

    def _put_off(self, decision: Decision, why: str) -> Carried:
        self._endings_from = self._now() + timedelta(seconds=self._endings_wait_s)
        self._endings_wait_s = min(self._endings_wait_s * 2, AUDIT_AGAIN_MOST_S)
        log.info("endings wait for the audit", extra={"what": decision.what, "why": why})
        return Carried(result="again", delay_s=AUDIT_LOOK_S)

    async def _behind(self, decision: Decision) -> str:
        """Why the audit lacks what the decision ends, empty when it has it.

        A tombstone takes its subject's past out of the log: what the audit lacks then is lost to it. When
        somebody waits for the command, the audit is given a moment: a broken one must not keep the catalog as
        it is. What nobody asked to end can wait for it, and must not hold up the decisions behind it.
        """
        world = self._reader.world
        heads = [world.head(c.noun, *c.key) for c in decision.changes if c.state is None]
        written_at = max((h.stored_at for h in heads if h.stored_at is not None), default=None)
        if written_at is None:
            return ""
        looks = int(AUDIT_WAIT_S / AUDIT_LOOK_S) if decision.outcome is not None else 1
        for look in range(looks):
            if look:
                await asyncio.sleep(AUDIT_LOOK_S)
            try:
                if await self._events.audited((self._now() - written_at).total_seconds()):
                    return ""
            except LogError as error:
                return str(error) or type(error).__name__
        return "it lags"

    def _pause(self, code: str, sentence: str, delay_s: float) -> Carried:
        self._metrics.refused_batches.labels(code).inc()
        self._alarms.up(code, sentence)
        return Carried(result="again", delay_s=delay_s)

    def _took_effect(self, decision: Decision, decision_id: str, term: int, seq: int) -> None:
        self.conflicts = 0
        self._alarms.down(*PASSING_ALARMS)
        self._metrics.decisions.inc()
        log.info(
            "decided",
            extra={
                "what": decision.what,
                "decision": decision_id,
                "cause": decision.cause,
                "actor": decision.actor,
                "term": term,
                "seq": seq,
            },
        )

    async def _after_conflict(self, subject: str) -> Carried:
        """Makes the world hold the write that came first."""
        self.conflicts += 1
        try:
            last = await self._events.last(subject)
        except LogError:
            return Carried(result="again", delay_s=FAULT_RETRY_S)
        heads = self._reader.world.heads
        known = heads.get(subject, NO_HEAD).seq
        if last is None:
            # The subject's tombstone or outcome expired on the server: it is empty again.
            heads.pop(subject, None)
        elif last.seq > known:
            if not await self._catch_up(last.seq):
                return Carried(result="again", delay_s=FAULT_RETRY_S)
        else:
            # The other write is still in flight in the cluster, or was refused itself.
            return Carried(result="again", delay_s=IN_FLIGHT_RETRY_S)
        return Carried(result="again")

    async def resolve(self, term: int) -> Carried:
        """Asks the stream leader whether the batch in doubt is stored."""
        assert self._in_doubt is not None
        decision_id, decision = self._in_doubt
        try:
            last = await self._events.last(self._log_subject)
        except LogError:
            return Carried(result="unknown", delay_s=FAULT_RETRY_S)
        # Whatever is stored up to there must be in the world before anything is decided on it.
        if last is not None and not await self._catch_up(last.seq):
            return Carried(result="unknown", delay_s=FAULT_RETRY_S)
        self._in_doubt = None
        state = last.state if isinstance(last, Recorded) else None
        if last is not None and isinstance(state, LeaderLine):
            if state.term > term:
                return Carried(result="deposed")
            if state.decision == decision_id:
                self._took_effect(decision, decision_id, term, last.seq)
                return Carried(result="stored")
        return Carried(result="again")
