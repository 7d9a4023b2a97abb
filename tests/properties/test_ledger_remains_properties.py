"""Nothing that gateways told of each other stays counted once it is over, whatever was lost, late, or ended in between."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Refused
from schemas.beacons import LimitsBeacon
from schemas.key import Key
from tests.support.gateway_keys import a_key

GATEWAYS = 3


class Yard:
    """Three gateways that share keys, each in one of its lives; a life may end with or without a word."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now_s = 1000.0
        self.keys = [
            a_key(
                letter * 12,
                rpm=dice.randint(1, 30),
                tpm=dice.randint(1, 3000),
                parallel=dice.randint(1, 9),
            )
            for letter in "ab"
        ]
        self.lives = 0
        self.ledgers: dict[str, Ledger] = {}
        self.running: list[tuple[Ledger, Key, int]] = []
        self.under_way: list[tuple[Ledger, bytes]] = []
        for _ in range(GATEWAYS):
            self.begin()

    def begin(self) -> None:
        self.lives += 1
        self.ledgers[f"g{self.lives}"] = Ledger(f"g{self.lives}", f"{self.lives:04d}")

    def tell(self, of: Ledger, *, leaving: bool = False, lost: float = 0.3) -> None:
        count = sum(ledger is of for ledger, _, _ in self.running)
        told = of.tell(self.now_s, {"r": count} if count else {}, leaving=leaving)
        body = msgspec.json.encode(told)
        self.under_way += [
            (to, body)
            for to in self.ledgers.values()
            if to is not of and self.dice.random() >= lost
        ]

    def deliver(self, most: int) -> None:
        self.dice.shuffle(self.under_way)
        now, self.under_way = self.under_way[:most], self.under_way[most:]
        for to, body in now:
            to.hear(msgspec.json.decode(body, type=LimitsBeacon), self.now_s)

    def step(self) -> None:
        dice, chance = self.dice, self.dice.random()
        self.now_s += dice.random() * dice.choice((0.01, 0.5, 2.0, 20.0))
        name = dice.choice(list(self.ledgers))
        ledger = self.ledgers[name]
        if chance < 0.4:
            key = dice.choice(self.keys)
            held = ledger.admit(key, dice.randint(0, 500), self.now_s)
            if not isinstance(held, Refused):
                self.running.append((ledger, key, held))
        elif chance < 0.6 and self.running:
            of, key, held = self.running.pop(dice.randrange(len(self.running)))
            of.end(key, held, dice.randint(0, 600), self.now_s)
        elif chance < 0.8:
            self.tell(ledger)
        elif chance < 0.95:
            self.deliver(3)
        elif chance < 0.98:
            ledger.look(self.now_s, connected=dice.random() < 0.8)
        else:
            del self.ledgers[name]
            if dice.random() < 0.5:
                self.tell(ledger, leaving=True)
            self.running = [r for r in self.running if r[0] is not ledger]
            self.begin()

    def settle(self) -> None:
        """All requests end, everybody hears everybody, and then again after longer than anything counts."""
        for ledger, key, held in self.running:
            ledger.end(key, held, 1, self.now_s)
        self.running = []
        for pause_s in (1.0, 1.0, 1.0, 1.0, 1.0, 130.0, 1.0, 1.0):
            self.now_s += pause_s
            for ledger in self.ledgers.values():
                self.tell(ledger, lost=0.0)
            self.deliver(len(self.under_way))
            for ledger in self.ledgers.values():
                ledger.look(self.now_s, connected=True)
                ledger.forget((), self.now_s)


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_what_is_over_is_counted_nowhere(seed: int, steps: int) -> None:
    yard = Yard(random.Random(seed))
    for _ in range(steps):
        yard.step()
    yard.settle()
    for ledger in yard.ledgers.values():
        assert ledger.gateways == GATEWAYS
        assert not ledger.inflight()
        assert not ledger.tell(yard.now_s, {}).keys
        for key in yard.keys:
            # All of each limit is there again, for one of them alone.
            ledger.gateways = 1
            assert ledger.admit(key, 1, yard.now_s) == 1
            read = ledger.read(key, yard.now_s)
            assert (read.requests, read.tokens) == (1, 1)
            more = [ledger.admit(key, 0, yard.now_s) for _ in range(min(key.parallel, key.rpm) - 1)]
            assert not [told for told in more if isinstance(told, Refused)]
