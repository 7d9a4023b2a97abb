"""Reads a GGUF header off the first bytes of a file, as far as they go.

`parse` takes what there is of the file and answers with the header, with how many bytes it must have at
least to go on, or with a sentence that says why this is no GGUF. It keeps what describes the model and
walks over the rest (vocabulary, chat template), and it trusts nothing it reads: every count and length is
bounded, and no input raises. It does not know what the values mean; ggufshape.py does.
"""

import struct
from collections.abc import Iterator
from typing import Final, NoReturn

from msgspec import Struct

Scalar = bool | int | float | str
Prefix = bytes | bytearray | memoryview

MAGIC: Final = b"GGUF"
HEADER_BYTES_MAX: Final = 256 * 1024**2
"""A longer header is refused: the largest known one, with all its vocabulary, has about 20 MiB."""

_VERSIONS: Final = (2, 3)
_PAIRS_MAX: Final = 65_536
_TENSORS_MAX: Final = 1_000_000
_KEY_BYTES_MAX: Final = 65_535
_NAME_BYTES_MAX: Final = 63
_DIMENSIONS_MAX: Final = 4
_KEPT_TEXT_BYTES: Final = 4096
_KEPT_NUMBERS: Final = 4096
_ALIGNMENT: Final = 32
_ELEMENTS_MAX: Final = 2**48

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_TEXT: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_FORMATS: Final[dict[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""The struct letter of each number type a value may have."""

BLOCKS: Final[dict[int, tuple[int, int]]] = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}
"""Values in a block, and bytes of it, of each tensor type by number."""


class Header(Struct, frozen=True, kw_only=True):
    """A whole header. `values` are the numbers and short texts, `arrays` the short lists of numbers (one
    entry a layer, mostly), `lengths` how long every list is, kept or not.

    `weights_bytes` is what the tensors of this file take, padding between them included; None when one has
    a type that is not known here. `matrix_bytes` is how much of that are matrices to multiply with, by
    their type: all but the token embedding, and that too where no other matrix makes the output.
    `vocabulary_rows` is the length of the token embedding, 0 without one.
    """

    version: int
    values: dict[str, Scalar]
    arrays: dict[str, tuple[int | float, ...]]
    lengths: dict[str, int]
    tensors: int
    weights_bytes: int | None
    matrix_bytes: dict[int, int]
    vocabulary_rows: int
    header_bytes: int


class More(Struct, frozen=True, kw_only=True):
    """The header goes on: it has at least this many bytes from the start of the file."""

    at_least_bytes: int


class NotGguf(Struct, frozen=True, kw_only=True):
    """`sentence` goes on after the name of the file: `is not a GGUF file: …`."""

    sentence: str


class _Short(Exception):
    def __init__(self, at_least: int) -> None:
        self.at_least = at_least


class _Broken(Exception):
    """Carries the sentence."""


def parse(prefix: Prefix) -> Header | More | NotGguf:
    """The header these first bytes of a file hold. Never raises, whatever they are."""
    try:
        return _header(_Cursor(prefix))
    except _Short as short:
        if short.at_least > HEADER_BYTES_MAX:
            return NotGguf(sentence=f"its header needs more than {HEADER_BYTES_MAX // 1024**2} MiB")
        return More(at_least_bytes=short.at_least)
    except _Broken as broken:
        return NotGguf(sentence=str(broken))


class _Cursor:
    """A place in the bytes. What lies beyond them raises _Short with what is needed to get there."""

    def __init__(self, prefix: Prefix) -> None:
        self.bytes = prefix
        self.size = len(self.bytes)
        self.at = 0

    def need(self, count: int) -> int:
        """Goes `count` bytes on and returns where they begin."""
        begin = self.at
        if begin + count > self.size:
            raise _Short(begin + count)
        self.at = begin + count
        return begin

    def u32(self) -> int:
        return _U32.unpack_from(self.bytes, self.need(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.bytes, self.need(8))[0]

    def raw(self, count: int) -> bytes:
        begin = self.need(count)
        return bytes(self.bytes[begin : begin + count])

    def text(self, longest: int, what: str) -> str:
        length = self.u64()
        if length > longest:
            _fail(f"{what} has {length} bytes")
        try:
            return self.raw(length).decode()
        except UnicodeDecodeError:
            _fail(f"{what} is not UTF-8")


def _fail(sentence: str) -> NoReturn:
    raise _Broken(sentence)


def _header(cursor: _Cursor) -> Header:
    version = _version(cursor)
    tensors, pairs = cursor.u64(), cursor.u64()
    if pairs > _PAIRS_MAX:
        _fail(f"it claims {pairs} pairs of key and value")
    if tensors > _TENSORS_MAX:
        _fail(f"it claims {tensors} tensors")
    values: dict[str, Scalar] = {}
    arrays: dict[str, tuple[int | float, ...]] = {}
    lengths: dict[str, int] = {}
    for _ in range(pairs):
        key = cursor.text(_KEY_BYTES_MAX, "a key")
        if key in values or key in lengths:
            _fail(f"the key {key[:100]!r} is there twice")
        kind = cursor.u32()
        if kind == _ARRAY:
            lengths[key], kept = _array(cursor, key)
            if kept is not None:
                arrays[key] = kept
        elif kind == _TEXT:
            values[key] = _text_value(cursor, key)
        else:
            values[key] = _number(cursor, key, kind)
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not _is_alignment(alignment):
        _fail(f"general.alignment is {str(alignment)[:100]}")
    weights = _tensors(cursor, tensors, int(alignment))
    return Header(
        version=version,
        values=values,
        arrays=arrays,
        lengths=lengths,
        tensors=tensors,
        weights_bytes=weights.end,
        matrix_bytes=weights.matrices,
        vocabulary_rows=weights.rows,
        header_bytes=cursor.at,
    )


def _version(cursor: _Cursor) -> int:
    begin = bytes(cursor.bytes[: len(MAGIC)])
    if begin != MAGIC[: len(begin)]:
        _fail(f"it begins with {begin!r}")
    cursor.need(len(MAGIC))
    version = cursor.u32()
    if version in _VERSIONS:
        return version
    if version == 1:
        _fail("it has version 1 of the format, which no engine reads any more")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
        _fail("it is big endian; the engines read little endian files only")
    _fail(f"it has version {version} of the format; known are 2 and 3")


def _number(cursor: _Cursor, key: str, kind: int) -> Scalar:
    (value,) = _numbers(cursor, key, kind, 1)
    if kind != _BOOL:
        return value
    if value not in (0, 1):
        _fail(f"the value of {key[:100]!r} is neither true nor false")
    return bool(value)


def _numbers(cursor: _Cursor, key: str, kind: int, count: int) -> tuple[int | float, ...]:
    layout = struct.Struct(f"<{count}{_letter(key, kind)}")
    return layout.unpack_from(cursor.bytes, cursor.need(layout.size))


def _letter(key: str, kind: int) -> str:
    letter = _FORMATS.get(kind)
    if letter is None:
        _fail(f"the value of {key[:100]!r} has the unknown type {kind}")
    return letter


def _text_value(cursor: _Cursor, key: str) -> str:
    """Long texts (a chat template) are walked over; what is kept of them is that they are there."""
    length = cursor.u64()
    if length > HEADER_BYTES_MAX:
        _fail(f"the value of {key[:100]!r} has {length} bytes")
    if length > _KEPT_TEXT_BYTES:
        cursor.need(length)
        return ""
    return cursor.raw(length).decode(errors="replace")


def _array(cursor: _Cursor, key: str) -> tuple[int, tuple[int | float, ...] | None]:
    """The length, and the entries of a short list of numbers."""
    kind, count = cursor.u32(), cursor.u64()
    if count > HEADER_BYTES_MAX:
        _fail(f"the list {key[:100]!r} claims {count} entries")
    if kind == _TEXT:
        _skip_texts(cursor, key, count)
        return count, None
    if kind == _ARRAY:
        _fail(f"{key[:100]!r} is a list of lists")
    if count <= _KEPT_NUMBERS:
        return count, _numbers(cursor, key, kind, count)
    cursor.need(struct.calcsize(f"<{_letter(key, kind)}") * count)
    return count, None


def _skip_texts(cursor: _Cursor, key: str, count: int) -> None:
    """Walks over a vocabulary: the one loop here that runs hundreds of thousands of times."""
    data, size, at = cursor.bytes, cursor.size, cursor.at
    read = _U64.unpack_from
    for index in range(count):
        if at + 8 > size:
            # Each of the texts that are left takes 8 bytes for its length, if no more.
            raise _Short(at + 8 * (count - index))
        at += 8 + read(data, at)[0]
    if at > HEADER_BYTES_MAX:
        _fail(f"the list {key[:100]!r} goes beyond {HEADER_BYTES_MAX // 1024**2} MiB")
    if at > size:
        raise _Short(at)
    cursor.at = at


def _is_alignment(value: Scalar) -> bool:
    return type(value) is int and 0 < value <= 2**20 and value & (value - 1) == 0


class _Weights(Struct, frozen=True, kw_only=True):
    """`end` None: a tensor has an unknown type, so that what lies behind it cannot be told."""

    end: int | None
    rows: int
    matrices: dict[int, int]


def _tensors(cursor: _Cursor, count: int, alignment: int) -> _Weights:
    if cursor.size < cursor.at + 24 * count:
        # A description has at least a length, a number of dimensions, a type and an offset.
        raise _Short(cursor.at + 24 * count)
    end: int | None = 0
    rows = embedding_bytes = 0
    embedding_kind: int | None = None
    matrices: dict[int, int] = {}
    seen: set[str] = set()
    for name, shape, kind, offset in _infos(cursor, count):
        if name in seen:
            _fail(f"the tensor {name!r} is there twice")
        seen.add(name)
        if end is not None and offset != end:
            _fail(
                f"the tensor {name!r} lies at {offset} and not behind the one before it, at {end}"
            )
        size = _tensor_bytes(name, shape, kind)
        end = None if end is None or size is None else end + -(-size // alignment) * alignment
        if size is None or len(shape) < 2:
            continue
        if name == "token_embd.weight":
            rows, embedding_kind, embedding_bytes = shape[1], kind, size
        else:
            matrices[kind] = matrices.get(kind, 0) + size
    if embedding_kind is not None and "output.weight" not in seen:
        matrices[embedding_kind] = matrices.get(embedding_kind, 0) + embedding_bytes
    return _Weights(end=end, rows=rows, matrices=matrices)


def _infos(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = cursor.text(_NAME_BYTES_MAX, "the name of a tensor")
        dimensions = cursor.u32()
        if dimensions > _DIMENSIONS_MAX:
            _fail(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(cursor.u64() for _ in range(dimensions))
        yield name, shape, cursor.u32(), cursor.u64()


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int | None:
    elements = 1
    for length in shape:
        elements *= length
        if elements > _ELEMENTS_MAX:
            _fail(f"the tensor {name!r} claims more than {_ELEMENTS_MAX} values")
    block = BLOCKS.get(kind)
    if block is None:
        return None
    values, size = block
    if shape and shape[0] % values:
        _fail(f"the rows of the tensor {name!r} are not whole blocks of {values} values")
    return elements // values * size
