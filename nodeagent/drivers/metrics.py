"""Reads an engine's own counters out of its Prometheus text: what it works on, whether it worked, with which adapters.

It knows the names that llama.cpp and vLLM use, in one table; an engine with other names tells
nothing. It must not ask: that is `asking`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from schemas.adapternames import of_engine_name
from schemas.beacons import EngineCounters

INFLIGHT: tuple[tuple[str, ...], ...] = (
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
)
"""Per dialect: what is processing and what waits inside the engine; together they are in flight."""

WORK: tuple[tuple[str, ...], ...] = (
    ("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total"),
    ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
)
"""Per dialect: what grows with every request. llama.cpp counts no requests, but none goes without a
decode; the sum serves only to see a change, so it need not be a number of requests."""

ADAPTERS: Final = "vllm:lora_requests_info"
"""Its labels name the adapters with requests running and waiting; its value is when that was so. Every combination
that ever was stays on the page: only the newest counts. What tells which adapters are loaded has another name."""

_MOST_COMMAS: Final = 200
"""A name is no longer than that; more is not one name."""

_IN_USE: Final = ("running_lora_adapters", "waiting_lora_adapters")
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:\\.|[^"\\])*)"')
_ENGINE = re.compile(r'(?:^|,)engine="([^"\\]*)"')
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def samples(text: str) -> dict[str, float]:
    """Every metric's value by name; the values of one name with several labels are added up.

    Lines that are no samples are passed over: an engine's page may hold anything.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        if "{" in line:
            name, _, labelled = line.partition("{")
            rest = labelled.rpartition("}")[2]
        words = rest.split()
        try:
            found[name] = found.get(name, 0.0) + float(words[0])
        except (IndexError, ValueError):
            continue
    return found


def counters(text: str) -> EngineCounters:
    """The counters of the first dialect the page speaks."""
    values = samples(text)
    return EngineCounters(
        inflight=_total(values, INFLIGHT),
        requests_total=_total(values, WORK),
    )


def adapters_in_use(text: str) -> frozenset[str] | None:
    """Engine-side names of adapters with requests running or waiting; None when the page does not tell.

    With two readings possible both are in it: one name too many is left alone a little longer, one that is missing
    would be unloaded under a request.
    """
    lines = text.split("\n")  # not at what else ends a line: a name may hold it
    counted = (line for line in lines if not line.startswith(ADAPTERS))
    if _total(samples("\n".join(counted)), INFLIGHT) == 0:
        # The last combination stays the newest when its requests are done.
        return frozenset() if ADAPTERS in text else None
    newest: dict[str, tuple[float, list[str]]] = {}
    for line in lines:
        inside, value = _labelled(line)
        if value is None:
            continue
        # Labels are taken apart of the newest lines alone: there may be a hundred thousand others.
        found = _ENGINE.search(inside)
        engine = found[1] if found is not None else ""
        at, known = newest.get(engine, (-math.inf, []))
        if value >= at:
            newest[engine] = (value, [*known, inside] if value == at else [inside])
    if not newest and ADAPTERS not in text:
        return None
    return frozenset(
        name
        for _, insides in newest.values()
        for inside in insides
        for label, given in _LABEL.findall(inside)
        if label in _IN_USE
        for name in _names(_ESCAPED.sub(_unescaped, given))
    )


def _labelled(line: str) -> tuple[str, float | None]:
    """Labels and value of a sample of `ADAPTERS`; no value: another line."""
    if not line.startswith(ADAPTERS + "{"):
        return "", None
    inside, _, rest = line.rpartition("}")
    try:
        value = float(rest.split()[0])
    except (IndexError, ValueError):
        return "", None
    return inside[len(ADAPTERS) + 1 :], None if math.isnan(value) else value


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _names(joined: str) -> Iterator[str]:
    """The names in `A,B,C`. A name may hold a comma itself: what ends as an engine-side name does may begin at any
    comma since the last one that did."""
    pieces = joined.split(",")
    first = 0
    for at, piece in enumerate(pieces):
        if piece.strip():
            yield piece.strip()
        # Of ",@0123abcd" the last piece is an ending alone, and needs something before it to be a name.
        if of_engine_name(f"x{piece}") is not None:
            for start in range(max(first, at - _MOST_COMMAS), at):
                yield ",".join(pieces[start : at + 1])
            first = at + 1


def _total(values: Mapping[str, float], dialects: tuple[tuple[str, ...], ...]) -> int | None:
    for names in dialects:
        present = [values[name] for name in names if name in values]
        if present:
            total = sum(present)
            return int(total) if 0 <= total < 1e18 else None
    return None
