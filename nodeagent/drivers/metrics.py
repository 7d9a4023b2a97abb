"""Reads an engine's own counters out of its Prometheus text: what it works on, whether it worked.

It knows the names that llama.cpp and vLLM use, in one table; an engine with other names tells
nothing. It must not ask: that is `asking`.
"""

from collections.abc import Mapping

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


def _total(values: Mapping[str, float], dialects: tuple[tuple[str, ...], ...]) -> int | None:
    for names in dialects:
        present = [values[name] for name in names if name in values]
        if present:
            total = sum(present)
            return int(total) if 0 <= total < 1e18 else None
    return None
