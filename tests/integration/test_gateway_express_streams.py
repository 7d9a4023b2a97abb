"""What comes between the first event of a stream that needs no task and its last: its client, its engine, the log, the end
of the gateway.
"""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.http.relay import Relay
from schemas.replica import ReplicaPhase
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    Scene,
    answered,
    ask,
    body_of,
    fields_of,
    holds,
    put_another,
    put_key,
    says,
    scene,
    silent,
    status_of,
)
from tests.support.gateway_keys import a_key, text_of
from tests.support.http_wire import SSE_HEAD, Peer, chunk, connected

BEARER = f"authorization: Bearer {text_of()}"
STREAM = ask(body_of(stream=True), CHAT, BEARER)
EVENT = chunk(b'data: {"model":"m"}\n\n')
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def begun(peer: Peer) -> None:
    """The stream is asked for, and its first event is here."""
    await peer.send(STREAM)
    assert status_of(await peer.until(b"\r\n\r\n")) == 200
    assert await peer.exactly(len(EVENT)) == EVENT


async def free_again(made: Scene) -> None:
    """The one place of its key."""
    async with connected(made.gateway.port) as peer:
        assert await answered(peer, ask(None, CHAT, BEARER)) == (200, "")


@pytest.mark.parametrize("how", ["ends", "breaks"])
def test_a_client_that_leaves_a_stream_ends_it_at_the_engine(tmp_path: Path, how: str) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made:
            await put_key(made, a_key(parallel=1))
            made.engine.next.append(silent(SSE_HEAD, EVENT))
            async with connected(made.gateway.port) as peer:
                await begun(peer)
                assert dict(made.gateway.gateway.usage.by_replica) == {"r-0": 1}
                await (peer.send_end() if how == "ends" else asyncio.sleep(0))
                if how == "breaks":
                    peer.break_off()
                await made.quiet()
            raw = made.engine.raw
            assert raw is not None
            await until(lambda: not raw.peers, "the engine's connection to end")
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["complete"]) == (499, "client_gone", False)
            assert line["first_ms"] >= 0
            assert made.ways.all == (1, 0, 0)
            await free_again(made)

    run(story())


@pytest.mark.parametrize("express", [True, False], ids=["express", "handler"])
def test_a_client_that_has_all_of_a_stream_may_leave_before_anybody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, express: bool
) -> None:
    async def story() -> None:
        async with scene(tmp_path, express=express) as made:
            made.engine.next.append(says(SSE_HEAD, EVENT, LAST))
            settle = Relay._settle  # pyright: ignore[reportPrivateUsage]

            def settled(relay: Relay, *, complete: bool, reason: str) -> None:
                settle(relay, complete=complete, reason=reason)
                for connection in list(made.gateway.server.connections):
                    connection.eof_received()

            async with connected(made.gateway.port) as peer:
                await peer.send(ask(body_of(stream=True)))
                monkeypatch.setattr(Relay, "_settle", settled)
                assert (await peer.message())[1] == b'data: {"model":"m"}\n\ndata: [DONE]\n\n'
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["complete"]) == (200, "ok", True)
            await made.quiet()

    run(story())


@pytest.mark.parametrize("phase", ["stopped", "failed"])
def test_a_stream_whose_replica_the_log_ends_is_told_so(
    tmp_path: Path, phase: ReplicaPhase
) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            await put_key(made, a_key(parallel=1))
            made.engine.next.append(silent(SSE_HEAD, EVENT))
            await begun(peer)
            await put_another(made, made.engine, phase=phase)
            frame = json.loads((await peer.chunks()).removeprefix(b"data: "))
            assert frame["error"]["code"] == "engine_error"
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["complete"]) == (200, "engine_error", False)
            assert made.ways.all == (1, 0, 0)
            # The connection goes on.
            await put_another(made, made.engine, phase="ready")
            assert await answered(peer, ask(None, CHAT, BEARER)) == (200, "")

    run(story())


def test_a_gateway_that_ends_lets_a_stream_finish_and_cuts_what_does_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            scene(tmp_path) as made,
            connected(made.gateway.port) as one,
            connected(made.gateway.port) as other,
        ):
            await put_key(made, a_key(parallel=4))
            gate = asyncio.Event()
            made.engine.next += [
                holds(gate, LAST, first=SSE_HEAD + EVENT),
                silent(SSE_HEAD, EVENT),
            ]
            await begun(one)
            await begun(other)
            draining = asyncio.ensure_future(made.gateway.server.drain(0.3))
            await until(lambda: made.gateway.server.draining, "the drain")
            gate.set()
            assert await one.rest() == LAST
            assert await other.rest() == b""
            assert await draining == 1
            ended = {(x["status"], x["code"], x["complete"]) for x in await made.until_lines(2)}
            assert ended == {(200, "ok", True), (499, "client_gone", False)}

    run(story())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("came", [b"", EVENT[:9]], ids=["nothing", "part"])
def test_a_gateway_that_ends_says_so_where_no_event_came(
    tmp_path: Path, came: bytes, path: str
) -> None:
    """Engines send the head of a stream before they have read what was asked."""

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            made.engine.next.append(silent(SSE_HEAD + came))
            await peer.send(ask(body_of(stream=True), path))
            await made.engine.until_asked(1)
            (wire,) = made.gateway.server.connections
            await until(lambda: wire._engine is not None, "the stream")  # pyright: ignore[reportPrivateUsage]
            assert await made.gateway.server.drain(0.1) == 1
            head, body = await peer.message()
            assert status_of(head) == 503
            assert fields_of(head)["connection"] == "close"
            assert "x-request-id" in fields_of(head)
            error = json.loads(body)
            assert (
                (error["type"] == "error")
                if path != CHAT
                else (error["error"]["code"] == "draining")
            )
            await peer.gone()
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["complete"]) == (499, "client_gone", False)
            assert made.ways.all == (1, 0, 0)

    run(story())


def test_a_client_that_does_not_read_halts_its_engine_and_loses_nothing(tmp_path: Path) -> None:
    # Half of it is more than sockets, whose buffers grow with what passes, were seen to take.
    count, block = 1000, chunk(b"data: " + b"x" * 65_000 + b"\n\n")
    sent = 0

    async def story() -> None:
        async def much(peer: Peer) -> bool:
            nonlocal sent
            await peer.send(SSE_HEAD + EVENT)
            for _ in range(count):
                await peer.send(block)
                sent += 1
            await peer.send(LAST)
            # The client may take longer than an engine here waits for its next request.
            return False

        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            await put_key(made, a_key(parallel=1))
            made.engine.next.append(much)
            await begun(peer)
            seen = -1

            def halted() -> bool:
                nonlocal seen
                same, seen = sent == seen, sent
                return same and sent > 0

            for _ in range(3):
                # Whoever halts stays halted.
                await until(halted, "the engine to halt")
            assert sent < count // 2, f"{sent} blocks are kept for a client that reads none"
            assert await peer.chunks() == (b"data: " + b"x" * 65_000 + b"\n\n") * count + (
                b"data: [DONE]\n\n"
            )
            (line,) = await made.until_lines(1)
            assert (line["code"], line["complete"]) == ("ok", True)
            assert made.ways.all == (1, 0, 0)
            await made.quiet()

    run(story())


def test_streams_and_whole_answers_take_turns_on_one_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            await put_key(made, a_key(parallel=1))
            for _ in range(4):
                made.engine.next.append(says(SSE_HEAD + EVENT, EVENT, LAST))
                await peer.send(STREAM + ask(None, CHAT, BEARER))
                head, body = await peer.message()
                assert b"text/event-stream" in head
                assert body.endswith(b"data: [DONE]\n\n")
                head, body = await peer.message()
                assert status_of(head) == 200
                assert json.loads(body)["model"] == "m"
            assert made.engine.raw is not None
            assert made.engine.raw.accepted == 1

    run(story())
