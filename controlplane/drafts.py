"""Turns a decision into the drafts of one atomic batch, and the stored batch into events to apply.

Nothing is decided here and nothing is sent. Every draft expects the sequence of the world it was decided
on, so a batch made on a world that has moved is refused whole.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain.decision import Decision
from controlplane.domain.world import NO_HEAD, Head
from events.codec import place_of
from events.log import Appended, Draft, Recorded
from events.subjects import event_subject
from schemas.commands import CommandAccepted, CommandRejected, Outcome
from schemas.leader import LeaderDecided, LeaderLine
from schemas.messages import tag_of

OUTCOME_TTL_S = 7 * 86_400
"""How long an outcome answers a repeated command; longer than any client goes on asking."""

CURRENT = "leader.current"
LOG = "leader.log"


class NotWritable(Exception):
    """The decision would write over an event this version did not fully decode."""

    def __init__(self, subject: str, problem: str) -> None:
        super().__init__(f"{subject} may not be written: {problem}")
        self.subject = subject
        self.problem = problem


class Line(Struct, frozen=True, kw_only=True):
    """What leader.log says besides the decision itself."""

    instance: str
    term: int
    decision: str
    commands_position: int


def drafts_of(
    decision: Decision,
    line: Line,
    heads: Mapping[str, Head],
    prefix: str,
    traceparent: str = "",
) -> tuple[Draft, ...]:
    """The batch, in order: the changes, the outcome if there is one, the line of leader.log.

    The line comes last because it carries the fence in place of an expectation of its own. `traceparent` is the trace of
    the request whose wish it decides about; every event of it carries that.
    Raises NotWritable, and ValueError when a decision changes one subject twice.
    """
    correlation = decision.correlationid or (decision.outcome.id if decision.outcome else None)
    drafts: list[Draft] = []
    for change in decision.changes:
        subject = event_subject(change.noun, *change.key, prefix=prefix)
        head = _writable(heads, subject)
        drafts.append(
            Draft(
                subject=subject,
                event=change.event,
                state=change.state,
                expected_seq=head.seq,
                rev=head.rev + 1,
                reason=change.reason,
                actor=decision.actor,
                causationid=decision.cause or None,
                correlationid=correlation,
                ttl_s=change.ttl_s,
            )
        )
    if decision.outcome is not None:
        drafts.append(_outcome_draft(decision, decision.outcome, correlation, prefix))
    if len({d.subject for d in drafts}) != len(drafts):
        raise ValueError(f"a decision changes one subject twice: {decision.what}")
    log_subject = event_subject(LOG, prefix=prefix)
    head = _writable(heads, log_subject)
    drafts.append(
        Draft(
            subject=log_subject,
            event=LeaderDecided(subjects=tuple(d.subject for d in drafts)),
            state=LeaderLine(
                instance=line.instance,
                term=line.term,
                decision=line.decision,
                what=decision.what,
                cause=decision.cause,
                commands_position=line.commands_position,
            ),
            expected_seq=head.seq,
            rev=head.rev + 1,
            reason=decision.what,
            actor=decision.actor,
            causationid=decision.cause or None,
            correlationid=correlation,
        )
    )
    if traceparent:
        return tuple(replace(d, traceparent=traceparent) for d in drafts)
    return tuple(drafts)


def _writable(heads: Mapping[str, Head], subject: str) -> Head:
    head = heads.get(subject, NO_HEAD)
    if not head.writable:
        raise NotWritable(subject, head.problem)
    return head


def _outcome_draft(
    decision: Decision, outcome: Outcome, correlation: str | None, prefix: str
) -> Draft:
    if outcome.status == "accepted":
        event: CommandAccepted | CommandRejected = CommandAccepted(refs=outcome.refs)
    else:
        event = CommandRejected(code=outcome.code or "")
    return Draft(
        subject=event_subject("command", outcome.id, prefix=prefix),
        event=event,
        state=outcome,
        # Expecting nothing makes a second effect of the same command impossible, whoever leads.
        expected_seq=0,
        rev=1,
        reason=outcome.sentence,
        actor=decision.actor,
        causationid=decision.cause or outcome.id,
        correlationid=correlation,
        ttl_s=OUTCOME_TTL_S,
    )


def recorded(
    draft: Draft, seq: int, event_id: str, *, epoch: int, now: datetime, prefix: str
) -> Recorded:
    """The event as the follower will bring it, so that the next decision sees it at once.

    `stored_at` is this process's time, not the server's: the same event read again is ignored.
    """
    place = place_of(draft.subject, prefix)
    return Recorded(
        seq=seq,
        subject=draft.subject,
        noun=place.noun,
        key=place.key,
        id=event_id,
        type=tag_of(draft.event),
        time=draft.time or now,
        stored_at=now,
        rev=draft.rev,
        epoch=epoch,
        actor=draft.actor,
        reason=draft.reason,
        event=draft.event,
        state=draft.state,
        causationid=draft.causationid,
        correlationid=draft.correlationid,
        traceparent=draft.traceparent,
    )


def recorded_batch(
    drafts: Sequence[Draft], appended: Appended, *, epoch: int, now: datetime, prefix: str
) -> tuple[Recorded, ...]:
    """The stored batch, in order."""
    return tuple(
        recorded(draft, seq, event_id, epoch=epoch, now=now, prefix=prefix)
        for draft, seq, event_id in zip(drafts, appended.seqs, appended.ids, strict=True)
    )


def expired(head: Head, now: datetime) -> bool:
    """Whether the server has let this last event of its subject go: a tombstone or outcome past its TTL.

    Only then may the next append expect an empty subject. The margin keeps us behind the server.
    """
    return (
        head.stored_at is not None
        and (head.type.endswith(".deleted") or head.type.startswith("command."))
        and now - head.stored_at > timedelta(seconds=OUTCOME_TTL_S + 60)
    )
