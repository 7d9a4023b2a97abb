"""A client that is slow with the end of its answer halts nobody who has its engine's connection after it."""

import asyncio
from typing import Any, cast

import pytest

from gateway.domain.tokens import Tail
from gateway.http.bodies import BodyBudget
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.errors import EngineError
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits, ServerLimits
from gateway.http.messages import Responder
from gateway.http.relay import Relay
from gateway.http.server_protocol import ServerProtocol
from tests.support.http_wire import SSE_HEAD, chunk

EVENT = chunk(b"data: 1\n\n")
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Transport:
    """Says whether it is read from; `full` is told of what is written, as a socket that takes no more would."""

    def __init__(self) -> None:
        self.reads = True
        self.written = b""
        self.full: Any = None

    def get_extra_info(self, name: str) -> object:
        return None

    def write(self, data: bytes) -> None:
        self.written += data
        if self.full is not None:
            self.full()

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Home:
    """A server without a socket."""

    def __init__(self) -> None:
        self.limits = ServerLimits()
        self.budget = BodyBudget(1 << 20)
        self.draining = False
        self.due = None
        self.date = b"a date"

    def opened(self, connection: ServerProtocol) -> None:
        pass


class Failing:
    """Takes an answer, and cannot cope with its end."""

    def on_block(self, block: bytes) -> None:
        pass

    def on_gone(self, error: EngineError) -> None:
        raise RuntimeError("a fault of ours")


class Story:
    """An engine's stream on its way to a client, and the two connections it goes over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.engine = Transport(), Transport()
        self.wire = ServerProtocol(cast(Any, Home()), loop)
        self.wire.connection_made(cast(Any, self.client))
        self.closed: list[EngineConnection] = []
        limits = ClientLimits()
        self.connection = EngineConnection(loop, limits, lambda _: None, self.closed.append)
        self.connection.connection_made(cast(Any, self.engine))
        answer = self.connection.start(Exchange(), "POST", b"a request", whole=True)
        self.connection.data_received(SSE_HEAD + EVENT)
        self.response: EngineResponse = answer.result()
        responder = Responder(self.wire, "POST", "1.1")
        relay = Relay(responder, self.response, (), None, None, Tail())
        assert not relay.begin(lambda: None)
        assert b"data: 1" in self.client.written


def on_a_loop(tell: Any) -> None:
    loop = asyncio.new_event_loop()
    try:
        tell(Story(loop))
    finally:
        loop.close()


def test_a_fault_of_who_hears_that_a_connection_ended_does_not_keep_it_among_the_open_ones() -> (
    None
):
    def tell(story: Story) -> None:
        story.response.consumer = Failing()
        with pytest.raises(RuntimeError):
            story.connection.connection_lost(None)
        assert story.closed == [story.connection]

    on_a_loop(tell)


def test_a_client_that_is_slow_halts_its_engine() -> None:
    def tell(story: Story) -> None:
        story.wire.pause_writing()
        assert not story.engine.reads
        story.wire.resume_writing()
        assert story.engine.reads

    on_a_loop(tell)


def test_a_client_that_is_full_with_the_last_of_its_answer_halts_nobody() -> None:
    def tell(story: Story) -> None:
        story.client.full = story.wire.pause_writing
        story.connection.data_received(LAST)
        assert story.client.written.endswith(LAST)
        assert story.response.ended
        assert story.engine.reads, "whoever asks over it next would never be answered"

    on_a_loop(tell)


def test_a_client_that_takes_more_again_resumes_nobody_elses_answer() -> None:
    def tell(story: Story) -> None:
        story.connection.data_received(LAST)
        # Somebody else's by now, who is slow.
        story.connection.pause()
        story.wire.pause_writing()
        story.wire.resume_writing()
        assert not story.engine.reads

    on_a_loop(tell)
