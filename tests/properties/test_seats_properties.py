"""What several gateways let one replica run together, however beacons are delayed and lost between them."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.ledger import Ledger
from schemas.beacons import LimitsBeacon

R = "r-1"


class Yard:
    """Gateways that know each other; a beacon is heard late, or never."""

    def __init__(self, count: int, limit: int) -> None:
        self.limit = limit
        self.running = [0] * count
        self.ledgers = [Ledger(f"g{n}", f"{n:04d}") for n in range(count)]
        self.under_way: list[tuple[int, LimitsBeacon]] = []
        for _ in range(3):
            for n in range(count):
                self.tell(n)
                self.hear_all()

    def tell(self, n: int) -> None:
        inflight = {R: self.running[n]} if self.running[n] else {}
        text = msgspec.json.encode(self.ledgers[n].tell(100.0, inflight))
        beacon = msgspec.json.decode(text, type=LimitsBeacon)
        self.under_way += [(to, beacon) for to in range(len(self.ledgers)) if to != n]

    def hear_all(self) -> None:
        while self.under_way:
            self.hear(0)

    def hear(self, index: int) -> None:
        to, beacon = self.under_way.pop(index)
        self.ledgers[to].hear(beacon, 100.0)

    def try_one(self, n: int) -> bool:
        free = self.ledgers[n].has_seat(R, self.running[n], self.limit)
        self.running[n] += free
        return free


@given(
    count=st.integers(1, 5),
    limit=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    lost=st.sampled_from([0.0, 0.3, 0.9]),
)
@settings(deadline=None, max_examples=150)
def test_gateways_together_run_at_most_the_limit_and_one_more_for_each_other_gateway(
    count: int, limit: int, seed: int, lost: float
) -> None:
    yard = Yard(count, limit)
    dice = random.Random(seed)
    for _ in range(300):
        n = dice.randrange(count)
        match dice.randrange(5):
            case 0:
                yard.tell(n)
            case 1 if yard.under_way:
                index = dice.randrange(len(yard.under_way))
                if dice.random() < lost:
                    yard.under_way.pop(index)
                else:
                    yard.hear(index)
            case 2 if yard.running[n]:
                yard.running[n] -= 1
            case _:
                yard.try_one(n)
        assert sum(yard.running) <= limit + count - 1


@given(count=st.integers(1, 5), limit=st.integers(1, 20), favourite=st.integers(0, 4))
@settings(deadline=None)
def test_one_busy_gateway_gets_every_seat_as_the_others_hear_of_it(
    count: int, limit: int, favourite: int
) -> None:
    yard = Yard(count, limit)
    n = favourite % count
    for _ in range(200):
        if yard.running[n] == limit:
            break
        while yard.try_one(n):
            pass
        # Two rounds: the others hear of it, and say that they have.
        for of in [n, *range(count)]:
            yard.tell(of)
        yard.hear_all()
    assert yard.running[n] == limit
    # What is given back can be used by another as soon as that is told.
    other = (n + 1) % count
    yard.running[n] = 0
    for _ in range(2):
        for of in range(count):
            yard.tell(of)
        yard.hear_all()
    assert yard.try_one(other)
    yard.running[other] = 0
    for _ in range(3):
        for of in range(count):
            yard.tell(of)
        yard.hear_all()
    assert all(len(ledger._seats) == 0 for ledger in yard.ledgers)
