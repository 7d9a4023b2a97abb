"""A page of numbers in pieces: the client library's own text, and nobody stops while it is written."""

import asyncio
import math
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from gateway import counting
from gateway.domain.tokens import Tokens
from gateway.exposition import AT_ONCE, pieces
from gateway.metrics import Metrics
from tests.support.aio import run


async def joined(registry: CollectorRegistry) -> bytes:
    return b"".join([piece async for piece in pieces(registry.collect())])


numbers = st.one_of(
    st.floats(allow_nan=False), st.integers(0, 10**12).map(float), st.sampled_from([0.0, -0.0, 1e6])
)


@given(st.lists(st.tuples(st.text(), numbers), max_size=8), st.text(max_size=20))
def test_the_text_is_the_librarys(values: list[tuple[str, float]], text: str) -> None:
    registry = CollectorRegistry()
    ours: dict[str, Any] = {"registry": registry}
    plain = counting.Counter("plain", text, **ours)
    labelled = counting.Counter("labelled", text, ["b", "a"], **ours)
    spread = counting.Histogram("spread", "Help.", ["model"], buckets=(0.1, 5, 2e7), **ours)
    theirs = Counter("theirs", "Help.", ["model"], registry=registry)
    gauge = Gauge("gauge", "Help.", ["model"], registry=registry)
    for label, value in values:
        plain.inc(value)
        labelled.labels(label, "x").inc(value)
        spread.labels(label).observe(value)
        theirs.labels(label).inc(abs(value))
        gauge.labels(label).set(value)
    for value in (math.inf, -math.inf, math.nan):
        gauge.labels(str(value)).set(value)
    assert run(joined(registry)) == generate_latest(registry)


def test_nobody_stops_for_the_page_of_a_thousand_models() -> None:
    metrics = Metrics()
    for n in range(1000):
        metrics.count(f"m-{n}", "ok")
        metrics.of_requests.count(
            f"m-{n}", "ok", "", duration_s=0.1, first_s=0.1, tokens=Tokens(prompt=1)
        )

    async def story() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        page = await metrics.page()
        task.cancel()
        lines = page.count(b"\n")
        assert lines > 40_000
        assert turns > lines / AT_ONCE
        assert page == metrics.render()

    run(story())


def test_numbers_are_made_as_they_are_written_whatever_is_counted_meanwhile() -> None:
    metrics = Metrics()

    def count(model: str) -> None:
        metrics.count(model, "ok")
        metrics.answered_first(model, 0.1)
        metrics.of_requests.count(
            model, "ok", "", duration_s=0.1, first_s=0.1, tokens=Tokens(prompt=1)
        )

    for n in range(300):
        count(f"m-{n}")

    async def story() -> None:
        page = b""
        biggest = 0
        async for piece in metrics.pieces():
            biggest = max(biggest, piece.count(b"\n"))
            page += piece
            # The last of them, and one that nobody knew when the page was begun.
            count("m-299")
            count("m-new")
        assert biggest < AT_ONCE + 20
        text = page.decode()
        # The last is told as it is when its turn comes, each time with all that belongs together.
        seen = re.findall(
            r'request_seconds_(?:bucket|count)\{code="ok",(?:le="\+Inf",)?model="m-299"\} (\S+)',
            text,
        )
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert float(seen[0]) > 1

    run(story())
