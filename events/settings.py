"""Reads a service's settings: flag over environment over file over default, with units understood.

Keys of a file may carry their unit in the value (`wait: 45s`, `memory: 8GiB`) or in the name
(`wait_s: 45`). Unknown keys, duplicate keys and wrong types are refused with file and path.
"""

import os
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Struct

from schemas.settings import Settings

S = TypeVar("S", bound=Struct)

_BYTES = {
    "": 1,
    "B": 1,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}
_SECONDS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0}
_PORT = re.compile(r"[0-9]{1,5}")
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class SettingsError(Exception):
    """A setting is wrong; the sentence says where and what was expected."""


def parse_bytes(text: str | float) -> int:
    """Bytes of `8GiB`, `500 MB` or a number. Raises ValueError."""
    return int(_quantity(text, _BYTES, "a size such as 8GiB or 500MB"))


def parse_seconds(text: str | float) -> float:
    """Seconds of `45s`, `15m`, `250ms`, `8h` or a number. Raises ValueError."""
    return _quantity(text, _SECONDS, "a duration such as 45s, 15m or 8h")


def _quantity(text: str | float, units: Mapping[str, float], expected: str) -> float:
    if isinstance(text, bool):
        raise ValueError(f"expected {expected}")
    if isinstance(text, int | float):
        if text < 0 or text != text or text == float("inf"):
            raise ValueError(f"expected {expected}")
        return float(text)
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2].upper() not in units:
        raise ValueError(f"expected {expected}, got {text!r}")
    return float(found[1]) * units[found[2].upper()]


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, name: str) -> Any:
    """The document in `text`. Raises SettingsError naming file and line."""
    try:
        # A SafeLoader by descent: it constructs plain values only.
        return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise SettingsError(f"{name}{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}: {error}") from error


def _bare(field: str) -> str:
    for suffix in ("_bytes", "_s"):
        if field.endswith(suffix):
            return field.removesuffix(suffix)
    return field


def _struct_of(annotation: Any) -> tuple[type[Struct] | None, bool]:
    """(struct type inside the annotation, whether it is a sequence of it)."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation, False
    if get_origin(annotation) in (tuple, list):
        inner, _ = _struct_of(get_args(annotation)[0])
        return inner, True
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            inner, many = _struct_of(member)
            if inner is not None:
                return inner, many
    return None, False


def _with_units(kind: type[Struct], given: Any, path: str, name: str) -> Any:
    """`given` with keys spelled as the struct's fields and quantities as numbers."""
    if not isinstance(given, dict):
        raise SettingsError(f"{name}: {path or 'the file'}: expected a mapping")
    hints = get_type_hints(kind, include_extras=True)
    spellings = {_bare(f): f for f in hints} | {f: f for f in hints}
    result: dict[str, Any] = {}
    for key, value in given.items():
        here = f"{path}.{key}" if path else str(key)
        field = spellings.get(str(key))
        if field is None:
            known = ", ".join(sorted(_bare(f) for f in hints))
            raise SettingsError(f"{name}: {here}: no such setting; known here: {known}")
        if field in result:
            raise SettingsError(f"{name}: {here}: given twice, with and without its unit")
        struct, many = _struct_of(hints[field])
        if struct is not None and many:
            if not isinstance(value, list):
                raise SettingsError(f"{name}: {here}: expected a list")
            value = [_with_units(struct, v, f"{here}[{i}]", name) for i, v in enumerate(value)]
        elif struct is not None:
            value = {} if value is None else value
            value = _with_units(struct, value, here, name)
        else:
            value = _read(field, _word(hints[field], value, here, name), here, name)
        result[field] = value
    return result


def _word(annotation: Any, value: Any, here: str, name: str) -> Any:
    """What a setting of a few words is set to; `off` and `on` are what YAML reads as false and true."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(inner) is not Literal:
        return value
    words = get_args(inner)
    meant = ("on" if value else "off") if isinstance(value, bool) else value
    if meant not in words:
        raise SettingsError(f"{name}: {here}: expected {' or '.join(words)}, got {value!r}")
    return meant


def parse_address(text: object) -> str:
    """`HOST:PORT` itself. Raises ValueError for what nobody can listen on."""
    _, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon or _PORT.fullmatch(port) is None or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT with a port of 0 to 65535, got {text!r}")
    return str(text)


def parse_url(text: object) -> str:
    """An http or https URL itself, or nothing. Raises ValueError."""
    try:
        parts = urlsplit(text) if isinstance(text, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        good = False
    if text != "" and not good:
        raise ValueError(f"expected a URL such as http://127.0.0.1:4318, got {text!r}")
    return str(text)


def _parser_of(field: str) -> Callable[[Any], Any] | None:
    if field == "listen":
        return parse_address
    if field in ("otlp_endpoint", "mirror_url"):
        return parse_url
    if field.endswith("_bytes"):
        return parse_bytes
    return parse_seconds if field.endswith("_s") else None


def _read(field: str, value: Any, here: str, name: str) -> Any:
    parse = _parser_of(field)
    if parse is None:
        return value
    try:
        return parse(value)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{name}: {here}: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`YARD_<SECTION>_<KEY>` as a nested mapping; a value is YAML, so lists and numbers work.

    Variables whose section is unknown (YARD_NATS, YARD_API, YARD_DATA are ctl's own) are left alone.
    """
    found: dict[str, Any] = {}
    hints = get_type_hints(Settings)
    for section, kind in hints.items():
        fields = get_type_hints(kind)
        for field in fields:
            for spelling in {field, _bare(field)}:
                variable = f"YARD_{section}_{spelling}".upper()
                if variable in environment:
                    text = environment[variable]
                    value = text if fields[field] is str else read_yaml(text, variable)
                    found.setdefault(section, {})[spelling] = value
    return found


def load(
    file: Path | None = None,
    *,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of a service. `flags` by section, None values meaning "not given".

    Raises SettingsError with one sentence for a person.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read {file}: {error}") from error
        document = read_yaml(text, str(file))
        layers.append((str(file), {} if document is None else document))
    layers.append(
        ("environment", _from_environment(os.environ if environment is None else environment))
    )
    given = {
        section: {k: v for k, v in values.items() if v is not None}
        for section, values in (flags or {}).items()
    }
    layers.append(("flags", given))
    merged: dict[str, dict[str, Any]] = {}
    for name, layer in layers:
        plain = _with_units(Settings, layer, "", name)
        for section, values in plain.items():
            merged.setdefault(section, {}).update(values)
    try:
        return msgspec.convert(merged, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings: {error}") from error
