"""`adapter add`: the command, then each phase once, bytes below it, and an end that says what to do."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from controlplane.ctl import adapteracts
from controlplane.ctl.adapterwatch import AdapterRefused, watch_on
from controlplane.ctl.failures import CtlError, NotKnownYet, RejectedByYard
from events.log import Draft
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from schemas.adapter import (
    Adapter,
    AdapterAdded,
    AdapterChecked,
    AdapterDeleted,
    AdapterFile,
    AdapterReady,
)
from schemas.adapter import (
    AdapterRefused as Refused,
)
from schemas.commands import AdapterAdd, CommandAccepted, CommandRejected, Outcome
from schemas.file import Copy, File, FileFailed, FileFetching, FilePresent
from schemas.messages import Event, State
from schemas.progress import FileProgress
from tests.support.aio import run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
READING = Adapter(
    name="sql", incarnation="a-1", base="qwen", base_incarnation="m-1", phase="reading", since=NOW,
    by="anna", source="acme/sql-lora",
)  # fmt: skip
WEIGHTS = AdapterFile(key="k" * 64, name="adapter_model.safetensors", bytes=1000)
FETCHING = replace(READING, phase="fetching", rank=16, files=(WEIGHTS,), bytes=1000)
READY = replace(FETCHING, phase="ready", version="0123abcd4567")
REFUSED = replace(
    READING, phase="refused", code="rank_too_high", reason="rank 64; qwen is started for 16"
)
FILE = File(
    key=WEIGHTS.key, repo="acme/sql-lora", commit="c0ffee", path=WEIGHTS.name, published_bytes=1000,
    copies=(Copy(mirror="cp-1", phase="fetching", since=NOW),),
)  # fmt: skip
BODY = AdapterAdd(name="sql", base="qwen", source="acme/sql-lora")


class Terminal:
    """A log with one adapter on it, and what a pipe shows of watching it come."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.writer = MemoryLog(self.broker, source="/cp/cp-1")
        self.progress = MemoryWire(self.writer.connection)
        self.log = MemoryLog(self.broker, source="/ctl")
        self.wire = MemoryWire(self.log.connection)
        self.told = StringIO()
        self.out = Console(file=self.told, width=200, highlight=False, markup=False)
        self._last: dict[str, tuple[int, int]] = {}

    async def write(
        self, noun: str, key: str, event: Event, state: State | None, reason: str = ""
    ) -> None:
        seq, rev = self._last.get(noun + key, (0, 0))
        draft = Draft(
            subject=f"yard.evt.{noun}.{key}", event=event, state=state, expected_seq=seq,
            rev=rev + 1, reason=reason,
        )  # fmt: skip
        appended = await self.writer.append(draft, epoch=1000)
        self._last[noun + key] = (appended.seqs[-1], rev + 1)

    async def adapter(self, state: Adapter | None, reason: str = "") -> None:
        event: Event = AdapterDeleted()
        match state and state.phase:
            case "reading":
                event = AdapterAdded(by="anna")
            case "fetching":
                event = AdapterChecked(rank=16)
            case "ready":
                event = AdapterReady(version="0123abcd4567")
            case "refused":
                event = Refused(code="rank_too_high")
            case None:
                pass  # a tombstone
        await self.write("adapter", "sql", event, state, reason)

    def watching(self, timeout_s: float = 10.0) -> "asyncio.Task[Adapter]":
        return asyncio.create_task(
            watch_on(self.log, self.wire, "sql", self.out, prefix="yard", timeout_s=timeout_s)
        )

    async def shows(self, text: str) -> None:
        await until(lambda: text in self.told.getvalue(), f"{text!r} in {self.told.getvalue()!r}")

    @property
    def lines(self) -> list[str]:
        return self.told.getvalue().splitlines()

    async def decide(self, outcome: Outcome, *then: Adapter) -> None:
        """Answers the next command as a control plane would: outcome and state at once."""
        commands = self.writer.follow_commands(after=0)
        try:
            (stored,) = await commands.next()
        finally:
            await commands.close()
        assert stored.command is not None
        assert stored.command.body == BODY
        for state in then:
            await self.adapter(state)
        event: Event = CommandAccepted()
        if outcome.code is not None:
            event = CommandRejected(code=outcome.code)
        await self.write(
            "command", stored.command.id, event, replace(outcome, id=stored.command.id)
        )


def tell(story: Callable[[Terminal], Awaitable[None]]) -> None:
    async def whole() -> None:
        await story(Terminal())

    run(whole())


def test_each_phase_is_told_with_the_bytes_of_its_files() -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READING)
        watching = t.watching()
        await t.shows("reading     its configuration and file list, at acme/sql-lora")
        await t.adapter(FETCHING, "rank 16, 4 MiB; its base was not compared")
        await t.shows("fits        qwen: rank 16, 4 MiB; its base was not compared")
        told = FileProgress(key=WEIGHTS.key, bytes=420, total_bytes=1000)
        await t.progress.progress("control", "file", WEIGHTS.key, told)
        await t.shows("fetching 420 B of 1000 B (42 %)")
        await t.write("file", FILE.key, FileFetching(mirror="cp-1"), FILE)
        await t.adapter(READY)
        assert (await watching).version == "0123abcd4567"
        firsts = [line.split()[0] for line in t.lines if not line.startswith(" ")]
        assert firsts == ["reading", "fits", "ready"]

    tell(story)


def test_one_that_is_ready_already_is_told_at_once() -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READY)
        assert await t.watching() == READY
        assert t.lines == ["ready       version 0123abcd4567; ask for sql or qwen:sql"]

    tell(story)


def test_scn_d1_an_adapter_of_too_high_a_rank_ends_with_both_numbers() -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READING)
        watching = t.watching()
        await t.shows("reading")
        await t.adapter(REFUSED)
        with pytest.raises(AdapterRefused) as refused:
            await watching
        assert refused.value.code == 1
        assert refused.value.lines[0] == "sql: rank 64; qwen is started for 16 [rank_too_high]"
        assert "yardctl adapter add sql" in refused.value.lines[1]

    tell(story)


def test_a_file_that_fails_is_told_once_and_waiting_goes_on() -> None:
    failed = replace(
        FILE,
        copies=(
            Copy(mirror="cp-1", phase="failed", since=NOW, code="no_progress", reason="no byte came",
                 retry_at=NOW),
        ),
    )  # fmt: skip
    present = replace(FILE, copies=(Copy(mirror="cp-1", phase="present", since=NOW),))
    event = FilePresent(mirror="cp-1", compared=True, origin="registry")

    async def story(t: Terminal) -> None:
        await t.adapter(FETCHING)
        watching = t.watching()
        await t.shows("fits")
        for _ in range(2):
            await t.write("file", FILE.key, FileFailed(mirror="cp-1", code="no_progress"), failed)
        await t.shows("no byte came [no_progress]; it is fetched again")
        await t.write("file", FILE.key, event, present)
        await t.adapter(READY)
        await watching
        assert t.told.getvalue().count("no byte came") == 1

    tell(story)


def test_an_outage_is_told_once_and_watching_goes_on() -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READING)
        watching = t.watching()
        await t.shows("reading")
        t.log.connection.disconnect()
        await t.shows("NATS is away; it goes on when it is back")
        await t.adapter(READY)
        t.log.connection.reconnect()
        assert await watching == READY
        assert t.told.getvalue().count("NATS is away") == 1

    tell(story)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (None, "removed meanwhile"),
        (replace(READING, incarnation="a-2", by="bob"), "added anew meanwhile, by bob"),
    ],
)
def test_one_that_is_not_the_same_any_more_is_not_waited_for(
    then: Adapter | None, says: str
) -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READING)
        watching = t.watching()
        await t.shows("reading")
        await t.adapter(then)
        with pytest.raises(CtlError, match=says):
            await watching

    tell(story)


def test_one_there_is_not_is_said_at_once() -> None:
    async def story(t: Terminal) -> None:
        with pytest.raises(CtlError, match="there is no adapter 'sql'"):
            await t.watching()

    tell(story)


def test_a_wait_that_ends_is_not_known_yet_and_says_how_to_go_on() -> None:
    async def story(t: Terminal) -> None:
        await t.adapter(READING)
        with pytest.raises(NotKnownYet, match="yardctl adapter show sql"):
            await t.watching(timeout_s=0.05)

    tell(story)


# The command ------------------------------------------------------------------------------------------

ACCEPTED = Outcome(
    id="", actor="admin", name="adapter.add", status="accepted", at=NOW, lines=("sql: added",)
)


def added(t: Terminal, wait_s: float | None, output: str = "table") -> Awaitable[Any]:
    return adapteracts.add_on(t.log, t.wire, BODY, 10.0, wait_s, output)


def test_an_adapter_is_added_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(t: Terminal) -> None:
        await asyncio.gather(added(t, 10.0), t.decide(ACCEPTED, READING, READY))

    tell(story)
    assert capsys.readouterr().out.splitlines() == [
        "sql: added",
        "ready       version 0123abcd4567; ask for sql or qwen:sql",
    ]


def test_without_waiting_the_decision_is_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(t: Terminal) -> None:
        await asyncio.gather(added(t, None), t.decide(ACCEPTED, READING))

    tell(story)
    assert capsys.readouterr().out == "sql: added\n"


def test_json_is_the_state_it_ended_in_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(t: Terminal) -> None:
        await asyncio.gather(added(t, 10.0, "json"), t.decide(ACCEPTED, READING, READY))

    tell(story)
    out, err = capsys.readouterr()
    assert json.loads(out)["version"] == "0123abcd4567"
    assert "ready" in err


def test_scn_d3_a_name_that_is_taken_is_refused_by_the_catalog() -> None:
    taken = replace(ACCEPTED, status="rejected", code="exists", sentence="sql is a model", lines=())

    async def story(t: Terminal) -> None:
        with pytest.raises(RejectedByYard, match=r"sql is a model \[exists\]"):
            await asyncio.gather(added(t, 10.0), t.decide(taken))

    tell(story)


def test_who_leaves_is_told_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(t: Terminal) -> None:
        adding = asyncio.ensure_future(added(t, 10.0))
        await t.decide(ACCEPTED, READING)
        shown = ""

        def reads() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            return "reading" in shown

        await until(reads, "it watches")
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding

    tell(story)
    assert "yardctl adapter show sql" in capsys.readouterr().err


@pytest.mark.parametrize("then", [None, replace(READING, incarnation="a-2", by="bob")])
def test_who_waits_for_what_is_gone_is_not_told_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], then: Adapter | None
) -> None:
    async def story(t: Terminal) -> None:
        adding = asyncio.ensure_future(added(t, 10.0))
        await t.decide(ACCEPTED, READING)
        shown = ""

        def reads() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            return "reading" in shown

        await until(reads, "it watches")
        await t.adapter(then)
        with pytest.raises(CtlError, match="meanwhile"):
            await adding

    tell(story)
    assert "goes on" not in capsys.readouterr().err
