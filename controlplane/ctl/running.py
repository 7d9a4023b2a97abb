"""`yardctl run`: leases cards for a program and becomes it, so pid, signals and exit code are the program's.

The lease ends with the process, because the agent watches it. A program that cannot be run is never waited
for, and one whose ask is refused is never run.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from controlplane.ctl.cardasking import CardName, ask_this_machine, new_id
from controlplane.ctl.cardline import InLine
from controlplane.ctl.connect import Place
from controlplane.ctl.failures import CtlError, Unreachable
from schemas.card import Priority
from schemas.cardasks import CardAnswer, LeaseAcquire, LeaseRelease

LEASE: Final = "YARD_LEASE"
"""The variable that tells a program under which lease it runs."""

END_S: Final = 5.0


class NoSuchCommand(CtlError):
    """As a shell answers."""

    code = 127


class CannotRun(CtlError):
    """As a shell answers."""

    code = 126


def run(
    place: Place,
    cards: Sequence[CardName],
    name: str,
    command: Sequence[str],
    *,
    memory_bytes: int | None,
    pinned: bool,
    priority: Priority,
    wait_s: float,
) -> NoReturn:
    """Waits in line, then becomes the command.

    Raises NoSuchCommand, CannotRun, RejectedByYard, Unreachable, NotKnownYet.
    """
    path = find(command[0])
    body = LeaseAcquire(
        id=new_id("l"),
        name=name,
        cards=tuple(card.card for card in cards),
        memory_bytes=memory_bytes,
        pinned=pinned,
        priority=priority,
        wait_s=wait_s,
        process=os.getpid(),
    )
    node = cards[0].node

    async def granted() -> CardAnswer:
        with InLine(", ".join(map(str, cards))) as line:
            return await ask_this_machine(place, node, body, line.tell)

    answer = asyncio.run(granted())
    try:
        become(path, command, {**os.environ, **answer.environment, LEASE: body.id})
    except OSError as error:
        asyncio.run(_end(place, node, body.id))
        kind = NoSuchCommand if isinstance(error, FileNotFoundError) else CannotRun
        raise kind(f"{command[0]} cannot be run: {error.strerror}") from error


def find(command: str) -> str:
    """The program a shell would run. Raises NoSuchCommand, CannotRun."""
    found = shutil.which(command)
    if found is not None:
        return found
    if os.sep in command and os.path.exists(command):
        raise CannotRun(f"{command} cannot be run: it is no program, or not yours to run")
    raise NoSuchCommand(f"{command}: there is no such command; nothing was leased")


def become(path: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Replaces this process by the program. Raises OSError when the kernel does not take it."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these, and what is ignored stays so in the program.
        signal.signal(number, signal.SIG_DFL)
    os.execve(path, list(command), environment)  # noqa: S606 - to run it is what was asked for


async def _end(place: Place, node: str, lease: str) -> None:
    """Ends the lease at once; without this it ends with the process, a moment later."""
    try:
        async with asyncio.timeout(END_S):
            await ask_this_machine(place, node, LeaseRelease(what=lease), lambda _: None)
    except (CtlError, Unreachable, TimeoutError):
        return
