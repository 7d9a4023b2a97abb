"""What was used: rows that gateways write to YARD_USAGE and the totals that are made of them. Accounting, not state."""

from datetime import datetime

from msgspec import Struct


class UsageRow(Struct, frozen=True, kw_only=True):
    """What requests of one key for one model or adapter came to, in the time of its batch.

    `key` is the id, empty for who came without. `failed` are those not answered with a status under 400. Sums:
    tokens as the engine told them; `estimated` counts requests whose engine told none, so that their answer's
    events were counted instead; `first_token_ms` over `first_tokens` requests, from the request's head to the first
    byte of the answer's body; `duration_ms` to its last; `waited_ms` of it in the waiting room or in line.
    """

    model: str
    key: str = ""
    adapter: str = ""
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    first_token_ms: int = 0
    first_tokens: int = 0
    duration_ms: int = 0
    waited_ms: int = 0


class UsageBatch(Struct, frozen=True, kw_only=True):
    """The body of `yard.use.gateway.<gateway>`: requests that ended between `began` and `ended`.

    `n` counts up within `incarnation`; both together are the message id, so one sent twice is stored once.
    """

    gateway: str
    incarnation: str
    n: int
    began: datetime
    ended: datetime
    rows: tuple[UsageRow, ...] = ()


class UsageTotal(Struct, frozen=True, kw_only=True):
    """What `yardctl usage` lists: sums over a day (UTC, `YYYY-MM-DD`) of a key and a model. `key_name` as last known."""

    day: str
    row: UsageRow
    key_name: str = ""
