"""What yardctl reads of cards, leases and placement from the API, and prints.

Reading has no effects.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from controlplane.ctl import cardview, leaseview
from controlplane.ctl.cardasking import CardName
from controlplane.ctl.cardview import Yard
from controlplane.ctl.connect import Api
from controlplane.ctl.reads import path_of
from controlplane.ctl.show import notes_of, print_json, print_table


async def list_cards(api: Api, output: str) -> None:
    cards = await api.listed("/v1/cards")
    yard = await _yard(api, cards.rows)
    if output == "json":
        print_json([*map(yard.full, yard.rows), *cards.unread])
        return
    print_table(
        cardview.CARD_COLUMNS,
        (cardview.card_row(yard, row) for row in yard.rows),
        "no node has registered",
        notes_of(cards),
    )


async def show_card(api: Api, card: CardName, output: str, now: datetime) -> None:
    """Raises CtlError when there is no such card."""
    row = await api.data(path_of("cards", str(card)))
    yard = await _yard(api, [row])
    if output == "json":
        print_json(yard.full(row))
        return
    for line in cardview.page(yard, row, now):
        print(line)


async def list_leases(api: Api, output: str, now: datetime) -> None:
    cards = await api.listed("/v1/cards")
    found = leaseview.leases(cards.rows)
    if output == "json":
        print_json([*found, *cards.unread])
        return
    models = {row["id"]: row["model"] for row in await api.data("/v1/replicas")}
    print_table(
        leaseview.LEASE_COLUMNS,
        (leaseview.lease_row(lease, models, now) for lease in found),
        "nobody holds a card or waits for one",
        notes_of(cards),
    )


async def show_places(api: Api, model: str, card: CardName | None, output: str) -> None:
    """Every place a replica could have, best first. Raises CtlError, RejectedByYard."""
    body = {"model": model, "card": None if card is None else str(card)}
    found = (await api.post("/v1/place", body))["data"]
    if output == "json":
        print_json(found)
        return
    print(found["sentence"])
    if not found["candidates"]:
        return
    print()
    print_table(
        ("rank", "card", "profile", "why", "leaves"),
        (place_row(one) for one in found["candidates"]),
        "",
    )


def place_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    """`leaves` are who would have to go first."""
    ahead = one.get("victims") or one.get("waiting_for") or ()
    why = one.get("reason", "")
    if one.get("resumes"):
        why = f"{why}; resumes {one['resumes']}" if why else f"resumes {one['resumes']}"
    return (
        "no" if one.get("rank") is None else str(one["rank"]),
        f"{one['node']}/{'+'.join(one['cards'])}",
        one["profile"],
        why,
        ", ".join(ahead) or "-",
    )


async def _yard(api: Api, cards: Sequence[Mapping[str, Any]]) -> Yard:
    return Yard(
        cards=cards,
        replicas=await api.data("/v1/replicas"),
        activations=await api.data("/v1/activations"),
        nodes=await api.data("/v1/nodes"),
    )
