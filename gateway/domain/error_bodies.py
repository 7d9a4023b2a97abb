"""Decides what an error looks like to a client: one OpenAI envelope, whatever went wrong where.

It does not decide which error it is, and never repeats a secret: of an engine's answer only its
message travels on.
"""

from typing import Any, Final, cast

import msgspec
from msgspec import Struct

MAX_ENGINE_MESSAGE: Final = 2000


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What openai clients read: `message` for people, `code` for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True, kw_only=True):
    """`{"error": {...}}`"""

    error: ErrorDetail


def error_type(status: int) -> str:
    """The `type` that goes with a status in OpenAI's vocabulary."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(
    status: int,
    code: str | None,
    message: str,
    *,
    type: str | None = None,
    param: str | None = None,
) -> bytes:
    """The JSON of an error in the OpenAI envelope."""
    return msgspec.json.encode(
        ErrorBody(
            error=ErrorDetail(
                message=message, type=type or error_type(status), param=param, code=code
            )
        )
    )


def error_frame(code: str, message: str, *, type: str = "server_error") -> bytes:
    """The in-band error of a stream that broke: one SSE event, and no `[DONE]` after it."""
    return b"data: %b\n\n" % error_body(500, code, message, type=type)


def engine_error_body(status: int, content_type: bytes, body: bytes) -> bytes | None:
    """An engine's error answer in the OpenAI envelope; None when it is in it already.

    1. `{"error": {"message": ...}}`: left as it is. 2. `{"error": "text"}`, the flat
    `{"message": ...}` of older vLLM, FastAPI's `{"detail": ...}`: their text. 3. other JSON, HTML
    or text: a sentence with the status, and the text only when it is plain.
    """
    detail: Any = None
    try:
        parsed: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    code: str | None = None
    param: str | None = None
    if isinstance(parsed, dict):
        fields = cast(dict[str, Any], parsed)
        error: Any = fields.get("error")
        if isinstance(error, dict):
            inner = cast(dict[str, Any], error)
            if isinstance(inner.get("message"), str):
                return None  # 1
        detail = fields.get("error") or fields.get("message") or fields.get("detail")  # 2
        code = _text(fields.get("code"))
        param = _text(fields.get("param"))
    if isinstance(detail, str) and detail:
        message = detail
    elif detail is not None:
        message = msgspec.json.encode(detail).decode("utf-8", "replace")
    elif content_type.lower().startswith(b"text/plain") and body.strip():
        message = body.decode("utf-8", "replace").strip()
    else:  # 3
        message = f"The engine answered with status {status} and no readable reason."
    return error_body(status, code or "engine_error", message[:MAX_ENGINE_MESSAGE], param=param)


def says_no_such_model(body: bytes) -> bool:
    """Whether an engine's 404 says that it serves no such model, in whatever envelope and case."""
    return b"does not exist" in body.lower()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
