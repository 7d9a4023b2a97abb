"""The unix socket of an agent: who asks, what is no ask, who waits, who leaves; whatever comes in."""

import asyncio
import contextlib
import getpass
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent import processes
from nodeagent.door import MOST_ASKERS, MOST_BYTES, NODE, SOCKET, Door
from schemas.cardasks import CardAnswer, CardAsk, ClaimStart, LeaseAcquire, LeaseRelease
from tests.support.aio import run, until
from tests.support.card_desk import FakeDesk, granted, waits
from tests.support.http_wire import LOOPS, run_on

ID = "l-abcdefgh23"


def acquire(**more: Any) -> dict[str, Any]:
    return {"ask": "acquire", "id": ID, "name": "render", "cards": ["gpu0"], **more}


@contextlib.asynccontextmanager
async def door(
    folder: Path, desk: FakeDesk | None = None, **more: Any
) -> AsyncIterator[tuple[FakeDesk, Path]]:
    desk = desk or FakeDesk()
    opened = Door(desk, folder / "nodeagent", "n1", **more)
    await opened.open()
    try:
        yield desk, folder / "nodeagent" / SOCKET
    finally:
        await opened.close()


class Asker:
    """One connection, raw."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def ask(self, body: dict[str, Any]) -> CardAnswer:
        await self.send(json.dumps(body).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> CardAnswer:
        line = await asyncio.wait_for(self.reader.readline(), 5)
        assert line.endswith(b"\n"), "no answer"
        return msgspec.json.decode(line, type=CardAnswer)

    async def at_end(self) -> bool:
        return await asyncio.wait_for(self.reader.read(1), 5) == b""


@contextlib.asynccontextmanager
async def asker(path: Path) -> AsyncIterator[Asker]:
    folder = os.open(path.parent, os.O_PATH)
    try:
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    try:
        yield Asker(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_the_socket_is_for_its_user_alone_and_names_its_node(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "nodeagent").mkdir(mode=0o755)
        (tmp_path / "nodeagent" / SOCKET).write_text("left by a killed agent")
        async with door(tmp_path) as (_, path):
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert (path.parent / NODE).read_text() == "n1"
        assert not path.exists()

    run(story())


def test_a_data_folder_deeper_than_a_sockets_address_works(tmp_path: Path) -> None:
    async def story() -> None:
        deep = tmp_path / ("d" * 100) / ("e" * 100)
        async with door(deep) as (desk, path):
            assert len(str(path)) > 107
            async with asker(path) as person:
                assert (await person.ask(acquire())).status == "granted"
            assert len(desk.asked) == 1

    run(story())


def test_inv_8_the_kernel_says_who_asks(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path), asker(path) as person:
            answer = await person.ask(acquire(process=os.getpid()))
            assert answer == granted(LeaseAcquire(id=ID, name="render", cards=("gpu0",)))
            (asked,) = desk.asked
            assert asked.by == getpass.getuser()
            assert asked.process is not None
            me = processes.look(os.getpid())
            assert me is not None
            assert (asked.process.pid, asked.process.started) == (me.pid, me.start_time)
            assert asked.process.boot
            assert desk.durables == 1

    run(story())


def test_several_asks_may_follow_one_another_on_one_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path), asker(path) as person:
            await person.ask(acquire())
            await person.ask({"ask": "release", "what": ID})
            await person.ask({"ask": "vm.detach", "card": "gpu0"})
            assert [type(a.ask).__name__ for a in desk.asked] == [
                "LeaseAcquire",
                "LeaseRelease",
                "VmDetach",
            ]

    run(story())


def test_a_lease_shares_its_askers_life_and_nobody_elses(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path), asker(path) as person:
            answer = await person.ask(acquire(process=os.getppid()))
            assert (answer.status, answer.code) == ("refused", "invalid")
            assert "not of" in answer.sentence
            assert await person.at_end()
            assert desk.asked == []

    run(story())


def test_a_claim_may_name_any_living_process_of_the_user(tmp_path: Path) -> None:
    async def story() -> None:
        claim = {"ask": "claim", "id": "c-abcdefgh23", "name": "game", "card": "gpu0"}
        game = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
        )
        assert game.stdin is not None
        async with door(tmp_path) as (desk, path):
            async with asker(path) as person:
                assert (await person.ask({**claim, "process": game.pid})).status == "granted"
            (asked,) = desk.asked
            assert isinstance(asked.ask, ClaimStart)
            assert asked.process is not None
            assert asked.process.pid == game.pid
            game.stdin.close()
            await game.wait()
            async with asker(path) as person:
                answer = await person.ask({**claim, "process": game.pid})
                assert (answer.code, answer.sentence) == (
                    "not_found",
                    f"there is no process {game.pid}",
                )
            assert len(desk.asked) == 1

    run(story())


BAD = {
    "no JSON": b"please\n",
    "half of it": b'{"ask":"acquire"\n',
    "no object": b"[]\n",
    "a number": b"1\n",
    "empty": b"\n",
    "binary": bytes(range(128, 256)) + b"\n",
    "zeros": b"\0" * 100 + b"\n",
    "no such ask": b'{"ask":"reboot"}\n',
    "an unknown field": json.dumps(acquire(force=True)).encode() + b"\n",
    "no fields": b'{"ask":"acquire"}\n',
    "nested deeply": b"[" * 50_000 + b"\n",
    "a lone surrogate": b'{"ask":"release","what":"\\ud800"}\n',
    "an infinite wait": json.dumps(acquire()).encode()[:-1] + b',"wait_s":1e999}\n',
    "not a number": json.dumps(acquire()).encode()[:-1] + b',"wait_s":NaN}\n',
    "too long": json.dumps(acquire(name="x" * MOST_BYTES)).encode() + b"\n",
    "much too long": b"x" * (4 * MOST_BYTES),
    "a control character": json.dumps(acquire(name="a\nb")).encode() + b"\n",
    "a name too long": json.dumps(acquire(name="x" * 65)).encode() + b"\n",
    "a wrong id": json.dumps(acquire(id="l-short")).encode() + b"\n",
    "no card": json.dumps(acquire(cards=[])).encode() + b"\n",
    "a card twice": json.dumps(acquire(cards=["a", "a"])).encode() + b"\n",
    "no memory": json.dumps(acquire(memory_bytes=0)).encode() + b"\n",
    "negative time": json.dumps(acquire(ttl_s=-1)).encode() + b"\n",
    "a far future": json.dumps(acquire(wait_s=1e300)).encode() + b"\n",
    "a pid of nobody": json.dumps(acquire(process=0)).encode() + b"\n",
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_ask_gets_one_refusal_and_the_connection_is_closed(
    tmp_path: Path, what: str
) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path), asker(path) as person:
            await person.send(BAD[what])
            answer = await person.answer()
            assert (answer.status, answer.code) == ("refused", "invalid")
            assert answer.sentence
            assert "Traceback" not in answer.sentence
            assert await person.at_end()
            assert desk.asked == []

    run(story())


@pytest.mark.parametrize("name", ["x" * 64, "Blender 4.2 – Küche", "渲染", "👩‍💻 render", "a/b c"])
def test_a_name_may_be_anything_a_person_types(tmp_path: Path, name: str) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path), asker(path) as person:
            assert (await person.ask(acquire(name=name))).status == "granted"
            (asked,) = desk.asked
            assert isinstance(asked.ask, LeaseAcquire)
            assert asked.ask.name == name

    run(story())


def test_half_a_line_is_refused_when_no_more_comes(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path) as (_, path), asker(path) as person:
            await person.send(b'{"ask":')
            person.writer.write_eof()
            assert "middle of its line" in (await person.answer()).sentence
            assert await person.at_end()
        async with door(tmp_path, first_s=0.05) as (_, path), asker(path) as person:
            await person.send(b'{"ask":')
            assert "no ask came within" in (await person.answer()).sentence
            assert await person.at_end()

    run(story())


def test_a_connection_that_has_its_answer_is_closed_without_a_word(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path, first_s=0.05) as (_, path), asker(path) as person:
            assert (await person.ask(acquire())).status == "granted"
            assert await person.at_end()

    run(story())


def test_an_asker_who_closes_its_own_side_still_gets_its_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path) as (_, path), asker(path) as person:
            await person.send(json.dumps(acquire()).encode() + b"\n")
            person.writer.write_eof()
            assert (await person.answer()).status == "granted"
            assert await person.at_end()

    run(story())


def test_inv_5_a_waiter_hears_each_change_and_then_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path, FakeDesk(waits)) as (desk, path), asker(path) as person:
            assert (await person.ask(acquire(wait_s=60))).waiting_for == ("r-holder",)
            desk.tell(CardAnswer(status="waiting", id=ID, waiting_for=("r-other",)))
            assert (await person.answer()).waiting_for == ("r-other",)
            desk.tell(CardAnswer(status="granted", id=ID, fences={"gpu0": 9}))
            assert (await person.answer()).fences == {"gpu0": 9}
            desk.decide = granted
            assert (await person.ask({"ask": "release", "what": ID})).status == "granted"
        assert desk.left == []

    run(story())


def test_an_asker_that_leaves_while_it_waits_leaves_the_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path, FakeDesk(waits)) as (desk, path):
            async with asker(path) as person:
                await person.ask(acquire(wait_s=60))
            await until(lambda: desk.left == [ID], "the waiter is gone")

    run(story())


def sockets_open() -> int:
    """How many sockets this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


class SlowDesk(FakeDesk):
    """Puts down what follows a first answer only when it is let."""

    def __init__(self) -> None:
        super().__init__(waits)
        self.writes = asyncio.Event()

    async def durable(self) -> None:
        await super().durable()
        if self.durables > 1:
            await self.writes.wait()


@pytest.mark.parametrize("loop", LOOPS)
def test_an_asker_that_leaves_as_its_answer_comes_is_no_fault_of_the_agent(
    loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = os.path.relpath(tmp_path / "nodeagent" / SOCKET)

    async def story() -> None:
        desk = SlowDesk()
        async with door(tmp_path, desk):
            client = socket.socket(socket.AF_UNIX)
            client.connect(address)
            client.setblocking(False)
            client.send(json.dumps(acquire(wait_s=9)).encode() + b"\n")
            await until(lambda: desk.durables == 1, "the ask to be put in line")
            desk.tell(granted(ClaimStart(id=ID, name="render", card="gpu0")))
            await until(lambda: desk.durables == 2, "the grant to be put down")
            before = sockets_open()
            client.close()  # with an answer unread: the agent's end is reset
            await until(lambda: sockets_open() <= before - 2, "the agent's end to be closed")
            desk.writes.set()
            await until(lambda: desk.left == [ID], "the asker to be gone")
        assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == []

    run_on(loop, story())


def test_an_asker_killed_while_it_waits_leaves_the_line(tmp_path: Path) -> None:
    program = (
        "import socket,sys,time;s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1]);"
        "s.sendall(sys.argv[2].encode()+b'\\n');print(s.recv(1000),flush=True);time.sleep(60)"
    )

    async def story() -> None:
        async with door(tmp_path, FakeDesk(waits)) as (desk, path):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, str(path), json.dumps(acquire(wait_s=60)),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert child.stdout is not None
            assert b"waiting" in await child.stdout.readline()
            child.kill()
            await child.wait()
            await until(lambda: desk.left == [ID], "the waiter is gone")

    run(story())


def test_a_second_ask_beside_a_waiting_one_ends_both(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path, FakeDesk(waits)) as (desk, path), asker(path) as person:
            await person.ask(acquire(wait_s=60))
            assert "an ask waiting already" in (await person.ask(acquire())).sentence
            assert await person.at_end()
            assert desk.left == [ID]
            assert len(desk.asked) == 1

    run(story())


def test_an_agent_that_leaves_keeps_those_who_wait_in_line(tmp_path: Path) -> None:
    async def story() -> None:
        desk = FakeDesk(waits)
        async with contextlib.AsyncExitStack() as stack:
            async with door(tmp_path, desk) as (_, path):
                person = await stack.enter_async_context(asker(path))
                await person.ask(acquire(wait_s=60))
            assert await person.at_end()
        assert desk.left == []

    run(story())


def test_an_asker_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        deaf = door(tmp_path, FakeDesk(waits), write_s=0.1)
        async with deaf as (desk, path), asker(path) as person:
            await person.ask(acquire(wait_s=60))
            person.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(200):
                desk.tell(CardAnswer(status="waiting", id=ID, sentence="x" * 10_000))
            await until(lambda: desk.left == [ID], "the deaf asker is gone")

    run(story())


def test_a_fault_of_the_desk_is_a_sentence_and_the_door_stays_open(tmp_path: Path) -> None:
    def broken(_: CardAsk) -> CardAnswer:
        raise RuntimeError("a bug")

    async def story() -> None:
        async with door(tmp_path, FakeDesk(broken)) as (desk, path):
            async with asker(path) as person:
                answer = await person.ask(acquire())
                assert (answer.status, answer.code) == ("refused", "internal")
                assert "a bug" not in answer.sentence
            desk.decide = granted
            async with asker(path) as person:
                assert (await person.ask(acquire())).status == "granted"

    run(story())


def test_more_connections_than_the_agent_keeps_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with door(tmp_path, FakeDesk(waits)) as (desk, path):
            async with contextlib.AsyncExitStack() as stack:
                for n in range(MOST_ASKERS):
                    person = await stack.enter_async_context(asker(path))
                    digits = "".join("abcdefghij"[int(d)] for d in f"{n:010}")
                    await person.ask(acquire(id=f"l-{digits}", wait_s=60))
                late = await stack.enter_async_context(asker(path))
                assert "too many" in (await late.answer()).sentence
                assert await late.at_end()
            await until(lambda: len(desk.left) == MOST_ASKERS, "all are gone")

    run(story())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(min_size=1, max_size=300))
def test_no_bytes_at_all_make_the_door_fail(tmp_path: Path, content: bytes) -> None:
    async def story() -> None:
        async with door(tmp_path) as (desk, path):
            async with asker(path) as person:
                await person.send(content)
                person.writer.write_eof()
                assert (await person.answer()).status == "refused"
                assert await person.at_end()
            async with asker(path) as person:
                assert (await person.ask({"ask": "release", "what": "x"})).status == "granted"
            assert [a.ask for a in desk.asked] == [LeaseRelease(what="x")]

    run(story())
