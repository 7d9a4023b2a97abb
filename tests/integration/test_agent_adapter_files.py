"""An agent that has adapters' files before anybody asks: wired whole, and as its own user on a real server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from events import server
from events.connection import Connection, connect
from events.jetstream import JetStreamLog
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import ensure_secret, nats_password_path, read_secret, yard_secret_path
from nodeagent.adapterfiles import AdapterFiles
from nodeagent.domain.adapterfiles import set_of
from schemas.messages import SCHEMA
from schemas.node import EngineInfo
from schemas.settings import NatsSettings
from tests.support.adapter_files import (
    Editor,
    a_base,
    a_profile,
    adapter_set,
    an_adapter,
    gpu_node,
)
from tests.support.agent_yard import a_launch, a_node, a_stop, an_item, beside, memory_yard
from tests.support.aio import run, until
from tests.support.fetch_items import an_item_of, announced, started
from tests.support.natsserver import NatsServer
from tests.support.node_files import node_files
from tests.support.scripted_mirror import TOKEN, a_manifest, serving_mirror, some_bytes

SIZE = 100_000
LOADING = EngineInfo(name="command", version="1", adapters=True)
"""A scripted engine of which the node believes that it loads adapters."""

BASE = a_base(profiles=(a_profile(engine="command", card=("cpu",)),))


def of_agent(running) -> AdapterFiles:
    return running.agent._a.tools.adapter_files


def served(mirror, name: str, **fields):
    manifest, *contents = adapter_set(name, SIZE)
    mirror.add(manifest, *contents)
    return an_adapter(name, manifest, **fields)


def test_req_b3_an_agent_has_the_files_of_every_ready_adapter_before_a_replica_runs(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            adapters = [served(mirror, name) for name in "abc"]
            async with memory_yard(tmp_path) as yard:
                editor = Editor(yard.hand.log)
                await editor.write(BASE, *adapters)
                node = a_node(engines=(LOADING,))
                async with (
                    announced(yard.hand.wire, mirror),
                    yard.agent(node=node, mirror_token=TOKEN, files_keep_free_bytes=0) as running,
                ):
                    files = of_agent(running)
                    await until(
                        lambda: all(files.path(a) is not None for a in adapters), "the files"
                    )
                    # One that came later, while the agent runs.
                    late = served(mirror, "late")
                    await editor.write(late)
                    await until(lambda: files.path(late) is not None, "the late one's files")
                    assert files.root == tmp_path / "nodeagent" / "files" / "sets"

    run(story())


def test_inv_3_a_replicas_start_takes_no_file_of_a_loaded_adapter_and_any_other(tmp_path):
    async def story():
        body = some_bytes(SIZE, 7)
        model = a_manifest("model", body)
        with serving_mirror() as mirror:
            mirror.add(model, body)
            loaded, idle = served(mirror, "loaded", pinned=True), served(mirror, "idle")
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                await Editor(hand.log).write(BASE, loaded, idle)
                node = a_node(engines=(LOADING,))
                async with (
                    announced(hand.wire, mirror),
                    yard.agent(
                        node=node,
                        mirror_token=TOKEN,
                        files_keep_free_bytes=0,
                        files_budget_bytes=2 * SIZE + SIZE // 2,
                    ) as running,
                ):
                    files = of_agent(running)
                    await until(
                        lambda: files.path(loaded) is not None and files.path(idle) is not None,
                        "both",
                    )
                    engine = an_item("r-1", launch=a_launch(adapters=4))
                    await hand.plan(engine)
                    await hand.phase("r-1", "ready")
                    assert files.kept() == frozenset()
                    files.keep("r-1", frozenset({set_of(loaded)}))
                    await hand.plan(engine, an_item_of("r-2", model))
                    path = await started(hand, "r-2")
                    assert path.read_bytes() == body
                    assert files.path(loaded) is not None
                    assert files.path(idle) is None
                    # The engine is gone: so is the need.
                    await hand.plan(replace(engine, stop=a_stop()), an_item_of("r-2", model))
                    await hand.phase("r-1", "stopped")
                    assert files.kept() == frozenset()

    run(story())


def test_an_agent_that_comes_back_evicts_no_adapter_before_it_knows_what_is_loaded(tmp_path):
    async def story():
        body = some_bytes(SIZE, 7)
        model = a_manifest("model", body)
        with serving_mirror() as mirror:
            mirror.add(model, body)
            loaded = served(mirror, "loaded")
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                await Editor(hand.log).write(BASE, loaded)
                fields = {
                    "node": a_node(engines=(LOADING,)),
                    "mirror_token": TOKEN,
                    "files_keep_free_bytes": 0,
                    "files_budget_bytes": SIZE + SIZE // 2,
                }
                engine = an_item("r-1", launch=a_launch(adapters=4))
                async with announced(hand.wire, mirror):
                    async with yard.agent(**fields) as running:
                        await hand.plan(engine)
                        await hand.phase("r-1", "ready")
                        await of_agent(running).obtain(loaded)
                        await running.die()
                    async with yard.agent(**fields) as running:
                        files = of_agent(running)
                        await until(running.agent.registered.is_set, "it to register")
                        await hand.plan(engine, an_item_of("r-2", model))
                        failed = await hand.phase("r-2", "failed")
                        assert (failed.code, files.path(loaded) is None) == ("disk_full", False)
                        files.keep("r-1", frozenset())
                        await hand.plan(engine, an_item_of("r-3", model))
                        await started(hand, "r-3")

    run(story())


def test_an_agent_leaves_at_once_in_the_middle_of_a_fetch_and_the_next_goes_on(tmp_path):
    async def story():
        with serving_mirror(stall_at=[65_536] * 2) as mirror:
            adapter = served(mirror, "a")
            files_folder = tmp_path / "nodeagent" / "files"
            content = files_folder / "partial" / adapter.files[0].sha256
            async with memory_yard(tmp_path) as yard:
                await Editor(yard.hand.log).write(BASE, adapter)
                fields = {"node": a_node(engines=(LOADING,)), "mirror_token": TOKEN}
                fields["files_keep_free_bytes"] = 0
                async with announced(yard.hand.wire, mirror):
                    async with yard.agent(**fields) as running:
                        await until(
                            lambda: content.exists() and content.stat().st_size == 65_536,
                            "it to hang",
                        )
                        began = time.monotonic()
                        await running.leave()
                        assert time.monotonic() - began < 3.0
                    async with yard.agent(**fields) as running:
                        files = of_agent(running)
                        await until(lambda: files.path(adapter) is not None, "the rest")
            (again,) = [span for key, span in mirror.files_asked() if key == set_of(adapter)][1:]
            assert again == "bytes=65536-"

    run(story())


@asynccontextmanager
async def real_yard(
    data: Path, *, old_users: bool = False
) -> AsyncIterator[tuple[Connection, Connection]]:
    """The control plane's and the agent's connections on a real server with the yard's users.

    `old_users`: as they were written before agents followed the catalog.
    """
    ensure_secret(yard_secret_path(data))
    configuration = server.prepare(data, ["n1"])
    users = configuration.with_name("users.conf")
    if old_users:
        text = users.read_text()
        cut = text
        for noun in ("model", "adapter"):
            cut = cut.replace(f', "$JS.API.CONSUMER.CREATE.YARD_EVENTS.*.yard.evt.{noun}.>"', "")
        assert cut != text
        users.write_text(cut)
    nats = NatsServer(data / "nats", configuration=configuration)
    nats.start()
    try:
        async with (
            as_user(nats, data, "control") as control,
            as_user(nats, data, "agent-n1") as agent,
        ):
            await ensure_streams(control, "yard-of-this-test", SCHEMA)
            yield control, agent
    finally:
        nats.stop()


@asynccontextmanager
async def as_user(nats: NatsServer, data: Path, user: str) -> AsyncIterator[Connection]:
    connection = await connect(
        NatsSettings(url=nats.url),
        name=user,
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )
    try:
        yield connection
    finally:
        await connection.close()


def files_of(folder: Path, agent: Connection, *mirrors) -> AdapterFiles:
    made = AdapterFiles(
        log=JetStreamLog(agent, source="/agent/n1"),
        files=node_files(folder, *mirrors).files,
        node=gpu_node(),
        prefix="yard",
        held=dict,
    )
    made.begin()
    return made


def test_a_nodes_own_user_may_follow_the_catalog_and_does(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            first, second = served(mirror, "first"), served(mirror, "second")
            async with real_yard(tmp_path) as (control, agent):
                editor = Editor(JetStreamLog(control, source="/cp/test"))
                await editor.write(a_base(), first)
                files = files_of(tmp_path / "files", agent, mirror)
                async with beside(files.run()):
                    await until(lambda: files.path(first) is not None, "the first one's files")
                    await editor.write(second)
                    await until(lambda: files.path(second) is not None, "the second one's files")
                    await editor.end("adapter", "first")
                    await until(lambda: files.adapter("first") is None, "its end")

    run(story(), timeout_s=40)


def test_with_users_older_than_the_agent_there_are_no_adapters_and_no_fall(
    tmp_path, caplog: pytest.LogCaptureFixture
):
    async def story():
        async with real_yard(tmp_path, old_users=True) as (control, agent):
            await Editor(JetStreamLog(control, source="/cp/test")).write(a_base())
            files = files_of(tmp_path / "files", agent)
            running = asyncio.create_task(files.run())
            await until(
                lambda: caplog.text.count("the catalog cannot be read") == 2, "a word of each", 20
            )
            assert not running.done()
            assert not files.synced
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(story(), timeout_s=40)
