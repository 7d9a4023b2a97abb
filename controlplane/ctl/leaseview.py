"""Arranges leases and those in line for one, over all cards, as a person reads them.

Nothing is judged here. Functions of rows, without I/O.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from controlplane.ctl.show import length, size
from schemas.card import PRIORITIES, Card, Lease, ProcessRef, Waiter

Row = Mapping[str, Any]

LEASE_COLUMNS: Final = (
    "id", "name", "kind", "cards", "memory", "priority", "pinned", "state", "since", "expires",
    "process", "by", "why",
)  # fmt: skip


def card_of(row: Row) -> Card:
    return msgspec.convert(row, Card, strict=False)


def in_line(card: Card) -> list[Waiter]:
    """The waiters in the order they are served."""
    return sorted(card.waiters, key=lambda w: (PRIORITIES.index(w.priority), w.since, w.id))


def leases(cards: Iterable[Row]) -> list[dict[str, Any]]:
    """Every lease and everyone in line, once over all its cards, by node and id."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in cards:
        card = card_of(row)
        for lease in card.leases:
            one = {**msgspec.to_builtins(lease), "state": state_of(lease), "id": lease.holder}
            # A parked engine has two sorts of leases, on its cards and on `cpu`: each is told.
            key = (card.node, lease.holder, card.id if lease.kind == "parked" else "")
            _merge(found, key, one, card, why_of(lease))
        for place, waiter in enumerate(in_line(card), 1):
            one = {**msgspec.to_builtins(waiter), "state": f"waiting {place}", "holder": waiter.id}
            ahead = ", ".join(waiter.waiting_for)
            _merge(
                found, (card.node, waiter.id, "waits"), one, card, f"for {ahead}" if ahead else ""
            )
    return [found[key] for key in sorted(found)]


def _merge(
    found: dict[tuple[str, str, str], dict[str, Any]],
    key: tuple[str, str, str],
    one: dict[str, Any],
    card: Card,
    why: str,
) -> None:
    before = found.get(key)
    if before is None:
        one.pop("cards", None)
        found[key] = {**one, "node": card.node, "cards": [card.id], "why": why}
        return
    before["cards"].append(card.id)
    before["state"] = max(before["state"], one["state"], key=_worst)
    before["why"] = before["why"] or why


def _worst(state: str) -> tuple[int, str]:
    order = ("held", "leaving", "returning", "stuck")
    return (order.index(state) if state in order else -1, state)


def state_of(lease: Lease) -> str:
    """held, leaving (asked to make room), returning (memory not read back yet), stuck (it does not come)."""
    if lease.stuck:
        return "stuck"
    if lease.returning:
        return "returning"
    return "leaving" if lease.leaving else "held"


def why_of(lease: Lease) -> str:
    if lease.stuck:
        return f"stuck: {lease.stuck}"
    if lease.returning:
        ended = f"{lease.why}; " if lease.why else ""
        return f"{ended}its memory is being read back"
    return f"leaves for {lease.leaving}" if lease.leaving else ""


def lease_row(lease: Row, models: Mapping[str, str], now: datetime) -> tuple[str, ...]:
    watched = lease.get("process")
    expires = lease.get("expires_at")
    named = lease["kind"] == "named"
    return (
        lease["id"],
        lease.get("name") or models.get(lease["id"], "") or "-",
        lease["kind"],
        ",".join(f"{lease['node']}/{card}" for card in lease["cards"]),
        "all" if lease.get("exclusive") else size(lease["memory_bytes"]),
        lease["priority"] if named else "-",
        "yes" if lease.get("pinned") else "-",
        lease["state"],
        length((now - datetime.fromisoformat(lease["since"])).total_seconds()),
        f"in {left(datetime.fromisoformat(expires), now)}" if expires else "-",
        str(watched["pid"]) if watched else "-",
        lease.get("by") or "-",
        lease["why"],
    )


def ago(then: datetime, now: datetime) -> str:
    return f"{length((now - then).total_seconds())} ago"


def left(then: datetime, now: datetime) -> str:
    return length((then - now).total_seconds())


def by_whom(by: str) -> str:
    return f", by {by}" if by else ""


def process(process: ProcessRef | None) -> str:
    return f", pid {process.pid}" if process is not None else ""
