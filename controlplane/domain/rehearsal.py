"""Says where one replica of a model would fit if its cards were empty, and why not elsewhere.

The model need not be in the catalog. Nothing is placed and nobody is drained: placement.py judges again when
it comes to that.
"""

from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import memory
from controlplane.domain.judging import is_heard, node_problem, unsuited
from controlplane.domain.rooms import Room
from controlplane.domain.scene import Scene
from schemas.model import Model, Profile
from schemas.placement import Candidate
from schemas.record import Record


class Rehearsal(Struct, frozen=True, kw_only=True):
    """`fits` are ranked as placement would now (2 free, 3 beside others, 4 when others have left, 5 kept), best
    first; `misses` have no rank. `unknown` says why nothing could be judged at all.
    """

    fits: tuple[Candidate, ...] = ()
    misses: tuple[Candidate, ...] = ()
    unknown: str = ""
    no_node: str = ""
    """Why there is no node to ask, empty when there is one."""

    @property
    def sentence(self) -> str:
        """The places, or the reasons against every one of them."""
        if self.no_node or self.unknown:
            return self.no_node or self.unknown
        if self.fits:
            best = self.fits[0]
            return f"fits {best.node}/{'+'.join(best.cards)} ({best.reason})"
        reasons = dict.fromkeys(candidate.reason for candidate in self.misses)
        return "; ".join(reasons) if reasons else "there is no card"


def rehearse(scene: Scene, model: Model) -> Rehearsal:
    """Cases: 1 placement is frozen; 2 no node is there to ask; 3 every card of every node, by profile."""
    world = scene.world
    if scene.frozen:  # 1
        return Rehearsal(unknown=scene.frozen)
    if not world.nodes:  # 2
        return Rehearsal(no_node="no node has joined this yard")
    if not any(is_heard(scene, node) for node in world.nodes):
        return Rehearsal(no_node="no node is reachable")
    known = world.records.get(model.name)
    fits: list[tuple[tuple[object, ...], Candidate]] = []
    misses: list[tuple[tuple[object, ...], Candidate]] = []
    for place, profile in enumerate(model.profiles):  # 3
        for node in sorted(world.nodes):
            rooms = [r for w in scene.index.cards_at(node) if (r := scene.index.room(world, w))]
            parts = [(room, _judge(scene, model, profile, room, known)) for room in rooms]
            for order, found in enumerate(_sets(profile, node, parts)):
                if found.rank is None:
                    misses.append(((node, order, -profile.priority, place), found))
                else:
                    key = (found.rank, -profile.priority, node, order, place)
                    fits.append((key, found))
    return Rehearsal(
        fits=tuple(c for _, c in sorted(fits, key=lambda pair: pair[0])),
        misses=tuple(c for _, c in sorted(misses, key=lambda pair: pair[0])),
    )


def _sets(profile: Profile, node: str, parts: list[tuple[Room, Candidate]]) -> list[Candidate]:
    """Each card by itself, or the best of a node's cards together, ranked as the worst of them."""
    if profile.cards == 1:
        return [found for _, found in parts]
    ranked = sorted(
        ((room, found) for room, found in parts if found.rank is not None),
        key=lambda pair: (pair[1].rank, pair[0].key),
    )
    chosen = ranked[: profile.cards]
    if len(chosen) < profile.cards:
        why = next((found.reason for _, found in parts if found.rank is None), "")
        reason = (
            f"{node}: needs {profile.cards} cards at once, {len(chosen)} of {len(parts)} would do"
        )
        return [
            Candidate(
                profile=profile.name,
                node=node,
                cards=(),
                reason=f"{reason} ({why})" if why else reason,
            )
        ]
    worst = chosen[-1][1]
    cards = tuple(room.card for room, _ in chosen)
    return [replace(worst, cards=cards)]


def _judge(
    scene: Scene, model: Model, profile: Profile, room: Room, known: Record | None
) -> Candidate:
    needed = memory.needed_bytes(profile, room.kind, known)

    def one(rank: int | None, reason: str) -> Candidate:
        return Candidate(
            profile=profile.name, node=room.node, cards=(room.card,), rank=rank, reason=reason
        )

    problem = node_problem(scene, room.node)
    if problem:
        return one(None, f"{room.node}: {problem}")
    where = f"{room.node}/{room.card}"
    why = unsuited(scene, model, profile, room)
    if why:
        return one(None, f"{where}: {why}")
    numbers = f"needs {memory.amount(needed)}"
    if needed > room.total_bytes:
        return one(None, f"{where}: {numbers}, has {memory.amount(room.total_bytes)}")
    if room.kept:
        return one(5, f"{numbers}, kept by {room.kept}")
    free = f"{memory.amount(max(room.free_bytes, 0))} free"
    if needed <= room.free_bytes:
        if room.is_free:
            return one(2, f"{numbers}, it is free")
        if not room.exclusive and not profile.exclusive:
            return one(3, f"{numbers}, {free}")
    return one(4, f"{numbers}, {free}: others must leave first")
