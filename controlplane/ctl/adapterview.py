"""Arranges LoRA adapters, the replicas they are loaded in, and who holds them, as a person reads them.

Nothing is judged here and nobody is asked. Functions of rows of the API, without I/O.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from controlplane.ctl.jobview import COMMIT_SHOWN, Amount, together
from controlplane.ctl.show import age, length, parse_time, size
from schemas.adapter import Adapter
from schemas.adapterasks import Holder
from schemas.adapternames import readings
from schemas.file import File
from schemas.progress import FileProgress

Row = Mapping[str, Any]

ADAPTER_COLUMNS: Final = (
    "adapter", "base", "state", "rank", "size", "pinned", "loaded", "aliases", "since", "why",
)  # fmt: skip
HOLDER_COLUMNS: Final = (
    "adapter", "replica", "node", "base", "state", "uses", "last used", "loaded", "how", "gateways",
)  # fmt: skip

SERVING_PHASES: Final = frozenset({"ready", "draining"})
"""Phases in which what a replica has loaded can answer."""

HOW: Final[Mapping[str, str]] = {
    "loaded": "asked for",
    "found": "found there",
    "person": "by hand",
}
STATE_WIDTH: Final = 10
INDENT: Final = STATE_WIDTH + 2
"""Where the text of a line begins while an adapter is watched."""


def serving(replicas: Iterable[Row]) -> dict[str, Row]:
    """The replicas that load adapters and may have some, by id."""
    return {
        row["id"]: row
        for row in replicas
        if row.get("adapter_slots", 0) > 0 and row["phase"] in SERVING_PHASES
    }


def find(adapters: Sequence[Row], name: str, models: Iterable[Row] = ()) -> Row | None:
    """The adapter that `name` means: its name, an alias, or `BASE:` before one of them; BASE may be an alias of one
    of `models`. None: there is none."""
    base_of = {alias: model["name"] for model in models for alias in model.get("aliases", ())}
    meant = (
        *(row for row in adapters if row["name"] == name),
        *(row for row in adapters if name in row.get("aliases", ())),
        *(
            row
            for base, own in readings(name)
            for row in adapters
            if row["base"] == base_of.get(base, base)
            and own in (row["name"], *row.get("aliases", ()))
        ),
    )
    return next(iter(meant), None)


def adapter_rows(
    adapters: Iterable[Row], slots: Iterable[Row], replicas: Iterable[Row], now: datetime
) -> list[Row]:
    """The lines of `adapter list` by column; `loaded` counts the replicas of its base that have it."""
    able: defaultdict[str, set[str]] = defaultdict(set)
    for row in serving(replicas).values():
        able[row["model"]].add(row["id"])
    has: defaultdict[str, set[str]] = defaultdict(set)
    for one in slots:
        for slot in one.get("loaded", ()):
            has[slot["adapter"]].add(one["replica"])
    return [_row(row, able[row["base"]], has[row["name"]], now) for row in adapters]


def _row(adapter: Row, able: set[str], has: set[str], now: datetime) -> Row:
    # A refused one is loaded nowhere, unless it was ready before.
    counts = bool(has & able) or (bool(able) and adapter["phase"] != "refused")
    return {
        "adapter": adapter["name"],
        "base": adapter["base"],
        "state": adapter["phase"],
        "rank": str(adapter.get("rank") or "-"),
        "size": size(adapter.get("bytes")),
        "pinned": "yes" if adapter.get("pinned") else "-",
        "loaded": f"{len(has & able)}/{len(able)}" if counts else "-",
        "aliases": ", ".join(adapter.get("aliases", ())),
        "since": age(adapter.get("since"), now),
        "why": coded(adapter.get("reason", ""), adapter.get("code", "")),
    }


def coded(sentence: str, code: str) -> str:
    """One line: a reason may be an engine's words, with line breaks."""
    told = " ".join(sentence.split())
    return f"{told} [{code}]" if code else told


def loaded_in(
    name: str, slots: Sequence[Row], replicas: Sequence[Row]
) -> list[tuple[Row, Mapping[str, Any]]]:
    """Where it is loaded: the replica's slots and the one of it, by node and replica."""
    alive = serving(replicas)
    return [
        (one, slot)
        for one in sorted(slots, key=_place)
        if one["replica"] in alive
        for slot in one.get("loaded", ())
        if slot["adapter"] == name
    ]


def bad_in(
    name: str, slots: Sequence[Row], replicas: Sequence[Row]
) -> list[tuple[Row, Mapping[str, Any]]]:
    """Where a load of it failed and is remembered."""
    alive = serving(replicas)
    return [
        (one, bad)
        for one in sorted(slots, key=_place)
        if one["replica"] in alive
        for bad in one.get("bad", ())
        if bad["adapter"] == name
    ]


def _place(slots: Row) -> tuple[str, str]:
    return slots["node"], slots["replica"]


def fields(adapter: Row, now: datetime) -> dict[str, object]:
    """What `adapter show` tells first; -o json has the rest."""
    commit, files = adapter.get("commit", ""), adapter.get("files", ())
    event = adapter.get("event") or {}
    return {
        "name": adapter["name"],
        "aliases": list(adapter.get("aliases", ())),
        "base": adapter["base"],
        "asked for as": asked_as(adapter),
        "state": adapter["phase"],
        "why": coded(adapter.get("reason", ""), adapter.get("code", "")),
        "since": f"{age(adapter.get('since'), now)} ago",
        "source": adapter.get("source"),
        "commit": commit[:COMMIT_SHOWN],
        "version": adapter.get("version"),
        "rank": adapter.get("rank") or None,
        "trained on": adapter.get("trained_on"),
        "base compared": "no, a person said that it fits" if adapter.get("trust_base") else None,
        "modules": list(adapter.get("target_modules", ())),
        "files": f"{size(adapter.get('bytes'))} in {len(files)} files" if files else None,
        "pinned": True if adapter.get("pinned") else None,
        "added by": adapter.get("by"),
        "last event": _last(event, now),
    }


def asked_as(adapter: Row) -> str:
    """The names a request may carry."""
    names = (adapter["name"], *adapter.get("aliases", ()))
    return ", ".join((*names, f"{adapter['base']}:{adapter['name']}"))


def _last(event: Row, now: datetime) -> str | None:
    if not event.get("type"):
        return None
    reason, actor = event.get("reason") or "", event.get("actor") or ""
    told = f"{event['type']} {age(event.get('time'), now)} ago"
    told += f": {' '.join(reason.split())}" if reason else ""
    return f"{told} ({actor})" if actor and not actor.startswith("system") else told


def place_lines(
    name: str, slots: Sequence[Row], replicas: Sequence[Row], now: datetime
) -> list[str]:
    """Where it is loaded and where it failed, below the fields of `adapter show`."""
    lines: list[str] = []
    loaded = loaded_in(name, slots, replicas)
    if loaded:
        lines.append("loaded in:")
    for one, slot in loaded:
        leaving = ", leaving" if slot.get("leaving") else ""
        how = HOW.get(slot.get("how", "loaded"), slot.get("how", ""))
        ago = age(slot.get("since"), now)
        lines.append(f"  {one['replica']} on {one['node']}  {how}, {ago} ago{leaving}")
    failed = bad_in(name, slots, replicas)
    if failed:
        lines.append("failed in:")
    for one, bad in failed:
        until = parse_time(bad.get("until", ""))
        again = ""
        if until is not None and until > now:
            again = f", tried again in {length((until - now).total_seconds())}"
        why = coded(bad.get("reason", ""), bad.get("code", ""))
        lines.append(f"  {one['replica']} on {one['node']}  {why}{again}")
    return lines


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A place an adapter is in, and the node that said so."""

    node: str
    holder: Holder

    @property
    def order(self) -> tuple[str, str, str]:
        return self.holder.adapter, self.node, self.holder.replica


def holder_row(held: Held, now: datetime) -> tuple[str, ...]:
    holder = held.holder
    return (
        holder.adapter,
        holder.replica,
        held.node,
        holder.model,
        holder.state,
        str(holder.uses),
        _last_use(holder),
        f"{length((now - holder.since).total_seconds())} ago",
        HOW.get(holder.how, holder.how),
        ", ".join(holder.gateways) or "-",
    )


def _last_use(holder: Holder) -> str:
    if holder.uses:
        return "now"
    return "never" if holder.idle_s is None else f"{length(holder.idle_s)} ago"


def holder_json(held: Held) -> dict[str, Any]:
    return {"node": held.node, **msgspec.to_builtins(held.holder)}


# Watching an adapter come ----------------------------------------------------------------------------


def news(before: Adapter | None, after: Adapter, found: str = "") -> tuple[str, ...]:
    """What is said when an adapter came to another phase; `found` is what its check found, in the catalog's words."""
    if before is not None and before.phase == after.phase:
        return ()
    match after.phase:
        case "reading":
            return (line("reading", f"its configuration and file list, at {after.source}"),)
        case "fetching":
            told = " ".join(found.split()) or f"rank {after.rank}, {size(after.bytes)}"
            trained = f" (trained on {after.trained_on})" if after.trained_on else ""
            return (line("fits", f"{after.base}{trained}: {told}"),)
        case "ready":
            names = " or ".join((after.name, *after.aliases, f"{after.base}:{after.name}"))
            return (line("ready", f"version {after.version}; ask for {names}"),)
        case "refused":
            return ()


def line(state: str, told: str) -> str:
    return f"{state:<{STATE_WIDTH}}  {told}".rstrip()


def ending(adapter: Adapter) -> tuple[str, ...]:
    """Why it cannot be served, and what to do."""
    said = f"{adapter.name}: {coded(adapter.reason or 'refused', adapter.code)}"
    return (said, f"once that is mended, add it again: yardctl adapter add {adapter.name} …")


def amount(
    adapter: Adapter, files: Mapping[str, File], progress: Mapping[str, FileProgress]
) -> Amount | None:
    """How far its files have come into the mirror, together; None while nothing moves."""
    parts = [(one.bytes, files.get(one.key), progress.get(one.key)) for one in adapter.files]
    return together(parts, adapter.bytes)


def trouble(file: File) -> str | None:
    """Why a file of it does not come at the moment; None when nothing is wrong."""
    failed = [copy for copy in file.copies if copy.phase == "failed"]
    if not failed or any(copy.phase in ("present", "fetching") for copy in file.copies):
        return None
    again = "" if failed[0].retry_at is None else "; it is fetched again"
    return f"{file.path}: {coded(failed[0].reason, failed[0].code)}{again}"
