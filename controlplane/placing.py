"""Answers where a replica of a model would go, and why not elsewhere, without changing anything.

It judges with the leader's own functions on the world as this instance knows it; any instance can, whether it
leads or not. Nothing is reserved: the next moment may answer otherwise.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec import Struct

from controlplane.domain import placement, record, standing
from controlplane.domain.decision import Ids, Live
from controlplane.domain.index import StepIndex
from controlplane.domain.placement import Claims, Demand, Placed, Wait
from controlplane.domain.reconcile import within_max
from controlplane.domain.scene import ANY, Scene, in_scope, is_demanded, is_off
from controlplane.domain.shortage import claims_before
from controlplane.domain.world import World
from controlplane.projections.readmodel import NotSynced
from schemas.activation import PENDING_PHASES, Activation
from schemas.api import PlaceView
from schemas.cardnames import scope_of
from schemas.model import Model
from schemas.placement import Candidate
from schemas.settings import ControlplaneSettings


class PlaceAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/place`. `card` is `node/card`; None: as a plain request asks."""

    model: str
    card: str | None = None


class NotThere(Exception):
    """There is no such model or card; the text says which."""


class Placer:
    """Dry runs of one instance. `world`, `live` and `synced` are what it knows at the moment of asking."""

    def __init__(
        self,
        *,
        world: Callable[[], World],
        live: Callable[[], Live],
        synced: Callable[[], bool],
        ids: Ids,
        settings: ControlplaneSettings,
        now: Callable[[], datetime],
    ) -> None:
        self._world = world
        self._live = live
        self._synced = synced
        self._ids = ids
        self._settings = settings
        self._now = now
        self._turn = asyncio.Lock()

    async def place(self, asked: PlaceAsked) -> PlaceView:
        """Every candidate, best first. Raises NotThere, and NotSynced while the log is not read.

        One at a time, and with breaths: in a yard of thousands of cards it takes a second, and the leader
        must say meanwhile that it lives.
        """
        async with self._turn:
            if not self._synced():
                raise NotSynced("this control plane is not up to date with the log")
            _model(self._world(), asked.model)
            # An index of its own: the leader's holds what the leader has yet to look at.
            index = StepIndex()
            index.sync(self._world())
            await asyncio.sleep(0)
            index.sync(self._world())
            index.book(self._world())
            await asyncio.sleep(0)
            return self._judged(asked, index)

    def _judged(self, asked: PlaceAsked, index: StepIndex) -> PlaceView:
        scene = self._scene(index)
        model = _model(scene.world, asked.model)
        scope = ANY if asked.card is None else _scope(scene.world, asked.card)
        demand = _demand(scene, model, scope)
        claims = Claims() if scene.frozen else claims_before(scene, demand) or Claims()
        found = placement.candidates(scene, demand, claims)
        return PlaceView(
            model=model.name,
            scope=scope,
            sentence=sentence(scene, demand, found, _first_to_go(scene, demand, claims)),
            candidates=found,
            position=scene.world.position,
            policy_version=placement.POLICY_VERSION,
        )

    def _scene(self, index: StepIndex) -> Scene:
        world, live = self._world(), self._live()
        index.sync(world)
        scene = Scene(
            world=world,
            live=live,
            now=self._now(),
            ids=self._ids,
            settings=self._settings,
            index=index,
        )
        scene.frozen = standing.suspicion(scene)
        return scene


def sentence(
    scene: Scene, demand: Demand, found: tuple[Candidate, ...], first_to_go: Sequence[str] = ()
) -> str:
    """What would come of a request now.

    1. one answers already, or is on its way; 2. the model is off; 3. placement is frozen; 4. given up or in
    backoff; 5. nothing fits; 6. it waits behind who keeps the cards; 7. the best candidate, once one of
    `first_to_go` made way.
    """
    model = demand.model
    here = in_scope(scene.holds_of(model.name), demand.scope)  # 1
    serving = [planned.item.replica for planned, hold in here if hold == "ready"]
    if serving:
        return f"{model.name} is up: {serving[0]} answers; another replica would find this:"
    coming = [planned for planned, hold in here if hold == "pending"]
    if coming:
        item = coming[0].item
        where = f"{item.replica} on {coming[0].node}/{'+'.join(item.cards)}"
        return f"{model.name} is on its way: {where}; another replica would find this:"
    if is_off(model):  # 2
        return f"{model.name} is off and no request starts it; if it were on:"
    if scene.frozen:  # 3
        return scene.frozen
    held_back = record.hold_back(scene.world.records.get(model.name), scene.now)
    if held_back is not None:  # 4
        return f"{model.name} is not started now: {held_back.reason} [{held_back.code}]"
    best = found[0] if found and found[0].rank is not None else None
    if best is None:  # 5
        reasons = dict.fromkeys(one.reason for one in found if one.reason)
        return f"{model.name} fits nowhere: {'; '.join(list(reasons)[:3]) or 'there is no card'}"
    where = f"{best.node}/{'+'.join(best.cards)}"
    if best.rank == 5:  # 6
        return f"{model.name} would wait for {where}: {best.reason}"
    first = f" once {' or '.join(first_to_go)} made way (max {model.scaling.max})"
    rank = f"(rank {best.rank}, {best.profile}){first if first_to_go else ''}"
    return f"{model.name} would go to {where} {rank}: {best.reason}"  # 7


def _model(world: World, name: str) -> Model:
    found = world.models.get(name)
    if found is None:
        found = next((m for m in world.models.values() if name in m.aliases), None)
    if found is None:
        raise NotThere(f"there is no model {name!r}")
    return found


def _scope(world: World, card: str) -> str:
    node, _, id_ = card.rpartition("/")
    known = world.nodes.get(node)
    if known is None or all(info.id != id_ for info in known.cards):
        raise NotThere(f"there is no card {card!r}")
    return scope_of(node, id_)


def _demand(scene: Scene, model: Model, scope: str) -> Demand:
    """The demand that is there already, else one that begins now."""
    asks: Activation | None = scene.world.activations.get((model.name, scope))
    if asks is not None and asks.phase in PENDING_PHASES and is_demanded(asks, model):
        return Demand(model=model, wanted_at=asks.wanted_at, scope=scope, activation=asks)
    return Demand(model=model, wanted_at=scene.now, scope=scope, fresh=True)


def _first_to_go(scene: Scene, demand: Demand, claims: Claims) -> tuple[str, ...]:
    """The model's own replicas on other cards, one of which makes way: `max` has no room for one more."""
    if demand.scope == ANY:
        return ()
    verdict = placement.place(scene, demand, claims)
    if not isinstance(verdict, Placed | Wait):
        return ()
    bounded = within_max(scene, demand, verdict)
    return bounded.waiting_for if bounded is not verdict else ()
