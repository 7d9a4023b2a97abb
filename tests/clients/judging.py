"""Says what is wrong with an answer, and how it reads in the transcript without what differs from run to run.

It asks nothing; what must come stands in calls.py.
"""

import json
import re
from typing import Final

from msgspec import Struct

from tests.clients.calls import Call

LONGEST: Final = 420
"""Characters of an answer that the transcript shows."""

SHOWN: Final = (
    "content-type",
    "allow",
    "retry-after",
    "x-should-retry",
    "www-authenticate",
    "accept-encoding",
    "x-yard-model",
    "x-yard-why",
    "x-yard-loading",
    "x-ratelimit-limit-requests",
    "access-control-allow-origin",
)

_CHANGING: Final = (
    (re.compile(r'("(?:created|created_at|completed_at)": ?)[0-9.]+'), r"\1…"),
    (re.compile(r"\b(created(?:_at)?=)[0-9.]+"), r"\1…"),
    (re.compile(r"""(["']request_id["']: ?["'])[^"']+"""), r"\1…"),
    (re.compile(r'("[a-z_]+_(?:ms|per_second)": ?)[0-9.e+-]+'), r"\1…"),
    (re.compile(r'("(?:embedding)": ?\[)[^\]]+'), r"\1…"),
    (
        re.compile(r"\b(?:chatcmpl|cmpl|resp|msg|rs|scripted)[-_](?=[A-Za-z0-9-]*\d)[A-Za-z0-9-]+"),
        "<id>",
    ),
    (re.compile(r"\br-[a-z2-7]{10}\b"), "<replica>"),
    (re.compile(r"\byk_[a-z2-7]{12}_\S+?\b"), "<key>"),
    (re.compile(r"(API key (?:'[a-z]+' \()?)[a-z2-7]{12}\b"), r"\1<id>"),
    (re.compile(r"(\bhas )[0-9.]+( GiB)"), r"\1…\2"),
    (re.compile(r'("position": ?)\d+'), r"\1…"),
    (re.compile(r"elapsed_s=\d+"), "elapsed_s=…"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:…"),
    (re.compile(r"\b(again in|after) \d+(?:\.\d+)? s\b"), r"\1 … s"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[0-9.+:Z]*"), "<time>"),
)


class Reply(Struct, frozen=True, kw_only=True):
    """What came; header names in lower case."""

    status: int
    headers: dict[str, str]
    text: str


def wrong(call: Call, reply: Reply) -> list[str]:
    """In which points the reply is not what the call is to get."""
    found: list[str] = []
    if reply.status != call.status:
        found.append(f"status {reply.status}, not {call.status}")
    if call.code and call.code != error_code(reply.text):
        found.append(f"code {error_code(reply.text)!r}, not {call.code!r}")
    packed = reply.text.replace('": ', '":').replace(', "', ',"')
    found += [f"no {text!r}" for text in call.has if text not in packed]
    found += [f"no header {name}" for name in call.shows if name not in reply.headers]
    if call.status >= 400 and call.path.startswith("/v1/messages"):
        if not reply.text.startswith('{"type":"error"'):
            found.append("no error in Anthropic's form")
    elif call.status >= 400 and not isinstance(error_of(reply.text), dict):
        found.append("no error in OpenAI's form")
    return [f"{why}: {reply.text[:600]}" for why in found]


def error_of(text: str) -> object:
    try:
        return json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return None


def error_code(text: str) -> object:
    error = error_of(text)
    return error.get("code") if isinstance(error, dict) else None


def steady(text: str) -> str:
    """Without what differs from run to run."""
    for pattern, put in _CHANGING:
        text = pattern.sub(put, text)
    return text


def shortened(text: str) -> str:
    """Steady, printable, and no longer than LONGEST: its beginning and its end."""
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in steady(text)).strip()
    text = re.sub(r"\n{2,}", "\n", text)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 120].rstrip()} … {text[-110:].lstrip()}"


def told(reply: Reply) -> str:
    """Status, the headers that tell something, and the body."""
    lines = [f"{reply.status}"]
    for name in SHOWN:
        if name in reply.headers:
            value = "…" if name == "retry-after" else steady(reply.headers[name])
            lines.append(f"{name}: {value}")
    body = shortened(reply.text)
    return "\n".join((*lines, "", body) if body else lines)
