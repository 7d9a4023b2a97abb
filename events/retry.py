"""Decides what a refused append means, by the server's `err_code`: the retry table as one function.

Pure. The exception class of a client library says too little: a full stream and a missing leader are
both "503", so only the code counts.
"""

from enum import Enum
from typing import Final

from msgspec import Struct


class Action(Enum):
    """What the appender does next."""

    AGAIN = "the same message again after a pause"
    READ_BACK = "maybe ours: read the subject and see"
    ABANDONED = "the batch was forgotten by the server; nothing stored; begin it anew"
    FULL = "no space: read-only until an operator acts"
    FAULT = "a bug or a wrong configuration: fail loudly"


class ServerError(Struct, frozen=True, kw_only=True):
    """The `error` object of a JetStream answer."""

    code: int = 500
    err_code: int | None = None
    description: str = ""


IN_FLIGHT: Final = 10164
"""Another write to the subject is still being stored (clusters)."""

_TABLE: Final[dict[int, Action]] = {
    10071: Action.READ_BACK,  # wrong last sequence
    IN_FLIGHT: Action.READ_BACK,
    10158: Action.AGAIN,  # this very id is still being stored
    10210: Action.AGAIN,  # too many batches at once
    10008: Action.AGAIN,  # no stream leader yet
    10163: Action.AGAIN,
    10176: Action.ABANDONED,  # incomplete batch
    10077: Action.FULL,  # maximum bytes or messages of the stream
    10023: Action.FULL,  # storage of the server
    10047: Action.FULL,  # storage of the account
    10028: Action.FULL,  # memory
    10002: Action.FULL,  # limits of the account
    10054: Action.FAULT,  # message too large
    10060: Action.FAULT,  # another stream than expected
    10174: Action.FAULT,  # atomic batches are off
    10175: Action.FAULT,  # a batch without sequence
    10177: Action.FAULT,  # a header that batches refuse
    10199: Action.FAULT,  # batch too large
    10201: Action.FAULT,  # duplicate id within a batch
    10039: Action.FAULT,  # no JetStream for this account
}


def classify(error: ServerError) -> Action:
    """The action for a server's error; an unlisted 503 or 429 is transient, any other unlisted one a fault."""
    if error.err_code is not None and error.err_code in _TABLE:
        return _TABLE[error.err_code]
    return Action.AGAIN if error.code in (429, 503) else Action.FAULT


def pause_s(attempt: int, jitter: float) -> float:
    """The pause before attempt 1, 2, ...: 50 ms doubling to 1 s, shortened by up to half by `jitter` (0..1)."""
    longest = min(1.0, 0.05 * 2.0 ** min(attempt - 1, 10))
    return longest * (1.0 - 0.5 * jitter)
