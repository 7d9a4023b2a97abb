"""Reads catalog files for yardctl and finds the line that a problem of an entry is about.

Only the form is judged here: YAML, keys given twice, one entry or a list of them. What an entry may say is
the control plane's to decide.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml
from msgspec import Struct

from controlplane.ctl.failures import UsageMistake
from events.settings import SettingsError, read_yaml
from schemas.commands import Problem

LARGEST_BYTES: Final = 4 * 1024 * 1024
DEEPEST: Final = 32
MOST_VALUES: Final = 200_000
"""Aliases let a few lines of YAML stand for any number of values; no catalog needs so many."""
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[]+)")


class EntryFile(Struct, frozen=True, kw_only=True):
    """The entries of one file, as they stood, and where each of them stands.

    `listed` is False when the file holds a single entry without a list; paths of problems begin with
    `[0]` all the same.
    """

    name: str
    entries: list[dict[str, Any]]
    listed: bool
    root: Any = None

    def place_of(self, path: str) -> str:
        """`file:line` of the node at `path`, or of the nearest one around it that exists."""
        return f"{self.name}:{_line(self.root, path, self.listed)}"

    def explain(self, problem: Problem) -> str:
        """`file:line: path: sentence`, for a person and for editors that jump there."""
        return f"{self.place_of(problem.path)}: {problem.path}: {problem.sentence}"


def read_entries(path: Path) -> EntryFile:
    """The entries of `path` (`-` is standard input). Raises UsageMistake naming file and line."""
    name = "<stdin>" if str(path) == "-" else str(path)
    return parse_entries(_text(path, name), name)


def parse_entries(text: str, name: str) -> EntryFile:
    """The entries in `text`. Raises UsageMistake naming file and line."""
    try:
        document = read_yaml(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except SettingsError as error:
        raise UsageMistake(str(error)) from error
    except RecursionError as error:
        raise UsageMistake(f"{name}: nested too deeply to be a catalog") from error
    if document is None:
        raise UsageMistake(f"{name}: the file is empty; expected an entry or a list of entries")
    listed = isinstance(document, list)
    entries = document if listed else [document]
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            line = _line(root, f"[{index}]", listed)
            raise UsageMistake(f"{name}:{line}: [{index}]: expected an entry (a mapping of fields)")
    _Form(name, root, listed).check(entries, "", 0)
    return EntryFile(name=name, entries=entries, listed=listed, root=root)


def _text(path: Path, name: str) -> str:
    try:
        if name == "<stdin>":
            import sys

            return sys.stdin.read(LARGEST_BYTES)
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageMistake(f"{name}: larger than 4 MiB; this is not a catalog")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageMistake(f"cannot read {name}: {reason}") from error


class _Form:
    """Checks that a document can be sent as JSON: YAML also knows dates, keys that are no text, cycles."""

    def __init__(self, name: str, root: Any, listed: bool) -> None:
        self._name = name
        self._root = root
        self._listed = listed
        self._seen = 0

    def check(self, value: Any, path: str, depth: int) -> None:
        """Raises UsageMistake naming file and line."""
        self._seen += 1
        if depth > DEEPEST or self._seen > MOST_VALUES:
            raise self._wrong(path, "too deep or too much to be a catalog")
        match value:
            case None | bool() | int() | float() | str():
                return
            case list():
                for index, item in enumerate(value):
                    self.check(item, f"{path}[{index}]", depth + 1)
            case dict():
                for key, item in value.items():
                    here = f"{path}.{key}"
                    if not isinstance(key, str):
                        raise self._wrong(here, "expected a field name as text; quote it")
                    self.check(item, here, depth + 1)
            case _:
                kind = type(value).__name__
                raise self._wrong(path, f"expected a text, got a {kind}; quote it")

    def _wrong(self, path: str, sentence: str) -> UsageMistake:
        line = _line(self._root, path, self._listed)
        return UsageMistake(f"{self._name}:{line}: {path[:200]}: {sentence}")


def _line(root: Any, path: str, listed: bool) -> int:
    """The line (from 1) of the node at `path`; steps that lead nowhere stay where they are."""
    steps = [(int(i) if i else None, k) for i, k in _STEP.findall(path)]
    if steps and not listed:
        steps = steps[1:]  # the single entry of the file is its root
    node = root
    line = root.start_mark.line if root is not None else 0
    while steps:
        (index, key), *steps = steps
        if index is not None and isinstance(node, yaml.SequenceNode) and index < len(node.value):
            node = node.value[index]
            line = node.start_mark.line
            continue
        if index is None and isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == key]
            if found:
                # The field's own line: a value on the next lines would point past it.
                line, node = found[0][0].start_mark.line, found[0][1]
                continue
        break
    return line + 1
