"""Judges one candidate: a profile on a set of cards of one node, with its rank or the reason against it.

It compares no two candidates; what one came to, and its order, is found.py's, which one is taken placement.py's.
"""

from collections.abc import Collection

import msgspec

from controlplane.domain import holders, memory, record
from controlplane.domain.found import Demand, Facts, Found, Part, combined
from controlplane.domain.holders import Draining
from controlplane.domain.index import ITEM_BYTES
from controlplane.domain.rooms import CardKey, Planned, Room
from controlplane.domain.scene import ANY, MOST_STATE_BYTES, Scene
from schemas.cardnames import scope_of, suits
from schemas.model import Model, Profile
from schemas.replica import Replica


def facts_of(scene: Scene, demand: Demand, claimed: Collection[CardKey]) -> Facts:
    refused, parked = _refused(scene, demand.model.name)
    known = scene.world.records.get(demand.model.name)
    return Facts(
        demand=demand,
        waited_s=scene.age_s(demand.wanted_at),
        known=known,
        needed=tuple(
            {kind: memory.needed_bytes(profile, kind, known) for kind in ("cpu", "gpu")}
            for profile in demand.model.profiles
        ),
        refused=refused,
        parked_refused=parked,
        claimed=claimed,
    )


def _refused(scene: Scene, model: str) -> tuple[set[CardKey], set[str]]:
    """Cards whose agent refused this model, and parked replicas it refused to resume, at a revision that
    still is the card's."""
    cards: set[CardKey] = set()
    parked: set[str] = set()
    for id_ in scene.index.replicas_of.get(model, ()):
        replica = scene.world.replicas[id_]
        if replica.phase == "parked":
            where = [(card, replica.card_revs[card]) for card in replica.card_revs]
            if where and all(_is_at(scene, replica.node, card, rev) for card, rev in where):
                parked.add(id_)
            continue
        if replica.phase != "refused":
            continue
        # One of several that changed may be the one that lacked room.
        if all(_is_as_refused(scene, replica, card) for card in replica.cards):
            cards.update((replica.node, card) for card in replica.cards)
    return cards, parked


def _is_as_refused(scene: Scene, replica: Replica, card: str) -> bool:
    rev = replica.card_revs.get(card)
    if rev is not None:
        return _is_at(scene, replica.node, card, rev)
    # Its agent did not say at which revision: nothing it wrote since changed the card.
    refused_seq = scene.world.head("replica", replica.node, replica.id).seq
    return scene.world.head("card", replica.node, card).seq <= refused_seq


def _is_at(scene: Scene, node: str, card: str, rev: int) -> bool:
    """Whether nothing changed on the card since that revision; an older one only was not read yet."""
    state = scene.world.cards.get((node, card))
    return state is not None and state.rev <= rev


def judge(scene: Scene, facts: Facts, place: int, room: Room) -> Found:
    """The candidate of the `place`-th profile on this one card."""
    profile = facts.demand.model.profiles[place]
    needed = facts.needed[place][room.kind]
    part = judge_part(scene, facts, profile, room, needed)
    return Found(
        profile=profile,
        place=place,
        node=room.node,
        needed_bytes=needed,
        parts=(part,),
        rank=part.rank,
        group=part.group,
        reason=part.reason,
        kept=part.kept,
        launches=facts.demand.model.name,
    )


def judge_part(
    scene: Scene, facts: Facts, profile: Profile, room: Room, needed: int, **going: object
) -> Part:
    """One card through the filters, then its rank (schemas/placement.py has the ranks).

    `going` is what other cards of the same set cost already (holders.drain_of).
    """
    demand = facts.demand
    where = (room.node, room.card)
    problem = node_problem(scene, room.node)
    if problem:
        return Part(room=room, group="node", reason=f"{room.node}: {problem}")
    ill_suited = unsuited(scene, demand.model, profile, room)
    if ill_suited:
        return Part(room=room, group="card", reason=f"{room.card}: {ill_suited}")
    full = _plan_is_full(scene, demand, profile, room.node)
    if full:
        return Part(room=room, group="node", reason=full)
    if needed > room.total_bytes:
        has = memory.amount(room.total_bytes)
        reason = f"{room.card}: needs {memory.amount(needed)}, has {has}"
        return Part(room=room, group="memory", reason=reason)
    twin = _twin_on(scene, demand.model, profile, where)
    if twin:
        return Part(room=room, group="running", reason=f"{room.card}: {twin} is there already")
    if where in facts.refused:
        # Not counted out for good: the demand waits until that agent's card changes.
        reason = f"{room.card}: its agent refused; nothing changed there since"
        return Part(room=room, rank=5, group="refused", reason=reason)
    failed = record.has_failed_on(facts.known, profile.name, room.node, room.card)
    return _ranked(scene, facts, profile, room, needed, failed, "", going)


def _ranked(
    scene: Scene,
    facts: Facts,
    profile: Profile,
    room: Room,
    needed: int,
    failed: bool,
    own: str,
    going: dict[str, object],
) -> Part:
    """The rank of a card that passed the filters. `own` is the parked replica that would come back to it.

    5 a VM, a claim or a pinned lease keeps it; an earlier demand waits for it; those on it stay for now.
    2 (1 for a parked copy) nobody is there; 3 (1) room beside others; 4 room when others have left.
    """
    kept_own = next((h.memory_bytes for h in room.holders if h.id == own), 0)
    free = room.free_bytes + kept_own
    if room.kept:
        return Part(
            room=room,
            rank=5,
            group="kept",
            reason=f"{room.card}: kept by {room.kept}",
            failed_before=failed,
            draining=Draining(keepers=(room.kept,), kept=True),
            kept=True,
        )
    numbers = f"needs {memory.amount(needed)}, {memory.amount(max(free, 0))} free"
    if (room.node, room.card) in facts.claimed:
        # Who would have to leave is judged for the demand that waits for the card, not for all behind it.
        return Part(
            room=room,
            rank=5,
            group="memory",
            reason=f"{room.card}: {numbers}, others wait for it",
            failed_before=failed,
            draining=Draining(keepers=tuple(h.name or h.id for h in room.holders)),
        )
    if free >= needed:
        if room.is_free:
            reason = f"{room.card}: free"
            if room.free_bytes < room.total_bytes:
                reason += f", {memory.amount(free)} of {memory.amount(room.total_bytes)}"
            return Part(room=room, rank=1 if own else 2, reason=reason, failed_before=failed)
        if not profile.exclusive and not room.exclusive:
            reason = f"{room.card}: {memory.amount(free)} free"
            return Part(room=room, rank=1 if own else 3, reason=reason, failed_before=failed)
    draining = holders.drain_of(
        scene,
        room,
        needed,
        empty=profile.exclusive or room.exclusive,
        for_model=facts.demand.model.name,
        waited_s=facts.waited_s,
        own=own,
        **going,  # type: ignore[arg-type]
    )
    stowed = ""
    if room.stowaways and profile.exclusive:
        stowed = f", used by {room.stowaways} process(es) without a lease"
    elif room.other_bytes > 0:
        stowed = f", {memory.amount(room.other_bytes)} used without a lease"
    why = f"; {draining.why}" if draining.why else ""
    return Part(
        room=room,
        rank=4 if draining.enough else 5,
        group="kept" if draining.kept else "memory",
        reason=f"{room.card}: {numbers}{stowed}{why}",
        failed_before=failed,
        draining=draining,
        kept=draining.kept,
    )


def judge_parked(scene: Scene, facts: Facts, planned: Planned) -> Found | None:
    """The candidate that brings a parked replica back to its cards, None when it is no longer what the entry
    asks for.

    It ranks as its worst card: 1 where it can have all of them, 4 when others have to leave, 5 when somebody
    keeps one.
    """
    model = facts.demand.model
    item = planned.item
    profile = scene.profile_of(planned)
    if profile is None:
        return None
    place = next(n for n, p in enumerate(model.profiles) if p.name == profile.name)
    parts: list[Part] = []
    spare: dict[str, int] = {}
    gone: set[str] = set()
    for card in item.cards:
        room = scene.index.room(scene.world, (planned.node, card))
        if room is None:
            return None
        problem = node_problem(scene, planned.node)
        if problem:
            part = Part(room=room, group="node", reason=f"{planned.node}: {problem}")
        elif item.replica in facts.parked_refused:
            reason = (
                f"{card}: its agent had no room for {item.replica}; nothing changed there since"
            )
            part = Part(room=room, rank=5, group="refused", reason=reason)
        else:
            going: dict[str, object] = {"spare": spare, "gone": gone}
            part = _ranked(
                scene, facts, profile, room, item.memory_bytes, False, item.replica, going
            )
            gone |= {v.planned.item.replica for v in part.draining.victims}
        parts.append(part)
    return combined(facts, profile, place, planned.node, item.memory_bytes, parts, planned)


def judge_set(scene: Scene, facts: Facts, place: int, node: str) -> Found:
    """The candidate of a profile that needs several cards of one node: the best of them.

    A card named by the demand is among them. Victims that serve one model count together over all cards, so
    that no model falls below its `min` for it.
    """
    profile = facts.demand.model.profiles[place]
    needed = facts.needed[place]
    rooms = [scene.index.room(scene.world, where) for where in scene.index.cards_at(node)]
    parts = [judge_part(scene, facts, profile, r, needed[r.kind]) for r in rooms if r is not None]

    def is_named(part: Part) -> bool:
        return facts.demand.scope == scope_of(part.room.node, part.room.card)

    def key(part: Part) -> tuple[object, ...]:
        one = combined(facts, profile, place, node, needed[part.room.kind], [part])
        return (not is_named(part), *one.key)

    parts.sort(key=key)
    chosen: list[Part] = []
    spare: dict[str, int] = {}
    gone: set[str] = set()
    put_off: list[Part] = []
    for part in parts:
        if len(chosen) == profile.cards:
            break
        if part.rank is None:
            continue
        if part.rank == 4:
            room = part.room
            part = judge_part(
                scene, facts, profile, room, needed[room.kind], spare=spare, gone=gone
            )
            gone |= {v.planned.item.replica for v in part.draining.victims}
        (put_off if part.rank == 5 and not is_named(part) else chosen).append(part)
    chosen = [*chosen, *put_off][: profile.cards]
    if len(chosen) == profile.cards and (facts.demand.scope == ANY or any(map(is_named, chosen))):
        most = max(needed[part.room.kind] for part in chosen)
        return combined(facts, profile, place, node, most, chosen)
    excluded = [part for part in parts if part.rank is None]
    first = min(excluded, key=lambda p: p.room.order, default=None)
    suited = len(parts) - len(excluded)
    reason = f"{node}: needs {profile.cards} cards at once, {suited} of {len(parts)} would do"
    return Found(
        profile=profile,
        place=place,
        node=node,
        needed_bytes=max(needed.values()),
        parts=(),
        group=first.group if first is not None else "card",
        reason=f"{reason} ({first.reason})" if first is not None else reason,
        launches=facts.demand.model.name,
    )


def _twin_on(scene: Scene, model: Model, profile: Profile, where: CardKey) -> str:
    """A replica of this very profile and revision that is on the card, parked ones too: those come back."""
    revision = scene.index.revision(scene.world, model.name, profile)
    for planned in scene.index.on_card.get(where, {}).values():
        launch = planned.item.launch
        if launch.model != model.name or launch.revision != revision:
            continue
        if scene.hold(planned) not in ("ended", "stopping"):
            return planned.item.replica
    return ""


def _plan_is_full(scene: Scene, demand: Demand, profile: Profile, node: str) -> str:
    taken = scene.index.plan_bytes(node)
    # No entry is larger than 8 KiB (entries.ENTRY_BYTES), so only long plans need to be measured.
    if taken * 2 <= MOST_STATE_BYTES:
        return ""
    more = len(msgspec.json.encode((profile, demand.model.source))) + ITEM_BYTES
    if taken + more <= MOST_STATE_BYTES:
        return ""
    return (
        f"{node}: its plan is full, {taken} of {MOST_STATE_BYTES} bytes are taken "
        f"and this start needs {more}"
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


def unsuited(scene: Scene, model: Model, profile: Profile, room: Room) -> str:
    """Why this profile of the model never runs on this card, whatever is on it; empty when it may."""
    if room.mig:
        return "is divided (MIG) and left alone"
    if not suits(profile, room.node, room.card, room.kind):
        return f"profile {profile.name} wants {' or '.join(profile.card)}"
    node = scene.world.nodes[room.node]
    if profile.engine == "command" and not node.allow_commands:
        return f"{room.node} does not allow commands (allow_commands)"
    if node.engines and profile.engine != "command":
        engine = next((one for one in node.engines if one.name == profile.engine), None)
        if engine is None:
            return f"{room.node} has no engine {profile.engine}"
        if model.max_loaded_adapters > 0 and not engine.adapters:
            # It would come up, and every request for an adapter be lost on it.
            return (
                f"the {profile.engine} of {room.node} loads no adapters, "
                f"and max_loaded_adapters is {model.max_loaded_adapters}"
            )
    if profile.parking is not None and profile.parking.way == "command" and not node.allow_commands:
        return f"{room.node} does not allow commands (allow_commands), and parking runs some"
    return ""
