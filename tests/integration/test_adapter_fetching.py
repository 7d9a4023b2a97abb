"""Adapters' files come to a mirror: from a folder, a URL, a registry or another mirror; whole and checked."""

import errno
import hashlib
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.adapterplaces.reader import AdapterReader
from controlplane.domain.adaptersources import stamp_of, sum_of_web
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from controlplane.domain.reports import AdapterRead, FileFault, FileStored
from controlplane.domain.work import Fetch, ReadAdapter
from controlplane.mirror.domain.sources import Source, sources_of
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.store import Store
from controlplane.registry.client import Registry
from schemas import codes
from schemas.settings import ControlplaneSettings
from tests.hub.adapters import adapter
from tests.hub.contents import Held
from tests.hub.server import Hub
from tests.support.aio import run
from tests.support.fileserver import Asked, file_server, whole_or_rest
from tests.support.lora import weights_of, write_adapter
from tests.support.mirrors import fetched, open_store, sha256

WEIGHTS = weights_of("polite", padding=400_000)


def tasks_of(source: str, endpoint: str = "http://127.0.0.1:9") -> tuple[AdapterRead, list[Fetch]]:
    """The fetches that the files of the adapter at `source` call for, weights first."""

    async def go() -> AdapterRead:
        async with Registry(endpoint=endpoint, retry_for_s=0.0) as registry:
            reader = AdapterReader(registry, here="cp-1", retry_for_s=0.0)
            report = await reader.read(ReadAdapter(adapter="a", incarnation="i", source=source))
            assert isinstance(report, AdapterRead), report
            return report

    report = run(go())
    return report, [
        Fetch(
            key=file.key,
            repo=report.repo,
            commit=report.commit,
            path=file.name,
            bytes=file.bytes,
            sha256=file.sha256 or None,
        )
        for file in report.files
    ]


def places(task: Fetch, endpoint: str = "http://127.0.0.1:9", **mirrors: str) -> tuple[Source, ...]:
    return sources_of(
        task, mirrors=mirrors, mirror_token="mirror", endpoint=endpoint, registry_token="hf"
    )


def got(store: Store, task: Fetch, **options: Any) -> FileStored:
    result = fetched(store, task, options.pop("sources", None) or places(task), **options)
    assert isinstance(result, FileStored), result
    return result


def refused(store: Store, task: Fetch, code: str, said: str, **options: Any) -> FileFault:
    result = fetched(store, task, options.pop("sources", None) or places(task), **options)
    assert isinstance(result, FileFault), result
    assert (result.code, said in result.sentence) == (code, True), result
    assert not store.has(task.key)
    return result


def content(store: Store, task: Fetch) -> bytes:
    entry = store.entry(task.key)
    assert entry is not None
    return store.path_of(entry).read_bytes()


# -- a folder


def test_a_folder_s_files_are_copied_and_checked(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite", padding=400_000)
    before = {path.name: path.stat() for path in folder.iterdir()}
    store = open_store(tmp_path)
    _, tasks = tasks_of(str(folder))
    for task in tasks:
        stored = got(store, task)
        assert (stored.origin, stored.compared) == ("source", True)
        assert content(store, task) == (folder / task.path).read_bytes()
        entry = store.entry(task.key)
        assert entry is not None
        assert store.path_of(entry).stat().st_nlink == 1, "never linked: its owner may change it"
    for path in folder.iterdir():
        assert path.stat()[:7] == before[path.name][:7], "nothing of the folder was changed"
    assert got(store, tasks[0]).origin == "store"


def test_what_lies_in_the_folder_may_change_afterwards(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")
    store = open_store(tmp_path)
    _, (weights, _) = tasks_of(str(folder))
    got(store, weights)
    whole = content(store, weights)
    (folder / ADAPTER_WEIGHTS).write_bytes(b"x")
    assert content(store, weights) == whole


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (b"short", codes.SIZE_MISMATCH, "has 5 bytes, when it was added it had"),
        (b"PK\x03\x04".ljust(len(WEIGHTS)), codes.NOT_AN_ADAPTER, "is not a safetensors file"),
        (WEIGHTS + b"x", codes.SIZE_MISMATCH, "when it was added it had"),
        (
            weights_of("ruder_", padding=400_000),
            codes.CHECKSUM_MISMATCH,
            "when it was added it had",
        ),
        (None, codes.NO_SUCH_FILE, "is not there"),
        ("link", codes.SOURCE_UNREACHABLE, "is a link"),
        ("pipe", codes.SOURCE_UNREACHABLE, "no regular file"),
    ],
)
def test_a_folder_that_changed_since_it_was_read_is_refused(
    tmp_path: Path, change: bytes | str | None, code: str, said: str
) -> None:
    folder = tmp_path / "polite"
    write_adapter(folder)
    (folder / ADAPTER_WEIGHTS).write_bytes(WEIGHTS)
    store = open_store(tmp_path)
    _, (weights, _) = tasks_of(str(folder))
    (folder / ADAPTER_WEIGHTS).unlink()
    if change == "link":
        (tmp_path / "elsewhere").write_bytes(WEIGHTS)
        (folder / ADAPTER_WEIGHTS).symlink_to(tmp_path / "elsewhere")
    elif change == "pipe":
        os.mkfifo(folder / ADAPTER_WEIGHTS)
    elif isinstance(change, bytes):
        (folder / ADAPTER_WEIGHTS).write_bytes(change)
    refused(store, weights, code, said, no_progress_s=0.5)


@pytest.mark.parametrize("call", ["readv", "fstat"])
def test_a_folder_whose_disk_fails_is_told_apart_from_the_mirror_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = write_adapter(tmp_path / "polite")
    store = open_store(tmp_path)
    _, (weights, _) = tasks_of(str(folder))
    honest = getattr(os, call)

    def failing(handle: int, *more: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{handle}").startswith(str(folder)):
            raise OSError(errno.EIO, "Input/output error")
        return honest(handle, *more)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        refused(
            store,
            weights,
            codes.SOURCE_UNREACHABLE,
            f"the folder {folder}: it could not be read (Input/output error)",
            no_progress_s=0.2,
        )
    assert got(store, weights).origin == "source"


def test_a_folder_that_answers_nothing_any_more_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread cannot be ended; the fetch is, and others have its turn."""
    folder = write_adapter(tmp_path / "polite")
    store = open_store(tmp_path)
    _, (weights, _) = tasks_of(str(folder))
    back = threading.Event()
    honest = os.readv

    def standing(handle: int, views: Any) -> int:
        assert back.wait(20)
        return honest(handle, views)

    async def go() -> FileStored | FileFault:
        settings = ControlplaneSettings(mirror_no_progress_s=0.2)
        fetcher = Fetcher(store, mirror="cp-1", settings=settings)
        try:
            return await fetcher.fetch(weights, sources=places(weights))
        finally:
            back.set()
            await fetcher.settled()

    with monkeypatch.context() as broken:
        broken.setattr(os, "readv", standing)
        result = run(go(), 10.0)
    assert isinstance(result, FileFault), result
    assert result.code == codes.SOURCE_UNREACHABLE
    assert f"the folder {folder} did not answer" in result.sentence
    assert not store.has(weights.key), "who gave it up hears no more of it"
    assert got(store, weights).origin == "source"


def test_a_folder_s_file_is_gone_on_with_where_it_was_left(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite")
    (folder / ADAPTER_WEIGHTS).write_bytes(WEIGHTS)
    store = open_store(tmp_path)
    _, (weights, _) = tasks_of(str(folder))
    with store.partial(weights.key) as partial:
        partial.append(memoryview(WEIGHTS[:100_000]))
    assert got(store, weights).origin == "source"
    assert content(store, weights) == WEIGHTS


def test_a_mirror_whose_machine_lacks_the_folder_takes_it_from_the_one_that_has_it(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "polite")
    (folder / ADAPTER_WEIGHTS).write_bytes(WEIGHTS)
    _, (weights, _) = tasks_of(str(folder))
    (folder / ADAPTER_WEIGHTS).unlink()
    store = open_store(tmp_path)
    task = replace(weights, others=("b",))
    with file_server(whole_or_rest(WEIGHTS, etag=f'"{sha256(WEIGHTS)}"')) as other:
        assert got(store, task, sources=places(task, b=other.url)).origin == "mirror"
        assert other.requests[0].path == f"/mirror/files/{task.key}"
    assert content(store, task) == WEIGHTS


def test_a_folder_that_is_larger_than_the_disk_allows_is_not_begun(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "polite", padding=400_000)
    store = open_store(tmp_path, keep_free_bytes=2**60)
    _, (weights, _) = tasks_of(str(folder))
    refused(store, weights, codes.DISK_FULL, "no room for adapter_model.safetensors")


# -- a URL


class Site:
    """A folder `/a` whose weights come with ranges and this tag."""

    def __init__(self, config: bytes, weights: bytes = WEIGHTS, etag: str = '"v1"') -> None:
        self.config = config
        self.weights = weights
        self.etag = etag
        self.cut_after: int | None = None

    def __call__(self, asked: Asked) -> None:
        if asked.path == f"/a/{ADAPTER_CONFIG}":
            asked.answer(200, self.config)
            return
        first, _, last = asked.headers.get("range", "").removeprefix("bytes=").partition("-")
        if last:
            asked.answer(
                206,
                self.weights[int(first) : int(last) + 1],
                content_range=f"bytes {first}-{last}/{len(self.weights)}",
                etag=self.etag,
            )
            return
        whole_or_rest(self.weights, etag=self.etag, cut_after=self.cut_after)(asked)


def site(tmp_path: Path, **options: Any) -> Site:
    config = (write_adapter(tmp_path / "made") / ADAPTER_CONFIG).read_bytes()
    return Site(config, **options)


def test_a_url_s_files_are_fetched_without_a_token_and_their_header_is_checked(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    with file_server(site(tmp_path)) as server:
        report, (weights, config) = tasks_of(f"{server.url}/a")
        assert (weights.sha256, config.sha256) == (None, report.files[1].sha256)
        stored = got(store, weights)
        assert (stored.origin, stored.compared, stored.sha256) == (
            "source",
            False,
            sha256(WEIGHTS),
        )
        assert got(store, config).compared, "what was judged is what is served"
        assert all("authorization" not in asked.headers for asked in server.requests)
    assert content(store, weights) == WEIGHTS


def test_a_url_s_file_is_gone_on_with_after_every_cut(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = site(tmp_path)
    with file_server(made) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        made.cut_after = 150_000
        got(store, weights, no_progress_s=10.0)
        asked = [one.offset for one in server.requests if one.offset]
        assert asked == [150_000, 300_000]
    assert content(store, weights) == WEIGHTS


def test_a_url_whose_weights_changed_is_refused_also_at_the_same_size(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = site(tmp_path)
    with file_server(made) as server:
        _, (weights, config) = tasks_of(f"{server.url}/a")
        made.weights, made.etag = weights_of("ruder_", padding=400_000), '"v2"'
        assert len(made.weights) == len(WEIGHTS)
        refused(store, weights, codes.CHECKSUM_MISMATCH, "has changed since the adapter was added")
        made.config = made.config.replace(b"q_proj", b"k_proj")
        refused(store, config, codes.CHECKSUM_MISMATCH, "when it was added it had")


def test_a_url_that_changes_between_two_parts_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = site(tmp_path)

    def script(asked: Asked) -> None:
        if asked.offset:
            made.etag = '"v2"'
        made(asked)

    with file_server(script) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        made.cut_after = 150_000
        refused(store, weights, codes.CHECKSUM_MISMATCH, "has changed")


def test_a_server_that_says_nothing_of_versions_is_believed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    config = write_adapter(tmp_path / "made") / ADAPTER_CONFIG

    def script(asked: Asked) -> None:
        asked.answer(200, config.read_bytes() if asked.path.endswith(".json") else WEIGHTS)

    with file_server(script) as server:
        report, (weights, _) = tasks_of(f"{server.url}/a")
        digest = hashlib.sha256(config.read_bytes()).hexdigest()
        assert report.commit == sum_of_web(digest, stamp_of("", "", len(WEIGHTS)))
        assert got(store, weights).sha256 == sha256(WEIGHTS)


def broken(kind: str) -> bytes:
    """Weights of the right size and beginning that are none inside."""
    count = int.from_bytes(WEIGHTS[:8], "little")
    head = json.loads(WEIGHTS[8 : 8 + count])
    if kind == "offsets":
        name = next(name for name in head if name != "__metadata__")
        head[name]["data_offsets"][1] += 4
    text = json.dumps(head).encode() if kind == "offsets" else b"{" + b"x" * (count - 1)
    text = text[: count + 64].ljust(count + 64 if kind == "offsets" else count)
    whole = struct.pack("<Q", len(text)) + text
    return whole + bytes(max(0, len(WEIGHTS) - len(whole)))


@pytest.mark.parametrize(
    ("kind", "said"), [("offsets", "not where or as long"), ("json", "no list of tensors")]
)
def test_weights_that_are_none_inside_are_found_out_at_the_end(
    tmp_path: Path, kind: str, said: str
) -> None:
    store = open_store(tmp_path)
    with file_server(site(tmp_path, weights=broken(kind))) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        refused(store, weights, codes.NOT_AN_ADAPTER, said)
        assert store.partials().get(weights.key, 0) == 0, "worthless bytes are not gone on with"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, codes.NO_SUCH_FILE, "answers 404"),
        (410, codes.NO_SUCH_FILE, "answers 410"),
        (401, codes.SOURCE_UNREACHABLE, "answers 401"),
        (500, codes.SOURCE_UNREACHABLE, "answers 500"),
        (429, codes.RATE_LIMITED, "answers 429"),
    ],
)
def test_what_a_url_answers_is_told_as_that_of_a_url(
    tmp_path: Path, status: int, code: str, said: str
) -> None:
    store = open_store(tmp_path)
    with file_server(site(tmp_path)) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        server.script = lambda asked: asked.answer(status)
        fault = refused(store, weights, code, said, no_progress_s=0.3)
    assert "HF_TOKEN" not in fault.sentence


def test_an_html_page_in_place_of_weights_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with file_server(site(tmp_path)) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        page = b"<!DOCTYPE html>".ljust(len(WEIGHTS))
        server.script = lambda asked: asked.answer(200, page)
        refused(store, weights, codes.NOT_AN_ADAPTER, "what came is an HTML page")


def test_a_whole_and_worthless_copy_of_another_mirror_is_not_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with (
        file_server(site(tmp_path)) as server,
        file_server(whole_or_rest(broken("json"), etag='"m"')) as other,
    ):
        _, (weights, _) = tasks_of(f"{server.url}/a")
        task = replace(weights, others=("b",))
        assert got(store, task, sources=places(task, b=other.url)).origin == "source"
    assert content(store, task) == WEIGHTS


# -- a repository


def test_an_adapter_of_the_registry_comes_like_a_model(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with Hub() as hub:
        hub.reader("hf")
        hub.repo("o/polite").commit(adapter("polite", padding=400_000))
        _, (weights, config) = tasks_of("o/polite", hub.url)
        for task in (weights, config):
            stored = got(store, task, sources=places(task, hub.url))
            assert (stored.origin, stored.compared) == ("registry", True)
        assert content(store, weights) == WEIGHTS


def test_weights_that_the_registry_itself_has_wrong_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with Hub() as hub:
        hub.reader("hf")
        files = {**adapter("polite"), ADAPTER_WEIGHTS: Held(b"PK\x03\x04" + bytes(1000))}
        hub.repo("o/polite").commit(files)
        _, (weights, _) = tasks_of("o/polite", hub.url)
        refused(
            store,
            weights,
            codes.NOT_AN_ADAPTER,
            "begins with 50 4b 03 04",
            sources=places(weights, hub.url),
        )


# -- whatever happens

SMALL = weights_of("polite", padding=60_000)
CHANGES: dict[str, bytes] = {
    "other": weights_of("ruder_", padding=60_000),
    "same": SMALL,
    "shorter": SMALL[:-1],
    "longer": SMALL + b"x",
    "page": b"<!DOCTYPE html>".ljust(len(SMALL)),
    "empty": b"",
}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(min_value=0, max_value=len(SMALL)), max_size=3),
    # What only its version tells apart is the case to look at most.
    change=st.just("other") | st.sampled_from(sorted(CHANGES)),
    change_at=st.integers(min_value=0, max_value=2),
    tagged=st.booleans(),
)
def test_what_is_kept_is_what_was_read_or_nothing_is(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[int],
    change: str,
    change_at: int,
    tagged: bool,
) -> None:
    """However often it breaks off, and whenever the server's file becomes another one."""
    folder = tmp_path_factory.mktemp("kept")
    made = site(folder, weights=SMALL)
    store = open_store(folder)
    asked_before = 0
    left = list(cuts)

    def script(asked: Asked) -> None:
        nonlocal asked_before
        if asked_before == change_at:
            made.weights = CHANGES[change]
            made.etag = '"v2"' if tagged else '"v1"'
        asked_before += 1
        made.cut_after = left.pop(0) if left else None
        made(asked)

    with file_server(made) as server:
        _, (weights, _) = tasks_of(f"{server.url}/a")
        server.script = script
        result = fetched(store, weights, places(weights), no_progress_s=0.3)
    if isinstance(result, FileFault):
        assert not store.has(weights.key)
        assert result.sentence
        return
    kept = content(store, weights)
    assert sha256(kept) == result.sha256
    if tagged:
        assert kept == SMALL, "another version under this key"
    assert len(kept) == len(SMALL)
