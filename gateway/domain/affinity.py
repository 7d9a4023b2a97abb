"""Finds what ties a request to a replica, where that one may still have its beginning in its cache, and which replica that is.

A session that the client names, or how the conversation begins. It never sends a request where it would wait for the
sake of a cache: who is clearly busier than the least busy is passed over. Pure and total, so all gateways agree.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, Literal

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


class Affinity(Struct, frozen=True, kw_only=True):
    """What ties a request to a replica, as a digest, and where that was found."""

    by: Literal["session", "prefix"]
    key: bytes


class _Beginnings(Struct):
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET


_decoder: Final = msgspec.json.Decoder(_Beginnings)


def by_session(name: bytes) -> Affinity | None:
    """That of a session with this name; None: an empty one is none."""
    name = name.strip()
    return Affinity(by="session", key=_digest(name)) if name else None


def by_prefix(body: bytes) -> Affinity | None:
    """That of a conversation, by how the JSON `body` begins it; None: too short to tell, or there is none."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for raw in (found.messages, found.prompt, found.input):
        if raw is not UNSET:
            beginning = memoryview(raw)[:PREFIX_BYTES]
            if len(beginning) < PREFIX_BYTES:
                return None
            return Affinity(by="prefix", key=_digest(beginning))
    return None


def prefer(
    candidates: Sequence[Replica],
    affinity: Affinity,
    inflight: Mapping[str, int],
    others: Mapping[str, int],
) -> Replica:
    """The first in the order of this affinity that is not clearly busier than the least busy.

    The order is by rendezvous, with the shares that weights promise: a replica that comes or goes moves its own part
    of the conversations and no other.
    """
    loads = {r.id: load_of(r, inflight, others) for r in candidates}
    most = min(loads.values()) + SLACK
    near = [r for r in candidates if loads[r.id] <= most]
    return min(near, key=lambda r: (_distance(affinity.key, r), r.id))


def _distance(key: bytes, replica: Replica) -> float:
    """Smallest for the replica this key is tied to: exponential with its weight as the rate."""
    digest = blake2b(replica.id.encode(), key=key, digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / _HIGHEST) / max(replica.weight, 1)


def _digest(text: bytes | memoryview) -> bytes:
    return blake2b(text, digest_size=16).digest()
