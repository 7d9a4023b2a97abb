"""Finds the model's name in a multipart/form-data body as its blocks go by, wherever its part stands.

It keeps no more than a delimiter's length and the few small parts it was told to read. What two readers could take
for two different forms is refused: an engine behind us must not find another name than we did. Pure.
"""

import re
from typing import Final, Literal

from msgspec import Struct

from gateway.domain.request_fields import (
    MAX_MODEL_NAME,
    FieldsProblem,
    RequestFields,
    model_missing,
)

MAX_PART_HEAD: Final = 8 * 1024
MAX_PARTS: Final = 1000
MAX_VALUE: Final = 4 * MAX_MODEL_NAME
"""Bytes of a part that is read; `model` in the widest UTF-8."""

_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*(?P<name>[!#-'*+.0-9A-Z^-z|~-]+)=(?:\"(?P<quoted>(?:[^\"\\]|\\.)*)\"|(?P<token>[^;\" \t]*))",
    re.DOTALL,
)
_READ: Final = (b"model", b"stream")
_PLAIN_ENCODINGS: Final = (b"", b"7bit", b"8bit", b"binary")
_CRLF: Final = b"\r\n"


def boundary_of(content_type: bytes) -> bytes | FieldsProblem:
    """The boundary a Content-Type of multipart/form-data names."""
    media, _, _ = content_type.partition(b";")
    if media.strip().lower() != b"multipart/form-data":
        return FieldsProblem(message="Of multipart bodies only multipart/form-data is read here.")
    parameters = _parameters(content_type[len(media) :])
    if parameters is None or parameters.count(b"boundary") != 1:
        return FieldsProblem(message="The Content-Type of a form must name one boundary.")
    boundary = parameters.values[parameters.names.index(b"boundary")]
    if not _BOUNDARY.fullmatch(boundary):
        return FieldsProblem(message="The boundary in the Content-Type is not a valid one.")
    return boundary


class Form(Struct, frozen=True, kw_only=True):
    """What a form says. `span` is where the value of `model` stands, None where the form has no such part."""

    fields: RequestFields
    span: tuple[int, int] | None


class FormReader:
    """Fed the body's blocks in order, then asked for what was found; a problem found early is kept.

    `named`: the name the request's path or query gives; a form of such a request may lack its `model`, and may not
    name another.
    """

    def __init__(self, boundary: bytes, *, named: str | None = None) -> None:
        self._named = named
        self._mark = b"\n--" + boundary
        # As if a line end stood before the body: then the first delimiter is like all others.
        self._held = b"\n"
        self._base = -1  # where `_held` begins in the body
        self._state: Literal["start", "head", "content", "end"] = "start"
        self._part: bytes | None = None  # the name of the part that is read
        self._parts = 0
        self._value: list[bytes] = []
        self._value_size = 0
        self._content_at = 0  # where the content of the part begins in the body
        self._found: dict[bytes, tuple[bytes, tuple[int, int]]] = {}
        self.problem: FieldsProblem | None = None

    def feed(self, block: bytes) -> None:
        """The next bytes of the body."""
        if self.problem is not None:
            return
        data = self._held + block if self._held else block
        position = 0
        while self.problem is None:
            if self._state == "content" or self._state == "start":
                step = self._delimiter(data, position)
            elif self._state == "head":
                step = self._head(data, position)
            else:
                step = -1
            if step < 0:
                break
            position = step
        if self._state == "content":
            # What may be the beginning of a delimiter, and the CR before it, is looked at again.
            keep = max(position, len(data) - len(self._mark) - 2)
            self._content(data, position, keep)
            position = keep
        self._held = data[position:]
        self._base += position
        if self._state == "end" and len(self._held) > len(_CRLF):
            self._refuse("something stands behind its last boundary")

    def finish(self) -> Form | FieldsProblem:
        """What the whole body says."""
        if self.problem is not None:
            return self.problem
        if self._state != "end":
            return _broken("it ends before its last boundary")
        if self._held.strip(_CRLF):
            return _broken("something stands behind its last boundary")
        stream = self._found.get(b"stream", (b"", (0, 0)))[0].strip().lower() in (b"true", b"1")
        found = self._found.get(b"model")
        if found is None:
            if self._named is None:
                return model_missing("the form has no part `model`")
            return Form(fields=RequestFields(model=self._named, stream=stream), span=None)
        value, span = found
        try:
            model = value.decode("utf-8")
        except UnicodeDecodeError:
            return FieldsProblem(message="The part `model` is not UTF-8.", param="model")
        if not model:
            return model_missing("the part `model` is empty")
        if len(model) > MAX_MODEL_NAME:
            return _too_long()
        if self._named is not None and model != self._named:
            return FieldsProblem(
                message="The address and the form name two different models.", param="model"
            )
        return Form(fields=RequestFields(model=model, stream=stream), span=span)

    # -- inside --------------------------------------------------------------------------------

    def _delimiter(self, data: bytes, position: int) -> int:
        """Behind the next delimiter, or -1 when it is not all there, or refused."""
        at = data.find(self._mark, position)
        first = self._state == "start"
        if first and at != 0:
            if len(data) >= len(self._mark):
                self._refuse("it does not begin with its boundary")
            return -1
        behind = at + len(self._mark) + 2
        if at < 0 or len(data) < behind:
            return -1
        if not first:
            if data[at - 1 : at] != b"\r" or self._base + at <= self._content_at:
                return self._refuse("a boundary in it does not begin a line")
            self._content(data, position, at - 1)
            if self._part is not None:
                span = (self._content_at, self._content_at + self._value_size)
                self._found[self._part] = (b"".join(self._value), span)
        kind = data[behind - 2 : behind]
        if kind == b"--":
            self._state = "end"
        elif kind == _CRLF:
            self._state = "head"
            self._parts += 1
            if self._parts > MAX_PARTS:
                return self._refuse(f"it has more than {MAX_PARTS} parts")
        else:
            return self._refuse("something stands on the line of a boundary")
        return behind

    def _content(self, data: bytes, start: int, stop: int) -> None:
        """Bytes of the content that is passed over: kept if its part is read."""
        start = max(start, self._content_at - self._base)
        if self._part is None or stop <= start:
            return
        self._value_size += stop - start
        if self._value_size <= MAX_VALUE:
            self._value.append(data[start:stop])
        elif self.problem is None:
            name = self._part.decode("ascii")
            long = FieldsProblem(message=f"The part `{name}` is too long.", param=name)
            self.problem = _too_long() if name == "model" else long

    def _head(self, data: bytes, position: int) -> int:
        """Behind the head of a part, or -1 when it is not all there, or refused."""
        end = data.find(b"\r\n\r\n", position)
        if end - position > MAX_PART_HEAD or (end < 0 and len(data) - position > MAX_PART_HEAD):
            return self._refuse("the head of a part is too long")
        if end < 0:
            return -1
        name = self._name_of(data[position:end])
        if isinstance(name, str):
            return self._refuse(name)
        if name in self._found:
            word = name.decode("ascii")
            problem = FieldsProblem(
                message=f"The form has more than one part `{word}`.", param=word
            )
            self.problem = problem
            return -1
        self._state = "content"
        self._part = name if name in _READ else None
        self._value = []
        self._value_size = 0
        self._content_at = self._base + end + 4
        # From the line end on: a delimiter right behind it would be read in two ways, and is refused.
        return end + 3

    def _name_of(self, head: bytes) -> bytes | str:
        """The name of the part with this head, or why it cannot be told for certain."""
        disposition: bytes | None = None
        encoding = b""
        for line in head.split(_CRLF):
            name, colon, value = line.partition(b":")
            if not colon or not name or name.strip() != name:
                return "a header of a part is not one"
            if b"\n" in line or b"\r" in line or b"\0" in line:
                return "a header of a part holds a line end or NUL"
            key = name.lower()
            if key == b"content-disposition":
                if disposition is not None:
                    return "a part says twice what it is"
                disposition = value.strip()
            elif key == b"content-transfer-encoding":
                encoding = value.strip().lower()
        if disposition is None or disposition[:9].lower() != b"form-data":
            return "a part does not say that it is form-data"
        parameters = _parameters(disposition[9:])
        if parameters is None or parameters.count(b"name") != 1:
            return "a part has no name, or more than one"
        if b"name*" in parameters.names:
            return "a part has no name, or more than one"
        name = parameters.values[parameters.names.index(b"name")]
        if name in _READ:
            if any(n.startswith(b"filename") for n in parameters.names):
                return f"the part `{name.decode('ascii')}` is a file"
            if encoding not in _PLAIN_ENCODINGS:
                return f"the part `{name.decode('ascii')}` is encoded"
        return name

    def _refuse(self, why: str) -> int:
        self.problem = _broken(why)
        return -1


class _Parameters(Struct, frozen=True):
    names: list[bytes]
    values: list[bytes]

    def count(self, name: bytes) -> int:
        return self.names.count(name)


def _parameters(text: bytes) -> _Parameters | None:
    """`; name=value` pairs, names in lower case; None when the text is anything else."""
    found = _Parameters([], [])
    position = 0
    text = text.rstrip(b" \t;")
    while position < len(text):
        match = _PARAMETER.match(text, position)
        if match is None:
            return None
        quoted = match["quoted"]
        value = match["token"] if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        found.names.append(match["name"].lower())
        found.values.append(value)
        position = match.end()
    return found


def _broken(why: str) -> FieldsProblem:
    return FieldsProblem(message=f"The form in the request body cannot be read: {why}.")


def _too_long() -> FieldsProblem:
    return FieldsProblem(
        message=f"The model name is longer than {MAX_MODEL_NAME} characters.", param="model"
    )
