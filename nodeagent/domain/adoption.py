"""Decides what becomes of a replica an earlier agent left: kept, begun again, declared gone, or killed.

It compares three witnesses: what is remembered (journal, else log), what the log says, and which process
was found. It looks at nothing itself.
"""

from typing import Literal

from nodeagent.domain.held import Held
from schemas.plan import Plan
from schemas.replica import TERMINAL_PHASES, Replica

Found = Literal["running", "ended", "nothing"]
"""A living engine of this launch id; one that is over; no trace that it was ever started."""

Fate = Literal["keep", "launch", "gone", "kill", "rest"]


def fate(held: Held | None, told: Replica | None, found: Found) -> Fate:
    """What becomes of one replica id.

    1. the log says it is over, or nobody knows it or it ended, and yet it runs: killed.
    2. remembered as alive and running: kept. Not one that only fetches: what runs there nobody knows.
    3. remembered as fetching or starting, and no process was ever begun: gone on with, the id is unused.
    4. remembered as in line for its cards: it waits on, and was never started.
    5. remembered as alive, and it is over: gone.
    6. else nothing is to be done.
    """
    over = held is None or held.replica.phase in TERMINAL_PHASES
    if told is not None and told.phase in TERMINAL_PHASES:
        over = True
    if over:
        return "kill" if found == "running" else "rest"  # 1, 6
    assert held is not None
    if found == "running" and held.replica.phase != "fetching":
        return "keep"  # 2
    starts = held.replica.phase in ("fetching", "starting")
    # One that comes back from being parked began long ago.
    comes_back = held.resuming or bool(held.replica.park_way)
    never_began = found == "nothing" and starts and not comes_back
    if never_began and held.launch is not None and not held.ending:
        return "launch"  # 3
    if held.replica.phase == "waiting" and found == "nothing":
        return "rest"  # 4
    return "gone"  # 5


def remembered(told: Replica, port: int, plan: Plan | None) -> Held:
    """What an agent without a journal knows of a replica: the log's word and the plan's item."""
    items = plan.items if plan is not None else ()
    item = next((item for item in items if item.replica == told.id), None)
    return Held(
        replica=told,
        launch=item.launch if item is not None else None,
        port=port or port_of(told.endpoint),
        cause=item.cause if item is not None else "",
        stop=item.stop if item is not None and told.phase == "draining" else None,
    )


def port_of(endpoint: str | None) -> int:
    """The port at the end of a base URL, 0 when it names none."""
    tail = (endpoint or "").rsplit(":", 1)[-1].strip("/")
    return int(tail) if tail.isdecimal() else 0
