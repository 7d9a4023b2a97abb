"""A compressed body becomes the body it stands for, or a refusal, within the bounds of any body."""

import asyncio
import gzip
import zlib

import pytest

from gateway.http.bodies import Body, BodyBudget
from gateway.http.errors import BodyTooLarge, BudgetFull, RequestError
from gateway.http.unpacking import unpacked
from tests.support.aio import run

PLAIN = b'{"model":"m","input":"' + b"hello " * 1000 + b'"}'
KIB = 1024


def gzipped(plain: bytes) -> bytes:
    """Without the time in its head: it names a test, and every process must name it alike."""
    return gzip.compress(plain, mtime=0)


def raw_deflate(plain: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(plain) + packer.flush()


async def unpack(
    packed: bytes,
    encoding: bytes = b"gzip",
    *,
    size: int = 1 << 16,
    limit: int = 1 << 20,
    budget: BodyBudget | None = None,
) -> bytes:
    """What comes out; afterwards nothing is kept."""
    budget = budget or BodyBudget(1 << 30)
    loop = asyncio.get_running_loop()
    body = Body(loop, declared=len(packed), limit_bytes=limit, memory_bytes=16 * KIB, budget=budget)

    def feed() -> None:
        for start in range(0, len(packed), size):
            body.feed(packed[start : start + size])
        body.end()

    loop.call_soon(feed)
    try:
        made = await unpacked(body, encoding)
        whole = await made.read_all()
        assert made.complete
        assert made.size == len(whole)
        made.release()
        return whole
    finally:
        body.release()
        assert budget.used_bytes == 0


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", gzipped(PLAIN)),
        (b"x-gzip", gzipped(PLAIN[:50]) + gzipped(PLAIN[50:])),
        (b"deflate", zlib.compress(PLAIN)),
        (b"deflate", raw_deflate(PLAIN)),
    ],
)
def test_a_packed_body_is_read_as_what_it_stands_for(
    encoding: bytes, packed: bytes, size: int
) -> None:
    assert run(unpack(packed, encoding, size=size)) == PLAIN


@pytest.mark.parametrize(
    ("encoding", "packed", "said"),
    [
        (b"gzip", gzipped(PLAIN)[:-3], "ends too early"),
        (b"gzip", b"", "ends too early"),
        (b"gzip", PLAIN, "damaged"),
        (b"gzip", gzipped(PLAIN) + b"more", "damaged"),
        (b"gzip", gzipped(b"") * 1001, "more than 1000 members"),
        (b"deflate", zlib.compress(PLAIN)[:-3], "ends too early"),
        (b"deflate", zlib.compress(PLAIN) + b"more", "stands behind it"),
        (b"deflate", b"\x78", "ends too early"),
        (b"deflate", b"\xff" * 20, "damaged"),
    ],
)
def test_one_that_cannot_be_unpacked_is_the_clients_fault(
    encoding: bytes, packed: bytes, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        run(unpack(packed, encoding))
    assert caught.value.status == 400


def test_scn_b4_a_body_that_unpacks_to_more_than_the_cap_ends_at_the_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 64 MiB out of 64 KiB: what is ever kept stays below the cap and a piece.
    bomb = gzip.compress(bytes(64 << 20), compresslevel=9)
    assert len(bomb) < 80 * KIB
    budget = BodyBudget(1 << 30)
    most = 0
    take = BodyBudget.take

    def watched(self: BodyBudget, count: int) -> bool:
        nonlocal most
        taken = take(self, count)
        most = max(most, self.used_bytes)
        return taken

    monkeypatch.setattr(BodyBudget, "take", watched)
    with pytest.raises(BodyTooLarge):
        run(unpack(bomb, budget=budget, limit=1 << 20))
    assert most <= (1 << 20) + len(bomb)


def test_what_comes_out_counts_in_the_budget_of_all_bodies() -> None:
    with pytest.raises(BudgetFull):
        run(unpack(gzip.compress(bytes(256 * KIB)), budget=BodyBudget(128 * KIB)))


def test_a_large_one_is_kept_in_a_file_as_any_other() -> None:
    plain = bytes(range(256)) * 4 * 900
    assert run(unpack(gzip.compress(plain, compresslevel=1))) == plain
