"""What comes between a request that needs no task and its answer: it goes on with the handler, or ends, and nothing is
kept of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from gateway import errand, express
from gateway.app import RunningGateway
from gateway.domain.outliers import IN_A_ROW
from gateway.gateway import Gateway
from gateway.http.server_protocol import ServerProtocol
from gateway.limits import Limits
from schemas.replica import ReplicaPhase
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    GOOD,
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
    told,
    watch,
    whole,
)
from tests.support.gateway_keys import a_key, text_of
from tests.support.http_wire import SSE_HEAD, Peer, chunk, connected

BEARER = f"authorization: Bearer {text_of()}"
HEAD = GOOD[: GOOD.index(b"\r\n\r\n") + 4]


def test_the_first_at_an_engine_makes_its_connection_with_the_handler(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path, warm=False) as made, connected(made.gateway.port) as peer:
            for _ in range(3):
                assert await answered(peer) == (200, "")
            assert made.ways.all == (3, 0, 1)
            assert made.engine.raw is not None
            assert made.engine.raw.accepted == 1

    run(story())


@pytest.mark.parametrize(
    "request_",
    [
        ask(None, f"{CHAT}?a=b"),
        ask(None, CHAT, "x-request-id: mine"),
        ask(None, CHAT, f"traceparent: 00-{'a' * 32}-{'b' * 16}-01"),
        ask(None, CHAT, "expect: 100-continue"),
        ask(None, CHAT, "x-yard-loading: stream"),
        ask(None, f"/engines/m{CHAT}"),
        ask(body_of(text="x" * 300_000)),
    ],
    ids=["query", "id", "trace", "expect", "loading", "engines", "large"],
)
def test_what_says_more_than_a_plain_one_is_the_handlers(tmp_path: Path, request_: bytes) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            assert await answered(peer) == (200, "")
            head, end, body = request_.partition(b"\r\n\r\n")
            if b"expect" in head:
                await peer.send(head + end)
                assert await peer.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                await peer.send(body)
            else:
                await peer.send(request_)
            assert status_of((await peer.message())[0]) == 200
            assert await answered(peer) == (200, "")
            assert (made.ways.taken, made.ways.handed) == (2, 0)
            assert len(made.engine.asked) == 3
            assert made.engine.asked[1][1] == body

    run(story())


@pytest.mark.parametrize("came", [b"", HEAD, HEAD + told()[:-9]], ids=["nothing", "head", "part"])
@pytest.mark.parametrize("phase", ["stopped", "failed", "parked"])
def test_a_replica_that_the_log_ends_is_left_for_another(
    tmp_path: Path, phase: ReplicaPhase, came: bytes
) -> None:
    async def story() -> None:
        async with scene(tmp_path, engines=2) as made, connected(made.gateway.port) as peer:
            for engine in made.engines:
                engine.always = silent(came)
            # Its answer has another name for the model, so it is looked at as a whole.
            await peer.send(ask(body_of("em")))
            await until(lambda: sum(len(e.asked) for e in made.engines) == 1, "the request")
            lost = next(e for e in made.engines if e.asked)
            other = next(e for e in made.engines if e is not lost)
            other.always = says(GOOD)
            await put_another(made, lost, lost.name, phase=phase)
            head, body = await peer.message()
            assert status_of(head) == 200
            assert json.loads(body)["model"] == "em"
            fields = fields_of(head)
            assert (fields["x-yard-replica"], fields["x-yard-why"]) == (other.name, "retried")
            assert made.ways.all == (1, 0, 1)
            (line,) = await made.until_lines(1)
            assert (line["moves"], line["replica"], line["code"]) == (1, other.name, "ok")
            assert lost.raw is not None
            await until(lambda: not lost.raw.peers, "its connection to end")  # pyright: ignore[reportOptionalMemberAccess]

    run(story())


def test_an_answer_that_breaks_off_is_cut_and_never_made_whole(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            made.engine.next.append(says(GOOD[:-9], ends=True))
            await peer.send(ask())
            came = await peer.rest()
            assert GOOD.partition(b"\r\n\r\n")[2] not in came
            (line,) = await made.until_lines(1)
            assert line["code"] == "engine_error"
            assert not line["complete"]
            await until(lambda: not made.gateway.gateway.ejected, "the engine to be trusted")

    run(story())


def test_a_good_answer_counts_for_its_replica(tmp_path: Path) -> None:
    """Failures are no row when there is a good answer between them."""
    asks = ask(None, CHAT, "x-yard-session: one")
    error = says(whole(b"{}", "500 No"))

    async def story() -> None:
        async with scene(tmp_path, engines=2) as made, connected(made.gateway.port) as peer:
            assert await answered(peer, asks) == (200, "")
            engine = next(e for e in made.engines if e.asked)
            few = [500] * (IN_A_ROW - 1)
            for expected in (*few, 200, *few, 200):
                if expected == 500:
                    engine.next.append(error)
                assert (await answered(peer, asks))[0] == expected
            assert len(engine.asked) == 2 * IN_A_ROW + 1
            assert not made.gateway.gateway.ejections.outliers
            for _ in range(IN_A_ROW):
                engine.next.append(error)
                assert (await answered(peer, asks))[0] == 500
            assert made.gateway.gateway.ejections.outliers
            assert made.ways.all == (3 * IN_A_ROW + 1, 0, 3 * IN_A_ROW - 2)

    run(story())


# -- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("came", [b"", HEAD, HEAD + told()[:-9]], ids=["nothing", "head", "part"])
@pytest.mark.parametrize("how", ["ends", "breaks"])
def test_a_client_that_leaves_ends_what_the_engine_does_for_it(
    tmp_path: Path, how: str, came: bytes
) -> None:
    async def story() -> None:
        key = a_key(parallel=1, tpm=1000)
        async with scene(tmp_path) as made:
            await put_key(made, key)
            made.engine.next.append(silent(came))
            async with connected(made.gateway.port) as peer:
                await peer.send(ask(None, CHAT, BEARER))
                await made.engine.until_asked(1)
                assert dict(made.gateway.gateway.usage.by_replica) == {"r-0": 1}
                if how == "ends":
                    await peer.send_end()
                else:
                    peer.break_off()
                await made.quiet()
            raw = made.engine.raw
            assert raw is not None
            await until(lambda: not raw.peers, "the engine's connection to end")
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["complete"]) == (499, "client_gone", False)
            assert (line["replica"], line["key"], line["first_ms"]) == ("r-0", key.id, -1)
            assert made.ways.all == (1, 0, 0)
            counted = made.numbers()
            assert counted['yard_gateway_requests_total{code="client_gone",model="m"}'] == 1
            # The engine was reading what was asked, so that is what it is charged with.
            clock = made.gateway.gateway.clock
            reading = made.gateway.limits.ledger.read(key, clock.now_s())
            assert (reading.requests, reading.tokens) == (1, len(body_of()) // 4)
            async with connected(made.gateway.port) as peer:
                # Its place is free again.
                assert await answered(peer, ask(None, CHAT, BEARER)) == (200, "")

    run(story())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        whole(b"{}", "404 Not Found"),
        whole(b"data: 1\n\n", extra="content-type: text/event-stream\r\n"),
        b"garbage\r\n\r\n",
        HEAD + told() + b"more",
    ],
    ids=["no connection", "error", "events", "garbage", "more"],
)
def test_a_client_that_leaves_while_it_is_handed_over_is_ended_once(
    tmp_path: Path, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handing = ServerProtocol.hand_over

    def leaving(self: ServerProtocol, *args: object) -> None:
        handing(self, *args)  # pyright: ignore[reportArgumentType]
        self.eof_received()
        self.abort()

    async def story() -> None:
        async with scene(tmp_path, warm=answer is not None) as made:
            await put_key(made, a_key(parallel=1))
            if answer is not None:
                made.engine.next.append(says(answer))
            with monkeypatch.context() as patch:
                patch.setattr(ServerProtocol, "hand_over", leaving)
                async with connected(made.gateway.port) as peer:
                    await peer.send(ask(None, CHAT, BEARER))
                    await peer.gone()
                    await made.quiet()
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"]) == (499, "client_gone")
            # The handler never began.
            assert made.ways.all == (1, 0, 0)
            await until(lambda: not made.gateway.gateway.ejected, "the engine to be trusted")
            async with connected(made.gateway.port) as peer:
                assert await answered(peer, ask(None, CHAT, BEARER)) == (200, "")

    run(story())


def test_an_answer_in_the_moment_its_client_leaves_is_nobodys(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made:
            gate = asyncio.Event()
            for _ in range(8):
                gate.clear()
                made.engine.next.append(holds(gate, GOOD))
                async with connected(made.gateway.port) as peer:
                    await peer.send(ask())
                    await until(lambda: made.gateway.server.active == 1, "the request")
                    await until(lambda: not made.engine.next, "the engine")
                    gate.set()
                    peer.break_off()
                    await made.quiet()
            lines = await made.until_lines(8)
            assert {line["code"] for line in lines} <= {"ok", "client_gone"}
            async with connected(made.gateway.port) as peer:
                assert await answered(peer) == (200, "")

    run(story())


# -- drains --------------------------------------------------------------------------------------


@asynccontextmanager
async def ending(made: Scene, drain_s: float) -> AsyncIterator[tuple[RunningGateway, Peer]]:
    """A second gateway with one request in flight, that ends with the block."""
    async with made.yard.own_gateway("gw-2", drain_s=drain_s) as gateway:
        ways = watch(gateway)
        peer = await asyncio.open_connection("127.0.0.1", gateway.port)
        client = Peer(*peer)
        assert await answered(client) == (200, "")
        assert ways.all == (1, 0, 1)
        gate = made.engine
        before = len(gate.asked)
        await client.send(ask())
        await gate.until_asked(before + 1)
        assert ways.all == (2, 0, 1)
        yield gateway, client


@pytest.mark.parametrize("came", [b"", HEAD, HEAD + told()[:-9]], ids=["nothing", "head", "part"])
def test_a_gateway_that_ends_lets_it_finish(tmp_path: Path, came: bytes) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made:
            gate = asyncio.Event()
            made.engine.next.extend((says(GOOD), holds(gate, GOOD[len(came) :], first=came)))

            async def let_go(gateway: RunningGateway) -> None:
                await until(lambda: gateway.server.draining, "the end to begin")
                gate.set()

            async with ending(made, 10.0) as (gateway, client):
                letting = asyncio.create_task(let_go(gateway))
            await letting
            head, body = await client.message()
            assert status_of(head) == 200
            assert json.loads(body) == json.loads(told())
            assert fields_of(head)["connection"] == "close"
            await client.gone()
            await client.close()
            assert dict(gateway.gateway.usage.by_replica) == {}

    run(story())


@pytest.mark.parametrize("came", [b"", HEAD, HEAD + told()[:-9]], ids=["nothing", "head", "part"])
def test_a_gateway_that_ends_cuts_what_takes_too_long_and_says_so(
    tmp_path: Path, came: bytes
) -> None:
    async def story() -> None:
        async with scene(tmp_path, model={"aliases": ("em",)}) as made:
            made.engine.next.extend((says(GOOD), silent(came)))
            async with ending(made, 0.1) as (gateway, client):
                pass
            if came == b"" or came == HEAD:
                head, body = await client.message()
                assert (status_of(head), json.loads(body)["error"]["code"]) == (503, "draining")
                assert fields_of(head)["connection"] == "close"
            await client.gone()
            await client.close()
            assert gateway.server.active == 0
            assert dict(gateway.gateway.usage.by_replica) == {}
            assert gateway.server.budget.used_bytes == 0

    run(story())


def test_a_gateway_that_ends_has_told_all_that_was_used(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path, warm=False) as made:
            async with made.yard.own_gateway("gw-2") as gateway:
                ways = watch(gateway)
                async with connected(gateway.port) as peer:
                    for _ in range(6):
                        assert await answered(peer) == (200, "")
                assert ways.all == (6, 0, 1)
                numbers = gateway.metrics.render().decode()
                assert 'yard_gateway_requests_total{code="ok",model="m"} 6.0' in numbers
            assert made.accounts() == {("m", "", ""): (6, 0, 66, 0, 30, 0, 6)}
            assert len(made.lines()) == 6

    run(story())


# -- what should not happen ----------------------------------------------------------------------


def broken(*args: object, **fields: object) -> NoReturn:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize("at", ["own_lines", "tokens_of_whole"])
def test_a_fault_of_ours_is_answered_and_nothing_is_kept(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine is asked, and when it has answered."""
    asks = ask(None, CHAT, BEARER)

    async def story() -> None:
        async with scene(tmp_path) as made:
            await put_key(made, a_key(parallel=1))
            with monkeypatch.context() as patch:
                patch.setattr(errand, at, broken)
                async with connected(made.gateway.port) as peer:
                    assert await answered(peer, asks) == (500, "internal_error")
                    await peer.gone()
            await made.quiet()
            (line,) = await made.until_lines(1)
            assert (line["status"], line["code"], line["model"]) == (500, "internal_error", "m")
            async with connected(made.gateway.port) as peer:
                assert await answered(peer, asks) == (200, "")
            assert made.ways.all == (2, 0, 1 if at == "own_lines" else 0)

    run(story())


@pytest.mark.parametrize("at", ["lane_of", "read_plain", "Errand"])
def test_a_fault_of_ours_before_it_is_taken_leaves_it_to_the_handler(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = ask(None, CHAT, BEARER)

    async def story() -> None:
        async with scene(tmp_path) as made:
            await put_key(made, a_key(parallel=1))
            with monkeypatch.context() as patch:
                patch.setattr(express, at, broken)
                async with connected(made.gateway.port) as peer:
                    for _ in range(2):
                        assert await answered(peer, asks) == (200, "")
            assert made.ways.all == (0, 2, 0)
            await made.quiet()

    run(story())


def test_a_fault_of_ours_is_told_in_the_form_and_with_the_headers_of_any_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = ask(None, "/v1/messages", "origin: http://a")

    async def story() -> None:
        async with scene(tmp_path, cors_origins=("http://a",)) as made:
            with monkeypatch.context() as patch:
                patch.setattr(errand, "tokens_of_whole", broken)
                async with connected(made.gateway.port) as peer:
                    await peer.send(asks)
                    head, body = await peer.message()
            (line,) = await made.until_lines(1)
            fields = fields_of(head)
            assert status_of(head) == 500
            assert fields["access-control-allow-origin"] == "http://a"
            assert fields["x-request-id"] == fields["request-id"] == line["request"]
            assert json.loads(body)["type"] == "error"

    run(story())


def test_a_fault_before_it_begins_is_the_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = ask(None, CHAT, BEARER)

    async def story() -> None:
        async with scene(tmp_path) as made:
            await put_key(made, a_key(parallel=1))
            async with connected(made.gateway.port) as peer:
                with monkeypatch.context() as patch:
                    patch.setattr(Limits, "enter", broken)
                    assert await answered(peer, asks) == (500, "internal_error")
                    await peer.gone()
            await made.quiet()
            async with connected(made.gateway.port) as peer:
                assert await answered(peer, asks) == (200, "")
            assert made.ways.all == (1, 1, 0)

    run(story())


def test_a_fault_behind_the_answer_breaks_the_connection_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made:
            with monkeypatch.context() as patch:
                patch.setattr(Gateway, "judge", broken)
                async with connected(made.gateway.port) as peer:
                    await peer.send(ask())
                    await peer.gone()
            await made.quiet()
            async with connected(made.gateway.port) as peer:
                assert await answered(peer) == (200, "")

    run(story())


# -- several on one connection -------------------------------------------------------------------


def test_requests_of_all_kinds_sent_at_once_are_answered_in_order(tmp_path: Path) -> None:
    kinds = [
        (ask(), 200, b'"model": "m"'),
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n", 200, b'"object":"list"'),
        (ask(body_of("em")), 200, b'"model": "em"'),
        (ask(body_of(stream=True)), 200, b"data: [DONE]"),
        (ask(), 200, b'"model": "m"'),
        (ask(b"no JSON"), 400, b"not valid JSON"),
        (ask(body_of("unknown")), 404, b"model_not_found"),
        (ask(body_of("em"), "/v1/embeddings"), 200, b'"model": "em"'),
        (b"\r\n" + ask(body_of("em", text="x" * 20_000)), 200, b'"model": "em"'),
        (ask(None, CHAT, "x-request-id: mine"), 200, b'"model": "m"'),
        (ask(), 200, b'"model": "m"'),
    ]
    stream = SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            made.engine.next.extend((says(GOOD), says(GOOD[:50], GOOD[50:]), says(stream)))
            await peer.send(b"".join(request for request, _, _ in kinds))
            for request, status, inside in kinds:
                head, body = await peer.message()
                assert status_of(head) == status, request[:60]
                assert inside in body, request[:60]
            assert made.ways.handed == 0
            lines = await made.until_lines(len(kinds))
            assert [line["status"] for line in lines] == [status for _, status, _ in kinds]

    run(story())


@pytest.mark.parametrize("status", [200, 404])
def test_what_was_sent_behind_one_in_flight_waits_for_it(tmp_path: Path, status: int) -> None:
    """Behind one that is answered at once, and one that is handed over."""

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            gate = asyncio.Event()
            error = whole(b'{"error":{"message":"no"}}', "404 Not Found")
            made.engine.next.append(holds(gate, GOOD if status == 200 else error))
            await peer.send(ask())
            await made.engine.until_asked(1)
            await peer.send(ask(body_of("em")))
            async with connected(made.gateway.port) as other:
                # Whoever answers this has read the second request too.
                await other.send(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
                await other.message()
            assert len(made.engine.asked) == 1
            gate.set()
            statuses = [status_of((await peer.message())[0]) for _ in range(2)]
            assert statuses == [status, 200]
            assert made.ways.all == (2, 0, int(status == 404))

    run(story())


def test_between_two_its_connection_is_an_idle_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            gate = asyncio.Event()
            made.engine.next.append(holds(gate, GOOD))
            await peer.send(ask())
            await made.engine.until_asked(1)
            (connection,) = made.gateway.server.connections
            assert (connection.busy, connection.spare, connection.deadline) == (True, False, 0.0)
            gate.set()
            assert status_of((await peer.message())[0]) == 200
            assert (connection.busy, connection.spare) == (False, True)
            assert connection.deadline > asyncio.get_running_loop().time()
            assert made.ways.all == (1, 0, 0)

    run(story())


@pytest.mark.parametrize(
    ("version", "header", "stays"),
    [
        ("1.1", "connection: close", False),
        ("1.0", "a: b", False),
        ("1.0", "connection: keep-alive", True),
    ],
)
def test_the_connection_stays_as_its_client_asks(
    tmp_path: Path, version: str, header: str, stays: bool
) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            request = ask(None, CHAT, header, version=version)
            await peer.send(request)
            head, body = await peer.message()
            assert (status_of(head), json.loads(body)) == (200, json.loads(told()))
            assert fields_of(head)["connection"] == ("keep-alive" if stays else "close")
            if stays:
                assert await answered(peer, request) == (200, "")
            else:
                await peer.gone()

    run(story())
