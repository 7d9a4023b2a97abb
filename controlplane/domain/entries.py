"""Reads one catalog entry as a person wrote it: a checked entry, or everything that is wrong with it.

It does not know the other entries; catalog.py decides what an entry does to them. Absent scaling means
off (A6), 0/0 stays off (A5), and only an absent `max` is filled in, never a zero one (A7).
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from controlplane.domain.fields import Fields, shown
from controlplane.domain.profiles import read_profile
from controlplane.domain.quantities import DURATION, read_seconds, show_bytes
from schemas import codes, vllm_flags
from schemas.commands import Problem
from schemas.model import Model, Profile, Scaling
from schemas.slots import MOST_SLOTS

NAME_LENGTH: Final = 200
"""Characters of a name: percent-encoded it still fits a subject."""

ENTRY_BYTES: Final = 8192
"""Every event carries the whole entry; a state is at most this large."""

_NEEDS_MIRROR: Final = "needs the mirror"
_SERVE: Final = f"{_NEEDS_MIRROR}: `yardctl model serve OWNER/REPO` fetches it and adds the entry"
_MIRRORED: Final = re.compile(r"mirror:[0-9a-f]{64}", re.ASCII)
_HF: Final = re.compile(
    r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(/[^\s/][^\s]*)?", re.ASCII
)
_UNWRITABLE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories no name may hold: controls, lone surrogates, line and paragraph breaks."""


class ParsedEntry(Struct, frozen=True, kw_only=True):
    """A checked entry: a Model before it has an incarnation and a place in the order."""

    name: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    context_length: int | None = None
    max_output: int | None = None
    scaling: Scaling = Scaling()
    profiles: tuple[Profile, ...] = ()
    max_loaded_adapters: int = 0
    concurrency: int = 0

    def as_model(self, *, incarnation: str, order: int) -> Model:
        return Model(
            name=self.name,
            incarnation=incarnation,
            aliases=self.aliases,
            description=self.description,
            source=self.source,
            context_length=self.context_length,
            max_output=self.max_output,
            scaling=self.scaling,
            profiles=self.profiles,
            max_loaded_adapters=self.max_loaded_adapters,
            concurrency=self.concurrency,
            order=order,
        )


def parse(raw: object, path: str) -> ParsedEntry | tuple[Problem, ...]:
    """The entry, or every problem with it; `path` is where it stands, e.g. `[0]`."""
    problems: list[Problem] = []
    fields = Fields(raw, path, problems)
    if not fields.readable:
        return tuple(problems)
    name = fields.take_text("name", required=True)
    if fields.has("name") and isinstance(fields.take("name"), str):
        _check_name(fields, "name", name)
    aliases = fields.take_texts("aliases")
    seen: set[str] = set()
    for index, alias in enumerate(aliases):
        _check_name(fields, f"aliases[{index}]", alias)
        if alias == name:
            fields.refuse(f"aliases[{index}]", "an alias must differ from the name")
        elif alias in seen:
            fields.refuse(f"aliases[{index}]", f"the alias {alias!r} is given twice")
        seen.add(alias)
    description = fields.take_text("description")
    source = fields.take_text("source")
    _check_source(fields, source)
    context_length = _optional_count(fields, "context_length")
    max_output = _optional_count(fields, "max_output")
    if context_length is not None and max_output is not None and max_output > context_length:
        fields.refuse(
            "max_output", f"expected at most context_length ({context_length}), got {max_output}"
        )
    scaling = _scaling(fields, problems)
    profiles = _profiles(fields, source, problems)
    max_loaded_adapters = _adapters(fields, profiles, problems)
    concurrency = fields.take_int("concurrency", default=0, low=1)
    fields.close()
    if problems:
        return tuple(problems)
    entry = ParsedEntry(
        name=name,
        aliases=aliases,
        description=description,
        source=source,
        context_length=context_length,
        max_output=max_output,
        scaling=scaling,
        profiles=profiles,
        max_loaded_adapters=max_loaded_adapters,
        concurrency=concurrency,
    )
    size = len(msgspec.json.encode(entry))
    if size > ENTRY_BYTES:
        limit = show_bytes(ENTRY_BYTES)
        sentence = f"the entry is {show_bytes(size)} large; every event carries it, at most {limit}"
        return (Problem(path=path, sentence=sentence),)
    return entry


def code_of(problems: Sequence[Problem]) -> str:
    """The rejection's code: `needs_mirror` when nothing else is wrong, else `invalid`."""
    if all(problem.sentence.startswith(_NEEDS_MIRROR) for problem in problems):
        return codes.NEEDS_MIRROR
    return codes.INVALID


def check_scaling(minimum: int, maximum: int) -> str | None:
    """What is wrong with this pair of limits, None when nothing is."""
    if maximum < minimum:
        return (
            f"max ({maximum}) is below min ({minimum}); "
            "give a max of at least min, or leave max out to keep exactly min"
        )
    return None


def _optional_count(fields: Fields, field: str) -> int | None:
    given = fields.take_int(field, default=0, low=1)
    return given or None


def _adapters(fields: Fields, profiles: tuple[Profile, ...], problems: list[Problem]) -> int:
    """How many adapters one replica keeps loaded, with what the profiles' arguments have against it."""
    field = "max_loaded_adapters"
    limit: Any = fields.take(field)
    if not fields.has(field):
        return 0
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_SLOTS:
        hint = "; leave it out of an entry without adapters" if limit == 0 else ""
        fields.refuse(
            field, f"expected a whole number from 1 to {MOST_SLOTS}, got {shown(limit)}{hint}"
        )
        return 0
    if problems:
        # Profiles that were not understood are missing here.
        return limit
    for index, profile in enumerate(profiles):
        if profile.engine != "vllm":
            fields.refuse(
                field,
                f"the profile {profile.name!r} runs on {profile.engine}, which loads no adapters; "
                "only vllm does",
            )
            continue
        for sentence in vllm_flags.lora_problems(profile.args, limit):
            fields.refuse(f"profiles[{index}].args", sentence)
    return limit


def name_problem(name: str) -> str:
    """What is wrong with a name or alias, empty when nothing is."""
    if not 1 <= len(name) <= NAME_LENGTH:
        return f"expected 1 to {NAME_LENGTH} characters, got {len(name)}"
    if any(unicodedata.category(character) in _UNWRITABLE for character in name):
        return "expected a name without control characters or line breaks"
    if name != name.strip():
        return "expected a name without spaces at its ends"
    return ""


def _check_name(fields: Fields, field: str, name: str) -> None:
    wrong = name_problem(name)
    if wrong:
        fields.refuse(field, wrong)


def _check_source(fields: Fields, source: str) -> None:
    """An absolute path, or content of the mirrors by its key. URLs and hf:// are understood and refused:
    a serve job fetches, an entry names what is there."""
    if not fields.has("source") or not isinstance(fields.take("source"), str):
        return
    expected = (
        "expected an absolute path on the node, or mirror:KEY as `yardctl mirror list` shows it"
    )
    if any(unicodedata.category(character) in _UNWRITABLE for character in source):
        fields.refuse("source", f"{expected}, without control characters")
    elif source.startswith(("http://", "https://")):
        try:
            host = urlsplit(source).hostname
        except ValueError:
            host = None
        fields.refuse("source", _SERVE if host else f"{expected}, got {shown(source)}")
    elif source.startswith("hf://"):
        well_formed = _HF.fullmatch(source) is not None
        fields.refuse("source", _SERVE if well_formed else f"{expected}, got {shown(source)}")
    elif source.startswith("mirror:"):
        if _MIRRORED.fullmatch(source) is None:
            fields.refuse("source", f"{expected}: 64 hex digits, got {shown(source)}")
    elif not source.startswith("/"):
        fields.refuse("source", f"{expected}, got {shown(source)}")


def _scaling(fields: Fields, problems: list[Problem]) -> Scaling:
    given: Any = fields.take("scaling")
    if not fields.has("scaling"):
        return Scaling()
    inner = Fields(given, fields.at("scaling"), problems)
    if not inner.readable:
        return Scaling()
    before = len(problems)
    minimum = inner.take_int("min", default=0, low=0)
    maximum = inner.take_int("max", default=minimum, low=0)
    idle_timeout_s = inner.take_quantity(
        "idle_timeout", read_seconds, f"{DURATION}; 0 = never", default=900.0
    )
    inner.close()
    if len(problems) == before:
        wrong = check_scaling(minimum, maximum)
        if wrong is not None:
            inner.refuse("max", wrong)
    return Scaling(min=minimum, max=max(minimum, maximum), idle_timeout_s=idle_timeout_s)


def _profiles(fields: Fields, source: str, problems: list[Problem]) -> tuple[Profile, ...]:
    given = fields.take("profiles")
    if not isinstance(given, list) or not given:
        got = ", got an empty list" if given == [] else f", got {shown(cast('object', given))}"
        got = got if fields.has("profiles") else ""
        fields.refuse("profiles", f"expected a list of at least one profile{got}")
        return ()
    found: list[Profile] = []
    for index, raw in enumerate(cast("list[Any]", given)):
        profile = read_profile(raw, fields.at(f"profiles[{index}]"), source, problems)
        if profile is None:
            continue
        if profile.name and profile.name in {other.name for other in found}:
            fields.refuse(f"profiles[{index}].name", f"the profile {profile.name!r} is given twice")
        found.append(profile)
    return tuple(found)
