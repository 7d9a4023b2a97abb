"""The commands about cards over an agent's socket alone, in this process: what is asked, printed, refused."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from controlplane.ctl import main, running
from nodeagent.door import Door
from schemas.cardasks import (
    CardAnswer,
    CardAsk,
    ClaimEnd,
    ClaimStart,
    LeaseAcquire,
    LeaseRelease,
    VmAttach,
    VmDetach,
)
from tests.support.aio import run, until
from tests.support.card_desk import FakeDesk, granted, waits

CARD = ("--card", "n1/gpu0", "--as", "render")
Told = tuple[int, str, str]


class Yard:
    """A data folder with an agent's door, and yardctl beside it."""

    def __init__(self, data: Path, desk: FakeDesk, capsys: pytest.CaptureFixture[str]) -> None:
        self.data = data
        self.desk = desk
        self._capsys = capsys

    async def ctl(self, *arguments: str) -> Told:
        code = await asyncio.to_thread(main.main, list(arguments))
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    @property
    def asks(self) -> list[CardAsk]:
        return [asked.ask for asked in self.desk.asked]


Story = Callable[[Yard], Coroutine[Any, Any, None]]
Tell = Callable[..., None]


@pytest.fixture
def tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tell:
    for name in ("YARD_NATS", "YARD_API", "YARD_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data"
    monkeypatch.setenv("YARD_DATA", str(data))

    @contextlib.asynccontextmanager
    async def opened(desk: FakeDesk, there: bool) -> AsyncIterator[Yard]:
        door = Door(desk, data / "nodeagent", "n1")
        await door.open()
        if not there:
            await door.close()
        try:
            yield Yard(data, desk, capsys)
        finally:
            await door.close()

    def told(
        story: Story, decide: Callable[[CardAsk], CardAnswer] = granted, *, there: bool = True
    ) -> None:
        async def whole() -> None:
            async with opened(FakeDesk(decide), there) as yard:
                await story(yard)

        run(whole())

    return told


def refusing(ask: CardAsk) -> CardAnswer:
    del ask
    return CardAnswer(status="refused", code="card_kept", sentence="gpu0 is kept by quake")


def test_leases_are_had_and_given_back_without_any_network(tell: Tell) -> None:
    """There is not even a password in this data folder."""

    async def story(y: Yard) -> None:
        code, out, _ = await y.ctl(
            "lease", "acquire", "n1/gpu0", "n1/gpu1", "--as", "me", "--ttl", "1h"
        )
        (ask,) = y.asks
        assert isinstance(ask, LeaseAcquire)
        assert (ask.cards, ask.ttl_s, ask.process) == (("gpu0", "gpu1"), 3600.0, None)
        assert (ask.pinned, ask.priority, ask.memory_bytes) == (False, "interactive", None)
        assert (code, out) == (0, f"{ask.id}: n1/gpu0, n1/gpu1 leased to me for 1h\n")
        assert await y.ctl("lease", "release", "me") == (0, "me: released\n", "")
        assert y.asks[-1] == LeaseRelease(what="me")

    tell(story)


def test_a_lease_is_asked_for_as_it_was_typed(tell: Tell) -> None:
    async def story(y: Yard) -> None:
        code, out, _ = await y.ctl(
            "lease", "acquire", "n1/gpu0", "--as", "渲染", "--memory", "8GiB", "--pinned",
            "--priority", "batch", "--wait", "0", "-o", "json",
        )  # fmt: skip
        (ask,) = y.asks
        assert ask == LeaseAcquire(
            id=json.loads(out)["id"], name="渲染", cards=("gpu0",), memory_bytes=8 * 1024**3,
            pinned=True, priority="batch",
        )  # fmt: skip
        assert code == 0
        told = json.loads(out)
        assert (told["status"], told["fences"], told["node"]) == ("granted", {"gpu0": 7}, "n1")

    tell(story)


def test_a_claim_is_made_and_ended(tell: Tell) -> None:
    async def story(y: Yard) -> None:
        _, out, _ = await y.ctl("claim", "start", "n1/gpu0", "--as", "quake")
        (claim,) = y.asks
        assert isinstance(claim, ClaimStart)
        assert (claim.name, claim.card, claim.kind, claim.process) == (
            "quake",
            "gpu0",
            "game",
            None,
        )
        assert out == f"{claim.id}: n1/gpu0 is kept for quake\n"
        _, out, _ = await y.ctl("claim", "end", claim.id)
        assert out == f"{claim.id}: ended\n"
        assert y.asks[-1] == ClaimEnd(what=claim.id)
        me = os.getpid()
        code, _, _ = await y.ctl(
            "claim", "start", "n1/gpu0", "--as", "x", "--kind", "app", "--pid", str(me)
        )
        assert code == 0
        process = y.desk.asked[-1].process
        assert process is not None
        assert process.pid == me

    tell(story)


def test_a_vm_gets_a_card_and_gives_it_back(tell: Tell) -> None:
    async def story(y: Yard) -> None:
        assert await y.ctl("vm", "attach", "n1/gpu0", "--as", "win11") == (
            0,
            "n1/gpu0: attached to win11\n",
            "",
        )
        (ask,) = y.asks
        assert isinstance(ask, VmAttach)
        assert (ask.name, ask.card) == ("win11", "gpu0")
        assert 299 < ask.wait_s <= 300
        assert (await y.ctl("vm", "detach", "n1/gpu0"))[1] == "n1/gpu0: detached\n"
        assert y.asks[-1] == VmDetach(card="gpu0")

    tell(story)


@pytest.mark.parametrize(
    ("arguments", "least_s"),
    [
        (("lease", "acquire", "n1/gpu0", "--as", "x"), 59),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--wait"), 86399),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--wait", "--pinned"), 86399),
        (("lease", "acquire", "n1/gpu0", "--wait", "5m", "--as", "x"), 299),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--wait", "0"), 0),
        (("run", *CARD, "--wait", "--", "no-such-program"), None),
    ],
)
def test_a_wait_has_a_default_a_time_or_none(
    tell: Tell, arguments: tuple[str, ...], least_s: float | None
) -> None:
    async def story(y: Yard) -> None:
        code, _, _ = await y.ctl(*arguments)
        if least_s is None:
            assert code == 127, "what follows -- is the program"
            return
        (ask,) = y.asks
        assert isinstance(ask, LeaseAcquire)
        assert least_s <= ask.wait_s <= least_s + 1

    tell(story)


@pytest.mark.parametrize(
    "arguments",
    [
        ("lease", "acquire", "n1/gpu0", "--as", "x"),
        ("lease", "release", "x"),
        ("claim", "start", "n1/gpu0", "--as", "x"),
        ("claim", "end", "x"),
        ("vm", "attach", "n1/gpu0", "--as", "x"),
        ("vm", "detach", "n1/gpu0"),
        ("run", *CARD, "--", "true"),
    ],
)
def test_a_no_is_2_with_the_agents_sentence(tell: Tell, arguments: tuple[str, ...]) -> None:
    async def story(y: Yard) -> None:
        assert await y.ctl(*arguments) == (2, "", "yardctl: gpu0 is kept by quake [card_kept]\n")
        assert len(y.asks) == 1

    tell(story, refusing)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("lease", "acquire", "gpu0", "--as", "x"), 64, "expected NODE/CARD"),
        (("lease", "acquire", "n1/", "--as", "x"), 64, "expected NODE/CARD"),
        (("lease", "acquire", "n1/gpu0"), 64, "--as"),
        (("lease", "acquire", "--as", "x"), 64, "NODE/CARD"),
        (("lease", "acquire", "n1/gpu0", "n2/gpu0", "--as", "x"), 64, "of one node only"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--memory", "lots"), 64, "a size such as"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--priority", "now"), 64, "now"),
        (("lease", "acquire", "n1/gpu0", "--as", "a\nb"), 2, "control character U+000A"),
        (("lease", "acquire", "n1/gpu0", "--as", " "), 2, "the name is empty"),
        (("lease", "acquire", "n1/gpu0", "--as", "x" * 65), 2, "at most 64"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--memory", "0"), 2, "cannot be leased"),
        (("lease", "acquire", "n1/gpu0", "n1/gpu0", "--as", "x"), 2, "named twice"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--ttl", "soon"), 64, "a duration"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--ttl", "9999d"), 2, "cannot be given"),
        (("lease", "acquire", "n1/gpu0", "--as", "x", "--wait", "99999h"), 2, "a wait of"),
        (("lease", "acquire", "n1/gpu0", "--as", os.fsdecode(b"\xff")), 64, "no valid Unicode"),
        (("lease", "release", ""), 2, "is empty"),
        (("claim", "end", "a\tb"), 2, "control character"),
        (("run", "--card", "n1/gpu0", "--as", "x"), 64, "COMMAND"),
        (("run", "--as", "x", "--", "true"), 64, "--card"),
        (("run", "--card", "n1/gpu0", "--as", "x", "--typo", "true"), 64, "--typo"),
        (("run", *CARD, "--card", "n2/gpu0", "--", "true"), 64, "of one node only"),
        (("run", "--card", "n2/gpu0", "--as", "x", "--", "true"), 2, "[not_here]"),
        (("run", *CARD, "--", "no-such-program"), 127, "there is no such command"),
        (("run", *CARD, "--", "./no/such/program"), 127, "there is no such command"),
        (("run", *CARD, "--", ""), 127, "there is no such command"),
        (("run", *CARD, "--", "/dev/null"), 126, "cannot be run"),
        (("claim", "start", "n1/gpu0", "--as", "x", "--pid", "0"), 64, "0"),
        (("claim", "start", "n1/gpu0", "--as", "x", "--pid", "99999999"), 2, "no process"),
        (("claim", "start", "n1/gpu0", "--as", "x", "--kind", "cat"), 64, "cat"),
        (("claim", "start", "n2/gpu0", "--as", "x", "--pid", "1"), 2, "not_here"),
        (("lease", "acquire", "n2/gpu0", "--as", "x"), 69, "no yard in"),
        (("card", "show", "gpu0"), 64, "expected NODE/CARD"),
        (("place", "m", "--card", "gpu0"), 64, "expected NODE/CARD"),
        (("replica", "park", ""), 64, "the id of a replica"),
        (("replica", "resume", ""), 64, "the id of a replica"),
        (("card",), 64, ""),
        (("lease",), 64, ""),
    ],
)
def test_what_is_typed_wrong_is_told_in_a_sentence_and_nothing_is_decided(
    tell: Tell, arguments: tuple[str, ...], code: int, says: str
) -> None:
    async def story(y: Yard) -> None:
        got, _, err = await y.ctl(*arguments)
        assert got == code, err
        assert says in err
        assert y.asks == []

    tell(story)


def test_a_program_is_no_program_without_its_interpreter(tell: Tell, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.write_text("#!/no/such/interpreter\n")
    gone.chmod(0o700)

    async def story(y: Yard) -> None:
        # In this process nothing may become a program, and only the main thread may set signals.
        code, _, _ = await y.ctl("run", *CARD, "--", str(gone))
        ask, back = y.asks
        assert isinstance(ask, LeaseAcquire)
        assert back == LeaseRelease(what=ask.id)
        assert code == 127

    def become(path: str, command: object, environment: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "become", become)
        tell(story)


def test_an_agent_that_only_starts_is_waited_for(tell: Tell) -> None:
    early = CardAnswer(status="refused", code="yard_unavailable", sentence="ask again in a moment")
    answers = iter([early, early])

    async def story(y: Yard) -> None:
        code, out, err = await y.ctl("claim", "start", "n1/gpu0", "--as", "quake")
        assert (code, err) == (0, "n1/gpu0: the agent is starting\n")
        assert "kept for quake" in out
        assert len(y.asks) == 3
        assert len({str(ask) for ask in y.asks}) == 1, "the same ask, under the same id"

    tell(story, lambda ask: next(answers, granted(ask)))


def test_an_agent_that_left_is_69(tell: Tell) -> None:
    async def story(y: Yard) -> None:
        code, _, err = await y.ctl("run", *CARD, "--", "true")
        assert code == 69
        assert "does not listen" in err

    tell(story, there=False)


def test_who_may_wait_is_told_what_for(tell: Tell) -> None:
    async def story(y: Yard) -> None:
        asking = asyncio.create_task(
            y.ctl("vm", "attach", "n1/gpu0", "--as", "win", "--wait", "5s")
        )
        await until(lambda: len(y.desk.asked) == 1, "an ask")
        y.desk.tell(CardAnswer(status="waiting", waiting_for=("r-1", "l-2")))
        y.desk.tell(CardAnswer(status="waiting", waiting_for=("r-1", "l-2")))
        y.desk.tell(CardAnswer(status="waiting", sentence="r-1 drains, 12 s are left"))
        y.desk.tell(CardAnswer(status="granted"))
        code, out, err = await asking
        assert (code, out) == (0, "n1/gpu0: attached to win\n")
        assert err.splitlines() == [
            "n1/gpu0: waiting for r-holder to leave",
            "n1/gpu0: waiting for r-1, l-2 to leave",
            "n1/gpu0: r-1 drains, 12 s are left",
        ]

    tell(story, waits)


def test_what_listens_and_is_no_agent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def strange(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    async def story() -> None:
        folder = tmp_path / "nodeagent"
        folder.mkdir()
        (folder / "node").write_text("n1")
        monkeypatch.setenv("YARD_DATA", str(tmp_path))
        async with await asyncio.start_unix_server(strange, folder / "cards.sock"):
            code, _, err = await Yard(tmp_path, FakeDesk(), capsys).ctl("run", *CARD, "--", "true")
            assert code == 69
            assert "is no agent" in err

    run(story())
