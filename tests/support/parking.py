"""Plays a yard in memory whose agents park: a `Yard` with claims on cards, parked copies and rooms to be made.

As the real agents would: a replica whose card is claimed is drained by its node, parked where it can be, and
not resumed while the claim stands. It decides nothing the leader decides.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from schemas.card import (
    Card,
    CardClaimed,
    CardClaimEnded,
    CardLeased,
    CardParked,
    CardReleased,
    Claim,
    Lease,
)
from schemas.model import EngineName, Model, ParkWay
from schemas.node import EngineInfo, NodeChanged
from schemas.plan import PlanItem
from schemas.replica import (
    Replica,
    ReplicaDraining,
    ReplicaFailed,
    ReplicaParked,
    ReplicaReady,
    ReplicaStarting,
    ReplicaWaiting,
    ReplicaWithdrawn,
)
from tests.support.worlds import Yard, model, profile


@dataclass
class ParkingYard(Yard):
    """`parks` are the models whose engines can be parked, None: all. `own` are the decisions under which nodes
    end replicas by themselves. `rooms` are the holders that starts of a model wait for. `lost_resumes` counts the
    next resumes of a model that fail."""

    parks: set[str] | None = None
    park_s: float = 1.5
    resume_s: float = 1.0
    residual_bytes: int = 0
    own: dict[str, str] = field(default_factory=dict)
    rooms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost_resumes: dict[str, int] = field(default_factory=dict)

    def can_park(self, node: str, *ways: ParkWay, engine: EngineName = "vllm") -> None:
        """The node has the engines `vllm` and `llamacpp`, one of which can be parked in these ways."""
        state = self.world.nodes[node]
        engines = tuple(
            EngineInfo(
                name=name,
                version="1",
                card_kinds=("cpu", "gpu"),
                park_ways=ways if name == engine else (),
            )
            for name in ("llamacpp", "vllm")
        )
        self.append(
            "node", (node,), NodeChanged(fields=("engines",)), replace(state, engines=engines)
        )

    def add(self, *entries: Model) -> "ParkingYard":
        super().add(*entries)
        return self

    # -- claims

    def claim(self, node: str = "n1", card: str = "gpu0", name: str = "game") -> None:
        """The card is kept for a game: what is there drains at once by its node's own decision."""
        state = self.world.cards[(node, card)]
        id_ = f"c-{node}-{card}"
        claim = Claim(id=id_, name=name, kind="game", since=self.now)
        self._card(
            replace(state, rev=state.rev + 1, claims=(*state.claims, claim)),
            CardClaimed(claim=id_, name=name),
        )
        for replica in list(self.world.replicas.values()):
            if replica.node != node or card not in replica.cards:
                continue
            if replica.phase in ("starting", "ready"):
                self.own[replica.id] = id_

    def end_claim(self, node: str = "n1", card: str = "gpu0") -> None:
        state = self.world.cards[(node, card)]
        self._card(
            replace(state, rev=state.rev + 1, claims=()), CardClaimEnded(claim=f"c-{node}-{card}")
        )
        for id_ in [r for r, cause in self.own.items() if cause == f"c-{node}-{card}"]:
            del self.own[id_]

    def is_kept(self, replica: Replica) -> bool:
        return any(self.world.cards[(replica.node, card)].claims for card in replica.cards)

    def lease(
        self,
        node: str = "n1",
        card: str = "gpu0",
        name: str = "training",
        *,
        pinned: bool = False,
        memory_bytes: int | None = None,
    ) -> str:
        """A person's lease of the whole card, or of so many bytes; its id."""
        state = self.world.cards[(node, card)]
        lease = Lease(
            holder=f"l-{name}",
            memory_bytes=state.memory_bytes if memory_bytes is None else memory_bytes,
            fence=state.rev + 1,
            since=self.now,
            kind="named",
            name=name,
            exclusive=memory_bytes is None,
            pinned=pinned,
        )
        self._card(
            replace(state, rev=state.rev + 1, leases=(*state.leases, lease)),
            CardLeased(
                holder=lease.holder, memory_bytes=lease.memory_bytes, fence=lease.fence, name=name
            ),
        )
        return lease.holder

    def end_lease(self, holder: str) -> None:
        for card in list(self.world.cards.values()):
            held = [lease for lease in card.leases if lease.holder == holder]
            if held:
                rest = tuple(lease for lease in card.leases if lease.holder != holder)
                self._card(
                    replace(card, rev=card.rev + 1, leases=rest),
                    CardReleased(holder=holder, memory_bytes=held[0].memory_bytes, why="drained"),
                )

    # -- agents

    def _act_on(self, node: str, item: PlanItem) -> None:
        replica = self.world.replicas.get(item.replica)
        if replica is None:
            waiting_for = self._who_leaves(node, item)
            if item.stop is None and waiting_for:
                fresh = replace(self._fresh(node, item, "waiting"), waiting_for=waiting_for)
                self._tell(fresh, ReplicaWaiting(waiting_for=", ".join(waiting_for)))
                return
            super()._act_on(node, item)
        elif replica.phase == "waiting":
            self._wait(replica, item)
        elif replica.phase == "parked":
            self._parked(replica, item)
        elif replica.phase == "starting" and replica.was_ready and item.stop is None:
            self._resume(replica)
        elif replica.id in self.own and item.stop is None:
            self._leave(replica, self.own[replica.id])
        else:
            super()._act_on(node, item)

    def _who_leaves(self, node: str, item: PlanItem) -> tuple[str, ...]:
        """Holders that its node asks to leave for a start: those the plan names, and `rooms`."""
        here = {
            lease.holder for card in item.cards for lease in self.world.cards[(node, card)].leases
        }
        named = tuple(holder for holder in item.evict if holder in here)
        return (*named, *self.rooms.get(item.launch.model, ()))

    def _wait(self, replica: Replica, item: PlanItem) -> None:
        if item.stop is not None:
            self._tell(replace(replica, phase="withdrawn"), ReplicaWithdrawn())
        elif self._who_leaves(replica.node, item):
            for holder in item.evict:
                self.end_lease(holder)
        else:
            self._lease(replica)
            starting = replace(replica, phase="starting", started_at=self.now, waiting_for=())
            self._tell(starting, ReplicaStarting(port=20000))

    def _leave(self, replica: Replica, decision: str) -> None:
        """Its own node ends it: no stop of the plan asks for that."""
        if replica.phase == "ready":
            draining = replace(replica, phase="draining", stop_decision=decision)
            self._tell(draining, ReplicaDraining(decision=decision))
        elif replica.phase == "starting":
            self._stop(replica)
        elif not any(s.replica == replica.id for s in self.streams):
            self._put_away(replica)

    def _drain(self, replica: Replica, item: PlanItem) -> None:
        stop = item.stop
        is_busy = any(s.replica == replica.id for s in self.streams)
        may_park = self.parks is None or replica.model in self.parks
        if stop is None or stop.park == "never" or is_busy or not may_park:
            super()._drain(replica, item)
        else:
            self._put_away(replica)

    def _put_away(self, replica: Replica) -> None:
        if self.parks is not None and replica.model not in self.parks:
            self._stop(replica)
            return
        self._tell(
            replace(
                replica,
                phase="parked",
                park_way="sleep",
                parked_at=self.now,
                park_s=self.park_s,
                ram_bytes=replica.memory_bytes,
                residual_bytes=self.residual_bytes,
                card_revs={},
            ),
            ReplicaParked(way="sleep", ram_bytes=replica.memory_bytes),
        )
        for name in replica.cards:
            card = self.world.cards[(replica.node, name)]
            leases = tuple(
                replace(lease, kind="parked", memory_bytes=self.residual_bytes)
                if lease.holder == replica.id
                else lease
                for lease in card.leases
            )
            self._card(
                replace(card, rev=card.rev + 1, leases=leases),
                CardParked(holder=replica.id, memory_bytes=self.residual_bytes),
            )

    def _parked(self, replica: Replica, item: PlanItem) -> None:
        if item.stop is not None:
            self.own.pop(replica.id, None)
            if item.stop.park == "never":
                self._stop(replica)
            return
        if replica.id in self.own:
            return
        cards = [self.world.cards[(replica.node, name)] for name in replica.cards]
        revs = {card.id: card.rev for card in cards}
        if replica.card_revs == revs:
            return
        if self.is_kept(replica) or not all(self._has_room(card, replica) for card in cards):
            self._tell(
                replace(replica, card_revs=revs, reason="no room on the card"),
                ReplicaParked(way="sleep", refused=True),
            )
            return
        for card in cards:
            leases = tuple(
                replace(lease, kind="replica", memory_bytes=replica.memory_bytes)
                if lease.holder == replica.id
                else lease
                for lease in card.leases
            )
            self._card(
                replace(card, rev=card.rev + 1, leases=leases),
                CardLeased(
                    holder=replica.id, memory_bytes=replica.memory_bytes, fence=card.rev + 1
                ),
            )
        starting = replace(replica, phase="starting", card_revs={}, reason="")
        self._tell(starting, ReplicaStarting(port=20000, resumed=True))

    def _has_room(self, card: Card, replica: Replica) -> bool:
        others = sum(lease.memory_bytes for lease in card.leases if lease.holder != replica.id)
        return others + replica.memory_bytes <= card.memory_bytes

    def _resume(self, replica: Replica) -> None:
        if (self.now - replica.since).total_seconds() < self.resume_s:
            return
        if self.lost_resumes.get(replica.model, 0) > 0:
            self.lost_resumes[replica.model] -= 1
            self.fail(replica.id, code="resume_failed", last_line="the resume did not answer")
            return
        self._tell(
            replace(
                replica,
                phase="ready",
                ready_at=self.now,
                resume_s=(self.now - replica.since).total_seconds(),
                stop_decision=None,
                park_way="",
                ram_bytes=0,
                residual_bytes=0,
            ),
            ReplicaReady(resume_s=self.resume_s),
        )

    def lose(self, id_: str) -> None:
        """The process of a parked replica is gone."""
        replica = self.world.replicas[id_]
        self._tell(
            replace(replica, phase="failed", code="parked_lost", endpoint=None),
            ReplicaFailed(code="parked_lost"),
        )
        self._release(replica)

    def evict(self, id_: str) -> None:
        """RAM is short: the node ends a parked copy, whatever the plan says."""
        self._stop(replace(self.world.replicas[id_], reason="its RAM was needed"))

    def _lease(self, replica: Replica) -> None:
        for name in replica.cards:
            card = self.world.cards[(replica.node, name)]
            lease = Lease(
                holder=replica.id,
                memory_bytes=replica.memory_bytes,
                fence=card.rev + 1,
                since=self.now,
            )
            self._card(
                replace(card, rev=card.rev + 1, leases=(*card.leases, lease)),
                CardLeased(
                    holder=replica.id, memory_bytes=replica.memory_bytes, fence=card.rev + 1
                ),
            )


def parking_yard(**cards: float) -> ParkingYard:
    """A yard of one node n1 with these cards (default gpu0 of 8 GiB) whose engines can be parked, joined."""
    made = ParkingYard()
    made.node("n1", cards or None)
    made.can_park("n1", "sleep")
    made.settle()
    return made


def parkable(name: str = "a", gib: float = 1, **fields: object) -> Model:
    """A model whose engine has a sleep of its own."""
    return model(name, profiles=[profile(gib=gib, engine="vllm")], **fields)  # type: ignore[arg-type]
