"""Decides which adapters this gateway counts on in which replica, and whether it may do so without asking.

A pin is listed in every beacon from before its agent is asked until it is given up; it is trusted while the
agent is known to have heard of it a short while ago. Counting a request under a pin is one call with
choosing it. It must not send anything or ask a clock: times are seconds of the gateway's own.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from schemas.beacons import Pin

TRUST_S: Final = 20.0
"""A pin is trusted so long after the ask, or the beacon, its agent is known to have heard. The agent keeps it
for 30 s; the difference is for what is on its way."""

LINGER_S: Final = 30.0
"""A pin nobody uses is listed so long after its last use."""

REMEMBERED_S: Final = 30.0
"""When a beacon was sent is remembered so long: no older echo could make a pin trusted."""


@dataclass(slots=True)
class Held:
    """One adapter in one replica.

    `uses` counts requests that have it, from before they ask; `asks` open questions to its agent.
    `engine_name` is what the engine serves it under, empty until the agent said so. `proven_s` is when the
    newest ask or beacon that the agent heard was sent.
    """

    node: str
    replica: str
    pin: str
    last_use_s: float
    uses: int = 0
    asks: int = 0
    engine_name: str = ""
    proven_s: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self.uses and not self.asks

    def proven(self, at_s: float) -> None:
        """Its agent heard of the pin from what was sent then."""
        self.proven_s = at_s if self.proven_s is None else max(self.proven_s, at_s)

    def is_trusted(self, now_s: float) -> bool:
        """Whether its agent is known to keep it loaded now."""
        proven_s = self.proven_s
        return bool(self.engine_name) and proven_s is not None and now_s - proven_s < TRUST_S


@dataclass(slots=True)
class Pins:
    """Every pin of one gateway, by replica and pin name, and when its last beacons were sent.

    `changes` is another number whenever what is loaded or asked for may be: what was found among pins before may not
    be so any more. Uses, and what beacons prove, are not counted.
    """

    changes: int = 0
    _held: dict[str, dict[str, Held]] = field(default_factory=dict)
    _sent_s: dict[int, float] = field(default_factory=dict)
    _asks: dict[str, int] = field(default_factory=dict)  # open questions by replica

    # -- looking ---------------------------------------------------------------------------------

    def get(self, replica: str, pin: str) -> Held | None:
        of_replica = self._held.get(replica)
        return None if of_replica is None else of_replica.get(pin)

    def __len__(self) -> int:
        return sum(len(of_replica) for of_replica in self._held.values())

    def trusted(self, now_s: float) -> int:
        """How many a request could be sent under without asking."""
        return sum(1 for held in self._all() if held.is_trusted(now_s))

    def besides(self, replica: str, told: Collection[str]) -> int:
        """How many adapters this gateway has there, or is having loaded, besides those that `told` names."""
        of_replica = self._held.get(replica, {}).values()
        return sum(
            1 for held in of_replica if (held.asks or held.engine_name) and held.pin not in told
        )

    def is_asked(self, replica: str) -> bool:
        """Whether an agent is being asked for an adapter there."""
        return replica in self._asks

    # -- uses ------------------------------------------------------------------------------------

    def begin(self, node: str, replica: str, pin: str, now_s: float) -> Held:
        """Counts one request under the pin, which is made if there is none."""
        held = self._made(node, replica, pin, now_s)
        held.uses += 1
        return held

    def end(self, held: Held, now_s: float) -> None:
        """Ends what `begin` counted; a pin that was forgotten meanwhile is let be."""
        held.uses -= 1
        held.last_use_s = now_s
        if not held.engine_name:
            self._drop_if_void(held)

    # -- asks ------------------------------------------------------------------------------------

    def asking(self, node: str, replica: str, pin: str, now_s: float) -> Held:
        """The agent is about to be asked: beacons list the pin from now on."""
        held = self._made(node, replica, pin, now_s)
        held.asks += 1
        self.changes += 1
        self._asks[replica] = self._asks.get(replica, 0) + 1
        return held

    def granted(self, held: Held, engine_name: str, asked_s: float) -> None:
        """The agent said it is loaded, to a question of `asked_s`. Called before `asked`."""
        self.changes += 1
        held.engine_name = engine_name
        held.proven(asked_s)

    def asked(self, held: Held, now_s: float) -> None:
        """The question is over, whatever came of it."""
        self.changes += 1
        held.asks -= 1
        left = self._asks[held.replica] - 1
        if left:
            self._asks[held.replica] = left
        else:
            del self._asks[held.replica]
        if held.engine_name and held.is_idle:
            # The load nobody waits for any more was wanted a moment ago: keep it for the next who asks.
            held.last_use_s = now_s
        self._drop_if_void(held)

    def revoke(self, replica: str, pin: str) -> None:
        """It is not loaded there (any more): whoever wants it must ask."""
        self.changes += 1
        held = self.get(replica, pin)
        if held is not None:
            held.engine_name = ""
            held.proven_s = None
            self._drop_if_void(held)

    # -- beacons ---------------------------------------------------------------------------------

    def tell(self, n: int, now_s: float) -> dict[str, dict[str, Pin]]:
        """The pins that beacon `n`, sent now, lists; those nobody used for long are given up by it."""
        while self._sent_s:
            oldest = next(iter(self._sent_s))
            if now_s - self._sent_s[oldest] <= REMEMBERED_S:
                break
            del self._sent_s[oldest]
        self._sent_s[n] = now_s
        told: dict[str, dict[str, Pin]] = {}
        for held in list(self._all()):
            if held.is_idle and now_s - held.last_use_s >= LINGER_S:
                self._drop(held)
                continue
            idle_s = 0.0 if held.uses else round(max(0.0, now_s - held.last_use_s), 3)
            told.setdefault(held.replica, {})[held.pin] = Pin(held.uses, idle_s)
        return told

    def heard(self, node: str, n: int) -> None:
        """The agent of `node` says that `n` is the last beacon it heard of this gateway.

        A beacon from before the ask does not list the pin, and proves less than the ask did: the later of the
        two counts.
        """
        sent_s = self._sent_s.get(n)
        if sent_s is None:
            return
        for held in self._all():
            if held.node == node:
                held.proven(sent_s)

    def recall(self, replica: str, pins: Iterable[str]) -> bool:
        """The agent asks pins back: those nobody uses are given up. Whether any was."""
        dropped = False
        for pin in pins:
            held = self.get(replica, pin)
            if held is not None and held.is_idle:
                self._drop(held)
                dropped = True
        return dropped

    # -- endings ---------------------------------------------------------------------------------

    def forget_replica(self, replica: str) -> None:
        """The launch is over, or was parked: nothing is known of what is loaded in it."""
        self.changes += 1
        for held in self._held.pop(replica, {}).values():
            held.engine_name = ""
            held.proven_s = None

    def clear(self) -> None:
        """This gateway leaves."""
        self.changes += 1
        self._held.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _all(self) -> Iterable[Held]:
        for of_replica in self._held.values():
            yield from of_replica.values()

    def _made(self, node: str, replica: str, pin: str, now_s: float) -> Held:
        of_replica = self._held.get(replica)
        if of_replica is None:
            of_replica = self._held[replica] = {}
        held = of_replica.get(pin)
        if held is None:
            held = of_replica[pin] = Held(node=node, replica=replica, pin=pin, last_use_s=now_s)
        return held

    def _drop_if_void(self, held: Held) -> None:
        """A pin on what is not loaded says nothing once nobody asks for it."""
        if not held.engine_name and held.is_idle:
            self._drop(held)

    def _drop(self, held: Held) -> None:
        of_replica = self._held.get(held.replica)
        if of_replica is None or of_replica.get(held.pin) is not held:
            return
        self.changes += 1
        del of_replica[held.pin]
        if not of_replica:
            del self._held[held.replica]
