"""Compares the model an adapter was trained on with the model that is to serve it, by their names alone.

A name is all a configuration tells, so a quantised copy of one model counts as that model, and what only says
where a file lay is not compared. It judges nothing else.
"""

import re
from collections.abc import Iterable
from typing import Final, Literal

Likeness = Literal["same", "other", "unknown"]

_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_CACHED: Final = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)", re.ASCII)
"""A repository as a registry's cache on disk spells it."""

_PACKING: Final = re.compile(
    r"[-_. ](?:gguf|ggml|safetensors|awq|gptq|fp8|fp4|nvfp4|mxfp4|bf16|fp16|fp32|f16|f32|int[2-8]"
    r"|w\d{1,2}a\d{1,2}(?:kv\d{1,2})?|[2-8][-_]?bits?|\d{1,4}g|bnb|unsloth|exl[23]|hqq|mlx|marlin|aqlm"
    r"|autoround|quantized|dynamic|(?:ud-)?i?q\d(?:_[a-z0-9]{1,4}){0,3})",
    re.ASCII | re.IGNORECASE,
)
"""One word at the end of a name that says how its weights are packed."""

_LONGEST_WORD: Final = 5
"""Signs in the longest such word, `-ud-q4_k_xl`."""

_PLACES: Final = frozenset(
    {
        *("model", "models", "base", "base_model", "base-model", "snapshot", "checkpoint"),
        *("checkpoints", "merged", "output", "outputs", "weights", "final", "latest", "."),
    }
)
_PLACE: Final = re.compile(r"(?:checkpoint|step|epoch|global_step)[-_]?\d+|[0-9a-f]{32,64}")
"""Last parts of a path that name no model: what anybody calls a folder, or a revision."""


def likeness(trained_on: str, known: Iterable[str]) -> Likeness:
    """Whether one of `known` is the model `trained_on`: repositories, paths or plain names.

    1. nothing to compare: unknown;
    2. two repositories: the same when owner and name are, or when one is a packed copy of the other's name;
    3. else the last parts of both, without what says how they are packed.
    """
    compared = False
    for one in known:
        found = _like(trained_on, one)
        if found == "same":
            return found
        compared = compared or found == "other"
    return "other" if compared else "unknown"


def _like(a: str, b: str) -> Likeness:
    last_a, last_b = _last(a), _last(b)
    if not last_a or not last_b:  # 1
        return "unknown"
    plain_a, plain_b = _unpacked(last_a), _unpacked(last_b)
    repo_a, repo_b = repository_of(a), repository_of(b)
    if repo_a and repo_b and repo_a != repo_b:  # 2
        is_copy = plain_a == plain_b and (last_a, last_b) != (plain_a, plain_b)
        return "same" if is_copy else "other"
    return "same" if plain_a == plain_b else "other"  # 3


def repository_of(text: str) -> str:
    """`owner/name` in lower case, also of a path in a registry's cache; empty for what names no repository."""
    cached = _CACHED.search(text)
    if cached is not None:
        return f"{cached['owner']}/{cached['name']}".lower()
    return text.strip().lower() if _REPO.fullmatch(text.strip()) else ""


def _last(text: str) -> str:
    """The part that names the model, in lower case; empty when none does."""
    repository = repository_of(text)
    if repository:
        return repository.rpartition("/")[2]
    name = text.strip().replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    return "" if name in _PLACES or _PLACE.fullmatch(name) else name


def _unpacked(name: str) -> str:
    """The name without the words at its end that say how it is packed, one word after another: a name comes
    from anybody, and an expression that could take them all at once could be kept busy by one."""
    while (start := _packing_at(name)) is not None:
        name = name[:start]
    return name


def _packing_at(name: str) -> int | None:
    """Where the last word of packing begins, None when the name does not end with one."""
    start = len(name)
    for _ in range(_LONGEST_WORD):
        start = max(name.rfind(sign, 0, start) for sign in "-_. ")
        if start <= 0:
            return None
        if _PACKING.fullmatch(name, start):
            return start
    return None
