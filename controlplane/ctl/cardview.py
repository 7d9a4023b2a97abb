"""Arranges cards and leases as a person reads them: who has a card, who waits, what it keeps, and why.

What a state means comes from schemas/cardstate.py; nothing is judged here. Functions of rows, without I/O.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from controlplane.ctl.leaseview import (
    ago,
    by_whom,
    card_of,
    in_line,
    left,
    process,
    state_of,
    why_of,
)
from controlplane.ctl.show import size
from schemas.activation import PENDING_PHASES
from schemas.card import Card, Lease, Waiter
from schemas.cardnames import ANY_SCOPE, scope_of
from schemas.cardstate import free_bytes, held_bytes, is_free, kept_by
from schemas.replica import TERMINAL_PHASES

Row = Mapping[str, Any]

CARD_COLUMNS: Final = (
    "card", "state", "holders", "in line", "used", "given", "free", "total", "parked",
)  # fmt: skip


class Yard:
    """The rows of the API that say something about cards."""

    def __init__(
        self,
        *,
        cards: Sequence[Row],
        replicas: Sequence[Row] = (),
        activations: Sequence[Row] = (),
        nodes: Sequence[Row] = (),
    ) -> None:
        self.rows = cards
        self.replicas = {row["id"]: row for row in replicas}
        self.activations = activations
        self.nodes = {row["id"]: row for row in nodes}
        self.measured = {
            row["id"]: row["measured_memory_bytes"]
            for row in replicas
            if row.get("measured_memory_bytes")
        }

    def full(self, row: Row) -> dict[str, Any]:
        """A card with what follows from its state: for programs, and for the page below."""
        card = card_of(row)
        return {
            **row,
            "status": status_of(card),
            "kept_by": kept_by(card),
            "given_bytes": held_bytes(card, self.measured) - card.other_bytes,
            "free_bytes": free_bytes(card, self.measured),
            "line": [waiter.id for waiter in in_line(card)],
            "parked": self.parked(card),
            "waiting_models": self.waiting_models(card),
            "info": self.info(card),
        }

    def info(self, card: Card) -> Row:
        cards = self.nodes.get(card.node, {}).get("cards", ())
        return next((info for info in cards if info["id"] == card.id), {})

    def parked(self, card: Card) -> list[dict[str, Any]]:
        """Engines parked on this card, and on `cpu` those whose RAM it lends."""
        return [
            {
                "replica": lease.holder,
                "model": self.replicas.get(lease.holder, {}).get("model", ""),
                "keeps_bytes": lease.memory_bytes,
                "ram_bytes": self.replicas.get(lease.holder, {}).get("ram_bytes", 0),
                "way": self.replicas.get(lease.holder, {}).get("park_way", ""),
                "since": self.replicas.get(lease.holder, {}).get("parked_at"),
            }
            for lease in card.leases
            if lease.kind == "parked"
        ]

    def waiting_models(self, card: Card) -> list[dict[str, Any]]:
        """Models whose activation waits for this card: by its scope, its holders, or what was ranked."""
        here = {lease.holder for lease in card.leases} | {claim.id for claim in card.claims}
        if card.vm is not None:
            here.add(card.vm.name)
        return [
            {
                "model": row["model"],
                "scope": row.get("scope", "any"),
                "phase": row["phase"],
                "waiting_for": list(row.get("waiting_for", ())),
                "reason": row.get("reason", ""),
                "since": row.get("since"),
            }
            for row in self.activations
            if row["phase"] in PENDING_PHASES and _waits_for(row, card, here)
        ]

    def known(self, card: Card, id_: str) -> str:
        """An id with the name it has on this card."""
        names = {lease.holder: lease.name for lease in card.leases}
        names |= {claim.id: claim.name for claim in card.claims}
        name = names.get(id_) or self.replicas.get(id_, {}).get("model", "")
        return f"{id_} ({name})" if name else id_

    def holder(self, lease: Lease) -> str:
        """Who has a lease, in a word or two."""
        if lease.kind == "named":
            return lease.name or lease.holder
        return self.replicas.get(lease.holder, {}).get("model") or lease.holder


def _waits_for(activation: Row, card: Card, here: set[str]) -> bool:
    scope = activation.get("scope", ANY_SCOPE)
    if scope != ANY_SCOPE:
        return scope == scope_of(card.node, card.id)
    if activation["phase"] not in ("waiting", "wanted"):
        return False
    if here & set(activation.get("waiting_for", ())):
        return True
    report = activation.get("report") or {}
    ranked = [report.get("chosen"), *report.get("misses", ())]
    return any(
        one is not None
        and one.get("rank") in (4, 5)
        and one["node"] == card.node
        and card.id in one.get("cards", ())
        for one in ranked
    )


def status_of(card: Card) -> str:
    """One word: what keeps others from the card, the strongest first."""
    if card.vm is not None:
        return "vm" if card.vm.attached else "vm attaching"
    if card.claims:
        return "claimed"
    if any(lease.stuck for lease in card.leases):
        return "stuck"
    if kept_by(card):
        return "kept"
    if any(lease.kind != "parked" for lease in card.leases):
        return "held"
    if card.stowaways:
        return "stowaway"
    return "free" if is_free(card) else "waited for"


def card_row(yard: Yard, row: Row) -> tuple[str, ...]:
    card = card_of(row)
    holders = [f"claim {claim.name}" for claim in card.claims]
    if card.vm is not None:
        holders.insert(0, f"vm {card.vm.name}")
    holders += [yard.holder(lease) for lease in card.leases if lease.kind != "parked"]
    full = yard.full(row)
    return (
        f"{card.node}/{card.id}",
        status_of(card),
        ", ".join(holders) or "-",
        str(len(card.waiters)) if card.waiters else "-",
        size(card.used_bytes),
        size(full["given_bytes"]),
        size(full["free_bytes"]) if full["free_bytes"] else "0",
        size(card.memory_bytes),
        ", ".join(one["model"] or one["replica"] for one in full["parked"]) or "-",
    )


# One card, as a page ----------------------------------------------------------------------------------


def page(yard: Yard, row: Row, now: datetime) -> list[str]:
    """The lines of `card show`."""
    card, full = card_of(row), yard.full(row)
    event = row.get("event", {})
    lines = [f"{card.node}/{card.id}: {_headline(card, full)}"]
    lines += _memory(card, full, now)
    if event:
        lines.append(_last(event, now))
    if card.vm is not None:
        state = "attached" if card.vm.attached else "waits for the card to be empty"
        lines += [
            "",
            "vm",
            f"  {card.vm.name}  {state}, {ago(card.vm.since, now)}{by_whom(card.vm.by)}",
        ]
    lines += _section(
        "claims",
        (
            f"{claim.id}  {claim.name}  {claim.kind}, {ago(claim.since, now)}"
            f"{process(claim.process)}{by_whom(claim.by)}"
            for claim in card.claims
        ),
    )
    lines += _section(
        "holders",
        (_lease_line(yard, lease, card, now) for lease in card.leases if lease.kind != "parked"),
    )
    lines += _section(
        "in line",
        (f"{n}. {_waiter_line(yard, w, card, now)}" for n, w in enumerate(in_line(card), 1)),
    )
    lines += _section(
        "models waiting",
        (
            f"{one['model']}: {one['reason'] or _ahead(yard, card, one) or one['phase']}"
            for one in full["waiting_models"]
        ),
    )
    lines += _section("parked", (_parked_line(one, card) for one in full["parked"]))
    lines += _section(
        "stowaways (no lease; never stopped)",
        (
            f"pid {one.pid} {one.name}  {size(one.memory_bytes)}, {ago(one.since, now)}"
            for one in card.stowaways
        ),
    )
    return lines


def _ahead(yard: Yard, card: Card, one: Row) -> str:
    ahead = ", ".join(yard.known(card, id_) for id_ in one["waiting_for"])
    return f"waits for {ahead}" if ahead else ""


def _headline(card: Card, full: Row) -> str:
    info = full["info"]
    what = [info.get("name") or card.kind, *([card.device] if card.device else [])]
    if info.get("mig"):
        what.append("divided by MIG, left alone")
    return f"{full['status']} ({', '.join(what)})"


def _memory(card: Card, full: Row, now: datetime) -> list[str]:
    parts = [
        f"{size(full['given_bytes']) if full['given_bytes'] > 0 else '0'} given",
        f"{size(full['free_bytes']) if full['free_bytes'] else '0'} free",
    ]
    if card.other_bytes:
        parts.append(f"{size(card.other_bytes)} used by what has no lease")
    when = f", read {ago(card.measured_at, now)}" if card.measured_at is not None else ""
    used = f"{size(card.used_bytes) if card.used_bytes else '0'} used{when}"
    return [f"memory   {size(card.memory_bytes)}: {', '.join(parts)}; {used}"]


def _last(event: Row, now: datetime) -> str:
    kind = str(event["type"]).removeprefix("dev.modelyard.")
    when = datetime.fromisoformat(str(event["time"]))
    what = [happened(event.get("change") or {}), str(event.get("reason") or "")]
    why = "; ".join(part for part in what if part)
    return f"last     {kind} {ago(when, now)}{': ' if why else ''}{why} ({event.get('actor', '')})"


def happened(change: Row) -> str:
    """What an event says happened, in a few words: ids, names and reasons, sizes as people read them."""
    parts: list[str] = []
    for name, value in change.items():
        if name == "type" or value in (None, "", 0, [], {}):
            continue
        if name.endswith("_bytes"):
            parts.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {size(value)}")
        elif isinstance(value, list):
            parts.append(f"{name.replace('_', ' ')} {', '.join(map(str, value))}")
        else:
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _lease_line(yard: Yard, lease: Lease, card: Card, now: datetime) -> str:
    what = "replica" if lease.kind == "replica" else "lease"
    if lease.kind == "replica":
        phase = yard.replicas.get(lease.holder, {}).get("phase", "")
        notes = [phase] if phase and phase not in TERMINAL_PHASES else []
    else:
        notes = [lease.priority, *(["pinned"] if lease.pinned else [])]
    state = state_of(lease)
    if state != "held":
        notes.append(why_of(lease) or state)
    if lease.expires_at is not None:
        notes.append(f"ends in {left(lease.expires_at, now)}")
    amount = "the whole card" if lease.exclusive else size(lease.memory_bytes)
    return (
        f"{yard.holder(lease)}  {what} {lease.holder}  {amount}, {', '.join([*notes, ago(lease.since, now)])}"
        f"{process(lease.process)}{by_whom(lease.by)}"
    )


def _waiter_line(yard: Yard, waiter: Waiter, card: Card, now: datetime) -> str:
    amount = "the whole card" if waiter.exclusive else size(waiter.memory_bytes)
    others = [c for c in waiter.cards if c != card.id]
    also = f", with {', '.join(others)}" if others else ""
    ahead = ", ".join(yard.known(card, id_) for id_ in waiter.waiting_for)
    waits = f"waits for {ahead}" if ahead else "waits for room"
    end = f", gives up in {left(waiter.expires_at, now)}" if waiter.expires_at is not None else ""
    return (
        f"{waiter.name or waiter.id}  {waiter.id}  {amount}{also}, {waiter.priority}: {waits}, "
        f"{ago(waiter.since, now)}{end}{process(waiter.process)}{by_whom(waiter.by)}"
    )


def _parked_line(one: Row, card: Card) -> str:
    way = f" by {one['way']}" if one["way"] else ""
    if card.id == "cpu":
        return f"{one['model'] or '?'}  replica {one['replica']}  {size(one['keeps_bytes'])} of RAM{way}"
    return (
        f"{one['model'] or '?'}  replica {one['replica']}  keeps {size(one['keeps_bytes'])} here, "
        f"{size(one['ram_bytes'])} of RAM{way}"
    )


def _section(title: str, found: Iterable[str]) -> list[str]:
    lines = [f"  {line}" for line in found]
    return ["", title, *lines] if lines else []
