"""Plans what the agent does next: compares the node's plan with what it holds, and names the actions.

Level-triggered and empty when satisfied, so missing a plan and seeing the next is fine. A start
reserves its leases in the same step. A replica id is started at most once, ever. It carries out
nothing: the supervisor does, and reports.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime

from msgspec import Struct

from nodeagent.domain import leases
from nodeagent.domain.drains import OWN
from nodeagent.domain.files import key_of
from nodeagent.domain.held import Held
from nodeagent.domain.line import place_of, queue
from nodeagent.domain.parking import may_park
from schemas.card import Card, Waiter
from schemas.cardstate import is_kept
from schemas.plan import Plan, PlanItem, Stop
from schemas.replica import TERMINAL_PHASES

NOT_STARTED: frozenset[str] = frozenset({"waiting", "fetching"})


class Observed(Struct, frozen=True, kw_only=True):
    """What the agent knows of its node when it plans.

    `used` are ids that were held once and forgotten. `unreported` are replicas with events that the log
    does not have yet. `engines` are the kinds this node can run. `wishes` are the agent's own stops, for
    whoever wants a card (`domain/granting.py`); `measured` the use of a card by holder.
    """

    held: Mapping[str, Held]
    cards: Mapping[str, Card]
    used: AbstractSet[str]
    unreported: AbstractSet[str]
    engines: AbstractSet[str]
    allow_commands: bool
    wishes: Mapping[str, Stop] = {}
    measured: Mapping[str, int] | None = None


class Start(Struct, frozen=True, kw_only=True, tag=True):
    """Launch the engine. `cards` are the node's changed cards, the lease already in them."""

    item: PlanItem
    cards: tuple[Card, ...]


class Refuse(Struct, frozen=True, kw_only=True, tag=True):
    """Answer that it cannot start here now: no failure, no backoff."""

    item: PlanItem
    reason: str
    card_revs: dict[str, int]


class Wait(Struct, frozen=True, kw_only=True, tag=True):
    """Stand in line until `waiting_for` have left its cards. `new`: it is not in line yet.

    A replica that was never started says so; a parked one that is to come back waits as it is.
    """

    item: PlanItem
    waiting_for: tuple[str, ...]
    place: int
    new: bool


class Unpark(Struct, frozen=True, kw_only=True, tag=True):
    """Bring a parked replica back. `cards` are its cards, the whole lease already in them."""

    replica: str
    cards: tuple[Card, ...]


class StayParked(Struct, frozen=True, kw_only=True, tag=True):
    """Answer that a parked replica cannot come back now: no failure, no backoff."""

    replica: str
    reason: str
    card_revs: dict[str, int]


class LeaveLine(Struct, frozen=True, kw_only=True, tag=True):
    """A parked replica is not to come back after all: out of line, and without what it was just given there."""

    replica: str


class Withdraw(Struct, frozen=True, kw_only=True, tag=True):
    """Answer that it never started and will not."""

    item: PlanItem | None
    replica: str


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """Begin (or begin anew, under another decision) to let its requests finish, then stop it."""

    replica: str
    stop: Stop


class Halt(Struct, frozen=True, kw_only=True, tag=True):
    """Stop at once: no gateway sends it anything."""

    replica: str
    stop: Stop


class Resume(Struct, frozen=True, kw_only=True, tag=True):
    """Demand came back while it drained: serve on."""

    replica: str
    decision: str


class Forget(Struct, frozen=True, kw_only=True, tag=True):
    """It ended, said so, and nobody plans for it any more."""

    replica: str


Action = (
    Start
    | Refuse
    | Wait
    | Unpark
    | StayParked
    | LeaveLine
    | Withdraw
    | Drain
    | Halt
    | Resume
    | Forget
)


def plan(desired: Plan, observed: Observed, now: datetime) -> tuple[Action, ...]:
    """The actions that bring the node to `desired`, stops before starts, else in the plan's order.

    A wish of the agent's own for a replica counts before the plan's as long as it stands. For an item of
    the plan:
    1. ended already: nothing, the control plane will take it out.
    2. held and to be stopped: see `_stopping`.
    3. held and to run: resumed when it only drains and was not told to end.
    4. held, parked and to run: brought back, or it stays parked with the numbers that stand against it.
    5. held, in line and to run: started once it has its lease; refused when it is out of line without.
    6. known from an earlier life of this id: nothing, an id is started once.
    7. never started and to be stopped: withdrawn.
    8. an engine this node does not run: refused.
    9. room on its cards: started with its leases. 10. those may leave that are in the way: in line.
    11. else refused with numbers.
    And for what is held but not planned:
    12. ended and reported: forgotten. 13. else stopped as lost.
    """
    ending: list[Action] = []
    starting: list[Action] = []
    cards = dict(observed.cards)
    planned: set[str] = set()
    for item in desired.items:
        if item.replica in planned:  # a plan that names an id twice means one replica
            continue
        planned.add(item.replica)
        held = observed.held.get(item.replica)
        answer: Action | None
        if held is not None:
            phase = held.replica.phase
            if phase in TERMINAL_PHASES:  # 1
                continue
            stop = observed.wishes.get(item.replica) or item.stop
            if stop is not None:  # 2
                ending.extend(_stopping(held, item, stop, cards))
                continue
            if held.ending:
                continue
            if phase == "draining":  # 3
                decision = held.stop.decision if held.stop else held.replica.stop_decision or ""
                ending.append(Resume(replica=item.replica, decision=decision))
                continue
            if phase == "parked":  # 4
                answer = _bring_back(item, held, observed, cards, now)
            elif phase == "waiting":  # 5
                answer = _begin(item, held, observed, cards, now)
            else:
                continue
        elif item.replica in observed.used:  # 6
            continue
        elif item.stop is not None:  # 7
            ending.append(Withdraw(item=item, replica=item.replica))
            continue
        else:
            answer = _begin(item, None, observed, cards, now)  # 8 to 11
        if answer is not None:
            starting.append(answer)
        if isinstance(answer, Start | Unpark):
            cards.update({card.id: card for card in answer.cards})
        elif isinstance(answer, Wait) and answer.new:
            changes = queue(cards, waiter_of(item, answer.waiting_for, now))
            cards.update({change.card.id: change.card for change in changes})
    for name in sorted(observed.held.keys() - planned):
        held = observed.held[name]
        if held.replica.phase in TERMINAL_PHASES:
            if name not in observed.unreported:  # 12
                ending.append(Forget(replica=name))
        elif (wish := observed.wishes.get(name)) is not None:
            ending.extend(_stopping(held, None, wish, cards))
        elif held.stop is None or held.replica.phase == "parked":  # 13
            lost = Stop(decision=f"lost-{name}", reason="lost", decided_at=now)
            ending.extend(_stopping(held, None, lost, cards))
    return (*ending, *starting)


def _begin(
    item: PlanItem,
    held: Held | None,
    observed: Observed,
    cards: Mapping[str, Card],
    now: datetime,
) -> Start | Refuse | Wait | None:
    engine = item.launch.engine
    reason = None
    if engine == "command" and not observed.allow_commands:
        reason = "this node does not run commands (its setting allow_commands is false)"
    elif engine not in observed.engines:
        reason = f"this node has no engine {engine}"
    if reason is not None:
        revs = {name: cards[name].rev for name in item.cards if name in cards}
        return Refuse(item=item, reason=reason, card_revs=revs)
    in_line = _in_line(item, cards)
    if in_line is not None:  # granted by the one who serves the line, or nobody
        said = held.replica.waiting_for if held is not None else None
        if said == in_line.waiting_for:
            return None
        return _wait(item, in_line.waiting_for, cards, now, new=False)
    granted = _reserve(item, observed, cards, now)
    if isinstance(granted, leases.Granted):
        return Start(item=item, cards=granted.cards)
    for_whom = _can_leave(item, observed, cards, granted)
    if for_whom and held is None:
        return _wait(item, for_whom, cards, now, new=True)
    return Refuse(item=item, reason=granted.reason, card_revs=granted.card_revs)


def _bring_back(
    item: PlanItem, held: Held, observed: Observed, cards: Mapping[str, Card], now: datetime
) -> Unpark | StayParked | Wait | None:
    """The way back of a parked replica: its cards, its place in line, or why not, said once."""
    if _in_line(item, cards) is not None:
        return None
    granted = _reserve(item, observed, cards, now)
    if isinstance(granted, leases.Granted):
        return Unpark(replica=item.replica, cards=granted.cards)
    if held.replica.card_revs == granted.card_revs:
        return None
    for_whom = _can_leave(item, observed, cards, granted)
    if for_whom:
        return _wait(item, for_whom, cards, now, new=True)
    return StayParked(replica=item.replica, reason=granted.reason, card_revs=granted.card_revs)


def _reserve(
    item: PlanItem, observed: Observed, cards: Mapping[str, Card], now: datetime
) -> leases.Granted | leases.NoRoom:
    return leases.reserve(
        cards,
        item.replica,
        item.cards,
        item.memory_bytes,
        now,
        measured_of(observed),
        exclusive=item.launch.exclusive,
    )


def measured_of(observed: Observed) -> Mapping[str, int]:
    """What each holder uses of each of its cards, as far as it was measured."""
    if observed.measured is not None:
        return observed.measured
    return {
        name: held.replica.measured_memory_bytes
        for name, held in observed.held.items()
        if held.replica.measured_memory_bytes is not None
    }


def _can_leave(
    item: PlanItem, observed: Observed, cards: Mapping[str, Card], denied: leases.NoRoom
) -> tuple[str, ...]:
    """Who leaves for a start that has no room now; nobody when that would not be enough.

    The named leases its plan names (unless they are pinned or of a higher priority), and on `cpu` parked
    copies, the least recently parked first.
    """
    if denied.kept or any(name not in cards for name in item.cards):
        return ()
    measured = measured_of(observed)
    leaving: set[str] = set()
    for name in item.cards:
        card = leases.without(cards[name], {item.replica})
        evicted = {
            lease.holder
            for lease in card.leases
            if lease.kind == "named"
            and (lease.returning or (lease.holder in item.evict and not is_kept(lease)))
        }
        copies = leases.copies(card, observed.held) if card.kind == "cpu" else ()
        for some in range(len(copies) + 1):
            gone = {*evicted, *copies[:some]}
            rest = leases.without(card, gone)
            # Whoever is in line already is served first; those that leave do it for him too.
            aside = leases.set_aside_bytes(card, item.replica)
            need = item.memory_bytes + (aside or 0)
            exclusive = item.launch.exclusive
            if aside is not None and not leases.lacks(rest, need, measured, exclusive=exclusive):
                leaving |= gone
                break
        else:
            return ()
    return tuple(sorted(leaving))


def _in_line(item: PlanItem, cards: Mapping[str, Card]) -> Waiter | None:
    places = (leases.waiter_of(cards[name], item.replica) for name in item.cards if name in cards)
    return next((place for place in places if place is not None), None)


def _wait(
    item: PlanItem,
    waiting_for: tuple[str, ...],
    cards: Mapping[str, Card],
    now: datetime,
    *,
    new: bool,
) -> Wait:
    after = dict(cards)
    if new:
        changes = queue(cards, waiter_of(item, waiting_for, now))
        after.update({change.card.id: change.card for change in changes})
    place = place_of(after, item.replica)
    return Wait(item=item, waiting_for=waiting_for, place=place, new=new)


def waiter_of(item: PlanItem, waiting_for: tuple[str, ...], now: datetime) -> Waiter:
    """The place in line of an engine that was planned here; a plain request counts as interactive."""
    return Waiter(
        id=item.replica,
        since=now,
        memory_bytes=item.memory_bytes,
        kind="replica",
        name=item.launch.model,
        cards=item.cards,
        exclusive=item.launch.exclusive,
        waiting_for=waiting_for,
    )


def _stopping(
    held: Held, item: PlanItem | None, stop: Stop, cards: Mapping[str, Card] | None = None
) -> tuple[Action, ...]:
    """How a held replica is brought to its end.

    a. told to end already, or its processes outlive the kill: nothing more to say; but one that is being
       parked is to end at once when a stop with force comes now.
    b. never started: withdrawn. c. loading: halted, no gateway knows it.
    d. parked: that is what the stop asked for, unless it must not be.
    e. ready: drained, unless this very stop was taken back before. One of the agent's own was called off
       because its cause was gone; when it stands again, so does the stop.
    f. draining under another decision, or force came later: drained anew.
    """
    name = held.replica.id
    phase = held.replica.phase
    if held.ending or phase == "stop_failed":  # a
        parks = phase == "draining" and held.stop is not None and may_park(held.stop)
        return (Halt(replica=name, stop=stop),) if parks and stop.force else ()
    if phase in NOT_STARTED:  # b
        return (Withdraw(item=item, replica=name),)
    if phase == "starting":  # c
        return (Halt(replica=name, stop=stop),)
    if phase == "parked":  # d
        if stop.park == "never":
            return (Halt(replica=name, stop=stop),)
        returns = any(_returns_to(card, name) for card in (cards or {}).values())
        return (LeaveLine(replica=name),) if returns else ()
    if phase == "ready":  # e
        own = stop.reason in OWN
        if held.replica.taken_back == stop.decision and not stop.force and not own:
            return ()
        return (Drain(replica=name, stop=stop),)
    # f
    if held.stop is None or held.stop.decision != stop.decision or held.stop.force != stop.force:
        return (Drain(replica=name, stop=stop),)
    return ()


def _returns_to(card: Card, name: str) -> bool:
    """Whether a parked replica is in line for its way back there, or was given its lease already."""
    lease = leases.lease_of(card, name)
    return leases.waiter_of(card, name) is not None or (
        lease is not None and lease.kind != "parked"
    )


def stop_all(observed: Observed, stop: Stop) -> tuple[Action, ...]:
    """The actions that end every replica of the node, by id."""
    actions: list[Action] = []
    for name in sorted(observed.held):
        held = observed.held[name]
        if held.replica.phase not in TERMINAL_PHASES:
            actions.extend(_stopping(held, None, stop))
    return tuple(actions)


def needed_keys(held: Iterable[Held]) -> frozenset[str]:
    """The keys of the sets of files that replicas here need: of all that are not over."""
    keys = (
        key_of(one.launch.source)
        for one in held
        if one.launch is not None and one.replica.phase not in TERMINAL_PHASES
    )
    return frozenset(key for key in keys if key is not None)


def due_endings(ended: Mapping[str, datetime], after_s: float, now: datetime) -> tuple[str, ...]:
    """The replicas whose subjects end now: terminal for `after_s` seconds, in order of id."""
    return tuple(
        sorted(name for name, at in ended.items() if (now - at).total_seconds() >= after_s)
    )
