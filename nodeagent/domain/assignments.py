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
from nodeagent.domain.files import key_of
from schemas.card import Card
from schemas.plan import Launch, Plan, PlanItem, Stop
from schemas.replica import TERMINAL_PHASES, Replica

NOT_STARTED: frozenset[str] = frozenset({"waiting", "fetching"})


class Held(Struct, frozen=True, kw_only=True):
    """A replica as this agent holds it: the state it reported last, and what is being done to it.

    `launch` is what to start and how to ask it. `stop` is the wish being carried out; `ending` tells
    that the process was told to end, from where there is no way back. `resuming`: it comes back from being
    parked. `port` is the engine's, `cause` what led to the start.
    """

    replica: Replica
    launch: Launch | None = None
    port: int = 0
    cause: str = ""
    stop: Stop | None = None
    ending: bool = False
    resuming: bool = False


class Observed(Struct, frozen=True, kw_only=True):
    """What the agent knows of its node when it plans.

    `used` are ids that were held once and forgotten. `unreported` are replicas with events that the log
    does not have yet. `engines` are the kinds this node can run.
    """

    held: Mapping[str, Held]
    cards: Mapping[str, Card]
    used: AbstractSet[str]
    unreported: AbstractSet[str]
    engines: AbstractSet[str]
    allow_commands: bool


class Start(Struct, frozen=True, kw_only=True, tag=True):
    """Launch the engine. `cards` are the node's changed cards, the lease already in them."""

    item: PlanItem
    cards: tuple[Card, ...]


class Refuse(Struct, frozen=True, kw_only=True, tag=True):
    """Answer that it cannot start here now: no failure, no backoff."""

    item: PlanItem
    reason: str
    card_revs: dict[str, int]


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


Action = Start | Refuse | Withdraw | Drain | Halt | Resume | Forget


def plan(desired: Plan, observed: Observed, now: datetime) -> tuple[Action, ...]:
    """The actions that bring the node to `desired`, stops before starts, else in the plan's order.

    For an item of the plan:
    1. ended already: nothing, the control plane will take it out.
    2. held and to be stopped: see `_stopping`.
    3. held and to run: resumed when it only drains and was not told to end.
    4. known from an earlier life of this id: nothing, an id is started once.
    5. never started and to be stopped: withdrawn.
    6. an engine this node does not run: refused.
    7. room on its cards: started with its leases; else refused with numbers.
    And for what is held but not planned:
    8. ended and reported: forgotten. 9. else stopped as lost.
    """
    ending: list[Action] = []
    starting: list[Action] = []
    cards = dict(observed.cards)
    measured = {
        name: held.replica.measured_memory_bytes
        for name, held in observed.held.items()
        if held.replica.measured_memory_bytes is not None
    }
    planned: set[str] = set()
    for item in desired.items:
        if item.replica in planned:  # a plan that names an id twice means one replica
            continue
        planned.add(item.replica)
        held = observed.held.get(item.replica)
        if held is not None:
            if held.replica.phase in TERMINAL_PHASES:  # 1
                continue
            if item.stop is not None:  # 2
                ending.extend(_stopping(held, item, item.stop))
            elif held.replica.phase == "draining" and not held.ending:  # 3
                decision = held.stop.decision if held.stop else held.replica.stop_decision or ""
                ending.append(Resume(replica=item.replica, decision=decision))
            continue
        if item.replica in observed.used:  # 4
            continue
        if item.stop is not None:  # 5
            ending.append(Withdraw(item=item, replica=item.replica))
            continue
        answer = _begin(item, observed, cards, measured, now)  # 6, 7
        if isinstance(answer, Start):
            cards.update({card.id: card for card in answer.cards})
        starting.append(answer)
    for name in sorted(observed.held.keys() - planned):
        held = observed.held[name]
        if held.replica.phase in TERMINAL_PHASES:
            if name not in observed.unreported:  # 8
                ending.append(Forget(replica=name))
        elif held.stop is None:  # 9
            lost = Stop(decision=f"lost-{name}", reason="lost", decided_at=now)
            ending.extend(_stopping(held, None, lost))
    return (*ending, *starting)


def _begin(
    item: PlanItem,
    observed: Observed,
    cards: Mapping[str, Card],
    measured: Mapping[str, int],
    now: datetime,
) -> Start | Refuse:
    engine = item.launch.engine
    reason = None
    if engine == "command" and not observed.allow_commands:
        reason = "this node does not run commands (its setting allow_commands is false)"
    elif engine not in observed.engines:
        reason = f"this node has no engine {engine}"
    if reason is not None:
        revs = {name: cards[name].rev for name in item.cards if name in cards}
        return Refuse(item=item, reason=reason, card_revs=revs)
    granted = leases.reserve(cards, item.replica, item.cards, item.memory_bytes, now, measured)
    if isinstance(granted, leases.NoRoom):
        return Refuse(item=item, reason=granted.reason, card_revs=granted.card_revs)
    return Start(item=item, cards=granted.cards)


def _stopping(held: Held, item: PlanItem | None, stop: Stop) -> tuple[Action, ...]:
    """How a held replica is brought to its end.

    a. told to end already, or its processes outlive the kill: nothing more to say.
    b. never started: withdrawn. c. loading or parked: halted, no gateway knows it.
    d. ready: drained, unless this very stop was taken back before.
    e. draining under another decision, or force came later: drained anew.
    """
    name = held.replica.id
    phase = held.replica.phase
    if held.ending or phase == "stop_failed":  # a
        return ()
    if phase in NOT_STARTED:  # b
        return (Withdraw(item=item, replica=name),)
    if phase in ("starting", "parked"):  # c
        return (Halt(replica=name, stop=stop),)
    if phase == "ready":  # d
        if held.replica.taken_back == stop.decision and not stop.force:
            return ()
        return (Drain(replica=name, stop=stop),)
    # e
    if held.stop is None or held.stop.decision != stop.decision or held.stop.force != stop.force:
        return (Drain(replica=name, stop=stop),)
    return ()


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
