"""The life of API keys: created, changed, revoked, expired and ended in any order, under any leader.

A yard that holds a key never holds none again; a revoked key never answers again.
"""

from datetime import datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.domain import keys
from controlplane.domain.index import StepIndex
from controlplane.domain.world import World
from schemas.key import Key
from tests.support.key_yard import DAY_S, KeyYard, key_id

NAMES = ("ci", "web", "batch")
IDS = tuple(key_id(f"k{n}") for n in range(2, 8))
SAID = (*NAMES, *IDS)
LIVES_S = (None, 1.0, 3600.0, 30 * DAY_S)

ids, names, said = st.sampled_from(IDS), st.sampled_from(NAMES), st.sampled_from(SAID)
lives = st.sampled_from(LIVES_S)
times = st.sampled_from((0.0, 1.0, 3600.0, DAY_S - 3600.0, DAY_S, 40 * DAY_S))


class Keys(RuleBasedStateMachine):
    """A yard whose leader is compared with one that has no memory at every step (`KeyYard.compares`)."""

    @initialize()
    def begin(self) -> None:
        self.yard = KeyYard()
        self.revoked: dict[str, datetime] = {}
        self.accepted: dict[str, str] = {}
        """Hash by id, of every key there ever was."""

    @rule(id_=ids, name=names, life=lives, rpm=st.integers(-1, 3))
    def create(self, id_: str, name: str, life: float | None, rpm: int) -> None:
        holders = [
            key
            for key in self.yard.world.keys.values()
            if key.name == name and not keys.is_over(key, self.yard.now)
        ]
        before = dict(self.yard.world.keys)
        outcome = self.yard.create(name, id=id_, rpm=rpm, expires_s=life)
        if outcome.status == "rejected":
            assert self._left(before) == self.yard.world.keys
            return
        known = before.get(id_)
        if known is not None:
            assert holders == [known]
            assert self.yard.world.keys[id_] == known
            return
        assert id_ not in self.accepted, "an id is used once"
        assert rpm >= 0
        assert not holders
        self.accepted[id_] = self.yard.world.keys[id_].hash

    @rule(key=said, life=st.sampled_from((None, 0.0, 1.0, 3600.0)), rpm=st.integers(-1, 3))
    def change(self, key: str, life: float | None, rpm: int) -> None:
        before = dict(self.yard.world.keys)
        meant = keys.find(before, key, self.yard.now)
        outcome = self.yard.change(key, expires_s=life, rpm=rpm)
        left = self._left(before)
        if outcome.status == "rejected":
            assert left == self.yard.world.keys
            return
        assert meant is not None
        assert meant.id not in self.revoked
        changed = {id_ for id_, key in self.yard.world.keys.items() if left.get(id_) != key}
        assert changed <= {meant.id}

    @rule(key=said)
    def revoke(self, key: str) -> None:
        meant = keys.find(self.yard.world.keys, key, self.yard.now)
        outcome = self.yard.revoke(key)
        assert (outcome.status == "accepted") == (meant is not None)
        if meant is not None:
            assert outcome.refs == (f"yard.evt.key.{meant.id}",)
            self.revoked.setdefault(meant.id, self.yard.now)

    @rule(seconds=times)
    def time_passes(self, seconds: float) -> None:
        self.yard.later(seconds)

    @rule()
    def time_comes(self) -> None:
        """The leader sleeps until it said, and not longer."""
        wake_at = self.yard.step().wake_at
        if wake_at is not None and wake_at < self.yard.now + timedelta(days=50):
            self.yard.later((wake_at - self.yard.now).total_seconds())

    @rule(behind=st.booleans())
    def audit(self, behind: bool) -> None:
        self.yard.audit_behind = behind
        self.yard.settle()

    @rule()
    def another_leads(self) -> None:
        """It reads the log from its beginning and knows nothing else."""
        world = World()
        for item in self.yard.log:
            world.apply(item)
        assert world.keys == self.yard.world.keys
        self.yard.world, self.yard.index = world, StepIndex()
        self.yard.settle()

    def _left(self, before: dict[str, Key]) -> dict[str, Key]:
        """Those of `before` that did not end with the same step: a command may wake the leader for more."""
        return {id_: key for id_, key in before.items() if id_ not in self.yard.ended}

    @invariant()
    def a_name_is_of_one_key_that_is_not_over(self) -> None:
        live = [k.name for k in self._keys() if not keys.is_over(k, self.yard.now)]
        assert len(live) == len(set(live))

    @invariant()
    def a_revoked_key_stays_revoked(self) -> None:
        for key in self._keys():
            assert (key.revoked_at is not None) == (key.id in self.revoked)

    @invariant()
    def a_secret_stays_what_it_was(self) -> None:
        for key in self._keys():
            assert self.accepted[key.id] == key.hash

    @invariant()
    def the_last_key_stays(self) -> None:
        assert bool(self._keys()) == bool(self.accepted)

    @invariant()
    def no_other_outlives_its_day(self) -> None:
        if self.yard.audit_behind:
            return
        due = timedelta(seconds=keys.KEPT_S)
        late = [
            key
            for key in self._keys()
            if (at := keys.over_at(key)) is not None and self.yard.now - at >= due
        ]
        assert not late or self._keys() == late[:1]

    @invariant()
    def none_ends_before_its_day(self) -> None:
        for id_ in self.yard.ended:
            assert id_ not in self.yard.world.keys
        assert len(self.yard.ended) == len(set(self.yard.ended))

    def _keys(self) -> list[Key]:
        return list(self.yard.world.keys.values()) if hasattr(self, "yard") else []


TestKeys = Keys.TestCase
