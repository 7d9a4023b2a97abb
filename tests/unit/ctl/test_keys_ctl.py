"""yardctl key: a secret is shown once and told to nobody else, and a revocation says where it holds."""

import asyncio
import base64
import copy
import hashlib
import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.ctl import gatewaysheard, keyacts, main
from controlplane.ctl.failures import (
    EXIT_NOT_KNOWN,
    EXIT_UNREACHABLE,
    CtlError,
    NotKnownYet,
    RejectedByYard,
    SentPerhaps,
    Unreachable,
)
from controlplane.ctl.gatewaysheard import GatewaysHeard, Reached
from controlplane.ctl.newkey import NewKey, make_key
from events.log import Draft, StoredCommand, Unavailable
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.subjects import event_subject
from schemas.beacons import GatewayBeacon
from schemas.commands import (
    CommandAccepted,
    CommandRejected,
    KeyChange,
    KeyCreate,
    KeyRevoke,
    Outcome,
)
from schemas.key import Key, KeyRevoked
from tests.support.aio import run

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = re.compile(r"yk_([a-z2-7]{12})_([A-Za-z0-9_-]{43})")
BODY = KeyCreate(id="", name="ci", hash="", models=["a"], rpm=5)
SECRET = "s3cret-" * 6 + "x"


def a_new_key() -> NewKey:
    return NewKey("aaaabbbbcccc", SECRET)


class Plane:
    """Stands in for a control plane: answers the first command it sees, which it keeps."""

    def __init__(self, broker: MemoryBroker, **outcome: Any) -> None:
        self.log = MemoryLog(broker)
        self.outcome = outcome
        self.seen: StoredCommand | None = None

    async def decide(self) -> None:
        follower = self.log.follow_commands(after=0)
        try:
            (self.seen,) = await follower.next()
        finally:
            await follower.close()
        assert self.seen is not None
        assert self.seen.command is not None
        fields = {
            "id": self.seen.command.id,
            "actor": "admin",
            "name": self.seen.name,
            "status": "accepted",
            "at": NOW,
            "sentence": "said",
        }
        state = Outcome(**(fields | self.outcome))
        event = CommandAccepted() if state.status == "accepted" else CommandRejected(code="exists")
        subject = event_subject("command", state.id)
        draft = Draft(subject=subject, event=event, state=state, expected_seq=0, rev=1)
        await self.log.append(draft, epoch=0)


async def created(
    *, output: str = "table", key: NewKey | None = None, timeout_s: float = 30.0, **outcome: Any
) -> Plane:
    broker = MemoryBroker()
    plane, ctl = Plane(broker, **outcome), MemoryLog(broker, source="/ctl")
    deciding = asyncio.create_task(plane.decide())
    try:
        await keyacts.create_on(ctl, BODY, key or make_key(), timeout_s, output)
    finally:
        await deciding
    return plane


def nowhere_told(error: BaseException, said: Any = None) -> None:
    """The secret stands in no text of the error, not even in a traceback that shows what yardctl had in hand."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if "/controlplane/" in frame.f_code.co_filename:
            assert SECRET not in repr(frame.f_locals)
    assert SECRET not in "".join(traceback.format_exception(error))
    assert SECRET not in str(getattr(error, "lines", ""))
    if said is not None:
        assert SECRET not in said.err


# A key itself -----------------------------------------------------------------------------------------


def test_a_key_is_made_of_random_bits_and_its_hash_is_of_the_secret() -> None:
    keys = [make_key() for _ in range(100)]
    assert len({key.id for key in keys}) == len({key.text() for key in keys}) == 100
    for key in keys:
        found = KEY.fullmatch(key.text())
        assert found is not None, "as gateways read it"
        assert found[1] == key.id
        assert len(base64.urlsafe_b64decode(found[2] + "=")) == 32
        assert key.hash() == hashlib.sha256(found[2].encode()).hexdigest()


def test_a_key_is_not_told_by_accident() -> None:
    key = a_new_key()
    for text in (repr(key), str(key), f"{key}", f"{[key]}"):
        assert SECRET not in text
        assert key.id in text
    for write in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="neither copied"):
            write(key)
    assert not hasattr(key, "__dict__")


# Creating ---------------------------------------------------------------------------------------------


def test_a_key_is_printed_once_it_was_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    plane = run(created(lines=("no model is called 'a' so far",)))
    said = capsys.readouterr()
    found = KEY.fullmatch(said.out.removesuffix("\n"))
    assert found is not None, "the key alone, so that a script can read it"
    assert said.err.splitlines() == [
        "said",
        "no model is called 'a' so far",
        "this is the only time it is shown; the yard knows its hash alone",
    ]
    assert plane.seen is not None
    assert plane.seen.command is not None
    body = plane.seen.command.body
    hash_ = hashlib.sha256(found[2].encode()).hexdigest()
    assert body == msgspec.structs.replace(BODY, id=found[1], hash=hash_)
    assert found[2] not in msgspec.json.encode(plane.seen.command).decode()
    assert found[2] not in said.err


def test_json_holds_the_key_and_the_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    run(created(output="json", key=a_new_key()))
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["key"] == f"yk_aaaabbbbcccc_{SECRET}"
    assert (told["id"], told["name"]) == ("aaaabbbbcccc", "ci")
    assert told["outcome"]["status"] == "accepted"
    assert SECRET not in said.err


def test_a_key_that_was_refused_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RejectedByYard, match="taken") as caught:
        run(created(key=a_new_key(), status="rejected", code="exists", sentence="taken"))
    said = capsys.readouterr()
    assert said.out == ""
    nowhere_told(caught.value, said)


@pytest.mark.parametrize("output", ["table", "json"])
def test_when_it_is_not_known_the_key_is_printed_with_how_to_find_out(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker(), source="/ctl")
        await keyacts.create_on(log, BODY, a_new_key(), 0.05, output)

    with pytest.raises(NotKnownYet) as caught:
        run(story())
    said = capsys.readouterr()
    text = json.loads(said.out)["key"] if output == "json" else said.out.strip()
    assert text == f"yk_aaaabbbbcccc_{SECRET}"
    assert caught.value.code == EXIT_NOT_KNOWN
    told = "\n".join(caught.value.lines)
    for part in (
        "yardctl command wait ",
        "may or may not be valid",
        "yardctl key show aaaabbbbcccc",
        "yardctl key revoke aaaabbbbcccc",
    ):
        assert part in told
    nowhere_told(caught.value, said)


def test_one_lost_while_it_was_sent_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Lossy(MemoryLog):
        async def send(self, *args: Any, **more: Any) -> int:
            self.connection.disconnect()
            raise Unavailable("gone")

    async def story() -> None:
        await keyacts.create_on(Lossy(MemoryBroker()), BODY, a_new_key(), 1.0, "table")

    with pytest.raises(SentPerhaps) as caught:
        run(story())
    said = capsys.readouterr()
    assert said.out == f"yk_aaaabbbbcccc_{SECRET}\n"
    assert caught.value.code == EXIT_UNREACHABLE
    assert "may or may not be valid" in "\n".join(caught.value.lines)
    nowhere_told(caught.value, said)


def test_when_nothing_was_sent_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        log.connection.disconnect()
        await keyacts.create_on(log, BODY, a_new_key(), 1.0, "table")

    with pytest.raises(Unreachable) as caught:
        run(story())
    assert not isinstance(caught.value, SentPerhaps)
    said = capsys.readouterr()
    assert said.out == ""
    nowhere_told(caught.value, said)


def test_who_leaves_is_told_the_id_and_not_the_secret(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        log = MemoryLog(MemoryBroker())
        commands = log.follow_commands(after=0)
        work = asyncio.create_task(keyacts.create_on(log, BODY, a_new_key(), 30.0, "table"))
        await commands.next()
        await commands.close()
        work.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await work
        nowhere_told(caught.value)

    run(story())
    said = capsys.readouterr()
    assert said.out == ""
    assert "whether the key aaaabbbbcccc was created is not known" in said.err
    assert "yardctl key revoke aaaabbbbcccc" in said.err
    assert SECRET not in said.err


def test_one_that_cannot_be_written_is_told_by_its_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(CtlError) as caught:
        run(created(key=a_new_key()))
    assert "aaaabbbbcccc could not be written (No space left" in str(caught.value)
    assert "yardctl key revoke aaaabbbbcccc" in caught.value.lines[1]
    nowhere_told(caught.value, capsys.readouterr())


# What is typed ----------------------------------------------------------------------------------------

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What yardctl would do, as (what, arguments behind the place)."""
    found: Calls = []
    monkeypatch.setenv("YARD_DATA", str(tmp_path / "data"))
    for name in ("create", "change", "revoke"):

        async def act(_: Any, *args: Any, name: str = name) -> None:
            found.append((name, *args))

        monkeypatch.setattr(keyacts, name, act)
    return found


def typed(*arguments: str) -> int:
    return main.main(["key", *arguments])


def test_what_is_typed_of_a_new_key_is_what_is_asked_for(calls: Calls) -> None:
    assert typed("create", "--name", "ci") == 0
    more = "--models llama* --models llama:* --may-activate --rpm 60 --tpm 1000 --parallel 4"
    rest = "--priority low --expires 30d -o json --timeout 5s"
    assert typed("create", "--name", "web", *more.split(), *rest.split()) == 0
    assert calls == [
        ("create", KeyCreate(id="", name="ci", hash=""), 30.0, "table"),
        (
            "create",
            KeyCreate(
                id="",
                name="web",
                hash="",
                models=["llama*", "llama:*"],
                may_activate=True,
                rpm=60,
                tpm=1000,
                parallel=4,
                priority="low",
                expires_s=30 * 86_400.0,
            ),
            5.0,
            "json",
        ),
    ]


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (["--models", "a", "--models", "b"], {"models": ["a", "b"]}),
        (["--all-models"], {"models": []}),
        (["--may-activate"], {"may_activate": True}),
        (["--may-not-activate"], {"may_activate": False}),
        (["--rpm", "0", "--tpm", "7"], {"rpm": 0, "tpm": 7}),
        (["--parallel", "3", "--priority", "high"], {"parallel": 3, "priority": "high"}),
        (["--expires", "0"], {"expires_s": 0.0}),
        (["--expires", "2h"], {"expires_s": 7200.0}),
    ],
)
def test_what_is_typed_of_a_change_is_all_that_changes(
    calls: Calls, arguments: list[str], body: dict[str, Any]
) -> None:
    assert typed("set", "ci", *arguments) == 0
    assert calls == [("change", KeyChange(key="ci", **body), 30.0, "table")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("create",),
        ("create", "--name", ""),
        ("create", "--name", f"yk_aaaabbbbcccc_{SECRET}"),
        ("create", "--name", "x", "--rpm", "-1"),
        ("create", "--name", "x", "--tpm", "many"),
        ("create", "--name", "x", "--expires", "soon"),
        ("create", "--name", "x", "--priority", "best"),
        ("set", "x"),
        ("set", f"yk_aaaabbbbcccc_{SECRET}"),
        ("set", "x", "--models", "a", "--all-models"),
        ("set", "", "--rpm", "1"),
        ("revoke",),
        ("revoke", ""),
        ("show", ""),
        (),
    ],
)
def test_what_cannot_be_meant_is_64_and_sends_nothing(
    calls: Calls, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(*arguments) == 64
    assert calls == []
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert SECRET not in said.err + said.out


def test_a_name_that_is_missing_is_not_said_to_begin_wrongly(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed("create", "--name", "") == 64
    assert "expected a name, got nothing" in capsys.readouterr().err


def test_of_a_whole_key_only_the_id_goes_on(calls: Calls) -> None:
    whole = f"yk_aaaabbbbcccc_{SECRET}"
    assert typed("revoke", whole) == 0
    assert typed("set", whole, "--rpm", "1") == 0
    assert calls == [
        ("revoke", "aaaabbbbcccc", 30.0, "table"),
        ("change", KeyChange(key="aaaabbbbcccc", rpm=1), 30.0, "table"),
    ]


# Revoking ---------------------------------------------------------------------------------------------

SUBJECT = event_subject("key", "aaaabbbbcccc")


async def revoked(
    *,
    beacons: Callable[[int], dict[str, int]],
    output: str = "table",
    leaves: str = "",
    patience_s: float = 10.0,
    known: dict[str, float] | None = {},  # noqa: B006 - only read
) -> int:
    """Revokes a key while gateways beacon; `beacons` gives their positions from the event's."""
    broker = MemoryBroker()
    plane, ctl = Plane(broker, refs=(SUBJECT,)), MemoryLog(broker, source="/ctl")
    key = Key(id="aaaabbbbcccc", name="ci", hash="h", created_at=NOW, revoked_at=NOW)
    draft = Draft(subject=SUBJECT, event=KeyRevoked(by="admin"), state=key, expected_seq=0, rev=1)
    (seq,) = (await plane.log.append(draft, epoch=0)).seqs
    wire = MemoryWire(plane.log.connection)
    gateways = GatewaysHeard(MemoryWire(ctl.connection), listen_s=0.2, patience_s=patience_s)

    async def told() -> dict[str, float] | None:
        return known

    working = asyncio.create_task(keyacts.revoke_on(ctl, gateways, "ci", 30.0, output, known=told))
    deciding = asyncio.create_task(plane.decide())
    n = 0
    while not working.done():
        n += 1
        for name, position in beacons(seq).items():
            body = GatewayBeacon(
                gateway=name,
                incarnation="i",
                n=n,
                position=position,
                leaving=name == leaves and n > 1,
            )
            await wire.beacon("gateway", name, body)
        await asyncio.wait([working], timeout=0.02)
    await deciding
    assert plane.seen is not None
    assert plane.seen.command is not None
    assert plane.seen.command.body == KeyRevoke(key="ci")
    await working
    return seq


def test_scn_e4_a_revocation_says_on_how_many_gateways_it_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(revoked(beacons=lambda seq: {"gw-1": seq, "gw-2": seq + 5}))
    assert capsys.readouterr().out.splitlines() == [
        "said",
        "refused on 2 of 2 gateways: gw-1, gw-2",
    ]


def test_scn_e4_a_gateway_that_is_behind_is_named_and_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NotKnownYet) as caught:
        run(revoked(beacons=lambda seq: {"gw-1": seq, "gw-2": seq - 1}, patience_s=0.2))
    assert caught.value.lines[0] == "1 of 2 gateways have not read of it yet: gw-2"
    assert "refused on 1 of 2 gateways: gw-1" in capsys.readouterr().out
    with pytest.raises(NotKnownYet):
        run(revoked(beacons=lambda seq: {"gw-2": seq - 1}, patience_s=0.2))
    assert "refused on 0 of 1 gateways so far" in capsys.readouterr().out


def test_scn_e4_one_that_catches_up_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = iter(range(1000))
    run(revoked(beacons=lambda seq: {"gw-1": seq if next(rounds) > 8 else seq - 1}))
    assert "refused on 1 of 1 gateways: gw-1" in capsys.readouterr().out


def test_scn_e4_one_that_leaves_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run(revoked(beacons=lambda seq: {"gw-1": seq, "old": seq - 1}, leaves="old"))
    assert "refused on 1 of 1 gateways: gw-1" in capsys.readouterr().out


def test_scn_e4_one_that_does_not_answer_is_named_once_it_counts_as_gone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatewaysheard, "GONE_S", 3.0)
    # One hangs, one was gone before, one was gone so long ago that it is nobody's concern; the others are heard.
    known = {"gw-1": 0.1, "hung": 2.6, "dead": 75.0, "of old": 5000.0}
    run(revoked(beacons=lambda seq: {"gw-1": seq}, known=known))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "refused on 1 of 1 gateways: gw-1"
    assert re.match(
        r"2 gateways do not answer: dead \(heard 1m ago, counts as gone\), "
        r"hung \(heard \d+s ago, counts as gone\); ",
        lines[2],
    )
    run(revoked(beacons=lambda seq: {"gw-1": seq}, known=known, output="json"))
    told = json.loads(capsys.readouterr().out)["gateways"]
    assert [one["name"] for one in told["silent"]] == ["dead", "hung"]
    assert told["silent"][1]["silent_s"] >= 3.0


def test_scn_e4_one_that_answers_or_leaves_before_it_counts_as_gone_is_not_called_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = iter(range(1000))

    def beacons(seq: int) -> dict[str, int]:
        # It wakes long after everybody else was heard.
        return {"gw-1": seq, "left": seq} | ({"late": seq} if next(rounds) > 20 else {})

    known = {"gw-1": 0.1, "late": 1.0, "left": 1.0}
    run(revoked(beacons=beacons, known=known, leaves="left"))
    assert capsys.readouterr().out.splitlines()[1:] == ["refused on 2 of 2 gateways: gw-1, late"]


def test_without_a_control_plane_who_else_there_is_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(revoked(beacons=lambda seq: {"gw-1": seq}, known=None))
    assert "no control plane told" in capsys.readouterr().out.splitlines()[2]


def test_who_was_heard_is_read_from_what_a_control_plane_knows() -> None:
    doctor = {"gateways": [{"name": "gw-1", "position": 4, "silent_s": 0.5}]}
    assert keyacts.heard_by(doctor) == {"gw-1": 0.5}
    assert keyacts.heard_by({}) == {}


def test_without_a_gateway_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run(revoked(beacons=lambda _: {}))
    assert "no gateway is heard" in capsys.readouterr().out


def test_a_revocation_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(revoked(beacons=lambda seq: {"gw-1": seq}, output="json"))
    told = json.loads(capsys.readouterr().out)
    assert told["gateways"] == {"known_to": ["gw-1"], "behind": [], "silent": []}
    assert told["status"] == "accepted"


def test_a_log_that_goes_away_after_the_answer_is_not_known() -> None:
    class Forgetful(MemoryLog):
        async def last(self, subject: str) -> Any:
            raise Unavailable("gone")

    async def story() -> None:
        broker = MemoryBroker()
        plane, ctl = Plane(broker, refs=(SUBJECT,)), Forgetful(broker, source="/ctl")
        deciding = asyncio.create_task(plane.decide())
        gateways = GatewaysHeard(MemoryWire(ctl.connection), listen_s=0.01, patience_s=0.01)
        try:
            await keyacts.revoke_on(ctl, gateways, "ci", 30.0, "table")
        finally:
            await deciding

    with pytest.raises(NotKnownYet) as caught:
        run(story())
    assert caught.value.lines[0] == "said"
    assert "how many gateways refuse it is not known" in caught.value.lines[1]


def test_who_has_read_it_is_sorted_by_name() -> None:
    async def story() -> Reached:
        connection = MemoryLog(MemoryBroker()).connection
        wire = MemoryWire(connection)
        async with GatewaysHeard(MemoryWire(connection), listen_s=0.01, patience_s=0.01) as heard:
            for n, name in enumerate(("c", "a", "b")):
                body = GatewayBeacon(gateway=name, incarnation="i", n=1, position=n)
                await wire.beacon("gateway", name, body)
            return await heard.reached(1)

    assert run(story()) == Reached(known_to=("a", "b"), behind=("c",))
