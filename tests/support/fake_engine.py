"""An OpenAI-compatible engine in the test's own loop, held back and let go by the test.

It knows the routes a gateway uses and no more; `tests/engines/scripted.py` is the engine for processes.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """A request as the engine got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeEngine:
    """`gate` closed: requests are read and then held before the first byte of their answer; `probe_gate` closed:
    probes are.

    `names` are the adapters it knows besides its model, None: it does not look. An answer names, and its text
    begins with, whatever was asked for; what it does not know gets vLLM's 404.
    `status` other than 200 answers that with an error of OpenAI's form. `drop_next` closes the
    connections of so many requests instead of answering. `pace_s` is between two tokens. `connections`
    counts all that were ever made.
    """

    model: str = "m"
    key: str = ""
    tokens: int = 5
    pace_s: float = 0.0
    status: int = 200
    drop_next: int = 0
    raw: bytes | None = None
    names: set[str] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    probe_gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    seen: list[Seen] = field(default_factory=list)
    probes: int = 0
    finished: int = 0
    aborted: int = 0
    unauthorized: int = 0
    running: int = 0
    connections: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()
        self.probe_gate.set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As kill -9: the port is closed and every connection is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until_seen(self, count: int, timeout_s: float = 10.0) -> None:
        """Waits until so many inference requests arrived."""
        async with asyncio.timeout(timeout_s), self.arrived:
            await self.arrived.wait_for(lambda: len(self.seen) >= count)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readuntil(b"\r\n")
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await self._body(reader, headers)
        path = target.partition("?")[0]
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            self.unauthorized += 1
            _send(writer, 401, {"error": {"message": "Invalid API Key", "code": 401}})
        elif method == "GET":
            self.probes += 1
            await self.probe_gate.wait()
            _send(writer, 200, {"object": "list", "data": [{"id": self.model}]})
        else:
            return await self._work(Seen(method, path, headers, json.loads(body)), reader, writer)
        await writer.drain()
        return True

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await reader.readexactly(int(headers.get("content-length", "0")))
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return body

    async def _work(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        async with self.arrived:
            self.seen.append(seen)
            self.arrived.notify_all()
        if self.drop_next:
            self.drop_next -= 1
            return False
        self.running += 1
        answering = asyncio.ensure_future(self._answer(seen, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.aborted += 1
                return False
            answering.result()
            self.finished += 1
            return not leaving.done()
        finally:
            self.running -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await self.gate.wait()
        if self.raw is not None:
            writer.write(self.raw)
        elif self.names is not None and seen.body["model"] not in {self.model, *self.names}:
            told = f"The model `{seen.body['model']}` does not exist. Valid aliases: {self.model}."
            error = {"message": told, "type": "NotFoundError", "param": None, "code": 404}
            _send(writer, 404, {"error": error})
        elif self.status != 200:
            _send(writer, self.status, {"error": {"message": "no", "type": "t", "code": "c"}})
        elif seen.body.get("stream"):
            await self._stream(writer, self._named(seen))
        else:
            text = " ".join(f"w{n}" for n in range(self.tokens))
            if self.names is not None:
                text = f"[{seen.body['model']}] {text}"
            choice = {"index": 0, "message": {"role": "assistant", "content": text}}
            body = {"id": "x", "object": "chat.completion", "created": 1}
            body["model"] = self._named(seen)
            _send(writer, 200, {**body, "choices": [{**choice, "finish_reason": "stop"}]})
        await writer.drain()

    def _named(self, seen: Seen) -> str:
        return self.model if self.names is None else str(seen.body["model"])

    async def _stream(self, writer: asyncio.StreamWriter, model: str) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        common = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model}
        for n in range(self.tokens):
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            choice = {"index": 0, "delta": {"content": f"w{n} "}, "finish_reason": None}
            _chunk(writer, b"data: " + json.dumps({**common, "choices": [choice]}).encode())
            await writer.drain()
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        _chunk(writer, b"data: " + json.dumps({**common, "choices": [choice]}).encode())
        _chunk(writer, b"data: [DONE]")
        writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, line: bytes) -> None:
    block = line + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(block), block))


def _send(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (status, len(content), content)
    )
