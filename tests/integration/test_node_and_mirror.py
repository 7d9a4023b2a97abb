"""A node's files from the control plane's own mirror: the two ends of one protocol, each as it is."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn

from controlplane.mirror.serving import MirrorApp
from controlplane.mirror.store import Entry, Store
from events.secrets import mirror_token, node_secret
from nodeagent.files.fetches import FetchFailed, Files
from schemas.beacons import MirrorBeacon
from schemas.settings import NodeagentSettings
from tests.support.aio import run, until
from tests.support.node_files import Told
from tests.support.scripted_mirror import a_key, a_manifest, a_sha256, some_bytes

YARD = "the secret of this yard"
SHARDS = (some_bytes(5_000_001, 1), some_bytes(1_000_000, 2))
SET = a_manifest("m", *SHARDS)


def a_mirror(folder) -> Store:
    store = Store(folder, keep_free_bytes=0)
    assert store.open() == ()
    for file, body in zip(SET.files, SHARDS, strict=True):
        with store.partial(file.key) as partial:
            partial.append(body)
            entry = Entry(
                key=file.key, sha256=file.sha256, bytes=file.bytes, repo="o/r", commit="c", path="p"
            )
            store.finish(partial, entry)
        store.settle(file.sha256)
    return store


@asynccontextmanager
async def serving(store: Store):
    """The mirror's URL while it is served."""

    async def nothing(scope, receive, send):
        raise AssertionError("not a mirror's path")

    app = MirrorApp(
        nothing,
        store=store,
        yard_secret=YARD,
        manifest_of=lambda key: SET if key == SET.key else None,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started, "the mirror to listen")
        yield app, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        app.close()
        listening.close()


def a_nodes_files(folder, url: str, token: str, **settings) -> Files:
    given = {"files_keep_free_bytes": 0, "fetch_no_progress_s": 5.0, **settings}
    files = Files(
        folder,
        node="n1",
        wire=Told(),
        token=token,
        needed=frozenset,
        settings=NodeagentSettings(**given),
    )
    files.hear("cp", MirrorBeacon(mirror="cp", url=url))
    return files


TOKEN = mirror_token(node_secret(YARD, "n1"), "n1")


def test_a_node_takes_a_set_from_the_mirror_and_goes_on_in_the_middle(tmp_path):
    async def story():
        async with serving(a_mirror(tmp_path / "mirror")) as (app, url):
            files = a_nodes_files(tmp_path / "files", url, TOKEN)
            partial = tmp_path / "files" / "partial" / SET.files[0].sha256
            partial.parent.mkdir(parents=True)
            partial.write_bytes(SHARDS[0][:4_000_000])
            path = await files.obtain(f"mirror:{SET.key}", "r-1")
            assert path.endswith("/m-0.gguf")
            for file, body in zip(SET.files, SHARDS, strict=True):
                found = tmp_path / "files" / "sets" / SET.key / file.name
                assert found.read_bytes() == body
            assert app.bytes_served == sum(map(len, SHARDS)) - 4_000_000

    run(story())


def test_a_node_of_another_yard_is_refused_at_once_with_a_sentence(tmp_path):
    async def story():
        async with serving(a_mirror(tmp_path / "mirror")) as (_, url):
            stranger = mirror_token(node_secret("another yard", "n1"), "n1")
            files = a_nodes_files(tmp_path / "files", url, stranger)
            with pytest.raises(FetchFailed, match=r"refuses this node \(401\)"):
                await files.obtain(f"mirror:{SET.key}", "r-1")

    run(story())


def test_a_set_the_mirror_does_not_have_whole_is_told_as_that(tmp_path):
    async def story():
        async with serving(a_mirror(tmp_path / "mirror")) as (_, url):
            files = a_nodes_files(tmp_path / "files", url, TOKEN, fetch_no_progress_s=0.3)
            with pytest.raises(FetchFailed, match="has no complete set of that key"):
                await files.obtain(f"mirror:{a_key('other')}", "r-1")

    run(story())


def test_the_mirrors_folder_on_this_machine_is_linked_and_survives_what_the_mirror_does(tmp_path):
    async def story():
        store = a_mirror(tmp_path / "mirror")
        async with serving(store) as (app, url):
            folder = str(tmp_path / "mirror")
            files = a_nodes_files(tmp_path / "files", url, TOKEN, mirror_folder=folder)
            await files.obtain(f"mirror:{SET.key}", "r-1")
            assert app.bytes_served == 0
            # Opened again, as after a restart, then emptied.
            assert Store(tmp_path / "mirror", keep_free_bytes=0).open() == ()
            for file in SET.files:
                assert store.remove(file.key)
            for file, body in zip(SET.files, SHARDS, strict=True):
                found = tmp_path / "files" / "sets" / SET.key / file.name
                assert found.read_bytes() == body
                assert a_sha256(found.read_bytes()) == file.sha256

    run(story())
