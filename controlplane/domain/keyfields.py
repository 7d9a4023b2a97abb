"""Says what is wrong with what somebody asks for a key to be: its id, name, hash, models, limits and life.

Each field is judged by itself; whether an id or a name is taken is for keys.py.
"""

import re
from collections.abc import Iterable
from typing import Final

from controlplane.domain.entries import name_problem
from schemas.commands import KeyCreate, Problem
from schemas.key import KEY_PREFIX

ID: Final = re.compile(r"[a-z2-7]{12}", re.ASCII)
HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
MOST_MODELS: Final = 100
MOST_STARS: Final = 8
"""`*` in one pattern: what a request may match it against is as long as its sender likes."""
LARGEST_LIMIT: Final = 1_000_000_000
LONGEST_LIFE_S: Final = 100 * 365 * 86_400.0


def identity_problems(body: KeyCreate) -> Iterable[Problem]:
    """Of id, name and hash. A hash that is none is not repeated: somebody may have sent the secret itself."""
    if ID.fullmatch(body.id) is None:
        yield Problem(path="id", sentence="expected 12 characters of a-z and 2-7")
    wrong = name_problem(body.name)
    if not wrong and body.name.startswith(f"{KEY_PREFIX}_"):
        wrong = f"expected a name, got what begins like a key; no name begins with {KEY_PREFIX}_"
    if wrong:
        yield Problem(path="name", sentence=wrong)
    if HASH.fullmatch(body.hash) is None:
        yield Problem(
            path="hash", sentence="expected the SHA-256 of the secret, 64 digits of 0-9a-f"
        )


def model_problems(models: Iterable[str]) -> Iterable[Problem]:
    """Of the names and patterns of what it may use; whether there is such a thing is not asked."""
    seen: set[str] = set()
    for index, pattern in enumerate(models):
        path = f"models[{index}]"
        wrong = name_problem(pattern)
        if not wrong and (pattern.count("*") > MOST_STARS or "**" in pattern):
            wrong = (
                f"expected a name or a pattern with at most {MOST_STARS} single *, got {pattern!r}"
            )
        if not wrong and pattern in seen:
            wrong = f"{pattern!r} is given twice"
        seen.add(pattern)
        if wrong:
            yield Problem(path=path, sentence=wrong)
    if len(seen) > MOST_MODELS:
        yield Problem(
            path="models",
            sentence=f"expected at most {MOST_MODELS} names and patterns, got {len(seen)}",
        )


def limit_problems(rpm: int, tpm: int, parallel: int) -> Iterable[Problem]:
    """Of the limits, 0 standing for none."""
    for path, limit in (("rpm", rpm), ("tpm", tpm), ("parallel", parallel)):
        if not 0 <= limit <= LARGEST_LIMIT:
            sentence = f"expected 0 (no limit) to {LARGEST_LIMIT:,}, got {limit:,}"
            yield Problem(path=path, sentence=sentence)


def life_problems(expires_s: float, hint: str) -> Iterable[Problem]:
    """Of a life in seconds; `hint` says how to ask for one without an end."""
    if not 1 <= expires_s <= LONGEST_LIFE_S:
        sentence = f"expected 1 s to 100 years, got {expires_s:g} s; {hint}"
        yield Problem(path="expires_s", sentence=sentence)
