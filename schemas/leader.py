"""Who leads, and the line each decision leaves."""

from datetime import datetime

from msgspec import Struct


class Leader(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.leader.current`; the term is the sequence of this event."""

    instance: str
    host: str
    pid: int
    since: datetime


class LeaderElected(Struct, frozen=True, kw_only=True, tag_field="type", tag="leader.elected"):
    previous: str | None = None


class LeaderLine(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.leader.log`: the last decision, and how far YARD_COMMANDS was read."""

    instance: str
    term: int
    decision: str
    what: str
    cause: str = ""
    commands_position: int = 0


class LeaderDecided(Struct, frozen=True, kw_only=True, tag_field="type", tag="leader.decided"):
    subjects: tuple[str, ...] = ()


LeaderEvent = LeaderElected
LeaderLineEvent = LeaderDecided
