"""What is played by both ways (tests/support/express_both.py): requests, and what engines answer them.

Tables only, one for each kind of story; what each of them must come to beside being the same is its test's to say.
"""

import json
from typing import Any

from tests.support.express_both import Case
from tests.support.express_yard import (
    GOOD,
    USAGE,
    body_of,
    says,
    silent,
    told,
    whole,
)
from tests.support.gateway_keys import a_key, text_of
from tests.support.http_wire import SSE_HEAD, Peer, chunk

BEARER = f"authorization: Bearer {text_of()}"
JSON = "content-type: application/json\r\n"

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
    "limited and nothing answered": Case(
        key=LIMITED, headers=(BEARER,), body=body_of(max_tokens=99), always=says(whole(b""))
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
