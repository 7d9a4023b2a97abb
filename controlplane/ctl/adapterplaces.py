"""`yardctl adapter load`, `unload` and `holders`: finds the replicas meant, asks their agents, and prints.

Which replicas there are the API knows; what is in them only their agents do (adapterslots.py).
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from controlplane.ctl import adapterview
from controlplane.ctl.adapterreads import known, the_adapter
from controlplane.ctl.adapterslots import Change, Fate, Found, change, holders
from controlplane.ctl.adapterview import Row
from controlplane.ctl.connect import Api, Place, open_api, open_wire
from controlplane.ctl.failures import (
    EXIT_FAILED,
    EXIT_NOT_KNOWN,
    EXIT_REJECTED,
    CtlError,
    NotKnownYet,
)
from controlplane.ctl.reads import refuse_unread
from controlplane.ctl.show import console, print_json, print_table
from events.log import Wire
from schemas import codes
from schemas.adapterasks import LoadAdapter, UnloadAdapter

FAILURES: Final = frozenset(
    {
        codes.RANK_TOO_HIGH,
        codes.UNSUPPORTED_ADAPTER,
        codes.NOT_AN_ADAPTER,
        codes.LOAD_REFUSED,
        codes.LOAD_FAILED,
        codes.LOAD_TIMEOUT,
        codes.FILES_MISSING,
        codes.ROUTE_OFF,
    }
)
"""Codes of what was tried and failed; any other refusal is a no to what was asked."""


class NotEverywhere(CtlError):
    """Some of the replicas did not do it; the worst of what became of them is the exit code. `silent` are nodes
    that did not even say what they have."""

    def __init__(self, fates: Sequence[Fate], silent: Sequence[str] = ()) -> None:
        wrong = sorted((f for f in fates if f.state != "done"), key=_severity)
        super().__init__(*(_told(fate) for fate in wrong), *map(_unheard, silent))
        self.code = _severity(wrong[0])


def _severity(fate: Fate) -> int:
    """The exit code for it, which is also its order: failed, then rejected, then not known."""
    if fate.state == "refused":
        return EXIT_FAILED if fate.code in FAILURES else EXIT_REJECTED
    return EXIT_NOT_KNOWN


def _told(fate: Fate) -> str:
    where = f"{fate.replica} on {fate.node}"
    match fate.state:
        case "refused":
            return f"{where}: {adapterview.coded(fate.sentence or 'refused', fate.code)}"
        case "silent":
            return f"{where}: its agent does not answer; whether it heard is not known"
        case "going on":
            return f"{where}: {fate.sentence}; it goes on: yardctl adapter holders"
        case "done":
            return f"{where}: {fate.sentence or 'done'}"


async def load(place: Place, name: str, replica: str | None, timeout_s: float, output: str) -> None:
    """Into `replica`, or into every ready replica of its base.

    Raises CtlError when there is no such adapter or replica, NotEverywhere.
    """
    async with open_api(place) as api:
        adapter = await the_adapter(api, name)
        rows = await _replicas(api, replica)
    asks = [
        (row["node"], LoadAdapter(replica=row["id"], adapter=adapter["name"]))
        for row in ([the_replica(rows, replica)] if replica else ready_of(rows, adapter["base"]))
    ]
    async with open_wire(place) as wire:
        fates = await _changed(wire, asks, timeout_s)
    _print(adapter["name"], fates, "loaded", output)


async def unload(
    place: Place, name: str, replica: str | None, timeout_s: float, output: str, *, force: bool
) -> None:
    """From `replica`, or from wherever it is. One that the catalog does not know any more may still be loaded.

    Raises CtlError for a replica there is not, NotEverywhere, NotKnownYet when some agent does not answer.
    """
    async with open_api(place) as api:
        adapter = await known(api, name)
        rows = await _replicas(api, replica)
    exact = name if adapter is None else adapter["name"]
    async with open_wire(place) as wire:
        silent: tuple[str, ...] = ()
        if replica:
            where = [(str(the_replica(rows, replica)["node"]), replica)]
        else:
            found = await holders(wire, nodes_of(rows), exact)
            where = [(held.node, held.holder.replica) for held in found.held]
            silent = found.silent
            if adapter is None and not where and not silent:
                raise CtlError(f"there is no adapter {name!r}, and none of that name is loaded")
        asks = [
            (node, UnloadAdapter(replica=id_, adapter=exact, force=force)) for node, id_ in where
        ]
        fates = await _changed(wire, asks, timeout_s)
    if not fates and not silent and output == "table":
        print(f"{exact} is loaded nowhere")
        return
    _print(exact, fates, "unloaded", output, silent)
    _tell_silent(silent)


async def _replicas(api: Api, replica: str | None) -> list[Row]:
    """All of them. Raises CtlError when nobody can read the one that is named."""
    listed = await api.listed("/v1/replicas")
    if replica is not None:
        refuse_unread(listed, replica)
    return list(listed.rows)


async def _changed(
    wire: Wire, asks: Sequence[tuple[str, Change]], timeout_s: float
) -> tuple[Fate, ...]:
    out = console(stderr=True)

    def tell(fate: Fate) -> None:
        out.print(f"{fate.replica} on {fate.node}: {fate.sentence}", soft_wrap=True)

    return await change(wire, asks, tell, timeout_s=timeout_s)


def _print(
    name: str, fates: Sequence[Fate], done: str, output: str, silent: Sequence[str] = ()
) -> None:
    """Raises NotEverywhere."""
    if output == "json":
        print_json([msgspec.to_builtins(fate) for fate in fates])
    else:
        for fate in fates:
            if fate.state == "done":
                more = f": {fate.sentence}" if fate.sentence else ""
                print(f"{name}: {done} in {fate.replica} on {fate.node}{more}")
    if any(fate.state != "done" for fate in fates):
        raise NotEverywhere(fates, silent)


async def show_holders(place: Place, name: str, output: str) -> None:
    """Where an adapter is loaded, by the agents' own word; without a name, every adapter.

    Raises CtlError when there is none of that name, NotKnownYet when some agent does not answer.
    """
    async with open_api(place) as api:
        adapter = await known(api, name) if name else None
        rows: list[Row] = await api.data("/v1/replicas")
    exact = name if adapter is None else str(adapter["name"])
    async with open_wire(place) as wire:
        found: Found = await holders(wire, nodes_of(rows), exact)
    # Agents tell how long ago one was used: the age of a load is as of their answer, not of the start.
    now = datetime.now(UTC)
    if name and adapter is None and not found.held and not found.silent:
        raise CtlError(f"there is no adapter {name!r}, and none of that name is loaded")
    if output == "json":
        print_json([adapterview.holder_json(held) for held in found.held])
    elif found.held or not found.silent:
        print_table(
            adapterview.HOLDER_COLUMNS,
            (adapterview.holder_row(held, now) for held in found.held),
            f"{exact} is loaded nowhere" if exact else "no adapter is loaded",
        )
    _tell_silent(found.silent)


def _tell_silent(nodes: Sequence[str]) -> None:
    """Raises NotKnownYet when there are any."""
    if nodes:
        raise NotKnownYet(*map(_unheard, nodes))


def _unheard(node: str) -> str:
    return f"the agent of {node} does not answer; what is loaded there is not known"


def nodes_of(replicas: Iterable[Row]) -> list[str]:
    """The nodes whose replicas may have adapters loaded, each once."""
    return sorted({row["node"] for row in adapterview.serving(replicas).values()})


def ready_of(replicas: Iterable[Row], base: str) -> list[Row]:
    """The replicas an adapter of `base` can be loaded into now. Raises CtlError when there is none."""
    own = [row for row in replicas if row["model"] == base and row["phase"] == "ready"]
    able = [row for row in own if row.get("adapter_slots", 0) > 0]
    if able:
        return sorted(able, key=lambda row: (row["node"], row["id"]))
    if own:
        ids = ", ".join(sorted(row["id"] for row in own))
        raise CtlError(f"{ids} of {base} load no adapters; yardctl replica show ID says more")
    raise CtlError(
        f"no replica of {base} is ready; the adapter is loaded when somebody asks for it. "
        f"To start one now: yardctl model load {base}"
    )


def the_replica(replicas: Iterable[Row], replica: str) -> Row:
    """Raises CtlError."""
    found = next((row for row in replicas if row["id"] == replica), None)
    if found is None:
        raise CtlError(f"there is no replica {replica!r}; yardctl replica list shows them")
    return found
