"""Plays the agents of a yard in memory and their engines: they start, load, drain and stop what their plans say.

As the real ones would, on the clock of the yard; they decide nothing the leader decides.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from schemas.card import Card, CardLeased, CardMeasured, CardReleased, Lease
from schemas.messages import Event
from schemas.node import NodeStopped
from schemas.plan import PlanItem
from schemas.replica import (
    TERMINAL_PHASES,
    Replica,
    ReplicaDraining,
    ReplicaFailed,
    ReplicaFetching,
    ReplicaReady,
    ReplicaRefused,
    ReplicaStarting,
    ReplicaStopped,
    ReplicaWithdrawn,
)
from tests.support.world_log import LoggedYard


@dataclass
class ActingYard(LoggedYard):
    """A yard whose agents act when they are told to."""

    def act(self) -> bool:
        """Every agent does what is to be done now, once per item; True when something was."""
        before = self._seq
        for node in sorted(self.world.nodes):
            if node in self.silent_since or not self.world.nodes[node].running:
                continue
            plan = self.world.plans.get(node)
            items = plan.items if plan is not None else ()
            for item in items:
                self._act_on(node, item)
            known = {item.replica for item in items}
            for replica in list(self.world.replicas.values()):
                gone = replica.node == node and replica.id not in known
                if gone and replica.phase not in TERMINAL_PHASES:
                    self._stop(replica)
        return self._seq != before

    def _act_on(self, node: str, item: PlanItem) -> None:
        replica = self.world.replicas.get(item.replica)
        if replica is None:
            if item.stop is not None:
                self._tell(self._fresh(node, item, "withdrawn"), ReplicaWithdrawn())
            else:
                self._start(node, item)
            return
        if replica.phase in TERMINAL_PHASES:
            return
        if item.stop is not None:
            if replica.phase == "fetching":
                self._tell(replace(replica, phase="withdrawn"), ReplicaWithdrawn())
                self._release(replica)
            elif item.stop.force or replica.phase == "starting":
                self._stop(replica)
            elif replica.phase == "ready" and replica.taken_back != item.stop.decision:
                self._tell(
                    replace(replica, phase="draining", stop_decision=item.stop.decision),
                    ReplicaDraining(decision=item.stop.decision),
                )
            elif replica.phase == "draining":
                self._drain(replica, item)
            return
        if replica.phase == "draining":
            self._tell(replace(replica, phase="ready", stop_decision=None), ReplicaReady())
        elif replica.phase == "fetching":
            self._fetch(replica)
        elif replica.phase == "starting":
            self._load(replica)

    def _drain(self, replica: Replica, item: PlanItem) -> None:
        assert item.stop is not None
        if not any(s.replica == replica.id for s in self.streams):
            self._stop(replica)
        elif (self.now - replica.since).total_seconds() >= item.stop.drain_timeout_s:
            if item.stop.take_back:
                self._tell(
                    replace(
                        replica,
                        phase="ready",
                        stop_decision=None,
                        taken_back=item.stop.decision,
                    ),
                    ReplicaReady(taken_back=item.stop.decision),
                )
            else:
                self.streams = [s for s in self.streams if s.replica != replica.id]
                self._stop(replica)

    def _start(self, node: str, item: PlanItem) -> None:
        card = self.world.cards[(node, item.cards[0])]
        used = sum(lease.memory_bytes for lease in card.leases)
        if used + item.memory_bytes > card.memory_bytes or item.launch.model in self.refuses:
            fresh = self._fresh(node, item, "refused")
            self._tell(
                replace(fresh, card_revs={card.id: card.rev}, reason="no room on the card"),
                ReplicaRefused(card_revs={card.id: card.rev}),
            )
            return
        lease = Lease(
            holder=item.replica, memory_bytes=item.memory_bytes, fence=card.rev, since=self.now
        )
        self._card(
            replace(card, rev=card.rev + 1, leases=(*card.leases, lease)),
            CardLeased(holder=item.replica, memory_bytes=item.memory_bytes, fence=card.rev),
        )
        if self.engine(item.launch.model).fetch_s > 0:
            self._tell(
                self._fresh(node, item, "fetching"), ReplicaFetching(source=item.launch.source)
            )
            return
        fresh = replace(self._fresh(node, item, "starting"), started_at=self.now)
        self._tell(fresh, ReplicaStarting(port=20000))

    def _fetch(self, replica: Replica) -> None:
        if (self.now - replica.since).total_seconds() >= self.engine(replica.model).fetch_s:
            starting = replace(replica, phase="starting", started_at=self.now)
            self._tell(starting, ReplicaStarting(port=20000))

    def _load(self, replica: Replica) -> None:
        engine = self.engine(replica.model)
        assert replica.started_at is not None
        took = (self.now - replica.started_at).total_seconds()
        if took < engine.load_s:
            return
        if engine.fails > 0:
            engine.fails -= 1
            self.fail(replica.id, code=engine.fail_code, last_line=engine.last_line)
            return
        self._tell(
            replace(
                replica,
                phase="ready",
                ready_at=self.now,
                was_ready=True,
                load_s=took,
                endpoint="http://127.0.0.1:20000",
                measured_memory_bytes=engine.measured_bytes,
            ),
            ReplicaReady(load_s=took),
        )

    def _fresh(self, node: str, item: PlanItem, phase: str) -> Replica:
        kind = self.world.cards[(node, item.cards[0])].kind
        return Replica(
            id=item.replica,
            node=node,
            model=item.launch.model,
            incarnation=item.launch.incarnation,
            profile=item.launch.profile,
            revision=item.launch.revision,
            engine=item.launch.engine,
            phase=phase,  # type: ignore[arg-type]
            since=self.now,
            epoch=1,
            cards=item.cards,
            card_kind=kind,
            memory_bytes=item.memory_bytes,
        )

    def _tell(self, replica: Replica, event: Event) -> None:
        self.append("replica", (replica.node, replica.id), event, replace(replica, since=self.now))

    def _card(self, card: Card, event: Event) -> None:
        self.append("card", (card.node, card.id), event, card)

    def _stop(self, replica: Replica) -> None:
        self._tell(replace(replica, phase="stopped", endpoint=None), ReplicaStopped())
        self._release(replica)

    def fail(self, id_: str, code: str = "exited", last_line: str = "error: out of luck") -> None:
        """The engine ends by itself; its memory comes back."""
        replica = self.world.replicas[id_]
        self.streams = [s for s in self.streams if s.replica != id_]
        self._tell(
            replace(replica, phase="failed", code=code, last_line=last_line, endpoint=None),
            ReplicaFailed(code=code),
        )
        self._release(replica)

    def _release(self, replica: Replica) -> None:
        for name in replica.cards:
            card = self.world.cards[(replica.node, name)]
            held = [lease for lease in card.leases if lease.holder == replica.id]
            if held:
                rest = tuple(lease for lease in card.leases if lease.holder != replica.id)
                self._card(
                    replace(card, rev=card.rev + 1, leases=rest),
                    CardReleased(holder=replica.id, memory_bytes=held[0].memory_bytes),
                )

    def accept_again(self, *names: str) -> None:
        """What the agents refused for is over: each of their cards changes with it."""
        self.refuses -= set(names)
        for card in list(self.world.cards.values()):
            self._card(replace(card, rev=card.rev + 1), CardMeasured(used_bytes=0))

    def stop_agent(self, node: str) -> None:
        state = self.world.nodes[node]
        self.append("node", (node,), NodeStopped(), replace(state, running=False))
