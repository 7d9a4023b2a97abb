"""Says whether bytes are a safetensors file: eight bytes that count a header, the header in JSON, the tensors.

It looks at shapes and places, never at a number: what an engine makes of the tensors is the engine's affair.
"""

from typing import Any, Final

import msgspec
from msgspec import Struct

COUNT_BYTES: Final = 8
BEGINNING: Final = COUNT_BYTES + 1
"""So many bytes tell whether it may be one: the count, and the brace behind it."""
HEADER_MOST: Final = 32 * 1024**2
"""The format allows three times as much; the header of an adapter of thousands of experts has a few MiB."""

_SHOWN: Final = 100
_DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


class _Tensor(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_bytes(first: bytes) -> int:
    """The length of the header that the file's first bytes count."""
    return int.from_bytes(first[:COUNT_BYTES], "little")


def may_begin(first: bytes, size: int) -> bool:
    """Whether a file of `size` bytes that begins with `first` may be one. Fewer bytes than tell: it may."""
    if len(first) < BEGINNING:
        return size >= BEGINNING
    return has_header(first) and header_bytes(first) <= size - COUNT_BYTES


def has_header(first: bytes) -> bool:
    """Whether these bytes begin a header, however long the file is."""
    return first[COUNT_BYTES:BEGINNING] == b"{" and 1 < header_bytes(first) <= HEADER_MOST


def problem_of(header: bytes, size: int) -> str | None:
    """What is wrong with a file of `size` bytes whose header is this, in words that follow its name; None: it is
    whole and well formed.

    1 no JSON object of tensors   2 no tensor   3 a tensor that is not as long as its shape says, or lies
    elsewhere than behind the one before it   4 the file does not end with its last tensor
    """
    try:
        told = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        told.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in told.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "has a header that is no list of tensors"  # 1
    if not tensors:  # 2
        return "has no tensor"
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, behind = tensor.data_offsets
        if first != end or behind < first or not _is_as_long(tensor, behind - first):  # 3
            return f"has a tensor that is not where or as long as its header says ({_shown(name)})"
        end = behind
    missing = COUNT_BYTES + len(header) + end - size
    if missing:  # 4
        return f"lacks its last {missing} bytes" if missing > 0 else "goes on behind its tensors"
    return None


def _is_as_long(tensor: _Tensor, length: int) -> bool:
    bits = _DTYPE_BITS.get(tensor.dtype)
    if bits is None:
        return True  # of a type that is younger than this table
    count: Any = 1
    for side in tensor.shape:
        if side < 0:
            return False
        count *= side
    return count * bits == length * 8


def _shown(name: str) -> str:
    flat = "".join(mark if mark.isprintable() else "?" for mark in name)
    return flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}…"
