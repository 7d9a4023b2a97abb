"""Connections to engines while they are being made: who gives up leaves nothing, who is late is told once."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from gateway.http.engine_connection import EngineConnection
from gateway.http.errors import ConnectFailed, EngineGone
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits
from gateway.http.pool import Pool
from tests.support.aio import run, until
from tests.support.http_wire import LOOPS, run_on


@contextmanager
def nobody_accepts() -> Iterator[str]:
    """An endpoint whose queue is full: a connection to it neither stands nor fails."""
    with socket.socket() as door, socket.socket() as first, socket.socket() as second:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for peer in (first, second):
            peer.setblocking(False)
            peer.connect_ex(door.getsockname())
        yield f"http://127.0.0.1:{door.getsockname()[1]}"


@contextmanager
def a_door() -> Iterator[str]:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(64)
        yield f"http://127.0.0.1:{door.getsockname()[1]}"


def pool_at(endpoint: str, **limits: float) -> Pool:
    return Pool(endpoint, ClientLimits(**limits), None)  # pyright: ignore[reportArgumentType]


async def ended(pool: Pool) -> None:
    pool.close()
    await pool.wait_closed()
    await until(lambda: not pool._openings, "all attempts to end")
    assert not pool.connections


def test_many_that_ask_at_once_get_a_connection_each() -> None:
    async def story() -> None:
        with a_door() as endpoint:
            pool = pool_at(endpoint)
            made = await asyncio.gather(*(pool.connect(Exchange()) for _ in range(20)))
            assert len(set(made)) == 20
            assert pool.connections == set(made)
            await ended(pool)

    run(story())


def test_all_that_wait_too_long_are_told_with_one_timer() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        timers: list[object] = loop._scheduled  # type: ignore[attr-defined]
        before = len(timers)
        with nobody_accepts() as endpoint:
            pool = pool_at(endpoint, connect_timeout_s=0.05)
            asked = [asyncio.ensure_future(pool.connect(Exchange())) for _ in range(20)]
            await until(lambda: len(pool._openings) == 20, "all to begin")
            assert len(timers) - before <= 2  # and the one of `until`
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(t) for t in told} == {ConnectFailed}
            await ended(pool)

    run(story())


def test_an_abort_ends_an_attempt_at_every_stage() -> None:
    async def story() -> None:
        with nobody_accepts() as endpoint:
            pool = pool_at(endpoint)
            for begun in (False, True):
                exchange = Exchange()
                asked = asyncio.ensure_future(pool.connect(exchange))
                await asyncio.sleep(0)
                if begun:
                    await until(lambda: bool(pool._openings), "it to begin")
                exchange.abort("the replica was stopped")
                with pytest.raises(EngineGone) as told:
                    await asked
                assert told.value.aborted
                await until(lambda: not pool._openings, "the attempt to end")
            with pytest.raises(EngineGone):
                await pool.connect(exchange)
            await ended(pool)

    run(story())


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_cancelled_leaves_no_connection(loop: str) -> None:
    async def story() -> None:
        with a_door() as endpoint:
            pool = pool_at(endpoint)
            # Before it began, while it is being made, and when it just stood.
            for rounds in range(10):
                asked = asyncio.ensure_future(pool.connect(Exchange()))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    # It may have had its connection before: then it is its own to close.
                    (await asked).close()
                await until(lambda: not pool._openings and not pool.connections, "nothing left")
            await ended(pool)

    run_on(loop, story())


def test_who_is_cancelled_when_the_connection_just_stood_leaves_none() -> None:
    async def story() -> None:
        with a_door() as endpoint:
            pool = pool_at(endpoint)
            asked = asyncio.ensure_future(pool.connect(Exchange()))
            made = EngineConnection.connection_made

            def made_and_cancelled(self: EngineConnection, transport: Any) -> None:
                made(self, transport)
                asked.cancel()

            with (
                patch.object(EngineConnection, "connection_made", made_and_cancelled),
                pytest.raises(asyncio.CancelledError),
            ):
                await asked
            await until(lambda: not pool._openings and not pool.connections, "nothing left")
            await ended(pool)

    run(story())


def test_a_pool_that_closes_tells_whoever_waits() -> None:
    async def story() -> None:
        with nobody_accepts() as endpoint:
            pool = pool_at(endpoint)
            early = asyncio.ensure_future(pool.connect(Exchange()))
            await until(lambda: bool(pool._openings), "it to begin")
            late = asyncio.ensure_future(pool.connect(Exchange()))
            await asyncio.sleep(0)
            pool.close()
            told = await asyncio.gather(early, late, return_exceptions=True)
            assert [type(t) for t in told] == [ConnectFailed, ConnectFailed]
            with pytest.raises(ConnectFailed):
                await pool.connect(Exchange())
            await ended(pool)

    run(story())


def test_nobody_at_the_endpoint_is_an_error_of_the_connection() -> None:
    async def story() -> None:
        with a_door() as endpoint:
            pass
        pool = pool_at(endpoint)
        with pytest.raises(ConnectFailed):
            await pool.connect(Exchange())
        await ended(pool)

    run(story())


@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "http://",
        "http://[::1",
        "http://h:99999",
        "http://h:port",
        "http://\u00fc:1",
        f"http://{'a' * 64}:1",
        "http://a..b:1",
    ],
)
def test_an_address_that_is_none_is_no_connection_and_no_other_error(endpoint: str) -> None:
    """Addresses come from events: one that is nonsense must fail its requests and probes, and end nothing else."""

    async def story() -> None:
        with pytest.raises(ConnectFailed):
            await pool_at(endpoint).connect(Exchange())

    run(story())
