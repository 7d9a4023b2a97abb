"""Adds up what requests used until it is stored: one batch at a time, and none twice.

What is on its way is kept as it is until the log has it; what comes meanwhile is added up behind it, by day, so a
long outage costs a row for each key, model and day and no more. It must not do I/O or ask a clock.
"""

from datetime import date, datetime
from typing import Final

from gateway.domain.tokens import Tokens
from schemas.usage import UsageBatch, UsageRow

OTHER: Final = "other"
"""The key under which is counted what there is no room to keep apart. No key has such an id."""

MAX_ROWS: Final = 10_000
"""So many rows are kept apart; beyond that keys and adapters are not."""

MAX_DAYS: Final = 92
"""So many days wait to be stored; older ones than those the log keeps would be dropped there."""

BATCH_ROWS: Final = 200
"""So many rows go into one message, which then is no larger than the stream takes, whatever names are in it."""

_Key = tuple[str, str, str]


class Sum:
    """One row while it grows, or what is added to one: so many requests, and what they came to."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "duration_ms",
        "estimated",
        "failed",
        "first_token_ms",
        "first_tokens",
        "prompt_tokens",
        "requests",
        "waited_ms",
    )

    def __init__(self) -> None:
        self.requests = self.failed = self.estimated = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token_ms = self.first_tokens = self.duration_ms = self.waited_ms = 0

    def add(self, more: "Sum") -> None:
        """These requests have ended too."""
        self.requests += more.requests
        self.failed += more.failed
        self.prompt_tokens += more.prompt_tokens
        self.cached_tokens += more.cached_tokens
        self.completion_tokens += more.completion_tokens
        self.estimated += more.estimated
        self.first_token_ms += more.first_token_ms
        self.first_tokens += more.first_tokens
        self.duration_ms += more.duration_ms
        self.waited_ms += more.waited_ms

    def row(self, key: _Key) -> UsageRow:
        return UsageRow(
            model=key[0],
            key=key[1],
            adapter=key[2],
            requests=self.requests,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            estimated=self.estimated,
            first_token_ms=self.first_token_ms,
            first_tokens=self.first_tokens,
            duration_ms=self.duration_ms,
            waited_ms=self.waited_ms,
        )


def one_request(
    tokens: Tokens | None, *, first_s: float | None, duration_s: float, waited_s: float
) -> Sum:
    """What one request came to: `tokens` as its engine told them, None: not at all; `first_s` from its head to the
    first byte of its answer's body, None: there was none and it failed."""
    found = Sum()
    found.requests = 1
    if tokens is not None:
        found.prompt_tokens = tokens.prompt
        found.cached_tokens = tokens.cached
        found.completion_tokens = tokens.completion
        found.estimated = int(tokens.estimated)
    if first_s is None:
        found.failed = 1
    else:
        found.first_tokens = 1
        found.first_token_ms = round(first_s * 1000)
    found.duration_ms = round(duration_s * 1000)
    found.waited_ms = round(waited_s * 1000)
    return found


class _Day:
    __slots__ = ("began", "ended", "sums")

    def __init__(self, began: datetime) -> None:
        self.began = self.ended = began
        self.sums: dict[_Key, Sum] = {}


class Tally:
    """What one gateway has to account for. `lost` counts rows that no log took for too long."""

    def __init__(self, gateway: str, incarnation: str) -> None:
        self._gateway = gateway
        self._incarnation = incarnation
        self._days: dict[date, _Day] = {}
        self._rows = 0
        self._n = 0
        self._leaving: UsageBatch | None = None
        self.lost = 0

    @property
    def rows(self) -> int:
        """Rows that are not stored yet."""
        return self._rows + (0 if self._leaving is None else len(self._leaving.rows))

    def sum_of(self, model: str, key: str, adapter: str, now: datetime) -> Sum:
        """Where a request that ends now is added; to be filled at once and not kept."""
        today = now.date()
        day = self._days.get(today)
        if day is None:
            day = self._days[today] = _Day(now)
            if len(self._days) > MAX_DAYS:
                oldest = self._days.pop(min(self._days))
                self.lost += len(oldest.sums)
                self._rows -= len(oldest.sums)
        day.ended = now
        found = day.sums.get((model, key, adapter))
        if found is None:
            if self._rows >= MAX_ROWS:
                key, adapter = OTHER, ""
                found = day.sums.get((model, key, adapter))
            if found is None:
                found = day.sums[model, key, adapter] = Sum()
                self._rows += 1
        return found

    def take(self) -> UsageBatch | None:
        """The batch to be stored next: the one that was not acknowledged yet, else the oldest day's rows.

        It is the same again until `stored`: under its number it may be there already.
        """
        if self._leaving is not None:
            return self._leaving
        if not self._days:
            return None
        date_of = min(self._days)
        day = self._days[date_of]
        keys = list(day.sums)[:BATCH_ROWS]
        rows = tuple(day.sums.pop(key).row(key) for key in keys)
        self._rows -= len(rows)
        if not day.sums:
            del self._days[date_of]
        self._n += 1
        self._leaving = UsageBatch(
            gateway=self._gateway,
            incarnation=self._incarnation,
            n=self._n,
            began=day.began,
            ended=day.ended,
            rows=rows,
        )
        return self._leaving

    def stored(self) -> None:
        """The log has what `take` gave last."""
        self._leaving = None
