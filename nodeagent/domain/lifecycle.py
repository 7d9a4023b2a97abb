"""Says which event may follow which phase of a replica, and which phase it leads to.

The table is the whole truth about a replica's life: every append is checked against it, and the
diagram of the documentation is drawn from it. It decides nothing else and asks no clock.
"""

from typing import Final

from schemas.replica import ReplicaPhase

TRANSITIONS: Final[dict[tuple[ReplicaPhase | None, str], ReplicaPhase]] = {
    # Nothing was said about this replica yet.
    (None, "replica.waiting"): "waiting",
    (None, "replica.refused"): "refused",
    (None, "replica.withdrawn"): "withdrawn",
    (None, "replica.fetching"): "fetching",
    (None, "replica.starting"): "starting",
    (None, "replica.failed"): "failed",
    ("waiting", "replica.waiting"): "waiting",
    ("waiting", "replica.starting"): "starting",
    ("waiting", "replica.fetching"): "fetching",
    ("waiting", "replica.refused"): "refused",
    ("waiting", "replica.withdrawn"): "withdrawn",
    ("fetching", "replica.fetching"): "fetching",
    ("fetching", "replica.starting"): "starting",
    ("fetching", "replica.withdrawn"): "withdrawn",
    ("fetching", "replica.failed"): "failed",
    # The engine loads. The same event again tells of a new agent that adopted it.
    ("starting", "replica.starting"): "starting",
    ("starting", "replica.ready"): "ready",
    ("starting", "replica.failed"): "failed",
    ("starting", "replica.stopped"): "stopped",
    ("starting", "replica.stop_failed"): "stop_failed",
    # The engine serves. Ready again: measured, adopted, or taken back.
    ("ready", "replica.ready"): "ready",
    ("ready", "replica.draining"): "draining",
    ("ready", "replica.failed"): "failed",
    ("ready", "replica.stopped"): "stopped",
    ("ready", "replica.stop_failed"): "stop_failed",
    ("draining", "replica.draining"): "draining",
    ("draining", "replica.ready"): "ready",
    ("draining", "replica.parked"): "parked",
    ("draining", "replica.failed"): "failed",
    ("draining", "replica.stopped"): "stopped",
    ("draining", "replica.stop_failed"): "stop_failed",
    # Its process lives and its card is given back. Parked again: it was to return and has no room, or is
    # told again. It returns as it began: nobody is sent there before it answered.
    ("parked", "replica.parked"): "parked",
    ("parked", "replica.starting"): "starting",
    ("parked", "replica.failed"): "failed",
    ("parked", "replica.stopped"): "stopped",
    ("parked", "replica.stop_failed"): "stop_failed",
    # Processes of the group outlived the kill; the lease stays until they are gone.
    ("stop_failed", "replica.stop_failed"): "stop_failed",
    ("stop_failed", "replica.stopped"): "stopped",
    ("stop_failed", "replica.failed"): "failed",
}
"""(phase, event tag) -> phase. Terminal phases have no way out but the tombstone."""


class NotAllowed(Exception):
    """An event was about to be written that cannot follow the replica's phase: a bug of the agent."""


def next_phase(phase: ReplicaPhase | None, tag: str) -> ReplicaPhase:
    """The phase after the event `tag`. Raises NotAllowed when the table has no such step."""
    after = TRANSITIONS.get((phase, tag))
    if after is None:
        raise NotAllowed(f"{tag} cannot follow {phase or 'nothing'}")
    return after
