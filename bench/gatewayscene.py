"""A real gateway process on a real nats-server, with a key and ready replicas told by hand, for benchmarks.

It writes the events a control plane and an agent would have written, with their rights, and nothing else of theirs
runs: what is measured is the gateway alone. The engines are the benchmark's own.
"""

import contextlib
import hashlib
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from bench.rig import free_port, running
from events import server
from events.connection import Connection, connect
from events.jetstream import JetStreamLog
from events.log import Draft
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import ensure_node_secret, nats_password_path, read_secret
from events.subjects import event_subject
from schemas.key import KEY_PREFIX, Key, KeyCreated
from schemas.messages import SCHEMA, Event, State
from schemas.model import Model, ModelAdded, Scaling
from schemas.node import CardInfo, Node, NodeStarted
from schemas.replica import Replica, ReplicaReady
from schemas.settings import NatsSettings

NODE: Final = "bench"
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


@dataclass
class Scene:
    """The log so far, and what a client says to be let in."""

    data: Path
    url: str
    control: JetStreamLog
    agent: JetStreamLog
    key: str = ""
    epoch: int = 0
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)

    async def put(
        self, log: JetStreamLog, noun: str, key: tuple[str, ...], event: Event, state: State
    ) -> int:
        subject = event_subject(noun, *key)
        seq, rev = self.heads.get(subject, (0, 0))
        draft = Draft(subject=subject, event=event, state=state, expected_seq=seq, rev=rev + 1)
        appended = await log.append(draft, epoch=self.epoch if log is self.agent else 1)
        self.heads[subject] = (appended.seqs[0], rev + 1)
        return appended.seqs[0]

    async def begin(self) -> None:
        """A node, and a key that is limited by numbers nobody reaches: its limits are kept all the same."""
        now = datetime.now(UTC)
        node = Node(
            id=NODE,
            cards=(CardInfo(id="cpu", kind="cpu", memory_bytes=1 << 34),),
            running=True,
            started_at=now,
        )
        self.epoch = await self.put(self.agent, "node", (NODE,), NodeStarted(), node)
        id_, secret = "bench2bench2", secrets.token_urlsafe(32)
        made = Key(
            id=id_,
            name="bench",
            hash=hashlib.sha256(secret.encode()).hexdigest(),
            created_at=now,
            may_activate=True,
            rpm=1_000_000_000,
            tpm=1_000_000_000,
            parallel=1_000_000,
        )
        await self.put(self.control, "key", (id_,), KeyCreated(by="bench"), made)
        self.key = f"{KEY_PREFIX}_{id_}_{secret}"

    async def model(
        self, name: str, engines: Sequence[int], *, aliases: Sequence[str] = ()
    ) -> None:
        """A model with a ready replica at each of these ports."""
        now = datetime.now(UTC)
        model = Model(
            name=name,
            aliases=tuple(aliases),
            incarnation=f"inc-{name}",
            scaling=Scaling(min=0, max=len(engines)),
        )
        await self.put(self.control, "model", (name,), ModelAdded(by="bench"), model)
        for index, port in enumerate(engines):
            replica = Replica(
                id=f"r-{name}{index}",
                node=NODE,
                model=name,
                incarnation=model.incarnation,
                profile="cpu",
                revision="v1",
                engine="command",
                phase="ready",
                since=now,
                epoch=self.epoch,
                endpoint=f"http://127.0.0.1:{port}",
                paths=PATHS,
                has_key=True,
                pid=1,
                started_at=now,
                ready_at=now,
                was_ready=True,
                load_s=1.0,
            )
            event = ReplicaReady(load_s=1.0)
            await self.put(self.agent, "replica", (NODE, replica.id), event, replica)

    @contextmanager
    def gateway(
        self, id_: str = "bench", *, workers: int = 1, python: Sequence[str] = (), **env: str
    ) -> Iterator[tuple[int, psutil.Process]]:
        """A gateway on this log, its log (access log too) in a file; yields its port and process.

        `python`: what runs it instead of the plain interpreter.
        """
        port = free_port()
        argv = [
            *(python or (sys.executable,)),
            *("-m", "gateway", "--id", id_, "--data", str(self.data), "--nats", self.url),
            *("--listen", f"127.0.0.1:{port}", "--workers", str(workers)),
        ]
        with running(port, argv, log=self.data / f"gateway-{id_}.log", env=env) as process:
            yield port, process


async def _connected(data: Path, url: str, user: str) -> Connection:
    return await connect(
        NatsSettings(url=url),
        name="bench",
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )


@asynccontextmanager
async def scene(data: Path) -> AsyncIterator[Scene]:
    """A server with its streams, a node and a key; ends with the block."""
    ensure_node_secret(data, NODE)
    port = free_port()
    argv = server.command_line(
        server.prepare(data, [NODE]),
        data / "nats" / "store",
        host="127.0.0.1",
        port=port,
        monitoring_port=free_port(),
    )
    with running(port, argv, log=data / "nats-server.log"):
        url = f"nats://127.0.0.1:{port}"
        async with contextlib.AsyncExitStack() as stack:
            control = await _connected(data, url, "control")
            stack.push_async_callback(control.close)
            agent = await _connected(data, url, f"agent-{NODE}")
            stack.push_async_callback(agent.close)
            await ensure_streams(control, "bench", SCHEMA)
            made = Scene(
                data=data,
                url=url,
                control=JetStreamLog(control, source="/cp/bench"),
                agent=JetStreamLog(agent, source=f"/node/{NODE}"),
            )
            await made.begin()
            yield made
