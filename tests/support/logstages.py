"""One stage per implementation of the log, with the same levers, so that one suite holds for both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from events.appender import RetryBudget
from events.connection import Connection, connect
from events.jetstream import JetStreamLog, JetStreamWire
from events.log import Batch, Broken, EventLog, Fence, Follower, Recorded, Wire
from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker, MemoryConnection
from events.provision import ensure_streams
from events.pull import PullTimes
from schemas.settings import NatsSettings
from tests.support import drafts
from tests.support.aio import run, until
from tests.support.natsserver import NatsServer
from tests.support.tcpproxy import TcpProxy

BUDGET = RetryBudget(ack_timeout_s=0.3, budget_s=4.0)
TIMES = PullTimes(heartbeat_s=0.2, expires_s=2.0, request_timeout_s=0.5, batch=100)


class Stage(Protocol):
    """A yard's log that several processes share. `log` is the process whose line can be broken."""

    log: EventLog
    wire: Wire
    other: EventLog
    other_wire: Wire

    async def junk(self, subject: str, payload: bytes) -> int:
        """Stores any bytes on an event subject; its sequence."""
        ...

    async def junk_command(self, subject: str, payload: bytes) -> None: ...

    async def junk_usage(self, subject: str, payload: bytes) -> None: ...

    async def replace_usage(self) -> None:
        """YARD_USAGE is deleted and created anew, empty."""
        ...

    def lose_next_ack(self) -> None:
        """What `log` stores next is stored, but the acknowledgement is lost."""
        ...

    async def cut(self) -> None:
        """`log` and `wire` lose their connection."""
        ...

    async def restore(self) -> None: ...

    async def replace_history(self) -> None:
        """YARD_EVENTS is deleted and created anew, empty."""
        ...


class MemoryStage:
    """Two processes on one broker."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.connection: MemoryConnection = self.broker.connect("cp-1")
        other = self.broker.connect("cp-2")
        self.log: EventLog = MemoryLog(self.connection, source="/cp/1", budget=BUDGET)
        self.wire: Wire = MemoryWire(self.connection)
        self.other: EventLog = MemoryLog(other, source="/cp/2", budget=BUDGET)
        self.other_wire: Wire = MemoryWire(other)

    async def junk(self, subject: str, payload: bytes) -> int:
        return self.broker.put(subject, payload)

    async def junk_command(self, subject: str, payload: bytes) -> None:
        self.broker.answer(subject, payload, {})

    async def junk_usage(self, subject: str, payload: bytes) -> None:
        self.broker.answer(subject, payload, {})

    async def replace_usage(self) -> None:
        self.broker.replace_usage()

    def lose_next_ack(self) -> None:
        self.broker.lose_acks = 1

    async def cut(self) -> None:
        self.connection.disconnect()

    async def restore(self) -> None:
        self.connection.reconnect()

    async def replace_history(self) -> None:
        self.broker.replace_events()


class JetStreamStage:
    """Two processes on one real server; the first behind a proxy."""

    def __init__(self, server: NatsServer, proxy: TcpProxy, mine: Connection, other: Connection):
        self.server = server
        self.proxy = proxy
        self.connection = mine
        self.direct = other
        self.log: EventLog = JetStreamLog(mine, source="/cp/1", budget=BUDGET, times=TIMES)
        self.wire: Wire = JetStreamWire(mine)
        self.other: EventLog = JetStreamLog(other, source="/cp/2", budget=BUDGET, times=TIMES)
        self.other_wire: Wire = JetStreamWire(other)

    async def junk(self, subject: str, payload: bytes) -> int:
        await self.direct.request(subject, payload, timeout_s=2)
        return (await self.other.identity()).last_seq

    async def junk_command(self, subject: str, payload: bytes) -> None:
        await self.direct.request(subject, payload, timeout_s=2)

    async def junk_usage(self, subject: str, payload: bytes) -> None:
        await self.direct.request(subject, payload, timeout_s=2)

    async def replace_usage(self) -> None:
        await self.direct.request("$JS.API.STREAM.DELETE.YARD_USAGE", b"", timeout_s=2)
        await ensure_streams(self.direct, "yard-1", 1)

    def lose_next_ack(self) -> None:
        self.proxy.drop_next("down", lambda chunk: b'"seq":' in chunk)

    async def cut(self) -> None:
        self.proxy.cut()
        assert await _down(self.connection)

    async def restore(self) -> None:
        self.proxy.restore()
        assert await self.connection.wait_connected(5)

    async def replace_history(self) -> None:
        await self.direct.request("$JS.API.STREAM.DELETE.YARD_EVENTS", b"", timeout_s=2)
        await ensure_streams(self.direct, "yard-1", 1)


async def _down(connection: Connection) -> bool:
    await until(lambda: not connection.connected, "the connection to be lost")
    return True


@contextlib.asynccontextmanager
async def memory_stage() -> AsyncIterator[MemoryStage]:
    yield MemoryStage()


@contextlib.asynccontextmanager
async def jetstream_stage(folder: Path) -> AsyncIterator[JetStreamStage]:
    """A server of its own for one test."""
    with NatsServer(folder) as server:
        async with TcpProxy("127.0.0.1", server.port) as proxy:
            other = await open_connection(server.url, "cp-2")
            await ensure_streams(other, "yard-1", 1)
            mine = await open_connection(proxy.url, "cp-1")
            try:
                yield JetStreamStage(server, proxy, mine, other)
            finally:
                await mine.close()
                await other.close()


async def open_connection(url: str, name: str) -> Connection:
    """A connection without user, as the small test server takes it."""
    connection = await connect(
        NatsSettings(url=url), name=name, user="", password="", inbox_prefix=f"_INBOX_{name}"
    )
    assert connection.connected
    return connection


Scene = Callable[[Stage], Awaitable[None]]
Play = Callable[[Scene], None]


def player(kind: str, folder: Path) -> Play:
    """Runs a scene on a fresh stage: of the memory twin, or of a real server with its data in `folder`."""

    def on_stage(scene: Scene) -> None:
        async def main() -> None:
            stage: Any = memory_stage() if kind == "memory" else jetstream_stage(folder)
            async with stage as set_up:
                await scene(set_up)

        run(main(), timeout_s=20)

    return on_stage


async def read(follower: Follower, position: int) -> list[Recorded | Broken]:
    """Everything up to a position at least; connection notices are passed over."""
    items: list[Recorded | Broken] = []
    while True:
        batch = await asyncio.wait_for(follower.next(), 8)
        items += batch.items
        if batch.connected and batch.position >= position:
            return items


async def next_batch(follower: Follower) -> Batch:
    return await asyncio.wait_for(follower.next(), 8)


async def lead(stage: Stage) -> Fence:
    won = await stage.log.append(drafts.elected("a", 0), epoch=0)
    return Fence(subject=drafts.LEADER, seq=won.seqs[0])
