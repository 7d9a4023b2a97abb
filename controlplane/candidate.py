"""Stands for leader when the rules of election.py say so, and keeps what they need to know.

It leads nothing and decides nothing: it ends with a term, or with the time to look again.
"""

import logging
from collections.abc import Callable
from datetime import datetime

import psutil
from msgspec import Struct

from controlplane.alarms import Alarms
from controlplane.domain.world import NO_HEAD, Head, World
from controlplane.drafts import CURRENT
from controlplane.election import Seen, judge
from controlplane.worldreader import WorldReader
from events.log import (
    Conflict,
    Draft,
    EventLog,
    LogError,
    LogFull,
    Misconfigured,
)
from events.subjects import event_subject
from schemas.beacons import LeaderBeacon
from schemas.leader import Leader, LeaderElected
from schemas.messages import SCHEMA

log = logging.getLogger(__name__)

SCHEMA_CHECK_S = 30.0
FAULT_RETRY_S = 2.0
FULL_RETRY_S = 5.0
NEIGHBOUR_LOOK_S = 0.5
"""A leader on this machine is looked at this often: its death is known before its silence."""


class Me(Struct, frozen=True, kw_only=True):
    """Who this instance is. `host` and `pid` let a neighbour on the same machine see that it died."""

    instance: str
    host: str
    pid: int


class Race(Struct, frozen=True, kw_only=True):
    """How a turn of the election ended: with a term to lead, or when to look again (None: when woken)."""

    term: int | None = None
    again_in_s: float | None = None


def process_alive(pid: int, since: datetime) -> bool:
    """Whether the process that wrote `since` still runs: exists, is no zombie, is not a later one's pid."""
    try:
        process = psutil.Process(pid)
        # Two seconds: start times are told in clock ticks since a boot time that itself is rounded.
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and process.create_time() <= since.timestamp() + 2
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


class Candidate:
    """One instance's side of the election. Owned by the leader's loop; `monotonic` are seconds."""

    def __init__(
        self,
        *,
        events: EventLog,
        me: Me,
        silence_s: float,
        prefix: str,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        alarms: Alarms,
        alive: Callable[[int, datetime], bool],
    ) -> None:
        self._events = events
        self._me = me
        self._silence_s = silence_s
        self._subject = event_subject(CURRENT, prefix=prefix)
        self._now = now
        self._monotonic = monotonic
        self._alarms = alarms
        self._alive = alive
        self._candidacy: Leader | None = None
        self._elected_seq: int | None = None
        self._seen_term = -1
        self._seen_at = monotonic()
        self._leaving = False
        self._schema_checked_at: float | None = None

    def term_of(self, world: World) -> int:
        """The term the log is in: the sequence of the last `leader.current` applied."""
        return world.heads.get(self._subject, NO_HEAD).seq

    def heard(self, beacon: LeaderBeacon, world: World) -> bool:
        """Takes another instance's beacon; True when it announced its end.

        A deposed leader that does not know it yet is no sign of the present one.
        """
        if beacon.term < self.term_of(world):
            return False
        self._seen_at = self._monotonic()
        news = beacon.leaving and not self._leaving
        self._leaving = beacon.leaving
        return news

    def note(self, world: World) -> None:
        """A new term in the log is a sign of its leader."""
        term = self.term_of(world)
        if term != self._seen_term:
            self._seen_term = term
            self._seen_at = self._monotonic()
            self._leaving = False

    def restart(self) -> None:
        """The silence counts from now: the connection was lost, or this instance led until now."""
        self._seen_at = self._monotonic()

    def forget(self) -> None:
        """Whatever this instance stood for is over."""
        self._candidacy = self._elected_seq = None

    async def turn(self, reader: WorldReader) -> Race:
        """Looks once, and stands if it is time."""
        world = reader.world
        head = world.heads.get(self._subject, NO_HEAD)
        leader = world.leader
        if head.writable:
            self._alarms.down("no_election")
        else:
            self._alarms.up(
                "no_election", f"{self._subject} cannot be read, so nobody can lead: {head.problem}"
            )
        near = leader is not None and leader.host == self._me.host
        verdict = judge(
            Seen(
                synced=reader.synced,
                connected=reader.connected,
                writable=head.writable,
                host=self._me.host,
                leader=leader,
                term=head.seq,
                candidacy=self._candidacy,
                elected_seq=self._elected_seq,
                holder_alive=leader is None or not near or self._alive(leader.pid, leader.since),
                leaving=self._leaving,
                silent_s=self._monotonic() - self._seen_at,
                silence_s=self._silence_s,
            )
        )
        match verdict.act:
            case "lead":
                return Race(term=head.seq)
            case "follow":
                again_in_s = verdict.again_in_s
                if near and again_in_s is not None:
                    again_in_s = min(again_in_s, NEIGHBOUR_LOOK_S)
                return Race(again_in_s=again_in_s)
            case "stand":
                return Race(again_in_s=await self._stand(world, head, verdict.why))

    async def _stand(self, world: World, head: Head, why: str) -> float:
        previous = world.leader
        try:
            if not await self.may_lead():
                return SCHEMA_CHECK_S
            self._candidacy = Leader(
                instance=self._me.instance,
                host=self._me.host,
                pid=self._me.pid,
                since=self._now(),
            )
            # A candidacy of unknown fate is not repeated before another silence; if it was stored,
            # the follower brings it and judge() recognises it.
            self.restart()
            appended = await self._events.append(
                Draft(
                    subject=self._subject,
                    event=LeaderElected(previous=previous.instance if previous else None),
                    state=self._candidacy,
                    expected_seq=head.seq,
                    rev=head.rev + 1,
                    reason=why,
                    actor="system:control",
                ),
                epoch=head.seq,
            )
        except Conflict:
            self._candidacy = None
            return self._silence_s
        except LogFull as error:
            self._alarms.up("log_full", str(error))
            return FULL_RETRY_S
        except Misconfigured as error:
            self._alarms.up("misconfigured", str(error))
            return FULL_RETRY_S
        except LogError:
            return FAULT_RETRY_S
        self._elected_seq = appended.seqs[0]
        return self._silence_s

    async def may_lead(self) -> bool:
        """Whether the log's schema is one this version may write. Raises LogError when it cannot tell."""
        identity = await self._events.identity()
        self._schema_checked_at = self._monotonic()
        if identity.schema <= SCHEMA:
            self._alarms.down("upgrade_required")
            return True
        self._alarms.up(
            "upgrade_required",
            f"the log has schema {identity.schema} and this version knows {SCHEMA}: "
            "it may read, not lead",
        )
        return False

    def schema_due(self) -> bool:
        """Whether it is time to look at the log's schema again."""
        checked = self._schema_checked_at
        return checked is None or self._monotonic() - checked > SCHEMA_CHECK_S
