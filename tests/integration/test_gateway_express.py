"""A request that needs no task is answered, counted and told of exactly as one that the handler serves.

Each story runs twice, in two yards that are alike: once as it comes, once with everything left to the handler. What
clients, engines and the log's readers can see must be the same but for ids and times.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from schemas.adapternames import engine_name
from tests.support.aio import run
from tests.support.express_both import Case, check, told_apart
from tests.support.express_cases import (
    ALIKE,
    BEARER,
    BROKEN,
    KEYS,
    LIMITED,
    LOST,
    ODD,
    REPLICAS,
    STREAMS,
)
from tests.support.express_yard import (
    CHAT,
    GOOD,
    ask,
    body_of,
    fields_of,
    holds,
    put_key,
    says,
    scene,
    status_of,
    told,
    watch,
    whole,
)
from tests.support.gateway_agent import a_yard_with, agent, nothing_left
from tests.support.gateway_keys import ID, a_key, text_of
from tests.support.gateway_world import an_adapter
from tests.support.gateway_yard import memory_yard
from tests.support.http_wire import connected

POET = engine_name("poet", an_adapter().version)


def test_what_needs_no_task_looks_as_if_it_had_one(tmp_path: Path) -> None:
    seen = check(tmp_path, ALIKE, cors_origins=("http://a", "http://b"))
    assert seen["origin"].answers[0][1]["access-control-allow-origin"] == "http://a"
    assert "access-control-allow-origin" not in seen["other origin"].answers[0][1]
    assert {json.loads(body)["model"] for _, _, body in seen["alias"].answers} == {"em"}
    assert {json.loads(body)["model"] for _, _, body in seen["alias"].asked[0]} == {"m"}


def test_any_origin_and_the_key_of_an_engine(tmp_path: Path) -> None:
    case = Case(headers=("origin: http://c",))
    seen = check(tmp_path, {"any": case}, cors_origins=("*",), replica={"has_key": True})
    assert all("authorization" in fields for _, fields, _ in seen["any"].asked[0])


def test_with_a_collector_of_traces_too(tmp_path: Path) -> None:
    cases = {"plain": Case(), "limited": Case(key=LIMITED, headers=(BEARER,), body=body_of("em"))}
    check(tmp_path, cases, otlp_endpoint="http://127.0.0.1:1")


def test_its_key_is_counted_and_limited_as_if_it_had_one(tmp_path: Path) -> None:
    seen = check(tmp_path, KEYS)
    assert all(line["key"] == ID for case in seen.values() for line in case.lines)
    assert "x-ratelimit-remaining-tokens" in seen["limited"].answers[0][1]


def test_it_goes_to_the_replica_it_would_have_gone_to(tmp_path: Path) -> None:
    seen = check(tmp_path, REPLICAS, engines=2)
    why = {name: case.answers[-1][1]["x-yard-why"] for name, case in seen.items()}
    assert why == {
        "session": "session",
        "session of the second name": "session",
        "empty session": "least-loaded",
        "beginning": "prefix",
        "prompt": "prefix",
        "two replicas": "least-loaded",
    }


def test_an_odd_answer_is_the_handlers_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    check(tmp_path, ODD)


def keys_last(cases: dict[str, Case]) -> dict[str, Case]:
    """Once there is a key everybody needs one."""
    return dict(sorted(cases.items(), key=lambda item: item[1].key is not None))


def test_a_stream_is_the_same_by_either_way(tmp_path: Path) -> None:
    check(tmp_path, keys_last(STREAMS))


def test_a_stream_that_breaks_is_told_to_its_client_by_either_way(tmp_path: Path) -> None:
    seen = check(tmp_path, keys_last(BROKEN), stream_stall_s=0.1)
    for name, case in seen.items():
        if name != "says more":
            assert b"error" in case.answers[0][2], name
            assert case.lines[0]["code"] == "engine_error", name
            assert not case.lines[0]["complete"], name


def test_a_request_that_loses_its_engine_goes_to_another_once(tmp_path: Path) -> None:
    seen = check(tmp_path, LOST, engines=2, first_byte_s=0.2, stream_stall_s=0.1)
    for name, case in seen.items():
        # A kept connection that is silent at once may have been closed, so the same replica is asked once more.
        moves = 0 if name == "late" else 1
        assert [line["moves"] for line in case.lines] == [moves, 0, 0], name
        assert sum(map(len, case.asked)) == 4, name
        assert (case.lines[0]["code"] == "engine_error") == (name == "twice garbage"), name


def test_heads_that_alternate_on_one_connection_are_each_taken_for_what_they_are(
    tmp_path: Path,
) -> None:
    """Of the client's connection, and of the engine's."""
    other = "/v1/embeddings"
    of_list = whole(told(object="list", model="m"), extra="content-type: application/yaml\r\n")
    broken = whole(b"broken", "500 No", "content-type: text/plain\r\n")

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            for body in (b'{"model":"m"}', b'{"model":"em"}'):
                for kind in "aababba":
                    path, answer = (CHAT, GOOD) if kind == "a" else (other, of_list)
                    made.engine.next.append(says(answer))
                    await peer.send(ask(body, path, f"user-agent: {kind}"))
                    head, _ = await peer.message()
                    assert status_of(head) == 200
                    expected = "application/json" if kind == "a" else "application/yaml"
                    assert fields_of(head)["content-type"] == expected
                    asked, _ = made.engine.asked[-1]
                    assert asked.startswith(f"POST {path} ".encode())
                    assert fields_of(asked)["user-agent"] == kind
            assert made.ways.all == (14, 0, 0)
            for kind in "aababba":
                made.engine.next.append(says(GOOD if kind == "a" else broken))
                await peer.send(ask())
                assert status_of((await peer.message())[0]) == (200 if kind == "a" else 500)
            assert made.ways.all == (21, 0, 3)

    run(story())


def test_keys_that_alternate_on_one_connection_are_each_counted_for_themselves(
    tmp_path: Path,
) -> None:
    keys = [a_key(id, rpm=20) for id in ("abcdefgh2345", "otherkey2345")]

    async def story() -> None:
        async with scene(tmp_path) as made, connected(made.gateway.port) as peer:
            for key in keys:
                await put_key(made, key)
            order = [0, 0, 1, 0, 1, 1, 0]
            for at, whose in enumerate(order):
                await peer.send(ask(None, CHAT, f"authorization: Bearer {text_of(keys[whose].id)}"))
                fields = fields_of((await peer.message())[0])
                left = 20 - order[: at + 1].count(whose)
                assert fields["x-ratelimit-remaining-requests"] == str(left)
            assert made.ways.all == (7, 0, 0)
            lines = await made.until_lines(7)
            assert [line["key"] for line in lines] == [keys[whose].id for whose in order]

    run(story())


def test_two_at_once_are_spread_over_two_replicas(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path, engines=2) as made:
            gate = asyncio.Event()
            for engine in made.engines:
                engine.always = holds(gate, GOOD)
            async with connected(made.gateway.port) as one, connected(made.gateway.port) as other:
                for peer in (one, other):
                    await peer.send(ask())
                for engine in made.engines:
                    await engine.until_asked(1)
                assert dict(made.gateway.gateway.usage.by_replica) == {"r-0": 1, "r-1": 1}
                gate.set()
                found = {fields_of((await p.message())[0])["x-yard-replica"] for p in (one, other)}
                assert found == {"r-0", "r-1"}
            assert made.ways.all == (2, 0, 0)

    run(story())


def test_an_adapter_that_is_there_is_served_as_by_the_handler(tmp_path: Path) -> None:
    async def play_adapter(data: Path, express: bool) -> list[Any]:
        async with memory_yard(data) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            ways = watch(gateway, express=express)
            seen: list[Any] = []
            async with connected(gateway.port) as peer:
                # Loaded by the first.
                for name in ("poet", "poet", "rhymer", "m:poet", "m", "poet"):
                    await peer.send(ask(body_of(name)))
                    head, body = await peer.message()
                    fields = told_apart(head)
                    waited = int(fields.pop("x-yard-waited-ms"))
                    seen.append((status_of(head), fields, body, waited if seen else None))
                    assert json.loads(body)["model"] == name
                # Gone from the engine, and not known to be: loaded anew, and answered.
                assert engine.names is not None
                engine.names.clear()
                await peer.send(ask(body_of("poet")))
                head, body = await peer.message()
                assert json.loads(body)["choices"][0]["message"]["content"].startswith(f"[{POET}]")
                seen.append((status_of(head), fields_of(head)["x-yard-adapter"]))
            seen.append([(s.path, s.body) for s in engine.seen])
            assert ways.all == ((7, 0, 2) if express else (0, 7, 0))
            numbers = gateway.metrics.render().decode().splitlines()
            seen.append([n for n in numbers if n.startswith("yard_gateway_adapter_requests_total")])
            seen.append([n for n in numbers if n.startswith("yard_gateway_requests_total")])
            nothing_left(gateway)
            # Its end writes what is left of the log.
        lines = [json.loads(line) for block in yard.access for line in block.splitlines()]
        seen.append([(x["model"], x["adapter"], x["how"], x["code"], x["replica"]) for x in lines])
        return seen

    async def story() -> None:
        with_it = await play_adapter(tmp_path / "one", express=True)
        without = await play_adapter(tmp_path / "other", express=False)
        assert with_it == without
        assert [answer[1]["x-yard-adapter"] for answer in with_it[1:4]] == ["hit"] * 3
        assert with_it[6] == (200, "loaded")

    run(story())


def test_a_path_is_told_as_it_was_sent(tmp_path: Path) -> None:
    check(tmp_path, {"slash": Case(path=CHAT + "/")})


def test_tokens_are_read_whatever_an_answer_calls_itself_and_however_it_comes(
    tmp_path: Path,
) -> None:
    text = says(whole(told(), extra="content-type: text/plain\r\n"))
    crumbs = says(*[GOOD[at : at + 1] for at in range(len(GOOD))])
    cases = {
        "text": Case(key=LIMITED, headers=(BEARER,), always=text),
        "crumbs": Case(key=LIMITED, headers=(BEARER,), always=crumbs),
    }
    check(tmp_path, cases)
