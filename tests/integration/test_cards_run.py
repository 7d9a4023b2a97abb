"""`yardctl run` and the commands beside it, over an agent's socket and nothing else: no NATS, no API."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.ctl import cardsocket
from controlplane.ctl.connect import Place, find_place
from controlplane.ctl.supervisor import python_argv
from nodeagent.door import Door
from schemas.cardasks import CardAnswer, CardAsk, LeaseAcquire, LeaseRelease
from tests.support.aio import run, until
from tests.support.card_desk import FakeDesk, granted, waits

CARD = ("--card", "n1/gpu0", "--as", "render")


class Yard:
    """A data folder with an agent's door and a desk behind it."""

    def __init__(self, data: Path, desk: FakeDesk) -> None:
        self.data = data
        self.desk = desk
        self.door = Door(desk, data / "nodeagent", "n1")

    async def start(
        self, *arguments: str, environment: dict[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *python_argv("controlplane.ctl", *arguments),
            env={**os.environ, "YARD_DATA": str(self.data), **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def ctl(self, *arguments: str) -> tuple[int, str, str]:
        process = await self.start(*arguments)
        out, err = await process.communicate()
        assert process.returncode is not None
        assert b"Traceback" not in err
        return process.returncode, out.decode(), err.decode()

    @property
    def asks(self) -> list[CardAsk]:
        return [asked.ask for asked in self.desk.asked]


@contextlib.asynccontextmanager
async def yard(data: Path, desk: FakeDesk | None = None) -> AsyncIterator[Yard]:
    made = Yard(data, desk or FakeDesk())
    await made.door.open()
    try:
        yield made
    finally:
        await made.door.close()


def refusing(ask: CardAsk) -> CardAnswer:
    return CardAnswer(status="refused", code="card_kept", sentence="gpu0 is kept by the claim game")


def program(text: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", text)


def test_the_program_has_its_cards_its_lease_and_its_own_pid(tmp_path: Path) -> None:
    text = (
        "import os;print(os.getpid(), os.environ['YARD_LEASE'], "
        "os.environ['CUDA_VISIBLE_DEVICES'], os.environ['MINE'])"
    )

    async def story() -> None:
        async with yard(tmp_path) as y:
            process = await y.start(
                "run", *CARD, "--memory", "1GiB", "--pinned", "--priority", "hold", "--wait", "9s",
                *program(text), environment={"MINE": "kept"},
            )  # fmt: skip
            out, err = await process.communicate()
            assert process.returncode == 0, err
            (asked,) = y.desk.asked
            ask = asked.ask
            assert isinstance(ask, LeaseAcquire)
            assert out.decode().split() == [str(process.pid), ask.id, "GPU-1", "kept"]
            assert asked.process is not None
            assert asked.process.pid == process.pid
            assert (ask.name, ask.cards, ask.memory_bytes) == ("render", ("gpu0",), 1024**3)
            assert (ask.pinned, ask.priority, ask.process) == (True, "hold", process.pid)
            assert 8 < ask.wait_s <= 9
            assert err == b""

    run(story())


def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            code, _, _ = await y.ctl("run", *CARD, "--", "sh", "-c", "exit 42")
            assert code == 42

    run(story())


def test_a_signal_reaches_the_program_and_its_death_is_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            process = await y.start(
                "run", *CARD, *program("import time;print(1,flush=True);time.sleep(60)")
            )
            assert process.stdout is not None
            await process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == -signal.SIGTERM

    run(story())


def test_the_program_starts_with_the_signals_a_shell_would_give_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            # A shell, because a Python would ignore SIGPIPE by itself.
            code, out, err = await y.ctl(
                "run", *CARD, "--", "sh", "-c", "grep SigIgn /proc/$$/status"
            )
            assert (code, err) == (0, "")
            assert int(out.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0

    run(story())


def test_options_behind_the_program_are_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            code, out, _ = await y.ctl("run", *CARD, "echo", "--as", "x", "-o", "--", "--help")
            assert (code, out) == (0, "--as x -o -- --help\n")

    run(story())


def test_several_cards_are_asked_for_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            code, _, err = await y.ctl("run", *CARD, "--card", "n1/gpu1", "--", "true")
            assert (code, err) == (0, "")
            (ask,) = y.asks
            assert isinstance(ask, LeaseAcquire)
            assert ask.cards == ("gpu0", "gpu1")

    run(story())


def test_a_refused_ask_never_runs_the_program(tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    async def story() -> None:
        async with yard(tmp_path / "data", FakeDesk(refusing)) as y:
            code, out, err = await y.ctl("run", *CARD, "--", "touch", str(trace))
            assert (code, out) == (2, "")
            assert err == "yardctl: gpu0 is kept by the claim game [card_kept]\n"
            assert not trace.exists()

    run(story())


def test_a_program_the_kernel_does_not_take_gives_its_lease_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path / "data") as y:
            odd = tmp_path / "odd"
            odd.write_bytes(b"\x00no program\n")
            odd.chmod(0o700)
            code, _, err = await y.ctl("run", *CARD, "--", str(odd))
            assert code == 126
            assert "cannot be run" in err
            ask, back = y.asks
            assert isinstance(ask, LeaseAcquire)
            assert back == LeaseRelease(what=ask.id)

    run(story())


def test_who_waits_sees_for_whom_and_then_runs(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path, FakeDesk(waits)) as y:
            process = await y.start("run", *CARD, "--", "echo", "done")
            await until(lambda: len(y.asks) == 1, "an ask")
            (ask,) = y.asks
            assert isinstance(ask, LeaseAcquire)
            assert process.stderr is not None
            first = await asyncio.wait_for(process.stderr.readline(), 10)
            assert first == b"n1/gpu0: waiting for r-holder to leave\n"
            y.desk.tell(CardAnswer(status="waiting", id=ask.id, waiting_for=("l-1", "l-2")))
            second = await asyncio.wait_for(process.stderr.readline(), 10)
            assert second == b"n1/gpu0: waiting for l-1, l-2 to leave\n"
            y.desk.tell(granted(ask))
            out, err = await process.communicate()
            assert (process.returncode, out, err) == (0, b"done\n", b"")
            assert y.desk.left == []

    run(story())


def test_the_end_of_the_wait_is_the_agents_word(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path, FakeDesk(waits)) as y:
            process = await y.start("run", *CARD, "--", "echo", "never")
            await until(lambda: len(y.asks) == 1, "an ask")
            (ask,) = y.asks
            assert isinstance(ask, LeaseAcquire)
            y.desk.tell(
                CardAnswer(status="refused", id=ask.id, code="timed_out", sentence="it waited 5 s")
            )
            out, err = await process.communicate()
            assert (process.returncode, out) == (2, b"")
            assert err.decode().splitlines()[-1] == "yardctl: it waited 5 s [timed_out]"

    run(story())


def test_ctrl_c_leaves_the_line_and_is_130(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path, FakeDesk(waits)) as y:
            process = await y.start("run", *CARD, "--", "echo", "never")
            assert process.stderr is not None
            await asyncio.wait_for(process.stderr.readline(), 10)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            assert (process.returncode, out, err.strip()) == (130, b"", b"")
            ask = y.asks[0]
            assert isinstance(ask, LeaseAcquire)
            assert y.desk.left == [ask.id]
            # What was granted in that very moment is given back, too.
            assert y.asks[1] == LeaseRelease(what=ask.id)

    run(story())


def test_a_killed_waiter_leaves_the_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path, FakeDesk(waits)) as y:
            process = await y.start("run", *CARD, "--", "echo", "never")
            assert process.stderr is not None
            await asyncio.wait_for(process.stderr.readline(), 10)
            process.kill()
            await process.communicate()
            await until(lambda: len(y.desk.left) == 1, "the waiter is gone")

    run(story())


def test_inv_6_an_agent_started_again_is_asked_again_under_the_same_id(tmp_path: Path) -> None:
    async def story() -> None:
        desk = FakeDesk(waits)
        async with yard(tmp_path, desk) as y:
            process = await y.start("run", *CARD, "--", "echo", "done")
            assert process.stderr is not None
            await asyncio.wait_for(process.stderr.readline(), 10)
        desk.decide = granted
        async with yard(tmp_path, desk) as y:
            out, err = await process.communicate()
            assert (process.returncode, out) == (0, b"done\n")
            assert b"the agent is away" in err
            first, second = y.asks
            assert isinstance(first, LeaseAcquire)
            assert isinstance(second, LeaseAcquire)
            assert second.id == first.id
            assert second.wait_s < first.wait_s

    run(story())


def test_a_killed_agents_socket_is_waited_for_a_moment(tmp_path: Path) -> None:
    async def story() -> None:
        async with yard(tmp_path) as y:
            (tmp_path / "nodeagent" / "cards.sock").rename(tmp_path / "kept")
        (tmp_path / "kept").rename(tmp_path / "nodeagent" / "cards.sock")
        process = await y.start("run", *CARD, "--", "echo", "done")
        async with yard(tmp_path) as again:
            out, _ = await process.communicate()
            assert (process.returncode, out) == (0, b"done\n")
            assert len(again.asks) == 1

    run(story())


def test_an_agent_with_a_crowd_before_its_socket_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    connect = cardsocket._connect

    async def counted(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal tries
        tries += 1
        return await connect(place)

    monkeypatch.setattr(cardsocket, "_connect", counted)
    (tmp_path / "nodeagent").mkdir()
    (tmp_path / "nodeagent" / "node").write_text("n1")
    address = os.path.relpath(tmp_path / "nodeagent" / "cards.sock")

    async def story() -> None:
        with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
            full.bind(address)
            full.listen(0)
            first.connect(address)  # the kernel lets nobody else wait there
            body = LeaseAcquire(id="l-abcdefgh23", name="render", cards=("gpu0",))
            place = find_place(data=tmp_path)
            asking = asyncio.create_task(cardsocket.ask_here(place, body, lambda _: None))
            await until(lambda: tries > 1 or asking.done(), "another try")
        async with yard(tmp_path) as y:
            assert (await asking).status == "granted"
            assert y.asks == [body]

    run(story())
