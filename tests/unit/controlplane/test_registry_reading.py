"""Reading the beginning of a file in growing chunks, trying again, and calling beside the loop."""

import asyncio
import threading
import tracemalloc

import pytest

from controlplane.registry.faults import RegistryFault
from controlplane.registry.rangedfile import (
    CHUNK_BYTES,
    KEPT_BYTES,
    LARGEST_CHUNK_BYTES,
    RangedFile,
)
from controlplane.registry.retrying import retried
from controlplane.registry.threads import beside
from tests.support.aio import run

MIB = 1024**2


class Far:
    """A file far away of which only the size matters, and what was read of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[int, int]] = []

    async def read(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return b"x" * min(length, max(0, self.size - offset))


def test_chunks_grow_and_nothing_is_read_twice() -> None:
    async def story() -> None:
        far = Far(100 * MIB)
        file = RangedFile(far.read, far.size)
        for at_least in (1, CHUNK_BYTES, 2 * MIB, 2 * MIB, 22 * MIB, 60 * MIB, 5):
            assert len(await file.prefix(at_least)) >= at_least
        assert far.asked == [
            (0, MIB),
            (MIB, 4 * MIB),
            (5 * MIB, LARGEST_CHUNK_BYTES),
            (21 * MIB, LARGEST_CHUNK_BYTES),
            (37 * MIB, LARGEST_CHUNK_BYTES),
            (53 * MIB, LARGEST_CHUNK_BYTES),
        ]

    run(story())


def test_a_large_need_is_met_at_once() -> None:
    async def story() -> None:
        far = Far(100 * MIB)
        file = RangedFile(far.read, far.size)
        await file.prefix(10 * MIB)
        assert far.asked == [(0, 10 * MIB)]

    run(story())


def test_a_short_file_ends_where_it_ends() -> None:
    async def story() -> None:
        far = Far(10)
        file = RangedFile(far.read, 10)
        assert len(await file.prefix(4096)) == 10
        assert await file.read(8, 100) == b"xx"
        assert await file.read(10, 1) == b""
        assert await file.read(3, 0) == b""
        assert far.asked == [(0, 10)]

    run(story())


def test_a_file_shorter_than_published_does_not_loop() -> None:
    async def story() -> None:
        far = Far(10)
        file = RangedFile(far.read, 5 * MIB)
        assert len(await file.prefix(4096)) == 10
        assert len(await file.prefix(2 * MIB)) == 10
        assert file.size == 10

    run(story())


def test_no_more_is_kept_than_a_header_may_have() -> None:
    async def story() -> None:
        far = Far(10 * KEPT_BYTES)
        file = RangedFile(far.read, far.size)
        with pytest.raises(ValueError, match="more than any header"):
            await file.prefix(KEPT_BYTES + 1)
        assert len(await file.read(5 * KEPT_BYTES, 7)) == 7
        assert far.asked == [(5 * KEPT_BYTES, 7)]

    run(story())


def test_a_view_is_good_until_the_next_call_and_a_part_of_it_longer() -> None:
    async def story() -> None:
        file = RangedFile(Far(9 * MIB).read, 9 * MIB)
        view = await file.prefix(1)
        part = view[:7]
        assert len(await file.prefix(9 * MIB)) == 9 * MIB
        assert bytes(part) == b"x" * 7
        with pytest.raises(ValueError, match="released"):
            bytes(view)

    run(story())


def test_a_header_is_held_once() -> None:
    async def story() -> None:
        size = 96 * MIB
        file = RangedFile(Far(size).read, size)
        tracemalloc.start()
        try:
            await file.prefix(size)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # What is held grows with an eighth to spare; beside it there is one chunk.
        assert most < size * 1.3 + 2 * LARGEST_CHUNK_BYTES

    run(story())


class Question:
    """Fails `times` times, then answers."""

    def __init__(self, times: int, *, transient: bool = True, wait_s: float | None = None) -> None:
        self.left = times
        self.asked = 0
        self._transient = transient
        self._wait_s = wait_s

    async def ask(self) -> str:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise RegistryFault("x", "it failed", transient=self._transient, wait_s=self._wait_s)
        return "answer"


def test_a_transient_fault_is_tried_again() -> None:
    question = Question(3)
    assert run(retried(question.ask, 5.0, first_wait_s=0.001)) == "answer"
    assert question.asked == 4


def test_any_other_fault_is_told_at_once() -> None:
    question = Question(3, transient=False)
    with pytest.raises(RegistryFault, match=r"^it failed$"):
        run(retried(question.ask, 5.0, first_wait_s=0.001))
    assert question.asked == 1


def test_a_wait_that_would_end_too_late_is_not_begun() -> None:
    asked_to_wait = Question(3, wait_s=60.0)
    with pytest.raises(RegistryFault) as raised:
        run(retried(asked_to_wait.ask, 30.0, first_wait_s=0.001), timeout_s=2.0)
    assert (asked_to_wait.asked, raised.value.wait_s) == (1, 60.0)


def test_the_waits_double_and_the_tries_are_told() -> None:
    question = Question(99)
    with pytest.raises(RegistryFault, match=r"^it failed \(\d+ tries\)$") as raised:
        run(retried(question.ask, 0.1, first_wait_s=0.01))
    # 10 + 20 + 40 ms; the fourth wait would end behind 100 ms.
    assert 2 <= question.asked <= 4
    assert raised.value.__cause__ is None


def test_a_blocking_call_runs_beside_the_loop() -> None:
    async def story() -> None:
        assert await beside(lambda: threading.current_thread().name, "a name") == "a name"
        with pytest.raises(KeyError):
            await beside(lambda: {}["x"], "a name")

    run(story())


def test_a_call_that_hangs_holds_nothing_up() -> None:
    hung = threading.Event()
    done = threading.Event()

    def hang() -> None:
        hung.wait(20.0)
        done.set()

    async def story() -> None:
        call = asyncio.create_task(beside(hang, "hanging"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.05)

    run(story(), timeout_s=5.0)
    # It comes back when the loop is long closed, and nobody minds.
    hung.set()
    assert done.wait(5.0)
