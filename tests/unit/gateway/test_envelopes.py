"""Whose form an error has, and what of an engine's own survives in it."""

import json
from typing import Any

import pytest

from gateway.domain.envelopes import OPENAI, anthropic_type, envelope

THEIRS = envelope("anthropic", "req-1")


def read(body: bytes | None) -> Any:
    assert body is not None
    return json.loads(body)


def test_scn_b11_a_refusal_at_messages_has_anthropics_form_with_our_code_in_it() -> None:
    body = read(THEIRS.body(404, "model_not_found", "no such", type="x", param="model"))
    assert body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no such", "code": "model_not_found"},
        "request_id": "req-1",
    }
    assert THEIRS.headers() == ((b"request-id", b"req-1"),)
    assert OPENAI.headers() == ()
    assert envelope("openai", "req-1") is OPENAI


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_word_goes_by_the_status(status: int, type: str) -> None:
    assert anthropic_type(status) == type


@pytest.mark.parametrize(
    ("content_type", "body", "message", "code"),
    [
        (b"application/json", b'{"error":{"message":"no","code":501}}', "no", "engine_error"),
        (b"application/json", b'{"error":{"message":"no","code":"a"}}', "no", "a"),
        (b"application/json", b'{"detail":"Not Found"}', "Not Found", "engine_error"),
        (b"text/html", b"<html>", "The engine answered with status 502", "engine_error"),
        (b"application/json", b"[]", "The engine answered with status 502", "engine_error"),
        (b"application/json", b"\xff{", "The engine answered with status 502", "engine_error"),
    ],
)
def test_scn_b11_whatever_an_engine_says_at_messages_is_put_into_anthropics_form(
    content_type: bytes, body: bytes, message: str, code: str
) -> None:
    told = read(THEIRS.wrapped(502, content_type, body))
    assert told["type"] == "error"
    assert told["error"]["message"].startswith(message)
    assert (told["error"]["type"], told["error"]["code"]) == ("api_error", code)
    assert told["request_id"] == "req-1"


def test_an_engines_error_in_anthropics_form_is_left_as_it_is() -> None:
    body = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'
    assert THEIRS.wrapped(400, b"application/json", body) is None
    assert OPENAI.wrapped(400, b"application/json", b'{"error":{"message":"no"}}') is None


def test_a_stream_that_breaks_ends_with_an_event_of_its_clients_kind() -> None:
    name, data = THEIRS.frame("engine_error", "it ended").decode().rstrip("\n").split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    frame = OPENAI.frame("engine_error", "it ended")
    assert frame.startswith(b'data: {"error":')
