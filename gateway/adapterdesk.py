"""Chooses the replica of a request for an adapter and counts it under its pin, in one step.

It holds what this gateway knows of adapters beside the table: its pins, and which agents are silent. Synchronous
and without I/O, like the gateway it belongs to: agents are asked by gateway/adapters.py, where policy is not.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gateway.clock import Clock
from gateway.domain import adapters
from gateway.domain.adapteranswers import at_fault, nobody_answers, not_loaded
from gateway.domain.adapters import BUSY, NOBODY, AdapterAtFault, Chosen, Known, NoneLeft, Shun
from gateway.domain.adaptertable import AdapterEntry, AdapterTable, Places
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.domain.pins import Held, Pins
from schemas.adapterasks import EnsureAnswer
from schemas.adapternames import engine_name
from schemas.replica import Replica
from schemas.slots import BadAdapter

HOW = Literal["hit", "joined", "loaded", "unpinned"]

SILENT_S: Final = 5.0
"""An agent that left a question open is not asked again for so long, unless it is heard of before."""

ABSENT_S: Final = 1.0
"""One that is not there at all: a new one is there in a moment."""


@dataclass(slots=True)
class Seeking:
    """What one request for an adapter has met so far, however many replicas it went to.

    `refused` are replicas that said no, with what they said. `later` are tried after all others: their agent is
    silent, or they have no place now. Times are seconds of the gateway's clock, None: not yet. `how` is the
    outcome: a load that this request began stays one, whatever its next answer says.
    """

    name: str
    request_id: str = ""
    refused: dict[str, BadAdapter] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    asked_s: dict[str, float] = field(default_factory=dict)
    unheard_since_s: float | None = None
    full_since_s: float | None = None
    began_load: bool = False
    how: HOW | None = None

    def begin_anew(self) -> None:
        """It waited for its model meanwhile: who was silent or full then is asked like any other."""
        self.later.clear()
        self.unheard_since_s = None

    def refused_by(self, replica: str, why: BadAdapter) -> None:
        """It is not tried again there; whatever was loading there was not this request's after all."""
        self.refused[replica] = why
        self.began_load = False

    def put_off(self, replica: str, others: int) -> bool:
        """Tries another one first. Whether every one was put off by now: then it is time to pause."""
        everybody = replica in self.later or len(self.later) >= others
        if everybody:
            self.later.clear()
        self.later.add(replica)
        return everybody


@dataclass(slots=True)
class Adapted:
    """What a run for an adapter needs to have it loaded. `others`: how many more replicas may be tried. `ahead`: its
    agent was asked before anybody waits for the answer; whether for this request first, and what will come."""

    entry: AdapterEntry
    pin: str
    seeking: Seeking
    others: int
    ahead: "tuple[bool, asyncio.Future[EnsureAnswer | None]] | None" = None

    def known_name(self, held: Held, places: Places | None) -> str:
        """What its engine is known to serve it under, by the log or by its agent's last word; empty: it is not."""
        slot = None if places is None else places.loaded.get(self.pin)
        if slot is None or slot.leaving:
            return held.engine_name
        return slot.engine_name or engine_name(slot.adapter, slot.version)


_MOST_HOLDERS: Final = 4096
"""Of so many routes it is remembered who alone has their adapter."""


class _Holder:
    """The one replica of `route` that has its adapter, as long as nothing changes; `held` is our pin there."""

    __slots__ = ("changes", "held", "replica", "route")

    def __init__(self, route: Route, changes: int, replica: Replica, held: Held) -> None:
        self.route = route
        self.changes = changes
        self.replica = replica
        self.held = held


class AdapterDesk:
    """The pins of one gateway, and its choices among replicas."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.pins = Pins()
        self._silent_until_s: dict[str, float] = {}
        # By the identity of their route, which is another one once the table has changed.
        self._holders: dict[int, _Holder] = {}

    # -- requests --------------------------------------------------------------------------------

    def hit(
        self, route: Route, table: AdapterTable, inflight: Mapping[str, int]
    ) -> tuple[Replica, Held] | None:
        """The replica that `choose` chooses for a request that has met nothing so far, counted under its pin there,
        when no other one has the adapter and nobody need be asked; else None.

        Nearly every request for an adapter is one of these, so who that is, is kept. Only with a connection.
        """
        if self._silent_until_s:
            return None
        pins, now_s = self.pins, self._clock.now_s()
        kept = self._holders.get(id(route))
        if kept is None or kept.route is not route or kept.changes != pins.changes:
            assert route.adapter is not None, "only a route to an adapter has holders"
            pin = table.pin(route.adapter)
            found = adapters.only_holder(
                route.candidates,
                [pins.get(r.id, pin) for r in route.candidates],
                pin=pin,
                places=table.places,
                now_s=now_s,
            )
            if found is None:
                return None
            if len(self._holders) >= _MOST_HOLDERS:
                self._holders.clear()
            kept = self._holders[id(route)] = _Holder(route, pins.changes, *found)
        replica, held = kept.replica, kept.held
        if inflight.get(replica.id, 0) > BUSY or not held.is_trusted(now_s):
            return None
        held.uses += 1
        return replica, held

    def choose(
        self,
        entry: AdapterEntry,
        candidates: tuple[Replica, ...],
        seeking: Seeking,
        table: AdapterTable,
        inflight: Mapping[str, int],
        *,
        connected: bool,
    ) -> tuple[Replica, Held, Adapted] | Answer:
        """A replica, with this request counted under its pin there; or why there is none.

        1. without a connection nobody can be asked: only replicas that have it count
        2. silent agents come last, unless what they have loaded is known
        3. then gateway/domain/adapters.py chooses
        """
        now_s = self._clock.now_s()
        pin = table.pin(entry)
        ours = [held for r in candidates if (held := self.pins.get(r.id, pin)) is not None]
        known = Known(
            pinned=[h.replica for h in ours if h.is_trusted(now_s)],
            held=[h.replica for h in ours if h.engine_name or h.asks],
            besides=self.pins.besides,
        )
        chosen = self._choose(entry, pin, candidates, known, seeking, table, inflight, connected)
        if isinstance(chosen, Answer):
            return chosen
        match chosen:
            case Chosen():
                replica = chosen.replica
                begun = self.pins.begin(replica.node, replica.id, pin, now_s)
                return replica, begun, Adapted(entry, pin, seeking, chosen.others)
            case AdapterAtFault(bad=bad):
                return at_fault(seeking.name, bad.reason)
            case NoneLeft(bad=bad):
                if bad is None:
                    return nobody_answers(seeking.name)
                return not_loaded(seeking.name, bad.reason, until=bad.until, now=self._clock.now())

    def _choose(
        self,
        entry: AdapterEntry,
        pin: str,
        candidates: tuple[Replica, ...],
        known: Known,
        seeking: Seeking,
        table: AdapterTable,
        inflight: Mapping[str, int],
        connected: bool,
    ) -> Chosen | AdapterAtFault | NoneLeft | Answer:
        """As in `choose`, of what is `known` of our pins in the candidates; nothing is counted."""
        later = seeking.later
        if not connected:  # 1
            candidates = tuple(r for r in candidates if self._is_loaded(r, pin, table))
            if not candidates:
                return nobody_answers(seeking.name)
        elif self._silent_until_s:  # 2
            shunned = later | {
                r.id
                for r in candidates
                if self.is_silent(r.node) and not self._is_loaded(r, pin, table)
            }
            # With none left they take turns, as if nothing were known.
            if any(r.id not in shunned for r in candidates):
                later = shunned
        shun = NOBODY
        if later or seeking.refused:
            shun = Shun(refused=seeking.refused, later=later)
        return adapters.choose(  # 3
            candidates,
            adapter=entry.adapter.name,
            pin=pin,
            places=table.places,
            known=known,
            inflight=inflight,
            now=self._clock.now(),
            shun=shun,
        )

    def _is_loaded(self, replica: Replica, pin: str, table: AdapterTable) -> bool:
        """Whether it is known to be there, by its agent's last word or by the log."""
        known = self.pins.get(replica.id, pin)
        return (known is not None and bool(known.engine_name)) or table.serves(replica.id, pin)

    # -- agents ----------------------------------------------------------------------------------

    def is_silent(self, node: str) -> bool:
        """Whether its agent left a question open a moment ago."""
        until_s = self._silent_until_s.get(node)
        if until_s is None:
            return False
        if until_s > self._clock.now_s():
            return True
        del self._silent_until_s[node]
        return False

    def unheard(self, node: str, waited_s: float) -> None:
        """Its agent did not answer for so long; at once means that there is none."""
        silent_s = SILENT_S if waited_s > ABSENT_S else ABSENT_S
        self._silent_until_s[node] = self._clock.now_s() + silent_s

    def heard(self, node: str) -> None:
        """Its agent is there."""
        self._silent_until_s.pop(node, None)

    # -- changes of the table --------------------------------------------------------------------

    def places_changed(self, replica: str, before: Places | None, after: Places | None) -> None:
        """What was loaded by the log and is not any more, or is leaving, is nobody's hit.

        What is only not told yet stays: events follow the agent's answers.
        """
        for pin in () if before is None else before.loaded:
            if after is None or not after.serves(pin):
                self.pins.revoke(replica, pin)

    def replica_over(self, replica: str) -> None:
        """The launch is over, or parked."""
        self.pins.forget_replica(replica)
