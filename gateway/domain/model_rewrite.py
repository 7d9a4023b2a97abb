"""Replaces the value of the top-level `model` in JSON and in SSE (there of a whole answer in it too), and leaves every other byte alone.

A request for an alias goes to the engine under the engine's name; its answer names what the client
asked for. It never re-encodes a document: number formats, key order and spacing are the sender's.
"""

import re
from typing import Final

import msgspec

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_COLON: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_MODEL_KEY: Final = b'"model"'
_WHOLE_ANSWERS: Final = (b'"response"', b'"message"')
_STRING_BEHIND: Final = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_STRUCTURE: Final = re.compile(rb'["{}\[\]]')
_STRING_END: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

MAX_HELD: Final = 64 * 1024
"""What a rewriter holds back at most, waiting for the end of an event or a token."""

Span = tuple[int, int]


def model_spans(document: bytes, start: int = 0) -> list[Span]:
    """Where the values of top-level `model` strings lie, quotes included; all, if it is repeated.

    `document` is valid JSON from `start` (the caller decoded it, or does not care). Keys written
    with escapes count: a JSON reader cannot tell them apart. Where there are none and the bytes of the key stand
    there once, what follows them is not read.
    """
    spans: list[Span] = []
    last = document.find(_MODEL_KEY, start)
    if _has_codes(document) or document.find(_MODEL_KEY, last + 1) >= 0:
        last = len(document)
    elif last < 0:
        return spans
    else:
        # Behind one brace and no bracket it can only be of the outermost object: nearly every answer.
        before = document[start:last]
        if (
            before.count(b"{") == 1
            and b"[" not in before
            and not before.endswith(b"\\")
            and (span := _string_behind(document, last + len(_MODEL_KEY))) is not None
        ):
            return [span]
    depth = 0
    position = start
    while position <= last and (token := _TOKEN.search(document, position)) is not None:
        position = token.end()
        first = document[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth <= 0:
                break
        elif depth == 1 and (colon := _COLON.match(document, position)) is not None:
            position = colon.end()
            if _names_model(token.group()):
                value = _TOKEN.match(document, position)
                if value is not None and document[position] == 0x22:
                    spans.append(value.span())
                    position = value.end()
    return spans


def named_model_spans(document: bytes) -> list[Span]:
    """The same for a JSON object that is known to name a model at its top level, in whatever order.

    When the bytes of the key stand there once and nothing is escaped by number, they are that key: inside a string
    they could only stand behind a backslash, and then the key itself would be a second.
    """
    at = document.find(_MODEL_KEY)
    if at < 0 or document.find(_MODEL_KEY, at + 1) >= 0 or _has_codes(document):
        return model_spans(document)
    span = _string_behind(document, at + len(_MODEL_KEY))
    return model_spans(document) if span is None else [span]


def inner_model_spans(document: bytes, start: int = 0) -> list[Span]:
    """The same one level down, in the objects `response` and `message`: events that carry a whole answer name its
    model there (`response.created`, `message_start`), and nowhere else."""
    spans: list[Span] = []
    depth = 0
    inside = False
    position = start
    while (token := _TOKEN.search(document, position)) is not None:
        position = token.end()
        first = document[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth <= 0:
                break
        elif depth <= 2 and (colon := _COLON.match(document, position)) is not None:
            position = colon.end()
            if depth == 1:
                inside = token.group() in _WHOLE_ANSWERS and document.startswith(b"{", position)
            elif inside and _names_model(token.group()):
                value = _TOKEN.match(document, position)
                if value is not None and document[position] == 0x22:
                    spans.append(value.span())
                    position = value.end()
    return spans


def replace_named_model(document: bytes, value: bytes) -> bytes:
    """`patch` at `named_model_spans`."""
    return patch(document, named_model_spans(document), value)


def _has_codes(document: bytes) -> bool:
    """Whether a character is written by its number, and so perhaps one of the key's."""
    # Looking for one byte takes a quarter of the time, and nearly always it is not there.
    return b"\\" in document and b"\\u" in document


def _string_behind(document: bytes, position: int) -> Span | None:
    """Where the string lies that is the value of the key that ends at `position`; None: it is no key of a string."""
    # Nearly everybody writes one of these two, and a name has no backslash: then no pattern is needed.
    start = position + 1
    if document.startswith(b': "', position):
        start += 1
    elif not document.startswith(b':"', position):
        start = -1
    if start > 0:
        end = document.find(b'"', start + 1)
        if end >= 0 and document.find(b"\\", start, end) < 0:
            return start, end + 1
    value = _STRING_BEHIND.match(document, position)
    return None if value is None else value.span(1)


def _names_model(key: bytes) -> bool:
    if b"\\" not in key:
        return key == b'"model"'
    try:
        return msgspec.json.decode(key, type=str) == "model"
    except msgspec.DecodeError:
        return False


def patch(document: bytes, spans: list[Span], value: bytes) -> bytes:
    """`document` with every span replaced by `value`."""
    if len(spans) == 1:
        ((start, end),) = spans
        return b"%b%b%b" % (document[:start], value, document[end:])
    pieces: list[bytes] = []
    position = 0
    for start, end in spans:
        pieces.append(document[position:start])
        pieces.append(value)
        position = end
    pieces.append(document[position:])
    return b"".join(pieces)


def replace_model(document: bytes, name: str) -> bytes:
    """The JSON `document` naming `name` as its model; the same bytes when it names none."""
    return patch(document, model_spans(document), msgspec.json.encode(name))


class Renaming:
    """One model's two names: what clients ask for, and what its engine calls it.

    What both ways look for is what nearly all documents have; any other is read as `replace_named_model` and
    `replace_model` read it. `partition` throughout: `in` takes the bytes it looks for as a number first, at the price
    of an exception, and the other methods take longer to read their arguments than to search.
    """

    __slots__ = ("_asked", "_own", "asked", "own")

    def __init__(self, asked: str, own: str) -> None:
        self.asked = asked
        self.own = own
        self._asked = msgspec.json.encode(asked)
        self._own = msgspec.json.encode(own)

    def onward(self, request: bytes) -> bytes:
        """A request that is known to ask for `asked`, asking for `own`."""
        before, key, behind = request.partition(_MODEL_KEY)
        space, value, rest = behind.partition(self._asked)
        if (
            value
            and space in (b":", b": ")
            and not rest.partition(_MODEL_KEY)[1]
            and not (request.partition(b"\\")[1] and _has_codes(request))
        ):
            return b"%b%b%b%b%b" % (before, key, space, self._own, rest)
        return replace_named_model(request, self._own)

    def back(self, answer: bytes) -> bytes:
        """The JSON `answer` naming `asked` as its model; the same bytes when it names none."""
        before, key, behind = answer.partition(_MODEL_KEY)
        space, value, rest = behind.partition(self._own)
        outside, brace, inside = before.partition(b"{")
        # Behind one brace and no bracket, and not in the middle of a string: of the outermost object.
        if (
            value
            and space in (b":", b": ")
            and brace
            and not outside
            and not inside.partition(b"{")[1]
            and not inside.partition(b"[")[1]
            and not inside.partition(b"\\")[1]
            and not rest.partition(_MODEL_KEY)[1]
            and not (rest.partition(b"\\")[1] and _has_codes(rest))
        ):
            return b"%b%b%b%b%b" % (before, key, space, self._asked, rest)
        return replace_model(answer, self.asked)


class JsonModelRewriter:
    """Rewrites a JSON answer piece by piece, holding back at most one short string.

    `feed` returns what may go on; `finish` the rest.
    """

    def __init__(self, name: str) -> None:
        self._value = msgspec.json.encode(name)
        self._depth = 0
        self._held = b""
        self._in_string = False
        self._escaped = False

    def feed(self, block: bytes) -> bytes:
        """The rewritten bytes that are certain by now."""
        data = self._held + block
        self._held = b""
        out: list[bytes] = []
        position = done = 0
        while True:
            if self._in_string:
                end = self._string_end(data, position)
                if end < 0:
                    break
                position = end
            token = _STRUCTURE.search(data, position)
            if token is None:
                break
            start = token.start()
            position = start + 1
            first = data[start]
            if first in b"{[":
                self._depth += 1
            elif first in b"}]":
                self._depth -= 1
            elif self._depth != 1:
                self._in_string, self._escaped = True, False
            else:
                step = self._top_level_string(data, start)
                if step is None:
                    # The string, or what tells a key from a value, is not all here yet.
                    if len(data) - start <= MAX_HELD:
                        self._held = data[start:]
                        out.append(data[done:start])
                        return b"".join(out)
                    self._in_string, self._escaped = True, False
                    continue
                position, span = step
                if span is not None:
                    out.append(data[done : span[0]])
                    out.append(self._value)
                    done = span[1]
        out.append(data[done:])
        return b"".join(out)

    def finish(self) -> bytes:
        """What was held back: a document that ended in the middle of a string is passed on as is."""
        held, self._held = self._held, b""
        return held

    def _string_end(self, data: bytes, position: int) -> int:
        """Offset behind the string we are in, -1 (state kept) when it goes on."""
        if self._escaped and position < len(data):
            position += 1
            self._escaped = False
        match = _STRING_END.match(data, position)
        if match is not None:
            self._in_string = False
            return match.end()
        tail = len(data)
        while tail > position and data[tail - 1] == 0x5C:
            tail -= 1
        self._escaped = self._escaped or (len(data) - tail) % 2 == 1
        return -1

    def _top_level_string(self, data: bytes, start: int) -> tuple[int, Span | None] | None:
        """Offset to go on from and the span to replace; None when more bytes are needed."""
        token = _TOKEN.match(data, start)
        if token is None:
            return None
        colon = _COLON.match(data, token.end())
        if colon is None:
            rest = data[token.end() :]
            return None if not rest.strip(b" \t\r\n") else (token.end(), None)
        if not _names_model(token.group()):
            return colon.end(), None
        if colon.end() == len(data):
            return None
        if data[colon.end()] != 0x22:
            return colon.end(), None
        value = _TOKEN.match(data, colon.end())
        return None if value is None else (value.end(), value.span())


class SseModelRewriter:
    """Rewrites the `model` in the JSON of `data:` lines, event by event."""

    def __init__(self, name: str) -> None:
        self._value = msgspec.json.encode(name)
        self._held = b""
        self._before = (
            b""  # an event's first bytes, to behind its model's name; empty: none had one yet
        )
        self._named = b""  # the same with our name

    def feed(self, block: bytes) -> bytes:
        """All complete lines, rewritten; an unfinished one is held back up to 64 KiB."""
        data = self._held + block
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) > MAX_HELD:
            cut = len(data)
        self._held = data[cut:]
        return self._lines(data[:cut]) if cut else b""

    def finish(self) -> bytes:
        """The unfinished last line."""
        held, self._held = self._held, b""
        return self._lines(held)

    def _lines(self, data: bytes) -> bytes:
        before = self._before
        if before and data.startswith(before):
            # Events of one stream begin alike: id, time and model come before what differs. What follows needs no
            # reading when nothing in it can be a key that names a model.
            rest = data[len(before) :]
            if _MODEL_KEY not in rest and not _has_codes(rest):
                return self._named + rest
        if b"model" not in data and b"\\u" not in data:
            return data
        return b"".join([self._line(line) for line in data.splitlines(keepends=True)])

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        spans = model_spans(line, 5)
        if not spans and any(key in line for key in _WHOLE_ANSWERS):
            spans = inner_model_spans(line, 5)
            return patch(line, spans, self._value) if spans else line
        if len(spans) == 1 and not _has_codes(line) and line.find(_MODEL_KEY, spans[0][1]) < 0:
            ((start, end),) = spans
            self._before = line[:end]
            self._named = line[:start] + self._value
        return patch(line, spans, self._value) if spans else line
