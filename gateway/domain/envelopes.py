"""Decides the form of an error by who asked: OpenAI's, or Anthropic's at and below `/v1/messages`.

It does not decide which error it is: status, code and sentence come from the table of answers or from the engine. Pure.
"""

from typing import Any, Final, Protocol, cast

import msgspec

from gateway.domain import error_bodies
from gateway.domain.places import EnvelopeName

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Envelope(Protocol):
    """How errors are written for one client."""

    def body(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
    ) -> bytes:
        """The JSON of an error answer; `type` is OpenAI's word for it."""
        ...

    def frame(self, code: str, message: str, *, status: int = 502) -> bytes:
        """The event that ends a stream which broke."""
        ...

    def framed(self, body: bytes) -> bytes:
        """The event that says what an error answer with this `body` would have said."""
        ...

    def wrapped(self, status: int, content_type: bytes, body: bytes) -> bytes | None:
        """An engine's error answer in this form; None when it has it already."""
        ...

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What clients of this kind look for in the head of every answer."""
        ...


class _OpenAI:
    def body(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
    ) -> bytes:
        return error_bodies.error_body(status, code, message, type=type, param=param)

    def frame(self, code: str, message: str, *, status: int = 502) -> bytes:
        return error_bodies.error_frame(code, message)

    def framed(self, body: bytes) -> bytes:
        return b"data: %b\n\n" % _one_line(body)

    def wrapped(self, status: int, content_type: bytes, body: bytes) -> bytes | None:
        return error_bodies.engine_error_body(status, content_type, body)

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ()


class _Anthropic:
    """The code is a member of ours beside Anthropic's: their types tell a load from an overload no more than 503 does."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def body(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
    ) -> bytes:
        error = {"type": anthropic_type(status), "message": message}
        if code is not None:
            error["code"] = code
        whole = {"type": "error", "error": error, "request_id": self._request_id}
        return msgspec.json.encode(whole)

    def frame(self, code: str, message: str, *, status: int = 502) -> bytes:
        return self.framed(self.body(status, code, message))

    def framed(self, body: bytes) -> bytes:
        return b"event: error\ndata: %b\n\n" % _one_line(body)

    def wrapped(self, status: int, content_type: bytes, body: bytes) -> bytes | None:
        try:
            parsed: Any = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            fields = cast(dict[str, Any], parsed)
            if fields.get("type") == "error" and isinstance(fields.get("error"), dict):
                return None
        text = error_bodies.engine_error_body(status, content_type, body) or body
        detail = msgspec.json.decode(text)["error"]
        code = detail.get("code")
        return self.body(
            status, code if isinstance(code, str) else "engine_error", detail["message"]
        )

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"request-id", self._request_id.encode()),)


def _one_line(body: bytes) -> bytes:
    """JSON without the line breaks that may stand between its parts; an event's data is one line."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


OPENAI: Final[Envelope] = _OpenAI()


def envelope(name: EnvelopeName, request_id: str) -> Envelope:
    """The form of a place; `request_id` is told in Anthropic's."""
    return _Anthropic(request_id) if name == "anthropic" else OPENAI


def anthropic_type(status: int) -> str:
    """Anthropic's word for a status."""
    found = _ANTHROPIC_TYPES.get(status)
    if found is not None:
        return found
    return "invalid_request_error" if status < 500 else "api_error"
