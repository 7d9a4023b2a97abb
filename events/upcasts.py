"""Lifts stored bodies of older versions to the present one: pure steps vN -> vN+1, chained by noun.

A step takes and returns `{"state": ..., "change": ..., "reason": ...}` as plain JSON values and never
changes its argument. Steps stay for as long as a log may hold their version.
"""

from collections.abc import Callable
from typing import Any, Final

Body = dict[str, Any]
Upcast = Callable[[Body], Body]


class NoUpcast(LookupError):
    """A version that was never written, or whose step was removed."""


def _replica_1_to_2(body: Body) -> Body:
    """Version 1 counted reserved memory in whole MiB (`memory_mib`); version 2 in bytes."""
    state = body["state"]
    if not isinstance(state, dict):
        return body
    lifted: dict[str, Any] = {k: v for k, v in state.items() if k != "memory_mib"}
    if "memory_mib" in state:
        lifted["memory_bytes"] = state["memory_mib"] * 1024 * 1024
    return {**body, "state": lifted}


UPCASTS: Final[dict[tuple[str, int], Upcast]] = {
    ("replica", 1): _replica_1_to_2,
}
"""(noun, version) -> the step that makes version + 1 of it."""


def lift(noun: str, version: int, to: int, body: Body) -> Body:
    """`body` as version `to` would have been written. Raises NoUpcast when a step is missing."""
    for step in range(version, to):
        upcast = UPCASTS.get((noun, step))
        if upcast is None:
            raise NoUpcast(f"no step from {noun} version {step} to {step + 1}")
        body = upcast(body)
    return body
