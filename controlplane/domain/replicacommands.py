"""Decides what `replica.park` and `replica.resume` do: one stop written or cleared, or a sentence why not.

The agent carries it out and may find that it cannot after all: it says so in the replica's events. A replica
parked by a person comes back as any other does: when somebody asks for its model.
"""

from typing import Final

from controlplane.domain import activation as moves
from controlplane.domain import catalog, departures, memory
from controlplane.domain.decision import Accepted, Change, Rejected
from controlplane.domain.found import Demand
from controlplane.domain.index import Planned
from controlplane.domain.judging import facts_of, judge_parked
from controlplane.domain.planedit import PlanEdit
from controlplane.domain.scene import ANY, Scene, is_demanded, is_off
from schemas import codes
from schemas.activation import ActivationPlacing, ActivationReady
from schemas.commands import ReplicaPark, ReplicaResume
from schemas.model import EngineName, Model, ParkWay, Profile
from schemas.plan import Stop
from schemas.replica import TERMINAL_PHASES, Replica

BY_ITSELF: Final[dict[EngineName, ParkWay]] = {"vllm": "sleep"}
"""The way engines are parked whose profile says nothing of it; others are stopped."""


def decide(scene: Scene, actor: str, body: ReplicaPark | ReplicaResume) -> Accepted | Rejected:
    """Cases: 1 no such replica, or it has ended; 2 its node is not heard; 3 see `_park` and `_resume`."""
    id_ = body.replica
    replica = scene.world.replicas.get(id_)
    planned = scene.index.items.get(id_)
    if replica is None or planned is None:  # 1
        if replica is not None and replica.phase in TERMINAL_PHASES:
            return _conflict(f"{id_} has ended ({replica.phase}): {_what_then(replica.model)}")
        if planned is not None:
            return _conflict(f"{id_} is planned on {planned.node} and was not started yet")
        return Rejected(
            code=codes.NOT_FOUND,
            sentence=f"there is no replica {id_!r}; `yardctl replica list` shows them",
        )
    if replica.phase in TERMINAL_PHASES:
        return _conflict(f"{id_} has ended ({replica.phase}): {_what_then(replica.model)}")
    state = scene.world.nodestates.get(planned.node)
    node = scene.world.nodes.get(planned.node)
    if node is None or not node.running or (state is not None and state.reach != "reachable"):  # 2
        why = state.reach if state is not None and state.reach != "reachable" else "not running"
        return _conflict(
            f"the agent of {planned.node} is {why}: nobody there could do it; try again when "
            "`yardctl node list` shows it"
        )
    if isinstance(body, ReplicaPark):  # 3
        return _park(scene, actor, planned, replica)
    return _resume(scene, actor, planned, replica)


def _park(scene: Scene, actor: str, planned: Planned, replica: Replica) -> Accepted | Rejected:
    """Drains and parks a ready replica, and ends its demand:

    1. it is parked or being parked already: nothing to do; 2. it is not ready;
    3. neither its engine, its profile nor its node has a way;
    4. its model's `min` needs it: another would be started at once.
    """
    stop = planned.item.stop
    if replica.phase == "parked" and scene.hold(planned) == "parked":  # 1
        return Accepted(sentence=f"{replica.id} is parked already")
    if stop is not None and stop.park == "must" and replica.phase in ("ready", "draining"):
        return Accepted(sentence=f"{replica.id} is being parked already")
    if scene.hold(planned) != "ready":  # 2
        return _conflict(
            f"{replica.id} is {_standing(scene, planned, replica)}; only a ready one can be parked"
        )
    cannot = _cannot_park(scene, planned, replica)  # 3
    if cannot:
        return Rejected(code=codes.CANNOT_PARK, sentence=cannot)
    model = scene.world.models.get(replica.model)
    ready = [p for p, hold in scene.holds_of(replica.model) if hold == "ready"]
    if model is not None and scene.profile_of(planned) is not None:  # 4
        left = sum(scene.profile_of(p) is not None for p in ready) - 1
        if left < model.scaling.min:
            return _conflict(
                f"{model.name} keeps {model.scaling.min} running (min) and {left} would be left; "
                f"`yardctl model scale {model.name} --min {left} --max {model.scaling.max}` first"
            )
    edit = PlanEdit(world=scene.world)
    timeout_s = scene.settings.drain_timeout_s
    edit.stop(
        planned,
        Stop(
            decision=scene.ids.decision(),
            reason="park",
            decided_at=scene.now,
            drain_timeout_s=timeout_s,
            take_back=True,
            park="must",
        ),
    )
    why = f"parked by {actor}"
    changes = list(edit.changes(why))
    if model is not None:
        gone = {replica.id}
        changes.extend(departures.withdrawn_from(scene, model, ready, gone, "park", why))
    return Accepted(
        changes=tuple(changes),
        sentence=f"{replica.id} on {planned.node} finishes its requests and is parked; with some still running "
        f"after {timeout_s:g} s it serves on",
        refs=(scene.world.subject("replica", planned.node, replica.id),),
    )


def _cannot_park(scene: Scene, planned: Planned, replica: Replica) -> str:
    """Why there is no way to park it, and what would give it one; empty when there is.

    1. it is on no gpu; 2. profile and engine have none; 3. its node has not the way they have.
    """
    launch = planned.item.launch
    node = scene.world.nodes[planned.node]
    told = {engine.name: engine.park_ways for engine in node.engines}
    ways = told.get(launch.engine, ())
    way = launch.parking.way if launch.parking is not None else BY_ITSELF.get(launch.engine, "none")
    name = f"{replica.id} ({launch.engine})"
    if replica.card_kind != "gpu":  # 1
        return f"{name} runs on {'+'.join(planned.item.cards)}: what it uses is RAM already; unload {replica.model} to stop it"
    if way == "none":  # 2
        return (
            f"{name}: neither its engine nor profile {launch.profile} has a way to park it; give the "
            f"profile a `parking:` way, or unload {replica.model}"
        )
    if way not in ways:  # 3
        has = f"its ways are {', '.join(ways)}" if ways else "it has none"
        allows = (
            "" if way != "command" or node.allow_commands else " (allow_commands is false there)"
        )
        return f"{name}: {node.id} cannot park it by {way}, {has}{allows}; unload {replica.model} to stop it"
    return ""


def _resume(scene: Scene, actor: str, planned: Planned, replica: Replica) -> Accepted | Rejected:
    """Brings a parked replica back, as a use of its model:

    1. it answers or is on its way back already; 2. it is not parked;
    3. it is not what the entry asks for any more; 4. as many as may run do;
    5. its cards are not to be had now; 6. its stop is cleared and the demand follows it.
    """
    hold = scene.hold(planned)
    if hold == "ready":  # 1
        return Accepted(sentence=f"{replica.id} is ready already")
    if hold == "pending" and replica.was_ready:
        return Accepted(sentence=f"{replica.id} is on its way back already")
    if hold != "parked":  # 2
        return _conflict(f"{replica.id} is {_standing(scene, planned, replica)}, not parked")
    model = scene.world.models.get(replica.model)
    if model is None:  # 3
        return catalog.not_found(scene.world.models, replica.model)
    if is_off(model):
        return _conflict(f"{model.name} is off (max 0); scale it up first")
    profile = scene.profile_of(planned)
    if profile is None:
        return _conflict(
            f"{replica.id} was started from an older entry of {model.name}; {_what_then(model.name)}"
        )
    running = [
        p
        for p, h in scene.holds_of(model.name)
        if h in ("ready", "pending") and scene.profile_of(p) is not None
    ]
    if len(running) >= model.scaling.max:  # 4
        ids = ", ".join(p.item.replica for p in running)
        return _conflict(
            f"{model.name} runs {len(running)} of at most {model.scaling.max} already ({ids}); "
            "park one of them first, or scale up"
        )
    refused = _not_to_be_had(scene, model, planned)  # 5
    if refused is not None:
        return refused
    return _back(scene, actor, model, profile, planned, replica, len(running) + 1)  # 6


def _not_to_be_had(scene: Scene, model: Model, planned: Planned) -> Rejected | None:
    """5. Why it cannot have its own cards back at once, whatever others there are; None when it can."""
    where = f"{planned.node}/{'+'.join(planned.item.cards)}"
    demand = Demand(model=model, wanted_at=scene.now)
    found = None
    if not scene.frozen:
        found = judge_parked(scene, facts_of(scene, demand, ()), planned)
    if found is not None and found.rank == 1:
        return None
    why = scene.frozen or (found.reason if found is not None else "its cards are gone")
    return Rejected(
        code=codes.CARD_KEPT if found is not None and found.kept else codes.CONFLICT,
        sentence=f"{planned.item.replica} cannot come back to {where} now: {why}",
    )


def _back(
    scene: Scene,
    actor: str,
    model: Model,
    profile: Profile,
    planned: Planned,
    replica: Replica,
    count: int,
) -> Accepted:
    edit = PlanEdit(world=scene.world)
    edit.resume(planned)
    why = f"resumed by {actor}"
    changes: list[Change] = list(edit.changes(why))
    known = scene.world.activations.get((model.name, ANY))
    live = known if known is not None and is_demanded(known, model) else None
    if live is not None and live.phase == "ready":
        changes.append(
            moves.move(
                live,
                ActivationReady(replica=live.replica or ""),
                scene.now,
                why,
                replicas=max(live.replicas, count),
                wanted_at=scene.now,
            )
        )
    else:
        back_s = memory.expected_resume_s(
            scene.world.records.get(model.name), profile.name, replica.card_kind
        )
        wanted = live or moves.opened(model.name, model.incarnation, ANY, scene.now, known)
        changes.append(
            moves.move(
                wanted,
                ActivationPlacing(replica=replica.id),
                scene.now,
                why,
                is_new=known is None,
                replica=replica.id,
                node=planned.node,
                profile=profile.name,
                replicas=max(wanted.replicas, count),
                expected_ready_at=None if back_s is None else scene.after(back_s),
            )
        )
    amount = memory.amount(replica.ram_bytes) if replica.ram_bytes else "its memory"
    return Accepted(
        changes=tuple(changes),
        sentence=f"{replica.id} comes back to {planned.node}/{'+'.join(planned.item.cards)}, {amount} from RAM",
        refs=(scene.world.subject("replica", planned.node, replica.id),),
    )


def _standing(scene: Scene, planned: Planned, replica: Replica) -> str:
    """How a replica that is neither ready nor parked stands, in words."""
    hold = scene.hold(planned)
    if hold == "away":
        return f"on {planned.node}, which is not heard"
    if hold == "stopping" and replica.phase in ("ready", "draining"):
        return "on its way out"
    if hold == "pending" and replica.phase in ("parked", "draining"):
        return "on its way back"
    return replica.phase.replace("_", " ")


def _what_then(model: str) -> str:
    return f"`yardctl model load {model}` starts another"


def _conflict(sentence: str) -> Rejected:
    return Rejected(code=codes.CONFLICT, sentence=sentence)
