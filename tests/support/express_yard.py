"""A gateway before engines that say exactly what a test tells them, and which way each request took through it.

`scene` makes the same yard with and without the way that needs no task; it decides nothing of what must hold.
"""

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from events.usage import decode_usage
from gateway.app import RunningGateway
from gateway.http.errands import ErrandWire, take_none
from gateway.http.messages import Request, Responder
from gateway.http.request_head import RequestHead
from schemas.key import Key, KeyCreated, KeyRevoked
from tests.support.aio import until
from tests.support.gateway_agent import nothing_left
from tests.support.gateway_yard import Yard, memory_yard
from tests.support.http_wire import Peer, RawEngine, connected
from tests.support.http_wire import engine as raw_engine

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/audio/speech")
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}

Speech = Callable[[Peer], Awaitable[bool]]
"""What an engine does with one request that it has read; False: it ends the connection behind it."""


def told(**fields: Any) -> bytes:
    """The body of a whole answer."""
    known: dict[str, Any] = {"object": "chat.completion", "model": "m", "choices": []}
    return json.dumps({**known, "usage": USAGE, **fields}).encode()


def whole(
    body: bytes,
    status: str = "200 OK",
    extra: str = "content-type: application/json\r\n",
) -> bytes:
    """An answer with a length, and a date as engines send it."""
    head = f"HTTP/1.1 {status}\r\ndate: Mon, 30 Nov 2026 07:35:00 GMT\r\nserver: engine\r\n{extra}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


GOOD = whole(told())


def says(*pieces: bytes, ends: bool = False) -> Speech:
    """Sends these, each by itself."""

    async def speech(peer: Peer) -> bool:
        for piece in pieces:
            await peer.send(piece)
            for _ in range(5):  # so that the other side, in this loop, reads it before the next
                await asyncio.sleep(0)
        return not ends

    return speech


def holds(gate: asyncio.Event, *pieces: bytes, first: bytes = b"") -> Speech:
    """Sends `first`, waits for the gate, and sends the rest."""

    async def speech(peer: Peer) -> bool:
        if first:
            await peer.send(first)
        await gate.wait()
        return await says(*pieces)(peer)

    return speech


def silent(*pieces: bytes) -> Speech:
    """Sends these and nothing more, until the other side goes."""

    async def speech(peer: Peer) -> bool:
        await says(*pieces)(peer)
        with contextlib.suppress(ConnectionError):
            while await peer.reader.read(65536):  # without a bound: whoever waits has one
                pass
        return False

    return speech


@dataclass
class Engine:
    """Answers `next` first, then always `always`. `asked` are the heads and bodies it got, probes not among them;
    `gone` counts connections that ended while it was speaking."""

    name: str = ""
    always: Speech = field(default_factory=lambda: says(GOOD))
    next: deque[Speech] = field(default_factory=deque)
    asked: list[tuple[bytes, bytes]] = field(default_factory=list)
    raw: RawEngine | None = None

    @property
    def url(self) -> str:
        assert self.raw is not None
        return self.raw.url

    async def serve(self, peer: Peer) -> None:
        while True:
            head, body = await peer.message()
            if head.startswith(b"GET "):
                await peer.send(whole(b'{"object":"list","data":[{"id":"m"}]}'))
                continue
            self.asked.append((head, body))
            speech = self.next.popleft() if self.next else self.always
            if not await speech(peer):
                return

    async def until_asked(self, count: int) -> None:
        await until(lambda: len(self.asked) >= count, f"{count} requests at {self.name}")


@dataclass
class Ways:
    """How many requests were taken, left to the handler at once, and handed over to it later."""

    taken: int = 0
    left: int = 0
    handed: int = 0

    @property
    def all(self) -> tuple[int, int, int]:
        return self.taken, self.left, self.handed

    def forget(self) -> None:
        self.taken = self.left = self.handed = 0


def watch(gateway: RunningGateway, *, express: bool = True) -> Ways:
    """Counts from now on; without `express` nothing is taken."""
    server, ways = gateway.server, Ways()
    take, handler = server.take if express else take_none, server.handler

    def taking(wire: ErrandWire, head: RequestHead, body: bytes, received_at: float) -> bool:
        took = take(wire, head, body, received_at)
        ways.taken += took
        ways.left += not took
        return took

    async def handling(request: Request, respond: Responder) -> None:
        ways.handed += request.begun is not None
        await handler(request, respond)

    server.take, server.handler = taking, handling
    return ways


@dataclass
class Scene:
    """A yard with one model `m` (alias `em`), whose replicas `r-0`, `r-1`, … are these engines."""

    yard: Yard
    gateway: RunningGateway
    engines: list[Engine]
    ways: Ways

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    def lines(self) -> list[dict[str, Any]]:
        """Those of the access log that are written."""
        return [json.loads(line) for block in self.yard.access for line in block.splitlines()]

    async def until_lines(self, count: int) -> list[dict[str, Any]]:
        await until(lambda: len(self.lines()) >= count, f"{count} lines")
        return self.lines()

    def numbers(self) -> dict[str, float]:
        """Counters and counts, without what depends on how long something took."""
        found: dict[str, float] = {}
        for line in self.gateway.metrics.render().decode().splitlines():
            name, _, value = line.rpartition(" ")
            timed = re.search(r"(_sum|_bucket|_created)\b|loop_lag|spans_dropped|usage_rows", name)
            if name.startswith("yard_") and not timed:
                found[name] = float(value)
        return found

    def accounts(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        """What the usage that was sent comes to, by model, key and adapter, without times."""
        sums: dict[tuple[str, str, str], tuple[int, ...]] = {}
        for message in self.yard.broker.usage.messages.values():
            batch = decode_usage(message).batch
            for row in () if batch is None else batch.rows:
                whose = row.model, row.key, row.adapter
                more = (
                    *(row.requests, row.failed, row.prompt_tokens, row.cached_tokens),
                    *(row.completion_tokens, row.estimated, row.first_tokens),
                )
                sums[whose] = tuple(
                    a + b for a, b in zip(sums.get(whose, (0,) * 7), more, strict=True)
                )
        return sums

    async def quiet(self) -> None:
        """Waits until nothing runs; then nothing may be kept of what ran."""
        server = self.gateway.server
        await until(lambda: server.active == 0, "all requests to end")
        nothing_left(self.gateway)
        assert server.budget.used_bytes == 0

    async def warm(self) -> None:
        """Leaves one kept connection to each engine, and forgets how."""
        gate = asyncio.Event()
        for engine in self.engines:
            engine.next.appendleft(holds(gate, GOOD))
        async with AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(connected(self.gateway.port)) for _ in self.engines
            ]
            for peer in peers:
                await peer.send(ask())
            for engine in self.engines:
                await engine.until_asked(1)
            gate.set()
            for peer in peers:
                assert (await peer.message())[0].startswith(b"HTTP/1.1 200")
        await self.quiet()
        for engine in self.engines:
            engine.asked.clear()
        await self.until_lines(len(self.engines))
        self.yard.access.clear()
        self.ways.forget()


@asynccontextmanager
async def scene(
    data: Path,
    *,
    engines: int = 1,
    express: bool = True,
    warm: bool = True,
    model: dict[str, Any] | None = None,
    replica: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A scene that is left with nothing kept; `model` and `replica` are fields of theirs."""
    made = [Engine(name=f"r-{n}") for n in range(engines)]
    async with AsyncExitStack() as stack:
        for engine in made:
            engine.raw = await stack.enter_async_context(raw_engine(engine.serve))
        yard = await stack.enter_async_context(memory_yard(data))
        await yard.model("m", **{"aliases": ("em",), **(model or {})})
        for engine in made:
            await put_replica(yard, engine, **(replica or {}))
        gateway = await yard.gateway(**settings)
        found = Scene(yard, gateway, made, watch(gateway, express=express))
        if warm:
            await found.warm()
        yield found
        await found.quiet()


async def put_replica(yard: Yard, engine: Engine, **fields: Any) -> int:
    """The replica that this engine is."""
    fields.setdefault("endpoint", engine.url)
    fields.setdefault("paths", PATHS)
    return await yard.replica(None, fields.pop("id", engine.name), **fields)


def body_of(model: str = "m", **fields: Any) -> bytes:
    known: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return json.dumps({**known, **fields}).encode()


def ask(
    body: bytes | None = None,
    path: str = CHAT,
    *headers: str,
    version: str = "1.1",
) -> bytes:
    """A request as it is sent."""
    body = body_of() if body is None else body
    lines = [f"POST {path} HTTP/{version}", "host: yard", *headers, f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def fields_of(head: bytes) -> dict[str, str]:
    """The headers of a message, which names each once."""
    found: dict[str, str] = {}
    for line in head.decode("latin-1").split("\r\n")[1:]:
        if line:
            name, _, value = line.partition(":")
            assert name.lower() not in found, f"{name} is there twice"
            found[name.lower()] = value.strip()
    return found


async def answered(peer: Peer, request: bytes | None = None) -> tuple[int, str]:
    """Status of the answer, and its code where it is an error."""
    await peer.send(ask() if request is None else request)
    head, body = await peer.message()
    status = status_of(head)
    return status, "" if status < 400 else json.loads(body)["error"]["code"]


async def put_key(made: Scene, key: Key) -> None:
    event = KeyRevoked(by="admin") if key.revoked_at else KeyCreated(by="admin")
    await made.yard.applied(made.gateway, await made.yard.put("key", (key.id,), event, key))


async def put_another(made: Scene, engine: Engine, id: str = "r-0", **fields: object) -> None:
    """The replica is another from now on."""
    await made.yard.applied(made.gateway, await put_replica(made.yard, engine, id=id, **fields))
