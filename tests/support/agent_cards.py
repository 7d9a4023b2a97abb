"""What tests of an agent's cards share: cards, asks over its socket, and programs that hold a lease."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from schemas.card import Card, Lease
from schemas.cardasks import CardAnswer, CardAsk, ClaimStart, LeaseAcquire
from schemas.node import CardInfo
from schemas.settings import GIB
from tests.support.agent_yard import Hand, MemoryYard, a_node, an_item
from tests.support.aio import until

CARDS = (
    CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB),
    CardInfo(id="gpu0", kind="gpu", memory_bytes=4 * GIB),
    CardInfo(id="gpu1", kind="gpu", memory_bytes=4 * GIB),
)
QUICK_DRAINS = {"foreground_drain_s": 0.3, "interactive_drain_s": 0.5, "app_drain_s": 0.4}


class Socket:
    """One connection to the agent's socket. Ask after ask goes over it, as a program's would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, ask: CardAsk) -> CardAnswer:
        self._writer.write(msgspec.json.encode(ask) + b"\n")
        return await self.answer()

    async def answer(self, timeout_s: float = 10.0) -> CardAnswer:
        async with asyncio.timeout(timeout_s):
            return msgspec.json.decode(await self._reader.readline(), type=CardAnswer)

    async def last(self, timeout_s: float = 10.0) -> CardAnswer:
        """The answer that ends the waiting."""
        while (answer := await self.answer(timeout_s)).status == "waiting":
            pass
        return answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def a_socket(folder: Path) -> AsyncIterator[Socket]:
    path = folder / "nodeagent" / "cards.sock"
    await until(path.exists, "the agent's socket")
    made: list[Socket] = []

    async def there() -> bool:
        with contextlib.suppress(OSError):
            made.append(Socket(*await asyncio.open_unix_connection(str(path))))
        return bool(made)

    await until(there, "an agent at the socket")
    try:
        yield made[0]
    finally:
        await made[0].close()


async def ask(folder: Path, what: CardAsk) -> CardAnswer:
    """One ask over a connection of its own; an agent that only just starts is asked again."""
    answers: list[CardAnswer] = []

    async def answered() -> bool:
        async with a_socket(folder) as socket:
            answers.append(await socket.ask(what))
        return answers[-1].code != "yard_unavailable"

    await until(answered, "an answer")
    return answers[-1]


def agent(yard: MemoryYard, **fields):
    return yard.agent(node=a_node(cards=CARDS), **{**QUICK_DRAINS, "lease_grace_s": 0.5, **fields})


def a_lease_ask(n: int, *cards: str, **fields) -> LeaseAcquire:
    given = {"id": f"l-aaaaaaaaa{'abcdefg'[n]}", "name": f"train{n}", **fields}
    return LeaseAcquire(cards=cards or ("gpu0",), **given)


def a_claim_ask(card: str = "gpu0", **fields) -> ClaimStart:
    return ClaimStart(id="c-aaaaaaaaaa", name="doom", card=card, **fields)


def on(hand: Hand, card: str = "gpu0") -> Card:
    found = hand.card(card)
    assert found is not None
    return found


def lease_on(hand: Hand, card: str = "gpu0") -> Lease | None:
    found = hand.card(card)
    return found.leases[0] if found is not None and found.leases else None


def gpu_item(name: str, *flags: str, card: str = "gpu0", gib: float = 1.0, **fields):
    return an_item(name, *flags, cards=(card,), memory_bytes=int(gib * GIB), **fields)


@contextlib.contextmanager
def a_program(code: str = "import time; time.sleep(60)", *args: str):
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, *args])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


HOLDER = """
import json, os, signal, socket, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, lambda *a: None)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
ask = {"ask": "acquire", "id": "l-aaaaaaaaaa", "name": "train", "cards": ["gpu0"],
       "process": os.getpid()}
s.sendall(json.dumps(ask).encode() + b"\\n")
s.makefile().readline()
while True:
    time.sleep(60)
"""
"""A program that has a lease of gpu0 for as long as it lives."""


def a_holder(folder: Path, how: str = "polite") -> "contextlib.AbstractContextManager":
    return a_program(HOLDER, str(folder / "nodeagent" / "cards.sock"), how)
