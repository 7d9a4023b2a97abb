"""Parks one drained engine and brings it back: the way's step, the card's reading, the proof by one token.

Whether to park is decided in `domain/parking.py`; how, by the launch's way. A park or resume that fails leaves a
process nobody can trust: this says so and why, and its supervisor ends it. It says nothing to the log.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nodeagent.domain import drains, leases, parking
from nodeagent.domain.held import Held
from nodeagent.domain.inventory import CPU_CARD
from nodeagent.drivers import proof
from nodeagent.drivers.parkways import Parkable, ParkFault, Way
from nodeagent.parkbook import ways_for
from nodeagent.tools import Tools
from schemas.cardstate import free_bytes
from schemas.model import ParkWay
from schemas.plan import Stop

LOG = logging.getLogger(__name__)

LOOK_S: Final = 0.1
CLAIM_LOOK_S: Final = 0.25
SLACK_S: Final = 0.5
OTHERS: Final = 4
"""So many times its own bound an engine waits for another that is parked or resumed on one of its cards."""

EVICT_S: Final = 5.0
"""So long beyond their grace other parked copies may take to leave the RAM."""


CANCEL_S: Final = 5.0
"""So long a step that is broken off may take to end."""


class Parked(Struct, frozen=True, kw_only=True):
    """It is parked. `ram_bytes` is to be leased on `cpu`, `residual_bytes` what it keeps on each card."""

    way: ParkWay
    ram_bytes: int
    residual_bytes: int
    park_s: float


class Resumed(Struct, frozen=True, kw_only=True):
    """It serves again, `resume_s` after it began to return."""

    resume_s: float


class Lost(Struct, frozen=True, kw_only=True):
    """Its process is of no use any more; why. `hurried`: it was not at fault, it was broken off for somebody."""

    reason: str
    hurried: bool = False


class Parking:
    """One engine's way to RAM and back. `ended` tells that its process is gone, `over` that nobody wants it back."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        *,
        held: Callable[[], Held],
        wake: asyncio.Event,
        ended: Callable[[], bool],
        over: Callable[[], bool],
    ) -> None:
        self._t = tools
        self._name = replica
        self._held = held
        self._wake = wake
        self._ended = ended
        self._over = over

    async def choose(self) -> parking.Choice | None:
        """Whether the drained replica is parked. None when its drain was called off meanwhile.

        With a choice to park it is told to end, as far as anybody else is concerned: there is no way back
        to serving from here, for this agent and for one after it.
        """
        held = self._held()
        if held.stop is None or held.launch is None or not parking.may_park(held.stop):
            return parking.StopInstead(reason="")
        host_bytes, on_cards, weights = 0, {}, None
        if self._t.parkbook.enabled and parking.parking_of(held.launch).way in self._ways(held):
            # Worth reading: it walks every page of a large process.
            host_bytes = await self._t.processes.memory_bytes(self._name)
            on_cards = await self._on_cards(held)
            weights = await self._weights_bytes(held)
        held = self._held()
        if held.stop is None or held.ending or held.replica.phase != "draining" or self._ended():
            return None
        choice = parking.choose(self._facts(held, host_bytes, on_cards, weights))
        if isinstance(choice, parking.Park):
            self._t.books.note(replace(held, ending=True))
        return choice

    async def park(self, choice: parking.Park) -> Parked | Lost | parking.StopInstead:
        """Makes room in RAM, has the engine leave its cards and sees them back."""
        # An agent after this one must know that there is no way back before there is none.
        await self._t.books.durable()
        held = self._held()
        if not await self._make_room(choice):
            return parking.StopInstead(
                reason="cpu: the room for its parked copy did not come in time"
            )
        way = self._t.parkbook.ways[choice.way]
        before = await self._on_cards(held)
        loop = asyncio.get_running_loop()
        residual = 0
        async with AsyncExitStack() as stack:
            problem = await self._alone(stack, held, self._ended)
            began = loop.time()
            engine = await self._engine(held)
            bound_s = engine.parking.timeout_s
            if not problem:
                problem = await self._bounded(way.park(engine), bound_s, self._ended, "to park")
            if not problem:
                left_s = max(bound_s - (loop.time() - began), LOOK_S)
                after, problem = await self._read_back(way, before, left_s)
                residual = max(after.values(), default=0)
            park_s = loop.time() - began
        if problem:
            return Lost(reason=problem, hurried=problem == self._urgent())
        ram_bytes = parking.ram_of_copy(
            choice.way,
            host_bytes=await self._t.processes.memory_bytes(self._name),
            freed_bytes=sum(before.values()) - residual * len(before),
            weights_bytes=await self._weights_bytes(held),
        )
        self._t.parkbook.learned(held.replica).ram_bytes = ram_bytes
        return Parked(
            way=choice.way,
            ram_bytes=parking.with_headroom(ram_bytes),
            residual_bytes=residual,
            park_s=round(park_s, 4),
        )

    async def resume(self) -> Resumed | Lost | None:
        """Has the engine come back and prove it. None when it is over: stopped, or its process gone."""
        held = self._held()
        way = self._t.parkbook.ways.get(_way_of(held))
        if held.launch is None or way is None:
            return Lost(reason=f"nobody here knows how to resume it (way {_way_of(held)!r})")
        replica = held.replica
        # One that is parked by all that is remembered must not have its card's memory.
        await self._t.books.durable()
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            problem = await self._alone(stack, held, self._over)
            began = loop.time()
            engine = await self._engine(held)
            bound_s = engine.parking.timeout_s
            if not problem:
                problem = await self._bounded(way.resume(engine), bound_s, self._over, "to resume")
            if not problem:
                proven = _prove(engine, replica.paths)
                problem = await self._bounded(proven, bound_s, self._over, "to answer")
            resume_s = loop.time() - began
        if self._over():
            return None
        if problem:
            return Lost(reason=problem, hurried=problem == self._urgent())
        self._t.parkbook.learned(replica).resume_s = resume_s
        return Resumed(resume_s=round(resume_s, 4))

    def failed(self) -> None:
        """Remembers that this model could not be parked here just now."""
        loop = asyncio.get_running_loop()
        self._t.parkbook.learned(self._held().replica).failed_at = loop.time()

    def _facts(
        self, held: Held, host_bytes: int, on_cards: Mapping[str, int], weights: int | None
    ) -> parking.ParkFacts:
        assert held.stop is not None
        assert held.launch is not None
        book, books, replica = self._t.parkbook, self._t.books, held.replica
        learned = book.learned(replica)
        wanted = parking.parking_of(held.launch)
        ram_bytes = parking.ram_needed(
            known_bytes=learned.ram_bytes,
            host_bytes=host_bytes,
            device_bytes=sum(
                # Where no driver tells, as much as was reserved for it may be there.
                on_cards.get(card, replica.memory_bytes)
                for card in replica.cards
            ),
            weights_bytes=weights if wanted.way == "sleep" else None,
        )
        cpu = books.cards.get(CPU_CARD)
        rest = leases.without(cpu, {self._name}) if cpu is not None else None
        measured = books.measured_use()
        failed_ago_s = None
        if learned.failed_at is not None:
            failed_ago_s = asyncio.get_running_loop().time() - learned.failed_at
        gateways = self._t.gateways.about(self._name, replica.model)
        return parking.ParkFacts(
            stop=held.stop,
            parking=wanted,
            ways=self._ways(held),
            enabled=book.enabled,
            on_gpu=all(
                (card := books.cards.get(name)) is not None and card.kind == "gpu"
                for name in replica.cards
            ),
            load_s=replica.load_s,
            resume_s=replica.resume_s if replica.resume_s is not None else learned.resume_s,
            ram_bytes=ram_bytes,
            ram_free_bytes=free_bytes(rest, measured) if rest is not None else 0,
            evict=leases.parked_to_evict(rest, books.held, ram_bytes, measured) if rest else None,
            failed_ago_s=failed_ago_s,
            again_s=book.again_s,
            connected=self._t.gateways.connected_s() is not None,
            silent=drains.unheard(gateways, self._t.gateway_gone_s),
        )

    def _ways(self, held: Held) -> frozenset[ParkWay]:
        """The ways this node has for this engine."""
        driver = self._t.drivers.get(held.replica.engine)
        known = ways_for(driver.capabilities, self._t.parkbook.ways) if driver is not None else ()
        return frozenset(known)

    async def _make_room(self, choice: parking.Park) -> bool:
        """Leases the RAM, after the copies that make way for it have left. False when they do not in time."""
        books = self._t.books
        for name in choice.evict:
            other = books.held.get(name)
            if other is None or other.ending or other.replica.phase != "parked":
                continue
            LOG.info("parked copy makes way", extra={"replica": name, "for": self._name})
            stop = Stop(decision=f"ram-{self._name}", reason="ram", decided_at=self._t.now())
            books.note(replace(other, stop=stop, ending=True))
            self._t.parkbook.wake(name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._t.grace_s + EVICT_S
        while not books.reserve_ram(self._name, choice.ram_bytes):
            if self._ended() or self._urgent() or loop.time() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _alone(self, stack: AsyncExitStack, held: Held, over: Callable[[], bool]) -> str:
        """Takes its cards for itself until `stack` ends; why not, when whoever is on them takes for ever."""
        assert held.launch is not None
        bound_s = OTHERS * parking.parking_of(held.launch).timeout_s
        entering = stack.enter_async_context(self._t.parkbook.alone_on(held.replica.cards))
        return await self._bounded(entering, bound_s, over, "until its cards were let go of")

    async def _weights_bytes(self, held: Held) -> int | None:
        source = self._t.files.local(held.launch.source) if held.launch is not None else None
        return await asyncio.to_thread(weights_bytes, source or "")

    async def _bounded(
        self, step: Awaitable[None], bound_s: float, over: Callable[[], bool], what: str
    ) -> str:
        """Why the step did not come to its end, in a sentence; empty when it did."""
        doing = asyncio.ensure_future(step)
        loop = asyncio.get_running_loop()
        # A step that knows why it takes so long says so itself, a moment before.
        deadline = loop.time() + bound_s + SLACK_S
        try:
            while not doing.done():
                if over():
                    return "its engine ended meanwhile" if self._ended() else "it is to end"
                urgent = self._urgent()
                if urgent:
                    return urgent
                left_s = deadline - loop.time()
                if left_s <= 0:
                    return f"it took more than {bound_s:g} s {what}"
                self._wake.clear()
                woken = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait(
                        {doing, woken},
                        timeout=min(left_s, CLAIM_LOOK_S),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    woken.cancel()
            await doing
        except ParkFault as fault:
            return str(fault)
        finally:
            doing.cancel()
            # A program that hangs in its driver does not even die; then its engine is ended all the same.
            await asyncio.wait({doing}, timeout=CANCEL_S)
            if not doing.done():
                LOG.error("a step does not end", extra={"replica": self._name, "step": what})
            doing.add_done_callback(_seen)
        return ""

    async def _read_back(
        self, way: Way, before: Mapping[str, int], bound_s: float
    ) -> tuple[dict[str, int], str]:
        """Bytes the engine keeps on each card, and the sentence why it does not count as parked, or nothing.

        The engine's word is not enough: the driver has to show the memory back, twice the same.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + bound_s
        last: dict[str, int] = {}
        while before:
            now = {card: await self._t.meter.held_by(self._name, card) for card in before}
            if self._ended():
                return now, "its engine ended meanwhile"
            behind = [
                card for card in before if not parking.is_back(way.name, before[card], now[card])
            ]
            if not behind and (parking.is_still(last, now) or loop.time() > deadline):
                return now, ""
            urgent = self._urgent()
            if urgent:
                return now, urgent
            if behind and loop.time() > deadline:
                card = behind[0]
                return now, parking.not_back(card, way.name, before[card], now[card])
            last = now
            await asyncio.sleep(LOOK_S)
        return {}, ""

    async def _on_cards(self, held: Held) -> dict[str, int]:
        """What the engine has on each of its cards that the driver tells of.

        A declared card has no meter of its own: nobody can tell what is there, nor see it back.
        """
        cards = self._t.books.cards
        told = [
            name
            for name in held.replica.cards
            if (card := cards.get(name)) is not None and card.provider == "nvml"
        ]
        return {name: await self._t.meter.held_by(self._name, name) for name in told}

    async def _engine(self, held: Held) -> Parkable:
        assert held.launch is not None
        replica = held.replica
        wanted = parking.parking_of(held.launch)
        return Parkable(
            replica=self._name,
            model=replica.model,
            endpoint=replica.endpoint or "",
            key=self._t.engine_key(self._name),
            pid=replica.pid or 0,
            pids=await self._t.processes.survivors(self._name),
            parking=wanted,
        )

    def _urgent(self) -> str:
        """Why this must not go on: a game came to one of its cards, or it is to end whatever it does."""
        held = self._held()
        for name in held.replica.cards:
            card = self._t.books.cards.get(name)
            for claim in card.claims if card is not None else ():
                if claim.kind == "game":
                    return f"{claim.name} has claimed {name}"
        return "it is to end at once" if held.stop is not None and held.stop.force else ""


def weights_bytes(source: str) -> int | None:
    """Size of the weights at this path, of a folder's files together; None for what is no path here. Blocks."""
    if not source.startswith("/"):
        return None
    try:
        if not os.path.isdir(source):
            return os.stat(source).st_size
        with os.scandir(source) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError:
        return None


def _seen(step: "asyncio.Future[None]") -> None:
    """How a step ended that nobody waits for is of no interest."""
    if not step.cancelled():
        step.exception()


async def _prove(engine: Parkable, paths: tuple[str, ...]) -> None:
    bound_s = engine.parking.timeout_s
    problem = await proof.ask_one_token(engine.endpoint, engine.key, engine.model, paths, bound_s)
    if problem:
        raise ParkFault(problem)


def _way_of(held: Held) -> ParkWay:
    """The way it was parked; one that only the log remembers resumes as its profile says."""
    told = held.replica.park_way
    known: dict[str, ParkWay] = {"sleep": "sleep", "checkpoint": "checkpoint", "command": "command"}
    if told in known:
        return known[told]
    return parking.parking_of(held.launch).way if held.launch is not None else "none"
