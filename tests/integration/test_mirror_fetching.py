"""Fetches against a server whose every answer is written down: resumed, cut, wrong, slow, refused."""

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from controlplane.domain.reports import FileFault, FileStored
from controlplane.mirror import partials
from controlplane.mirror.domain import retries
from controlplane.mirror.domain.sources import sources_of
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.store import Store
from schemas import codes
from schemas.progress import FileProgress
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until
from tests.support.fileserver import Asked, Script, file_server, whole_or_rest
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

MIB = 1024 * 1024
CONTENT = model_bytes(3 * MIB + 17)


def content_of(store: Store, key: str) -> bytes:
    reading = store.read(key)
    assert reading is not None
    with reading:
        return os.pread(reading.handle, reading.entry.bytes + 1, 0)


def begin_partial(store: Store, content: bytes, path: str = "model.gguf") -> None:
    with store.partial(key_of(path)) as partial:
        partial.append(memoryview(content))


def stored(result: FileStored | FileFault) -> FileStored:
    assert isinstance(result, FileStored), result.sentence
    return result


def fault(result: FileStored | FileFault) -> FileFault:
    assert isinstance(result, FileFault)
    return result


def fetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch ")]


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


def first_then(first: Script, then: Script) -> Script:
    def script(asked: Asked) -> None:
        (first if asked is asked.server.requests[0] else then)(asked)

    return script


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


def first_range(wrong: Script, content: bytes) -> Script:
    """`wrong` to the first request for a range, then as it should be."""

    def script(asked: Asked) -> None:
        ranged = [other for other in asked.server.requests if other.offset is not None]
        (wrong if ranged and asked is ranged[0] else whole_or_rest(content))(asked)

    return script


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


# -- what is wrong ---------------------------------------------------------------------------------


def test_req_c37_wrong_bytes_are_refused_with_both_hashes_and_thrown_away(tmp_path: Path) -> None:
    wrong = model_bytes(len(CONTENT), seed=2)
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(wrong)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) == 1
    assert result.code == codes.CHECKSUM_MISMATCH
    for said in ("model.gguf", sha256(wrong)[:12], sha256(CONTENT)[:12]):
        assert said in result.sentence
    assert sha256(wrong)[:13] not in result.sentence
    assert sum(store.partials().values()) == 0
    assert not store.has(task.key)


@pytest.mark.parametrize("published", ["abc", "not a hash at all", "ff" * 33])
def test_req_c37_a_malformed_published_hash_fails_the_file_and_nothing_else(
    tmp_path: Path, published: str
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=published)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert server.requests == []
    assert result.code == codes.CHECKSUM_MISMATCH
    assert published in result.sentence


PAGE = b"<!doctype html><html><body>Log in to go on</body></html>"


@pytest.mark.parametrize("told", ["size of the page", "size of the file", "no size", "as the rest"])
def test_scn_c8_a_page_is_never_stored_as_a_model(tmp_path: Path, told: str) -> None:
    def script(asked: Asked) -> None:
        match told:
            case "size of the page":
                asked.answer(200, PAGE, content_type="text/html")
            case "size of the file":
                asked.head(200, content_length=len(CONTENT))
                asked.body(PAGE.ljust(len(CONTENT)))
            case _:
                asked.head(200, connection="close")
                asked.body(PAGE)

    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None)
    if told == "as the rest":
        begin_partial(store, CONTENT[:MIB])
    with file_server(script) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
    assert result.code == codes.NOT_GGUF
    assert "an HTML page" in result.sentence
    assert sum(store.partials().values()) == 0
    assert not store.has(task.key)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused_with_both(
    tmp_path: Path, change: int, told: bool
) -> None:
    wrong = (CONTENT + b"x")[: len(CONTENT) + change]

    def script(asked: Asked) -> None:
        if told:
            asked.answer(200, wrong)
        else:
            asked.head(200, transfer_encoding="chunked")
            asked.body(b"%x\r\n%b\r\n0\r\n\r\n" % (len(wrong), wrong))

    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None)
    with file_server(script) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) == 1
    assert result.code == codes.SIZE_MISMATCH
    assert not store.has(task.key)
    assert sum(store.partials().values()) == 0


def test_the_rest_of_a_file_of_another_size_is_refused_and_the_beginning_thrown_away(
    tmp_path: Path,
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    begin_partial(store, CONTENT[:MIB])
    with file_server(whole_or_rest(CONTENT + b"more")) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
    assert result.code == codes.SIZE_MISMATCH
    assert sum(store.partials().values()) == 0


def test_req_c31_a_missing_file_fails_at_once(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda asked: asked.answer(404, x_error_code="EntryNotFound")) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) == 1
    assert result.code == codes.NO_SUCH_FILE


@pytest.mark.parametrize(
    ("status", "token", "code"),
    [(401, None, codes.NEEDS_TOKEN), (403, "hf", codes.LICENCE_NOT_ACCEPTED)],
)
def test_scn_c8_a_gated_file_says_what_is_missing(
    tmp_path: Path, status: int, token: str | None, code: str
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda asked: asked.answer(status, PAGE, x_error_code="GatedRepo")) as server:
        result = fault(fetched(store, task, registry_sources(task, server, token)))
        assert len(server.requests) == 1
    assert result.code == code


def test_errors_that_pass_are_tried_again(tmp_path: Path) -> None:
    def script(asked: Asked) -> None:
        if len(asked.server.requests) <= 2:
            asked.answer(503)
        elif len(asked.server.requests) == 3:
            asked.connection.sendall(b"SSH-2.0-OpenSSH\r\n")
        else:
            whole_or_rest(CONTENT)(asked)

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) == 4


def test_a_429_is_waited_for_as_told(tmp_path: Path) -> None:
    times: list[float] = []

    def script(asked: Asked) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            asked.answer(429, retry_after="1")
        else:
            whole_or_rest(CONTENT)(asked)

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server)))
    assert times[1] - times[0] >= 1.0


def test_a_429_longer_than_the_bound_fails_at_once_and_says_so(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda asked: asked.answer(429, retry_after="3600")) as server:
        result = fault(fetched(store, task, registry_sources(task, server), no_progress_s=300))
        assert len(server.requests) == 1
    assert result.code == codes.RATE_LIMITED
    assert "3600 s" in result.sentence


def test_nobody_answers(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as server:
        sources = registry_sources(task, server)
    result = fault(fetched(store, task, sources, no_progress_s=0.5))
    assert result.code == codes.REGISTRY_UNREACHABLE
    assert "refused" in result.sentence


def test_req_c32_no_new_byte_for_the_bound_ends_it_and_keeps_what_is_there(
    tmp_path: Path,
) -> None:
    def script(asked: Asked) -> None:
        if asked.offset is None:
            asked.head(200, content_length=len(CONTENT), etag='"v1"')
            asked.body(CONTENT[:MIB])
        asked.stall()

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        result = fault(fetched(store, task, registry_sources(task, server), no_progress_s=1.0))
    assert result.code == codes.NO_PROGRESS
    assert "1.0 MiB of 3.0 MiB" in result.sentence
    assert store.partials()[task.key] == MIB


def test_req_c32_a_slow_file_that_moves_takes_as_long_as_it_takes(tmp_path: Path) -> None:
    """Far longer than the bound in all, never that long without a byte."""
    small = model_bytes(40)

    def script(asked: Asked) -> None:
        asked.head(200, content_length=len(small))
        for byte in small:
            asked.server.ending.wait(0.05)
            asked.body(bytes([byte]))

    store, task = open_store(tmp_path), task_for(small)
    began = time.monotonic()
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server), no_progress_s=0.9))
        assert len(server.requests) == 1
    assert time.monotonic() - began > 1.8


@pytest.mark.parametrize(
    ("beginning", "drip"),
    [
        (b"HTTP/1.1 200 X\r\nx-long: ", b"x"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n1;x=", b"x"),
        (b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ", b"x"),
    ],
)
def test_req_c32_what_comes_without_end_and_is_no_byte_of_the_file_is_no_progress(
    tmp_path: Path, beginning: bytes, drip: bytes
) -> None:
    def script(asked: Asked) -> None:
        asked.connection.sendall(beginning)
        while not asked.server.ending.wait(0.02):
            asked.connection.sendall(drip)

    store, task = open_store(tmp_path), task_for(CONTENT)
    began = time.monotonic()
    with file_server(script) as server:
        result = fault(fetched(store, task, registry_sources(task, server), no_progress_s=0.6))
    assert time.monotonic() - began < 5
    assert result.code in (codes.REGISTRY_UNREACHABLE, codes.NO_PROGRESS)
    assert fetch_threads() == []


def test_a_stalled_connection_is_left_for_another_before_the_bound(tmp_path: Path) -> None:
    def stall(asked: Asked) -> None:
        asked.head(200, content_length=len(CONTENT), etag='"v1"')
        asked.body(CONTENT[:MIB])
        asked.stall()

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(first_then(stall, whole_or_rest(CONTENT))) as server:
        stored(fetched(store, task, registry_sources(task, server), no_progress_s=1.5))
        assert server.sent == len(CONTENT)


def test_a_server_without_ranges_that_always_breaks_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.01)

    def script(asked: Asked) -> None:
        asked.head(200, content_length=len(CONTENT))
        asked.body(CONTENT[:1000])

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        result = fault(fetched(store, task, registry_sources(task, server), no_progress_s=2.0))
        assert len(server.requests) < 20
    assert result.code == codes.NO_PROGRESS


# -- redirects and tokens --------------------------------------------------------------------------


def test_a_token_is_sent_to_its_host_and_never_after_a_redirect_to_another(
    tmp_path: Path,
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as other, file_server(lambda _: None) as server:
        server.script = lambda asked: asked.answer(302, location=f"{other.url}/cdn?sig=a%2Fb")
        stored(fetched(store, task, registry_sources(task, server, "secret-token")))
        assert server.requests[0].headers["authorization"] == "Bearer secret-token"
        (asked,) = other.requests
    assert asked.path == "/cdn?sig=a%2Fb"
    assert "authorization" not in asked.headers
    assert "secret-token" not in str(asked.headers)


def test_a_token_does_not_come_back_when_a_stranger_sends_us_home(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda _: None) as other, file_server(lambda _: None) as server:
        other.script = lambda asked: asked.answer(307, location=f"{server.url}/final")

        def script(asked: Asked) -> None:
            if asked.path == "/final":
                whole_or_rest(CONTENT)(asked)
            else:
                asked.answer(302, location=f"{other.url}/x")

        server.script = script
        stored(fetched(store, task, registry_sources(task, server, "secret-token")))
        assert "authorization" not in server.requests[-1].headers


def test_a_renamed_repository_on_the_same_host_keeps_the_token(tmp_path: Path) -> None:
    def script(asked: Asked) -> None:
        if "/new/" in asked.path:
            whole_or_rest(CONTENT)(asked)
        else:
            asked.answer(307, location=f"/new/repo/resolve/{COMMIT}/model.gguf")

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(script) as server:
        stored(fetched(store, task, registry_sources(task, server, "t")))
        assert [asked.headers.get("authorization") for asked in server.requests] == [
            "Bearer t",
            "Bearer t",
        ]


@pytest.mark.parametrize(
    "location", ["/again", "file:///etc/passwd", "ftp://x/y", "http://[bad/", "http://x:99999999/"]
)
def test_a_redirect_that_leads_nowhere_is_no_loop(tmp_path: Path, location: str) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(lambda asked: asked.answer(302, location=location)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert len(server.requests) < 12
    assert result.code == codes.REGISTRY_UNREACHABLE
    assert "points" in result.sentence


def test_an_address_that_expired_is_asked_for_again(tmp_path: Path) -> None:
    def expired_first(asked: Asked) -> None:
        if len(asked.server.requests) == 1:
            asked.answer(403, b"<?xml version='1.0'?><Error/>")
        else:
            whole_or_rest(CONTENT)(asked)

    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(expired_first) as other, file_server(lambda _: None) as server:
        server.script = lambda asked: asked.answer(302, location=f"{other.url}/signed")
        stored(fetched(store, task, registry_sources(task, server, "t")))
        assert len(server.requests) == 2


def test_a_proxy_of_the_environment_is_used_for_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:p%40ss@"))
        monkeypatch.setenv("no_proxy", "")
        sources = sources_of(
            task,
            mirrors={},
            mirror_token="",
            endpoint="http://hub.invalid",
            registry_token=None,
        )
        stored(fetched(store, task, sources))
        (asked,) = proxy.requests
    assert asked.path.startswith("http://hub.invalid/owner/repo/resolve/")
    assert asked.headers["host"] == "hub.invalid"
    assert asked.headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"


# -- several sources -------------------------------------------------------------------------------


def test_another_mirror_is_asked_first_with_our_token(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT, others=("cp-2",))
    with file_server(whole_or_rest(CONTENT)) as mirror, file_server(lambda _: None) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="control.mac",
            endpoint=hub.url,
            registry_token="hf",
        )
        result = stored(fetched(store, task, sources))
        assert hub.requests == []
        (asked,) = mirror.requests
    assert result.origin == "mirror"
    assert asked.path == f"/mirror/files/{task.key}"
    assert asked.headers["authorization"] == "Bearer control.mac"


@pytest.mark.parametrize("kind", ["404", "wrong bytes", "dead", "cut", "page"])
def test_a_mirror_that_fails_leaves_it_to_the_registry(tmp_path: Path, kind: str) -> None:
    scripts: dict[str, Script] = {
        "404": lambda asked: asked.answer(404),
        "wrong bytes": whole_or_rest(model_bytes(len(CONTENT), seed=3)),
        "dead": lambda asked: None,
        "cut": lambda asked: whole_or_rest(CONTENT, cut_after=1000 if asked.offset is None else 0)(
            asked
        ),
        "page": lambda asked: asked.answer(200, PAGE),
    }
    store, task = open_store(tmp_path), task_for(CONTENT, others=("cp-2",))
    with file_server(scripts[kind]) as mirror, file_server(whole_or_rest(CONTENT)) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="control.mac",
            endpoint=hub.url,
            registry_token=None,
        )
        result = stored(fetched(store, task, sources))
        assert all("authorization" not in asked.headers for asked in hub.requests)
    assert result.origin == "registry"
    assert content_of(store, task.key) == CONTENT


def test_what_a_mirror_began_the_registry_does_not_go_on_with_unchecked(tmp_path: Path) -> None:
    """Without a published sha256 the halves of two servers could be of two files."""
    other = model_bytes(len(CONTENT), seed=5)
    store, task = open_store(tmp_path), task_for(CONTENT, sha256=None, others=("cp-2",))

    def half(asked: Asked) -> None:
        whole_or_rest(other, cut_after=MIB if asked.offset is None else 0)(asked)

    with file_server(half) as mirror, file_server(whole_or_rest(CONTENT)) as hub:
        sources = sources_of(
            task,
            mirrors={"cp-2": mirror.url},
            mirror_token="t",
            endpoint=hub.url,
            registry_token=None,
        )
        stored(fetched(store, task, sources))
        assert hub.requests[0].offset is None
    assert content_of(store, task.key) == CONTENT


# -- the disk --------------------------------------------------------------------------------------


def test_scn_c7_a_disk_too_small_is_refused_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task = open_store(tmp_path, keep_free_bytes=5 * MIB), task_for(CONTENT)
    monkeypatch.setattr(store, "free_bytes", lambda: 2 * MIB)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert server.requests == []
    assert result.code == codes.DISK_FULL
    for said in ("3.0 MiB more", "2.0 MiB may be used", "5.0 MiB are kept free"):
        assert said in result.sentence


def test_scn_c7_what_is_here_already_counts_for_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)
    begin_partial(store, CONTENT[: 2 * MIB])
    monkeypatch.setattr(store, "free_bytes", lambda: 2 * MIB)
    with file_server(whole_or_rest(CONTENT)) as server:
        stored(fetched(store, task, registry_sources(task, server)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_scn_c7_a_disk_that_fills_up_on_the_way_is_said_and_the_beginning_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write = partials.Partial.append

    def full_after_a_while(partial: partials.Partial, view: memoryview) -> None:
        if partial.size + len(view) > 2 * MIB:
            write(partial, view[: 2 * MIB - partial.size])
            raise OSError(number, os.strerror(number))
        write(partial, view)

    store, task = open_store(tmp_path), task_for(CONTENT)
    monkeypatch.setattr(partials.Partial, "append", full_after_a_while)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
        assert result.code == codes.DISK_FULL
        assert "filled up" in result.sentence
        assert store.partials()[task.key] == 2 * MIB
        monkeypatch.setattr(partials.Partial, "append", write)
        stored(fetched(store, task, registry_sources(task, server)))
        assert server.requests[-1].offset == 2 * MIB
    assert content_of(store, task.key) == CONTENT


def test_a_disk_that_fails_is_a_fault_of_the_file_not_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store, task = open_store(tmp_path), task_for(CONTENT)
    monkeypatch.setattr(partials.Partial, "append", broken)
    with file_server(whole_or_rest(CONTENT)) as server:
        result = fault(fetched(store, task, registry_sources(task, server)))
    assert result.code == codes.DISK_FAILED
    assert "Input/output error" in result.sentence


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
