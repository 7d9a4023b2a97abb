"""A kept body: the same bytes in memory and in a file, as often as wanted, within the budget."""

import asyncio
import os
from pathlib import Path

import pytest

from gateway.domain.model_rewrite import model_spans
from gateway.http.bodies import Body, BodyBudget, PatchedBody
from gateway.http.errors import BodyTooLarge, BudgetFull, RequestError
from tests.support.aio import run, until


def make(budget: BodyBudget, folder: Path, memory: int = 1000, limit: int = 1 << 20) -> Body:
    return Body(
        asyncio.get_running_loop(),
        declared=None,
        limit_bytes=limit,
        memory_bytes=memory,
        budget=budget,
        spool_dir=str(folder),
    )


async def whole(body: Body | PatchedBody) -> bytes:
    return b"".join([block async for block in body.replay()])


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 5000, 600_000])
def test_a_body_is_read_and_replayed_wherever_it_is_kept(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)

    async def story() -> None:
        budget = BodyBudget(1 << 20)
        body = make(budget, tmp_path)
        readers = [asyncio.create_task(whole(body)) for _ in range(3)]
        prefix = asyncio.create_task(body.prefix(10))
        for start in range(0, size, 700):
            body.feed(data[start : start + 700])
            if start % 2100 == 0:
                await asyncio.sleep(0)
        body.end()
        assert await asyncio.gather(*readers) == [data] * 3
        assert await prefix == data[:10]
        assert await body.read_all() == data
        assert await whole(body) == data
        assert body.length == size
        assert budget.used_bytes == size
        if size > 5000:
            await until(lambda: body._file is not None and body.in_memory() is None, "the file")
        assert os.listdir(tmp_path) == [], "a spooled body has no name"
        body.release()
        body.release()
        assert budget.used_bytes == 0
        await until(lambda: body._file is None, "the file to be closed")
        with pytest.raises(RuntimeError, match="released"):
            await body.read_all()

    run(story())


def test_a_body_over_its_cap_or_the_budget_fails_its_readers(tmp_path: Path) -> None:
    async def story() -> None:
        for budget, limit, error in (
            (BodyBudget(1 << 20), 100, BodyTooLarge),
            (BodyBudget(100), 1 << 20, BudgetFull),
        ):
            body = make(budget, tmp_path, limit=limit)
            reader = asyncio.create_task(body.read_all())
            await asyncio.sleep(0)
            body.feed(b"x" * 60)
            body.feed(b"x" * 60)
            with pytest.raises(error):
                await reader
            with pytest.raises(error):
                await whole(body)
            assert budget.used_bytes == 0
            body.feed(b"more")
            body.end()
            assert not body.complete
            body.release()

    run(story())


def test_one_cancelled_reader_does_not_disturb_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        body = make(BodyBudget(1000), tmp_path)
        first, second = (asyncio.create_task(body.read_all()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        body.feed(b"abc")
        body.end()
        assert await second == b"abc"
        body.release()

    run(story())


def test_a_body_that_cannot_be_kept_fails_instead_of_losing_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        budget = BodyBudget(1 << 20)
        body = make(budget, tmp_path / "missing")
        body.feed(b"x" * 5000)
        body_read = asyncio.create_task(body.read_all())
        with pytest.raises(RequestError, match="keep"):
            await body_read
        assert budget.used_bytes == 0
        body.release()

    run(story())


@pytest.mark.parametrize("memory", [10, 1 << 20])
def test_scn_b2_a_patched_body_has_the_right_length_and_bytes(tmp_path: Path, memory: int) -> None:
    raw = b'{"a":"%b","model":"short","b":"%b","model":"again"}' % (b"x" * 300_000, b"y" * 500_000)

    async def story() -> None:
        body = make(BodyBudget(1 << 20), tmp_path, memory)
        for start in range(0, len(raw), 65536):
            body.feed(raw[start : start + 65536])
        body.end()
        value = b'"a much longer name"'
        patched = PatchedBody(body, model_spans(await body.read_all()), value)
        expected = raw.replace(b'"short"', value).replace(b'"again"', value)
        for _ in range(2):
            assert await whole(patched) == expected
        assert patched.length == len(expected)
        memory_copy = patched.in_memory()
        assert memory_copy is None or memory_copy == expected
        body.release()
        await until(lambda: body._file is None, "the file to be closed")

    run(story())


def test_a_span_across_two_blocks_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.bodies.BLOCK", 3)

    async def story() -> None:
        body = make(BodyBudget(1 << 20), tmp_path, 5)
        body.feed(b"0123456789abcdef")
        body.end()
        assert await whole(PatchedBody(body, [(2, 9), (10, 11)], b"--")) == b"01--9--bcdef"
        body.release()
        await until(lambda: body._file is None, "the file to be closed")

    run(story())


def test_a_body_that_no_disk_takes_is_turned_away_for_a_moment_and_given_back(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        budget = BodyBudget(1 << 20)
        body = make(budget, tmp_path / "nowhere")
        body.feed(b"x" * 1001)
        with pytest.raises(RequestError) as refused:
            await body.read_all()
        told = refused.value
        assert (told.status, told.code, told.retry_after_s) == (503, "queue_full", 1)
        assert budget.used_bytes == 0

    run(story())
