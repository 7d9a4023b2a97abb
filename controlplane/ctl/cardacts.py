"""What yardctl does with leases, claims and VMs: asks the agent of the card and prints what it answered.

Whatever is refused ends the command with the agent's sentence (failures.py).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from controlplane.ctl import cardasking
from controlplane.ctl.cardasking import CardName, ask, ask_this_machine, new_id
from controlplane.ctl.cardline import InLine
from controlplane.ctl.connect import Place
from controlplane.ctl.show import length, print_json
from schemas.card import ClaimKind, Priority
from schemas.cardasks import (
    CardAnswer,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)


async def acquire(
    place: Place,
    cards: Sequence[CardName],
    name: str,
    *,
    memory_bytes: int | None,
    pinned: bool,
    priority: Priority,
    ttl_s: float | None,
    wait_s: float,
    output: str,
) -> None:
    """Leases all of the cards, or none."""
    body = LeaseAcquire(
        id=new_id("l"),
        name=name,
        cards=tuple(card.card for card in cards),
        memory_bytes=memory_bytes,
        pinned=pinned,
        priority=priority,
        ttl_s=ttl_s,
        wait_s=wait_s,
    )
    together = ", ".join(map(str, cards))
    with InLine(together) as line:
        answer = await ask(place, cards[0].node, body, line.tell)
    bound = f" for {length(ttl_s)}" if ttl_s is not None else ""
    _say(
        answer,
        output,
        f"{body.id}: {together} leased to {name}{bound}",
        node=cards[0].node,
        cards=[card.card for card in cards],
    )


async def release(place: Place, what: str, output: str) -> None:
    with InLine(what) as line:
        answer = await cardasking.end(place, LeaseRelease(what=what), line.tell)
    _say(answer, output, f"{what}: released")


async def start_claim(
    place: Place, card: CardName, name: str, kind: ClaimKind, pid: int | None, output: str
) -> None:
    """Keeps the card from now on; with a `pid`, for as long as that process of this machine lives."""
    body = ClaimStart(id=new_id("c"), name=name, card=card.card, kind=kind, process=pid)
    way = ask if pid is None else ask_this_machine
    with InLine(str(card)) as line:
        answer = await way(place, card.node, body, line.tell)
    _say(answer, output, f"{body.id}: {card} is kept for {name}", node=card.node, cards=[card.card])


async def end_claim(place: Place, what: str, output: str) -> None:
    with InLine(what) as line:
        answer = await cardasking.end(place, ClaimEnd(what=what), line.tell)
    _say(answer, output, f"{what}: ended")


async def attach_vm(place: Place, card: CardName, name: str, wait_s: float, output: str) -> None:
    """Hands the card to a VM once its engines have left."""
    body = VmAttach(name=name, card=card.card, wait_s=wait_s)
    with InLine(str(card)) as line:
        answer = await ask(place, card.node, body, line.tell)
    _say(answer, output, f"{card}: attached to {name}", node=card.node, cards=[card.card])


async def detach_vm(place: Place, card: CardName, output: str) -> None:
    with InLine(str(card)) as line:
        answer = await ask(place, card.node, VmDetach(card=card.card), line.tell)
    _say(answer, output, f"{card}: detached", node=card.node, cards=[card.card])


def _say(answer: CardAnswer, output: str, sentence: str, **more: Any) -> None:
    if output == "json":
        print_json({**msgspec.to_builtins(answer), **more})
    else:
        print(answer.sentence or sentence)
