"""Has adapters in one engine: answers asks for them, loads, unloads, and compares with the engine's own list.

What becomes of an ask, who leaves and what a list means is decided in `domain/`; this carries it out and says it.
A load goes on without whoever asked for it. It never waits for an engine inside a decision.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.domain import evicting, listing, pins, slotasks, slots
from nodeagent.domain.adapterfiles import set_of
from nodeagent.domain.badloads import Bads, Fault
from nodeagent.domain.evicting import Evict, Facts
from nodeagent.domain.outranked import outranked
from nodeagent.domain.slots import Hit, Join, Load, Moment, Place, Refuse, State, Verdict, Wait
from nodeagent.drivers.driver import ListedAdapter
from nodeagent.files.fetches import FetchFailed
from nodeagent.slottelling import Telling
from nodeagent.slotwork import AdapterSource, EngineSide, SlotTimes, seen_as, seen_in
from nodeagent.waking import pause
from schemas import codes
from schemas.adapter import Adapter
from schemas.adapterasks import Outcome
from schemas.adapternames import pin_name
from schemas.slots import (
    How,
    SlotsDrifted,
    SlotsEvent,
    SlotsEvicted,
    SlotsFailed,
    SlotsLeaving,
    SlotsLoaded,
)

LOG = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""So often an ask that waits is looked at again, and what has to leave and cannot."""

HOLDING: Final = frozenset({"ready", "draining", "parked"})
"""Phases in which an engine has what was loaded."""

NAMES: Final = 4
"""So many engine-side names are tried for one version before it is given up."""

NOT_HERE = Refuse(code=codes.NOT_HERE, sentence="this replica is not ready here")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTools:
    """What the slots of all replicas of a node share.

    `engine` is the adapters' side of a replica's engine as it can be reached now. `spawn` runs a task that ends
    with the agent. `others` are the failures of the other replicas of a model here. `recalled` is told that
    more is asked back.
    """

    books: Books
    gateways: Gateways
    files: AdapterSource
    engine: Callable[[str], EngineSide | None]
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    others: Callable[[str], tuple[Bads, ...]]
    recalled: Callable[[], None]
    epoch: Callable[[], int]
    now: Callable[[], datetime]
    monotonic: Callable[[], float]
    times: SlotTimes


class Bell:
    """Wakes all who wait for the next ring, in the order in which they came."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until the next ring, or so long."""
        await pause(self._event, seconds)


class ReplicaSlots:
    """The adapters of one replica. One event loop owns it; nothing outside touches its engine's adapters."""

    def __init__(
        self, tools: SlotTools, replica: str, *, limit: int, room: int, adopted: bool
    ) -> None:
        """`adopted`: its engine served before this agent came, so others may count on what is in it."""
        self._t = tools
        self.replica = replica
        known = tools.books.slots.get(replica)
        self.state: State = slots.adopt(limit, room, known, self._moment())
        self._fresh_at = float("-inf") if adopted else tools.monotonic()
        # Looking is what makes the age of the connection known.
        tools.gateways.connected_s()
        self._met = asyncio.Event()
        self._meet_from = float("-inf")
        if not adopted:
            self._met.set()
        self._bell = Bell()
        self._telling = Telling(tools, replica, lambda: self.state, self._model)
        self._one_by_one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sets: dict[str, str] = {}
        self._read_at = float("-inf")
        self._audit_at = float("-inf")
        self._audit_wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._resting = False
        self._knows_routes = False
        self._was_asked = not adopted
        self._may_be_stale = True
        self.hungry = False
        self.closed = False
        self._keep()
        self._spawn(self._audits())

    # What others tell; none of these waits.

    @property
    def serves(self) -> bool:
        """Whether adapters may be loaded and used there now."""
        held = self._t.books.held.get(self.replica)
        return (
            not self.closed
            and held is not None
            and held.replica.phase == "ready"
            and not held.ending
        )

    def wake(self) -> None:
        """It serves (again). An engine that was parked meanwhile is met anew."""
        if self._resting:
            self._resting = False
            self._met.clear()
            self._meet_from = self._t.monotonic()
            self._audit_soon(0.0)
        self._audit_wake.set()
        self.look()

    def rest(self) -> None:
        """It serves nobody for now: whoever waits is told."""
        self._resting = True
        self._bell.ring()

    def close(self) -> None:
        """The launch is over."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._telling.close()
        for task in self._tasks:
            task.cancel()
        self._bell.ring()
        self._t.files.give_back(self.replica)

    def catalog_changed(self) -> None:
        """The catalog tells something new: what waits for it looks, and what it has no more leaves."""
        self._may_be_stale = True
        self._keep(anew=True)
        if self._t.files.synced and not self._met.is_set():
            self._audit_soon(0.0)
        self._bell.ring()
        self.look()

    def used(self, uses: dict[str, float]) -> None:
        """Last uses of what gateways gave up, by pin name."""
        self.state = slots.used(self.state, uses)

    # Asks.

    async def have(
        self,
        adapter: str,
        version: str,
        *,
        deadline: float,
        how: How = "loaded",
        gone: str = "",
        cause: str = "",
    ) -> tuple[Verdict, Outcome]:
        """Has it loaded, waiting for that until `deadline` at most: then the verdict is Join or Wait.

        Only `have` decides; every wait is followed by a new decision, for much may have changed meanwhile.
        """
        outcome: Outcome = "hit"
        if not await self._until_met(deadline):
            return (Wait(why="room") if self.serves else NOT_HERE), outcome
        while True:
            if not self.serves:
                return NOT_HERE, outcome
            self.state, verdict = slots.ensure(
                self.state, adapter, version, self._moment(), gone=gone, how=how
            )
            match verdict:
                case Hit() | Refuse():
                    return verdict, outcome
                case Load(place=place):
                    outcome, gone = "loaded", ""
                    self._begin(place, cause)
                    verdict = Join()
                    # A person's try is one: what comes of it is the answer, as to anybody.
                    how = "loaded"
                case Join():
                    outcome = "joined" if outcome == "hit" else outcome
                    gone = ""
                    how = "loaded"
                case Wait():
                    self.look(cause)
            left = deadline - self._t.monotonic()
            if left <= 0:
                return verdict, outcome
            await self._bell.wait(min(left, LOOK_S))

    async def changed(self, seconds: float) -> None:
        """Waits until something changed, or so long."""
        await self._bell.wait(seconds)

    async def _until_met(self, deadline: float) -> bool:
        """An engine that was taken over is asked what it has before anybody is answered about it."""
        left = deadline - self._t.monotonic()
        if not self._met.is_set() and left > 0:
            await pause(self._met, left)
        return self._met.is_set()

    # A person's.

    def leave(self, adapter: str) -> tuple[str, ...]:
        """Marks every version of it to be unloaded once nobody uses it; their pin names."""
        names = slots.names_of(self.state, adapter)
        for name in names:
            place = self.state.places[name]
            if place.leaving or place.phase == "unloading":
                continue
            self.state = slots.leaving(self.state, name)
            event = SlotsLeaving(adapter=place.adapter, version=place.version)
            self._telling.say(event, reason="a person wants it unloaded")
        self.look()
        return names

    def stay(self, adapter: str, version: str) -> None:
        """Takes back that it is to be unloaded."""
        name = pin_name(adapter, version)
        place = self.state.places.get(name)
        if place is None or not place.leaving or place.phase == "unloading":
            return
        self.state = slots.staying(self.state, name)
        event = SlotsLeaving(adapter=adapter, version=version, taken_back=True)
        self._telling.say(event, reason="a person wants it loaded")

    def force(self, adapter: str) -> None:
        """Unloads every version of it at once, whatever runs on it."""
        for name in slots.names_of(self.state, adapter):
            if self.state.places[name].phase == "loaded":
                self.state = slots.forced(self.state, name, self._t.monotonic())
                self._spawn(self._unload(name, self.state.places[name]))

    def is_gone(self, adapter: str, since: float) -> bool:
        """Whether what was here at `since` left, by the engine's own list read after that."""
        return slots.is_gone(self.state, adapter, since=since, read_at=self._read_at)

    # Loading.

    def _begin(self, place: Place, cause: str) -> None:
        self._spawn(self._load(pin_name(place.adapter, place.version), cause))

    async def _load(self, name: str, cause: str) -> None:
        """Loads what was reserved and says what became of it."""
        began = self._t.monotonic()
        fault = await self._bring(name)
        place = self.state.places[name]
        moment = self._moment()
        if fault is None:
            load_s = round(moment.at - began, 4)
            self.state = slots.loaded(
                self.state, name, moment, engine_name=place.engine_name, load_s=load_s
            )
            self._bell.ring()
            if self._t.times.answered_s:
                await asyncio.sleep(self._t.times.answered_s)
            event: SlotsEvent = SlotsLoaded(
                adapter=place.adapter, version=place.version, how=place.how, load_s=load_s
            )
            LOG.info("adapter loaded", extra=self._fields(place, load_s=load_s, cause=cause))
            self._telling.say(event, cause=cause)
        else:
            self._failed(name, place, fault, moment, cause)
            self._keep()
        self.look(cause)

    def _failed(self, name: str, place: Place, fault: Fault, moment: Moment, cause: str) -> None:
        adapter = self._t.files.adapter(place.adapter)
        strip = (str(self._t.files.folder(adapter)),) if adapter is not None else ()
        others = self._t.others(self.replica)
        self.state, bad, restored = slots.load_failed(
            self.state, name, fault, others, strip, moment
        )
        self._bell.ring()
        LOG.warning(
            "adapter not loaded",
            extra=self._fields(place, code=bad.code, problem=bad.reason, whose=bad.whose),
        )
        event = SlotsFailed(
            adapter=place.adapter, version=place.version, code=bad.code, whose=bad.whose
        )
        self._telling.say(event, reason=bad.reason, cause=cause)
        for back in restored:
            LOG.info("adapter comes back", extra=self._fields(back))
            self._begin(back, cause)
        if fault.late or not fault.known:
            self._audit_soon(self._t.times.rest_s)

    async def _bring(self, name: str) -> Fault | None:
        """Has its files here and the engine read them; why not, or None when it is loaded."""
        place = self.state.places[name]
        adapter = self._t.files.adapter(place.adapter)
        if adapter is None or pin_name(adapter.name, adapter.version) != name:
            return Fault(
                whose="replica",
                code=codes.FILES_MISSING,
                text=f"the catalog has {place.adapter} in version {place.version} no more",
            )
        held = self._t.books.held.get(self.replica)
        fault = outranked(adapter, held.launch if held is not None else None)
        if fault is not None:
            return fault
        self._keep_also(name, adapter)
        try:
            path = await self._t.files.obtain(adapter)
        except FetchFailed as failed:
            return Fault(whose="replica", code=codes.FILES_MISSING, text=failed.sentence)
        engine = self._t.engine(self.replica)
        if engine is None:
            return Fault(whose="replica", code=codes.NOT_HERE, text=NOT_HERE.sentence)
        if place.again:
            await self._look_for(name, engine)
        for _ in range(NAMES):
            engine_name = self.state.places[name].engine_name
            done = await engine.load(engine_name, path)
            if isinstance(done, Fault):
                return done
            if not done.already:
                return None
            told = await engine.list()
            if isinstance(told, Fault):
                # It is there in any case, as what nobody knows yet.
                return replace(told, late=True)
            there = seen_as(engine_name, told, self._t.files)
            if there is not None and there.root != "wrong":
                return None
            # It is there, and from elsewhere: whatever that is, it must not answer for this one.
            self.state = slots.renamed(self.state, name)
        text = f"each of {NAMES} names for it stands for something else in this engine"
        return Fault(whose="replica", code=codes.LOAD_FAILED, text=text)

    async def _look_for(self, name: str, engine: EngineSide) -> None:
        """A gateway was told that it is not there: the engine's list says whether that is so."""
        place = self.state.places[name]
        told = await engine.list()
        if isinstance(told, Fault):
            return
        there = seen_as(place.engine_name, told, self._t.files)
        if there is not None and there.root == "wrong":
            self.state = slots.renamed(self.state, name)
        if there is None or there.root == "wrong":
            LOG.warning("adapter lost", extra=self._fields(place))
            self._telling.say(SlotsDrifted(lost=(name,)), reason="its engine does not list it")

    # Unloading.

    def look(self, cause: str = "") -> None:
        """Chooses what leaves now and has it leave; to be called whenever something may have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.serves or not self._met.is_set():
            return
        if not self._may_be_stale and slots.is_at_rest(self.state):
            self.hungry = False
            return
        at = self._t.monotonic()
        before = self.state.recalled
        facts = self._facts(at)
        self._may_be_stale = bool(facts.stale) or not self._t.files.synced
        self.state, settled = evicting.settle(self.state, facts, at)
        for evict in settled.evict:
            self._spawn(self._evict(evict, cause))
        if any(name not in before for name in settled.recall):
            self._t.recalled()
        self.hungry = bool(
            settled.recall
            or slots.waiting(self.state, at)
            or sum(p.phase == "loaded" for p in self.state.places.values()) > self.state.limit
            or any(p.leaving for p in self.state.places.values())
            or facts.stale
        )
        if self.hungry:
            wake_at = min(settled.look_at or at + LOOK_S, at + LOOK_S)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(wake_at - at, 0.01), self.look)

    async def _evict(self, evict: Evict, cause: str) -> None:
        """Unloads what was chosen, after those that were chosen before, unless the engine itself says that requests
        run on it."""
        async with self._one_by_one:
            engine = self._t.engine(self.replica)
            running = await engine.running() if engine is not None else None
            is_unknown = running is None and evict.must_know
            if not is_unknown and evict.place.engine_name not in (running or ()):
                await self._unload_now(evict.name, evict.place, cause)
                return
        rest_s = self._t.times.again_s if is_unknown else self._t.times.rest_s
        LOG.info("adapter stays: it is in use", extra=self._fields(evict.place))
        self.state = slots.spared(self.state, evict.name, self._t.monotonic(), rest_s=rest_s)
        self._bell.ring()
        self.look(cause)

    async def _unload(self, name: str, place: Place) -> None:
        """Unloads what a person wants gone whatever runs on it."""
        async with self._one_by_one:
            await self._unload_now(name, place, "")

    async def _unload_now(self, name: str, place: Place, cause: str) -> None:
        """Asks the engine, within a time of its own, and says what became of it. Its list is read after that: an
        engine's word alone is no proof."""
        engine = self._t.engine(self.replica)
        no_engine = Fault(whose="replica", code=codes.NOT_HERE, text=NOT_HERE.sentence)
        done = no_engine if engine is None else await engine.unload(place.engine_name)
        at = self._t.monotonic()
        if isinstance(done, Fault):
            self.state = slots.unload_failed(self.state, name, at)
            LOG.warning(
                "adapter not unloaded",
                extra=self._fields(place, code=done.code, problem=done.text),
            )
            event: SlotsEvent = SlotsFailed(
                adapter=place.adapter, version=place.version, code=done.code, what="unload"
            )
            self._telling.say(event, reason=done.text, cause=cause)
        else:
            self.state = slots.unloaded(self.state, name, at)
            LOG.info("adapter unloaded", extra=self._fields(place, why=place.why, cause=cause))
            event = SlotsEvicted(adapter=place.adapter, version=place.version, why=place.why)
            self._telling.say(event, cause=cause)
        self._keep()
        self._bell.ring()
        self.look(cause)
        self._audit_soon(0.0)

    # The engine's own list.

    async def _audits(self) -> None:
        """Reads the engine's list at once, after each unload, and every `audit_s`, until the launch is over."""
        while True:
            self._audit_wake.clear()
            left = self._audit_at - self._t.monotonic()
            if not self.serves:
                await self._audit_wake.wait()
            elif left > 0:
                await pause(self._audit_wake, left)
            else:
                # Whoever wants one from here on wants a list that is asked for later than this one.
                self._audit_at = float("inf")
                is_clear = await self._audit() and not self.state.strays
                self._audit_soon(self._t.times.audit_s if is_clear else self._t.times.again_s)

    def _audit_soon(self, in_s: float) -> None:
        at = self._t.monotonic() + in_s
        if at < self._audit_at:
            self._audit_at = at
            self._audit_wake.set()

    async def _audit(self) -> bool:
        """Compares once; whether the engine answered. What it does not answer changes nothing that is known."""
        engine = self._t.engine(self.replica)
        if engine is None:
            return False
        began = self._t.monotonic()
        told = await engine.list()
        self._was_asked = True
        if isinstance(told, Fault):
            LOG.debug("list not read", extra={"replica": self.replica, "problem": told.text})
            self._keep()
        else:
            self._compare(told, began)
        # Before the catalog was read nobody can tell whether what is listed came from where it belongs.
        if began >= self._meet_from and self._t.files.synced:
            self._met.set()
        if not self._knows_routes or self.state.route_off:
            await self._probe(engine)
        self._bell.ring()
        self.look()
        return not isinstance(told, Fault)

    def _compare(self, told: tuple[ListedAdapter, ...], began: float) -> None:
        moment = self._moment()
        foreign = self.state.foreign
        seen = seen_in(told, self._t.files)
        self.state, drift = listing.listed(self.state, seen, began, self._facts(moment.at), moment)
        self._read_at = began
        self._may_be_stale = self._may_be_stale or bool(drift.found)
        for one, what in zip(told, seen, strict=True):
            if what.adapter and one.root:
                # Also of a version that the catalog has no more: the engine may read it again.
                name = pin_name(what.adapter, what.version)
                self._sets.setdefault(name, os.path.basename(os.path.normpath(one.root)))
        self._keep()
        if drift:
            LOG.warning(
                "adapters drifted",
                extra={"replica": self.replica, "lost": drift.lost, "found": drift.found},
            )
        if drift or foreign != self.state.foreign:
            self._telling.say(
                SlotsDrifted(lost=drift.lost, found=drift.found),
                reason=f"its engine lists something else; {self.state.foreign} are foreign",
            )

    async def _probe(self, engine: EngineSide) -> None:
        """Whether its routes are there at all: an engine without them knows no adapter either."""
        there = await engine.has_routes()
        self._knows_routes = there is not None
        if there is None or there is not self.state.route_off:
            return
        self.state = slots.routes(self.state, is_off=not there)
        if not there:
            LOG.error("engine without routes for adapters", extra={"replica": self.replica})

    # Facts.

    def _facts(self, at: float) -> Facts:
        uses = pins.uses_in(self._t.gateways.pins, self.replica, at)
        calm = self._is_calm()
        held = self._t.books.held.get(self.replica)
        if held is None or not self._t.files.synced:
            return Facts(uses=uses, calm=calm)
        kept, stale = slotasks.standing(self.state.places, self._t.files.adapter, held.replica)
        return Facts(uses=uses, kept=kept, stale=stale, calm=calm)

    def _is_calm(self) -> bool:
        """Whether no gateway can trust a pin that is not known here: connected ever since this engine serves, or
        for longer than a pin is trusted."""
        connected_s = self._t.gateways.connected_s()
        if connected_s is None:
            return False
        since = self._t.monotonic() - connected_s
        return since <= self._fresh_at or connected_s >= self._t.gateways.pin_s

    def _moment(self) -> Moment:
        return Moment(at=self._t.monotonic(), now=self._t.now())

    def _keep(self, *, anew: bool = False) -> None:
        """Tells which files the engine may read again; until that is known, none of any adapter's goes."""
        places = self.state.places
        if not anew and self._sets.keys() == places.keys():
            self._tell_kept()
            return
        for name, place in places.items():
            adapter = self._t.files.adapter(place.adapter)
            if adapter is not None and pin_name(adapter.name, adapter.version) == name:
                self._sets[name] = set_of(adapter)
        self._sets = {name: key for name, key in self._sets.items() if name in places}
        self._tell_kept()

    def _keep_also(self, name: str, adapter: Adapter) -> None:
        """Tells of one more, without a look at all: somebody waits for its load."""
        self._sets[name] = set_of(adapter)
        self._tell_kept()

    def _tell_kept(self) -> None:
        is_known = self._t.files.synced or self.state.places.keys() <= self._sets.keys()
        if self._was_asked and is_known:
            self._t.files.keep(self.replica, frozenset(self._sets.values()))

    def _model(self) -> str | None:
        """The model it serves, while there is something to say of its adapters."""
        held = self._t.books.held.get(self.replica)
        if held is None or held.replica.phase not in HOLDING:
            # What an engine's end does to its adapters the replica's own events say.
            return None
        return held.replica.model

    def _fields(self, place: Place, **more: object) -> dict[str, object]:
        named = {"replica": self.replica, "adapter": place.adapter, "version": place.version}
        return {**named, **more}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._t.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
