"""Requests whose heads and bodies come apart, as many clients send them: without a task all the same, and never lost."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from gateway.http import due
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    GOOD,
    answered,
    ask,
    body_of,
    holds,
    scene,
    status_of,
)
from tests.support.http_wire import connected


def apart(request: bytes) -> tuple[bytes, bytes]:
    head, end, body = request.partition(b"\r\n\r\n")
    return head + end, body


def test_a_body_one_read_behind_its_head_needs_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy this machine is, its moment is not over.
    monkeypatch.setattr(due, "DUE_S", 20.0)

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            for count in range(1, 4):
                head, body = apart(ask())
                await peer.send(head)
                async with connected(made.gateway.port) as other:
                    assert await answered(other) == (200, "")
                await peer.send(body[:5])
                async with connected(made.gateway.port) as other:
                    assert await answered(other) == (200, "")
                await peer.send(body[5:])
                assert status_of((await peer.message())[0]) == 200
                assert made.ways.all == (3 * count, 0, 0)
            await made.quiet()

    run(story())


def test_a_client_library_that_writes_them_apart_needs_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "DUE_S", 20.0)

    async def story() -> None:
        async with scene(tmp_path) as made:
            url = f"http://127.0.0.1:{made.gateway.port}{CHAT}"
            async with httpx.AsyncClient(trust_env=False) as client:
                for _ in range(20):
                    answer = await client.post(url, json=json.loads(body_of()))
                    assert answer.status_code == 200
            assert made.ways.all == (20, 0, 0)
            await made.quiet()

    run(story())


def test_a_body_whose_moment_is_over_is_the_handlers(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            head, body = apart(ask())
            await peer.send(head + body[:5])
            await until(lambda: made.gateway.server.active == 1, "the handler to begin")
            await peer.send(body[5:])
            assert status_of((await peer.message())[0]) == 200
            assert made.ways.all == (0, 0, 0)
            # And what comes behind it is a request like any.
            assert await answered(peer) == (200, "")
            assert made.ways.all == (1, 0, 0)
            await made.quiet()

    run(story())


def test_what_comes_behind_such_a_body_is_answered_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "DUE_S", 20.0)

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            for _ in range(2):
                head, body = apart(ask())
                await peer.send(head + body[:5])
                async with connected(made.gateway.port) as other:
                    assert await answered(other) == (200, "")
                await peer.send(body[5:] + head + body + head)
                for _ in range(2):
                    assert status_of((await peer.message())[0]) == 200
                await peer.send(body)
                assert status_of((await peer.message())[0]) == 200
            await made.quiet()

    run(story())


@pytest.mark.parametrize("politely", [True, False])
def test_a_client_that_leaves_in_that_moment_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, politely: bool
) -> None:
    monkeypatch.setattr(due, "DUE_S", 20.0)

    async def story() -> None:
        async with scene(tmp_path) as made:
            async with connected(made.gateway.port) as peer:
                await peer.send(apart(ask())[0])
                async with connected(made.gateway.port) as other:
                    assert await answered(other) == (200, "")
                if politely:
                    await peer.send_end()
                    await peer.gone()
            await until(lambda: not made.gateway.server.connections, "it to be gone")
            assert made.gateway.server.active == 0
            assert made.ways.all == (1, 0, 0)
            await made.quiet()

    run(story())


def test_an_end_of_the_gateway_in_that_moment_answers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "DUE_S", 20.0)

    async def story() -> None:
        gate = asyncio.Event()
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            made.engine.next.append(holds(gate, GOOD))
            head, body = apart(ask())
            async with connected(made.gateway.port) as other:
                await other.send(ask())
                await made.engine.until_asked(1)
                await peer.send(head)
                async with connected(made.gateway.port) as third:
                    assert await answered(third) == (200, "")
                ending = asyncio.create_task(made.gateway.server.drain(20.0))
                await until(lambda: made.gateway.server.active == 2, "both to be counted")
                await peer.send(body)
                assert status_of((await peer.message())[0]) == 200
                gate.set()
                assert status_of((await other.message())[0]) == 200
                assert await ending == 0

    run(story())
