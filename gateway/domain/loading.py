"""Tells how far the start of a model is, in one step's name and a percentage, from what the gateway knows anyway.

It decides nothing: nobody is answered, woken or refused by it. Pure.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

from gateway.domain.table import Table
from schemas.progress import FileProgress
from schemas.replica import Replica

Step = Literal["asking", "placing", "waiting", "fetching", "starting", "resuming", "checking"]
"""What is being done for a model that somebody waits for.

asking    the control plane is asked for it
placing   a card is chosen
waiting   others leave that card first
fetching  its files are on their way to the node
starting  its engine loads
resuming  its engine was parked and comes back
checking  its engine is there; whether it answers is being looked at
"""

NEARLY: Final = 99
"""What is only estimated never says that it is done."""

PARAMETER: Final = b"loading=stream"

_OF_PHASE: Final[Mapping[str, Step]] = {
    "waiting": "waiting",
    "fetching": "fetching",
    "starting": "starting",
    "parked": "resuming",
    "ready": "checking",
    "draining": "checking",
}
_WITHOUT_REPLICA: Final[Mapping[str, Step]] = {"placing": "placing", "waiting": "waiting"}
_ON_ITS_WAY: Final = ("starting", "fetching", "waiting", "parked", "ready")
"""The phases of a replica that may be the one to come, the furthest first."""


class Progress(Struct, frozen=True, kw_only=True):
    """Where the start of a model is; `percent` None: nothing is known to measure it by."""

    step: Step
    percent: int | None = None

    def comment(self, elapsed_s: float) -> bytes:
        """A comment of an event stream, which every reader of one skips."""
        percent = "" if self.percent is None else f" percent={self.percent}"
        text = f": loading step={self.step}{percent} elapsed_s={int(elapsed_s)}\n\n"
        return text.encode("ascii")


def progress(
    table: Table, model: str, scope: str, fetched: Mapping[str, FileProgress], now: datetime
) -> Progress:
    """Where the start of `model` for `scope` is at `now`; `fetched` is the last heard of each replica's files.

    1. nobody decided yet, or a place is sought: no replica is there to speak of
    2. files on their way: their share of bytes, when it was heard
    3. an engine that loads: the share of the time measured loads took, when there were any
    4. anything else is a step without a measure
    """
    activation = table.activation(model, scope).activation
    phase = None if activation is None else activation.phase
    replica = _coming(table, model, scope, None if activation is None else activation.replica)
    if activation is None or phase in ("wanted", "idle", "refused") or replica is None:  # 1
        return Progress(step=_WITHOUT_REPLICA.get(phase or "", "asking"))
    step: Step = _OF_PHASE.get(replica.phase, "asking")
    if step == "fetching":  # 2
        heard = fetched.get(replica.id)
        if heard is None or heard.total_bytes <= 0:
            return Progress(step=step)
        return Progress(step=step, percent=min(100, 100 * heard.bytes // heard.total_bytes))
    if step == "starting" and activation.expected_ready_at is not None:  # 3
        began = max(replica.since, activation.since)
        whole_s = (activation.expected_ready_at - began).total_seconds()
        if whole_s > 0:
            share = (now - began).total_seconds() / whole_s
            return Progress(step=step, percent=max(0, min(NEARLY, int(100 * share))))
    return Progress(step=step)  # 4


def _coming(table: Table, model: str, scope: str, named: str | None) -> Replica | None:
    """The replica that is waited for: the activation's, else the furthest of those there are."""
    found = None if named is None else table.replicas.get(named)
    if found is not None and found.phase in _OF_PHASE:
        return found
    coming = [r for r in table.replicas_of(model, scope) if r.phase in _ON_ITS_WAY]
    return min(coming, key=lambda r: (_ON_ITS_WAY.index(r.phase), r.id), default=None)


def without_parameter(query: bytes) -> bytes:
    """The query as an engine gets it: what was asked of the gateway alone is taken out."""
    return b"&".join(part for part in query.split(b"&") if part != PARAMETER)
