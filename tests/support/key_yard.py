"""A yard with API keys and nothing else: commands about keys, and the time that passes over them.

It decides nothing; what must hold of a key's events it checks on the way.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from controlplane.domain import keys
from controlplane.domain.decision import Change, Decision, Live
from schemas.commands import KeyChange, KeyCreate, KeyRevoke, Outcome
from schemas.key import Key, KeyChanged, KeyCreated, KeyDeleted, KeyRevoked
from tests.support.worlds import Yard

DAY_S = 86_400.0
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def key_id(name: str) -> str:
    """An id that can be told from others by the name it is made of."""
    return ("".join(c for c in name if c in ALPHABET) + "a" * 12)[:12]


def a_key(name: str = "ci", **fields: Any) -> KeyCreate:
    known: dict[str, Any] = {
        "id": key_id(name),
        "name": name,
        "hash": sha256(name.encode()).hexdigest(),
    }
    return KeyCreate(**(known | fields))


@dataclass
class KeyYard(Yard):
    compares: bool = True
    audit_behind: bool = False
    ended: list[str] = field(default_factory=list)

    def live(self) -> Live:
        return replace(super().live(), audit_behind=self.audit_behind)

    def _check_progress(self, change: Change, decision: Decision) -> None:
        if change.noun != "key":
            super()._check_progress(change, decision)
            return
        before, state = self.world.keys.get(change.key[0]), change.state
        assert before != state, decision.what
        if isinstance(change.event, KeyDeleted):
            assert before is not None
            assert change.ttl_s
            over_at = keys.over_at(before)
            assert over_at is not None
            assert self.now - over_at >= timedelta(seconds=keys.KEPT_S)
            assert len(self.world.keys) > 1, "a yard that asked for keys never opens by itself"
            assert not self.audit_behind
            self.ended.append(before.id)
            return
        assert isinstance(state, Key)
        assert change.key == (state.id,)
        if before is None:
            assert isinstance(change.event, KeyCreated)
            return
        assert isinstance(change.event, KeyChanged | KeyRevoked)
        fixed = ("id", "name", "hash", "created_at", "by")
        assert [getattr(state, f) for f in fixed] == [getattr(before, f) for f in fixed]
        assert before.revoked_at is None, "a revoked key never changes again"

    def create(self, name: str = "ci", **fields: Any) -> Outcome:
        return self.do(a_key(name, **fields))

    def have(self, name: str = "ci", **fields: Any) -> Key:
        """The key, which must be accepted."""
        body = a_key(name, **fields)
        outcome = self.do(body)
        assert outcome.status == "accepted", outcome
        return self.world.keys[body.id]

    def change(self, key: str, **fields: Any) -> Outcome:
        return self.do(KeyChange(key=key, **fields))

    def revoke(self, key: str) -> Outcome:
        return self.do(KeyRevoke(key=key))

    def later(self, seconds: float) -> None:
        """Time passes, and the leader does what it brings."""
        self.now += timedelta(seconds=seconds)
        self.settle()
