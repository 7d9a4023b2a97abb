"""Reads from the beginning and the end of an engine's answer how many tokens a request came to.

Nothing is asked of the engine for it, and the answer is never changed or held back: a tail is kept as it passes. What no
engine told is counted by events and said to be so. Pure.
"""

import re
from collections import deque
from typing import Final

import msgspec
from msgspec import Struct

EVENT: Final = b"data:"
"""What is counted as an event; near enough for an estimate."""

KEPT_BYTES: Final = 4096
"""So much is kept of the first block, and of each of the last ones."""

_LAST_BLOCKS: Final = 4
"""Engines write the usage, `[DONE]` and the end of the framing one by one."""

_TRIES: Final = 8
"""So many places named `usage` are looked at, from the end: events before the last carry `"usage": null`."""

_CHUNK: Final = re.compile(rb"\r\n[0-9a-fA-F]{1,8}(?:;[^\r\n]*)?\r\n")
_OBJECT: Final = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_USAGE: Final = b'"usage"'
_USAGE_SIZE: Final = len(_USAGE)
_COLONS: Final = (b":", b": ")
_TIMINGS: Final = b'"timings"'
_DONE: Final = b"[DONE]"

GENERATING: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/completion",
        "/infill",
    }
)
"""What makes tokens: where none are told, the events of a stream are counted for them."""


class Tokens(Struct, frozen=True, kw_only=True):
    """`prompt` includes `cached`. `estimated`: the engine told none, `completion` counts its events."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    estimated: bool = False

    @property
    def total(self) -> int:
        return self.prompt + self.completion


class Tail:
    """What is kept of one answer as it passes: its first block, its last ones, and how many events it had.

    The relay writes to it once for every block; there is no method for that, a call would cost more than it does.
    """

    __slots__ = ("events", "first", "last")

    def __init__(self) -> None:
        self.first = b""
        self.last: deque[bytes] = deque(maxlen=_LAST_BLOCKS)
        self.events = 0


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    """As OpenAI (chat and responses) and Anthropic name them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Timings(Struct):
    """llama.cpp's own; `prompt_n` are those that were not in its cache."""

    prompt_n: int | None = None
    cache_n: int | None = None
    predicted_n: int | None = None


_usage: Final = msgspec.json.Decoder(_Usage)
_timings: Final = msgspec.json.Decoder(_Timings)


def read_tokens(tail: Tail, *, path: str, sse: bool) -> Tokens | None:
    """What the answer told; None where it told nothing and there is nothing to count.

    1. the last `usage` at the end; Anthropic's streams tell the prompt at the beginning alone
    2. a `usage` at the beginning: embeddings and ranks follow theirs
    3. llama.cpp's timings
    4. a stream of what makes tokens: its events
    """
    end = _unframed(b"".join(tail.last))
    usage = _last_usage(end)
    head = None
    if usage is None or (usage.output_tokens is not None and usage.input_tokens is None):
        head = _first_usage(_unframed(tail.first))
    if usage is not None:  # 1
        return _told(usage, head)
    if head is not None and not sse:  # 2
        return _told(head, None)
    timings = _last_timings(end)
    if timings is not None:  # 3
        return timings
    if sse and path in GENERATING:  # 4
        completion = tail.events - (_DONE in end[-64:])
        if head is not None:
            told = _told(head, None)
            return Tokens(
                prompt=told.prompt,
                cached=told.cached,
                completion=max(completion, 0),
                estimated=True,
            )
        return Tokens(completion=max(completion, 0), estimated=True)
    return None


def tokens_of_whole(body: bytes) -> Tokens | None:
    """What an answer told that is one JSON document, as `read_tokens` reads it."""
    # First what nearly all tell: OpenAI's names, and no object in it.
    at = body.rfind(_USAGE)
    if at >= 0:
        colon, brace, rest = body[at + _USAGE_SIZE :].partition(b"{")
        told, end, _ = rest.partition(b"}")
        if brace and end and colon in _COLONS and not told.partition(b"{")[1]:
            try:
                usage = _usage.decode(b"{%b}" % told)
            except (msgspec.DecodeError, UnicodeDecodeError):
                usage = _TELLS_NOTHING
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
            if (
                prompt is not None
                and completion is not None
                and usage.input_tokens is None
                and usage.output_tokens is None
                and 0 <= prompt < _MOST
                and 0 <= completion < _MOST
            ):
                return Tokens(prompt=prompt, completion=completion)
    return _told_anyhow(body)


def _told_anyhow(body: bytes) -> Tokens | None:
    """The same of any answer."""
    usage = _last_usage(body)
    if usage is None:
        return _last_timings(body)
    only_half = usage.output_tokens is not None and usage.input_tokens is None
    return _told(usage, _first_usage(body) if only_half else None)


def _unframed(block: bytes) -> bytes:
    """Without the sizes of chunks, which may stand in the middle of anything."""
    # Not `in`, which would first try it as a number, at the price of an exception.
    return _CHUNK.sub(b"", block) if block.find(b"\r\n") >= 0 else block


def _told(usage: _Usage, head: _Usage | None) -> Tokens:
    if usage.input_tokens is not None or usage.output_tokens is not None:
        asked = head if usage.input_tokens is None and head is not None else usage
        read = asked.cache_read_input_tokens or 0
        cached = read
        if asked.input_tokens_details is not None:
            # OpenAI's `input_tokens` include what came from a cache, Anthropic's do not.
            cached = asked.input_tokens_details.cached_tokens or 0
        prompt = (asked.input_tokens or 0) + read + (asked.cache_creation_input_tokens or 0)
        completion = usage.output_tokens or 0
    else:
        completion = usage.completion_tokens or 0
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens or 0
        prompt = usage.prompt_tokens
        if prompt is None:
            prompt = max((usage.total_tokens or 0) - completion, 0)
    return Tokens(prompt=_sane(prompt), cached=_sane(cached), completion=_sane(completion))


_MOST: Final = 1 << 31


def _sane(number: int) -> int:
    """A count; an engine that tells nonsense must not break sums."""
    return number if 0 <= number < _MOST else 0


def _last_usage(text: bytes) -> _Usage | None:
    at = len(text)
    for _ in range(_TRIES):
        at = text.rfind(_USAGE, 0, at)
        if at < 0:
            return None
        found = _usage_at(text, at)
        if found is not None:
            return found
    return None


def _first_usage(text: bytes) -> _Usage | None:
    at = text.find(_USAGE)
    return None if at < 0 else _usage_at(text, at)


def _usage_at(text: bytes, at: int) -> _Usage | None:
    value = _object_behind(text, at + len(_USAGE))
    if value is None:
        return None
    try:
        found = _usage.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if found.prompt_tokens is not None:
        return found
    # A `usage` of seconds, as of a transcription, tells no tokens.
    return None if found == _TELLS_NOTHING else found


def _object_behind(text: bytes, at: int) -> bytes | None:
    """The JSON object that is the value of the key which ends there; objects in it may hold no others."""
    start = at + 2 if text.startswith(b": {", at) else at + 1
    if text.startswith(b"{", start):
        end = text.find(b"}", start) + 1
        # Nearly always there is none in it, and no pattern is needed.
        if text.find(b"{", start + 1, end) < 0 and text[at : at + 1] == b":":
            return text[start:end]
    value = _OBJECT.match(text, at)
    return None if value is None else value[1]


_TELLS_NOTHING: Final = _Usage()


def _last_timings(text: bytes) -> Tokens | None:
    at = text.rfind(_TIMINGS)
    value = None if at < 0 else _object_behind(text, at + len(_TIMINGS))
    if value is None:
        return None
    try:
        found = _timings.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if found.predicted_n is None and found.prompt_n is None:
        return None
    cached = _sane(found.cache_n or 0)
    return Tokens(
        prompt=_sane(found.prompt_n or 0) + cached,
        cached=cached,
        completion=_sane(found.predicted_n or 0),
    )
