"""Takes typed fields out of a mapping somebody wrote, collecting everything that is wrong with it.

It knows no field by name; entries.py and profiles.py say which there are. Reading goes on after a
problem, so a person sees all of them at once.
"""

import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from schemas.commands import Problem

T = TypeVar("T")


def kind_of(value: object) -> str:
    """The type of a JSON or YAML value in the words of a person."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """The value as it stood, when it is short; else what kind of thing it is."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        text = repr(value)
        return text if len(text) <= 60 else kind_of(value)
    return kind_of(value)


class Fields:
    """The fields of one mapping at `path`. Each `take_*` marks its field as known.

    A field that is absent gives the default; one that is wrong leaves a problem and gives the default
    too, so that reading goes on.
    """

    def __init__(self, raw: object, path: str, problems: list[Problem]) -> None:
        self._path = path
        self._problems = problems
        self._known: list[str] = []
        self._raw: Mapping[Any, Any] = {}
        self.readable = isinstance(raw, dict)
        if isinstance(raw, dict):
            self._raw = cast("dict[Any, Any]", raw)
        else:
            self.refuse_whole(f"expected a mapping of fields, got {kind_of(raw)}")

    def at(self, field: str) -> str:
        """The path of a field, e.g. `[0].profiles[1].memory`."""
        return f"{self._path}.{field}" if self._path else field

    def refuse(self, field: str, sentence: str) -> None:
        self._problems.append(Problem(path=self.at(field), sentence=sentence))

    def refuse_whole(self, sentence: str) -> None:
        self._problems.append(Problem(path=self._path, sentence=sentence))

    def has(self, field: str) -> bool:
        return field in self._raw

    def take(self, field: str) -> Any:
        """The raw value, None when absent."""
        if field not in self._known:
            self._known.append(field)
        return self._raw.get(field)

    def take_text(self, field: str, *, default: str = "", required: bool = False) -> str:
        value = self.take(field)
        if field not in self._raw:
            if required:
                self.refuse(field, f"{field} is missing; expected a text")
            return default
        if not isinstance(value, str):
            hint = "; write it in quotes" if isinstance(value, bool | int | float) else ""
            self.refuse(field, f"expected a text, got {shown(value)}{hint}")
            return default
        return value

    def take_int(self, field: str, *, default: int, low: int, high: int = 2**31 - 1) -> int:
        value = self.take(field)
        if field not in self._raw:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(field, f"expected a whole number of at least {low}, got {shown(value)}")
            return default
        return value

    def take_flag(self, field: str, *, default: bool = False) -> bool:
        value = self.take(field)
        if field not in self._raw:
            return default
        if not isinstance(value, bool):
            self.refuse(field, f"expected true or false, got {shown(value)}")
            return default
        return value

    def take_quantity(
        self,
        field: str,
        read: Callable[[object], T | None],
        expected: str,
        *,
        default: T,
        required: bool = False,
    ) -> T:
        """A size or duration as `read` understands it."""
        value = self.take(field)
        if field not in self._raw:
            if required:
                self.refuse(field, f"{field} is missing; expected {expected}")
            return default
        found = read(value)
        if found is None:
            self.refuse(field, f"expected {expected}, got {shown(value)}")
            return default
        return found

    def take_texts(self, field: str, *, one_is_enough: bool = False) -> tuple[str, ...]:
        """A list of texts; with `one_is_enough` a single text stands for a list of one."""
        value = self.take(field)
        if field not in self._raw:
            return ()
        if one_is_enough and isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            self.refuse(field, f"expected a list of texts, got {shown(value)}")
            return ()
        found: list[str] = []
        for index, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, str):
                found.append(item)
            else:
                hint = "; write it in quotes" if isinstance(item, bool | int | float) else ""
                self.refuse(f"{field}[{index}]", f"expected a text, got {shown(item)}{hint}")
        return tuple(found)

    def take_choice(self, field: str, choices: tuple[T, ...]) -> T | None:
        """One of `choices`, always required; None when it is none of them."""
        given = self.take(field)
        for choice in choices:
            if given == choice:
                return choice
        got = f", got {shown(given)}" if field in self._raw else ""
        self.refuse(field, f"expected one of {', '.join(map(str, choices))}{got}")
        return None

    def take_command(self, field: str) -> tuple[str, ...]:
        """A list, or one text split as a shell would split it, without being a shell."""
        given = self.take(field)
        if not isinstance(given, str):
            return self.take_texts(field)
        try:
            return tuple(shlex.split(given))
        except ValueError as error:
            reason = str(error).lower()
            self.refuse(field, f"expected a command line, but it cannot be split: {reason}")
            return ()

    def close(self) -> None:
        """Refuses every field nobody took."""
        for field in self._raw:
            if field in self._known:
                continue
            if not isinstance(field, str):
                self.refuse_whole(f"expected field names as text, got {shown(field)}")
                continue
            near = get_close_matches(field, self._known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
            self.refuse(field, f"there is no field {field}; {hint}")
