"""Adapters read where they come from: a folder here, a repository of the hub, a folder behind a URL."""

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapterplaces.reader import AT_ONCE, AdapterReader
from controlplane.domain.adapterconfig import CONFIG_BYTES
from controlplane.domain.adaptersources import sum_of_contents
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_key
from controlplane.domain.reports import AdapterRead, AdapterUnreadable
from controlplane.domain.work import ReadAdapter
from controlplane.registry.client import Registry
from schemas import codes
from tests.hub.adapters import adapter
from tests.hub.contents import Held
from tests.hub.faults import Fault
from tests.hub.repos import Entry
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.support.fileserver import Asked, Script, file_server
from tests.support.lora import config_of, weights_of, write_adapter

Read = AdapterRead | AdapterUnreadable


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as made:
        yield made


def read(
    source: str,
    *,
    endpoint: str = "http://127.0.0.1:9",
    token: str | None = None,
    retry_for_s: float = 0.0,
) -> Read:
    async def go() -> Read:
        async with Registry(
            endpoint=endpoint, token=token, timeout_s=5.0, retry_for_s=0.0
        ) as registry:
            task = ReadAdapter(adapter="polite", incarnation="i1", source=source)
            reader = AdapterReader(registry, here="cp-1", retry_for_s=retry_for_s)
            return await reader.read(task)

    return run(go(), 20)


def found(source: str, **options: Any) -> AdapterRead:
    report = read(source, **options)
    assert isinstance(report, AdapterRead), report
    assert (report.adapter, report.incarnation) == ("polite", "i1")
    assert [file.name for file in report.files] == [ADAPTER_WEIGHTS, ADAPTER_CONFIG]
    for file in report.files:
        assert file.key == file_key(report.repo, report.commit, file.name)
    return report


def refused(source: str, code: str, said: str, **options: Any) -> AdapterUnreadable:
    report = read(source, **options)
    assert isinstance(report, AdapterUnreadable), report
    assert (report.adapter, report.incarnation, report.code) == ("polite", "i1", code), report
    assert said in report.sentence
    return report


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# -- a folder


def test_a_folder_is_read_with_the_sums_of_what_lies_there(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite", rank=16)
    (folder / "README.md").write_text("hello")
    weights, config = (
        (folder / ADAPTER_WEIGHTS).read_bytes(),
        (folder / ADAPTER_CONFIG).read_bytes(),
    )
    report = found(f"{folder}/")
    assert report.repo == str(folder)
    assert report.commit == sum_of_contents(sha(config), sha(weights))
    assert report.config.r == 16
    assert [(file.bytes, file.sha256) for file in report.files] == [
        (len(weights), sha(weights)),
        (len(config), sha(config)),
    ]


def test_a_folder_with_other_contents_has_other_keys(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")
    before = found(str(folder))
    assert found(str(folder)) == before
    (folder / ADAPTER_WEIGHTS).write_bytes(weights_of("ruder"))
    after = found(str(folder))
    assert {file.key for file in before.files}.isdisjoint(file.key for file in after.files)


def test_a_folder_that_is_a_link_is_read_and_a_file_that_is_one_is_not(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "real")
    (tmp_path / "link").symlink_to(folder)
    assert found(str(tmp_path / "link")).repo == str(tmp_path / "link")
    secret = tmp_path / "secret"
    secret.write_bytes(weights_of("secret"))
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / ADAPTER_WEIGHTS).symlink_to(secret)
    refused(str(folder), codes.NOT_AN_ADAPTER, f"{ADAPTER_WEIGHTS} is a link")


def test_what_is_no_regular_file_holds_nobody_up(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")
    (folder / ADAPTER_WEIGHTS).unlink()
    os.mkfifo(folder / ADAPTER_WEIGHTS)
    refused(str(folder), codes.NOT_AN_ADAPTER, "is no regular file")
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / ADAPTER_WEIGHTS).mkdir()
    refused(str(folder), codes.NOT_AN_ADAPTER, "is no regular file")


def test_a_folder_that_is_not_there_is_told_with_the_machine(tmp_path: Path) -> None:
    sentence = refused(str(tmp_path / "none"), codes.NO_SUCH_FILE, "is not there").sentence
    assert "the machine of cp-1" in sentence
    (tmp_path / "file").write_text("x")
    refused(str(tmp_path / "file"), codes.NOT_AN_ADAPTER, "is no folder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({ADAPTER_CONFIG: None}, "has no adapter_config.json"),
        ({ADAPTER_WEIGHTS: None, "adapter_model.bin": b"PK"}, "may run code"),
        ({ADAPTER_WEIGHTS: None}, "has no adapter_model.safetensors"),
        ({ADAPTER_WEIGHTS: b""}, "adapter_model.safetensors is empty"),
        ({ADAPTER_CONFIG: b""}, "adapter_config.json is empty"),
        ({ADAPTER_CONFIG: b"no json"}, "adapter_config.json is not JSON"),
        ({ADAPTER_CONFIG: b" " * (CONFIG_BYTES + 1)}, f"has more than {CONFIG_BYTES} bytes"),
    ],
)
def test_scn_d9_a_folder_without_an_adapter_is_refused(
    tmp_path: Path, change: dict[str, bytes | None], said: str
) -> None:
    folder = write_adapter(tmp_path / "polite")
    for name, raw in change.items():
        if raw is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(raw)
    refused(str(folder), codes.NOT_AN_ADAPTER, said)


# -- a repository


def test_a_repository_is_read_at_its_commit_with_what_it_published(hub: Hub) -> None:
    files = adapter("polite", rank=32, base="owner/base")
    commit = hub.repo("Owner/Polite").commit(files)
    weights, config = files[ADAPTER_WEIGHTS], files[ADAPTER_CONFIG]
    report = found("owner/polite", endpoint=hub.url)
    assert (report.repo, report.commit) == ("Owner/Polite", commit)
    assert report.config.r == 32
    assert report.config.base_model_name_or_path == "owner/base"
    assert isinstance(weights, Held)
    assert isinstance(config, Entry)
    assert report.files[0].sha256 == weights.sha256, "published"
    assert report.files[1].sha256 == config.content.sha256, "read here: none is published of it"


def test_a_revision_is_pinned_by_its_commit(hub: Hub) -> None:
    repo = hub.repo("o/polite")
    old = repo.commit(adapter("old", rank=8), ref="v1")
    repo.commit(adapter("new", rank=64))
    assert found("o/polite@v1", endpoint=hub.url).commit == old
    assert found("o/polite@v1", endpoint=hub.url).config.r == 8
    assert found("o/polite", endpoint=hub.url).config.r == 64
    refused("o/polite@v9", codes.REVISION_NOT_FOUND, 'no revision "v9"', endpoint=hub.url)


def test_only_the_configuration_is_downloaded_to_read_a_repository(hub: Hub) -> None:
    hub.repo("o/polite").commit(adapter("polite", padding=100_000))
    found("o/polite", endpoint=hub.url)
    assert hub.counters.bytes_of(f"o/polite/{ADAPTER_WEIGHTS}") == 0


def test_scn_d9_a_repository_without_an_adapter_is_refused(hub: Hub) -> None:
    hub.repo("o/model").commit({"model-Q4_K_M.gguf": Held(b"GGUF1234")})
    refused("o/model", codes.NOT_AN_ADAPTER, "no adapter_config.json", endpoint=hub.url)
    files = adapter("x")
    pickled = {ADAPTER_CONFIG: files[ADAPTER_CONFIG], "adapter_model.bin": Held(b"PK")}
    hub.repo("o/pickle").commit(pickled)
    refused("o/pickle", codes.NOT_AN_ADAPTER, "may run code", endpoint=hub.url)
    hub.repo("o/deep").commit({f"last/{name}": content for name, content in files.items()})
    refused("o/deep", codes.NOT_AN_ADAPTER, "there is last/adapter_config.json", endpoint=hub.url)
    hub.repo("o/long").commit({**files, ADAPTER_CONFIG: Held(b" " * (CONFIG_BYTES + 1))})
    refused("o/long", codes.NOT_AN_ADAPTER, f"1 to {CONFIG_BYTES} are read", endpoint=hub.url)
    hub.repo("o/empty").commit({**files, ADAPTER_WEIGHTS: Held(b"")})
    refused("o/empty", codes.NOT_AN_ADAPTER, "is empty", endpoint=hub.url)
    refused("o/none", codes.REPO_NOT_FOUND, "no repository o/none", endpoint=hub.url)


def test_a_gated_repository_says_what_it_takes(hub: Hub) -> None:
    hub.repo("o/gated", gated="auto").commit(adapter("gated"))
    refused("o/gated", codes.NEEDS_TOKEN, "is gated", endpoint=hub.url)
    stranger, friend = hub.reader("hf_stranger"), hub.reader("hf_friend", "o/gated")
    refused("o/gated", codes.LICENCE_NOT_ACCEPTED, "licence", endpoint=hub.url, token=stranger)
    found("o/gated", endpoint=hub.url, token=friend)


def test_a_registry_that_fails_is_told_by_name(hub: Hub) -> None:
    hub.repo("o/polite").commit(adapter("polite"))
    hub.fault(Fault(at="api", status=503))
    refused("o/polite", codes.REGISTRY_UNREACHABLE, "answered 503", endpoint=hub.url)


# -- a URL


def serving(files: dict[str, bytes], **head: object) -> Script:
    """A plain file server's folder `/a`: ranges, tags, 404 for the rest."""

    def script(asked: Asked) -> None:
        raw = files.get(asked.path.removeprefix("/a/"))
        if raw is None:
            asked.answer(404, b"no")
            return
        end = asked.headers.get("range", "").partition("-")[2]
        if end:
            last = min(int(end), len(raw) - 1)
            if not raw:
                asked.answer(416, content_range="bytes */0")
                return
            asked.answer(206, raw[: last + 1], content_range=f"bytes 0-{last}/{len(raw)}", **head)
        else:
            asked.answer(200, raw, **head)

    return script


def both(**change: bytes) -> dict[str, bytes]:
    return {
        ADAPTER_CONFIG: json.dumps(config_of(rank=8)).encode(),
        ADAPTER_WEIGHTS: weights_of("polite"),
        **change,
    }


def test_a_url_is_read_with_the_server_s_word_for_the_weights() -> None:
    files = both()
    with file_server(serving(files, etag='"v1"')) as server:
        report = found(f"{server.url}/a/", token="hf_secret")
        assert report.repo == f"{server.url}/a"
        assert [(file.bytes, file.sha256) for file in report.files] == [
            (len(files[ADAPTER_WEIGHTS]), ""),
            (len(files[ADAPTER_CONFIG]), sha(files[ADAPTER_CONFIG])),
        ]
        assert all("authorization" not in asked.headers for asked in server.requests)
        assert server.sent < len(files[ADAPTER_CONFIG]) + 65, "the weights are not downloaded"
        server.script = serving(files, etag='"v2"')
        other = found(f"{server.url}/a")
    assert {file.key for file in report.files}.isdisjoint(file.key for file in other.files)


def test_a_server_without_ranges_is_read_too() -> None:
    files = both()
    with file_server(lambda asked: asked.answer(200, files[asked.path[3:]])) as server:
        assert found(f"{server.url}/a").files[0].bytes == len(files[ADAPTER_WEIGHTS])


def test_the_hub_s_own_file_addresses_are_a_folder(hub: Hub) -> None:
    files = adapter("polite", rank=16)
    hub.repo("o/polite").commit(files)
    report = found(f"{hub.url}/o/polite/resolve/main")
    weights = files[ADAPTER_WEIGHTS]
    assert isinstance(weights, Held)
    assert report.files[0].bytes == weights.size
    assert report.config.r == 16


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no adapter_config.json and no adapter_model.safetensors"),
        ({ADAPTER_CONFIG: b"{}"}, "has no adapter_model.safetensors"),
        ({ADAPTER_CONFIG: b"{}", "adapter_model.bin": b"PK"}, "may run code"),
        ({ADAPTER_CONFIG: b"{}", "adapter_model.safetensors.index.json": b"{}"}, "several parts"),
        (both(**{ADAPTER_CONFIG: b""}), "adapter_config.json is empty"),
        (both(**{ADAPTER_CONFIG: b"<html>log in</html>"}), "adapter_config.json is not JSON"),
        (both(**{ADAPTER_CONFIG: b" " * (CONFIG_BYTES + 2)}), "has more than"),
        (both(**{ADAPTER_WEIGHTS: b""}), "what came is empty"),
        (both(**{ADAPTER_WEIGHTS: b"<!DOCTYPE html>" + bytes(200)}), "what came is an HTML page"),
        (both(**{ADAPTER_WEIGHTS: b"PK\x03\x04" + bytes(200)}), "is not a safetensors file"),
    ],
)
def test_scn_d9_a_url_without_an_adapter_is_refused(files: dict[str, bytes], said: str) -> None:
    with file_server(serving(files)) as server:
        refused(f"{server.url}/a", codes.NOT_AN_ADAPTER, said)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (lambda asked: asked.answer(401), codes.SOURCE_UNREACHABLE, "sends no credentials"),
        (lambda asked: asked.answer(403), codes.SOURCE_UNREACHABLE, "answers 403"),
        (lambda asked: asked.answer(429), codes.RATE_LIMITED, "limits how often"),
        (lambda asked: asked.answer(500), codes.SOURCE_UNREACHABLE, "answers 500"),
        (lambda asked: asked.body(b"garbage\r\n\r\n"), codes.SOURCE_UNREACHABLE, "HTTP"),
        (
            lambda asked: asked.answer(302, location="ftp://h.test/x"),
            codes.SOURCE_UNREACHABLE,
            "no web address",
        ),
        (
            lambda asked: asked.answer(302, location=asked.path),
            codes.SOURCE_UNREACHABLE,
            "on and on",
        ),
        (
            lambda asked: asked.answer(200, b"x", content_encoding="gzip"),
            codes.SOURCE_UNREACHABLE,
            "packed",
        ),
        (
            lambda asked: asked.head(200, content_length=100),
            codes.SOURCE_UNREACHABLE,
            "too early",
        ),
    ],
)
def test_a_url_that_gives_nothing_usable_is_told(script: Script, code: str, said: str) -> None:
    with file_server(script) as server:
        refused(f"{server.url}/a", code, said)


def test_a_url_is_asked_again_when_that_may_help() -> None:
    files = both()

    def script(asked: Asked) -> None:
        if len(asked.server.requests) == 1:
            asked.answer(503)
        else:
            serving(files)(asked)

    with file_server(script) as server:
        found(f"{server.url}/a", retry_for_s=10.0)
        assert [asked.path for asked in server.requests] == [
            f"/a/{ADAPTER_CONFIG}",
            f"/a/{ADAPTER_CONFIG}",
            f"/a/{ADAPTER_WEIGHTS}",
        ]


def test_weights_of_no_told_length_are_not_begun() -> None:
    files = both()

    def script(asked: Asked) -> None:
        raw = files[asked.path[3:]]
        if asked.path.endswith(ADAPTER_CONFIG):
            asked.answer(200, raw)
        else:
            asked.head(200)
            asked.body(raw)

    with file_server(script) as server:
        refused(f"{server.url}/a", codes.SOURCE_UNREACHABLE, "does not say how long")


def test_a_cancelled_reading_leaves_the_server() -> None:
    gone = threading.Event()

    def script(asked: Asked) -> None:
        asked.stall()
        gone.set()

    async def go(url: str) -> None:
        reading = asyncio.create_task(
            AdapterReader(Registry(), here="cp-1").read(
                ReadAdapter(adapter="a", incarnation="i", source=url)
            )
        )
        await until(lambda: bool(server.requests), "the server to be asked")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(gone.wait, 5), "its connection is closed"

    with file_server(script) as server:
        run(go(f"{server.url}/a"), 20)


def test_a_source_that_does_not_end_keeps_no_turn() -> None:
    async def go(url: str) -> list[Read]:
        reader = AdapterReader(Registry(), here="cp-1", whole_s=0.3)
        task = ReadAdapter(adapter="a", incarnation="i", source=url)
        return list(await asyncio.gather(*(reader.read(task) for _ in range(AT_ONCE + 1))))

    with file_server(lambda asked: asked.stall()) as server:
        reports = run(go(f"{server.url}/a"), 20)
    for report in reports:
        assert isinstance(report, AdapterUnreadable)
        assert report.code == codes.SOURCE_UNREACHABLE
        assert "could not be read within 0.3 s" in report.sentence


@pytest.mark.parametrize("source", ["polite", "https://me:pw@h.test/a", "/a/../b"])
def test_a_source_that_is_none_is_a_report_too(source: str) -> None:
    assert "pw" not in refused(source, codes.INVALID, "").sentence


def test_whole_folders_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """Hundreds may be added together."""
    for n in range(20):
        write_adapter(tmp_path / f"a{n}")

    async def go() -> list[Read]:
        reader = AdapterReader(Registry(), here="cp-1")
        tasks = [
            ReadAdapter(adapter=f"a{n}", incarnation="i", source=str(tmp_path / f"a{n}"))
            for n in range(20)
        ]
        return list(await asyncio.gather(*(reader.read(task) for task in tasks)))

    reports = run(go(), 20)
    assert [report.adapter for report in reports] == [f"a{n}" for n in range(20)]
    assert all(isinstance(report, AdapterRead) for report in reports)
    assert len({report.commit for report in reports if isinstance(report, AdapterRead)}) == 20
