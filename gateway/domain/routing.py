"""Chooses the replica a request goes to, and what happens to a request that lost its replica.

It must not know endpoints, connections or clocks: the choice is total, so the same facts give the same
replica on every run.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Literal

from schemas.replica import Replica

Loss = Literal["refused_connection", "broke", "not_this_launch", "crashed", "stopped"]
"""How a request lost its replica before its first byte.

refused_connection  nobody answers at the endpoint
broke               the engine closed the connection or broke HTTP
not_this_launch     401: another launch, or something else, has the port
crashed             the log says the replica failed
stopped             the log says the replica was stopped or parked, on purpose
"""

Verdict = Literal["again", "engine_error"]

Why = Literal["least-loaded", "session", "prefix", "only", "adapter", "retried"]
"""Why a request went to its replica.

least-loaded  it had the least load for its weight
session       requests of its session go there
prefix        requests that begin alike go there
only          no other could be asked
adapter       for what it has loaded, or has room to load
retried       another one was lost before it answered
"""

NOBODY_ELSE: Final[Mapping[str, int]] = {}

SERVING_PHASES: Final = ("ready", "draining")
"""Phases in which an engine answers: only then a request, or a probe, says anything about it."""

MAX_PLANNED_MOVES = 8
"""A request moved this often by planned stops alone is given up; it only guards against a fault of ours."""


def choose(
    candidates: Sequence[Replica],
    inflight: Mapping[str, int],
    *,
    key: str,
    others: Mapping[str, int] = NOBODY_ELSE,
) -> Replica | None:
    """The replica with the least load for its weight, ties by rendezvous order of `key` and id.

    Load is what runs there of this gateway and what the others last told. It counts this request too: an idle
    replica of weight 3 comes before an idle one of weight 1, so that slow clients also see the shares that
    weights promise. None: there is no candidate.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return min(
        candidates, key=lambda r: (load_of(r, inflight, others), _rendezvous(key, r.id), r.id)
    )


def load_of(replica: Replica, inflight: Mapping[str, int], others: Mapping[str, int]) -> float:
    """What runs at a replica with one request more, for its weight."""
    running = inflight.get(replica.id, 0) + 1
    if others:
        running += others.get(replica.id, 0)
    weight = replica.weight
    return running / weight if weight > 1 else float(running)


@lru_cache(maxsize=4096)
def _rendezvous(key: str, replica_id: str) -> bytes:
    """Highest random weight, as bytes; each gateway prefers another replica among equals."""
    return blake2b(replica_id.encode(), key=key.encode()[:64], digest_size=8).digest()


def after_loss(loss: Loss, *, unplanned_before: int, planned_before: int) -> Verdict:
    """Whether a request without a byte goes back, given how often it already did.

    1. a planned stop is never the client's trouble: again (bounded only against a fault of ours)
    2. any other loss: again once. A second one may be the request itself killing engines.
    """
    if loss == "stopped":  # 1
        return "again" if planned_before < MAX_PLANNED_MOVES else "engine_error"
    return "again" if unplanned_before < 1 else "engine_error"  # 2


def loss_by_log(after: Replica | None, before: Replica) -> Loss | None:
    """What an event did to requests that run at `before` and have no byte yet; None: they stay.

    1. stopped, parked or gone: a parked engine is silent, and says nothing of what it was doing when it
       comes back. One that starts again under its id, or is ready for a second time, was parked between
    2. it failed
    3. another endpoint or another process under the same id is another launch
    4. a draining one finishes its requests, unless it is forced to go
    """
    if _goes_at_once(after):  # 4
        return "stopped"
    if after is None or after.phase not in (*SERVING_PHASES, "failed", "refused"):  # 1
        return "stopped"
    if after.phase in ("failed", "refused"):  # 2
        return "crashed"
    if (after.endpoint, after.pid, after.started_at) != (
        before.endpoint,
        before.pid,
        before.started_at,
    ):
        return "not_this_launch"  # 3
    return None if after.ready_at == before.ready_at else "stopped"  # 1, 4


def end_of_answers(after: Replica | None, replica_id: str) -> str | None:
    """Why an answer that has begun ends with this event, as a sentence for its client; None: it goes on.

    A parked engine would keep its stream open for ever, and what a dead one left ends with its
    connections anyway.
    """
    if after is None:
        return f"the engine {replica_id} is gone"
    if after.phase in SERVING_PHASES and not _goes_at_once(after):
        return None
    return _ended(after, replica_id)


def end_of_drain(known: Replica | None, replica_id: str) -> str | None:
    """Why a connection broke in the middle of an answer, as a sentence for its client; None: not known.

    A drain whose bound is over ends the engine, and the connection breaks before its event is here.
    """
    if known is None or known.phase != "draining":
        return None
    return _ended(known, replica_id)


def _ended(after: Replica, replica_id: str) -> str:
    done = _ENDED.get(after.phase, "was stopped")
    why = _WHY.get(after.reason, after.reason)
    return f"the engine {replica_id} {done}" + (f": {why}" if why else "")


def _goes_at_once(after: Replica | None) -> bool:
    return after is not None and after.phase == "draining" and after.forced


_ENDED: Final = {"failed": "failed", "parked": "was parked", "starting": "was parked"}

_WHY: Final = {
    "idle": "nobody used it any more",
    "drain": "its node is drained",
    "unload": "it was unloaded",
    "changed": "its model's entry was changed",
    "removed": "its model was removed",
    "scaled_down": "fewer replicas are wanted",
    "node": "its node is being stopped",
    "lost": "the yard knows nothing of it any more",
}
"""The words of `StopReason` that are told alone, for people who do not know them."""
