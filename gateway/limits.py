"""Lets a request through the door of its key: what it may name, and what its limits leave; and counts it until it ends.

The rules are gateway/domain's (rights.py, shares.py); here is what they are asked with. Nobody is waited for.
"""

from collections.abc import Callable

from gateway.domain.answers import Answer
from gateway.domain.keytable import Caller
from gateway.domain.ledger import Ledger
from gateway.domain.ratelimits import Refused, limit_headers, limit_lines, refusal
from gateway.domain.request_fields import RequestFields
from gateway.domain.rights import forbidden
from gateway.gateway import Gateway
from schemas.key import Key
from schemas.model import Model

BYTES_PER_TOKEN = 4
"""What a token of a request's body is reckoned at, until its engine says how many there were."""


class Grant:
    """One request that counts against its key's limits until `end`."""

    __slots__ = ("_held", "_key", "_limits")

    def __init__(self, limits: "Limits", key: Key, held: int) -> None:
        self._limits: Limits | None = limits
        self._key = key
        self._held = held

    @property
    def estimate(self) -> int:
        """The tokens it holds of its limit while it runs."""
        return self._held

    def end(self, tokens: int) -> None:
        """The request has ended and used so many tokens. It ends once: whatever is said later changes nothing."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.end(self._key, self._held, tokens)


class Limits:
    """All keys' limits at this gateway; `ledger` is what the others tell and are told (limitsbeacon.py).

    `on_pressed` is called when they should hear of it soon.
    """

    def __init__(self, gateway: Gateway, incarnation: str) -> None:
        self._gateway = gateway
        self.on_pressed: Callable[[], None] = lambda: None
        self.ledger = Ledger(gateway.id, incarnation)

    def enter(
        self, caller: Caller, fields: RequestFields, body_size: int, model: Model | None = None
    ) -> Grant | Answer | None:
        """Whether a request goes on: a grant that has to be ended, the answer to it, or None: nothing limits it.
        `model` is the one it is for, where that is known."""
        key = caller.key
        if key is None:
            return None
        if key.models:
            refused = forbidden(caller, fields.model, self._gateway.table)
            if refused is not None:
                return refused
        return self.admit(caller, fields, body_size, model)

    def admit(
        self, caller: Caller, fields: RequestFields, body_size: int, model: Model | None = None
    ) -> Grant | Answer | None:
        """Counts a request of its caller, or says which limit has no room; None: its key has no limits."""
        key = caller.key
        if key is None or not (key.rpm or key.tpm or key.parallel):
            return None
        tokens = 0
        if key.tpm:
            model = self._model_of(fields.model) if model is None else model
            tokens = _estimate(fields, body_size, model)
        ledger = self.ledger
        held = ledger.admit(key, tokens, self._gateway.clock.now_s())
        if ledger.pressed:
            self.on_pressed()
        if isinstance(held, Refused):
            return refusal(key, held)
        return Grant(self, key, held)

    def end(self, key: Key, held: int, used: int) -> None:
        """A request that held so many tokens used so many."""
        self.ledger.end(key, held, used, self._gateway.clock.now_s())

    def has_seat(self, replica: str, ours: int, limit: int) -> bool:
        """Whether one more of ours may run at this replica, which runs at most `limit` at once."""
        free = self.ledger.has_seat(replica, ours, limit)
        if self.ledger.pressed:
            self.on_pressed()
        return free

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        """What an answer tells of its caller's limits; nothing where there are none."""
        key = caller.key
        if key is None or not (key.rpm or key.tpm):
            return []
        return limit_headers(key, self.ledger.read(key, self._gateway.clock.now_s()))

    def lines(self, caller: Caller) -> bytes:
        """The same, as lines of a head."""
        key = caller.key
        if key is None or not (key.rpm or key.tpm):
            return b""
        return limit_lines(key, self.ledger.read(key, self._gateway.clock.now_s()))

    def _model_of(self, name: str) -> Model | None:
        """The model that serves what goes by this name."""
        table = self._gateway.table
        if table is None:
            return None
        model = table.model(name)
        if model is None:
            entry = table.adapter(name)
            model = None if entry is None else table.base_of(entry)
        return model


def _estimate(fields: RequestFields, body_size: int, model: Model | None) -> int:
    """The most tokens a request can come to: its body's and its answer's, never more than the model's context.

    That bound matters for images: their bytes are far more than their tokens.
    """
    tokens = body_size // BYTES_PER_TOKEN
    if fields.max_tokens is not None:
        tokens += fields.max_tokens
    if model is not None and model.context_length and model.context_length < tokens:
        tokens = model.context_length
    return tokens or 1
