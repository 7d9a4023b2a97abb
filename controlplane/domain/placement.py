"""Chooses profile and card for one start, or gives the reasons against every candidate.

It reads and never reserves: the caller writes the plan item in the decision that follows, and asks again
after every change. The order of nodes in the world never matters.
"""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Final

import msgspec
from msgspec import Struct

from controlplane.domain import holders, memory, record
from controlplane.domain.holders import Draining
from controlplane.domain.index import ITEM_BYTES, LONG_AGO, CardKey, Planned, Room
from controlplane.domain.scene import ANY, MOST_STATE_BYTES, Scene
from schemas.activation import Activation
from schemas.model import Model, Profile
from schemas.placement import Candidate, PlacementReport
from schemas.record import Record

POLICY_VERSION: Final = 1
MISSES_KEPT: Final = 8


class Demand(Struct, frozen=True, kw_only=True):
    """One replica more of a model. `wanted_at` is its place in the queue.

    `activation` is the demand's own; None when only `min` asks. `fresh`: the demand begins with the
    decision it is placed in.
    """

    model: Model
    wanted_at: datetime
    scope: str = ANY
    activation: Activation | None = None
    fresh: bool = False


class Placed(Struct, frozen=True, kw_only=True):
    """Room now, at rank 2 or 3."""

    profile: Profile
    node: str
    card: str
    kind: str
    memory_bytes: int
    rank: int
    card_rev: int
    report: PlacementReport


class Wait(Struct, frozen=True, kw_only=True):
    """Room when `victims` (to stop now) and `waiting_for` (replicas) are gone.

    `claimed` are the cards later demands must leave alone; `look_at` when time alone may help.
    """

    victims: tuple[Planned, ...]
    waiting_for: tuple[str, ...]
    claimed: frozenset[CardKey]
    report: PlacementReport
    look_at: datetime | None = None


class NoRoom(Struct, frozen=True, kw_only=True):
    """Fits on no reachable card, even when emptied."""

    report: PlacementReport


class NoNode(Struct, frozen=True, kw_only=True):
    """Nothing can be placed at all now: no node that is heard, or placement is frozen."""

    reason: str


Verdict = Placed | Wait | NoRoom | NoNode


class _Found(Struct, frozen=True, kw_only=True):
    """One candidate: rank None with the group of its reason, or ranked with what it costs."""

    profile: Profile
    room: Room
    needed_bytes: int = 0
    rank: int | None = None
    group: str = ""
    reason: str = ""
    failed_before: bool = False
    draining: Draining | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The total order: rank, cards that failed last, victims, then the ties of the design."""
        victims = self.draining.victims if self.draining is not None else ()
        return (
            self.rank if self.rank is not None else 9,
            self.failed_before,
            # A card others are leaving already comes before one somebody would have to leave.
            bool(victims),
            any(v.has_requests for v in victims),
            -self.profile.priority,
            max((v.used_at for v in victims), default=LONG_AGO),
            self.room.order,
            self.room.given_at or LONG_AGO,
            self.room.node,
            self.room.card,
            self.profile.name,
        )

    @property
    def miss_key(self) -> tuple[object, ...]:
        """The nearest misses first: those that ranked, then those short of the least memory."""
        short = self.needed_bytes - self.room.free_bytes
        return (self.rank is None, self.group != "memory", short, *self.key[5:])


def place(scene: Scene, demand: Demand, claimed: Collection[CardKey] = ()) -> Verdict:
    """Where the next replica of `demand.model` goes.

    1. Placement is frozen, or no node is heard: nothing is judged.
    2. Filters exclude candidates, each with a reason and numbers.
    3. A free card (rank 2) or room beside others (rank 3) is taken; the rest is not judged then.
    4. Otherwise holders are drained (rank 4), or the demand waits for what keeps its cards.
    5. Nothing fits, even emptied.

    `claimed` are cards that demands before this one wait for. A wait that was told already and that
    nothing could have ended is not judged again: many may wait, and every event makes the queue look.
    """
    activation = demand.activation
    if activation is not None and (demand.fresh or activation.phase not in ("waiting", "ready")):
        return _place(scene, demand, claimed)
    key = (demand.model.name, demand.scope)
    basis = (scene.frozen, demand.wanted_at, frozenset(claimed))
    known = scene.index.waits.get(key)
    if known is not None and known[0] == basis:
        wait = known[1]
        if isinstance(wait, Wait) and (wait.look_at is None or wait.look_at > scene.now):
            return wait
    verdict = _place(scene, demand, claimed)
    if isinstance(verdict, Wait) and not verdict.victims:
        scene.index.waits[key] = (basis, verdict)
    return verdict


def _place(scene: Scene, demand: Demand, claimed: Collection[CardKey]) -> Verdict:
    if scene.frozen:  # 1
        return NoNode(reason=scene.frozen)
    waited_s = scene.age_s(demand.wanted_at)
    known = scene.world.records.get(demand.model.name)
    refused = _refused_cards(scene, demand.model.name)
    found: list[_Found] = []
    free = _free_now(scene, demand, known, refused, claimed, found)
    if free is not None:  # 3
        return _placed(free, _report(scene, found, free))
    if not any(is_heard(scene, node) for node in scene.world.nodes):
        return NoNode(reason="no node is reachable")
    found.clear()
    for profile in sorted(demand.model.profiles, key=lambda p: (-p.priority, p.name)):
        for node in sorted(scene.world.nodes):
            for order in range(len(scene.world.nodes[node].cards)):
                room = scene.index.room(scene.world, node, order)
                found.append(
                    _judge(scene, demand, profile, room, known, refused, claimed, waited_s)
                )
    ranked = sorted((f for f in found if f.rank is not None), key=lambda f: f.key)
    best = ranked[0] if ranked else None
    report = _report(scene, found, None if best is None or best.rank == 5 else best)
    if best is None:  # 5
        return NoRoom(report=report)
    return _wait(ranked, report)  # 4


def _placed(found: _Found, report: PlacementReport) -> Placed:
    assert found.rank is not None
    return Placed(
        profile=found.profile,
        node=found.room.node,
        card=found.room.card,
        kind=found.room.kind,
        memory_bytes=found.needed_bytes,
        rank=found.rank,
        card_rev=found.room.rev,
        report=report,
    )


def _free_now(
    scene: Scene,
    demand: Demand,
    known: Record | None,
    refused: Collection[CardKey],
    claimed: Collection[CardKey],
    judged: list[_Found],
) -> _Found | None:
    """The best candidate of rank 2, else of rank 3, without looking at what could be drained.

    Cards come in the order of ties, so the first that passes is the best of its profile: a yard of
    thousands of cards is not judged to the end. `judged` takes those that were looked at in vain.
    """
    rooms = scene.index.rooms(scene.world)
    by_priority = sorted(demand.model.profiles, key=lambda p: (-p.priority, p.name))
    for rank in (2, 3):
        failed: list[_Found] = []
        for _, group in groupby(by_priority, key=lambda p: p.priority):
            firsts: list[_Found] = []
            for profile in group:
                needed = {
                    kind: memory.needed_bytes(profile, kind, known) for kind in ("cpu", "gpu")
                }
                for _, room in rooms:
                    if bool(room.holders) == (rank == 2) or room.free_bytes < needed[room.kind]:
                        continue
                    if (room.node, room.card) in claimed:
                        continue
                    found = _judge(scene, demand, profile, room, known, refused, claimed, 0.0)
                    if found.rank != rank:
                        judged.append(found)
                    elif found.failed_before:
                        failed.append(found)
                    else:
                        firsts.append(found)
                        break
            if firsts:
                return min(firsts, key=lambda f: f.key)
        if failed:
            return min(failed, key=lambda f: f.key)
    return None


def _wait(ranked: list[_Found], report: PlacementReport) -> Wait:
    """The best card of rank 4 that can be had, else all of them are waited for.

    Once somebody is leaving a card for this demand only that card is claimed: the others stay open.
    """
    best = ranked[0]
    if best.rank == 4 and best.draining is not None:
        return Wait(
            victims=tuple(v.planned for v in best.draining.victims),
            waiting_for=(
                *best.draining.leaving,
                *(v.planned.item.replica for v in best.draining.victims),
            ),
            claimed=frozenset({(best.room.node, best.room.card)}),
            report=report,
        )
    looks = [f.draining.look_at for f in ranked if f.draining and f.draining.look_at]
    return Wait(
        victims=(),
        waiting_for=best.draining.keepers if best.draining is not None else (),
        claimed=frozenset((f.room.node, f.room.card) for f in ranked if f.group != "refused"),
        report=report,
        look_at=min(looks, default=None),
    )


def _judge(
    scene: Scene,
    demand: Demand,
    profile: Profile,
    room: Room,
    known: Record | None,
    refused: Collection[CardKey],
    claimed: Collection[CardKey],
    waited_s: float,
) -> _Found:
    """One candidate through the filters, then its rank.

    Rank 2: nobody is on the card. 3: room beside others. 4: room when the victims have left. 5: it
    would fit, but those on it keep their place for now, or an earlier demand waits for the card.
    """
    needed = memory.needed_bytes(profile, room.kind, known)

    def no(group: str, reason: str) -> _Found:
        return _Found(profile=profile, room=room, needed_bytes=needed, group=group, reason=reason)

    key = (room.node, room.card)
    problem = node_problem(scene, room.node)
    if problem:
        return no("node", f"{room.node}: {problem}")
    ill_suited = unsuited(scene, demand, profile, room)
    if ill_suited:
        return no("card", f"{room.card}: {ill_suited}")
    taken = scene.index.plan_bytes(room.node)
    # No entry is larger than 8 KiB (entries.ENTRY_BYTES), so only long plans need to be measured.
    if taken * 2 > MOST_STATE_BYTES:
        more = len(msgspec.json.encode((profile, demand.model.source))) + ITEM_BYTES
        if taken + more > MOST_STATE_BYTES:
            return no(
                "node",
                f"{room.node}: its plan is full, {taken} of {MOST_STATE_BYTES} bytes are taken "
                f"and this start needs {more}",
            )
    if needed > room.total_bytes:
        return no(
            "memory",
            f"{room.card}: needs {memory.amount(needed)}, has {memory.amount(room.total_bytes)}",
        )
    revision = scene.index.revision(scene.world, demand.model.name, profile)
    for planned in scene.index.on_card.get(key, {}).values():
        launch = planned.item.launch
        same = launch.model == demand.model.name and launch.revision == revision
        if same and scene.hold(planned) not in ("ended", "stopping"):
            return no("running", f"{room.card}: {planned.item.replica} runs there already")
    if key in refused:
        # Not counted out for good: the demand waits until that agent's card changes.
        return _Found(
            profile=profile,
            room=room,
            needed_bytes=needed,
            rank=5,
            group="refused",
            reason=f"{room.card}: its agent refused; nothing changed there since",
        )
    failed = record.has_failed_on(known, profile.name, room.node, room.card)
    shares = not profile.exclusive and not room.exclusive
    fits = room.free_bytes >= needed
    if key not in claimed:
        if not room.holders:
            return _Found(
                profile=profile,
                room=room,
                needed_bytes=needed,
                rank=2,
                failed_before=failed,
                reason=f"{room.card}: free",
            )
        if shares and fits:
            return _Found(
                profile=profile,
                room=room,
                needed_bytes=needed,
                rank=3,
                failed_before=failed,
                reason=f"{room.card}: {memory.amount(room.free_bytes)} free",
            )
    numbers = f"needs {memory.amount(needed)}, {memory.amount(room.free_bytes)} free"
    if key in claimed:
        # Who would have to leave is judged for the demand that waits for the card, not for all behind it.
        return _Found(
            profile=profile,
            room=room,
            needed_bytes=needed,
            rank=5,
            group="memory",
            failed_before=failed,
            draining=holders.Draining(keepers=tuple(h.replica for h in room.holders)),
            reason=f"{room.card}: {numbers}, others wait for it",
        )
    draining = holders.drain_of(
        scene,
        room,
        needed,
        empty=not shares,
        for_model=demand.model.name,
        waited_s=waited_s,
    )
    return _Found(
        profile=profile,
        room=room,
        needed_bytes=needed,
        rank=4 if draining.enough else 5,
        group="memory",
        failed_before=failed,
        draining=draining,
        reason=f"{room.card}: {numbers}",
    )


def node_problem(scene: Scene, node: str) -> str:
    """Why nothing is placed on a node, empty when it is a candidate."""
    state = scene.world.nodestates.get(node)
    if state is None:
        return "has not joined yet"
    if state.reach != "reachable":
        return f"is {state.reach}"
    if state.admin != "open":
        return f"is {state.admin}"
    if not scene.world.nodes[node].running:
        return "its agent is stopped"
    head = scene.world.head("plan", node)
    if not head.writable:
        return f"its plan cannot be written: {head.problem}"
    return ""


def is_heard(scene: Scene, node: str) -> bool:
    state = scene.world.nodestates.get(node)
    return state is not None and state.reach == "reachable" and scene.world.nodes[node].running


def unsuited(scene: Scene, demand: Demand, profile: Profile, room: Room) -> str:
    """Why this profile never runs on this card, whatever is on it; empty when it may."""
    if demand.scope not in (ANY, f"{room.node}~{room.card}"):
        return "is not the card asked for"
    if profile.cards != 1:
        return f"profile {profile.name} needs {profile.cards} cards at once"
    if not suits(profile, room.node, room.card, room.kind):
        return f"profile {profile.name} wants {' or '.join(profile.card)}"
    node = scene.world.nodes[room.node]
    if profile.engine == "command" and not node.allow_commands:
        return f"{room.node} does not allow commands (allow_commands)"
    engines = {engine.name for engine in node.engines}
    if engines and profile.engine != "command" and profile.engine not in engines:
        return f"{room.node} has no engine {profile.engine}"
    return ""


def suits(profile: Profile, node: str, card: str, kind: str) -> bool:
    """Whether the profile's `card` names this card by kind or by a pattern of `node/card`."""
    return any(
        wish == kind or ("/" in wish and fnmatchcase(f"{node}/{card}", wish))
        for wish in profile.card
    )


def cards_possible(scene: Scene, model: Model) -> int:
    """On how many cards of usable nodes the model might ever be started, whatever is on them."""
    demand = Demand(model=model, wanted_at=scene.now)
    known = scene.world.records.get(model.name)
    count = 0
    for node in scene.world.nodes:
        if node_problem(scene, node):
            continue
        for order in range(len(scene.world.nodes[node].cards)):
            room = scene.index.room(scene.world, node, order)
            count += any(
                not unsuited(scene, demand, profile, room)
                and memory.needed_bytes(profile, room.kind, known) <= room.total_bytes
                for profile in model.profiles
            )
    return count


def _refused_cards(scene: Scene, model: str) -> set[CardKey]:
    """Cards whose agent refused this model and whose revision is still the one it refused at."""
    cards: set[CardKey] = set()
    for id_ in scene.index.replicas_of.get(model, ()):
        replica = scene.world.replicas[id_]
        if replica.phase != "refused":
            continue
        for card in replica.cards:
            rev = replica.card_revs.get(card)
            now_at = scene.world.cards.get((replica.node, card))
            if rev is not None:
                is_same = now_at is not None and now_at.rev == rev
            else:
                # Its agent did not say at which revision: nothing it wrote since changed the card.
                refused_seq = scene.world.head("replica", replica.node, id_).seq
                is_same = scene.world.head("card", replica.node, card).seq <= refused_seq
            if is_same:
                cards.add((replica.node, card))
    return cards


def _report(scene: Scene, found: list[_Found], best: _Found | None) -> PlacementReport:
    misses = sorted((f for f in found if f is not best), key=lambda f: f.miss_key)
    counts = Counter(f.group for f in found if f.rank is None or f.rank == 5)
    return PlacementReport(
        chosen=_candidate(best) if best is not None else None,
        misses=tuple(_candidate(f) for f in misses[:MISSES_KEPT]),
        counts=dict(sorted(counts.items())),
        position=scene.world.position,
        policy_version=POLICY_VERSION,
    )


def _candidate(found: _Found) -> Candidate:
    victims = found.draining.victims if found.draining is not None else ()
    return Candidate(
        profile=found.profile.name,
        node=found.room.node,
        cards=(found.room.card,),
        rank=found.rank,
        reason=found.reason,
        victims=tuple(v.planned.item.replica for v in victims),
    )


def sentence(report: PlacementReport) -> str:
    """The reasons of a report for a person, in one line: of the card chosen, or of the nearest misses."""
    nearest = [report.chosen] if report.chosen is not None else report.misses
    reasons = [candidate.reason for candidate in nearest if candidate.reason]
    if not reasons:
        return "there is no card"
    return "; ".join(dict.fromkeys(reasons))
