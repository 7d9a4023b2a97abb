"""What changed between two requests of one connection holds for the second: keys, the catalog, room, turns."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest

from events.secrets import engine_key, node_secret
from gateway.clock import LoopClock
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    GOOD,
    answered,
    ask,
    body_of,
    fields_of,
    holds,
    put_another,
    put_key,
    says,
    scene,
    status_of,
    whole,
)
from tests.support.gateway_keys import a_key, text_of
from tests.support.gateway_world import NOW
from tests.support.gateway_yard import YARD_SECRET
from tests.support.http_wire import connected

BEARER = f"authorization: Bearer {text_of()}"


def test_without_room_for_its_body_it_is_refused_as_ever_and_served_once_there_is(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        size = len(body_of())
        async with scene(tmp_path, body_budget_bytes=size + size // 2) as made:
            gate = asyncio.Event()
            made.engine.next.append(holds(gate, GOOD))
            async with connected(made.gateway.port) as one, connected(made.gateway.port) as other:
                await one.send(ask())
                await made.engine.until_asked(1)
                status, _ = await answered(other)
                assert status == 503
                assert made.ways.all == (1, 1, 0)
                gate.set()
                assert status_of((await one.message())[0]) == 200
            await made.quiet()
            async with connected(made.gateway.port) as peer:
                assert await answered(peer) == (200, "")
            assert made.ways.all == (2, 1, 0)

    run(story())


def test_it_needs_nobody_but_its_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            assert await answered(peer) == (200, "")
            made.yard.logs["gw"].connection.disconnect()
            await until(lambda: not made.gateway.gateway.is_connected(), "the log to be away")
            assert await answered(peer) == (200, "")
            assert made.ways.all == (2, 0, 0)
            made.yard.logs["gw"].connection.reconnect()
            await until(made.gateway.gateway.is_connected, "the log to be back")

    run(story())


def test_a_model_with_turns_is_the_handlers(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path, model={"concurrency": 1}) as made:
            async with connected(made.gateway.port) as peer:
                assert await answered(peer) == (200, "")
            assert made.ways.all == (0, 1, 0)

    run(story())


def test_a_key_counts_from_the_next_request_as_the_log_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = ask(None, CHAT, BEARER)
    now = LoopClock().now

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            # 1. nobody needs one; then everybody
            assert await answered(peer, asks) == (200, "")
            assert await answered(peer) == (200, "")
            await put_key(made, a_key("otherkey2345"))
            assert await answered(peer) == (401, "invalid_api_key")
            assert await answered(peer, asks) == (401, "invalid_api_key")
            # 2. it comes, gets limits, other rights
            await put_key(made, a_key())
            assert await answered(peer, asks) == (200, "")
            await put_key(made, a_key(rpm=2))
            await peer.send(asks)
            fields = fields_of((await peer.message())[0])
            assert fields["x-ratelimit-limit-requests"] == "2"
            assert await answered(peer, asks) == (200, "")
            assert await answered(peer, asks) == (429, "rate_limit_exceeded")
            await put_key(made, a_key(models=("other",)))
            assert (await answered(peer, asks))[0] == 403
            # 3. it expires, and is revoked
            hour = timedelta(hours=1)
            await put_key(made, a_key(expires_at=now() + hour))
            assert await answered(peer, asks) == (200, "")
            with monkeypatch.context() as patch:
                patch.setattr(LoopClock, "now", staticmethod(lambda: now() + 2 * hour))
                assert await answered(peer, asks) == (401, "invalid_api_key")
            assert await answered(peer, asks) == (200, "")
            await put_key(made, a_key(revoked_at=NOW))
            assert await answered(peer, asks) == (401, "invalid_api_key")
            assert made.ways.all == (7, 6, 0)

    run(story())


def test_a_key_with_one_place_gives_it_back_with_the_answer(tmp_path: Path) -> None:
    asks = ask(None, CHAT, BEARER)

    async def story() -> None:
        async with scene(tmp_path) as made:
            await put_key(made, a_key(parallel=1))
            gate = asyncio.Event()
            made.engine.next.append(holds(gate, GOOD))
            async with connected(made.gateway.port) as one, connected(made.gateway.port) as other:
                await one.send(asks)
                await made.engine.until_asked(1)
                assert await answered(other, asks) == (429, "rate_limit_exceeded")
                gate.set()
                assert status_of((await one.message())[0]) == 200
                assert await answered(other, asks) == (200, "")
                # A failure gives it back as well.
                made.engine.next.append(says(whole(b"{}", "500 No")))
                assert (await answered(other, asks))[0] == 500
                assert await answered(other, asks) == (200, "")

    run(story())


def test_the_catalog_counts_as_it_is_for_each_request(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path, engines=2, warm=False) as made:
            one, other = made.engines
            tell, seen = made.yard.tell, made.yard.story
            await put_another(made, other, "r-1", model="m2", phase="starting")
            await made.yard.applied(made.gateway, await tell(seen.model("m2")))
            await put_another(made, other, "r-2", model="m2")
            async with connected(made.gateway.port) as peer:

                async def replica_of(model: str) -> str:
                    await peer.send(ask(body_of(model)))
                    head, body = await peer.message()
                    assert status_of(head) == 200
                    # The engines know one name.
                    assert json.loads(body)["model"] == ("m" if model == "m2" else model)
                    return fields_of(head)["x-yard-replica"]

                for _ in range(2):
                    assert await replica_of("em") == "r-0"
                    assert await replica_of("m2") == "r-2"
                # 1. the alias moves
                await tell(seen.model("m", aliases=()))
                seq = await tell(seen.model("m2", aliases=("em",)))
                await made.yard.applied(made.gateway, seq)
                assert await replica_of("em") == "r-2"
                assert json.loads(other.asked[-1][1])["model"] == "m2"
                assert await replica_of("m") == "r-0"
                # 2. another launch under the same id, with a key and somewhere else
                count = len(one.asked)
                await put_another(made, other, "r-0", has_key=True, pid=77)
                assert await replica_of("m") == "r-0"
                assert len(one.asked) == count
                key = engine_key(node_secret(YARD_SECRET, "n1"), "r-0")
                assert fields_of(other.asked[-1][0])["authorization"] == f"Bearer {key}"
                assert fields_of(other.asked[-1][0])["host"] == other.url.removeprefix("http://")
                # The other one there has none.
                assert await replica_of("m2") == "r-2"
                assert "authorization" not in fields_of(other.asked[-1][0])
                # 3. the model goes
                await made.yard.applied(made.gateway, await tell(seen.model_gone("m2")))
                assert await answered(peer, ask(body_of("m2"))) == (404, "model_not_found")
                assert await answered(peer, ask(body_of("em"))) == (404, "model_not_found")
                assert await replica_of("m") == "r-0"

    run(story())


def test_a_body_over_the_cap_is_refused_however_it_came(tmp_path: Path) -> None:
    async def story() -> None:
        long = body_of(text="x" * 2000)
        async with (
            scene(tmp_path, body_limit_bytes=len(long) - 1) as made,
            connected(made.gateway.port) as peer,
        ):
            assert await answered(peer) == (200, "")
            assert await answered(peer, ask(long)) == (413, "request_too_large")
            assert len(made.engine.asked) == 1

    run(story())
