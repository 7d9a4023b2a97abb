"""Sums of usage on their way to the log: nothing lost, nothing twice, bounded however long it takes."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from events.streams import stream_specs
from gateway.domain.tally import BATCH_ROWS, MAX_DAYS, MAX_ROWS, OTHER, Tally

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def add(
    tally: Tally, key: str = "k", now: datetime = NOW, model: str = "m", tokens: int = 0
) -> None:
    found = tally.sum_of(model, key, "", now)
    found.requests += 1
    found.completion_tokens += tokens


def test_one_batch_is_given_until_it_is_stored_and_what_comes_meanwhile_follows() -> None:
    tally = Tally("gw", "i")
    assert tally.take() is None
    add(tally, tokens=3)
    add(tally, tokens=4)
    first = tally.take()
    assert first is not None
    assert (first.gateway, first.incarnation, first.n, len(first.rows)) == ("gw", "i", 1, 1)
    assert (first.rows[0].requests, first.rows[0].completion_tokens) == (2, 7)
    add(tally)
    assert tally.take() == first
    tally.stored()
    second = tally.take()
    assert second is not None
    assert (second.n, second.rows[0].requests) == (2, 1)
    tally.stored()
    assert tally.take() is None
    assert tally.rows == 0


def test_a_batch_is_of_one_day() -> None:
    tally = Tally("gw", "i")
    for hour in range(0, 48, 6):
        add(tally, now=NOW + timedelta(hours=hour))
    days = []
    while (batch := tally.take()) is not None:
        assert batch.began.date() == batch.ended.date()
        days.append((batch.began.day, batch.rows[0].requests))
        tally.stored()
    assert days == [(1, 2), (2, 4), (3, 2)]


def test_an_outage_with_many_keys_keeps_a_bounded_number_of_rows_and_every_request() -> None:
    tally = Tally("gw", "i")
    for n in range(MAX_ROWS + 50):
        add(tally, f"k{n}")
    assert tally.rows == MAX_ROWS + 1
    counted = Counter[str]()
    while (batch := tally.take()) is not None:
        assert len(batch.rows) <= BATCH_ROWS
        for row in batch.rows:
            counted[row.key] += row.requests
        tally.stored()
    assert counted.total() == MAX_ROWS + 50
    assert counted[OTHER] == 50


def test_an_outage_longer_than_usage_is_kept_forgets_the_oldest_days() -> None:
    tally = Tally("gw", "i")
    for day in range(MAX_DAYS + 3):
        add(tally, now=NOW + timedelta(days=day))
    assert (tally.rows, tally.lost) == (MAX_DAYS, 3)
    first = tally.take()
    assert first is not None
    assert first.began == NOW + timedelta(days=3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(0, 60)),
            st.sampled_from(["take", "stored"]),
        ),
        max_size=60,
    )
)
def test_whatever_is_added_is_stored_once(steps: list[tuple[str, int] | str]) -> None:
    tally = Tally("gw", "i")
    now, taken = NOW, None
    added, stored = Counter[str](), Counter[str]()
    numbers: list[int] = []
    for step in (*steps, "take", "stored", *["take", "stored"] * 5):
        if isinstance(step, tuple):
            now += timedelta(hours=step[1])
            add(tally, step[0], now)
            added[step[0]] += 1
        elif step == "take":
            taken = tally.take()
        elif taken is not None:
            tally.stored()
            numbers.append(taken.n)
            for row in taken.rows:
                stored[row.key] += row.requests
            taken = None
    while (batch := tally.take()) is not None:
        tally.stored()
        numbers.append(batch.n)
        for row in batch.rows:
            stored[row.key] += row.requests
    assert stored == added
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_batch_of_the_longest_names_is_no_larger_than_the_stream_takes() -> None:
    """One that is refused for its size would be sent for ever, and nothing behind it."""
    tally = Tally("g" * 200, "i" * 32)
    for n in range(BATCH_ROWS + 1):
        name = f"{n:05d}" + "\N{GRINNING FACE}" * 195
        found = tally.sum_of(name, "k" * 12, name, NOW)
        for field in found.__slots__:
            setattr(found, field, 1 << 40)
    batch = tally.take()
    assert batch is not None
    assert len(batch.rows) == BATCH_ROWS
    (usage,) = (spec for spec in stream_specs() if not spec.needed)
    assert len(msgspec.json.encode(batch)) < usage.config["max_msg_size"]
