"""How keys are listed and shown, and how an event of one is told: never with a hash."""

import copy
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from controlplane.ctl import keyreads
from controlplane.ctl.connect import Listed
from controlplane.ctl.tail import pretty
from events.log import Recorded
from events.subjects import event_subject
from schemas.key import Key, KeyChanged
from tests.support.aio import run

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def row(name: str, **over: Any) -> dict[str, Any]:
    key = Key(id=f"id-{name}", name=name, hash="h", created_at=NOW - timedelta(hours=3))
    told = msgspec.to_builtins(key) | over
    told.pop("hash")
    return told | {"event": {"type": "key.created"}}


ROWS = [
    row("short", expires_at=(NOW + timedelta(days=2)).isoformat(), rpm=60, parallel=2),
    row("late", expires_at=(NOW - timedelta(hours=5)).isoformat()),
    row("gone", revoked_at=NOW.isoformat()),
    row("all", may_activate=True, models=["a", "b*"], priority="high"),
]


class Read:
    """An API that answers what it was given."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.asked: list[str] = []

    async def data(self, path: str) -> Any:
        self.asked.append(path)
        return copy.deepcopy(self.told)

    async def listed(self, path: str) -> Listed:
        return Listed(rows=await self.data(path))


def read(work: Callable[..., Awaitable[None]], told: Any, *args: Any) -> list[str]:
    api = Read(told)

    async def story() -> None:
        await work(api, *args)

    run(story())
    return api.asked


def test_keys_are_listed_with_their_state_those_that_are_over_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    read(keyreads.list_keys, ROWS, "json", NOW)
    told = json.loads(capsys.readouterr().out)
    states = [(r["name"], r["state"]) for r in told]
    assert states == [
        ("all", "valid"),
        ("short", "valid"),
        ("gone", "revoked"),
        ("late", "expired"),
    ]


def test_a_line_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {r["name"]: keyreads.columns(r, NOW) for r in ROWS}
    assert lines["short"][2:] == (
        "valid",
        "all",
        "no",
        "60 rpm, 2 parallel",
        "normal",
        "in 2d",
        "3h ago",
    )
    assert lines["late"][2:] == ("expired", "all", "no", "-", "normal", "5h ago", "3h ago")
    assert lines["all"][2:] == ("valid", "a, b*", "yes", "-", "high", "never", "3h ago")
    read(keyreads.list_keys, ROWS, "table", NOW)
    assert "60 rpm, 2 parallel" in capsys.readouterr().out
    read(keyreads.list_keys, [], "table", NOW)
    assert "yardctl key create" in capsys.readouterr().out


def test_one_key_is_shown_with_what_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    asked = read(keyreads.show_key, ROWS[0], "a/b c", "table", NOW)
    assert asked == ["/v1/keys/a%2Fb%20c"]
    said = capsys.readouterr().out
    for part in ("state:", "valid", "models:", "all", "no limit", "60"):
        assert part in said
    read(keyreads.show_key, ROWS[2], "gone", "json", NOW)
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["models"]) == ("revoked", [])


def test_an_event_of_a_key_tells_its_name_and_not_its_hash() -> None:
    key = Key(id="aaaabbbbcccc", name="ci", hash="0" * 64, created_at=NOW)
    item = Recorded(
        seq=1,
        subject=event_subject("key", key.id),
        noun="key",
        key=(key.id,),
        id="e-1",
        type="key.changed",
        time=NOW,
        stored_at=NOW,
        rev=2,
        epoch=1,
        actor="admin",
        reason="",
        event=KeyChanged(by="admin", fields=("rpm",)),
        state=key,
    )
    line = pretty(item).plain
    assert "key.changed" in line
    assert "aaaabbbbcccc  ci by=admin fields=rpm" in line
    assert key.hash not in line
