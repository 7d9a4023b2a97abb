"""Finds the architectures a build of llama.cpp loads, in the table of their names inside its library.

llama.cpp has no call that lists them, and the names the gguf package knows are of another date than the
engine. The table's texts lie side by side in the library, each ended by a zero byte. A text that another part of the
program has too, or that ends a longer one (`bert` in `nomic-bert`), the linker keeps only once, somewhere near; the
known names are therefore looked for around the table as well.
"""

import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ANCHORS: Final = ("granitehybrid", "kimi-linear", "command-r", "minicpm3", "starcoder2")
"""Names that stand for themselves in every build of the last years; the first that is found leads to the table."""

FEWEST: Final = 40
"""A shorter row of texts is not the table."""

NOT_MODELS: Final = frozenset({"clip"})
"""Listed with the architectures and loaded beside a model, never as one."""

_NAME: Final = re.compile(rb"[a-z][a-z0-9_-]{1,39}")
_WINDOW: Final = 16 * 1024
"""Bytes to each side of an anchor; the table takes about 1,200."""

_NEAR: Final = 4 * 1024 * 1024
"""Bytes to each side of the table in which the program's other texts lie."""


def architectures_in(data: "bytes | mmap.mmap", known: Iterable[str]) -> tuple[str, ...]:
    """The names in the table of `data`, and those of `known` that end a text near it, sorted. Empty when there
    is no table."""
    for anchor in ANCHORS:
        # Other parts of the program may compare with such a name, too.
        at = -1
        while (at := data.find(b"\0" + anchor.encode() + b"\0", at + 1)) >= 0:
            row = _row(bytes(data[max(0, at - _WINDOW) : at + _WINDOW]), min(at, _WINDOW) + 1)
            if len(row) >= FEWEST:
                near = bytes(data[max(0, at - _NEAR) : at + _NEAR])
                merged = {name for name in known if name.encode() + b"\0" in near}
                return tuple(sorted(({text.decode() for text in row} | merged) - NOT_MODELS))
    return ()


def _row(window: bytes, at: int) -> list[bytes]:
    """The texts side by side around `at`, where one begins, that could be names."""
    before = window[: at - 1].split(b"\0")
    after = window[at:].split(b"\0")
    row: list[bytes] = []
    for texts in (reversed(before), after):
        for text in texts:
            if _NAME.fullmatch(text) is None:
                break
            row.append(text)
    return row


def architectures_of(files: Iterable[Path], known: Iterable[str]) -> tuple[str, ...]:
    """As `architectures_in`, of the first of `files` that has a table; one that cannot be read has none."""
    names = tuple(known)
    for path in files:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                found = architectures_in(data, names)
        except (OSError, ValueError):  # ValueError: an empty file
            continue
        if found:
            return found
    return ()
