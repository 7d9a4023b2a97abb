"""Decides whether a gateway sends `model.activate` now, waits for a decision, or gives up on one.

It must not answer requests or send anything: it says what to do for one (model, scope), the activator
does it. At most one message is open per activation revision, so no traffic can fill the log.
"""

from datetime import datetime

from msgspec import Struct

from events.subjects import encode_token
from gateway.domain.table import ActivationEntry
from schemas.activation import PENDING_PHASES

WINDOW_S = 30
"""Wishes of all gateways within one window of this length are one message."""

TTL_S = 60
"""After this a wish is worthless: whoever made it was answered."""


class Asked(Struct, frozen=True, kw_only=True):
    """The open wish of one (model, scope), times in seconds of the gateway's monotonic clock."""

    rev: int
    message_id: str
    since_s: float
    last_sent_s: float


class Send(Struct, frozen=True, kw_only=True):
    """Publish under `message_id`; `asked` is what to remember, in the same step."""

    message_id: str
    asked: Asked


class Hold(Struct, frozen=True, kw_only=True):
    """Nothing to do before `until_s`, or before the table changes when it is None."""

    until_s: float | None
    asked: Asked | None


class GiveUp(Struct, frozen=True, kw_only=True):
    """Nobody decided: whoever joined at or before `joined_until_s` is answered `yard_unavailable`."""

    joined_until_s: float


def is_pending(entry: ActivationEntry) -> bool:
    return entry.activation is not None and entry.activation.phase in PENDING_PHASES


def is_refused(entry: ActivationEntry, now: datetime, *, renewed_at_seq: int = 0) -> bool:
    """A refusal that still stands: its `retry_at` is ahead and nothing was changed since.

    `renewed_at_seq` is the sequence of the last change of the entry or clearing of its record: after
    it the refusal says nothing any more, whatever its `retry_at`.
    """
    activation = entry.activation
    return (
        activation is not None
        and activation.phase == "refused"
        and activation.retry_at is not None
        and activation.retry_at > now
        and entry.seq > renewed_at_seq
    )


def message_id(model: str, scope: str, rev: int, now: datetime) -> str:
    window = int(now.timestamp()) // WINDOW_S
    # Encoded: a card may be named with what no header can carry.
    return f"activate-{model}-{encode_token(scope)}-{rev}-{window}"


def decide(
    entry: ActivationEntry,
    asked: Asked | None,
    *,
    model: str,
    scope: str,
    oldest_joined_s: float | None,
    refused: bool,
    reached: bool,
    now_s: float,
    now: datetime,
    resend_s: float,
    no_decision_s: float,
) -> Send | Hold | GiveUp:
    """What to do about the demand of one (model, scope) whose requests find no ready replica.

    `reached` False: the log shows a ready replica, which only this gateway cannot reach; or the scope
    names a card that no agent has reported, which no wish could bring about.

    1. nobody waits: nothing; the wish already sent stands, demand outlives its requester
    2. an activation is pending, or a refusal stands: decided; nothing is sent
    3. a replica is ready but out of reach, or the card is not known (yet): there is nothing to ask for;
       give up when it lasts
    4. no wish is open for this revision: send one
    5. the oldest waiter, or the wish, has gone undecided too long: give up
    6. nothing was decided for a while: the same message again
    7. otherwise wait for whichever of 5 and 6 comes first
    """
    if oldest_joined_s is None:  # 1
        # The open wish is remembered: the next request within the window must not send another.
        return Hold(until_s=None, asked=asked if asked and asked.rev == entry.rev else None)
    if is_pending(entry) or refused:  # 2
        return Hold(until_s=None, asked=None)
    if not reached:  # 3
        if now_s - oldest_joined_s >= no_decision_s:
            return GiveUp(joined_until_s=now_s - no_decision_s)
        return Hold(until_s=oldest_joined_s + no_decision_s, asked=asked)
    if asked is None or asked.rev != entry.rev:  # 4
        text = message_id(model, scope, entry.rev, now)
        return Send(
            message_id=text,
            asked=Asked(rev=entry.rev, message_id=text, since_s=now_s, last_sent_s=now_s),
        )
    undecided_since_s = max(asked.since_s, oldest_joined_s)
    if now_s - undecided_since_s >= no_decision_s:  # 5
        return GiveUp(joined_until_s=now_s - no_decision_s)
    resend_at_s = asked.last_sent_s + resend_s
    if now_s >= resend_at_s:  # 6
        # The same id within a window: the log keeps one of them, however often it is sent.
        stale = now_s - asked.since_s >= WINDOW_S
        text = message_id(model, scope, entry.rev, now) if stale else asked.message_id
        since_s = now_s if stale else asked.since_s
        return Send(
            message_id=text,
            asked=Asked(rev=entry.rev, message_id=text, since_s=since_s, last_sent_s=now_s),
        )
    return Hold(until_s=min(resend_at_s, undecided_since_s + no_decision_s), asked=asked)  # 7
