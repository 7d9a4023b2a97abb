"""Carries out what becomes of a drained replica: parked, stopped, or kept after all; and brings a parked one back.

What is decided in `domain/parking.py` and done by `parking.py` is said here, in the order in which others may rely
on it. It is part of the replica's supervisor and nobody else's.
"""

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from nodeagent.domain import parking
from nodeagent.domain.held import Held
from nodeagent.ending import Ending
from nodeagent.parking import Lost, Parked, Parking, Resumed
from nodeagent.tools import Tools
from schemas.replica import ReplicaParked, ReplicaReady

LOG = logging.getLogger(__name__)


class Resting:
    """One replica's way out of service and back. `ended` tells that its process is gone."""

    def __init__(
        self,
        tools: Tools,
        replica: str,
        *,
        held: Callable[[], Held],
        wake: asyncio.Event,
        ended: Callable[[], bool],
        ending: Ending,
    ) -> None:
        self._t = tools
        self._name = replica
        self._held = held
        self._ending = ending
        self._parking = Parking(
            tools,
            replica,
            held=held,
            wake=wake,
            ended=ended,
            over=lambda: ended() or held().ending,
        )

    async def drained(self) -> None:
        """Nobody uses it any more: what becomes of it is the agent's to decide."""
        match await self._parking.choose():
            case None:  # the drain was called off, or the engine is gone
                return
            case parking.KeepInstead(reason=reason):
                self.take_back(reason)
            case parking.StopInstead(reason=reason):
                await self.stop(f"drained; not parked: {reason}" if reason else "drained")
            case parking.Park() as choice:
                await self._park(choice)

    async def stop(self, reason: str) -> None:
        """Ends it."""
        LOG.info("replica stops", extra={"replica": self._name, "reason": reason})
        self._t.books.note(replace(self._held(), ending=True))
        await self._ending.told(reason)

    def take_back(self, reason: str) -> None:
        """It serves on: the stop it drained for is taken back."""
        held = self._held()
        decision = held.stop.decision if held.stop is not None else ""
        replica = replace(held.replica, stop_decision=None, taken_back=decision)
        self._t.books.say(
            replace(held, replica=replica, stop=None),
            ReplicaReady(load_s=replica.load_s, taken_back=decision),
            reason=reason,
        )
        LOG.info("drain taken back", extra={"replica": self._name, "reason": reason})

    async def resume(self) -> None:
        """Brings it back from RAM. Ready only after it answered: nobody is sent to an engine that may sleep."""
        match await self._parking.resume():
            case None:
                return
            case Lost(reason=reason, hurried=hurried):
                LOG.warning("resume failed", extra={"replica": self._name, "reason": reason})
                if not hurried:
                    self._parking.failed()
                await self._t.processes.stop(self._name, 0.0)
                await self._ending.kill("resume_failed", f"not resumed: {reason}")
            case Resumed(resume_s=resume_s):
                self._resumed(resume_s)

    async def _park(self, choice: parking.Park) -> None:
        LOG.info("replica parks", extra={"replica": self._name, "way": choice.way})
        match await self._parking.park(choice):
            case Parked() as parked:
                self._parked(parked, choice.reason)
            case parking.StopInstead(reason=reason):
                await self.stop(f"drained; not parked: {reason}")
            case Lost(reason=reason, hurried=hurried):
                if not hurried:
                    self._parking.failed()
                LOG.warning("park failed", extra={"replica": self._name, "reason": reason})
                # Nothing good can come from asking it: killed, and then ended as any other.
                await self._t.processes.stop(self._name, 0.0)
                told = "its park was broken off" if hurried else "its park failed"
                await self._ending.told(f"drained; {told}: {reason}")

    def _parked(self, parked: Parked, reason: str) -> None:
        """Its cards are given back and its RAM is leased, then it is said: who reads it parked finds room there."""
        held = self._held()
        replica = replace(
            held.replica,
            park_way=parked.way,
            parked_at=self._t.now(),
            ram_bytes=parked.ram_bytes,
            residual_bytes=parked.residual_bytes,
            park_s=parked.park_s,
            card_revs={},
        )
        self._t.books.park(
            self._name, residual_bytes=parked.residual_bytes, ram_bytes=parked.ram_bytes
        )
        event = ReplicaParked(
            way=parked.way, ram_bytes=parked.ram_bytes, residual_bytes=parked.residual_bytes
        )
        self._t.books.say(replace(held, replica=replica, ending=False), event, reason=reason)
        LOG.info("replica parked", extra={"replica": self._name, "park_s": parked.park_s})

    def _resumed(self, resume_s: float) -> None:
        """Its RAM is free again; what told of it as parked is gone with that."""
        held = self._held()
        replica = replace(
            held.replica,
            ready_at=self._t.now(),
            resume_s=resume_s,
            park_way="",
            parked_at=None,
            ram_bytes=0,
            residual_bytes=0,
            stop_decision=None,
        )
        self._t.books.end_ram(self._name)
        event = ReplicaReady(load_s=replica.load_s, resume_s=resume_s)
        self._t.books.say(replace(held, replica=replica, resuming=False), event)
        LOG.info("replica resumed", extra={"replica": self._name, "resume_s": resume_s})
