"""What gateways told of usage, added up by a control plane: once each, for as long as the log has it."""

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.app import ControlPlane, new_decider
from controlplane.candidate import Me
from controlplane.events_api import BadQuery
from controlplane.identifiers import new_ids
from controlplane.metrics import Metrics
from controlplane.projections.usage import UsageModel
from controlplane.projections.usagefile import DIMENSIONS, UsageFile
from controlplane.usage_api import parse_wanted
from events.ids import new_id
from events.log import Misconfigured, UsagePage
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from events.streams import USAGE_KEPT_DAYS
from schemas.api import UsageList
from schemas.commands import Command, KeyCreate, KeyRevoke
from schemas.key import Key
from schemas.usage import UsageBatch, UsageRow
from tests.support.aio import run, until
from tests.support.controlplanes import FAST, TOKEN, api, leads, plane, running

ID = "aaaabbbbcccc"
HASH = hashlib.sha256(b"secret").hexdigest()
TODAY = datetime.now(UTC).replace(hour=12)


def row(key: str = "", model: str = "m", tokens: int = 5, **fields: Any) -> UsageRow:
    return UsageRow(key=key, model=model, requests=1, completion_tokens=tokens, **fields)


def batch(
    n: int, *rows: UsageRow, gateway: str = "gw", at: datetime = TODAY, incarnation: str = "i"
) -> UsageBatch:
    return UsageBatch(
        gateway=gateway, incarnation=incarnation, n=n, began=at, ended=at, rows=rows or (row(),)
    )


class Yard:
    """A log in memory with a gateway's own connection, and control planes on it."""

    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.folder = folder
        self.gateway = MemoryLog(self.broker, source="/gateway/gw")
        self.admin = MemoryLog(self.broker, source="/ctl/anna")

    @contextlib.asynccontextmanager
    async def plane(self) -> AsyncIterator[tuple[ControlPlane, httpx.AsyncClient]]:
        log = MemoryLog(self.broker, source="/cp/cp-1")
        plane = ControlPlane(
            events=log,
            wire=MemoryWire(log.connection),
            me=Me(instance="cp-1", host="host-of-cp-1", pid=1),
            settings=FAST,
            folder=self.folder / "cp-1",
            token=TOKEN,
            make_decider=new_decider,
            ids=new_ids(),
        )
        async with running(plane):
            await until(lambda: plane.usage.synced, "usage to be added up")
            async with api(plane) as client:
                yield plane, client

    async def tell(self, *batches: UsageBatch) -> int:
        seq = 0
        for one in batches:
            seq = await self.gateway.account(one)
        return seq


async def totals(client: httpx.AsyncClient, **query: str) -> list[dict[str, Any]]:
    answer = await client.get("/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=UsageList)
    return answer.json()["data"]


async def tokens(client: httpx.AsyncClient) -> int:
    return sum(t["row"]["completion_tokens"] for t in await totals(client, by=""))


def test_totals_are_by_whatever_is_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with yard.plane() as (plane, client):
            await until(leads(plane), "a leader")
            create = Command(id=new_id(), body=KeyCreate(id=ID, name="ci", hash=HASH))
            await yard.admin.send("anna", create)
            await until(lambda: ID in plane.leader.world.keys, "the key")
            yesterday = TODAY - timedelta(days=1)
            seq = await yard.tell(
                batch(1, row(ID), row(ID, "n", 7), row("", "m", 1, adapter="a")),
                batch(2, row(ID), at=yesterday),
                batch(1, row(ID, tokens=100), gateway="gw-2"),
            )
            await until(lambda: plane.usage.position == seq, "the accounts")
            by_all = await totals(client, by="day,key,model,adapter")
            assert [
                (t["day"], t["row"]["key"], t["row"]["model"], t["row"]["completion_tokens"])
                for t in by_all
            ] == [
                (yesterday.date().isoformat(), ID, "m", 5),
                (TODAY.date().isoformat(), "", "m", 1),
                (TODAY.date().isoformat(), ID, "m", 105),
                (TODAY.date().isoformat(), ID, "n", 7),
            ]
            assert [(t["key_name"], t["day"]) for t in await totals(client, by="key")] == [
                ("", ""),
                ("ci", ""),
            ]
            by_model = await totals(client, by="model", key="ci")
            assert [(t["row"]["model"], t["row"]["requests"]) for t in by_model] == [
                ("m", 3),
                ("n", 1),
            ]
            assert by_model == await totals(client, by="model", key=ID)
            assert len(await totals(client, model="n")) == 1
            today = TODAY.date().isoformat()
            assert sum(t["row"]["requests"] for t in await totals(client, since=today)) == 4
            assert sum(t["row"]["requests"] for t in await totals(client, since="2d")) == 5
            assert await totals(client, key="nobody") == []
            assert await totals(client, by="", until="2020-01-01", since="2020-01-01") == []
            for bad in ({"by": "colour"}, {"since": "soon"}, {"until": "x"}):
                answer = await client.get("/v1/usage", params=bad)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")

    run(story(), 60)


def test_a_key_keeps_its_name_though_nobody_knew_it_when_its_usage_was_read(
    tmp_path: Path,
) -> None:
    """Accounts may be read before the log is, as after the file was deleted."""

    async def story() -> None:
        yard = Yard(tmp_path)
        there: dict[str, Key] = {}
        now = TODAY
        usage = UsageModel(
            events=MemoryLog(yard.broker, source="/cp/cp-1"),
            path=tmp_path / "usage.sqlite",
            keys=lambda: there,
            now=lambda: now,
            metrics=Metrics(),
        )
        task = asyncio.create_task(usage.run())
        try:
            await yard.tell(batch(1, row(ID)))
            await until(lambda: usage.synced and usage.position == 1, "the accounts")
            there[ID] = Key(id=ID, name="ci", hash=HASH, created_at=TODAY)
            now += timedelta(hours=2)
            await yard.tell(batch(2))
            await until(lambda: usage.position == 2, "the next account")
            there.clear()
            wanted = parse_wanted(since=None, until=None, by="key", model=None, now=TODAY)

            async def named() -> bool:
                found, _ = await usage.totals(wanted)
                return [t.key_name for t in found] == ["", "ci"]

            await until(named, "its name")
        finally:
            task.cancel()
            await asyncio.wait([task])
            await usage.close()

    run(story(), 60)


def test_a_name_means_the_key_that_is_not_over_and_a_whole_key_its_id(tmp_path: Path) -> None:
    """As for every command about a key: a name may be given anew while the one before is still listed."""

    async def story() -> None:
        yard = Yard(tmp_path)
        over, valid = "zzzzzzzzzzzz", ID
        async with yard.plane() as (plane, client):
            await until(leads(plane), "a leader")
            for body in (
                KeyCreate(id=over, name="ci", hash=HASH),
                KeyRevoke(key=over),
                KeyCreate(id=valid, name="ci", hash=HASH),
            ):
                await yard.admin.send("anna", Command(id=new_id(), body=body))
            await until(lambda: valid in plane.leader.world.keys, "the keys")
            seq = await yard.tell(batch(1, row(over, tokens=1), row(valid, tokens=2)))
            await until(lambda: plane.usage.position == seq, "the accounts")
            for said in ("ci", valid, f"yk_{valid}_its-secret"):
                found = await totals(client, by="key", key=said)
                assert [t["row"]["completion_tokens"] for t in found] == [2], said
            assert [t["row"]["key"] for t in await totals(client, by="key", key=over)] == [over]

    run(story(), 60)


def test_inv_6_what_was_added_is_not_added_again_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        await yard.tell(batch(1))
        async with yard.plane() as (_, client):
            assert await tokens(client) == 5
        await yard.tell(batch(2))
        async with yard.plane() as (plane, client):
            assert await tokens(client) == 10
            # Sent once more, long after the server forgot that it had been: the number tells.
            yard.broker.usage.ids.clear()
            seq = await yard.tell(batch(1), batch(2))
            await until(lambda: plane.usage.position == seq, "the repeats")
            assert await tokens(client) == 10
            # Another life of that gateway counts from the beginning.
            seq = await yard.tell(batch(1, incarnation="i-2"))
            await until(lambda: plane.usage.position == seq, "the next life")
            assert await tokens(client) == 15

    run(story(), 60)


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_inv_7_deleting_the_usage_file_loses_no_total(tmp_path: Path, how: str) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        await yard.tell(*(batch(n, row(model=f"m{n % 3}")) for n in range(1, 10)))
        async with yard.plane() as (_, client):
            before = await totals(client)
        file = tmp_path / "cp-1" / "usage.sqlite"
        for companion in file.parent.glob("usage.sqlite-*"):
            companion.unlink()
        if how == "deleted":
            file.unlink()
        else:
            file.write_bytes(b"no database" * 1000)
        async with yard.plane() as (_, client):
            assert await totals(client) == before
            assert len(before) == 3

    run(story(), 60)


def test_a_file_that_cannot_be_opened_costs_the_accounts_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the start nor when one that is damaged is to be replaced."""
    monkeypatch.setattr("controlplane.projections.usage.RETRY_S", 0.01)

    async def story() -> None:
        yard = Yard(tmp_path)
        await yard.tell(batch(1))
        file = tmp_path / "cp-1" / "usage.sqlite"
        file.mkdir(parents=True)
        log = MemoryLog(yard.broker, source="/cp/cp-1")
        control = plane(log, MemoryWire(log.connection), tmp_path)
        async with running(control), api(control) as client:
            await until(lambda: control.doctor.ready().ready, "readiness")
            answer = await client.get("/v1/usage")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_synced")
            file.rmdir()
            await until(lambda: control.usage.synced, "usage to be added up")
            assert await tokens(client) == 5

    run(story(), 60)


def test_a_file_found_damaged_while_it_is_used_is_replaced_and_added_up_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.projections.usage.RETRY_S", 0.01)
    add = UsageFile.add

    async def story() -> None:
        yard = Yard(tmp_path)
        await yard.tell(batch(1))
        async with yard.plane() as (plane, client):
            assert await tokens(client) == 5
            torn = 0

            async def tear(self: UsageFile, *args: Any, **named: Any) -> None:
                nonlocal torn
                torn += 1
                monkeypatch.setattr(UsageFile, "add", add)
                raise sqlite3.DatabaseError("database disk image is malformed")

            monkeypatch.setattr(UsageFile, "add", tear)
            seq = await yard.tell(batch(2))
            await until(lambda: torn == 1 and plane.usage.position == seq, "all to be added up")
            await until(lambda: plane.usage.synced, "the end of it")
            assert await tokens(client) == 10

    run(story(), 60)


def test_a_fault_in_adding_up_stops_the_accounts_alone_and_readiness_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with yard.plane() as (plane, client):
            await until(leads(plane), "a leader")
            seq = await yard.tell(batch(1))
            await until(lambda: plane.usage.position >= seq, "the first to be added")

            def bug(_: object) -> bool:
                raise ZeroDivisionError("bug")

            monkeypatch.setattr("controlplane.projections.usage.is_sane", bug)
            await yard.tell(batch(2))
            await until(lambda: plane.usage.stopped is not None, "the stop")
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            said = [finding["sentence"] for finding in answer.json()["findings"]]
            assert any("the projection usage stopped" in sentence for sentence in said)
            assert await tokens(client) == 5
            assert plane.leader.term is not None

    run(story())


def test_another_stream_of_that_name_is_added_up_from_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        await yard.tell(batch(1), batch(2))
        async with yard.plane() as (_, client):
            assert await tokens(client) == 10
        yard.broker.replace_usage()
        await yard.tell(batch(1))
        async with yard.plane() as (plane, client):
            assert await tokens(client) == 5
            yard.broker.replace_usage()
            await until(lambda: plane.usage.position == 0, "the new stream")
            assert await tokens(client) == 0

    run(story(), 60)


def test_what_cannot_be_an_account_is_counted_and_in_no_total(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        async with yard.plane() as (plane, client):
            await yard.tell(batch(1, row(tokens=-1)), batch(2, row(tokens=1 << 62)))
            yard.broker.answer("yard.use.gateway.gw", b"{}", {})
            # Numbers no file takes, and a moment that is on no day of UTC.
            before_time = datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))
            await yard.tell(batch(1 << 70), batch(4, at=before_time))
            seq = await yard.tell(batch(5))
            await until(lambda: plane.usage.position == seq, "the accounts")
            assert await tokens(client) == 5
            assert b"yard_usage_unreadable_total 5.0" in plane.metrics.text()
            # Nobody is less ready for it.
            await until(lambda: plane.doctor.ready().ready, "readiness")

    run(story(), 60)


def test_a_day_the_log_has_forgotten_is_in_no_total(tmp_path: Path) -> None:
    async def story() -> None:
        yard = Yard(tmp_path)
        old = TODAY - timedelta(days=USAGE_KEPT_DAYS + 1)
        await yard.tell(batch(1, at=old), batch(2))
        async with yard.plane() as (_, client):
            assert await tokens(client) == 5
            assert len(await totals(client, since="200d")) == 1

    run(story(), 60)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_text_is_more_than_a_bad_query(since: str, by: str) -> None:
    with contextlib.suppress(BadQuery):
        wanted = parse_wanted(since=since, until=None, by=by, model=None, now=TODAY)
        assert set(wanted.by) <= set(DIMENSIONS)


def test_a_user_that_may_not_read_usage_is_told_once_and_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    class Denied:
        async def next(self) -> UsagePage:
            nonlocal asked
            asked += 1
            raise Misconfigured("permissions violation")

        async def close(self) -> None: ...

    monkeypatch.setattr("controlplane.projections.usage.REFUSED_RETRY_S", 0.01)
    monkeypatch.setattr(MemoryLog, "follow_usage", lambda *_, **__: Denied())

    async def story() -> None:
        log = MemoryLog(MemoryBroker(), source="/cp/cp-1")
        control = plane(log, MemoryWire(log.connection), tmp_path)
        async with running(control), api(control) as client:
            await until(lambda: asked > 3, "more tries")
            answer = await client.get("/v1/usage")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_synced")
            await until(lambda: control.model.synced, "the log to be read")
            assert (await client.get("/v1/models")).status_code == 200
        assert sum("usage cannot be read" in r.getMessage() for r in caplog.records) == 1

    run(story(), 60)
