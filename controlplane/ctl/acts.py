"""What yardctl changes: each function sends one command, prints what was decided, and on wish waits for it.

The wish to wait is a limit in seconds, None for not waiting.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.ctl.commanding import (
    OUTCOME_S,
    Explain,
    Following,
    accepted,
    carry_out,
    plain,
    wait_for,
    watch_until,
)
from controlplane.ctl.connect import Place, open_log
from controlplane.ctl.entryfile import read_entries
from controlplane.ctl.failures import CtlError, UsageMistake
from controlplane.ctl.show import console
from controlplane.ctl.tail import pretty
from events.log import EventLog, Recorded
from schemas.commands import (
    CatalogApply,
    CommandBody,
    ModelAdd,
    ModelLoad,
    ModelRemove,
    ModelScale,
    ModelUnload,
    NodeCordon,
    NodeUncordon,
    Outcome,
)

__all__ = ["OUTCOME_S"]

Reached = Callable[[Following], str | None]
BODY_BYTES: Final = 60 * 1024
"""The stream of commands takes 64 KiB; the rest is the envelope."""


async def add(place: Place, file: Path, timeout_s: float) -> None:
    found = read_entries(file)
    if len(found.entries) != 1:
        raise UsageMistake(
            f"{found.name}: model add takes one entry, this file has {len(found.entries)}; "
            "use `yardctl apply`"
        )
    await _act(place, ModelAdd(entry=found.entries[0]), timeout_s, explain=found.explain)


async def apply(place: Place, file: Path, *, dry_run: bool, prune: bool, timeout_s: float) -> None:
    found = read_entries(file)
    body = CatalogApply(entries=found.entries, prune=prune, dry_run=dry_run)
    await _act(place, body, timeout_s, explain=found.explain)


async def remove(place: Place, name: str, timeout_s: float, wait_s: float | None) -> None:
    await _act(place, ModelRemove(model=name), timeout_s, name, wait_s, nothing_runs)


async def scale(
    place: Place, name: str, minimum: int, maximum: int, timeout_s: float, wait_s: float | None
) -> None:
    def within(seen: Following) -> str | None:
        if seen.ready() >= minimum and seen.running() <= maximum:
            return f"{name}: {seen.ready()} ready"
        return None

    body = ModelScale(model=name, min=minimum, max=maximum)
    await _act(place, body, timeout_s, name, wait_s, within)


async def load(
    place: Place, name: str, for_s: float | None, timeout_s: float, wait_s: float | None
) -> None:
    await _act(place, ModelLoad(model=name, for_s=for_s), timeout_s, name, wait_s, is_loaded)


async def unload(
    place: Place, name: str, force: bool, timeout_s: float, wait_s: float | None
) -> None:
    await _act(place, ModelUnload(model=name, force=force), timeout_s, name, wait_s, nothing_runs)


async def cordon(place: Place, node: str, timeout_s: float) -> None:
    await _act(place, NodeCordon(node=node), timeout_s)


async def uncordon(place: Place, node: str, timeout_s: float) -> None:
    await _act(place, NodeUncordon(node=node), timeout_s)


async def wait_for_outcome(place: Place, command: str, timeout_s: float) -> dict[str, Any]:
    """The accepted outcome of an earlier command. Raises RejectedByYard, NotKnownYet."""
    async with open_log(place) as log:
        outcome = await wait_for(log, command, prefix=place.prefix, timeout_s=timeout_s)
    return msgspec.to_builtins(accepted(outcome))


def nothing_runs(seen: Following) -> str | None:
    return f"{seen.model}: nothing runs" if seen.running() == 0 else None


def is_loaded(seen: Following) -> str | None:
    """Raises CtlError when the demand ended in a refusal."""
    demand = seen.activation
    if demand is None:
        return None
    if demand.phase == "refused":
        raise CtlError(f"{seen.model}: {demand.reason} [{demand.code}]")
    if demand.phase == "ready" and seen.ready() >= demand.replicas:
        return f"{seen.model}: {seen.ready()} ready"
    return None


async def _act(
    place: Place,
    body: CommandBody,
    timeout_s: float,
    model: str | None = None,
    wait_s: float | None = None,
    reached: Reached = nothing_runs,
    explain: Explain = plain,
) -> None:
    size = len(msgspec.json.encode(body))
    if size > BODY_BYTES:
        raise UsageMistake(
            f"the entries are {size // 1024} KiB together; one command carries "
            f"{BODY_BYTES // 1024} KiB: apply them in several files (without --prune)"
        )
    async with open_log(place) as log:
        outcome = await carry_out(
            log, body, prefix=place.prefix, timeout_s=timeout_s, explain=explain
        )
        tell(outcome)
        if model is not None and wait_s is not None:
            print(await _follow(log, place, model, wait_s, reached))


def tell(outcome: Outcome) -> None:
    for line in outcome.lines or (outcome.sentence or "accepted",):
        print(line)


async def _follow(log: EventLog, place: Place, model: str, wait_s: float, reached: Reached) -> str:
    out = console()

    def show(item: Recorded) -> None:
        out.print(pretty(item), soft_wrap=True)

    return await watch_until(log, model, reached, show, prefix=place.prefix, timeout_s=wait_s)
