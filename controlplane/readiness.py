"""Says whether this control plane is ready and, when it is not, what is wrong, from plain facts.

Pure: it asks nobody. A finding has a code for machines and a sentence for people.
"""

from collections.abc import Mapping

from msgspec import Struct

STUCK_AFTER_S = 5.0
"""A demand may lack its activation for as long as a decision takes; longer is a fault."""

TURN_LIMIT_S = 20.0
"""A turn of the loop holds one append at most, whose retry budget is 15 s."""

CONFLICTS_LIMIT = 20
"""Decisions refused one after another because somebody else wrote first."""


class ProjectionFacts(Struct, frozen=True, kw_only=True):
    """One projection of this process. `stopped` is the sentence of what stopped it."""

    position: int
    synced: bool
    stopped: str | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """`stuck` maps an accepted demand without a live activation to how long it has been so.

    `turn_s` is how long the loop's present turn has run, None between turns. `alarms` maps a code
    to its sentence.
    """

    connected: bool
    projections: Mapping[str, ProjectionFacts]
    stuck: Mapping[str, float] = {}
    turn_s: float | None = None
    conflicts: int = 0
    alarms: Mapping[str, str] = {}


class Finding(Struct, frozen=True, kw_only=True):
    code: str
    sentence: str


def assess(facts: Facts) -> tuple[Finding, ...]:
    """Every reason not to be ready, the gravest first; empty means ready.

    1. A projection stopped. 2. NATS is away. 3. A projection has not caught up. 4. The loop makes no
    progress. 5. A demand has no activation. 6. Alarms raised by the loop.
    """
    found: list[Finding] = []
    for name, projection in sorted(facts.projections.items()):
        if projection.stopped is not None:
            found.append(
                Finding(
                    code="projection_stopped",
                    sentence=f"the projection {name} stopped: {projection.stopped}",
                )
            )
    if not facts.connected:
        found.append(Finding(code="nats_unavailable", sentence="NATS is not connected"))
    for name, projection in sorted(facts.projections.items()):
        if projection.stopped is None and not projection.synced:
            found.append(
                Finding(
                    code="not_synced",
                    sentence=f"the projection {name} has not caught up (at {projection.position})",
                )
            )
    if facts.turn_s is not None and facts.turn_s > TURN_LIMIT_S:
        found.append(
            Finding(
                code="loop_stuck",
                sentence=f"the reconcile loop has stood still for {facts.turn_s:.0f} s",
            )
        )
    if facts.conflicts >= CONFLICTS_LIMIT:
        found.append(
            Finding(
                code="loop_stuck",
                sentence=f"{facts.conflicts} decisions in a row were refused as conflicts",
            )
        )
    found += [
        Finding(
            code="demand_stuck",
            sentence=f"{demand} was accepted {age_s:.0f} s ago and has no live activation",
        )
        for demand, age_s in sorted(facts.stuck.items())
        if age_s > STUCK_AFTER_S
    ]
    found += [Finding(code=code, sentence=text) for code, text in sorted(facts.alarms.items())]
    return tuple(found)
