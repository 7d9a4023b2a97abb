"""Gathers what may be wrong with this control plane, for readiness and for `yardctl doctor`.

It looks and changes nothing; readiness.py judges.
"""

import asyncio

from controlplane.api_version import program_version
from controlplane.leader import LeaderLoop
from controlplane.projections.readmodel import ReadModel
from controlplane.projections.usage import UsageModel
from controlplane.readiness import Facts, Finding, assess
from events.log import EventLog, LogError, StreamIdentity
from schemas.api import (
    DoctorBody,
    FindingView,
    LeaderView,
    ProjectionView,
    ReadyBody,
    UnreadableView,
)
from schemas.messages import SCHEMA

IDENTITY_WAIT_S = 2.0


class Doctor:
    """Looks at the parts of one process."""

    def __init__(
        self, *, events: EventLog, leader: LeaderLoop, model: ReadModel, usage: UsageModel
    ) -> None:
        self._events = events
        self._leader = leader
        self._model = model
        self._usage = usage

    def facts(self) -> Facts:
        facts = self._leader.facts()
        projections = {**facts.projections, "sqlite": self._model.facts()}
        # A server may have no room for accounts, and nobody is less ready for that; a fault of ours is one.
        if self._usage.stopped is not None:
            projections["usage"] = self._usage.facts()
        return Facts(
            connected=facts.connected,
            projections=projections,
            stuck=facts.stuck,
            turn_s=facts.turn_s,
            conflicts=facts.conflicts,
            alarms=facts.alarms,
        )

    def ready(self) -> ReadyBody:
        found = _views(assess(self.facts()))
        return ReadyBody(ready=not found, findings=found)

    async def examine(self) -> DoctorBody:
        """Everything; asks the log for its identity, at most two seconds."""
        facts = self.facts()
        identity = await self._identity()
        reader = self._leader.reader
        world = reader.world
        leader = world.leader
        return DoctorBody(
            instance=self._leader.me.instance,
            version=program_version(),
            schema=SCHEMA,
            connected=facts.connected,
            leading=self._leader.term is not None,
            leader=None
            if leader is None
            else LeaderView(
                instance=leader.instance,
                host=leader.host,
                pid=leader.pid,
                since=leader.since,
                term=world.head("leader.current").seq,
            ),
            log_seq=identity.last_seq if identity else None,
            log_schema=identity.schema if identity else None,
            stream_id=identity.stream_id if identity else None,
            commands_position=world.line.commands_position if world.line else None,
            projections=tuple(
                ProjectionView(
                    name=name,
                    position=projection.position,
                    synced=projection.synced,
                    stopped=projection.stopped,
                )
                for name, projection in sorted(facts.projections.items())
            ),
            unknown_events=world.unknown_events,
            broken_events=world.broken_events,
            unreadable=tuple(
                UnreadableView(subject=subject, seq=seq, why=why)
                for subject, (seq, why) in sorted(reader.broken.items())
            ),
            findings=_views(assess(facts)),
            misnamed_beacons=self._leader.live.misnamed,
            gateways=self._leader.live.gateways(),
        )

    async def _identity(self) -> StreamIdentity | None:
        try:
            async with asyncio.timeout(IDENTITY_WAIT_S):
                return await self._events.identity()
        except (LogError, TimeoutError):
            return None


def _views(findings: tuple[Finding, ...]) -> tuple[FindingView, ...]:
    return tuple(FindingView(code=f.code, sentence=f.sentence) for f in findings)
