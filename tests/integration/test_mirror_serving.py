"""The mirror's HTTP as nodes see it: ranges, validators, tokens, slow and vanishing readers."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import uvicorn

from controlplane.mirror.serving import MirrorApp
from controlplane.mirror.store import Entry, Store
from events.secrets import mirror_token, node_secret
from schemas.api import ErrorBody
from schemas.mirror import Manifest, ManifestFile
from tests.support.aio import run, until
from tests.support.mirrors import (
    COMMIT,
    REPO,
    fetched,
    key_of,
    model_bytes,
    open_store,
    sha256,
    task_for,
)

MIB = 1024 * 1024
SECRET = "the yard's secret"
CONTENT = model_bytes(3 * MIB + 11)
ETAG = f'"{sha256(CONTENT)}"'
KEY = key_of("model.gguf")
MANIFEST = Manifest(
    key=KEY,
    files=(ManifestFile(key=KEY, name="model.gguf", bytes=len(CONTENT), sha256=sha256(CONTENT)),),
)


def token(name: str = "local") -> str:
    return mirror_token(node_secret(SECRET, name), name)


def bearer(name: str = "local") -> dict[str, str]:
    return {"authorization": f"Bearer {token(name)}"}


def put(store: Store, content: bytes, path: str = "model.gguf") -> None:
    entry = Entry(
        key=key_of(path),
        sha256=sha256(content),
        bytes=len(content),
        repo=REPO,
        commit=COMMIT,
        path=path,
    )
    with store.partial(entry.key) as partial:
        partial.append(memoryview(content))
        store.finish(partial, entry)


class Served:
    """A running mirror: its store, its application, its address."""

    def __init__(self, store: Store, app: MirrorApp, port: int) -> None:
        self.store = store
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"


async def _elsewhere(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"the API"})


@contextlib.asynccontextmanager
async def served(folder: Path, content: bytes = CONTENT, **options: Any) -> AsyncIterator[Served]:
    store = open_store(folder)
    put(store, content)
    app = MirrorApp(
        _elsewhere,
        store=store,
        yard_secret=SECRET,
        manifest_of=lambda key: MANIFEST if key == KEY else None,
        **options,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    running = asyncio.create_task(server._serve([listener]))
    try:
        await until(lambda: server.started, "the server to start")
        yield Served(store, app, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await running
        app.close()
        listener.close()


def answers(folder: Path, *requests: dict[str, Any], **options: Any) -> list[httpx.Response]:
    """The answers to requests (method, path, headers), in order, of one mirror."""

    async def go() -> list[httpx.Response]:
        async with served(folder, **options) as mirror, httpx.AsyncClient() as client:
            return [
                await client.request(
                    request.get("method", "GET"),
                    mirror.url + request.get("path", f"/mirror/files/{KEY}"),
                    headers=bearer() | request.get("headers", {}),
                )
                for request in requests
            ]

    return run(go())


def test_a_whole_file_with_its_hash_as_etag(tmp_path: Path) -> None:
    whole, head = answers(tmp_path, {}, {"method": "HEAD"})
    assert whole.status_code == head.status_code == 200
    assert whole.content == CONTENT
    assert head.content == b""
    for answer in (whole, head):
        assert answer.headers["etag"] == ETAG
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["content-length"] == str(len(CONTENT))
        assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-", 100, len(CONTENT)),
        (f"bytes={MIB - 1}-{2 * MIB}", MIB - 1, 2 * MIB + 1),
        ("bytes=-7", len(CONTENT) - 7, len(CONTENT)),
        (f"bytes=5-{10**12}", 5, len(CONTENT)),
    ],
)
def test_a_part(tmp_path: Path, asked: str, first: int, end: int) -> None:
    (answer,) = answers(tmp_path, {"headers": {"range": asked}})
    assert answer.status_code == 206
    assert answer.content == CONTENT[first:end]
    assert answer.headers["content-range"] == f"bytes {first}-{end - 1}/{len(CONTENT)}"
    assert answer.headers["content-length"] == str(end - first)


def test_several_ranges_and_nonsense_are_the_whole_file(tmp_path: Path) -> None:
    for answer in answers(
        tmp_path,
        {"headers": {"range": "bytes=0-1,4-5"}},
        {"headers": {"range": "chapters=1"}},
    ):
        assert answer.status_code == 200
        assert answer.content == CONTENT


def test_behind_the_end_there_is_nothing(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, {"headers": {"range": f"bytes={len(CONTENT)}-"}})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"


def test_validators(tmp_path: Path) -> None:
    part = {"range": "bytes=0-9"}
    same, other, known, head = answers(
        tmp_path,
        {"headers": part | {"if-range": ETAG}},
        {"headers": part | {"if-range": '"other"'}},
        {"headers": {"if-none-match": ETAG}},
        {"method": "HEAD", "headers": part},
    )
    assert (same.status_code, len(same.content)) == (206, 10)
    assert (other.status_code, len(other.content)) == (200, len(CONTENT))
    assert (known.status_code, known.content) == (304, b"")
    assert head.headers["content-length"] == str(len(CONTENT))


@pytest.mark.parametrize(
    "path",
    [
        f"/mirror/files/{'0' * 64}",
        "/mirror/files/",
        "/mirror/files/..%2F..%2Flock",
        "/mirror/files/%2e%2e/blobs",
        f"/mirror/sets/{'0' * 64}",
        "/mirror/",
        "/mirror/other",
    ],
)
def test_what_is_not_there(tmp_path: Path, path: str) -> None:
    (answer,) = answers(tmp_path, {"path": path})
    assert answer.status_code == 404
    assert msgspec.json.decode(answer.content, type=ErrorBody).error.code == "not_found"


def test_a_set_is_told_by_the_key_of_its_first_file(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, {"path": f"/mirror/sets/{KEY}"})
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=Manifest) == MANIFEST


def test_every_other_path_is_the_applications(tmp_path: Path) -> None:
    one, two = answers(tmp_path, {"path": "/v1/models"}, {"path": "/mirrors"})
    assert (one.status_code, two.status_code) == (299, 299)


def test_a_mirror_is_only_read(tmp_path: Path) -> None:
    for method in ("POST", "PUT", "DELETE"):
        (answer,) = answers(tmp_path / method, {"method": method})
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


WRONG = [
    "",
    "Bearer",
    "Basic x",
    f"Bearer {token()}x",
    f"Bearer {token()[:-1]}",
    f"Bearer local.{'A' * 43}",
    f"Bearer other.{token().partition('.')[2]}",
    "Bearer " + "x" * 5000,
    "Bearer %zz.abc",
    "Bearer ünï.abc",
]


@pytest.mark.parametrize("path", [f"/mirror/files/{KEY}", f"/mirror/sets/{KEY}", "/mirror/x"])
def test_nobody_without_a_token_is_answered(tmp_path: Path, path: str) -> None:
    requests = [
        {"path": path, "headers": {"authorization": text.encode("utf-8")}} for text in WRONG
    ]
    for answer in answers(tmp_path, *requests):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        body = msgspec.json.decode(answer.content, type=ErrorBody)
        assert body.error.code == "unauthorized"
        assert token() not in answer.text


def test_a_token_given_twice_is_none(tmp_path: Path) -> None:
    async def go() -> bytes:
        async with served(tmp_path) as mirror:
            reader, writer = await asyncio.open_connection("127.0.0.1", mirror.port)
            line = f"authorization: Bearer {token()}\r\n"
            writer.write(
                f"GET /mirror/files/{KEY} HTTP/1.1\r\nhost: x\r\n{line}{line}\r\n".encode()
            )
            status = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return status

    assert b"401" in run(go())


def test_a_node_that_was_removed_reads_no_more(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, {}, admit=lambda name: name != "local")
    assert answer.status_code == 401


def test_another_mirror_fetches_from_this_one(tmp_path: Path) -> None:
    """Both halves of ours together, resumed in the middle."""
    from controlplane.domain.reports import FileStored
    from controlplane.mirror.domain.sources import sources_of

    other = open_store(tmp_path / "other")
    with other.partial(KEY) as partial:
        partial.append(memoryview(CONTENT[:MIB]))
    task = task_for(CONTENT, others=("cp-1",))

    async def go() -> None:
        async with served(tmp_path / "one") as mirror:
            sources = sources_of(
                task,
                mirrors={"cp-1": mirror.url},
                mirror_token=token("control"),
                endpoint="http://127.0.0.1:9",
                registry_token=None,
            )
            result = await asyncio.to_thread(fetched, other, task, sources)
            assert isinstance(result, FileStored)
            assert result.origin == "mirror"
            assert mirror.app.bytes_served == len(CONTENT) - MIB

    run(go())
    entry = other.entry(KEY)
    assert entry is not None
    assert other.path_of(entry).read_bytes() == CONTENT


async def _begin(mirror: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A reader that took the head and nothing else."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mirror.port)
    head = f"GET /mirror/files/{KEY} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token()}\r\n\r\n"
    writer.write(head.encode())
    assert b"200" in await reader.readline()
    return reader, writer


BIG = model_bytes(24 * MIB)


def test_slow_readers_cost_a_few_buffers_and_are_counted_until_they_leave(tmp_path: Path) -> None:
    """Eight of a file of 24 MiB: held whole, or read as fast as the disk gives, it would be 192 MiB."""

    async def go() -> None:
        async with served(tmp_path, BIG) as mirror:
            gc.collect()
            before = psutil.Process().memory_info().rss
            readers = [await _begin(mirror) for _ in range(8)]
            await until(lambda: mirror.app.reading == 8, "eight readers")
            assert mirror.store.readers(sha256(BIG)) == 8
            served_bytes = -1
            while served_bytes != mirror.app.bytes_served:  # until every buffer on the way is full
                served_bytes = mirror.app.bytes_served
                await asyncio.sleep(0.3)
            assert served_bytes < 8 * len(BIG)
            assert psutil.Process().memory_info().rss - before < 64 * MIB
            for _, writer in readers:
                writer.transport.abort()
            await until(lambda: mirror.store.readers(sha256(BIG)) == 0, "the readers to leave")
            assert mirror.app.reading == 0

    run(go())


def test_a_reader_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    async def go() -> None:
        async with served(tmp_path, BIG, stalled_s=0.3) as mirror:
            _, writer = await _begin(mirror)
            await until(lambda: mirror.app.reading == 1, "the reader")
            await until(lambda: mirror.store.readers(sha256(BIG)) == 0, "it to be let go")
            writer.transport.abort()

    run(go())


def test_a_file_removed_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    async def go() -> None:
        async with served(tmp_path, BIG) as mirror:
            reader, writer = await _begin(mirror)
            await until(lambda: mirror.app.reading == 1, "the reader")
            removing = asyncio.create_task(asyncio.to_thread(mirror.store.remove, KEY))
            await until(lambda: not mirror.store.has(KEY), "the entry to end")
            while await reader.readline() != b"\r\n":
                pass
            assert await reader.readexactly(len(BIG)) == BIG
            await removing
            writer.close()
            await writer.wait_closed()
            assert os.listdir(mirror.store.folder / "blobs") == []

    run(go())


def test_many_readers_at_once_each_get_the_file(tmp_path: Path) -> None:
    async def go() -> None:
        async with served(tmp_path) as mirror, httpx.AsyncClient(timeout=20) as client:
            got = await asyncio.gather(
                *(
                    client.get(f"{mirror.url}/mirror/files/{KEY}", headers=bearer(f"node-{n}"))
                    for n in range(20)
                )
            )
            assert all(answer.content == CONTENT for answer in got)

    run(go(), 40)


def test_a_file_that_lost_its_end_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async def go() -> None:
        async with served(tmp_path) as mirror, httpx.AsyncClient() as client:
            entry = mirror.store.entry(KEY)
            assert entry is not None
            reading = mirror.store.read(KEY)
            assert reading is not None
            shrunk: Callable[[str], Any] = lambda _: reading  # noqa: E731
            mirror.store.read = shrunk  # type: ignore[method-assign]
            path = mirror.store.path_of(entry)
            path.chmod(0o600)
            os.truncate(path, 2 * MIB)
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"{mirror.url}/mirror/files/{KEY}", headers=bearer())

    run(go())
