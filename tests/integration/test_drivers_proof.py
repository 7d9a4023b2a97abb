"""The proof that an engine answers: which question it is asked, and what counts as an answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nodeagent.drivers.proof import ask_one_token
from tests.support.aio import run

ALL = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class Server:
    """Answers each path with a status; 0 means not at all. Remembers what it was asked."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = {f"/v1/{name.replace('_', '/')}": code for name, code in statuses.items()}
        self.asked: list[tuple[str, dict]] = []
        self.keys: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.close()
            await server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(fields["Content-Length"]))
        self.asked.append((path, json.loads(body)))
        self.keys.append(fields.get("Authorization", ""))
        status = self.statuses.get(path, 404)
        if status:
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        else:
            await reader.read()
        writer.close()


def ask(server: Server, paths: tuple[str, ...] = ALL, timeout_s: float = 5.0) -> str:
    async def story() -> str:
        async with server.running() as endpoint:
            return await ask_one_token(endpoint, "the-key", "org/m", paths, timeout_s)

    return run(story())


def test_one_token_of_a_plain_completion_is_enough():
    server = Server(completions=200)
    assert ask(server) == ""
    ((path, asked),) = server.asked
    assert path == "/v1/completions"
    assert (asked["model"], asked["max_tokens"]) == ("org/m", 1)
    assert server.keys == ["Bearer the-key"]


def test_what_it_refuses_may_be_what_it_is_not_made_for():
    server = Server(completions=400, chat_completions=404, embeddings=200)
    assert ask(server) == ""
    assert [path for path, _ in server.asked] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
    ]


def test_one_that_refuses_everything_does_not_serve():
    assert ask(Server()) == "a request for one token was answered 404"
    assert ask(Server(completions=401, chat_completions=401, embeddings=401)).endswith(" 401")


def test_a_failure_is_final():
    server = Server(completions=500, chat_completions=200)
    assert ask(server) == "a request for one token was answered 500"
    assert len(server.asked) == 1


def test_silence_is_final():
    server = Server(completions=0, chat_completions=200)
    assert ask(server, timeout_s=0.2) == "no answer to a request for one token within 0.2 s"
    assert len(server.asked) == 1


@pytest.mark.parametrize("paths", [(), ("/v1/rerank",)])
def test_one_without_a_path_to_ask_is_not_proven(paths):
    server = Server(completions=200)
    assert ask(server, paths) == "it has no path that a token can be asked of"
    assert server.asked == []
