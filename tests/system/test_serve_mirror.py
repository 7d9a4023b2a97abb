"""yardctl mirror on a whole yard: what is needed stays, what is not goes, what is spoilt or lost comes back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from controlplane.ctl import supervisor
from schemas.file import File
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.system.hubs import (
    FILE,
    MIB,
    REPO,
    TINY,
    begin,
    hub_of,
    key_of,
    kill,
    over,
    sha256_of,
    tiny,
)
from tests.system.yard import SystemYard, chat, client, system_yard

PATH = f"{REPO}/{FILE}"


def blob(yard: SystemYard) -> Path:
    """The only file of the mirror."""
    (found,) = (yard.data / "mirror" / "blobs").iterdir()
    return found


async def listed(yard: SystemYard) -> list[dict[str, Any]]:
    return json.loads(await yard.ctl("mirror", "list", "-o", "json"))


@pytest.mark.timeout(120)
def test_what_a_model_needs_is_not_removed_and_the_rest_goes_with_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        files = {f"{n}-Q4_K_M.gguf": tiny(tmp_path / "models", i) for i, n in enumerate("ab")}
        commit = hub.repo(REPO).commit(files)
        async with system_yard(tmp_path / "yard") as yard:
            for n in "ab":
                options = ("--file", f"{n}-Q4_K_M.gguf", "--name", n, "--on-demand", *TINY)
                assert (await over(yard, await begin(yard, REPO, *options))).state == "done"
            _, why = await yard.told("mirror", "rm", f"{REPO}/a-Q4_K_M.gguf", expect=2)
            assert "nothing was removed" in why
            assert "is needed by model 'a'" in why
            await yard.ctl("mirror", "rm", REPO, expect=2)
            await yard.ctl("mirror", "rm", "0123456789", expect=2)
            assert "all of it is needed" in await yard.ctl("mirror", "gc")
            assert len(await listed(yard)) == 2
            await yard.ctl("model", "rm", "a", "--wait")
            mark = yard.position
            dry = await yard.ctl("mirror", "gc", "--dry-run")
            assert "a-Q4_K_M.gguf" in dry
            assert "b-Q4_K_M.gguf" not in dry
            assert [e for e in yard.events if e.seq > mark and e.noun == "file"] == []
            assert "a-Q4_K_M.gguf" in await yard.ctl("mirror", "gc")
            await yard.event(
                "file.absent", lambda e: e.key == (key_of(commit, "a-Q4_K_M.gguf"),), after=mark
            )
            blobs = yard.data / "mirror" / "blobs"
            await until(
                lambda: [p.name for p in blobs.iterdir()] == [files["b-Q4_K_M.gguf"].sha256],
                "the file to be gone from the disk",
            )
            # The model that stayed still starts, from what stayed.
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("b", max_tokens=2))
                assert answer.status_code == 200, answer.text
            await yard.ctl("mirror", "rm", f"{REPO}/b-Q4_K_M.gguf", expect=2)

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_flipped_byte_is_found_by_verify_and_the_file_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job that needs it does not wait for a backoff, and what it gets is right."""

    async def story(hub: Hub) -> None:
        content = tiny(tmp_path / "models", size=8 * MIB)
        hub.repo(REPO).commit({FILE: content})
        async with system_yard(tmp_path / "yard") as yard:
            asked = (REPO, "--file", FILE, "--on-demand", *TINY)
            assert (await over(yard, await begin(yard, *asked, "--name", "m"))).state == "done"
            assert "as it was" in await yard.ctl("mirror", "verify")
            assert "as it was" in await yard.ctl("mirror", "verify", REPO)
            spoilt = blob(yard)
            spoilt.chmod(0o600)
            with spoilt.open("r+b") as file:
                file.seek(5 * MIB)
                byte = file.read(1)[0]
                file.seek(5 * MIB)
                file.write(bytes([byte ^ 1]))
            said, why = await yard.told("mirror", "verify", expect=1)
            assert content.sha256[:12] in said, said
            assert "1 of 1 files are not what they were" in why
            before = yard.position
            job = await begin(yard, *asked, "--name", "again")
            assert (await over(yard, job)).state == "done"
            await yard.event("file.present", after=before)
            assert sha256_of(blob(yard)) == content.sha256
            assert "as it was" in await yard.ctl("mirror", "verify")
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("again", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_mirror_folder_that_was_deleted_is_filled_again_for_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.2,))

    async def story(hub: Hub) -> None:
        content = tiny(tmp_path / "models", size=8 * MIB)
        commit = hub.repo(REPO).commit({FILE: content})
        async with system_yard(tmp_path / "yard") as yard:
            asked = (REPO, "--file", FILE, "--name", "m", "--on-demand", *TINY)
            assert (await over(yard, await begin(yard, *asked))).state == "done"
            before, sent = yard.position, hub.counters.bytes_of(PATH)
            shutil.rmtree(yard.data / "mirror")
            await kill(yard, "controlplane")
            back = await yard.event("file.present", after=before, timeout_s=40)
            file = back.state
            assert isinstance(file, File)
            assert (file.key, back.event.origin) == (key_of(commit), "registry")
            assert sha256_of(blob(yard)) == content.sha256
            assert hub.counters.bytes_of(PATH) - sent == content.size
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("m", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_scn_c10_the_commit_of_the_start_is_used_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main moves between the first step and the download; the next job sees the new one, and both are kept."""

    async def story(hub: Hub) -> None:
        old, new = (tiny(tmp_path / "models", i, size=24 * MIB) for i in range(2))
        repo = hub.repo(REPO)
        first = repo.commit({FILE: old})
        async with system_yard(tmp_path / "yard") as yard:
            asked = (REPO, "--file", FILE, "--on-demand", *TINY)
            job = await begin(yard, *asked, "--name", "old")
            await yard.event("file.fetching")
            second = repo.commit({FILE: new})
            hub.pace.set(0)
            done = await over(yard, job)
            assert (done.state, done.commit) == ("done", first)
            later = await over(yard, await begin(yard, *asked, "--name", "new"))
            assert (later.state, later.commit) == ("done", second)
            blobs = {p.name for p in (yard.data / "mirror" / "blobs").iterdir()}
            assert blobs == {old.sha256, new.sha256}

    with hub_of(monkeypatch, bytes_per_s=12 * MIB) as hub:
        run(story(hub), 110)
