"""Counts bytes over time: how fast they may come, how fast they came, and when to say so again."""

from typing import Final

from msgspec import Struct

PROGRESS_EVERY_S: Final = 1.0
RATE_OVER_S: Final = 5.0
BURST_S: Final = 0.25
SMALLEST_READ: Final = 4 * 1024


class Bucket(Struct, frozen=True, kw_only=True):
    """A token bucket. `tokens` are bytes, below zero after a reservation; `at` is monotonic, in seconds."""

    tokens: float = 0.0
    at: float = 0.0


def spend(bucket: Bucket, now: float, amount: int, rate: int) -> tuple[Bucket, float]:
    """Takes `amount` bytes at `rate` bytes/s, on credit; returns the seconds to wait before the next.

    Everybody who waits has already reserved, so several together keep to the rate too. `rate` 0: no limit.
    """
    if rate <= 0:
        return Bucket(tokens=0.0, at=now), 0.0
    grown = min(rate * BURST_S, bucket.tokens + max(0.0, now - bucket.at) * rate)
    tokens = grown - amount
    return Bucket(tokens=tokens, at=max(now, bucket.at)), max(0.0, -tokens / rate)


def largest_read(rate: int, buffer_bytes: int) -> int:
    """How much to read at once: at a low rate a little, so that bytes come evenly and a stop is prompt."""
    if rate <= 0:
        return buffer_bytes
    return max(1, min(buffer_bytes, max(SMALLEST_READ, rate // 10)))


class Meter(Struct, frozen=True, kw_only=True):
    """Samples of (monotonic seconds, bytes so far), oldest first, reaching back RATE_OVER_S or one more."""

    samples: tuple[tuple[float, int], ...] = ()


def measured(meter: Meter, now: float, total: int) -> Meter:
    """With one more sample; one smaller than the last begins anew (the bytes were thrown away)."""
    samples = meter.samples
    if samples and total < samples[-1][1]:
        samples = ()
    kept = [sample for sample in samples if now - sample[0] <= RATE_OVER_S]
    older = samples[len(samples) - len(kept) - 1 : len(samples) - len(kept)]
    return Meter(samples=(*older, *kept, (now, total)))


def rate_bytes_s(meter: Meter) -> float:
    """Bytes per second over the samples; 0 before there are two."""
    if len(meter.samples) < 2:
        return 0.0
    (began, first), (ended, last) = meter.samples[0], meter.samples[-1]
    return (last - first) / (ended - began) if ended > began else 0.0


def is_due(said_at: float | None, now: float) -> bool:
    """Whether progress may be said again."""
    return said_at is None or now - said_at >= PROGRESS_EVERY_S
