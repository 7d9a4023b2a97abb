"""Reads all cards of a node: joins what each provider measures with who holds what, and tells what changed.

It keeps no books and ends no lease. What a use means is decided in `attribution.py`; here are the clock, the
threads and the order: one look at a time, the processes first, then the cards.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Final, Protocol

from msgspec.structs import replace

from nodeagent.cards import attribution
from nodeagent.cards.aside import Aside, Hangs
from nodeagent.cards.provider import Left, Provider, Reading
from nodeagent.processes import Process
from schemas.card import Card, Lease, ProcessRef
from schemas.node import CardInfo
from schemas.settings import MIB

LOG = logging.getLogger(__name__)

TOLD_EVERY_S: Final = 1.0
"""A card is told of no more often than this, however much it moves."""


class Census(Protocol):
    """What it needs of `nodeagent.census.Census`."""

    @property
    def processes(self) -> Mapping[int, Process]: ...

    @property
    def launches(self) -> Mapping[str, frozenset[int]]: ...

    @property
    def leases(self) -> Mapping[str, frozenset[int]]: ...


CPU: Final = "cpu"

TakeCensus = Callable[[Iterable[str], Mapping[str, ProcessRef | None]], Awaitable[Census]]


class CardMeter:
    """The meter of one node. One owner, one event loop; any number may ask at once."""

    def __init__(
        self,
        *,
        infos: Sequence[CardInfo],
        providers: Sequence[Provider],
        census: TakeCensus,
        cards: Callable[[], Mapping[str, Card]],
        tell: Callable[[Reading], None],
        look_s: float,
        timeout_s: float = 10.0,
    ) -> None:
        """`census` looks at all processes, `cards` are the states of the books, `tell` gets the readings,
        of each card at most one a second; what of it is news is for the books to say. `look_s` is the time between two looks of the regular kind."""
        self._infos = {info.id: info for info in infos}
        self._providers = [(one, Aside(f"{one.name} cards", timeout_s)) for one in providers]
        self._census = census
        self._cards = cards
        self._tell = tell
        self._look_s = look_s
        self._lock = asyncio.Lock()
        self._soon = asyncio.Event()
        # The pids a holder was seen with, by start time: a driver goes on listing one that is dead.
        self._known: dict[str, dict[int, int]] = {}
        self._last: dict[str, Reading] = {}
        # The most each holder was seen to have on a card, as long as it has a lease somewhere.
        self._most: dict[str, dict[str, int]] = {}
        # Of each card: what nobody was shown for while nothing was hidden and nobody was leaving it.
        self._usual: dict[str, int] = {}
        self._usual_next: dict[str, int] = {}
        self._told_at: dict[str, float] = {}
        self._silent: set[str] = set()

    async def run(self) -> None:
        """Looks every `look_s`, and at once when asked to, until cancelled. A node without gpus where
        nothing is held is not looked at."""
        if self._has_gpus():
            # What is usual on a card is known best before anything is placed there.
            self.look_soon()
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()
            if self._is_worth_it():
                await self.look()

    def look_soon(self) -> None:
        self._soon.set()

    async def look(self) -> tuple[Reading, ...]:
        """One reading of every card that can be read; the books are told."""
        async with self._lock:
            readings = await self._read(None)
            for reading in readings.values():
                self._take(reading)
        return tuple(readings.values())

    async def held_by(self, holder: str, card: str) -> int:
        return (await self.left(holder, card)).memory_bytes

    async def use(self, holder: str) -> int:
        on = {
            card.id
            for card in self._cards().values()
            if (lease := _lease(card, holder)) is not None and lease.kind != "parked"
        }
        async with self._lock:
            readings = await self._read(on)
        return sum(readings[card].of.get(holder, 0) for card in on if card in readings)

    async def left(self, holder: str, card: str) -> Left:
        return (await self.left_on(holder, (card,)))[card]

    async def left_on(self, holder: str, cards: Collection[str]) -> dict[str, Left]:
        """A card nobody has any more has nothing."""
        known = {card for card in cards if card in self._infos}
        async with self._lock:
            readings = await self._read(known) if known else {}
        return {
            card: self._judged(holder, card, readings.get(card))
            if card in known
            else Left(memory_bytes=0)
            for card in cards
        }

    def _judged(self, holder: str, card: str, reading: Reading | None) -> Left:
        state = self._cards().get(card)
        most = self._most.get(holder, {}).get(card, 0)
        lease = _lease(state, holder) if state is not None else None
        if state is not None and state.vm is not None and state.vm.attached:
            # It got the card when nobody held the device any more.
            return Left(memory_bytes=0)
        if reading is None:
            told = f"{card} cannot be read, so nothing is known to be back"
            return Left(memory_bytes=max(most, 1), told=told)
        left = reading.of.get(holder, 0)
        if state is not None and lease is not None and lease.returning:
            # It has ended: also what nobody is shown for may be its.
            usual = self._usual.get(card, reading.unexplained_bytes)
            had = max(most, lease.memory_bytes)
            slack = attribution.slack_bytes(state)
            left = attribution.still_held_bytes(holder, reading, usual, had, slack)
        return Left(memory_bytes=left, told=self._told(holder, reading, left) if left else "")

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """A set of which some are gpus without a known device is left as it is: nothing is known."""
        if all(self._infos[card].kind == "cpu" for card in cards if card in self._infos):
            return {"CUDA_VISIBLE_DEVICES": ""}
        devices = [
            device
            for card in cards
            if (info := self._infos.get(card)) is not None and (device := info.device)
        ]
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}

    def close(self) -> None:
        for provider, _ in self._providers:
            provider.close()

    # Reading

    def _has_gpus(self) -> bool:
        return any(info.provider == "nvml" for info in self._infos.values())

    def _is_worth_it(self) -> bool:
        return self._has_gpus() or any(
            card.leases or card.used_bytes for card in self._cards().values()
        )

    async def _read(self, only: Set[str] | None) -> dict[str, Reading]:
        """Readings of all cards, or of all those whose providers have one of `only`; remembers what they
        say of holders."""
        cards = dict(self._cards())
        pids, alive = await self._pids(cards)
        away = frozenset(
            card.id
            for card in cards.values()
            if card.vm is not None and (card.vm.attached or not card.leases)
        )
        readings: dict[str, Reading] = {}
        for provider, aside in self._providers:
            mine = {info.id for info in self._infos.values() if _source(info) == provider.name}
            if not mine or (only is not None and not mine & only):
                continue
            for card, raw in (await self._ask(provider, aside, pids, away)).items():
                if card in mine:
                    state = cards.get(card)
                    readings[card] = self._learn(raw, state, alive) if state else raw
        return readings

    async def _ask(
        self,
        provider: Provider,
        aside: Aside,
        pids: Mapping[str, frozenset[int]],
        away: frozenset[str],
    ) -> dict[str, Reading]:
        def read() -> dict[str, Reading]:
            provider.let_go(away)
            return provider.read(pids)

        try:
            readings = await aside.call(read)
        except Hangs as error:
            if provider.name not in self._silent:
                LOG.error("cards cannot be read", extra={"problem": str(error)})
            self._silent.add(provider.name)
            return {}
        self._silent.discard(provider.name)
        return readings

    def _learn(self, raw: Reading, card: Card, alive: Mapping[str, frozenset[int]]) -> Reading:
        usual = self._usual.get(card.id, raw.unexplained_bytes)
        reading = attribution.explained(raw, card, alive, usual)
        for holder, used in reading.of.items():
            most = self._most.setdefault(holder, {})
            most[card.id] = max(most.get(card.id, 0), used)
        leaving = any(lease.returning for lease in card.leases)
        if not leaving and not attribution.hidden_holders(raw, card, alive):
            # The smaller of two in a row: of one that just died a reading may still show a part.
            self._usual[card.id] = min(
                self._usual_next.get(card.id, raw.unexplained_bytes), raw.unexplained_bytes
            )
            self._usual_next[card.id] = raw.unexplained_bytes
        return reading

    async def _pids(
        self, cards: Mapping[str, Card]
    ) -> tuple[dict[str, frozenset[int]], dict[str, frozenset[int]]]:
        """The pids of every holder: all it was seen with and that are nobody else's by now; and the live
        ones alone."""
        leases = {lease.holder: lease for card in cards.values() for lease in card.leases}
        self._known = {name: known for name, known in self._known.items() if name in leases}
        self._most = {name: most for name, most in self._most.items() if name in leases}
        if not leases:
            return {}, {}
        named = {holder: lease.process for holder, lease in leases.items() if lease.kind == "named"}
        census = await self._census(leases.keys() - named.keys(), named)
        pids: dict[str, frozenset[int]] = {}
        alive: dict[str, frozenset[int]] = {}
        for holder in leases:
            found = census.launches.get(holder) or census.leases.get(holder) or frozenset[int]()
            known = self._known.setdefault(holder, {})
            for pid in found:
                process = census.processes.get(pid)
                if process is not None:
                    known[pid] = process.start_time
                else:
                    known.setdefault(pid, 0)
            alive[holder] = frozenset(pid for pid in found if pid in census.processes)
            pids[holder] = frozenset(
                pid
                for pid, began in known.items()
                if (now := census.processes.get(pid)) is None or now.start_time == began
            )
        return pids, alive

    def _take(self, reading: Reading) -> None:
        """Remembers a reading, and tells it when the books say something else."""
        card = self._cards().get(reading.card)
        before = self._last.get(reading.card)
        self._last[reading.card] = reading
        if card is None:
            return
        lasting = replace(reading, strangers=attribution.lasting(before, reading))
        loop = asyncio.get_running_loop()
        if len(lasting.strangers) < len(reading.strangers):
            # Two readings make a stowaway; the second need not wait for its time.
            loop.call_later(TOLD_EVERY_S, self.look_soon)
        rest_s = self._told_at.get(card.id, -TOLD_EVERY_S) + TOLD_EVERY_S - loop.time()
        if rest_s > 0:
            loop.call_later(rest_s, self.look_soon)
            return
        self._told_at[card.id] = loop.time()
        known = {stowaway.pid for stowaway in card.stowaways}
        for seen in lasting.strangers:
            if seen.pid not in known:
                LOG.warning(
                    "a process uses a card without a lease",
                    extra={
                        "card": card.id,
                        "pid": seen.pid,
                        "program": seen.name,
                        "memory_bytes": seen.memory_bytes,
                    },
                )
        self._tell(lasting)

    def _told(self, holder: str, reading: Reading, left: int) -> str:
        """What is still there, for a person."""
        tied = reading.of.get(holder, 0)
        parts: list[str] = []
        if tied:
            pids = ", ".join(str(pid) for pid in sorted(self._known.get(holder, {})))
            whose = f"its processes ({pids})" if pids else "processes that count to it"
            parts.append(f"{whose} still hold {tied // MIB} MiB of {reading.card}")
        if left > tied:
            parts.append(
                f"{(left - tied) // MIB} MiB of {reading.card} are not back, and the driver shows no"
                " process that holds them"
            )
        return "; ".join(parts)


def counted_on(cards: Mapping[str, Card]) -> dict[str, tuple[str, ...]]:
    """On which cards without a driver's figures each holder's RAM counts: those it has leases on. What a
    parked engine keeps in RAM counts on `cpu` alone, whatever its lease elsewhere still says."""
    on: dict[str, list[str]] = {}
    in_ram: set[str] = set()
    for card in sorted(cards.values(), key=lambda one: one.id):
        for lease in card.leases:
            if card.provider != "nvml":
                on.setdefault(lease.holder, []).append(card.id)
            if card.id == CPU and lease.kind == "parked":
                in_ram.add(lease.holder)
    return {holder: (CPU,) if holder in in_ram else tuple(names) for holder, names in on.items()}


def _source(info: CardInfo) -> str:
    """The provider that reads a card: one reads all that no driver tells of."""
    return "nvml" if info.provider == "nvml" else "static"


def _lease(card: Card, holder: str) -> Lease | None:
    return next((lease for lease in card.leases if lease.holder == holder), None)
