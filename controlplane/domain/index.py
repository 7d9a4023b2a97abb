"""Keeps what is derived from a world between two steps: who runs where, and which models to look at again.

Everything in it can be rebuilt from the world; it decides nothing. A step without one builds its own, so
forgetting it costs time and never changes a decision.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from controlplane.domain.needs import Needs
from controlplane.domain.planned import Planned
from controlplane.domain.revision import profile_revision
from controlplane.domain.rooms import CardKey, Room, RoomBook, make_room
from controlplane.domain.world import World
from schemas.cardnames import ANY_SCOPE, is_named
from schemas.model import Profile
from schemas.plan import Plan
from schemas.replica import Replica

ITEM_BYTES: Final = 1536
"""What an item takes in a plan beside its profile and source, with the longest stop it may get."""

_LONG_PLAN: Final = 16
"""Items a plan has before it can be full: none is larger than an entry may be."""

_CHANGES_JUDGED: Final = 256
"""After more changes than this, judging afresh is no dearer than looking at each of them."""

_CHANGES_KEPT: Final = 4096
"""Changed cards remembered; a verdict older than that is judged afresh."""


class Alarms:
    """For each name the one time at which to look at it; setting it again replaces it."""

    def __init__(self) -> None:
        self._at: dict[str, datetime] = {}
        self._heap: list[tuple[datetime, str]] = []

    def set(self, name: str, at: datetime | None) -> None:
        if at is None:
            self._at.pop(name, None)
        elif (known := self._at.get(name)) is not at and known != at:
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
    `heard` are the nodes that count as reachable, `away` all others that are known.
    `waits` are placement's verdicts, each with the place in `changes` it was judged at: which cards changed
    since says whether it holds. `drains` is placement's order of victims, `crowds` are its cards by their sort. `held` are models a load
    holds, `long_plans` nodes whose plan may be full. `rests` are
    models found at rest, `demands` what models without replicas are short of, each with what it was judged by.
    `blocked` are models whose decisions could not be written when they were last looked at, `unserved`
    those of them somebody asked for in vain. `jobs`, `files`, `adapters` and `keys` are those to look at again, `job_wake`,
    `file_wake` and `key_wake` say when time alone may change something for them, `last_keys` stay only until there are others; `needs` is who needs which file.
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
        self.heard: set[str] = set()
        self.away: set[str] = set()
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
        self.waits: dict[tuple[str, str], object] = {}
        self.changes: list[CardKey] = []
        self.changes_from = 0
        self.drains: object = None
        self.crowds: object = None
        self.held: set[str] = set()
        self.long_plans: set[str] = set()
        self._recent: tuple[tuple[int, int], Sequence[Room] | None] | None = None
        self.demands: dict[str, tuple[Any, ...]] = {}
        self.rests: dict[str, tuple[Any, ...]] = {}
        self.needs = Needs()
        self.jobs: set[str] = set()
        self.files: set[str] = set()
        self.adapters: set[str] = set()
        self.keys: set[str] = set()
        self.last_keys: set[str] = set()
        self.job_wake = Alarms()
        self.file_wake = Alarms()
        self.key_wake = Alarms()
        self.mirror: str | None = None
        self.audit_behind = False
        self.frozen = ""
        self._jobs_of_model: dict[str, set[str]] = {}
        self._adapters_of: dict[str, set[str]] = {}
        self._base_of: dict[str, str] = {}
        self._model_of_job: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}
        self._model_of: dict[str, str] = {}
        self._cards_of: dict[str, tuple[CardKey, ...]] = {}
        self._replicas_on: dict[CardKey, set[str]] = {}
        self._book = RoomBook()
        self._places: dict[CardKey, int] = {}
        self._cards_at: dict[str, tuple[CardKey, ...]] = {}
        self._stale: set[CardKey] = set()
        self._matching: dict[tuple[str, ...], tuple[CardKey, ...]] = {}
        self._sets: dict[frozenset[CardKey], frozenset[CardKey]] = {}
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
        for node in world.nodes.keys() | world.nodestates.keys():
            self._node(world, node)
        self.dirty.update(world.models, world.records, self.scopes_of, self.items_of)
        for name in world.models:
            self.needs.model(world, name)
        for id_ in world.jobs:
            self._job(world, id_)
        for name in world.adapters:
            self._adapter(world, name)
        self.files.update(world.files)
        self.keys.update(world.keys)
        self.version += 1

    def settle(self, name: str, idle_at: datetime | None) -> None:
        """Nothing is to be done for a model, until it may be idle."""
        self.dirty.discard(name)
        for names in (self.blocked, self.unserved, self.short):
            if names:
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
            case "adapter":
                self._adapter(world, key[0])
                return
            case "key":
                # With another one there, the last of those that are over may go.
                self.keys |= {key[0], *self.last_keys}
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
        for kind, name in self.needs.by_key.get(key, ()):
            if kind == "job":
                self.jobs.add(name)
            elif kind == "adapter":
                self.adapters.add(name)

    def _adapter(self, world: World, name: str) -> None:
        """An adapter changed: it and the files it needs or needed are to be looked at."""
        self.files |= self.needs.adapter(world, name)
        self.adapters.add(name)
        before = self._base_of.pop(name, None)
        if before is not None:
            self._adapters_of[before].discard(name)
        adapter = world.adapters.get(name)
        if adapter is not None:
            self._base_of[name] = adapter.base
            self._adapters_of.setdefault(adapter.base, set()).add(name)

    def look_at_all(self, world: World) -> None:
        """Another mirror is this leader's own, or what is over may end again: all has to be told anew."""
        self.jobs.update(world.jobs)
        self.files.update(world.files)
        self.adapters.update(world.unread_adapters)
        self.keys.update(world.keys)

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
                self.adapters.update(self._adapters_of.get(key[0], ()))
                self.wake_jobs(key[0])
                for cached in [k for k in self._revisions if k[0] == key[0]]:
                    del self._revisions[cached]
                self._forget_rooms_of(key[0])
                self._forget_waits(key[0])
            case "activation":
                self._activation(world, key[0], key[1])
                self.dirty.add(key[0])
                # Whether those waiting for the model have their answer decides who may be drained.
                for planned in self.items_of.get(key[0], {}).values():
                    self._changed((planned.node, card) for card in planned.item.cards)
            case "record":
                self.dirty.add(key[0])
                self._forget_waits(key[0])
                self.wake_jobs(key[0])
            case "plan":
                self._plan(key[0], world.plans.get(key[0]))
            case "replica":
                before = self._model_of.get(key[1])
                self._replica(key[1], world.replicas.get(key[1]))
                name = self._model_of.get(key[1], before or "")
                self._forget_waits(name)
                self.wake_jobs(name)
            case "card":
                self._forget_room((key[0], key[1]))
            case "node" | "nodestate":
                self._node(world, key[0])
                # Where a model fits depends on which nodes there are.
                self.jobs |= world.running_jobs
                self.waits.clear()
            case _:
                return
        self.version += 1

    def _activation(self, world: World, model: str, scope: str) -> None:
        scopes = self.scopes_of.setdefault(model, set())
        if (model, scope) in world.activations:
            scopes.add(scope)
        else:
            scopes.discard(scope)
        here = [world.activations[(model, s)] for s in scopes]
        is_held = any(a.hold_until is not None for a in here)
        (self.held.add if is_held else self.held.discard)(model)
        if any(a.phase == "ready" and not a.answered for a in here):
            self.unanswered.add(model)
        else:
            self.unanswered.discard(model)

    def _node(self, world: World, node: str) -> None:
        state = world.nodes.get(node)
        standing = world.nodestates.get(node)
        is_heard = standing is not None and standing.reach == "reachable"
        (self.heard.add if is_heard else self.heard.discard)(node)
        is_away = not is_heard and (state is not None or standing is not None)
        (self.away.add if is_away else self.away.discard)(node)
        before = self._cards_at.pop(node, ())
        after = tuple((node, info.id) for info in state.cards) if state is not None else ()
        for card in before:
            del self._places[card]
        self._places.update({card: order for order, card in enumerate(after)})
        if after:
            self._cards_at[node] = after
        if before != after:
            self._matching = {}
        for card in dict.fromkeys((*before, *after)):
            self._forget_room(card)
        for item in self._plans.get(node, _NO_PLAN).items:
            self.dirty.add(item.launch.model)

    def _plan(self, node: str, plan: Plan | None) -> None:
        self._plan_bytes.pop(node, None)
        if len(self._plans.get(node, _NO_PLAN).items) > _LONG_PLAN:
            # It may have been full for all of the node's cards, and is not any more.
            self._changed(self.cards_at(node))
        before = {item.replica: item for item in self._plans.get(node, _NO_PLAN).items}
        after = {item.replica: item for item in plan.items} if plan is not None else {}
        for replica, item in before.items():
            if after.get(replica) is not item:
                planned = self.items.pop(replica)
                self.items_of[item.launch.model].pop(replica, None)
                for card in item.cards:
                    self.on_card[(node, card)].pop(replica, None)
                self._forget_rooms(planned)
                # How many there are decides which of the others are more than `min`.
                self._forget_rooms_of(item.launch.model)
                self._forget_waits(item.launch.model)
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
            self._forget_rooms_of(item.launch.model)
            self._forget_waits(item.launch.model)
            self.dirty.add(item.launch.model)
            self.wake_jobs(item.launch.model)
        is_long = plan is not None and len(plan.items) > _LONG_PLAN
        (self.long_plans.add if is_long else self.long_plans.discard)(node)
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
        """When the card was last given: to a replica still known, by an item still planned, to a lease."""
        times = [planned.item.decided_at for planned in self.on_card.get(card, {}).values()]
        for id_ in self._replicas_on.get(card, ()):
            started_at = world.replicas[id_].started_at
            if started_at is not None:
                times.append(started_at)
        state = world.cards.get(card)
        times.extend(x.since for x in state.leases if x.kind == "named") if state else None
        return max(times, default=None)

    def _changed(self, cards: Iterable[CardKey]) -> None:
        self.changes.extend(cards)
        if len(self.changes) > 2 * _CHANGES_KEPT:
            del self.changes[:_CHANGES_KEPT]
            self.changes_from += _CHANGES_KEPT

    @property
    def change(self) -> int:
        """The number of the next change of a card."""
        return self.changes_from + len(self.changes)

    def rooms_since(self, world: World, change: int) -> Sequence[Room] | None:
        """The rooms of cards that changed from that number on; None when that is forgotten, were many, or one
        is gone. Many who wait ask for the same, one after another."""
        key = (change, self.change)
        if self._recent is not None and self._recent[0] == key:
            return self._recent[1]
        changed = self.changed_since(change)
        rooms: Sequence[Room] | None = None
        if changed is not None and len(changed) <= _CHANGES_JUDGED:
            known = self.book(world).rooms
            found = [known.get(where) for where in dict.fromkeys(changed)]
            rooms = [room for room in found if room is not None]
            rooms = rooms if len(rooms) == len(found) else None
        self._recent = (key, rooms)
        return rooms

    def changed_since(self, change: int) -> Sequence[CardKey] | None:
        """Cards that changed from that number on, some more than once; None when that is forgotten."""
        if change < self.changes_from:
            return None
        return self.changes[change - self.changes_from :]

    def _forget_waits(self, model: str) -> None:
        for scope in (ANY_SCOPE, *self.scopes_of.get(model, ())):
            self.waits.pop((model, scope), None)

    def _forget_room(self, card: CardKey) -> None:
        self._stale.add(card)
        self._changed((card,))

    def _forget_rooms(self, planned: Planned) -> None:
        for card in planned.item.cards:
            self._forget_room((planned.node, card))

    def _forget_rooms_of(self, model: str) -> None:
        for planned in self.items_of.get(model, {}).values():
            self._forget_rooms(planned)

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

    def book(self, world: World) -> RoomBook:
        """Every card there is, as it is now."""
        if self._stale:
            stale = sorted(self._stale)
            self._stale.clear()
            fresh = [self._made(world, card) for card in stale if card in self._places]
            for room in fresh:
                before = self._book.rooms.get(room.where)
                if before is None or before.total_bytes != room.total_bytes:
                    # Which cards are too small for a model is what its refusals tell.
                    self.waits.clear()
            self._book.put(fresh, [card for card in stale if card not in self._places])
        return self._book

    def _made(self, world: World, card: CardKey) -> Room:
        order = self._places[card]
        return make_room(
            world,
            card[0],
            order,
            world.nodes[card[0]].cards[order],
            self.on_card.get(card, {}),
            self._given_at(world, card),
            self,
        )

    def count_of(self, model: str) -> int:
        """How many plan items a model has."""
        return len(self.items_of.get(model, ()))

    def room(self, world: World, card: CardKey) -> Room | None:
        """What a card has, None when no node has such a card."""
        return self.book(world).rooms.get(card)

    def cards_at(self, node: str) -> tuple[CardKey, ...]:
        """The cards of a node in the order of its configuration."""
        return self._cards_at.get(node, ())

    def matching(self, patterns: tuple[str, ...]) -> tuple[CardKey, ...]:
        """The cards that one of these patterns of `node/card` names, in order; kinds among them name none."""
        known = self._matching.get(patterns)
        if known is None:
            known = tuple(
                card
                for card in sorted(self._places)
                if any(is_named(wish, *card) for wish in patterns)
            )
            self._matching[patterns] = known
        return known

    def one_of(self, cards: frozenset[CardKey]) -> frozenset[CardKey]:
        """The same set as one object for all who name it: many wait for the same cards."""
        if len(self._sets) > 256:
            self._sets.clear()
        return self._sets.setdefault(cards, cards)
