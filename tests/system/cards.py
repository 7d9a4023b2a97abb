"""Two declared cards and real engines on them: settings, catalog entries, and what a test reads off the log.

`Ledger` reads every card event there was and fails on the first that grants too much. It starts no yard.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from controlplane.ctl.cardsocket import ask_here
from controlplane.ctl.connect import find_place
from events.log import Recorded
from schemas.card import Card
from schemas.cardasks import CardAnswer, CardAsk
from tests.support.aio import until
from tests.system.yard import SMOLLM2, SystemYard, chat, scripted_model

ROOT = Path(__file__).parent.parent.parent
FAKE_VLLM = ROOT / "tests" / "engines" / "vllm.py"

CARDS = ("gpu0", "gpu1")
CARD_BYTES = 2 * 1024**3


def two_cards(**nodeagent: Any) -> dict[str, Any]:
    """Settings of a yard whose node has gpu0 and gpu1, with the waits of a person in a hurry."""
    cards = [{"id": card, "kind": "gpu", "memory": "2GiB"} for card in CARDS]
    return {
        "nodeagent": {"cards": cards, "gpus": False, "card_look": "200ms"} | nodeagent,
        "controlplane": {"min_residency": "200ms"},
        "gateway": {"wait": "20s"},
    }


def smol(name: str, *cards: str, **more: Any) -> dict[str, Any]:
    """SmolLM2 on llama.cpp with one entry for each of these cards, in this order; it fills most of one."""
    profile = {
        "engine": "llamacpp",
        # One thread: several wait for each other by spinning, which a busy machine punishes.
        "args": ["--ctx-size", "2048", "--threads", "1"],
        "memory": "1500MiB",
        **more.pop("profile", {}),
    }
    return {
        "name": name,
        "source": str(SMOLLM2),
        "scaling": {"min": 0, "max": 1, "idle_timeout": "15m"},
        "profiles": [{"name": card, "card": f"local/{card}", **profile} for card in cards or CARDS],
        **more,
    }


def fake_vllm(folder: Path) -> Path:
    """A program that behaves as `vllm` does, for `nodeagent.vllm`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE_VLLM}" "$@"\n')
    program.chmod(0o755)
    return program


def sleeper(name: str, *cards: str, **more: Any) -> dict[str, Any]:
    """The fake vLLM, as `smol` with one entry for each card; it parks by its own sleep."""
    profile = {
        "engine": "vllm",
        "memory": "1500MiB",
        "env": {"FAKE_VLLM_WEIGHTS_MIB": "32", "FAKE_VLLM_LOAD_S": "0.1"},
        **more.pop("profile", {}),
    }
    return smol(name, *cards, **more) | {
        "profiles": [{"name": card, "card": f"local/{card}", **profile} for card in cards or CARDS]
    }


def on_scripted(name: str, **more: Any) -> dict[str, Any]:
    """The scripted engine on either card."""
    return scripted_model(
        name,
        "--load-s",
        "0.1",
        profile={"memory": "1500MiB", "card": ["local/gpu0", "local/gpu1"]},
        **more,
    )


async def ask(http: httpx.AsyncClient, model: str, path: str = "", **more: Any) -> httpx.Response:
    """One short chat; `path` is a base such as `/cards/local/gpu1`."""
    return await http.post(f"{path}/v1/chat/completions", json=chat(model, max_tokens=4, **more))


async def answered_on(yard: SystemYard, http: httpx.AsyncClient, model: str) -> str:
    """Asks plainly, expects an answer, and tells on which card the replica that gave it is."""
    answer = await ask(http, model)
    assert answer.status_code == 200, answer.text
    (card,) = last_replica(yard, model).state.cards
    return card


def last_replica(yard: SystemYard, model: str) -> Recorded:
    """The last event of any replica of the model."""
    return [e for e in yard.events if e.noun == "replica" and e.state and e.state.model == model][
        -1
    ]


async def asked(yard: SystemYard, body: CardAsk) -> CardAnswer:
    """The last answer to an ask over the socket, as yardctl gets it, without the start of a program."""
    return await ask_here(find_place(data=yard.data), body, lambda _: None)


def starts_of(yard: SystemYard, model: str) -> list[Recorded]:
    """Its engine starts, those out of a parked state not among them."""
    return [
        e for e in yard.of("replica.starting") if e.state.model == model and not e.event.resumed
    ]


def card_now(yard: SystemYard, card: str) -> Card:
    """The card's state as far as the log was read."""
    for event in reversed(yard.events):
        if event.noun == "card" and event.key == ("local", card) and event.state is not None:
            assert isinstance(event.state, Card)
            return event.state
    raise AssertionError(f"nothing is known of {card}")


async def card_is(
    yard: SystemYard,
    card: str,
    holds: Callable[[Card], bool],
    what: str,
    *,
    after: int = 0,
    timeout_s: float = 20.0,
) -> Recorded:
    """Waits for an event of the card after which `holds` is true of it."""
    return await yard.when(
        lambda e: (
            e.noun == "card"
            and e.key == ("local", card)
            and isinstance(e.state, Card)
            and holds(e.state)
        ),
        f"{card}: {what}",
        after=after,
        timeout_s=timeout_s,
    )


def names(card: Card) -> set[str]:
    """The named leases on it."""
    return {lease.name for lease in card.leases if lease.kind == "named" and not lease.returning}


async def back(yard: SystemYard, name: str, old: int) -> None:
    """Waits until the successor of a killed part runs."""
    await until(
        lambda: yard.running.supervisor.pids.get(name, old) != old,
        f"{name} to be started again",
        20,
    )


async def agent_again(yard: SystemYard, number: int) -> Recorded:
    """Ends the agent by this signal; returns when the next one said what it adopted."""
    before = yard.position
    old = yard.kill("nodeagent", number)
    await back(yard, "nodeagent", old)
    return await yard.event("node.started", after=before, timeout_s=30)


async def shown(yard: SystemYard, card: str) -> dict[str, Any]:
    """`yardctl card show`, as data."""
    data: dict[str, Any] = json.loads(await yard.ctl("card", "show", f"local/{card}", "-o", "json"))
    return data


class Ledger:
    """Reads the history of the cards, event for event, and says what is wrong with it.

    1. never two leases of which one is the whole card's; 2. never more memory leased than there is;
    3. a claimed card, or a VM's, gets no new lease; 4. no fence twice, and `rev` only grows;
    5. the writer's own times never go back; 6. a waiter does not come back once it got its lease.
    """

    def __init__(self, events: list[Recorded]) -> None:
        self.cards = [e for e in events if e.noun == "card" and isinstance(e.state, Card)]

    def problems(self) -> list[str]:
        found: list[str] = []
        last: dict[str, Recorded] = {}
        fences: dict[tuple[str, str], int] = {}
        granted: set[tuple[str, str]] = set()
        for event in self.cards:
            card = event.state
            assert isinstance(card, Card)
            before = last.get(card.id)
            found += [f"{event.seq} {event.type} {card.id}: {p}" for p in _too_much(card)]
            if before is not None:
                found += [
                    f"{event.seq} {event.type} {card.id}: {p}"
                    for p in _wrong_step(before, event.time, before.state, card)
                ]
            for lease in card.leases:
                key = (card.id, lease.holder)
                if lease.kind != "parked" and fences.setdefault(key, lease.fence) > lease.fence:
                    found.append(f"{event.seq} {card.id}: the fence of {lease.holder} went back")
                fences[key] = lease.fence
                granted.add(key)
            for waiter in card.waiters:
                if waiter.kind == "named" and (card.id, waiter.id) in granted:
                    found.append(f"{event.seq} {card.id}: {waiter.id} waits though it was served")
            last[card.id] = event
        return found


def _too_much(card: Card) -> list[str]:
    problems: list[str] = []
    holding = [lease for lease in card.leases if lease.kind != "parked"]
    if any(lease.exclusive for lease in holding) and len(holding) > 1:
        problems.append(f"shared though one has all of it: {[n.holder for n in holding]}")
    twice = [h for h, n in Counter(lease.holder for lease in card.leases).items() if n > 1]
    if twice:
        problems.append(f"leased twice to {twice}")
    leased = sum(lease.memory_bytes for lease in card.leases)
    if leased > card.memory_bytes:
        problems.append(f"{leased} of {card.memory_bytes} bytes leased")
    return problems


def _wrong_step(before: Recorded, at: datetime, old: Any, new: Card) -> list[str]:
    problems: list[str] = []
    if new.rev < old.rev:
        problems.append(f"rev went from {old.rev} to {new.rev}")
    if at < before.time:
        problems.append(f"told before event {before.seq}, happened after it")
    kept = bool(old.claims or old.vm)
    came = {n.holder for n in new.leases if n.kind != "parked"} - {n.holder for n in old.leases}
    if kept and came:
        problems.append(f"{came} got in though the card was kept")
    return problems


def assert_nothing_double(yard: SystemYard) -> None:
    """Every card event so far, judged by `Ledger`."""
    ledger = Ledger(yard.events)
    assert ledger.cards, "no card event was seen at all"
    assert ledger.problems() == []


async def gathered(*coroutines: Any) -> list[Any]:
    """All of them at once; the first failure is raised when the others are over too."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
