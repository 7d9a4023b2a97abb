"""Fetches of what is wrong: other bytes, pages, errors, servers and disks that stand still or fill up."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from controlplane.mirror import partials
from controlplane.mirror.domain import retries
from schemas import codes
from tests.support.fileserver import Asked, file_server, whole_or_rest
from tests.support.mirror_fetching import (
    CONTENT,
    MIB,
    PAGE,
    begin_partial,
    content_of,
    fault,
    fetch_threads,
    first_then,
    stored,
)
from tests.support.mirrors import (
    fetched,
    model_bytes,
    open_store,
    registry_sources,
    sha256,
    task_for,
)

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
