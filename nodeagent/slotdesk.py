"""The desk where gateways and people ask for adapters: finds the replica, pins, and answers within the asked time.

It knows the slots of every serving replica of this node, hears what gateways say of their pins, and tells what is
asked back. What becomes of an ask is decided by `domain/slots.py`; engines are `slots.py`'s affair.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final, assert_never

from nodeagent.beacons import Gateways
from nodeagent.books import Books
from nodeagent.domain import pins
from nodeagent.domain.adapterfiles import set_of
from nodeagent.domain.badloads import Bads
from nodeagent.domain.pins import Pins
from nodeagent.domain.slotasks import LONGEST_WAIT_S, waits_for, wrong_with
from nodeagent.domain.slots import Hit, Join, Load, Refuse, Wait
from nodeagent.drivers.driver import Driver
from nodeagent.slots import HOLDING, LOOK_S, NOT_HERE, Bell, ReplicaSlots, SlotTools
from nodeagent.slotwork import AdapterSource, EngineSide, SlotTimes, engine_side
from schemas import codes
from schemas.adapterasks import (
    AdapterHolders,
    Ensure,
    EnsureAnswer,
    Holder,
    LoadAdapter,
    SlotsAnswer,
    SlotsRequest,
    UnloadAdapter,
)
from schemas.adapternames import pin_name
from schemas.model import EngineName
from schemas.vllm_flags import lora_room

SETTLE_S: Final = 10.0
"""So often pins that ended by time alone are forgotten."""


class SlotDesk:
    """The adapters of one node. `run` must be a live task. `on_recall` is told when more is asked back."""

    def __init__(
        self,
        *,
        books: Books,
        gateways: Gateways,
        files: AdapterSource,
        drivers: Mapping[EngineName, Driver],
        engine_key: Callable[[str], str],
        epoch: Callable[[], int],
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        times: SlotTimes,
    ) -> None:
        self._books = books
        self._gateways = gateways
        self._files = files
        self._drivers = drivers
        self._engine_key = engine_key
        self._monotonic = monotonic
        self._times = times
        self._replicas: dict[str, ReplicaSlots] = {}
        self._asleep: set[str] = set()
        """Parked ones of which only the catalog, once it was read, can tell what they need."""
        self._group: asyncio.TaskGroup | None = None
        self._settled_at = monotonic()
        self.on_recall: Callable[[], None] = lambda: None
        self.knows: Callable[[], bool] = lambda: True
        """Whether this agent has read what runs here: before, a replica it does not know may well be there."""
        self._tools = SlotTools(
            books=books,
            gateways=gateways,
            files=files,
            engine=self._engine,
            spawn=self._spawn,
            others=self._others,
            recalled=lambda: self.on_recall(),
            epoch=epoch,
            now=now,
            monotonic=monotonic,
            times=times,
        )
        self._bell = Bell()
        self._waiting: list[Callable[[], None]] = []
        gateways.on_pins = self._heard
        files.on_change = self._changed

    async def run(self) -> None:
        """Carries the loads, unloads and reads of every replica until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            waiting, self._waiting = self._waiting, []
            for begin in waiting:
                begin()
            try:
                await asyncio.Event().wait()
            finally:
                # A timer, or an ask that still waits, must begin nothing any more: nobody would end that.
                for known in self._replicas.values():
                    known.close()

    # The replicas; their supervisors tell.

    def serve(self, name: str, *, adopted: bool) -> None:
        """This replica is ready: adapters are loaded there from now on. `adopted`: an earlier agent started it."""
        if self._group is None:
            self._waiting.append(partial(self.serve, name, adopted=adopted))
            return
        held = self._books.held.get(name)
        if held is None or held.replica.phase != "ready":
            return
        known = self._replicas.get(name)
        if known is not None:
            known.wake()
            return
        limit = held.replica.adapter_slots
        if limit <= 0:
            return
        room = 0
        if held.launch is not None and held.launch.engine == "vllm":
            room = lora_room(held.launch.args, limit)
        made = ReplicaSlots(self._tools, name, limit=limit, room=room, adopted=adopted)
        self._replicas[name] = made
        self._bell.ring()
        made.look()

    def rest(self, name: str) -> None:
        """This replica is parked: nothing is loaded there until it serves again."""
        known = self._replicas.get(name)
        if known is not None:
            known.rest()
            return
        held, slots = self._books.held.get(name), self._books.slots.get(name)
        if held is None or held.replica.phase != "parked" or not held.replica.adapter_slots:
            return
        if not self._files.synced:
            self._asleep.add(name)
            return
        # An agent that starts asks no engine that sleeps, and its files stay all the same.
        told = [self._files.adapter(s.adapter) for s in (slots.loaded if slots else ())]
        self._files.keep(
            name, frozenset(set_of(adapter) for adapter in told if adapter is not None)
        )

    def leave(self, name: str) -> None:
        """The launch is over, and with it all that was in its engine."""
        known = self._replicas.pop(name, None)
        if known is not None:
            known.close()
        self._asleep.discard(name)
        self._files.give_back(name)
        self._gateways.pins = pins.without_replica(self._gateways.pins, name)

    # What is told to others.

    def recall(self) -> dict[str, tuple[str, ...]]:
        """By replica, the pins that are asked back."""
        return {
            name: tuple(sorted(replica.state.recalled))
            for name, replica in sorted(self._replicas.items())
            if replica.state.recalled and replica.serves
        }

    # Asks.

    async def ensure(self, ask: Ensure) -> EnsureAnswer:
        """A gateway's. What it asks for is pinned for it before anything is decided, so that nobody takes it away
        between the answer and its first use."""
        name = pin_name(ask.adapter, ask.version)
        self._gateways.pins = pins.asked(
            self._gateways.pins,
            ask.gateway,
            ask.incarnation,
            replica=ask.replica,
            name=name,
            n=ask.n,
            at=self._monotonic(),
            keep_s=self._gateways.pin_s,
        )
        answer = await self._ensure(ask)
        if answer.status in ("refused", "not_here"):
            self._gateways.pins = pins.denied(
                self._gateways.pins,
                ask.gateway,
                ask.incarnation,
                replica=ask.replica,
                name=name,
                n=ask.n,
            )
        return answer

    async def _ensure(self, ask: Ensure) -> EnsureAnswer:
        deadline = self._deadline(ask.wait_s)
        replica = await self._found(ask.replica, deadline)
        if isinstance(replica, Wait):
            return EnsureAnswer(status="waiting")
        if replica is None or not replica.serves:
            return _refused(NOT_HERE)
        wrong = await self._checked(replica, ask.adapter, ask.version, deadline)
        if wrong is not None:
            return _refused(wrong)
        place = replica.state.places.get(pin_name(ask.adapter, ask.version))
        if place is not None and place.leaving and place.phase == "loaded":
            # It leaves once nobody counts on it, and whoever waits for that here would.
            deadline = self._monotonic()
        verdict, how = await replica.have(
            ask.adapter, ask.version, deadline=deadline, gone=ask.gone, cause=ask.request
        )
        match verdict:
            case Hit(engine_name=engine_name, load_s=load_s):
                return EnsureAnswer(
                    status="ready",
                    engine_name=engine_name,
                    how=how,
                    load_s=load_s if how != "hit" else None,
                )
            case Join() | Load():
                return EnsureAnswer(status="loading", how=how)
            case Wait(why=why):
                code = codes.IN_USE if why == "leaving" else ""
                sentence = waits_for(replica.state, why)
                return EnsureAnswer(status="waiting", how=how, code=code, sentence=sentence)
            case Refuse():
                return _refused(verdict)
            case _:
                assert_never(verdict)

    async def _found(self, name: str, deadline: float) -> ReplicaSlots | Wait | None:
        """The slots of a replica. One that is ready and that nobody looks after yet will be in a moment: this agent
        has just started."""
        while (replica := self._replicas.get(name)) is None:
            held = self._books.held.get(name)
            if held is None:
                if self.knows():
                    return None
            elif held.replica.phase != "ready" or not held.replica.adapter_slots:
                return None
            left = deadline - self._monotonic()
            if left <= 0:
                return Wait(why="room")
            await self._bell.wait(min(left, LOOK_S))
        return replica

    async def ask(self, request: SlotsRequest) -> SlotsAnswer:
        """A person's."""
        deadline = self._deadline(request.wait_s)
        match request.ask:
            case LoadAdapter() as ask:
                return await self._load(ask, deadline)
            case UnloadAdapter() as ask:
                return await self._unload(ask, deadline)
            case AdapterHolders(adapter=adapter):
                return SlotsAnswer(status="done", holders=self._holders(adapter))
            case _:
                assert_never(request.ask)

    async def _load(self, ask: LoadAdapter, deadline: float) -> SlotsAnswer:
        replica = self._replicas.get(ask.replica)
        if replica is None or not replica.serves:
            return self._no(NOT_HERE)
        wrong = await self._checked(replica, ask.adapter, "", deadline)
        adapter = self._files.adapter(ask.adapter)
        if wrong is not None or adapter is None:
            return self._no(wrong or NOT_HERE)
        replica.stay(adapter.name, adapter.version)
        verdict, _ = await replica.have(
            adapter.name, adapter.version, deadline=deadline, how="person"
        )
        holders = self._holders(ask.adapter, ask.replica)
        match verdict:
            case Hit():
                return SlotsAnswer(status="done", holders=holders)
            case Join() | Load():
                return SlotsAnswer(status="loading", holders=holders)
            case Wait():
                return SlotsAnswer(status="waiting", holders=holders)
            case Refuse():
                return self._no(verdict)
            case _:
                assert_never(verdict)

    async def _unload(self, ask: UnloadAdapter, deadline: float) -> SlotsAnswer:
        """Done is what the engine's own list shows, read after the unload."""
        replica = self._replicas.get(ask.replica)
        if replica is None or not replica.serves:
            return self._no(NOT_HERE)
        names = replica.leave(ask.adapter)
        if not names:
            sentence = f"{ask.adapter} is not loaded in {ask.replica}"
            return SlotsAnswer(status="refused", code=codes.NOT_FOUND, sentence=sentence)
        began = self._monotonic()
        if ask.force:
            replica.force(ask.adapter)
        while not replica.is_gone(ask.adapter, began):
            left = deadline - self._monotonic()
            if left <= 0 or not replica.serves:
                holders = self._holders(ask.adapter, ask.replica)
                return SlotsAnswer(status="waiting", holders=holders)
            await replica.changed(min(left, LOOK_S))
        return SlotsAnswer(status="done")

    def _no(self, refuse: Refuse) -> SlotsAnswer:
        return SlotsAnswer(status="refused", code=refuse.code, sentence=refuse.sentence)

    async def _checked(
        self, replica: ReplicaSlots, adapter: str, version: str, deadline: float
    ) -> Refuse | None:
        """What is wrong with it. An agent may know an older catalog than a gateway for a moment, so it waits for
        what it may be about to hear."""
        until = min(deadline, self._monotonic() + self._times.catalog_s)
        while True:
            held = self._books.held.get(replica.replica)
            if held is None:
                return NOT_HERE
            wrong = wrong_with(adapter, version, self._files.adapter(adapter), held.replica)
            left = until - self._monotonic()
            if wrong is None or left <= 0:
                return wrong
            await replica.changed(left)

    def _holders(self, adapter: str = "", replica: str = "") -> tuple[Holder, ...]:
        at = self._monotonic()
        found: list[Holder] = []
        for name, known in sorted(self._replicas.items()):
            held = self._books.held.get(name)
            if held is None or held.replica.phase not in HOLDING or (replica and name != replica):
                continue
            uses = pins.uses_in(self._gateways.pins, name, at)
            for pin, place in sorted(known.state.places.items()):
                if adapter and place.adapter != adapter:
                    continue
                use = uses.get(pin, pins.UNUSED)
                used_at = max(place.used_at, use.used_at)
                is_leaving = place.phase == "loaded" and place.leaving
                found.append(
                    Holder(
                        replica=name,
                        model=held.replica.model,
                        adapter=place.adapter,
                        version=place.version,
                        state="leaving" if is_leaving else place.phase,
                        since=place.since,
                        how=place.how,
                        uses=use.uses,
                        idle_s=_idle_s(used_at, at, use.uses),
                        gateways=use.gateways,
                    )
                )
        return tuple(found)

    # Inside.

    def _deadline(self, wait_s: float) -> float:
        return self._monotonic() + min(max(wait_s, 0.0), LONGEST_WAIT_S)

    def _heard(self, before: Pins) -> None:
        """A beacon told of pins: last uses of what was given up are kept, and who waits for a place looks."""
        at = self._monotonic()
        if at - self._settled_at > SETTLE_S:
            self._settled_at = at
            self._gateways.pins = pins.settled(self._gateways.pins, at)
        for name, uses in pins.given_up(before, self._gateways.pins).items():
            known = self._replicas.get(name)
            if known is not None:
                known.used(uses)
        for known in self._replicas.values():
            if known.hungry:
                known.look()

    def _changed(self, _names: frozenset[str]) -> None:
        for known in list(self._replicas.values()):
            known.catalog_changed()
        asleep, self._asleep = self._asleep, set()
        for name in asleep:
            self.rest(name)

    def _engine(self, name: str) -> EngineSide | None:
        held = self._books.held.get(name)
        if held is None:
            return None
        driver = self._drivers.get(held.replica.engine)
        return engine_side(driver, held.replica.endpoint, self._engine_key(name), self._times)

    def _others(self, name: str) -> tuple[Bads, ...]:
        """The failures of the other replicas of the same model here."""
        held = self._books.held.get(name)
        return tuple(
            known.state.bads
            for other, known in self._replicas.items()
            if other != name
            and held is not None
            and (theirs := self._books.held.get(other)) is not None
            and theirs.replica.model == held.replica.model
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        assert self._group is not None
        return self._group.create_task(work)


def _refused(refuse: Refuse) -> EnsureAnswer:
    return EnsureAnswer(
        status="not_here" if refuse is NOT_HERE else "refused",
        whose=refuse.whose,
        code=refuse.code,
        sentence=refuse.sentence,
        until=refuse.until,
        known=refuse.known,
    )


def _idle_s(used_at: float, at: float, uses: int) -> float | None:
    if uses:
        return 0.0
    return round(max(at - used_at, 0.0), 3) if used_at > float("-inf") else None
