"""What headers mean and which travel on, by value."""

import json

import pytest

from gateway.domain import error_bodies, http_rules
from gateway.domain.http_rules import (
    CHUNKED,
    NO_BODY,
    UNTIL_CLOSE,
    FramingRefused,
    HeaderList,
    HeadFacts,
)

LENGTH = b"content-length"
ENCODING = b"transfer-encoding"


@pytest.mark.parametrize(
    ("headers", "version", "framing"),
    [
        ([], "1.1", NO_BODY),
        ([(LENGTH, b"0")], "1.1", NO_BODY),
        ([(LENGTH, b"12")], "1.0", 12),
        ([(ENCODING, b"chunked")], "1.1", CHUNKED),
        ([(ENCODING, b" Chunked ")], "1.1", CHUNKED),
        ([(ENCODING, b"chunked")], "1.0", None),
        ([(ENCODING, b"identity")], "1.1", None),
        ([(ENCODING, b"chunked, chunked")], "1.1", None),
        ([(ENCODING, b"chunked"), (ENCODING, b"chunked")], "1.1", None),
        ([(ENCODING, b"chunked"), (LENGTH, b"1")], "1.1", None),
        ([(LENGTH, b"1"), (LENGTH, b"1")], "1.1", None),
        ([(LENGTH, b"-1")], "1.1", None),
        ([(LENGTH, b"")], "1.1", None),
        ([(LENGTH, b"1 ")], "1.1", None),
        ([(LENGTH, "١".encode())], "1.1", None),
        ([(LENGTH, b"1" * 16)], "1.1", None),
    ],
)
def test_the_framing_of_a_request(headers: HeaderList, version: str, framing: int | None) -> None:
    facts = http_rules.request_facts(headers, version)
    assert facts == http_rules.request_facts(headers, version, http_rules.by_name(headers))
    if framing is None:
        assert isinstance(facts, FramingRefused)
        assert facts.reason
    else:
        assert isinstance(facts, HeadFacts)
        assert facts.framing == framing


@pytest.mark.parametrize(
    ("method", "status", "headers", "framing"),
    [
        ("GET", 200, [], UNTIL_CLOSE),
        ("GET", 200, [(LENGTH, b"0")], NO_BODY),
        ("GET", 200, [(LENGTH, b"7")], 7),
        ("HEAD", 200, [(LENGTH, b"7")], NO_BODY),
        ("HEAD", 200, [(ENCODING, b"chunked")], NO_BODY),
        ("GET", 204, [], NO_BODY),
        ("GET", 304, [(LENGTH, b"7")], NO_BODY),
        ("GET", 200, [(ENCODING, b"chunked")], CHUNKED),
        ("GET", 200, [(ENCODING, b"gzip, chunked")], None),
        ("GET", 200, [(ENCODING, b"chunked"), (LENGTH, b"7")], None),
        ("HEAD", 200, [(LENGTH, b"7"), (LENGTH, b"8")], None),
    ],
)
def test_the_framing_of_an_answer(
    method: str, status: int, headers: HeaderList, framing: int | None
) -> None:
    facts = http_rules.response_facts(method, status, "1.1", headers)
    once = http_rules.by_name(headers)
    assert facts == http_rules.response_facts(method, status, "1.1", headers, once)
    if framing is None:
        assert isinstance(facts, FramingRefused)
    else:
        assert isinstance(facts, HeadFacts)
        assert facts.framing == framing


@pytest.mark.parametrize(
    ("version", "connection", "keep"),
    [
        ("1.1", None, True),
        ("1.0", None, False),
        ("1.0", b"Keep-Alive", True),
        ("1.1", b"x, Close", False),
        ("1.1", b"x-close", True),
        ("1.0", b"keep-alive, close", False),
    ],
)
def test_whether_a_connection_stays_open(
    version: str, connection: bytes | None, keep: bool
) -> None:
    headers = [(b"connection", connection)] if connection is not None else []
    for facts in (
        http_rules.request_facts(headers, version),
        http_rules.request_facts(headers, version, http_rules.by_name(headers)),
        http_rules.response_facts("GET", 200, version, headers),
    ):
        assert isinstance(facts, HeadFacts)
        assert facts.keep_alive is keep


@pytest.mark.parametrize(
    ("target", "result"),
    [
        (b"/a", ("/a", b"")),
        (b"/a?b?c", ("/a", b"b?c")),
        (b"/a%2Fb", ("/a%2Fb", b"")),
        (b"http://h/a?x", ("/a", b"x")),
        (b"HTTPS://h", ("/", b"")),
        (b"*", ("*", b"")),
        (b"a", None),
        (b"ftp://h/a", None),
        (b"/a#b", None),
        ("/é".encode(), None),
    ],
)
def test_what_a_target_names(target: bytes, result: tuple[str, bytes] | None) -> None:
    assert http_rules.split_target(target) == result


def test_what_goes_on_to_an_engine() -> None:
    headers = http_rules.engine_request_headers(
        [
            (b"host", b"h"),
            (b"connection", b"close, X-Hop"),
            (b"x-hop", b"1"),
            (b"authorization", b"Bearer client"),
            (b"x-api-key", b"client"),
            (b"content-length", b"1"),
            (b"x-yard-anything", b"1"),
            (b"content-type", b"application/json"),
        ],
        engine_key="secret",
        extra=[(b"x-more", b"1")],
    )
    assert headers == [
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer secret"),
        (b"x-more", b"1"),
    ]


def test_what_goes_on_to_a_client() -> None:
    engine = [
        (b"connection", b"keep-alive"),
        (b"access-control-allow-origin", b"*"),
        (b"cache-control", b"max-age=1"),
        (b"x-request-id", b"theirs"),
        (b"x-yard-replica", b"forged"),
        (b"date", b"then"),
        (b"content-type", b"text/event-stream"),
    ]
    assert http_rules.client_response_headers(engine, sse=False) == [
        (b"cache-control", b"max-age=1"),
        (b"content-type", b"text/event-stream"),
    ]
    assert http_rules.client_response_headers(engine, sse=True) == [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


def test_a_head_is_rendered_and_never_split() -> None:
    assert http_rules.render_head(200, []) == b"HTTP/1.1 200 OK\r\n\r\n"
    assert http_rules.render_head(299, [(b"a", b"b")]) == b"HTTP/1.1 299 Status\r\na: b\r\n\r\n"
    for value in (b"x\r\ny: z", b"x\ny", b"x\ry", b"\r\n"):
        with pytest.raises(ValueError, match="line end"):
            http_rules.render_head(200, [(b"a", b"b"), (b"c", value)])
        with pytest.raises(ValueError, match="line end"):
            http_rules.check_header(b"a", value)
    for name in (b"", b"a b", b"a:", b"a\r\nb"):
        with pytest.raises(ValueError, match="header name"):
            http_rules.check_header(name, b"x")


def test_headers_do_not_print_their_values() -> None:
    headers = http_rules.Headers([(b"authorization", b"Bearer secret")])
    assert "secret" not in repr(headers)
    assert headers.get(b"authorization") == b"Bearer secret"
    assert headers.get_all(b"x") == []


@pytest.mark.parametrize(
    ("content_type", "body", "message", "code"),
    [
        (b"application/json", b'{"error":"busy"}', "busy", "engine_error"),
        (b"application/json", b'{"message":"m","code":"c"}', "m", "c"),
        (b"application/json", b'{"detail":[{"loc":1}]}', '[{"loc":1}]', "engine_error"),
        (b"text/plain; charset=utf-8", b" words \n", "words", "engine_error"),
        (b"text/html", b"<h1>no</h1>", "500", "engine_error"),
        (b"application/json", b"\xff{", "500", "engine_error"),
        (b"application/json", b"[" * 9000 + b"]" * 9000, "500", "engine_error"),
        (b"", b"", "500", "engine_error"),
    ],
)
def test_scn_b11_an_engines_words_in_our_envelope(
    content_type: bytes, body: bytes, message: str, code: str
) -> None:
    wrapped = error_bodies.engine_error_body(500, content_type, body)
    assert wrapped is not None
    error = json.loads(wrapped)["error"]
    assert message in error["message"]
    assert error["code"] == code
    assert error["type"] == "server_error"


def test_an_envelope_is_left_as_it_is() -> None:
    body = b'{"error": {"message": "m", "type": "t"}}'
    assert error_bodies.engine_error_body(400, b"", body) is None


def test_an_error_frame_is_one_event_and_no_end() -> None:
    frame = error_bodies.error_frame("engine_error", "line\nbreak")
    assert frame.startswith(b"data: {")
    assert frame.count(b"\n") == 2
    assert frame.endswith(b"\n\n")
    assert json.loads(frame[6:])["error"]["code"] == "engine_error"
