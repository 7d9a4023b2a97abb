"""Odd requests that are good HTTP, to a whole gateway: each gets an answer that says what is wrong, and none a 500."""

from pathlib import Path

from tests.support.aio import run
from tests.support.gateway_yard import memory_yard
from tests.support.http_wire import connected, post

CHAT = "/v1/chat/completions"
JSON = b'{"model":"m","messages":[]}'
TEXT = '{"model":"m"}'

# What is sent, and the status it gets; 200 where it is odd but means one thing only.
ODD: dict[str, tuple[bytes, int]] = {
    "UTF-16": (post(TEXT.encode("utf-16")), 400),
    "UTF-16 without a mark": (post(TEXT.encode("utf-16-le")), 400),
    "a byte order mark": (post(b"\xef\xbb\xbf" + JSON), 400),
    # The last one counts, as for the engines.
    "two models": (post(b'{"model":"m","model":"other"}'), 404),
    "two models, one spelled with an escape": (post(b'{"model":"m","mod\\u0065l":"other"}'), 404),
    "half a surrogate pair": (post(b'{"model":"\\ud800"}'), 400),
    "nested 100,000 deep": (post(b'{"model":"m","a":' + b"[" * 100_000), 400),
    "NaN": (post(b'{"model":"m","max_tokens":NaN}'), 400),
    "two documents": (post(JSON + JSON), 400),
    "a NUL in the name": (post(b'{"model":"m\\u0000"}'), 404),
    "a line end in the name": (post(b'{"model":"m\\r\\nx: y"}'), 404),
    "a name of 100,000 letters": (post(b'{"model":"' + b"m" * 100_000 + b'"}'), 400),
    "all signs in the query": (post(JSON, CHAT + '?a="<>`{|}\\^'), 200),
    "an escaped slash": (post(JSON, "/v1/chat%2fcompletions"), 403),
    "dots in the path": (post(JSON, "/v1/../v1/chat/completions"), 403),
    "two slashes": (post(JSON, "//v1/chat/completions"), 403),
    "dots below an engine": (post(JSON, "/engines/m/../../v1/x"), 403),
    "another host in the target": (post(JSON, "http://other" + CHAT), 200),
    "GET *": (b"GET * HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    "TRACE": (b"TRACE / HTTP/1.1\r\nhost: a\r\n\r\n", 404),
    "no UTF-8 in a path": (b"GET /v1/models/%00%ff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "no UTF-8 in a query": (b"GET /v1/responses/r_x?model=%ff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "bytes in a request id": (post(JSON, extra=b'x-request-id: a\xff"{}<>\r\n'), 200),
    "bytes in a trace": (post(JSON, extra=b"traceparent: \xff\xff\r\n"), 200),
    "bytes in a key": (post(JSON, extra=b"authorization: Bearer \xff\xfe\r\n"), 200),
    "bytes in an origin": (post(JSON, extra=b"origin: \xff\r\n"), 200),
    "bytes in our own headers": (
        post(JSON, extra=b"x-yard-priority: \xff\r\nx-yard-session: \xff\r\n"),
        200,
    ),
    "bytes in a boundary": (
        post(
            b"--\xff\r\n",
            "/v1/audio/transcriptions",
            b"content-type: multipart/form-data; boundary=\xff\r\n",
        ),
        400,
    ),
    "bytes in a Content-Encoding": (post(JSON, extra=b"content-encoding: \xff\r\n"), 415),
    "no gzip under that label": (post(JSON, extra=b"content-encoding: gzip\r\n"), 400),
    "Connection that names what counts": (
        post(JSON, extra=b"connection: content-type, x-request-id, \xff\r\n"),
        200,
    ),
}


def test_odd_requests_are_answered_with_what_is_wrong(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(model="m")
            await yard.replica(engine, has_key=True)
            gateway = await yard.gateway()
            got: dict[str, int] = {}
            for name, (sent, _) in ODD.items():
                async with connected(gateway.port) as client:
                    client.writer.write(sent)
                    head, _ = await client.message()
                    got[name] = int(head[9:12])
            assert got == {name: status for name, (_, status) in ODD.items()}
            assert len(engine.seen) == sum(status == 200 for _, status in ODD.values())

    run(story())
