"""Decides what happens to a request for a model: routed, made to wait, or told why not.

Pure: facts and `now` in, a value out; the shell routes, joins or answers. It must not choose the
replica (routing.py) nor whether a wish is sent (demand.py).
"""

from datetime import datetime
from typing import Final, assert_never

from msgspec import Struct

from gateway.domain.adapteranswers import not_served_now
from gateway.domain.adaptertable import AdapterEntry
from gateway.domain.answers import (
    Answer,
    answer,
    backoff_left_s,
    leaving,
    load_left_s,
    measured_load_s,
    no_room_at_all,
)
from gateway.domain.cards import CardRef
from gateway.domain.demand import is_pending, is_refused
from gateway.domain.oncards import is_served, missing_card, no_card_of, not_served
from gateway.domain.places import OURS
from gateway.domain.table import ActivationEntry, Table
from schemas.activation import Activation
from schemas.cardnames import ANY_SCOPE
from schemas.codes import RefusalCode
from schemas.model import Model
from schemas.replica import Replica

ON_ITS_WAY: Final = frozenset({"waiting", "fetching", "starting"})
"""Phases of a replica that will be ready next; `waiting`: its agent makes room for it."""


class Route(Struct, frozen=True, kw_only=True):
    """One of these: by routing.choose, or by adapters.choose for an adapter of the model."""

    model: Model
    candidates: tuple[Replica, ...]
    adapter: AdapterEntry | None = None


class Wait(Struct, frozen=True, kw_only=True):
    """Join the waiting room of (model, scope); `adapter` as in Route."""

    model: Model
    scope: str = ANY_SCOPE
    adapter: AdapterEntry | None = None


class Standing(Struct, frozen=True, kw_only=True):
    """What the gateway knows of itself. `synced`: the table holds the whole log, not a snapshot.

    `ejected` are replicas that did not answer this gateway as they should; they are tried again by
    its own probe, not by requests.
    """

    synced: bool
    connected: bool
    draining: bool = False
    ejected: frozenset[str] = frozenset()


def admit(
    table: Table | None,
    name: str,
    path: str,
    standing: Standing,
    now: datetime,
    *,
    on: CardRef | None = None,
) -> Route | Wait | Answer:
    """What happens to a request for `path` that names `name`, under the base URL of the card `on`.

    1. this gateway is stopping: `draining`
    2. there is no table: `yard_unavailable`
    3. no such card, or no model, adapter or alias of that name: `card_not_found`, `model_not_found`,
       which only a synced table can say. An adapter is asked for as a use of its base: one that no
       replica may load (yet) is told so, and starts nothing
    4. the model is off: `model_off`, and never anything that could start it
    5. a ready replica (on that card) that answers this gateway and publishes the path: routed; when it
       is only the path that is missing, waiting would not help: `endpoint_not_supported`, and
       `route_not_forwarded` for what is no endpoint of the gateway's; `yard_unavailable` where one has it that
       does not answer. For an adapter only those that load some
    6. the model was given up or refused, and that stands: that code, at once
    7. it is being brought up: wait
    8. NATS is away, so nobody can be asked to start it: `yard_unavailable`, unless a replica is
       ready that only does not answer this gateway: a probe may bring it back at any moment
    9. the model has no profile for that card: `model_not_found`, as the card's own list says
    10. wait, and ask for it
    """
    if standing.draining:  # 1
        return leaving()
    if table is None:  # 2
        return answer(
            "yard_unavailable",
            "This gateway has not read the yard's catalog yet; try again shortly.",
        )
    scope = ANY_SCOPE
    if on is not None:
        missing = missing_card(table, on, synced=standing.synced)
        if missing is not None:  # 3
            return missing
        scope = on.scope
    model = table.model(name)
    adapter: AdapterEntry | None = None
    if model is None:  # 3
        adapter = table.adapter(name)
        if adapter is None:
            return unknown(name, synced=standing.synced)
        model = table.base_of(adapter)
        off = model is not None and model.scaling.max == 0
        told = None if off else not_served_now(adapter, model, name, now)
        if told is not None:
            return told
        assert model is not None, "an adapter without its base is not served"
    if model.scaling.max == 0:  # 4
        return _off(model.name)
    there = table.routable(model.name, scope)
    if adapter is not None:
        there = tuple([r for r in there if r.adapter_slots > 0])
    ready = there
    if standing.ejected:
        ready = tuple(r for r in there if r.id not in standing.ejected)
    if ready:  # 5
        publishing = tuple([r for r in ready if path in r.paths])
        if not publishing:
            has_it = any(path in r.paths for r in there)
            return out_of_reach(model.name) if has_it else _not_published(model.name, path)
        return Route(model=model, candidates=publishing, adapter=adapter)
    entry = table.activation(model.name, scope)
    refused = standing_refusal(table, model.name, entry, now)
    if refused is not None:  # 6
        return refused
    if is_pending(entry):  # 7
        return Wait(model=model, scope=scope, adapter=adapter)
    reachable = table.routable(model.name, scope)
    if not standing.connected and not reachable:  # 8
        return unavailable(model.name)
    if not reachable and not is_served(table, model, scope):  # 9
        return not_served(model.name, scope)
    return Wait(model=model, scope=scope, adapter=adapter)  # 10


class Release(Struct, frozen=True, kw_only=True):
    """Everybody who waits for the model goes on."""


class Refuse(Struct, frozen=True, kw_only=True):
    """Whoever joined before the event `decided_at` gets `answer`; None: everybody."""

    answer: Answer
    decided_at: int | None


class Keep(Struct, frozen=True, kw_only=True):
    """They wait on."""


def settle(
    table: Table, name: str, standing: Standing, now: datetime, *, scope: str = ANY_SCOPE
) -> Release | Refuse | Keep:
    """What a change of the table means for those who wait for model `name` in a scope.

    1. the model was removed, or switched off, or the card is not (any more) there: said at once
    2. a replica of the scope is ready that answers this gateway: they go on
    3. its activation was refused after they joined: that is the answer to their wish
    4. otherwise they wait on
    """
    entry = table.models.get(name)
    if entry is None:  # 1
        return Refuse(answer=unknown(name, synced=standing.synced), decided_at=None)
    if entry.model.scaling.max == 0:
        return Refuse(answer=_off(name), decided_at=None)
    if scope != ANY_SCOPE and table.nodes and not table.may_ask_for(scope):
        return Refuse(answer=no_card_of(scope), decided_at=None)
    if any(r.id not in standing.ejected for r in table.routable(name, scope)):  # 2
        return Release()
    head = table.activation(name, scope)
    if head.activation is not None and head.activation.phase == "refused":  # 3
        return Refuse(answer=refusal(table, head.activation, now), decided_at=head.seq)
    return Keep()  # 4


def ends_the_wait(table: Table, failed: Replica, *, scope: str = ANY_SCOPE) -> bool:
    """Whether those who wait for the model in a scope waited for this start.

    It is of that scope and never was ready, and no other of the scope starts. A parked one that could
    not be resumed was ready before: a cold start follows it, which they wait for.
    """
    was_ready = failed.was_ready or failed.code in ("resume_failed", "parked_lost")
    if was_ready or not table.is_on(failed, scope):
        return False
    others = (r for r in table.replicas_of(failed.model, scope) if r.id != failed.id)
    return not any(r.phase in ON_ITS_WAY for r in others)


def failed_start(table: Table, failed: Replica, now: datetime, *, scope: str = ANY_SCOPE) -> Answer:
    """What those hear who waited for `failed` to start, when the control plane says nothing better."""
    reason = failed.last_line or failed.reason or failed.code or "the engine ended"
    activation = table.activation(failed.model, scope).activation
    left_s = backoff_left_s(activation, table.record(failed.model), now)
    return start_failed(failed.model, reason, retry_s=left_s)


def _off(name: str) -> Answer:
    return answer(
        "model_off",
        f"The model {name!r} is configured and switched off (max 0); an operator can switch it on.",
        param="model",
    )


def _not_published(name: str, path: str) -> Answer:
    told = f"The engine of the model {name!r} does not serve {path}"
    if path in OURS:
        return answer("endpoint_not_supported", f"{told}; the gateway translates nothing.")
    return answer("route_not_forwarded", f"{told}.")


def out_of_reach(model: str) -> Answer:
    return answer(
        "yard_unavailable",
        f"The model {model!r} is running, but its engine does not answer this gateway; "
        "try again shortly.",
    )


def unknown(name: str, *, synced: bool) -> Answer:
    """No such name; from a snapshot it may only be that the name is newer than the snapshot."""
    if not synced:
        return answer(
            "yard_unavailable",
            f"The model {name!r} is not in the catalog this gateway remembers, and the yard's log "
            "cannot be read now; try again shortly.",
        )
    return answer("model_not_found", f"The model {name!r} does not exist.", param="model")


def unavailable(model: str) -> Answer:
    return answer(
        "yard_unavailable",
        f"The model {model!r} is not running and the control plane cannot be asked to start it "
        "now; try again shortly.",
    )


def undecided(model: str) -> Answer:
    return answer(
        "yard_unavailable",
        f"The model {model!r} is not running and no control plane decided to start it in time; "
        "try again shortly.",
    )


def queue_full(
    table: Table, model: str, what: str, limit: int, now: datetime, *, scope: str = ANY_SCOPE
) -> Answer:
    activation = table.activation(model, scope).activation
    return answer(
        "queue_full",
        f"As many requests wait for the model {model!r} as may (limit: {limit} {what}).",
        retry_s=load_left_s(activation, table.record(model), now),
    )


def renewed_at_seq(table: Table, model: str) -> int:
    """When something changed that makes an older refusal worthless: the entry, or its record's failures."""
    entry = table.models.get(model)
    record = table.records.get(model)
    return max(entry.seq if entry else 0, record.cleared_seq if record else 0)


def standing_refusal(
    table: Table, model: str, entry: ActivationEntry, now: datetime
) -> Answer | None:
    """The answer of a refusal that still stands, else None."""
    renewed = renewed_at_seq(table, model)
    if is_refused(entry, now, renewed_at_seq=renewed):
        assert entry.activation is not None
        return refusal(table, entry.activation, now)
    record = table.records.get(model)
    quarantine = record.record.quarantined if record is not None else None
    if quarantine is not None and quarantine.until > now and not is_pending(entry):
        # The wish of a request cannot lift a quarantine, so it is not even sent.
        return _quarantined(model, quarantine.reason, quarantine.until)
    return None


def refusal(table: Table, activation: Activation, now: datetime) -> Answer:
    """What a refused activation tells those who waited for it and those who come while it stands."""
    model = activation.model
    record = table.record(model)
    code: RefusalCode = activation.code or "start_failed"
    reason = activation.reason or "no reason was given"
    match code:
        case "no_capacity":
            return no_room_at_all(f"No card can hold the model {model!r}: {reason}")
        case "start_failed":
            return start_failed(model, reason, retry_s=backoff_left_s(activation, record, now))
        case "model_quarantined":
            until = (
                record.quarantined.until if record and record.quarantined else activation.retry_at
            )
            return _quarantined(model, reason, until)
        case "model_off":
            return answer(
                "model_off", f"The model {model!r} is switched off: {reason}", param="model"
            )
        case "model_not_found":
            return answer("model_not_found", f"The model {model!r} does not exist.", param="model")
        case "card_kept":
            behind = ", ".join(activation.waiting_for)
            by = f" (kept by {behind})" if behind else ""
            return answer("card_kept", f"The model {model!r} waits for a kept card: {reason}{by}")
        case _:
            assert_never(code)


def start_failed(model: str, reason: str, *, retry_s: float) -> Answer:
    return answer("start_failed", f"The model {model!r} failed to start: {reason}", retry_s=retry_s)


def _quarantined(model: str, reason: str, until: datetime | None) -> Answer:
    when = f" until {until.isoformat(timespec='seconds')}" if until is not None else ""
    return answer(
        "model_quarantined",
        f"The model {model!r} was given up after failed starts{when}: {reason}",
        param="model",
    )


def timed_out(
    table: Table, model: str, waited_s: float, now: datetime, *, scope: str = ANY_SCOPE
) -> Answer:
    """The wait ended: where the model is on its way, and when to come back.

    1. in the queue for room: `no_capacity`, from the measured loads of those in the way
    2. behind a VM, a claim or a pinned lease: `card_kept`, with who keeps it
    3. otherwise `model_loading`, with the time left of this load
    """
    activation = table.activation(model, scope).activation
    record = table.record(model)
    if activation is not None and activation.phase == "waiting":
        behind = ", ".join(activation.waiting_for)
        if activation.kept or activation.code == "card_kept":  # 2
            by = f"by {behind}" if behind else activation.reason or "by somebody else"
            return answer(
                "card_kept",
                f"The model {model!r} waited {waited_s:.0f} s for a card that is kept ({by}).",
            )
        return answer(  # 1
            "no_capacity",
            f"The model {model!r} waited {waited_s:.0f} s in the queue for room "
            f"(for {behind or 'room'}).",
            retry_s=_holders_s(table, activation, now),
        )
    left_s = load_left_s(activation, record, now)
    where = f" on {activation.node}" if activation is not None and activation.node else ""
    return answer(  # 3
        "model_loading",
        f"The model {model!r} is loading{where}; it was not ready after {waited_s:.0f} s, "
        "try again later.",
        retry_s=left_s,
    )


def _holders_s(table: Table, activation: Activation, now: datetime) -> float:
    """The longest measured load among the models in the way, else a quarter of the time waited."""
    loads: list[float] = []
    for name in activation.waiting_for:
        replica = table.replicas.get(name)
        holder = replica.model if replica is not None else name
        measured_s = measured_load_s(table.record(holder), None)
        if measured_s is not None:
            loads.append(measured_s)
    if loads:
        return max(loads)
    return max(1.0, (now - activation.wanted_at).total_seconds() / 4)
