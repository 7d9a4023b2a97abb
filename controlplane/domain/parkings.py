"""Reads a profile's `parking` and says everything that is wrong with it.

Whether a node has that way, and whether parking pays, is decided there (nodeagent/domain/parking.py).
"""

import re
from typing import Final

from controlplane.domain.fields import Fields
from controlplane.domain.quantities import DURATION, read_seconds
from schemas.commands import Problem
from schemas.model import EngineName, Parking, ParkWay

PLACEHOLDERS: Final = ("pid", "replica", "endpoint")
"""What a hook may name as `{…}`; the agent puts the values in, no shell does."""

LONGEST_S: Final = 3600.0

_WAYS: Final[tuple[ParkWay, ...]] = ("sleep", "checkpoint", "command", "none")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")


def read_parking(
    fields: Fields, path: str, engine: EngineName | None, problems: list[Problem]
) -> Parking | None:
    """The parking of a profile at `path`: the name of a way alone, or a mapping with `way`, and for
    `command` the hooks `park` and `resume`. None when nothing is said, or nothing that can be read."""
    given = fields.take("parking")
    if not fields.has("parking"):
        return None
    if isinstance(given, str):
        given = {"way": given}
    inner = Fields(given, f"{path}.parking" if path else "parking", problems)
    if not inner.readable:
        return None
    way = _way(inner, engine)
    hooks = {name: _hook(inner, name) for name in ("park", "resume")}
    timeout_s = inner.take_quantity(
        "timeout", lambda value: read_seconds(value) or None, DURATION, default=60.0
    )
    if timeout_s > LONGEST_S:
        inner.refuse("timeout", f"expected at most {LONGEST_S:g} s")
    inner.close()
    for name, words in hooks.items():
        if way == "command" and not words:
            inner.refuse(
                name, f"parking by command needs `{name}`: a list, or one text to be split"
            )
        elif way != "command" and inner.has(name):
            inner.refuse(name, f"`{name}` belongs to parking by command")
    if way is None:
        return None
    return Parking(way=way, park=hooks["park"], resume=hooks["resume"], timeout_s=timeout_s)


def _way(fields: Fields, engine: EngineName | None) -> ParkWay | None:
    way: ParkWay | None = fields.take_choice("way", _WAYS)
    if way == "sleep" and engine not in (None, "vllm"):
        fields.refuse("way", f"engine {engine} has no sleep of its own; vllm has")
    return way


def _hook(fields: Fields, name: str) -> tuple[str, ...]:
    words = fields.take_command(name)
    for word in words:
        if "\x00" in word:
            fields.refuse(name, "expected texts without zero bytes")
        for found in _PLACEHOLDER.findall(word):
            if found not in PLACEHOLDERS:
                known = " ".join(f"{{{p}}}" for p in PLACEHOLDERS)
                fields.refuse(name, f"{{{found}}} is not known; known: {known}")
    return words
