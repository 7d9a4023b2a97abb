"""Keeps what is derived from a world between two steps: who runs where, and which models to look at again.

Everything in it can be rebuilt from the world; it decides nothing. A step without one builds its own, so
forgetting it costs time and never changes a decision.
"""

from bisect import bisect_left, insort
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Final

import msgspec
from msgspec import Struct

from controlplane.domain.needs import Needs
from controlplane.domain.revision import profile_revision
from controlplane.domain.world import World
from schemas.model import Profile
from schemas.plan import Plan, PlanItem
from schemas.replica import TERMINAL_PHASES, Replica

CardKey = tuple[str, str]
RoomKey = tuple[int, datetime, str, str]

LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
"""Before anything a card can remember."""

ITEM_BYTES: Final = 1536
"""What an item takes in a plan beside its profile and source, with the longest stop it may get."""


class Planned(Struct, frozen=True, kw_only=True):
    """A plan item and the node whose plan it is in."""

    node: str
    item: PlanItem


class Holder(Struct, frozen=True, kw_only=True):
    """Who holds memory of a card. `planned` None: only the card's own lease tells of it."""

    replica: str
    memory_bytes: int
    planned: Planned | None = None
    stopping: bool = False


class Room(Struct, frozen=True, kw_only=True):
    """What one card has. `order` is its place in the node's configuration, `rev` its revision.

    `given_at` is when it was last given to a replica, None when that is not known any more.
    """

    node: str
    card: str
    kind: str
    order: int
    total_bytes: int
    free_bytes: int
    rev: int
    holders: tuple[Holder, ...] = ()
    exclusive: bool = False
    given_at: datetime | None = None


class Alarms:
    """For each name the one time at which to look at it; setting it again replaces it."""

    def __init__(self) -> None:
        self._at: dict[str, datetime] = {}
        self._heap: list[tuple[datetime, str]] = []

    def set(self, name: str, at: datetime | None) -> None:
        if at is None:
            self._at.pop(name, None)
        elif self._at.get(name) != at:
            self._at[name] = at
            heappush(self._heap, (at, name))

    def take(self, now: datetime) -> list[str]:
        """The names whose time has come, the earliest first; they are forgotten here."""
        names: list[str] = []
        while (at := self.next()) is not None and at <= now:
            _, name = heappop(self._heap)
            del self._at[name]
            names.append(name)
        return names

    def next(self) -> datetime | None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None


_NO_PLAN: Final = Plan(node="")


class StepIndex:
    """One leader's derived tables; `sync` brings them up to the world's state.

    `dirty` are the models something happened to since a step found nothing to do for them; `wake` says
    when time alone may change that, `idle` when a model may have been idle for long enough. `short`
    are models in the queue for room, `unanswered` those whose first waiter has no answer yet.
    `waits` are placement's verdicts that hold as long as no card, plan, replica, entry or record changes.
    `blocked` are models whose decisions could not be written when they were last looked at, `unserved`
    those of them somebody asked for in vain. `jobs` and `files` are those to look at again, `job_wake` and
    `file_wake` say when time alone may change something for them; `needs` is who needs which file.
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._cursor = 0
        self._clear()

    def _clear(self) -> None:
        self.items: dict[str, Planned] = {}
        self.items_of: dict[str, dict[str, Planned]] = {}
        self.on_card: dict[CardKey, dict[str, Planned]] = {}
        self.replicas_of: dict[str, set[str]] = {}
        self.scopes_of: dict[str, set[str]] = {}
        self.dirty: set[str] = set()
        self.unanswered: set[str] = set()
        self.blocked: set[str] = set()
        self.unserved: set[str] = set()
        self.short: set[str] = set()
        self.wake = Alarms()
        self.idle = Alarms()
        self.version = 0
        self.queue_seen: tuple[int, str] | None = None
        self.queue_due: datetime | None = None
        self.waits: dict[tuple[str, str], tuple[object, object]] = {}
        self.needs = Needs()
        self.jobs: set[str] = set()
        self.files: set[str] = set()
        self.job_wake = Alarms()
        self.file_wake = Alarms()
        self.mirror: str | None = None
        self.audit_behind = False
        self.frozen = ""
        self._jobs_of_model: dict[str, set[str]] = {}
        self._model_of_job: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}
        self._model_of: dict[str, str] = {}
        self._cards_of: dict[str, tuple[CardKey, ...]] = {}
        self._replicas_on: dict[CardKey, set[str]] = {}
        self._rooms: dict[CardKey, Room] = {}
        self._stale: set[CardKey] = set()
        self._ranked: list[tuple[RoomKey, Room]] = []
        self._ranked_at: dict[CardKey, RoomKey] = {}
        self._cards_known: dict[str, set[CardKey]] = {}
        self._revisions: dict[tuple[str, str], str] = {}
        self._plan_bytes: dict[str, int] = {}

    def sync(self, world: World) -> None:
        if world is not self._world or self._cursor < world.touched_from:
            self._rebuild(world)
        else:
            for noun, key in world.touched[self._cursor - world.touched_from :]:
                self._touch(world, noun, key)
        self._cursor = world.touched_from + len(world.touched)

    def _rebuild(self, world: World) -> None:
        self._clear()
        self._world = world
        for replica in world.replicas.values():
            self._replica(replica.id, replica)
        for node, plan in world.plans.items():
            self._plan(node, plan)
        for model, scope in world.activations:
            self._activation(world, model, scope)
        for node in world.nodes:
            self._node(world, node)
        self.dirty.update(world.models, world.records, self.scopes_of, self.items_of)
        for name in world.models:
            self.needs.model(world, name)
        for id_ in world.jobs:
            self._job(world, id_)
        self.files.update(world.files)
        self.version += 1

    def settle(self, name: str, idle_at: datetime | None) -> None:
        """Nothing is to be done for a model, until it may be idle."""
        for names in (self.dirty, self.blocked, self.unserved, self.short):
            names.discard(name)
        self.idle.set(name, idle_at)
        self.wake.set(name, None)

    def _touch(self, world: World, noun: str, key: tuple[str, ...]) -> None:
        match noun:
            case "job":
                self._job(world, key[0])
                return
            case "file":
                self._file(world, key[0])
                return
            case _:
                self._touch_model(world, noun, key)

    def _job(self, world: World, id_: str) -> None:
        """A job changed: it and the files it needs or needed are to be looked at."""
        self.files |= self.needs.job(world, id_)
        self.jobs.add(id_)
        before = self._model_of_job.pop(id_, None)
        if before is not None:
            self._jobs_of_model[before].discard(id_)
        job = world.jobs.get(id_)
        if job is not None and job.state == "running" and job.model:
            self._model_of_job[id_] = job.model
            self._jobs_of_model.setdefault(job.model, set()).add(id_)

    def _file(self, world: World, key: str) -> None:
        self.files |= self.needs.file(world, key)
        self.jobs.update(name for kind, name in self.needs.by_key.get(key, ()) if kind == "job")

    def look_at_all(self, world: World) -> None:
        """Another mirror is this leader's own, or what is over may end again: all has to be told anew."""
        self.jobs.update(world.jobs)
        self.files.update(world.files)

    def wake_jobs(self, model: str) -> None:
        """Jobs that wait for this model are to be looked at."""
        waiting = self._jobs_of_model.get(model)
        if waiting:
            self.jobs |= waiting

    def _touch_model(self, world: World, noun: str, key: tuple[str, ...]) -> None:
        match noun:
            case "model":
                self.dirty.add(key[0])
                self.files |= self.needs.model(world, key[0])
                self.wake_jobs(key[0])
                for cached in [k for k in self._revisions if k[0] == key[0]]:
                    del self._revisions[cached]
                for planned in self.items_of.get(key[0], {}).values():
                    self._forget_rooms(planned)
            case "activation":
                self._activation(world, key[0], key[1])
                self.dirty.add(key[0])
            case "record":
                self.dirty.add(key[0])
                self.wake_jobs(key[0])
            case "plan":
                self._plan(key[0], world.plans.get(key[0]))
            case "replica":
                before = self._model_of.get(key[1])
                self._replica(key[1], world.replicas.get(key[1]))
                self.wake_jobs(self._model_of.get(key[1], before or ""))
            case "card":
                self._forget_room((key[0], key[1]))
            case "node" | "nodestate":
                self._node(world, key[0])
                # Where a model fits depends on which nodes there are.
                self.jobs |= world.running_jobs
            case _:
                return
        self.version += 1
        if noun != "activation" or self.items_of.get(key[0]):
            # The demand of a model without replicas protects nobody, so no verdict rests on it.
            self.waits.clear()

    def _activation(self, world: World, model: str, scope: str) -> None:
        scopes = self.scopes_of.setdefault(model, set())
        if (model, scope) in world.activations:
            scopes.add(scope)
        else:
            scopes.discard(scope)
        here = (world.activations[(model, s)] for s in scopes)
        if any(a.phase == "ready" and not a.answered for a in here):
            self.unanswered.add(model)
        else:
            self.unanswered.discard(model)

    def _node(self, world: World, node: str) -> None:
        for info in world.nodes[node].cards if node in world.nodes else ():
            self._forget_room((node, info.id))
        for card in self._cards_known.get(node, ()):
            self._forget_room(card)
        for item in self._plans.get(node, _NO_PLAN).items:
            self.dirty.add(item.launch.model)

    def _plan(self, node: str, plan: Plan | None) -> None:
        self._plan_bytes.pop(node, None)
        before = {item.replica: item for item in self._plans.get(node, _NO_PLAN).items}
        after = {item.replica: item for item in plan.items} if plan is not None else {}
        for replica, item in before.items():
            if after.get(replica) is not item:
                planned = self.items.pop(replica)
                self.items_of[item.launch.model].pop(replica, None)
                for card in item.cards:
                    self.on_card[(node, card)].pop(replica, None)
                self._forget_rooms(planned)
                self.dirty.add(item.launch.model)
                self.wake_jobs(item.launch.model)
        for replica, item in after.items():
            if before.get(replica) is item:
                continue
            planned = Planned(node=node, item=item)
            self.items[replica] = planned
            self.items_of.setdefault(item.launch.model, {})[replica] = planned
            for card in item.cards:
                self.on_card.setdefault((node, card), {})[replica] = planned
            self._forget_rooms(planned)
            self.dirty.add(item.launch.model)
            self.wake_jobs(item.launch.model)
        if plan is None:
            self._plans.pop(node, None)
        else:
            self._plans[node] = plan

    def _replica(self, id_: str, replica: Replica | None) -> None:
        if replica is None:
            model = self._model_of.pop(id_, None)
            if model is not None:
                self.replicas_of.get(model, set()).discard(id_)
                self.dirty.add(model)
            for card in self._cards_of.get(id_, ()):
                self._replicas_on[card].discard(id_)
        else:
            self._model_of[id_] = replica.model
            self.replicas_of.setdefault(replica.model, set()).add(id_)
            self._cards_of[id_] = tuple((replica.node, card) for card in replica.cards)
            self.dirty.add(replica.model)
            for card in self._cards_of[id_]:
                self._replicas_on.setdefault(card, set()).add(id_)
        for card in self._cards_of.get(id_, ()):
            self._forget_room(card)
        planned = self.items.get(id_)
        if planned is not None:
            self._forget_rooms(planned)
            self.dirty.add(planned.item.launch.model)

    def _given_at(self, world: World, card: CardKey) -> datetime | None:
        """When the card was last given: to a replica still known, or by an item still planned."""
        times = [planned.item.decided_at for planned in self.on_card.get(card, {}).values()]
        for id_ in self._replicas_on.get(card, ()):
            started_at = world.replicas[id_].started_at
            if started_at is not None:
                times.append(started_at)
        return max(times, default=None)

    def _forget_room(self, card: CardKey) -> None:
        self._rooms.pop(card, None)
        self._stale.add(card)

    def _forget_rooms(self, planned: Planned) -> None:
        for card in planned.item.cards:
            self._forget_room((planned.node, card))

    def revision(self, world: World, model: str, profile: Profile) -> str:
        """The revision a start of this profile would have now."""
        key = (model, profile.name)
        known = self._revisions.get(key)
        if known is None:
            known = profile_revision(world.models[model], profile)
            self._revisions[key] = known
        return known

    def plan_bytes(self, node: str) -> int:
        """At most what a node's plan takes in the log, every item of it being stopped."""
        known = self._plan_bytes.get(node)
        if known is None:
            plan = self._plans.get(node, _NO_PLAN)
            known = len(msgspec.json.encode(plan)) + ITEM_BYTES * len(plan.items)
            self._plan_bytes[node] = known
        return known

    def room(self, world: World, node: str, order: int) -> Room:
        """What the `order`-th card of a node's inventory has."""
        info = world.nodes[node].cards[order]
        key = (node, info.id)
        known = self._rooms.get(key)
        if known is not None and known.order == order:
            return known
        card = world.cards.get(key)
        total = card.memory_bytes if card is not None else info.memory_bytes
        holders = self._holders(world, key)
        known = Room(
            node=node,
            card=info.id,
            kind=info.kind,
            order=order,
            total_bytes=total,
            free_bytes=total - sum(holder.memory_bytes for holder in holders),
            rev=card.rev if card is not None else 0,
            holders=holders,
            exclusive=any(_is_exclusive(world, holder.planned) for holder in holders),
            given_at=self._given_at(world, key),
        )
        self._rooms[key] = known
        return known

    def rooms(self, world: World) -> list[tuple[RoomKey, Room]]:
        """Every card there is, in the order of ties: place in its node, least recently given, id."""
        if self._stale:
            if len(self._stale) > 64:
                self._ranked = [pair for pair in self._ranked if pair[1] is self._room_of(pair[1])]
                found = [self._ranked_room(world, card) for card in self._stale]
                self._ranked.extend(pair for pair in found if pair is not None)
                self._ranked.sort(key=_first)
            else:
                for card in self._stale:
                    before = self._ranked_at.get(card)
                    if before is not None:
                        del self._ranked[bisect_left(self._ranked, before, key=_first)]
                    pair = self._ranked_room(world, card)
                    if pair is not None:
                        insort(self._ranked, pair, key=_first)
            self._stale.clear()
        return self._ranked

    def _room_of(self, room: Room) -> Room | None:
        card = (room.node, room.card)
        return None if card in self._stale else self._rooms.get(card)

    def _ranked_room(self, world: World, card: CardKey) -> tuple[RoomKey, Room] | None:
        node = world.nodes.get(card[0])
        for order, info in enumerate(node.cards if node is not None else ()):
            if info.id == card[1]:
                room = self.room(world, card[0], order)
                key = (order, room.given_at or LONG_AGO, card[0], card[1])
                self._ranked_at[card] = key
                self._cards_known.setdefault(card[0], set()).add(card)
                return key, room
        self._ranked_at.pop(card, None)
        self._cards_known.get(card[0], set()).discard(card)
        return None

    def _holders(self, world: World, key: CardKey) -> tuple[Holder, ...]:
        """Each replica once, with the larger of its lease and its plan item.

        A lease without an item is a replica that ended and whose memory was not read back yet, an item
        without a lease one that was not answered yet: both count as use.
        """
        found: dict[str, Holder] = {}
        for replica_id, planned in self.on_card.get(key, {}).items():
            replica = world.replicas.get(replica_id)
            if replica is not None and replica.phase in TERMINAL_PHASES:
                continue
            used = replica.measured_memory_bytes if replica is not None else None
            found[replica_id] = Holder(
                replica=replica_id,
                memory_bytes=max(planned.item.memory_bytes, used or 0),
                planned=planned,
                # Survivors of a stop that failed hold the memory until somebody acts: they do not leave.
                stopping=planned.item.stop is not None
                and (replica is None or replica.phase != "stop_failed"),
            )
        card = world.cards.get(key)
        for lease in card.leases if card is not None else ():
            held = found.get(lease.holder)
            if held is None:
                # An ended or unplanned one: its agent is stopping it or reads its memory back.
                found[lease.holder] = Holder(
                    replica=lease.holder,
                    memory_bytes=lease.memory_bytes,
                    planned=None,
                    stopping=True,
                )
            elif lease.memory_bytes > held.memory_bytes:
                found[lease.holder] = Holder(
                    replica=held.replica,
                    memory_bytes=lease.memory_bytes,
                    planned=held.planned,
                    stopping=held.stopping,
                )
        return tuple(found[id_] for id_ in sorted(found))


def _first(pair: tuple[RoomKey, Room]) -> RoomKey:
    return pair[0]


def _is_exclusive(world: World, planned: Planned | None) -> bool:
    if planned is None:
        return False
    model = world.models.get(planned.item.launch.model)
    if model is None:
        return False
    return any(p.exclusive for p in model.profiles if p.name == planned.item.launch.profile)
