"""Fetches over TLS: trusted, not trusted, led away from it, stopped in the middle of a handshake."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from controlplane.domain.reports import FileFault, FileStored
from controlplane.mirror.domain.sources import sources_of
from controlplane.mirror.fetching import Fetcher
from schemas import codes
from schemas.settings import ControlplaneSettings
from tests.support.aio import run
from tests.support.fileserver import file_server, whole_or_rest
from tests.support.mirrors import (
    fetched,
    model_bytes,
    open_store,
    registry_sources,
    task_for,
)
from tests.support.tlscert import server_context

CONTENT = model_bytes(3_000_000)


def test_a_file_over_tls_is_resumed_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, certificate = server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT, cut_after=1_000_000), context) as server:
        result = fetched(store, task, registry_sources(task, server, "t"))
        assert isinstance(result, FileStored), result.sentence
        assert [asked.offset for asked in server.requests] == [None, 1_000_000, 2_000_000]


def test_a_host_that_is_not_trusted_is_not_asked_and_not_tried_again(tmp_path: Path) -> None:
    context, _ = server_context(tmp_path)
    store, task = open_store(tmp_path), task_for(CONTENT)
    with file_server(whole_or_rest(CONTENT), context) as server:
        result = fetched(store, task, registry_sources(task, server, "t"), no_progress_s=300)
        assert server.requests == []
    assert isinstance(result, FileFault)
    assert result.code == codes.REGISTRY_UNREACHABLE
    assert "certificate is not trusted" in result.sentence


def test_nobody_is_led_from_https_to_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, certificate = server_context(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    store, task = open_store(tmp_path), task_for(CONTENT)
    with (
        file_server(whole_or_rest(CONTENT)) as plain,
        file_server(lambda asked: asked.answer(302, location=plain.url), context) as server,
    ):
        result = fetched(store, task, registry_sources(task, server))
        assert plain.requests == []
    assert isinstance(result, FileFault)
    assert "from https to http" in result.sentence


def test_a_fetch_that_hangs_in_a_handshake_is_stopped(tmp_path: Path) -> None:
    store, task = open_store(tmp_path), task_for(CONTENT)

    async def go(port: int) -> float:
        fetcher = Fetcher(store, mirror="cp-1", settings=ControlplaneSettings())
        sources = sources_of(
            task,
            mirrors={},
            mirror_token="",
            endpoint=f"https://127.0.0.1:{port}",
            registry_token=None,
        )
        running = asyncio.create_task(fetcher.fetch(task, sources=sources))
        connection, _ = await asyncio.to_thread(listener.accept)
        with connection:
            assert await asyncio.to_thread(connection.recv, 5) != b""  # its hello
            began = time.monotonic()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return time.monotonic() - began

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        assert run(go(listener.getsockname()[1])) < 2.0
