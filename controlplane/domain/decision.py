"""What the leader's decisions are made of: the facts beside the log, and the changes to append.

A decision is appended as one atomic batch; the shell (controlplane/leader.py) turns its changes into
drafts with the expected sequences of the world it was decided on.
"""

from collections.abc import Callable
from datetime import datetime

from msgspec import Struct

from controlplane.domain.reports import Report
from events.log import StoredCommand
from schemas.beacons import EngineCounters
from schemas.commands import Outcome, Problem
from schemas.messages import Event, State


class Change(Struct, frozen=True, kw_only=True):
    """One event of a decision, on the aggregate `noun`/`key`. `state` None = tombstone."""

    noun: str
    key: tuple[str, ...]
    event: Event
    state: State | None
    reason: str = ""
    ttl_s: int | None = None


class Decision(Struct, frozen=True, kw_only=True):
    """`what` is the line for leader.log; `cause` the id of the event or command that led here.

    `outcome`, when a person's command is answered by it, is appended in the same batch.
    """

    changes: tuple[Change, ...]
    what: str
    cause: str = ""
    actor: str = "system:control"
    correlationid: str | None = None
    outcome: Outcome | None = None


class Rejected(Struct, frozen=True, kw_only=True):
    """A command refused: `code` is one of schemas/codes.py, `sentence` is for the person who sent it."""

    code: str
    sentence: str
    problems: tuple[Problem, ...] = ()


class Accepted(Struct, frozen=True, kw_only=True):
    """A command accepted: what it changes and tells. `refs` are subjects to watch besides those it changes."""

    changes: tuple[Change, ...] = ()
    sentence: str
    lines: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()


class GatewayLive(Struct, frozen=True, kw_only=True):
    """The last beacon of one gateway. `age_s` since it was heard, on this leader's monotonic clock."""

    gateway: str
    incarnation: str
    age_s: float
    position: int
    inflight: dict[str, int] = {}
    waiting: dict[str, int] = {}
    last_use_age_s: dict[str, float] = {}
    last_use_at_s: dict[str, float] | None = None
    """The same in seconds since the epoch; a model nobody used since keeps its very number from beacon to
    beacon, so that an order by it need not be made anew. None: only ages are known."""
    leaving: bool = False


class ReplicaLive(Struct, frozen=True, kw_only=True):
    """An engine's own counters. `changed_age_s` since requests_total last changed or inflight was above 0."""

    counters: EngineCounters
    changed_age_s: float | None = None


class AgentLive(Struct, frozen=True, kw_only=True):
    """The last beacon of one agent; `heard` is how many beacons in a row this leader has heard.

    `trusted_for_s`: since the third of the row came, None before. From then on its silence about a use counts.
    """

    node: str
    epoch: int
    age_s: float
    heard: int
    heard_for_s: float
    trusted_for_s: float | None = None
    replicas: dict[str, ReplicaLive] = {}
    leaving: bool = False


class Live(Struct, frozen=True, kw_only=True):
    """What beacons said, as ages. `leading_for_s`: connected and leading without a break since."""

    leading_for_s: float
    gateways: tuple[GatewayLive, ...] = ()
    agents: tuple[AgentLive, ...] = ()
    mirror: str = ""
    """The name of this leader's own mirror; empty: it has none and fetches nothing."""
    mirrors: tuple[str, ...] = ()
    """Other mirrors heard of lately, by name."""
    audit_behind: bool = False
    """The audit lacks what tombstones would take out of the log: what nobody asked to end is left for later."""


class Ids(Struct, frozen=True, kw_only=True):
    """Where new ids come from: minted by the shell, counted in tests."""

    replica: Callable[[], str]
    decision: Callable[[], str]
    incarnation: Callable[[], str]
    job: Callable[[], str]


class Step(Struct, frozen=True, kw_only=True):
    """One answer of `step.next_decision`.

    `decision` None: nothing to do before `wake_at` (None: nothing by time alone). `consumed` is the
    command this answer settles, also when it needed no event (an activate that joined), so that the
    shell does not offer it again.
    """

    decision: Decision | None = None
    wake_at: datetime | None = None
    consumed: StoredCommand | None = None
    settled: Report | None = None
    """The report this answer deals with, also when it needed no event; it is not offered again."""
    stuck: tuple[str, ...] = ()
    """Accepted demands without a live activation, for /readyz; empty is healthy."""
