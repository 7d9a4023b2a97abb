"""Folds the log's API keys and decides who sends a request: the holder of a key, anybody, or nobody it may answer.

A part of the gateway's table, under the same rules. It never keeps, returns or repeats a secret: what a client
presented is compared with a hash and forgotten.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from msgspec import Struct

from gateway.domain.answers import Answer, answer
from schemas.key import KEY_PREFIX, Key

_TEXT: Final = re.compile(rf"{KEY_PREFIX}_([a-z2-7]{{12}})_([A-Za-z0-9_-]+)".encode("ascii"))
_BEGINNING: Final = f"{KEY_PREFIX}_".encode("ascii")

_NOBODYS_HASH: Final = "0" * 64
"""What the secret of an id nobody has is compared with, so that it takes as long as that of a known one."""


class Caller(Struct, frozen=True, kw_only=True):
    """Who sent a request: the holder of `key`, or None: nobody had to say."""

    key: Key | None = None

    @property
    def id(self) -> str:
        """The key's id for logs and sums; empty without one."""
        return "" if self.key is None else self.key.id

    @property
    def may_activate(self) -> bool:
        """Whether its requests may start a model that is not running."""
        return self.key is None or self.key.may_activate


ANYBODY: Final = Caller()


@dataclass(slots=True)
class KeyTable:
    """Keys by id. `unreadable` are ids whose only events this gateway cannot read: nobody can use them, yet the
    yard has keys. `had_any`: so did the table before this one."""

    keys: dict[str, Key] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    had_any: bool = field(default=False, compare=False)

    @property
    def any(self) -> bool:
        """Whether the log holds a key, or did when it was another, whatever became of it."""
        return bool(self.keys or self.unreadable) or self.had_any

    def put(self, key: Key) -> None:
        self.keys[key.id] = key
        self.unreadable.discard(key.id)

    def drop(self, id: str) -> None:
        """Its subject has ended."""
        self.keys.pop(id, None)
        self.unreadable.discard(id)

    def not_read(self, id: str) -> None:
        """Something was stored about this key that is not understood here; what was known before stays."""
        if id not in self.keys:
            self.unreadable.add(id)


def looks_like_ours(presented: bytes) -> bool:
    """Whether a text could be a key of some yard."""
    return presented.startswith(_BEGINNING)


def identify(
    table: KeyTable | None, presented: bytes | None, now: datetime, *, needed: bool, synced: bool
) -> Caller | Answer:
    """Who sends a request that presents this text as its key.

    1. no key is needed: anybody, whatever was presented; clients that must send something send anything
    2. none was presented: 401
    3. it has not the form of a key, or its id is of none. Only a synced table can say that: until then 503
    4. the secret is another. What became of the key is told to none but its holder
    5. it was revoked, whatever this machine's clock says, or has expired
    6. its holder
    """
    if not needed:  # 1
        return ANYBODY
    if not presented:  # 2
        return _refused(
            "No API key was given; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
        )
    found = _TEXT.fullmatch(presented)
    if found is None:  # 3
        return _refused("What was given as the API key is none of this yard's.")
    id = found[1].decode("ascii")
    key = None if table is None else table.keys.get(id)
    same = hmac.compare_digest(
        hashlib.sha256(found[2]).hexdigest(), _NOBODYS_HASH if key is None else key.hash
    )
    if key is None:
        if not synced:
            return answer(
                "yard_unavailable",
                f"This gateway has not read the yard's log yet and does not know the API key {id}.",
            )
        return _refused(f"There is no API key {id} here.")
    if not same:  # 4
        return _refused(f"This is not the secret of the API key {id}.")
    if key.revoked_at is not None:  # 5
        return _refused(
            f"The API key {key.name!r} ({id}) was revoked at {_moment(key.revoked_at)}."
        )
    if key.expires_at is not None and key.expires_at <= now:
        return _refused(f"The API key {key.name!r} ({id}) expired at {_moment(key.expires_at)}.")
    return Caller(key=key)  # 6


def _refused(message: str) -> Answer:
    return answer("invalid_api_key", message)


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
