"""Slots of one replica in a test: moments, states and pins in few words."""

from datetime import UTC, datetime, timedelta
from typing import Any

from nodeagent.domain import slots
from nodeagent.domain.evicting import Facts
from nodeagent.domain.pins import Use
from nodeagent.domain.slots import Moment, Place, State, Verdict
from schemas.adapternames import engine_name, pin_name

START = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "0123456789ab"


def moment(at: float) -> Moment:
    """`at` seconds after the start, by both clocks."""
    return Moment(at=at, now=START + timedelta(seconds=at))


def pin(adapter: str, version: str = VERSION) -> str:
    return pin_name(adapter, version)


def a_place(adapter: str, at: float = 0.0, **fields: Any) -> Place:
    """A loaded adapter that was used last at `at`."""
    given: dict[str, Any] = {
        "version": VERSION,
        "phase": "loaded",
        "since": START,
        "how": "loaded",
        "used_at": at,
        "changed_at": at,
        **fields,
    }
    given.setdefault("engine_name", engine_name(adapter, given["version"]))
    return Place(adapter=adapter, **given)


def a_state(limit: int, *places: Place, room: int | None = None, **fields: Any) -> State:
    """A replica with these places; its engine has room for one above the limit."""
    return State(
        limit=limit,
        room=limit + 1 if room is None else room,
        places={pin(p.adapter, p.version): p for p in places},
        **fields,
    )


def ask(state: State, adapter: str, at: float, **fields: Any) -> tuple[State, Verdict]:
    return slots.ensure(state, adapter, fields.pop("version", VERSION), moment(at), **fields)


def facts(*used: str, idle: tuple[str, ...] = (), **fields: Any) -> Facts:
    """Adapters in use by a gateway, and those with an idle pin."""
    uses = {pin(a): Use(gateways=("g1",), uses=1) for a in used}
    uses |= {pin(a): Use(gateways=("g1",)) for a in idle}
    return Facts(uses={**uses, **fields.pop("uses", {})}, **fields)
