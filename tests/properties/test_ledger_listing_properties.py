"""A beacon says of every key what is so now, though only what may have changed since the last one is looked at."""

import random
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Refused
from schemas.beacons import KeyUse, LimitsBeacon
from schemas.key import Key
from tests.support.gateway_keys import a_key

KEYS = [a_key(id=f"{n:012d}", rpm=50, tpm=5000) for n in range(6)]


def all_anew(ledger: Ledger, now_s: float) -> dict[str, KeyUse]:
    """What a beacon of now would say if every book was looked at."""
    second = int(now_s)
    told = {
        id: book.tell(ledger._n, second, ledger._used_by_gone(id, second))
        for id, book in ledger._books.items()
    }
    return {id: use for id, use in told.items() if use is not None}


@dataclass
class Yard:
    dice: random.Random
    now_s: float = 1000.0
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    running: list[tuple[str, Key, int]] = field(default_factory=list)
    lives: int = 0

    def join(self) -> None:
        self.lives += 1
        name = f"{self.lives:04d}"
        self.ledgers[name] = Ledger(name, name)

    def tell(self, name: str, *, leaving: bool = False) -> None:
        ledger = self.ledgers[name]
        beacon = ledger.tell(self.now_s, {}, leaving=leaving)
        assert beacon.keys == all_anew(ledger, self.now_s)
        body = msgspec.json.encode(beacon)
        for of, other in self.ledgers.items():
            if of != name and self.dice.random() > 0.1:
                other.hear(msgspec.json.decode(body, type=LimitsBeacon), self.now_s)

    def use(self, name: str) -> None:
        key = self.dice.choice(KEYS)
        held = self.ledgers[name].admit(key, self.dice.choice((0, 0, 40)), self.now_s)
        if not isinstance(held, Refused):
            self.running.append((name, key, held))

    def end(self) -> None:
        if self.running:
            name, key, held = self.running.pop(self.dice.randrange(len(self.running)))
            self.ledgers[name].end(key, held, self.dice.choice((0, held)), self.now_s)

    def leave(self) -> None:
        name = self.dice.choice(list(self.ledgers))
        if self.dice.random() < 0.5:
            self.tell(name, leaving=True)
        self.running = [r for r in self.running if r[0] != name]
        del self.ledgers[name]


@given(st.integers(0, 2**32))
def test_a_beacon_tells_of_every_key_what_looking_at_all_of_them_would(seed: int) -> None:
    dice = random.Random(seed)
    yard = Yard(dice)
    for _ in range(2):
        yard.join()
    for _ in range(150):
        # Seconds, sometimes the better part of what a window, a listing or a peer lasts; some are silent meanwhile.
        yard.now_s += dice.choice(
            (0.0, 0.3, 1.0, 1.0, 2.0, 7.0, 30.0, 58.0, 61.0, 62.0, 63.0, 130.0)
        )
        for _ in range(dice.choice((0, 0, 1, 3))):
            yard.use(dice.choice(list(yard.ledgers)))
        for _ in range(dice.choice((0, 0, 1, 3))):
            yard.end()
        for name, ledger in yard.ledgers.items():
            if dice.random() < 0.6:
                ledger.look(yard.now_s, connected=dice.random() < 0.9)
                if dice.random() < 0.1:
                    ledger.forget({key.id for key in dice.sample(KEYS, 4)}, yard.now_s)
                yard.tell(name)
        if dice.random() < 0.05 and len(yard.ledgers) > 1:
            yard.leave()
        if dice.random() < 0.05 and len(yard.ledgers) < 4:
            yard.join()
