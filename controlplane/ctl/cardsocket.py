"""Asks the agent of this data folder about its cards over its unix socket, which needs no network.

An agent that is started again in the middle of a wait is asked again under the same id: it knows who was in
line. It prints nothing.
"""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from controlplane.ctl.cardanswers import (
    LATE_S,
    TAKE_BACK_S,
    Tell,
    Waits,
    accepted,
    is_early,
    taking_back,
)
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import NotKnownYet, Unreachable
from schemas import codes
from schemas.cardasks import CardAnswer, CardAsk, ClaimEnd, LeaseRelease

ANSWER_S: Final = 10.0
"""An agent answers at once; one that does not is not there."""

BACK_S: Final = 30.0
"""How long an agent may be away in the middle of an ask: `up` starts a killed one again within seconds."""

EARLY_S: Final = 10.0
"""How long an agent that starts, or a killed one whose socket is still there, is waited for at first."""

RETRY_S: Final = 0.2
LINE_BYTES: Final = 1024 * 1024


class Away(Exception):
    """No agent listens at the socket."""


class _Ended(Exception):
    """The agent ended after it had been asked."""


def folder_of(place: Place) -> Path:
    """The agent's part of a data folder."""
    return place.data / "nodeagent"


def local_node(place: Place) -> str | None:
    """The node whose agent lives in this data folder; None when none ever did."""
    try:
        return (folder_of(place) / "node").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


async def ask_here(place: Place, ask: CardAsk, tell: Tell) -> CardAnswer:
    """The final answer; `tell` hears those before it. Whoever leaves takes the place in line back.

    Raises Away when no agent listens, RejectedByYard, Unreachable, NotKnownYet.
    """
    try:
        return accepted(await _asked(place, ask, tell))
    except asyncio.CancelledError:
        back = taking_back(ask)
        if back is not None:
            # Closing the connection ended the place in line; what was granted in that moment ends here.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(TAKE_BACK_S):
                    await _converse(place, back, 0.0, lambda _: None)
        raise


async def _asked(place: Place, ask: CardAsk, tell: Tell) -> CardAnswer:
    loop = asyncio.get_running_loop()
    end = loop.time() + (ask.wait_s if isinstance(ask, Waits) else 0.0)
    given_up_at = loop.time() + EARLY_S
    again = False

    def hear(answer: CardAnswer) -> None:
        nonlocal given_up_at
        given_up_at = loop.time() + BACK_S
        tell(answer)

    while True:
        try:
            answer = await _converse(place, _with_wait(ask, end - loop.time()), end, hear)
        except Away:
            if not again and not _is_stale(place):
                raise
            if loop.time() > given_up_at:
                if again:
                    raise Unreachable(
                        "the agent went away and did not come back; what became of it is shown by: "
                        "yardctl lease list"
                    ) from None
                raise
        except _Ended:
            if not again:
                tell(CardAnswer(status="waiting", sentence="the agent is away; waiting for it"))
                given_up_at = loop.time() + BACK_S
            elif loop.time() > given_up_at:
                raise Unreachable(
                    "the agent ends each time it is asked; its log says why"
                ) from None
            again = True
        else:
            if is_early(answer) and loop.time() < given_up_at:
                tell(CardAnswer(status="waiting", sentence="the agent is starting"))
                await asyncio.sleep(RETRY_S)
                continue
            ends = isinstance(ask, LeaseRelease | ClaimEnd)
            if again and ends and answer.code == codes.NOT_FOUND:
                # It was done with the agent's last breath; only the answer was lost.
                return CardAnswer(status="done", id=ask.what)
            return answer
        await asyncio.sleep(RETRY_S)


async def _converse(place: Place, ask: CardAsk, end: float, tell: Tell) -> CardAnswer:
    """One connection, up to the final answer. Raises Away, _Ended, NotKnownYet, Unreachable."""
    line = msgspec.json.encode(ask) + b"\n"
    reader, writer = await _connect(place)
    timeout_at = asyncio.get_running_loop().time() + ANSWER_S
    try:
        writer.write(line)
        while True:
            async with asyncio.timeout_at(timeout_at):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                raise _Ended
            answer = msgspec.json.decode(line, type=CardAnswer)
            if answer.status != "waiting":
                return answer
            tell(answer)
            timeout_at = end + LATE_S
    except ConnectionError:
        raise _Ended from None
    except TimeoutError:
        raise NotKnownYet("the agent does not say what became of it: yardctl lease list") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise Unreachable(f"what listens in {folder_of(place)} is no agent: {error}") from None
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        folder = os.open(folder_of(place), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        raise Away from None
    try:
        # A socket's address holds 107 bytes; a data folder may lie deeper than that.
        reader, writer = await asyncio.open_unix_connection(
            f"/proc/self/fd/{folder}/cards.sock", limit=LINE_BYTES
        )
    except OSError:
        raise Away from None
    finally:
        os.close(folder)
    try:
        # With too many before us the kernel says "later", which asyncio takes for a connection.
        writer.get_extra_info("socket").getpeername()
    except OSError:
        writer.close()
        raise Away from None
    return reader, writer


def _is_stale(place: Place) -> bool:
    """Whether a killed agent left its socket: one that leaves by itself takes it away."""
    try:
        return stat.S_ISSOCK((folder_of(place) / "cards.sock").stat().st_mode)
    except OSError:
        return False


def _with_wait(ask: CardAsk, left_s: float) -> CardAsk:
    """The ask with what is left of its wait."""
    if isinstance(ask, Waits):
        return replace(ask, wait_s=max(0.0, min(left_s, ask.wait_s)))
    return ask
