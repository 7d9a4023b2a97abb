"""Folds what starts cost and how they failed into a model's record, and says when the next may be tried.

It never starts or refuses anything itself: `hold_back` names the reason, its callers act on it.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import memory
from controlplane.domain.decision import Change
from schemas.codes import RefusalCode
from schemas.placement import PlacementReport
from schemas.record import (
    Failures,
    Measured,
    Quarantine,
    Record,
    RecordCleared,
    RecordMeasured,
    RecordQuarantined,
    RecordStartFailed,
    RecordUnplaceable,
)
from schemas.replica import Replica
from schemas.settings import ControlplaneSettings

CRASH_WINDOW_S: Final = 600.0
"""Ends of ready replicas closer together than this count as one row."""

COSTS_NOTHING: Final = frozenset({"parked_lost", "resume_failed"})
"""Codes of parked copies that were lost or did not come back: the next start is a cold one, at once."""

NOT_THE_MODELS: Final = frozenset({"fetch_failed", "disk_full"})
"""Codes of starts that say nothing against the model: its files could not be brought to the node."""

LOADS_KEPT: Final = 8
COUNTED_KEPT: Final = 16


class Refusal(Struct, frozen=True, kw_only=True):
    """Why a model may not be started now, and when that ends."""

    code: RefusalCode
    reason: str
    retry_at: datetime | None


def backoff_s(failed_in_a_row: int, settings: ControlplaneSettings) -> float:
    """15 s doubling to 5 min (settings): the wait after the n-th failed start in a row, n from 1."""
    doubled = settings.backoff_s * 2.0 ** min(max(failed_in_a_row - 1, 0), 30)
    return min(doubled, settings.backoff_max_s)


def is_unmeasured(record: Record | None, replica: Replica) -> bool:
    """Whether what a ready replica's load or resume took, or its memory, is not in the record yet; or what the
    park of a parked one took."""
    timed = _timed(replica)
    if timed is not None and (record is None or timed not in record.timed):
        return True
    if replica.phase != "ready":
        return False
    if record is None or replica.id not in record.counted:
        return True
    known = memory.measured(record, replica.profile, replica.card_kind)
    used = replica.measured_memory_bytes
    return used is not None and (known is None or used > known.memory_bytes)


def _timed(replica: Replica) -> str | None:
    """Names the one park or resume a replica tells of now, None when it tells of none.

    A state is told again by a new agent and after every measurement; the figure itself tells them apart.
    """
    if replica.phase == "parked" and replica.park_s is not None:
        return f"{replica.id} park {replica.park_s!r}"
    if replica.phase == "ready" and replica.resume_s is not None:
        return f"{replica.id} resume {replica.resume_s!r}"
    return None


def fold_ready(
    record: Record | None, replica: Replica, planned: Collection[str], now: datetime
) -> Change:
    """`record.measured`: load or resume time and memory, and the end of the row of failed starts; of a parked
    replica only what its park took.

    A crash within its window stays: a replica that comes up and dies again and again is not cured by
    coming up. `planned` are replicas still in a plan; their ids stay counted however many there are.
    """
    before = record or Record(model=replica.model, incarnation=replica.incarnation)
    known = memory.measured(before, replica.profile, replica.card_kind)
    entry = known or Measured(profile=replica.profile, card_kind=replica.card_kind, memory_bytes=0)
    timed = _timed(replica)
    is_new_time = timed is not None and timed not in before.timed
    is_parked = replica.phase == "parked"
    is_first = not is_parked and replica.id not in before.counted
    if is_new_time and is_parked and replica.park_s is not None:
        entry = replace(entry, park_s=(*entry.park_s, replica.park_s)[-LOADS_KEPT:])
    elif is_new_time and replica.resume_s is not None:
        entry = replace(entry, resume_s=(*entry.resume_s, replica.resume_s)[-LOADS_KEPT:])
    if not is_parked and replica.measured_memory_bytes:
        entry = replace(entry, memory_bytes=replica.measured_memory_bytes)
    if is_first and replica.load_s is not None:
        entry = replace(entry, load_s=(*entry.load_s, replica.load_s)[-LOADS_KEPT:])
    others = tuple(
        m for m in before.measured if (m.profile, m.card_kind) != (entry.profile, entry.card_kind)
    )
    failures = before.failures
    if is_first:
        failures = tuple(
            replace(f, count=0, next_allowed_at=f.last_at)
            for f in before.failures
            if f.crashes > 0 and now - f.last_at <= timedelta(seconds=CRASH_WINDOW_S)
        )
    return Change(
        noun="record",
        key=(replica.model,),
        event=RecordMeasured(
            replica=replica.id,
            memory_bytes=entry.memory_bytes,
            load_s=replica.load_s or 0.0,
            park_s=replica.park_s if is_parked else None,
            resume_s=None if is_parked else replica.resume_s,
        ),
        state=replace(
            before,
            measured=(*others, entry),
            failures=failures,
            quarantined=None if is_first else before.quarantined,
            unplaceable=before.unplaceable if is_parked else None,
            counted=before.counted if is_parked else _counted(before.counted, replica.id, planned),
            timed=_times_kept(before.timed, timed, planned),
        ),
        reason=f"{replica.id} is {replica.phase}",
    )


def _times_kept(
    before: tuple[str, ...], timed: str | None, planned: Collection[str]
) -> tuple[str, ...]:
    """The last park and the last resume of each replica still planned: no others can be told again."""
    if timed is None or timed in before:
        return before
    same = timed.rpartition(" ")[0]
    kept = (t for t in before if t.split(" ", 1)[0] in planned and t.rpartition(" ")[0] != same)
    return (*kept, timed)


def fold_failed(
    record: Record | None,
    replica: Replica,
    *,
    cards_possible: int,
    planned: Collection[str],
    now: datetime,
    settings: ControlplaneSettings,
) -> Change:
    """`record.start_failed`, or `record.quarantined` when the model is given up with it.

    1. A ready replica that ended by itself: the first within ten minutes may be started again at once,
       later ones wait longer each time.
    2. A start that failed: the model waits 15 s, doubling with every failed start in a row on any card.
    3. After five in a row, on two cards or more or on the only one, it is given up for 30 min; starts that
       failed for want of the files wait like others and do not count here.
    """
    before = record or Record(model=replica.model, incarnation=replica.incarnation)
    card = replica.cards[0] if replica.cards else ""
    place = (replica.profile, replica.node, card)
    others = tuple(f for f in before.failures if (f.profile, f.node, f.card) != place)
    known = next(
        (
            f
            for f in before.failures
            if (f.profile, f.node, f.card) == place and f.revision == replica.revision
        ),
        None,
    )
    reason = replica.last_line or replica.reason or replica.code or "the engine ended"
    count = known.count if known is not None else 0
    crashes = known.crashes if known is not None else 0
    if replica.was_ready:  # 1
        if known is None or (now - known.last_at).total_seconds() > CRASH_WINDOW_S:
            crashes = 0
        crashes += 1
        wait_s = 0.0 if crashes == 1 else backoff_s(crashes - 1, settings)
    else:  # 2
        count += 1
        wait_s = backoff_s(count + sum(f.count for f in others), settings)
    entry = Failures(
        profile=replica.profile,
        node=replica.node,
        card=card,
        revision=replica.revision,
        count=count,
        last_at=now,
        next_allowed_at=now + timedelta(seconds=wait_s),
        crashes=crashes,
        code=replica.code or "exited",
        reason=reason,
    )
    failures = (*others, entry)
    failed_cards = {(f.node, f.card) for f in failures if f.count > 0}
    in_a_row = sum(f.count for f in failures if f.code not in NOT_THE_MODELS)
    given_up = (
        not replica.was_ready
        and entry.code not in NOT_THE_MODELS
        and in_a_row >= settings.quarantine_after
        and (len(failed_cards) >= 2 or cards_possible <= 1)
    )
    state = replace(
        before, failures=failures, counted=_counted(before.counted, replica.id, planned)
    )
    if not given_up:
        return Change(
            noun="record",
            key=(replica.model,),
            event=RecordStartFailed(
                replica=replica.id, code=entry.code, next_allowed_at=entry.next_allowed_at
            ),
            state=state,
            reason=reason,
        )
    until = now + timedelta(seconds=settings.quarantine_s)  # 3
    why = f"{in_a_row} starts in a row failed, the last with: {reason}"
    return Change(
        noun="record",
        key=(replica.model,),
        event=RecordQuarantined(until=until),
        state=replace(state, quarantined=Quarantine(since=now, until=until, reason=why)),
        reason=why,
    )


def cleared(record: Record, cause: str, *, keep: tuple[Failures, ...] = ()) -> Change:
    """`record.cleared`: failures (but those in `keep`) and the quarantine are over."""
    return Change(
        noun="record",
        key=(record.model,),
        event=RecordCleared(cause=cause),
        state=replace(record, failures=keep, quarantined=None),
        reason=cause,
    )


def to_clear(record: Record, revisions: Collection[str], now: datetime) -> Change | None:
    """What lifts failures without anybody asking: the entry changed, or the quarantine ran out."""
    current = tuple(f for f in record.failures if f.revision in revisions)
    if len(current) != len(record.failures):
        return cleared(record, "the entry changed", keep=current)
    if record.quarantined is not None and record.quarantined.until <= now:
        return cleared(record, "the quarantine is over")
    return None


def unplaceable(
    record: Record | None, model: str, incarnation: str, report: PlacementReport
) -> Change | None:
    """`record.unplaceable`, or None when the record says the same already (its position aside)."""
    before = record or Record(model=model, incarnation=incarnation)
    known = before.unplaceable
    if known is not None and replace(known, position=report.position) == report:
        return None
    return Change(
        noun="record",
        key=(model,),
        event=RecordUnplaceable(),
        state=replace(before, unplaceable=report),
        reason="fits on no reachable card",
    )


def hold_back(record: Record | None, now: datetime) -> Refusal | None:
    """Why the model must not be started now: given up, or its backoff runs."""
    if record is None:
        return None
    if record.quarantined is not None and record.quarantined.until > now:
        return Refusal(
            code="model_quarantined",
            reason=record.quarantined.reason,
            retry_at=record.quarantined.until,
        )
    waiting = [f for f in record.failures if f.next_allowed_at > now]
    if not waiting:
        return None
    last = max(waiting, key=lambda f: (f.next_allowed_at, f.profile, f.node, f.card))
    return Refusal(code="start_failed", reason=last.reason, retry_at=last.next_allowed_at)


def has_failed_on(record: Record | None, profile: str, node: str, card: str) -> bool:
    """Whether the last starts of this profile there failed: such a card comes last in its rank."""
    if record is None:
        return False
    return any(
        f.count > 0 and (f.profile, f.node, f.card) == (profile, node, card)
        for f in record.failures
    )


def _counted(before: tuple[str, ...], replica: str, planned: Collection[str]) -> tuple[str, ...]:
    ids = (*(id_ for id_ in before if id_ != replica), replica)
    recent = set(ids[-COUNTED_KEPT:])
    return tuple(id_ for id_ in ids if id_ in recent or id_ in planned)
