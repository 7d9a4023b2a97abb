"""Sends one command and waits for what became of it, and on wish for what follows.

The outcome is an event like any other; it is followed from before the command is sent, so it cannot be
missed. Nothing is sent twice: whoever gave up waiting asks again by the command's id.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from controlplane.ctl.connect import USER
from controlplane.ctl.failures import (
    CtlError,
    NotKnownYet,
    RejectedByYard,
    SentPerhaps,
    Unreachable,
)
from events.ids import new_id
from events.log import Batch, EventLog, Follower, LogError, LogFull, Recorded, Unavailable
from events.subjects import event_subject
from schemas.activation import Activation
from schemas.commands import Command, CommandBody, Outcome, Problem
from schemas.replica import TERMINAL_PHASES, Replica

OUTCOME_S: Final = 30.0
FIRST_LOOK_S: Final = 10.0

Explain = Callable[[Problem], str]


def plain(problem: Problem) -> str:
    return f"{problem.path}: {problem.sentence}"


async def carry_out(
    log: EventLog,
    body: CommandBody,
    *,
    prefix: str = "yard",
    timeout_s: float = OUTCOME_S,
    explain: Explain = plain,
) -> Outcome:
    """The accepted outcome. Raises RejectedByYard, NotKnownYet, Unreachable, CtlError."""
    command = Command(id=new_id(), body=body)
    follower = log.follow([event_subject("command", command.id, prefix=prefix)])
    try:
        await _first_look(follower)
        try:
            await log.send(USER, command)
        except LogFull as error:
            raise CtlError(f"the log is full, nothing can be changed: {error}") from error
        except Unavailable as error:
            raise _lost(log, command.id) from error
        except LogError as error:
            raise CtlError(f"the command could not be sent: {error}") from error
        outcome = await _outcome(follower, command.id, timeout_s)
    finally:
        await follower.close()
    return accepted(outcome, explain)


async def wait_for(log: EventLog, command: str, *, prefix: str, timeout_s: float) -> Outcome:
    """The outcome of a command sent before, whichever it is. Raises NotKnownYet, Unreachable."""
    follower = log.follow([event_subject("command", command, prefix=prefix)])
    try:
        return await _outcome(follower, command, timeout_s)
    finally:
        await follower.close()


def accepted(outcome: Outcome, explain: Explain = plain) -> Outcome:
    """The outcome itself when it is a yes. Raises RejectedByYard with every problem."""
    if outcome.status == "accepted":
        return outcome
    sentence = f"{outcome.sentence or 'rejected'} [{outcome.code}]"
    told = [explain(problem) for problem in outcome.problems]
    if len(told) == 1 and told[0].endswith(outcome.sentence):
        # The only problem is the sentence itself with its place before it: told once, with the place.
        raise RejectedByYard(f"{told[0]} [{outcome.code}]")
    raise RejectedByYard(sentence, *told)


def _lost(log: EventLog, command: str) -> CtlError:
    if not log.connected:
        return SentPerhaps(
            "NATS went away while the command was being sent",
            f"whether it was stored is not known: yardctl command wait {command}",
        )
    return _not_known(command, "NATS did not confirm the command")


def _not_known(command: str, why: str) -> NotKnownYet:
    return NotKnownYet(f"{why}; ask again: yardctl command wait {command}")


async def _first_look(follower: Follower) -> None:
    """Returns when the follower stands at the end of the log, so nothing later can be missed."""
    try:
        async with asyncio.timeout(FIRST_LOOK_S):
            while not (batch := await follower.next()).synced:
                if not batch.connected:
                    raise Unreachable("NATS went away before the command was sent; nothing changed")
    except TimeoutError:
        raise Unreachable("the log does not answer; nothing was sent") from None


async def _outcome(follower: Follower, command: str, timeout_s: float) -> Outcome:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for item in (await follower.next()).items:
                    if isinstance(item, Recorded) and isinstance(item.state, Outcome):
                        return item.state
    except TimeoutError:
        raise _not_known(command, f"no control plane decided within {timeout_s:g} s") from None


class Following:
    """What --wait watches: a model's activation and its replicas, from their present state on."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.activation: Activation | None = None
        self.replicas: dict[str, Replica] = {}
        self.synced = False

    def apply(self, batch: Batch) -> list[Recorded]:
        """Folds a batch; the events about this model that came after the first look."""
        news: list[Recorded] = []
        for item in batch.items:
            if not isinstance(item, Recorded):
                continue
            concerns = True
            match item.state:
                case Activation(model=self.model) as state:
                    self.activation = state
                case Replica(model=self.model) as state:
                    self.replicas[state.id] = state
                case None if item.noun == "activation":
                    self.activation = None
                case _:
                    concerns = False
            if concerns and self.synced:
                news.append(item)
        self.synced = self.synced or batch.synced
        return news

    def ready(self) -> int:
        return sum(r.phase == "ready" for r in self.replicas.values())

    def running(self) -> int:
        return sum(r.phase not in TERMINAL_PHASES for r in self.replicas.values())


async def watch_until(
    log: EventLog,
    model: str,
    reached: Callable[[Following], str | None],
    tell: Callable[[Recorded], None],
    *,
    prefix: str,
    timeout_s: float,
) -> str:
    """Tells the events of a model until `reached` gives a sentence, and returns it.

    Raises NotKnownYet when `timeout_s` ends first; `reached` may raise CtlError itself.
    """
    filters = [
        f"{event_subject('activation', model, prefix=prefix)}.*",
        f"{event_subject('replica', prefix=prefix)}.>",
    ]
    seen = Following(model)
    follower = log.follow(filters)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for item in seen.apply(await follower.next()):
                    tell(item)
                if seen.synced and (sentence := reached(seen)) is not None:
                    return sentence
    except TimeoutError:
        raise NotKnownYet(
            f"{model}: not there after {timeout_s:g} s; it goes on: yardctl events -f --model {model}"
        ) from None
    finally:
        await follower.close()
