"""The command driver with scripted engines under real launchers: from a profile to an answer."""

import asyncio
from pathlib import Path

import pytest

from nodeagent.drivers import asking
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import EngineStart
from nodeagent.launching import Ended, LaunchEnded, Launcher, Running
from schemas.plan import Launch
from tests.support.aio import run, until
from tests.support.launches import REPLICA, launcher, no_secrets
from tests.support.ports import free_port
from tests.support.scripted import ask, command

KEY = "key-of-the-launch"


def prepare(**script: object) -> EngineStart:
    launch = Launch(
        model="fake",
        incarnation="i",
        profile="any",
        revision="1",
        engine="command",
        command=command(**script),
        key_env="API_KEY",
    )
    start = CommandDriver().prepare(
        launch, replica=REPLICA, host="127.0.0.1", port=free_port(), key=KEY, secrets=no_secrets
    )
    assert isinstance(start, EngineStart), start
    return start


async def begin(made: Launcher, start: EngineStart) -> Running:
    running = await made.start(REPLICA, start, grace_s=5.0, log_bytes=1 << 20)
    assert isinstance(running, Running)
    return running


async def answers(start: EngineStart) -> None:
    driver = CommandDriver()
    await until(lambda: driver.probe(start.endpoint, KEY), "the engine to answer")


def test_a_command_is_asked_until_it_answers_and_has_the_launch_s_key(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            start = prepare(load_s=0.3)
            await begin(made, start)
            assert not await CommandDriver().probe(start.endpoint, KEY)
            await answers(start)
            assert ask(start.endpoint, "/script/counters")["launch"] == REPLICA
            assert "data" in ask(start.endpoint, "/v1/models", key=KEY)
            assert ask(start.endpoint, "/v1/models")["error"]["code"] == 401
            counters = await CommandDriver().counters(start.endpoint, KEY)
            assert (counters.inflight, counters.requests_total) == (0, 0)

    run(story())


def test_scn_a14_a_command_s_grandchild_goes_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            start = prepare(fork_grandchild=2, memory_mib=32)
            await begin(made, start)
            await answers(start)

            async def both() -> bool:
                return len(await made.survivors(REPLICA)) == 2

            await until(both, "the engine and its grandchild")
            assert await made.memory_bytes(REPLICA) > 32 << 20
            result = await made.stop(REPLICA, 0.2)
            assert (result.survivors, result.killed) == ((), True)
            assert await made.memory_bytes(REPLICA) == 0

    run(story())


def test_a_command_that_crashes_at_its_start_gives_its_last_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            start = prepare(crash_at_start="out of memory: 3 GiB wanted")
            found = await made.start(REPLICA, start, grace_s=1.0, log_bytes=1 << 20)
            if isinstance(found, Running):
                found = await asyncio.wait_for(made.events.get(), 10.0)
            assert isinstance(found, Ended | LaunchEnded)
            assert (found.exit_status, found.last_line) == (3, "out of memory: 3 GiB wanted")

    run(story())


def test_a_health_path_that_is_not_200_is_not_ready(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            start = prepare()
            await begin(made, start)
            await answers(start)
            driver = CommandDriver()
            assert await driver.probe(start.endpoint, KEY, health="/v1/models")
            assert not await driver.probe(start.endpoint, KEY, health="/nowhere")
            ask(start.endpoint, "/script", {"unready": 1})
            assert not await driver.probe(start.endpoint, KEY)

    run(story())


REPLIES = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok": (200, b"ok"),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n": (200, b"ok"),
    b"HTTP/1.0 200 OK\r\n\r\nok": (200, b"ok"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok": None,
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b""),
    b"SSH-2.0-OpenSSH\r\n": None,
    b"HTTP/1.1 200": None,
    b"": None,
}


@pytest.mark.parametrize("reply", REPLIES)
def test_only_a_whole_answer_counts(reply: bytes) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answer = await asking.get(f"http://127.0.0.1:{port}", "/x")
            found = None if answer is None else (answer.status, answer.body)
            assert found == REPLIES[reply]

    run(story())


def test_an_engine_that_accepts_and_says_nothing_is_not_waited_for() -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert await asking.get(f"http://127.0.0.1:{port}", "/x", timeout_s=0.1) is None

    run(story())
