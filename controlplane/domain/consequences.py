"""Says in lines for a person what changes of the catalog will start, drain and stop.

It only describes; the reconciler decides by itself from the same facts, and may find that there is no
room.
"""

from collections.abc import Iterable, Mapping

from controlplane.domain.decision import Change
from controlplane.domain.quantities import show_seconds
from controlplane.domain.revision import profile_revision
from schemas.model import Model, ModelChanged, Scaling
from schemas.replica import TERMINAL_PHASES, Replica


def describe(
    models: Mapping[str, Model], changes: Iterable[Change], replicas: Iterable[Replica]
) -> tuple[str, ...]:
    """One line per changed model, in order, and one per replica that will drain or stop.

    `models` is the catalog before the changes, `replicas` all that are known.
    """
    running: dict[str, list[Replica]] = {}
    for replica in sorted(replicas, key=lambda r: r.id):
        if replica.phase not in TERMINAL_PHASES:
            running.setdefault(replica.model, []).append(replica)
    lines: list[str] = []
    for change in changes:
        if change.noun != "model":
            continue
        name = change.key[0]
        here = running.get(name, [])
        if not isinstance(change.state, Model):
            lines.append(f"{name}: removed")
            lines.extend(f"  {r.id} on {r.node} {_goes(r)}" for r in here)
            continue
        if isinstance(change.event, ModelChanged):
            lines.append(f"{name}: changed ({', '.join(change.event.fields)})")
        else:
            lines.append(f"{name}: added, {mode(change.state.scaling)}")
        lines.extend(_of_change(models.get(name), change.state, here))
    return tuple(lines) or ("nothing changes",)


def _goes(replica: Replica) -> str:
    return "is parked, and stops" if replica.phase == "parked" else "drains and stops"


def mode(scaling: Scaling) -> str:
    """What the limits of a model mean, in words."""
    if scaling.max == 0:
        return "off"
    idle = (
        f"given back after {show_seconds(scaling.idle_timeout_s)} without use"
        if scaling.idle_timeout_s > 0
        else "never given back"
    )
    if scaling.min == 0:
        return f"on demand, up to {scaling.max}, {idle}"
    if scaling.min == scaling.max:
        return f"{scaling.min} kept running"
    return f"{scaling.min} kept running, up to {scaling.max}, {idle}"


def _of_change(old: Model | None, new: Model, here: list[Replica]) -> list[str]:
    lines: list[str] = []
    current = {profile_revision(new, profile) for profile in new.profiles}
    kept: list[Replica] = []
    parked = 0
    for replica in here:
        if replica.revision not in current or replica.incarnation != new.incarnation:
            lines.append(f"  {replica.id} on {replica.node} {_goes(replica)}: its profile changed")
        elif replica.phase == "parked":
            parked += 1
        else:
            kept.append(replica)
    # Which of the kept ones go is the reconciler's choice; how many is not.
    surplus = len(kept) - new.scaling.max
    if surplus > 0:
        lines.append(
            f"  {surplus} of {len(kept)} replicas drain and stop: max is {new.scaling.max}"
        )
    copies = min(parked, max(len(kept) + parked - new.scaling.max, 0))
    if copies > 0:
        lines.append(f"  {copies} of {parked} parked copies stop: max is {new.scaling.max}")
    missing = new.scaling.min - min(len(kept), new.scaling.max)
    if missing > 0:
        lines.append(f"  {missing} to start")
    if old is not None and old.scaling != new.scaling:
        lines.append(f"  now {mode(new.scaling)}")
    return lines
