"""A node whose agent parks: its fake engines, the plan's wishes for them, and set-ups that many tests begin with."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.vllm import VllmDriver
from schemas.cardasks import CardAnswer, CardAsk, CardRequest
from schemas.model import EngineName, Parking
from schemas.node import CardInfo, EngineInfo
from schemas.plan import PlanItem, Stop
from schemas.replica import Replica
from schemas.settings import GIB, MIB
from tests.support.agent_yard import (
    Hand,
    MemoryYard,
    a_launch,
    a_node,
    a_stop,
    an_item,
    memory_yard,
)
from tests.support.aio import run
from tests.support.fake_cuda_checkpoint import FakeCheckpoint
from tests.support.fake_vllm import fake_env, vllm_program
from tests.support.scripted import ask

STORY_S = 60.0
CPU = CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB)
GPUS = tuple(CardInfo(id=f"gpu{n}", kind="gpu", memory_bytes=2 * GIB) for n in (0, 1))
CHECKPOINT = Parking(way="checkpoint", timeout_s=10.0)


def vllm_item(
    replica: str,
    *,
    model: str = "m",
    cards: tuple[str, ...] = ("gpu0",),
    memory_bytes: int = 512 * MIB,
    parking: Parking | None = None,
    stop: Any = None,
    **script: object,
) -> PlanItem:
    """A fake vLLM that may be parked by its own sleep, each step within 3 s."""
    launch = a_launch(
        engine="vllm",
        command=(),
        key_env=None,
        model=model,
        source="org/weights",
        env=fake_env(**script),
        parking=parking or Parking(way="sleep", timeout_s=3.0),
    )
    return an_item(replica, launch=launch, cards=cards, memory_bytes=memory_bytes, stop=stop)


def to_park(decision: str = "d-1", **fields: Any) -> Stop:
    """The wish to drain it and park it where that pays."""
    return a_stop(decision, **{"reason": "drain", "park": "may", **fields})


def parks(yard: MemoryYard, **fields: Any) -> Any:
    """An agent with two declared cards and a fake vLLM."""
    program = vllm_program(yard.folder / "bin")
    drivers: dict[EngineName, Any] = {"vllm": VllmDriver(program), "command": CommandDriver()}
    node = a_node(
        cards=fields.pop("cards", (CPU, *GPUS)),
        engines=(EngineInfo(name="vllm", version="1"), EngineInfo(name="command", version="1")),
    )
    return yard.agent(node=node, drivers=drivers, **fields)


def on_a_node(folder: Path, story: Callable[[Hand], Awaitable[None]], **fields: Any) -> None:
    """Runs `story` with a node that parks; `fields` as for `parks`."""

    async def whole() -> None:
        async with memory_yard(folder) as yard, parks(yard, **fields):
            await story(yard.hand)

    run(whole(), STORY_S)


@asynccontextmanager
async def checkpointed(folder: Path) -> AsyncIterator[tuple[Hand, FakeCheckpoint, int]]:
    """A node with cuda-checkpoint and a ready engine `r-1` on gpu0 that is parked by it; its pid."""
    fake = FakeCheckpoint(folder / "cuda")
    async with (
        memory_yard(folder) as yard,
        parks(yard, cuda_checkpoint=str(fake.program)),
    ):
        hand = yard.hand
        item = an_item("r-1", launch=a_launch(parking=CHECKPOINT), cards=("gpu0",))
        await hand.plan(item)
        await hand.phase("r-1", "ready")
        await hand.expect(lambda: hand.replica("r-1").pid, "its pid")
        pid = hand.replica("r-1").pid
        assert pid is not None
        fake.uses_cuda(pid)
        yield hand, fake, pid


async def parked(hand: Hand, item: PlanItem, decision: str = "d-1") -> Replica:
    """Has one engine ready and then parked; its state."""
    others = [other for name, other in hand.items.items() if name != item.replica]
    await hand.plan(*others, item)
    await hand.phase(item.replica, "ready")
    await stop(hand, item.replica, to_park(decision))
    return await hand.phase(item.replica, "parked")


async def ended(hand: Hand, item: PlanItem, wish: Stop | None = None) -> Replica:
    """Has one engine ready, wishes that it be parked, and waits until it is stopped instead; its state."""
    await hand.plan(item)
    await hand.phase(item.replica, "ready")
    await stop(hand, item.replica, wish or to_park())
    return await hand.phase(item.replica, "stopped")


async def stop(hand: Hand, replica: str, wish: Any) -> None:
    """Changes the stop of one item of the plan; None takes it back."""
    items = {**hand.items, replica: replace(hand.items[replica], stop=wish)}
    await hand.plan(*items.values())


def counters(state: Replica) -> dict[str, Any]:
    """What a fake vLLM counted."""
    assert state.endpoint is not None
    return ask(state.endpoint, "/fake/counters")


def kinds(hand: Hand, card: str) -> dict[str, str]:
    """Who has a lease there, and of which kind."""
    state = hand.card(card)
    return {lease.holder: lease.kind for lease in state.leases} if state is not None else {}


async def free(hand: Hand, *cards: str) -> None:
    """Waits until nobody has a lease on these cards."""
    for card in cards:
        await hand.expect(lambda card=card: kinds(hand, card) == {}, f"{card} to be free")


async def asked(hand: Hand, ask: CardAsk) -> CardAnswer:
    """The agent's answer to what a person asks about cards."""
    return await hand.wire.request(
        "cards", hand.node, CardRequest(ask=ask), CardAnswer, timeout_s=5.0
    )
