"""Finds the way to the agent that owns a card, and asks it.

Over its socket when it lives in this data folder, else through NATS. What is named without a node is looked
for in what the API knows of all of them. It decides nothing about cards.
"""

import base64
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from controlplane.ctl.cardafar import ask_afar
from controlplane.ctl.cardanswers import Tell
from controlplane.ctl.cardsocket import Away, ask_here, folder_of, local_node
from controlplane.ctl.connect import Place, open_api
from controlplane.ctl.failures import RejectedByYard, Unreachable, UsageMistake
from schemas import codes
from schemas.cardasks import CardAnswer, CardAsk, ClaimEnd, LeaseRelease


class CardName(NamedTuple):
    """A card as a person names it: `node/card`."""

    node: str
    card: str

    def __str__(self) -> str:
        return f"{self.node}/{self.card}"


def parse_cards(texts: Sequence[str]) -> tuple[CardName, ...]:
    """The cards meant, all of one node. Raises UsageMistake."""
    found = tuple(parse_card(text) for text in texts)
    nodes = dict.fromkeys(card.node for card in found)
    if len(nodes) > 1:
        raise UsageMistake(
            f"cards of one node only can be had together, these are of {', '.join(nodes)}"
        )
    return found


def parse_card(text: str) -> CardName:
    """Raises UsageMistake."""
    node, slash, card = text.rpartition("/")
    if not slash or not node or not card:
        raise UsageMistake(f"expected NODE/CARD, got {text!r}; yardctl card list shows them")
    return CardName(node, card)


def new_id(kind: str) -> str:
    """`l-` or `c-` and ten base32 characters, never used again."""
    return f"{kind}-{base64.b32encode(os.urandom(7)).decode()[:10].lower()}"


async def ask(place: Place, node: str, body: CardAsk, tell: Tell) -> CardAnswer:
    """The final answer; `tell` hears each that comes before it.

    Raises RejectedByYard, Unreachable, and NotKnownYet when it cannot be found out.
    """
    if local_node(place) == node:
        with contextlib.suppress(Away):
            return await ask_here(place, body, tell)
    return await ask_afar(place, node, body, tell)


async def ask_this_machine(place: Place, node: str, body: CardAsk, tell: Tell) -> CardAnswer:
    """As `ask`, of an agent that must be of this machine. Raises RejectedByYard, Unreachable."""
    here = local_node(place)
    if here != node:
        lives = f"of node {here}" if here else "of no node"
        raise RejectedByYard(
            f"a process can only be watched on the machine of its node: this is the machine {lives} "
            f"(by {place.data}), not of {node} [{codes.NOT_HERE}]"
        )
    try:
        return await ask_here(place, body, tell)
    except Away:
        raise Unreachable(
            f"the agent of {node} does not listen at {folder_of(place) / 'cards.sock'}; "
            "is the yard up?"
        ) from None


async def end(place: Place, body: LeaseRelease | ClaimEnd, tell: Tell) -> CardAnswer:
    """Ends what an id or a name stands for, on whichever node it is. Raises as `ask`."""
    here = local_node(place)
    kind = "lease" if isinstance(body, LeaseRelease) else "claim"
    try:
        async with open_api(place) as api:
            found = named(await api.data("/v1/cards"), kind, body.what)
    except Unreachable:
        # Without the control plane the agent of this machine still knows its own.
        if here is None:
            raise
        found = ()
    nodes = tuple(dict.fromkeys(node for node, _ in found))
    if len(nodes) > 1:
        raise RejectedByYard(
            f"several nodes have a {kind} {body.what!r}; end it by its id [{codes.AMBIGUOUS_NAME}]",
            *(f"{node}: {id_}" for node, id_ in found),
        )
    # What is younger than the API's knowledge is known to its agent.
    node = nodes[0] if nodes else here
    if node is None:
        raise RejectedByYard(f"there is no {kind} {body.what!r} [{codes.NOT_FOUND}]")
    return await ask(place, node, body, tell)


def named(cards: Sequence[Mapping[str, Any]], kind: str, what: str) -> tuple[tuple[str, str], ...]:
    """(node, id) of every lease, waiter or claim that has this id or name, each once."""
    found: set[tuple[str, str]] = set()
    for card in cards:
        if kind == "claim":
            pairs = [(claim["id"], claim["name"]) for claim in card.get("claims", [])]
        else:
            pairs = [
                (lease["holder"], lease.get("name", ""))
                for lease in card.get("leases", [])
                if lease.get("kind") == "named"
            ]
            pairs += [
                (waiter["id"], waiter.get("name", ""))
                for waiter in card.get("waiters", [])
                if waiter.get("kind", "named") == "named"
            ]
        found.update((card["node"], id_) for id_, name in pairs if what in (id_, name))
    return tuple(sorted(found))
