"""What several gateways admit of one key together, however beacons are delayed and lost between them."""

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Refused
from schemas.beacons import LimitsBeacon
from schemas.key import Key

AT = datetime(2026, 3, 1, tzinfo=UTC)


def a_key(*, rpm: int = 0, tpm: int = 0, parallel: int = 0) -> Key:
    return Key(
        id="abcdefghijkl",
        name="k",
        hash="0" * 64,
        created_at=AT,
        rpm=rpm,
        tpm=tpm,
        parallel=parallel,
    )


@dataclass
class Network:
    """Ledgers on one clock, and beacons under way between them: each arrives late, twice, out of order or never."""

    dice: random.Random
    key: Key
    longest_delay_s: float
    lost: float
    now_s: float = 1000.0
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    under_way: list[tuple[float, int, str, bytes]] = field(default_factory=list)
    admitted: list[tuple[float, int]] = field(default_factory=list)
    running: list[tuple[float, int, str, int]] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    most_running: int = 0
    sent: int = 0
    lives: int = 0

    def join(self, name: str) -> None:
        """A gateway that has introduced itself, as one does before its port opens."""
        self.ledgers[name] = Ledger(name, f"{len(self.ledgers):04d}-{name}")
        for _ in range(3):
            for of in self.ledgers:
                told = msgspec.json.encode(self.ledgers[of].tell(self.now_s, {}))
                for to in self.ledgers:
                    if to != of:
                        self.ledgers[to].hear(
                            msgspec.json.decode(told, type=LimitsBeacon), self.now_s
                        )

    def introduce(self, name: str) -> None:
        """A gateway begins as gateway/limitsbeacon.py has it begin."""
        self.lives += 1
        self.ledgers[name] = Ledger(name, f"{self.lives:04d}-{name}")
        self.tell(name)
        self.advance(0.1)
        self.tell(name)

    def leave(self, name: str, *, killed: bool) -> None:
        """A gateway ends; one that is killed says nothing, and its requests end with it."""
        if not killed:
            while any(of == name for _, _, of, _ in self.running):
                self.advance(0.05)
            self.tell(name, leaving=True)
        self.running = [r for r in self.running if r[2] != name]
        heapq.heapify(self.running)
        del self.ledgers[name]

    def tell(self, name: str, *, leaving: bool = False) -> None:
        body = msgspec.json.encode(self.ledgers[name].tell(self.now_s, {}, leaving=leaving))
        for to in self.ledgers:
            if to != name and self.dice.random() >= self.lost:
                at_s = self.now_s + self.dice.random() * self.longest_delay_s
                self.sent += 1
                heapq.heappush(self.under_way, (at_s, self.sent, to, body))

    def arrive(self, name: str, tokens: int, used: int, lasts_s: float) -> None:
        held = self.ledgers[name].admit(self.key, tokens, self.now_s)
        if isinstance(held, Refused):
            return
        self.admitted.append((self.now_s, held))
        self.sent += 1
        ends = (self.now_s + lasts_s, self.sent, name, min(used, held))
        heapq.heappush(self.running, ends)
        self.held[self.sent] = held
        self.most_running = max(self.most_running, len(self.running))

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while True:
            beacon_s = self.under_way[0][0] if self.under_way else until_s
            end_s = self.running[0][0] if self.running else until_s
            if min(beacon_s, end_s) >= until_s:
                break
            if beacon_s <= end_s:
                self.now_s, _, to, body = heapq.heappop(self.under_way)
                ledger = self.ledgers.get(to)
                if ledger is not None and ledger.hear(
                    msgspec.json.decode(body, type=LimitsBeacon), self.now_s
                ):
                    self.tell(to)
            else:
                self.now_s, number, name, used = heapq.heappop(self.running)
                self.ledgers[name].end(self.key, self.held[number], used, self.now_s)
        self.now_s = until_s

    def most_in_a_minute(self) -> int:
        times = [at_s for at_s, _ in self.admitted]
        return max(
            (bisect_right(times, t) - bisect_right(times, t - 60.0) for t in times), default=0
        )


def run_for(
    network: Network, seconds: float, *, rate: float, used: float, lasts_s: float
) -> Iterator[str]:
    """Random arrivals, most of them at one gateway at a time; every gateway tells each second, and when pressed."""
    end_s = network.now_s + seconds
    dice = network.dice
    names = list(network.ledgers)
    due_s = {name: network.now_s + dice.random() for name in names}
    favourite = dice.choice(names)
    while network.now_s < end_s:
        network.advance(dice.expovariate(rate))
        for name in names:
            ledger = network.ledgers[name]
            if network.now_s >= due_s[name] or (ledger.pressed and dice.random() < 0.5):
                due_s[name] = network.now_s + 1.0
                network.tell(name)
        if dice.random() < 0.05:
            favourite = dice.choice(names)
        name = favourite if dice.random() < 0.7 else dice.choice(names)
        for _ in range(dice.choice((1, 1, 1, 5, 60))):
            tokens = dice.randint(0, 50)
            network.arrive(name, tokens, round(tokens * used), dice.random() * lasts_s)
        yield name


gateways = st.integers(1, 4)
seeds = st.integers(0, 2**32)
delays = st.sampled_from((0.0, 0.005, 0.3, 2.0, 20.0))
losses = st.sampled_from((0.0, 0.1, 0.5, 0.9))


@given(seeds, gateways, st.integers(1, 90), delays, losses, st.sampled_from((0.5, 5.0)))
def test_all_gateways_admit_the_limit_and_one_for_each_other_gateway(
    seed: int, count: int, rpm: int, delay: float, lost: float, rate: float
) -> None:
    network = Network(random.Random(seed), a_key(rpm=rpm), delay, lost)
    for i in range(count):
        network.join(f"g{i}")
    for _ in run_for(network, 100.0, rate=rate, used=1.0, lasts_s=1.0):
        pass
    assert network.most_in_a_minute() <= rpm + count - 1


@given(seeds, gateways, st.integers(1, 12), delays, losses)
def test_all_gateways_run_the_limit_and_one_for_each_other_gateway(
    seed: int, count: int, parallel: int, delay: float, lost: float
) -> None:
    network = Network(random.Random(seed), a_key(parallel=parallel), delay, lost)
    for i in range(count):
        network.join(f"g{i}")
    for _ in run_for(network, 40.0, rate=5.0, used=1.0, lasts_s=8.0):
        pass
    assert network.most_running <= parallel + count - 1


@given(seeds, gateways, st.integers(50, 2000), delays, losses)
def test_all_gateways_charge_the_limit_and_one_request_for_each_other_gateway(
    seed: int, count: int, tpm: int, delay: float, lost: float
) -> None:
    """Requests that use all they reserved: what was admitted in a minute is what was charged in it."""
    network = Network(random.Random(seed), a_key(tpm=tpm), delay, lost)
    for i in range(count):
        network.join(f"g{i}")
    for _ in run_for(network, 100.0, rate=3.0, used=1.0, lasts_s=0.0):
        pass
    times = [at_s for at_s, _ in network.admitted]
    for at_s in times:
        first = bisect_left(times, at_s)
        in_a_minute = sum(held for t, held in network.admitted[first:] if t < at_s + 60.0)
        assert in_a_minute <= tpm + (count - 1) * 50


@given(seeds, st.integers(1, 60), st.booleans())
def test_gateways_that_come_and_go_are_held_to_the_limit_together(
    seed: int, rpm: int, kills: bool
) -> None:
    """Joins, clean ends and, in some runs, kills, while all hear each other within 50 ms.

    One request more for each other gateway there was at once, and for each that was killed the part of the limit it
    had not told of: a half of it at most, for there was another.
    """
    dice = random.Random(seed)
    network = Network(dice, a_key(rpm=rpm), 0.05, 0.0)
    network.introduce("g0")
    network.introduce("g1")
    due_s: dict[str, float] = {}
    killed, most, end_s = 0, 0, network.now_s + 75.0
    while network.now_s < end_s:
        network.advance(dice.expovariate(8.0))
        chance = dice.random()
        names = list(network.ledgers)
        if chance < 0.01 and len(names) < 5:
            network.introduce(f"g{network.lives}")
        elif chance < 0.02 and len(names) > 2:
            name = dice.choice(names)
            network.leave(name, killed=kills)
            killed += kills
        for name, ledger in list(network.ledgers.items()):
            if network.now_s >= due_s.get(name, 0.0) or ledger.pressed:
                due_s[name] = network.now_s + 1.0
                ledger.look(network.now_s, connected=True)
                network.tell(name)
        most = max(most, len(network.ledgers))
        name = dice.choice(list(network.ledgers))
        for _ in range(dice.choice((1, 1, 1, 5, 20))):
            network.arrive(name, 0, 0, dice.random())
    over = network.most_in_a_minute() - rpm
    assert over <= most - 1 + killed * (rpm // 2 + 1)
