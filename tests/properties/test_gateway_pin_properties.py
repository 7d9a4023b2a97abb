"""Pins as sentences: what a gateway trusts, its agent keeps, whatever beacons were late or lost.

The agent here follows the contract word for word (docs/architecture.md, "Adapters" 3 to 5) and evicts the moment it
may; time passes for both alike, messages take as long as hypothesis likes or never come.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.domain.pins import Held, Pins
from schemas.beacons import Pin

KEEP_S = 30.0
REPLICA = "r-1"
PINS = st.sampled_from(["a@00000001", "b@00000002"])

Listed = dict[str, dict[str, Pin]]


@dataclass
class Agent:
    """Keeps an adapter for `KEEP_S` from the last beacon that lists it, or the ask, until a beacon above the
    ask's number does not."""

    until_s: dict[str, float] = field(default_factory=dict)
    asked_n: dict[str, int] = field(default_factory=dict)
    heard: int = 0

    def ask(self, pin: str, n: int, now_s: float) -> None:
        self.until_s[pin] = now_s + KEEP_S
        self.asked_n[pin] = max(n, self.asked_n.get(pin, 0))

    def beacon(self, n: int, listed: Listed, now_s: float) -> None:
        if n <= self.heard:
            return
        self.heard = n
        mine = listed.get(REPLICA, {})
        for pin in list(self.until_s):
            if pin not in mine and n > self.asked_n.get(pin, 0):
                self.give_up(pin)
        for pin in mine:
            self.until_s[pin] = now_s + KEEP_S

    def give_up(self, pin: str) -> None:
        self.until_s.pop(pin, None)
        self.asked_n.pop(pin, None)

    def keeps(self, pin: str, now_s: float) -> bool:
        return self.until_s.get(pin, 0.0) > now_s


class PinMachine(RuleBasedStateMachine):
    """One gateway and one agent. `under_way` are beacons that were sent and not heard yet."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.n = 0
        self.pins = Pins()
        self.agent = Agent()
        self.running: list[Held] = []
        self.under_way: list[tuple[int, Listed]] = []
        self.answers: list[tuple[Held, float]] = []
        self.echoes: list[int] = []

    @rule(pin=PINS, late=st.booleans())
    def request(self, pin: str, late: bool) -> None:
        """A hit is one only while the agent keeps it; else the agent is asked, which answers later."""
        held = self.pins.begin("n1", REPLICA, pin, self.now_s)
        self.running.append(held)
        if held.is_trusted(self.now_s):
            assert self.agent.keeps(pin, self.now_s), f"a hit on {pin}, which may be evicted"
            return
        question = self.pins.asking("n1", REPLICA, pin, self.now_s)
        self.agent.ask(pin, self.n, self.now_s)
        if late:
            self.answers.append((question, self.now_s))
            return
        self.pins.granted(question, pin, self.now_s)
        self.pins.asked(question, self.now_s)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), lost=st.booleans())
    def answer(self, data: st.DataObject, lost: bool) -> None:
        at = data.draw(st.integers(0, len(self.answers) - 1))
        question, asked_s = self.answers.pop(at)
        if not lost:
            self.pins.granted(question, question.pin, asked_s)
        self.pins.asked(question, self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        self.pins.end(self.running.pop(at), self.now_s)

    @rule(seconds=st.sampled_from([0.01, 4.0, 12.0, 19.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(fate=st.sampled_from(["heard", "late", "lost"]))
    def send_beacon(self, fate: str) -> None:
        self.n += 1
        listed = self.pins.tell(self.n, self.now_s)
        if fate == "late":
            self.under_way.append((self.n, listed))
        elif fate == "heard":
            # One connection keeps their order.
            self.under_way.append((self.n, listed))
            for n, earlier in self.under_way:
                self.agent.beacon(n, earlier, self.now_s)
            self.under_way.clear()

    @precondition(lambda self: self.under_way)
    @rule()
    def hear_beacon(self) -> None:
        n, listed = self.under_way.pop(0)
        self.agent.beacon(n, listed, self.now_s)

    @rule(late=st.booleans())
    def echo(self, late: bool) -> None:
        if late:
            self.echoes.append(self.agent.heard)
        else:
            self.pins.heard("n1", self.agent.heard)

    @precondition(lambda self: self.echoes)
    @rule(data=st.data(), lost=st.booleans())
    def hear_echo(self, data: st.DataObject, lost: bool) -> None:
        at = data.draw(st.integers(0, len(self.echoes) - 1))
        n = self.echoes.pop(at)
        if not lost:
            self.pins.heard("n1", n)

    @rule(pin=PINS)
    def recall(self, pin: str) -> None:
        """What is recalled is given up in the next beacon or not at all; the agent waits for that."""
        self.pins.recall(REPLICA, [pin])

    @invariant()
    def what_is_trusted_is_kept(self) -> None:
        if not hasattr(self, "pins"):
            return
        for pin in ("a@00000001", "b@00000002"):
            held = self.pins.get(REPLICA, pin)
            if held is not None and held.is_trusted(self.now_s):
                assert self.agent.keeps(pin, self.now_s)

    @invariant()
    def requests_are_counted_once(self) -> None:
        if not hasattr(self, "pins"):
            return
        for held in self.running:
            assert held.uses == sum(1 for other in self.running if other is held)

    @invariant()
    def what_runs_is_in_the_next_beacon(self) -> None:
        if not hasattr(self, "pins"):
            return
        for held in self.running:
            assert self.pins.get(REPLICA, held.pin) is held


TestPins = PinMachine.TestCase
TestPins.settings = settings(stateful_step_count=50)
