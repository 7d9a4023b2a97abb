"""Makes the calls of the table through a client, in order, and keeps what came; any client that can `ask` a call.

It decides nothing about an answer (judging.py).
"""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Protocol

import msgspec
from msgspec import Struct

from tests.clients.calls import RESPONSES, SECTIONS, Call
from tests.clients.judging import Reply, wrong
from tests.clients.yard import ClientYard, kept_busy, new_response, spend


class Client(Protocol):
    async def ask(self, call: Call) -> Reply: ...


class Asked(Struct, frozen=True, kw_only=True):
    """A call as the table has it, what came, and in which points that is wrong."""

    section: str
    call: Call
    reply: Reply
    wrong: list[str]


def table() -> Iterator[tuple[str, Call]]:
    for section, calls in SECTIONS:
        for call in calls:
            yield section, call


async def ask_all(client: Client, yard: ClientYard) -> list[Asked]:
    """Every call of the table."""
    found: list[Asked] = []
    response = ""
    for section, call in table():
        async with AsyncExitStack() as stack:
            if call.busy:
                await stack.enter_async_context(kept_busy(yard, call.busy))
            if call.key == "spent":
                await spend(yard)
            if call is RESPONSES[0]:
                response = await new_response(yard)
            path = call.path.replace("{id}", response)
            reply = await client.ask(msgspec.structs.replace(call, path=path))
        found.append(Asked(section=section, call=call, reply=reply, wrong=wrong(call, reply)))
    return found


def complaints(asked: list[Asked]) -> list[str]:
    """One line for each point that is wrong."""
    return [f"{a.section} / {a.call.title}: {why}" for a in asked for why in a.wrong]
