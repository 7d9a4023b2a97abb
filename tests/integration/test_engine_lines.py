"""Connections that are kept to engines: when one is used again, when not, and what an engine's end looks like."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from nodeagent.drivers.line import Answer, NoAnswer
from nodeagent.drivers.lines import MOST_IDLE, Lines
from tests.support.aio import run, until
from tests.support.scripted_http import response

YES = response(200, '{"yes": 1}')
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"

Step = bytes | str
"""What is done at one question: bytes are the answer; `end` closes without one, `die` the door as well, `hang` waits,
`half` ends within the answer; an answer with `+` before `close` is closed behind."""


@dataclass
class Server:
    """An engine that keeps connections; question by question it does what `steps` say, then `YES`."""

    steps: list[Step] = field(default_factory=list[Step])
    asked: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Number of the connection, and the question's first line and headers."""
    connections: int = 0
    ended: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])
    endpoint: str = ""
    close_door: Callable[[], None] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(x.lower().split(": ", 1) for x in head.strip().split("\r\n")[1:])
                await reader.readexactly(int(lines.get("content-length", "0")))
                self.asked.append((number, head))
                step = self.steps.pop(0) if self.steps else YES
                if isinstance(step, bytes):
                    writer.write(step)
                elif step == "hang":
                    await reader.read()
                elif step == "half":
                    writer.write(YES[:-3])
                    return
                else:
                    if step == "die":
                        self.close_door()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def engine(*steps: Step) -> AsyncIterator[Server]:
    server = Server(list(steps))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    server.close_door = listening.close
    try:
        yield server
    finally:
        listening.close()
        for writer in server.writers:
            writer.close()
        await listening.wait_closed()
        await until(lambda: server.ended == server.connections, "the connections' ends")


def asked(
    *steps: Step, times: int, kept_s: float = 60.0, timeout_s: float = 5.0, **more: int | bool
) -> tuple[list[str | bytes], list[int]]:
    """What came of so many questions, one after the other: bodies, or why there was none; and which connection
    each question the engine read came by."""

    async def work() -> tuple[list[str | bytes], list[int]]:
        lines = Lines(kept_s)
        async with engine(*steps) as server:
            try:
                found: list[str | bytes] = []
                for _ in range(times):
                    answer = await lines.ask(
                        server.endpoint,
                        "POST",
                        "/v1/load_lora_adapter",
                        "ek",
                        content=b"{}",
                        timeout_s=timeout_s,
                        **more,  # pyright: ignore[reportArgumentType]
                    )
                    found.append(answer.body if isinstance(answer, Answer) else answer.why)
                return found, [number for number, _ in server.asked]
            finally:
                lines.close()

    return run(work())


BODY = b'{"yes": 1}'


def test_the_next_question_goes_over_the_same_connection() -> None:
    assert asked(times=3) == ([BODY] * 3, [1, 1, 1])
    assert asked(CHUNKED, times=2) == ([b"ab", BODY], [1, 1])


@pytest.mark.parametrize(
    "answer",
    [
        YES.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1),
        # A second answer to one question: what the next bytes belong to nobody knows.
        YES + YES,
    ],
    ids=["closes", "two"],
)
def test_an_answer_that_ends_its_connection_is_believed(answer: bytes) -> None:
    found, by = asked(answer, times=2)
    assert found[1] == BODY
    assert by == [1, 2]


def test_a_connection_whose_answer_was_not_read_to_its_end_is_not_used_again() -> None:
    assert asked(times=2, limit_bytes=4, cut=True) == ([BODY[:4]] * 2, [1, 2])
    assert asked(times=2, limit_bytes=4) == (["too_long"] * 2, [1, 2])
    assert asked("hang", times=2, timeout_s=0.2) == (["late", BODY], [1, 2])


def test_a_kept_connection_the_engine_closes_at_the_question_costs_nobody_his_answer() -> None:
    assert asked(YES, "end", times=2) == ([BODY, BODY], [1, 1, 2])


def test_an_engine_that_dies_of_a_question_on_a_kept_connection_did_not_answer_it() -> None:
    # Not `unreachable`: it was asked.
    assert asked(YES, "die", times=2) == ([BODY, "broken"], [1, 1])


def test_only_a_kept_connection_is_tried_again_and_only_without_a_byte() -> None:
    assert asked("end", times=1) == (["broken"], [1])
    assert asked(YES, "half", times=2) == ([BODY, "broken"], [1, 1])
    # And once.
    assert asked(YES, "end", "end", times=2) == ([BODY, "broken"], [1, 1, 2])


def test_nobody_there_is_unreachable() -> None:
    async def work() -> None:
        async with engine() as server:
            endpoint = server.endpoint
        assert await Lines().ask(endpoint, "GET", "/x") == NoAnswer(why="unreachable")

    run(work())


def test_each_launch_has_connections_of_its_own() -> None:
    async def work() -> None:
        lines = Lines()
        async with engine() as server:
            for key in ("one", "other", "one", "other"):
                await lines.ask(server.endpoint, "GET", "/v1/models", key)
            assert [number for number, _ in server.asked] == [1, 2, 1, 2]
            assert [
                f"Bearer {key}\r\n" in head
                for key, (_, head) in zip(("one", "other") * 2, server.asked, strict=True)
            ] == [True] * 4
            lines.close()

    run(work())


def test_side_by_side_each_has_its_own_and_few_are_kept() -> None:
    async def work() -> None:
        lines = Lines()
        async with engine() as server:
            some = range(MOST_IDLE + 3)
            answers = await asyncio.gather(*(lines.ask(server.endpoint, "GET", "/x") for _ in some))
            assert all(isinstance(answer, Answer) for answer in answers)
            assert server.connections == len(some)
            await until(lambda: server.ended == len(some) - MOST_IDLE, "the others' ends")
            await lines.ask(server.endpoint, "GET", "/x")
            assert server.connections == len(some)
            lines.close()
            await until(lambda: server.ended == len(some), "the end of those that were kept")

    run(work())


def test_what_nobody_uses_for_a_while_is_closed_from_here() -> None:
    async def work() -> None:
        lines = Lines(0.05)
        async with engine() as server:
            await lines.ask(server.endpoint, "GET", "/x")
            await until(lambda: server.ended == 1, "its end")
            assert isinstance(await lines.ask(server.endpoint, "GET", "/x"), Answer)
            assert [number for number, _ in server.asked] == [1, 2]
            lines.close()

    run(work())


def test_a_connection_that_says_something_unasked_is_not_used_again() -> None:
    async def work() -> None:
        lines = Lines()
        async with engine() as server:
            await lines.ask(server.endpoint, "GET", "/x")
            server.writers[0].write(response(200, '{"whose": "nobody knows"}'))
            await until(lambda: server.ended == 1, "its end")
            answer = await lines.ask(server.endpoint, "GET", "/x")
            assert isinstance(answer, Answer)
            assert (answer.body, server.connections) == (BODY, 2)
            lines.close()

    run(work())


def test_an_engine_that_closed_what_is_kept_is_asked_over_a_new_one() -> None:
    async def work() -> None:
        lines = Lines()
        async with engine() as server:
            await lines.ask(server.endpoint, "GET", "/x")
            server.writers[0].close()
            await until(lambda: not lines.kept, "the word of it")
            assert isinstance(await lines.ask(server.endpoint, "GET", "/x"), Answer)
            assert [number for number, _ in server.asked] == [1, 2]
            lines.close()

    run(work())


def test_whoever_is_cancelled_leaves_no_connection_behind() -> None:
    async def work() -> None:
        lines = Lines()
        async with engine("hang") as server:
            asking = asyncio.create_task(lines.ask(server.endpoint, "GET", "/x", timeout_s=60))
            await until(lambda: bool(server.asked), "the question")
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            await until(lambda: server.ended == 1, "its end")
            assert not lines.kept

    run(work())
