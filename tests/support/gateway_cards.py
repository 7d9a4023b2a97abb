"""Set-ups and looks of tests about one base URL per card: a node with two cards, who waits, what was asked for."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.app import RunningGateway
from schemas.commands import ModelActivate
from schemas.model import Scaling
from tests.support.aio import until
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_world import a_profile
from tests.support.gateway_yard import Yard, memory_yard

PATH = "/v1/chat/completions"
GPU0 = "/cards/n1/gpu0"
GPU1 = "/cards/n1/gpu1"


async def two_cards(yard: Yard, *replicas: str, **model: Any) -> list[FakeEngine]:
    """A node with two gpus and a model for either; `replicas` are cards it is ready on."""
    model.setdefault("scaling", Scaling(min=0, max=2))
    model.setdefault("profiles", (a_profile("gpu"),))
    await yard.cards("n1", "gpu0", "gpu1")
    await yard.model(**model)
    engines = []
    for card in replicas:
        engine = await yard.engine()
        await yard.replica(engine, f"r-{card}", cards=(card,))
        engines.append(engine)
    return engines


@asynccontextmanager
async def two_gpus(
    folder: Path, *replicas: str, **model: Any
) -> AsyncIterator[tuple[Yard, list[FakeEngine]]]:
    """A yard in memory with `two_cards`, and the engines ready on them."""
    async with memory_yard(folder) as yard:
        yield yard, await two_cards(yard, *replicas, **model)


async def waits(gateway: RunningGateway, count: int, scope: str = "any") -> None:
    """Waits until `count` requests for `m` wait in a scope."""
    await until(
        lambda: gateway.gateway.room.count(("m", scope)) == count, f"{count} to wait in {scope}"
    )


async def scopes_asked_for(yard: Yard) -> list[str]:
    """The scopes of all wishes so far, sorted."""
    bodies = [c.command.body for c in await yard.activates() if c.command is not None]
    return sorted(b.scope for b in bodies if isinstance(b, ModelActivate))


def nothing_left(gateway: RunningGateway) -> None:
    """Nobody waits, nobody is counted, and no timer runs any more."""
    state = gateway.gateway
    assert len(state.room) == 0
    assert state.open_tickets == 0
    assert dict(state.usage.by_replica) == {}
    assert gateway.activator.timers == 0


async def first_event(lines: Any) -> None:
    """Reads a stream up to its first event."""
    async for line in lines:
        if line.startswith("data: "):
            return


async def last_event(lines: Any) -> dict[str, Any]:
    """The last event of a stream that does not end well."""
    rest = [line async for line in lines if line.startswith("data: ")]
    assert "data: [DONE]" not in rest
    return json.loads(rest[-1].removeprefix("data: "))
