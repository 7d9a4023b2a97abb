"""Finds out who sends a request, before anything of its body is read: the key in its headers, if one is needed.

What a client presented is compared and forgotten: it is in no log, no answer, and no engine's request.
"""

from typing import Final

from gateway.domain.answers import Answer
from gateway.domain.doors import KeysNeeded, is_loopback, needs_key
from gateway.domain.http_rules import Headers
from gateway.domain.keytable import ANYBODY, Caller, identify, looks_like_ours
from gateway.domain.names import Kind
from gateway.gateway import Gateway

_OPEN: Final[frozenset[Kind]] = frozenset(
    {
        "preflight",
        "healthz",
        "readyz",
        "openapi",
        # Shown to this machine alone (gateway/admin.py).
        "timeline",
        # These say what is wrong with the address, whoever asked.
        "method_not_allowed",
        "route_not_forwarded",
        "bad_model_id",
        "bad_card_name",
        "not_found",
    }
)
"""What is answered to everybody."""

_BEARER: Final = b"bearer "
_OTHER_HEADERS: Final = (b"x-api-key", b"api-key")


class Callers:
    """`beyond_loopback`: others than this machine reach the gateway's port."""

    def __init__(self, gateway: Gateway, setting: KeysNeeded, *, beyond_loopback: bool) -> None:
        self._gateway = gateway
        self._setting: KeysNeeded = setting
        self._beyond_loopback = beyond_loopback

    @property
    def need_key(self) -> bool:
        """Whether requests need one now."""
        table = self._gateway.table
        any_key = table is not None and table.keys.any
        return needs_key(self._setting, any_key=any_key, beyond_loopback=self._beyond_loopback)

    def identify(self, kind: Kind, headers: Headers, peer: str) -> Caller | Answer:
        """Who sends a request with these headers from `peer` for a place of this kind; or the answer to it."""
        if kind in _OPEN or (kind == "metrics" and is_loopback(peer)):
            return ANYBODY
        if not self.need_key:
            return ANYBODY
        gateway = self._gateway
        table = gateway.table
        now = gateway.clock.now()
        memo = headers.memo
        known: Caller | None = memo.get("caller")
        if known is not None and known.key is not None and table is not None:
            key = known.key
            # The same headers of the same connection and the same entry of the table: so the secret is the same too.
            same = table.keys.keys.get(key.id) is key
            if same and (key.expires_at is None or key.expires_at > now):
                return known
        caller = identify(
            None if table is None else table.keys,
            presented(headers),
            now,
            needed=True,
            synced=gateway.synced,
        )
        if isinstance(caller, Caller) and caller.key is not None:
            memo["caller"] = caller
        return caller

    def is_still(self, caller: Caller) -> bool:
        """Whether who sent a request may send another with the same key, or still need none."""
        key = caller.key
        if key is None:
            return not self.need_key
        table = self._gateway.table
        return (
            self._setting != "off"
            and table is not None
            and table.keys.keys.get(key.id) is key
            and (key.expires_at is None or key.expires_at > self._gateway.clock.now())
        )


def presented(headers: Headers) -> bytes | None:
    """What a request with these headers presents as its key: the bearer token, else `x-api-key`, else `api-key`.

    Clients that know several keys send several; the first that looks like one of ours counts.
    """
    token = headers.get(b"authorization")
    if token is not None:
        token = token[len(_BEARER) :].strip() if token[: len(_BEARER)].lower() == _BEARER else None
        if token and looks_like_ours(token):
            return token
    for name in _OTHER_HEADERS:
        given = headers.get(name)
        if given is not None:
            given = given.strip()
            if looks_like_ours(given):
                return given
            token = token or given
    return token
