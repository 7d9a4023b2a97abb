"""Finds what ties a request to a replica, where that one may still have its beginning in its cache, and which replica that is.

A session that the client names, or how the conversation begins. It never sends a request where it would wait for the
sake of a cache: who is clearly busier than the least busy is passed over. Pure and total, so all gateways agree.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Literal
from zlib import crc32

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.domain.routing import load_of
from schemas.replica import Replica

PREFIX_BYTES: Final = 512
"""So much of how a conversation begins, as it stands in the body, says which it is. One that is shorter is tied to
nothing: its beginning still changes, and there is little in a cache to gain."""

SLACK: Final = 4.0
"""A replica with more than so many requests (for its weight) over the least busy one is passed over."""

PATHS: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
)
"""What engines keep the beginning of: prompts they go on from."""

HEADERS: Final = (b"x-yard-session", b"x-session-id")
"""Where a client names its session, the first of them that is there."""

_HIGHEST: Final = 2.0**64
_ALL: Final = 2**64 - 1
_ODD: Final = 0xD6E8FEB86659FD93
"""Multiplying by it, and mixing the upper half into the lower, twice, lets every bit depend on every other: near keys
go to replicas as far apart as any."""


class Affinity(Struct, frozen=True, kw_only=True):
    """What ties a request to a replica, as a checksum, and where that was found."""

    by: Literal["session", "prefix"]
    key: int


class _Beginnings(Struct):
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET


_decoder: Final = msgspec.json.Decoder(_Beginnings)


def by_session(name: bytes) -> Affinity | None:
    """That of a session with this name; None: an empty one is none."""
    name = name.strip()
    return Affinity(by="session", key=crc32(name)) if name else None


def by_prefix(body: bytes) -> Affinity | None:
    """That of a conversation, by how the JSON `body` begins it; None: too short to tell, or there is none."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for raw in (found.messages, found.prompt, found.input):
        if raw is not UNSET:
            return by_beginning(raw)
    return None


def by_beginning(raw: msgspec.Raw) -> Affinity | None:
    """That of a conversation, whose JSON this is; None: too short to tell."""
    beginning = memoryview(raw)[:PREFIX_BYTES]
    return Affinity(by="prefix", key=crc32(beginning)) if len(beginning) == PREFIX_BYTES else None


def ranked(candidates: Sequence[Replica], affinity: Affinity) -> list[Replica]:
    """The candidates in the order of this affinity.

    By rendezvous, with the shares that weights promise: a replica that comes or goes moves its own part of the
    conversations and no other.
    """
    return sorted(candidates, key=lambda r: (_distance(affinity.key, r), r.id))


def first_near(
    order: Sequence[Replica], inflight: Mapping[str, int], others: Mapping[str, int]
) -> Replica:
    """The first in this order that is not clearly busier than the least busy."""
    first = order[0]
    if load_of(first, inflight, others) <= SLACK:
        return first  # whatever the others': with this request each has some load
    loads = [load_of(r, inflight, others) for r in order]
    most = min(loads) + SLACK
    return next(r for r, load in zip(order, loads, strict=True) if load <= most)


def _distance(key: int, replica: Replica) -> float:
    """Smallest for the replica this key is tied to: exponential with its weight as the rate."""
    mixed = (key ^ _number(replica.id)) * _ODD & _ALL
    mixed = (mixed ^ mixed >> 32) * _ODD & _ALL
    return -math.log(((mixed ^ mixed >> 32) + 1) / _HIGHEST) / max(replica.weight, 1)


@lru_cache(maxsize=4096)
def _number(replica: str) -> int:
    return int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "big")
