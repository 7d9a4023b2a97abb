"""Fetches against a server whose every answer is written down: whole, resumed, cut, stopped, in a bandwidth."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from controlplane.domain.reports import FileFault, FileStored
from controlplane.mirror.fetching import Fetcher
from schemas.progress import FileProgress
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.fileserver import Asked, Script, file_server, whole_or_rest
from tests.support.mirror_fetching import (
    CONTENT,
    MIB,
    begin_partial,
    content_of,
    fetch_threads,
    first_range,
    first_then,
    stored,
)
from tests.support.mirrors import (
    COMMIT,
    fetched,
    key_of,
    model_bytes,
    open_store,
    registry_sources,
    sha256,
    task_for,
)

# -- what goes well --------------------------------------------------------------------------------


def test_req_c29_a_file_is_fetched_at_the_pinned_commit_and_checked(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = stored(fetched(store, task, registry_sources(task, server)))
        (asked,) = server.requests
    assert asked.path == f"/owner/repo/resolve/{COMMIT}/model.gguf"
    assert "range" not in asked.headers
    assert "authorization" not in asked.headers
    assert result == FileStored(
        key=task.key,
        mirror="cp-1",
        sha256=sha256(CONTENT),
        bytes=len(CONTENT),
        compared=True,
        origin="registry",
    )
    assert content_of(store, task.key) == CONTENT
    assert store.entries()[0].settled
    assert store.partials() == {}


def test_req_c30_what_is_here_is_no_failure_and_no_download(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        fetched(store, task, registry_sources(task, server))
        again = stored(fetched(store, task, registry_sources(task, server)))
        other = task_for(CONTENT, "other/name.gguf")
        twin = stored(fetched(store, other, registry_sources(other, server)))
        assert len(server.requests) == 1
    assert again.origin == twin.origin == "store"
    assert content_of(store, other.key) == CONTENT


def test_what_lost_its_entry_is_only_hashed(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        fetched(store, task, registry_sources(task, server))
        (store.folder / "files" / f"{task.key}.json").write_bytes(b"")
        store.open()
        assert not store.has(task.key)
        stored(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) == 1
    assert content_of(store, task.key) == CONTENT


def test_req_c34_files_of_equal_name_in_two_folders_are_two_files(tmp_path: Path) -> None:
    contents = {"Q4/m.gguf": model_bytes(MIB, 4), "Q8/m.gguf": model_bytes(MIB, 8)}
    store = open_store(tmp_path)

    def script(asked: Asked) -> None:
        whole_or_rest(contents[asked.path.partition(f"{COMMIT}/")[2]])(asked)

    with file_server(script) as server:
        for path, content in contents.items():
            task = task_for(content, path)
            stored(fetched(store, task, registry_sources(task, server)))
    for path, content in contents.items():
        assert content_of(store, key_of(path)) == content


def test_req_c37_a_published_hash_in_capitals_is_the_same(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=sha256(CONTENT).upper())
    with file_server(whole_or_rest(CONTENT)) as server:
        assert stored(fetched(store, task, registry_sources(task, server))).compared


def test_req_c37_without_a_published_hash_nothing_was_compared(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = stored(fetched(store, task, registry_sources(task, server)))
    assert not result.compared
    assert result.sha256 == sha256(CONTENT)


@pytest.mark.parametrize("length_told", [True, False])
def test_a_body_in_chunks_or_up_to_the_end_of_the_connection(
    tmp_path: Path, length_told: bool
) -> None:
    def script(asked: Asked) -> None:
        if not length_told:
            asked.head(200, connection="close")
            asked.body(CONTENT)
            return
        asked.head(200, transfer_encoding="chunked")
        for begin in range(0, len(CONTENT), 100_000):
            piece = CONTENT[begin : begin + 100_000]
            asked.body(b"%x\r\n%b\r\n" % (len(piece), piece))
        asked.body(b"0\r\n\r\n")

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server)))
    assert content_of(store, task.key) == CONTENT


def test_an_interim_answer_is_followed_by_the_real_one(tmp_path: Path) -> None:
    def script(asked: Asked) -> None:
        asked.connection.sendall(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        whole_or_rest(CONTENT)(asked)

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server)))


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("have", [1, 4, 5, MIB, 2 * MIB + 3, len(CONTENT) - 1])
def test_scn_c6_it_goes_on_at_the_byte_it_has_and_hashes_the_whole(
    tmp_path: Path, have: int
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    begin_partial(store, CONTENT[:have])
    with file_server(whole_or_rest(CONTENT)) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        (asked,) = server.requests
    assert asked.headers.get("range") == (f"bytes={have}-" if have >= 4 else None)
    assert server.sent == len(CONTENT) - (have if have >= 4 else 0)
    assert content_of(store, task.key) == CONTENT


def test_scn_c6_a_whole_partial_is_only_hashed(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    begin_partial(store, CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        assert server.requests == []


def test_cut_connections_are_made_again_where_they_broke(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT, cut_after=MIB)) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        assert server.sent == len(CONTENT)
        assert [asked.offset for asked in server.requests] == [None, MIB, 2 * MIB, 3 * MIB]
        assert [asked.headers.get("if-range") for asked in server.requests] == [
            None,
            '"v1"',
            '"v1"',
            '"v1"',
        ]
    assert content_of(store, task.key) == CONTENT


@pytest.mark.parametrize(
    "wrong",
    [
        lambda asked: asked.answer(200, CONTENT),
        lambda asked: asked.answer(206, CONTENT[:100], content_range=f"bytes 0-99/{len(CONTENT)}"),
        lambda asked: asked.answer(206, CONTENT[asked.offset :]),
        lambda asked: asked.answer(
            206, b"--x\r\n", content_type="multipart/byteranges; boundary=x"
        ),
        lambda asked: asked.answer(416, content_range=f"bytes */{len(CONTENT)}"),
        lambda asked: asked.answer(416),
    ],
    ids=["200", "other range", "no range", "multipart", "416", "416 bare"],
)
def test_an_answer_that_is_not_the_rest_is_never_appended(tmp_path: Path, wrong: Script) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None)
    with file_server(
        first_then(whole_or_rest(CONTENT, cut_after=MIB), first_range(wrong, CONTENT))
    ) as server:
        result = stored(fetched(store, task, registry_sources(task, server)))
    assert result.sha256 == sha256(CONTENT)
    assert content_of(store, task.key) == CONTENT


def test_another_version_in_between_is_begun_anew(tmp_path: Path) -> None:
    """Without a published sha256 nothing but the ETag tells that the second half is of another file."""
    later = model_bytes(len(CONTENT), seed=9)
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None)
    with file_server(
        first_then(whole_or_rest(CONTENT, cut_after=MIB), whole_or_rest(later, etag='"v2"'))
    ) as server:
        stored(fetched(store, task, registry_sources(task, server)))
    assert content_of(store, task.key) == later


def test_a_part_that_does_not_fit_costs_one_more_download_not_the_job(tmp_path: Path) -> None:
    """A beginning of wrong bytes (a disk that lost power): found by the hash, fetched once more, whole."""
    store, task = open_store(tmp_path), task_for(CONTENT)
    begin_partial(store, b"GGUF" + bytes(MIB))
    with file_server(whole_or_rest(CONTENT)) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        assert [asked.offset for asked in server.requests] == [MIB + 4, None]
    assert content_of(store, task.key) == CONTENT


def test_a_beginning_that_is_no_model_or_too_long_is_not_gone_on_with(tmp_path: Path) -> None:
    for left in (b"<html>" + bytes(100), CONTENT + b"more"):
        store, task = open_store(tmp_path), task_for(CONTENT)
        begin_partial(store, left)
        with file_server(whole_or_rest(CONTENT)) as server:
            stored(fetched(store, task, registry_sources(task, server)))
            assert [asked.offset for asked in server.requests] == [None]
        store.remove(task.key)


def test_a_server_that_gives_less_than_was_asked_is_asked_for_the_rest(tmp_path: Path) -> None:
    def script(asked: Asked) -> None:
        offset = asked.offset or 0
        end = min(len(CONTENT), offset + MIB)
        if asked.offset is None:
            whole_or_rest(CONTENT, cut_after=1000)(asked)
        else:
            asked.answer(
                206,
                CONTENT[offset:end],
                etag='"v1"',
                content_range=f"bytes {offset}-{end - 1}/{len(CONTENT)}",
            )

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        assert server.sent == len(CONTENT)


# -- stopping, limits, progress --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["head", "body", "pause"])
def test_a_cancelled_fetch_ends_its_thread_at_once_and_keeps_the_beginning(
    tmp_path: Path, where: str
) -> None:
    def script(asked: Asked) -> None:
        if where == "body":
            asked.head(200, content_length=len(CONTENT), etag='"v1"')
            asked.body(CONTENT[:MIB])
        if where == "pause":
            asked.answer(503, retry_after="200")
        else:
            asked.stall()

    store, task = open_store(tmp_path), task_for(CONTENT)

    async def go(server_requests: list[Asked]) -> float:
        fetcher = Fetcher(
            store, mirror="cp-1", settings=ControlplaneSettings(mirror_no_progress_s=300)
        )
        running = asyncio.create_task(fetcher.fetch(task, sources=registry_sources(task, server)))
        await until(
            lambda: (
                store.partials().get(task.key) == MIB if where == "body" else bool(server_requests)
            ),
            "the fetch to get there",
        )
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        took_s = time.monotonic() - began
        await until(lambda: not fetch_threads(), "its thread to end", 1.0)
        return took_s

    with file_server(script) as server:
        assert run(go(server.requests)) < 2.0
        if where == "body":
            assert store.partials() == {task.key: MIB}
            with store.partial(task.key) as partial:  # nobody holds it any more
                assert partial.allocated < 2 * MIB  # and nothing is reserved
        server.script = whole_or_rest(CONTENT)
        stored(fetched(store, task, registry_sources(task, server)))
        assert server.requests[-1].offset == (MIB if where == "body" else None)


def test_all_fetches_together_keep_to_the_bandwidth(tmp_path: Path) -> None:
    files = {f"m{n}.gguf": model_bytes(300_000, n) for n in range(3)}
    store = open_store(tmp_path)

    def script(asked: Asked) -> None:
        whole_or_rest(files[asked.path.rpartition("/")[2]])(asked)

    async def go() -> float:
        fetcher = Fetcher(
            store,
            mirror="cp-1",
            settings=ControlplaneSettings(mirror_bandwidth_bytes=600_000),
        )
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for path, content in files.items():
                task = task_for(content, path)
                tasks.create_task(fetcher.fetch(task, sources=registry_sources(task, server)))
        took_s = time.monotonic() - began
        await fetcher.settled()
        return took_s

    with file_server(script) as server:
        took_s = run(go())
    assert took_s >= 900_000 / 600_000 - 0.3
    assert len(store.entries()) == 3


def test_req_c33_progress_is_told_with_bytes_total_and_rate_once_a_second(
    tmp_path: Path,
) -> None:
    said: list[tuple[float, FileProgress]] = []
    content = model_bytes(1_200_000)
    store, task = open_store(tmp_path), task_for(content)

    async def go() -> None:
        fetcher = Fetcher(
            store,
            mirror="cp-1",
            settings=ControlplaneSettings(mirror_bandwidth_bytes=500_000),
            on_progress=lambda progress: said.append((time.monotonic(), progress)),
        )
        stored(await fetcher.fetch(task, sources=registry_sources(task, server)))
        await fetcher.settled()

    with file_server(whole_or_rest(content)) as server:
        run(go())
    assert 2 <= len(said) <= 4
    assert {progress.what for _, progress in said} == {"fetching"}
    assert all(progress.total_bytes == len(content) for _, progress in said)
    assert said[-1][1].bytes > said[0][1].bytes
    assert said[-1][1].rate_bytes_s == pytest.approx(500_000, rel=0.4)


def test_scn_c9_a_file_has_one_writer_and_the_second_finds_it_there(tmp_path: Path) -> None:
    """Two leaders of one folder for a moment: the second waits, then has it without a byte."""
    store, task = open_store(tmp_path), task_for(CONTENT)
    go_on = threading.Event()

    def script(asked: Asked) -> None:
        asked.head(200, content_length=len(CONTENT), etag='"v1"')
        asked.body(CONTENT[:MIB])
        go_on.wait(10)
        asked.body(CONTENT[MIB:])

    async def go() -> list[FileStored | FileFault]:
        fetchers = [
            Fetcher(store, mirror=name, settings=ControlplaneSettings()) for name in ("a", "b")
        ]
        first = asyncio.create_task(fetchers[0].fetch(task, sources=registry_sources(task, server)))
        await until(lambda: store.partials().get(task.key) == MIB, "the first to begin")
        second = asyncio.create_task(
            fetchers[1].fetch(task, sources=registry_sources(task, server))
        )
        await until(
            lambda: len([t for t in threading.enumerate() if t.name.startswith("fetch ")]) == 2,
            "the second to wait",
        )
        go_on.set()
        results = [await first, await second]
        for fetcher in fetchers:
            await fetcher.settled()
        return results

    with file_server(script) as server:
        results = run(go())
        assert len(server.requests) == 1
    assert [stored(result).origin for result in results] == ["registry", "store"]
