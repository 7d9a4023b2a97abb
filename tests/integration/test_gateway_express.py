"""A request that needs no task is answered, counted and told of exactly as one that the handler serves.

Each story runs twice, in two yards that are alike: once as it comes, once with everything left to the handler. What
clients, engines and the log's readers can see must be the same but for ids and times.
"""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.adapternames import engine_name
from schemas.key import Key
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    GOOD,
    USAGE,
    Engine,
    Scene,
    Speech,
    ask,
    body_of,
    fields_of,
    holds,
    put_key,
    says,
    scene,
    silent,
    status_of,
    told,
    watch,
    whole,
)
from tests.support.gateway_agent import a_yard_with, agent, nothing_left
from tests.support.gateway_keys import ID, a_key, text_of
from tests.support.gateway_world import an_adapter
from tests.support.gateway_yard import memory_yard
from tests.support.http_wire import SSE_HEAD, Peer, chunk, connected

POET = engine_name("poet", an_adapter().version)

OF_ITS_OWN = ("time", "request", "trace", "duration_ms", "first_ms")
"""Fields of an access line that no two requests share."""

BEARER = f"authorization: Bearer {text_of()}"
JSON = "content-type: application/json\r\n"


@dataclass
class Case:
    """Requests with this body, one after another on one connection; between them engines answer `answers`.

    `taken` and `handed` of them: those that go without a task, and that are handed over on the way. None: whoever lost
    an engine's connection asks for a new one.
    """

    body: bytes = field(default_factory=body_of)
    path: str = CHAT
    headers: tuple[str, ...] = ()
    version: str = "1.1"
    key: Key | None = None
    answers: tuple[Speech, ...] = ()
    always: Speech | None = None
    requests: int = 3
    taken: int = 3
    handed: int | None = 0
    statuses: tuple[int, ...] = (200, 200, 200)


@dataclass
class Seen:
    """What can be seen of the story from outside."""

    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    asked: list[list[tuple[str, dict[str, str], bytes]]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    marks: list[list[str]] = field(default_factory=list)
    used: Any = None
    ways: tuple[int, int, int] = (0, 0, 0)


def told_apart(head: bytes) -> dict[str, str]:
    """The headers of an answer but for ids and times, whose form is looked at instead."""
    found = fields_of(head)
    for name in ("x-request-id", "request-id"):
        if name in found:
            assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", found[name]), found[name]
            found[name] = "an id"
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", found.pop("date"))
    for name in found:
        if name.startswith("x-ratelimit-reset-"):
            assert re.fullmatch(r"(\d+m)?\d+s", found[name]), found[name]
            found[name] = "a time"
    return found


def asked_of(engine: Engine) -> list[tuple[str, dict[str, str], bytes]]:
    """What an engine was asked but for ids, whose form is looked at instead."""
    found: list[tuple[str, dict[str, str], bytes]] = []
    for head, body in engine.asked:
        fields = fields_of(head)
        span = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", fields.pop("traceparent"))
        assert span is not None
        assert fields.pop("x-request-id").endswith(f"-{span[2]}")
        assert fields.pop("host") == engine.url.removeprefix("http://")
        found.append((head.split(b"\r\n")[0].decode(), fields, body))
    return found


async def see(made: Scene, case: Case) -> Seen:
    """Plays the case."""
    seen = Seen()
    for engine in made.engines:
        engine.asked.clear()
    one_after_another(made.engines, [*case.answers], case.always or says(GOOD))
    made.yard.access.clear()
    made.ways.forget()
    if case.key is not None:
        await put_key(made, case.key)
    async with AsyncExitStack() as stack:
        peer: Peer | None = None
        for _ in range(case.requests):
            if peer is None:
                peer = await stack.enter_async_context(connected(made.gateway.port, limit=1 << 18))
            await peer.send(ask(case.body, case.path, *case.headers, version=case.version))
            head, body = await peer.message()
            # Anthropic's errors tell it inside.
            body = re.sub(rb'"request_id":"[0-9a-f]{16}-[0-9a-f]+"', b'"request_id":"an id"', body)
            seen.answers.append((status_of(head), told_apart(head), body))
            if b"connection: close" in head.lower():
                await peer.gone()
                peer = None
            # Whoever lost its engine had it looked at.
            await until(lambda: not made.gateway.gateway.ejected, "the engines to be trusted")
    await made.quiet()
    lines = await made.until_lines(case.requests)
    seen.ways = made.ways.all
    for line in lines:
        assert line["duration_ms"] >= line["first_ms"] >= -1
        assert re.fullmatch(r"[0-9a-f]{32}", line["trace"])
        timeline = made.gateway.timelines.find(line["request"])
        assert timeline is not None
        assert timeline.trace.trace == line["trace"]
        assert list(timeline.marks.values()) == sorted(timeline.marks.values())
        seen.marks.append([timeline.model, *timeline.marks])
        seen.lines.append({k: v for k, v in line.items() if k not in OF_ITS_OWN})
        seen.lines[-1]["first"] = line["first_ms"] >= 0
    assert len({line["request"] for line in lines}) == case.requests
    seen.asked = [asked_of(engine) for engine in made.engines]
    seen.numbers = made.numbers()
    if case.key is not None:
        ledger, now_s = made.gateway.limits.ledger, made.gateway.gateway.clock.now_s()
        reading = ledger.read(case.key, now_s)
        seen.used = (reading.requests, reading.tokens)
    return seen


def one_after_another(engines: list[Engine], speeches: list[Speech], always: Speech) -> None:
    """Whichever engine is asked next says the first of these, and what they always say behind them."""

    async def speech(peer: Peer) -> bool:
        return await (speeches.pop(0) if speeches else always)(peer)

    for engine in engines:
        engine.always = speech


async def play(
    data: Path, cases: dict[str, Case], express: bool, fields: dict[str, Any]
) -> tuple[dict[str, Seen], Any]:
    """What is seen of each, and the accounts of all, with or without the way that needs no task."""
    async with scene(data / str(express), express=express, **fields) as made:
        seen = {name: await see(made, case) for name, case in cases.items()}
        expected = sum(case.requests for case in cases.values()) + len(made.engines)
        await until(
            lambda: sum(row[0] for row in made.accounts().values()) >= expected, "the accounts"
        )
        return seen, made.accounts()


def check(tmp_path: Path, cases: dict[str, Case], **fields: Any) -> dict[str, Seen]:
    """Plays these both ways, and compares all that is seen."""

    async def story() -> dict[str, Seen]:
        (plain, accounts), (handled, same) = await asyncio.gather(
            play(tmp_path, cases, True, fields), play(tmp_path, cases, False, fields)
        )
        for name, case in cases.items():
            one, other = plain[name], handled[name]
            for what in ("answers", "asked", "lines", "numbers", "marks", "used"):
                assert getattr(one, what) == getattr(other, what), (name, what)
            taken, left, handed = one.ways
            assert (taken, left) == (case.taken, case.requests - case.taken), name
            assert handed == case.handed or (handed and case.handed is None), name
            assert other.ways == (0, case.requests, 0), name
            assert tuple(status for status, _, _ in one.answers) == case.statuses, name
        assert accounts == same
        return plain

    return run(story(), 60.0)


LIMITED = a_key(rpm=50, tpm=50_000, parallel=4)
LONG = [{"role": "system", "content": "Be brief. " * 100}, {"role": "user", "content": "hi"}]

ALIKE = {
    "plain": Case(),
    "alias": Case(body=body_of("em")),
    "model named twice": Case(body=b'{"model":"x","messages":[],"model":"em"}'),
    "model within": Case(body=b' {"messages":[{"model":"em"}],"model":"em","n":1.0e5} '),
    "escaped model": Case(body=b'{"messages":[],"model":"\\u0065m"}'),
    "answer in gzip": Case(
        body=body_of("em"),
        always=says(whole(b"\x1f\x8b\x08 no JSON", extra=JSON + "content-encoding: gzip\r\n")),
    ),
    "streams false": Case(body=body_of(stream=False, stream_options=None, max_tokens=7)),
    "anthropic": Case(
        path="/v1/messages",
        headers=("anthropic-version: 2023-06-01",),
        always=says(
            whole(told(usage={"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 2}))
        ),
    ),
    "origin": Case(headers=("origin: http://a",)),
    "other origin": Case(headers=("origin: http://c",)),
    "embeddings": Case(
        path="/v1/embeddings",
        body=b'{"model":"em","input":["a","b"]}',
        always=says(whole(told(object="list", usage={"prompt_tokens": 3, "total_tokens": 3}))),
    ),
    "speech": Case(
        path="/v1/audio/speech",
        body=b'{"model":"em","input":"a"}',
        always=says(whole(b'\xff\xfb\x90{"model":"m"}', extra="content-type: audio/mpeg\r\n")),
    ),
    "timings": Case(
        always=says(
            whole(told(usage=None, timings={"prompt_n": 3, "cache_n": 2, "predicted_n": 4}))
        )
    ),
    "nothing of the type": Case(body=body_of("em"), always=says(whole(told(), extra=""))),
    "headers of the engine": Case(
        always=says(
            whole(
                told(),
                extra=JSON + "connection: keep-alive\r\nkeep-alive: timeout=5\r\n"
                "x-request-id: theirs\r\nopenai-processing-ms: 7\r\n",
            )
        )
    ),
    "headers of the client": Case(
        headers=(
            "user-agent: a",
            "accept: */*",
            "accept-encoding: gzip, br",
            "content-type: application/json; charset=utf-8",
            "cookie: a=b",
            "x-stainless-retry-count: 0",
            "te: trailers",
            "x-forwarded-for: 1.2.3.4",
            "openai-organization: o",
        )
    ),
    "priority": Case(headers=("x-yard-priority: low",)),
    "largest": Case(
        always=says(whole(told(text="x" * (64 * 1024 - len(told(text="")))))),
        requests=2,
        taken=2,
        statuses=(200, 200),
    ),
}


KEYS = {
    "a key": Case(key=a_key(), headers=(BEARER,)),
    "limited": Case(key=LIMITED, headers=(BEARER,), body=body_of("em", max_tokens=99)),
    "limited by rate alone": Case(key=a_key(rpm=9), headers=(f"x-api-key: {text_of()}",)),
    "limited by parallel alone": Case(key=a_key(parallel=1), headers=(BEARER,)),
    "limited and nothing told": Case(
        key=LIMITED, headers=(BEARER,), always=says(whole(told(usage=None)))
    ),
    "limited to models": Case(key=a_key(models=("em",)), headers=(BEARER,), body=body_of("em")),
    "usage in the middle": Case(
        key=LIMITED,
        headers=(BEARER,),
        always=says(
            whole(told(usage={"prompt_tokens": 3, "completion_tokens": 1}, more="x" * 2000))
        ),
    ),
}

REPLICAS = {
    "session": Case(headers=("x-yard-session: s-1",)),
    "session of the second name": Case(headers=("x-session-id: s-2",)),
    "empty session": Case(headers=("x-yard-session:  ",), body=body_of(messages=LONG)),
    "beginning": Case(body=body_of(messages=LONG)),
    "prompt": Case(path="/v1/completions", body=b'{"model":"m","prompt":"%b"}' % (b"a " * 400)),
    "two replicas": Case(requests=5, taken=5, statuses=(200,) * 5),
}


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


def closes(peer: Peer) -> Any:
    """Ends the connection without a word."""

    async def speech() -> bool:
        return False

    return speech()


ODD = {
    "error in JSON": Case(
        answers=(says(whole(b'{"error":{"message":"no"}}', "404 Not Found")),),
        handed=1,
        statuses=(404, 200, 200),
    ),
    "error in text": Case(
        answers=(says(whole(b"broken", "500 No", "content-type: text/plain\r\n")),),
        handed=1,
        statuses=(500, 200, 200),
    ),
    "other success": Case(
        answers=(says(whole(told(), "201 Created")),), handed=1, statuses=(201, 200, 200)
    ),
    "nothing inside": Case(
        answers=(says(b"HTTP/1.1 204 No Content\r\n\r\n"),), handed=1, statuses=(204, 200, 200)
    ),
    "empty body": Case(answers=(says(whole(b"")),)),
    "events": Case(
        answers=(
            says(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
        ),
    ),
    "events with a length": Case(
        answers=(says(whole(b"data: 1\n\n", extra="content-type: text/event-stream\r\n")),),
        handed=1,
    ),
    "chunked": Case(
        answers=(
            says(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
                chunk(told()),
                b"0\r\n\r\n",
            ),
        ),
        handed=1,
    ),
    "chunked alias": Case(
        body=body_of("em"),
        answers=(
            says(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
                chunk(told()),
                b"0\r\n\r\n",
            ),
        ),
        handed=1,
    ),
    "no length": Case(
        answers=(says(b"HTTP/1.1 200 OK\r\n\r\n" + told(), ends=True),), taken=3, handed=2
    ),
    "connection: close": Case(
        answers=(says(whole(told(), extra=JSON + "connection: close\r\n"), ends=True),), handed=1
    ),
    "HTTP/1.0": Case(
        answers=(says(whole(told()).replace(b"HTTP/1.1", b"HTTP/1.0"), ends=True),), handed=1
    ),
    "too long": Case(answers=(says(whole(told(text="x" * 70_000))),), handed=1),
    "too long alias": Case(
        body=body_of("em"), answers=(says(whole(told(text="x" * 70_000))),), handed=1
    ),
    "in pieces": Case(answers=(says(GOOD[:7], GOOD[7:60], GOOD[60:-9], GOOD[-9:-1], GOOD[-1:]),)),
    "head first": Case(
        answers=(says(GOOD[: GOOD.index(b"\r\n\r\n") + 4], told()),), body=body_of("em")
    ),
    "two heads": Case(answers=(says(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD),)),
    "more than it said": Case(answers=(says(GOOD + b"HTTP/1.1"),), handed=None),
    "more than it said, later": Case(
        answers=(says(GOOD[:-9], GOOD[-9:] + b"HTTP/1.1"),), handed=None
    ),
    "stale": Case(answers=(closes,), handed=1),
}


def event(number: int = 1, **fields: Any) -> bytes:
    """One of a stream."""
    return b"data: %b\n\n" % json.dumps({"id": number, "model": "m", **fields}).encode()


DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
STREAMED = body_of(stream=True, stream_options={"include_usage": True})
TOLD = says(
    SSE_HEAD,
    chunk(event(1)),
    chunk(event(2)) + chunk(event(3, text="x" * 5000)),
    chunk(event(4, usage=USAGE)),
    chunk(DONE) + END,
)

STREAMS = {
    "stream": Case(body=STREAMED, always=TOLD),
    "stream of an alias": Case(
        body=body_of("em", stream=True), key=LIMITED, headers=(BEARER,), always=TOLD
    ),
    "stream with a key": Case(body=STREAMED, key=LIMITED, headers=(BEARER,), always=TOLD),
    "stream that tells no tokens": Case(
        body=STREAMED,
        key=LIMITED,
        headers=(BEARER, "origin: https://page.example"),
        always=says(SSE_HEAD + chunk(event(1)), chunk(event(2)), chunk(DONE), END),
    ),
    "stream in crumbs": Case(
        body=STREAMED,
        always=says(
            *(bytes([b]) for b in SSE_HEAD),
            *(bytes([b]) for b in chunk(event(1)) + chunk(DONE) + END),
        ),
    ),
    "stream with nothing in it": Case(body=STREAMED, always=says(SSE_HEAD + END)),
    "stream of messages": Case(
        body=STREAMED,
        path="/v1/messages",
        always=says(
            SSE_HEAD,
            chunk(b'event: message_start\ndata: {"message":{"usage":{"input_tokens":7}}}\n\n'),
            chunk(b'event: message_delta\ndata: {"usage":{"output_tokens":3}}\n\n') + END,
        ),
    ),
    "stream behind which the engine closes": Case(
        body=STREAMED,
        answers=(
            says(
                SSE_HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
                + chunk(event(1))
                + END,
                ends=True,
            ),
        ),
        always=TOLD,
        handed=1,
    ),
    "no stream": Case(body=STREAMED),
    "no stream but an error": Case(
        body=STREAMED,
        answers=(says(whole(b'{"error":{"message":"no"}}', "400 Bad")),),
        always=TOLD,
        handed=1,
        statuses=(400, 200, 200),
    ),
}

BROKEN = {
    "ends between events": Case(
        body=STREAMED,
        key=LIMITED,
        headers=(BEARER,),
        answers=(says(SSE_HEAD, chunk(event(1)), ends=True),),
        always=TOLD,
        handed=None,
    ),
    "ends between events of an alias": Case(
        body=body_of("em", stream=True),
        answers=(says(SSE_HEAD, chunk(event(1)), ends=True),),
        always=TOLD,
        handed=None,
    ),
    "ends within messages": Case(
        body=STREAMED,
        path="/v1/messages",
        answers=(says(SSE_HEAD, chunk(event(1)), chunk(b"data: {"), ends=True),),
        always=TOLD,
        handed=None,
    ),
    "is silent": Case(
        body=STREAMED,
        answers=(silent(SSE_HEAD, chunk(event(1))),),
        always=TOLD,
        handed=None,
    ),
    "is no longer chunked": Case(
        body=STREAMED,
        answers=(says(SSE_HEAD, chunk(event(1)), b"what?\r\n"),),
        always=TOLD,
        handed=None,
    ),
    "says more": Case(
        body=STREAMED,
        answers=(says(SSE_HEAD, chunk(event(1)) + END + b"HTTP/1.1"),),
        always=TOLD,
        handed=None,
    ),
}


LOST = {
    "stream without an event": Case(
        body=STREAMED, answers=(says(SSE_HEAD, ends=True),), always=TOLD, handed=None
    ),
    "silent stream without an event": Case(
        body=STREAMED, answers=(silent(SSE_HEAD),), always=TOLD, handed=None
    ),
    "stream that is none": Case(
        body=STREAMED, answers=(says(SSE_HEAD, b"what?\r\n"),), always=TOLD, handed=None
    ),
    "garbage": Case(answers=(says(b"what?\r\n\r\n"),), handed=None),
    "garbage in the head": Case(
        answers=(says(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"),), handed=None
    ),
    "two lengths": Case(
        answers=(says(GOOD.replace(b"server: engine", b"content-length: 3")),), handed=None
    ),
    "twice garbage": Case(
        answers=(says(b"what?\r\n\r\n"), says(b"HTTP/2 200\r\n\r\n")),
        handed=None,
        statuses=(502, 200, 200),
    ),
    "key unknown": Case(answers=(says(whole(b"{}", "401 Unauthorized")),), handed=None),
    "closed within the head": Case(answers=(says(GOOD[:40], ends=True),), handed=None),
    "cut alias": Case(body=body_of("em"), answers=(says(GOOD[:-9], ends=True),), handed=None),
    "late": Case(answers=(silent(),), handed=None),
    "late behind the head": Case(
        body=body_of("em"),
        answers=(silent(GOOD[: GOOD.index(b"\r\n\r\n") + 4]),),
        handed=None,
    ),
    "stalled": Case(
        body=body_of("em"),
        answers=(silent(GOOD[:-9]),),
        handed=None,
    ),
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
