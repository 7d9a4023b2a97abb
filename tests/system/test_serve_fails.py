"""Serve jobs that cannot succeed: each ends soon, with its own sentence and exit code, and says how to go on."""

import re
from pathlib import Path

import pytest

from schemas import codes
from schemas.job import Job
from schemas.model import Model
from tests.hub import ggufs
from tests.hub.contents import Held, OnDisk
from tests.hub.faults import Fault
from tests.hub.server import Hub
from tests.support.aio import run
from tests.system.hubs import FILE, MIB, REPO, TINY, begin, hub_of, over, step_of, tiny
from tests.system.yard import SystemYard, chat, client, system_yard

PATH = f"{REPO}/{FILE}"
IMPATIENT = {"controlplane": {"backoff_s": 0.2, "quarantine_after": 2}}


async def fails(yard: SystemYard, *arguments: str) -> str:
    """`yardctl model serve …`, which ends with 1; everything it printed."""
    out, why = await yard.told("model", "serve", *arguments, *TINY, expect=1)
    return out + why


def failed(yard: SystemYard) -> Job:
    job = yard.of("job.failed")[-1].state
    assert isinstance(job, Job)
    return job


@pytest.mark.timeout(120)
def test_scn_c8_a_repository_that_cannot_be_read_is_refused_with_its_own_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated, missing, without GGUF files, rate-limited: as a job, as a plan, and as a look at the registry."""

    async def story(hub: Hub) -> None:
        content = tiny(tmp_path / "models")
        hub.repo("yard/gated", gated="manual").commit({FILE: content})
        hub.repo("yard/private", private=True).commit({FILE: content})
        hub.repo("yard/bare").commit({"model.safetensors": Held(b"x" * 100)})
        hub.repo("yard/busy").commit({FILE: content})
        limited = {"Retry-After": "2"}
        cases = {
            "yard/gated": (codes.NEEDS_TOKEN, "yard/gated is gated: it needs a token"),
            "yard/none": (codes.REPO_NOT_FOUND, "has no repository yard/none, or it is private"),
            "yard/private": (codes.REPO_NOT_FOUND, "or it is private: without a token"),
            "yard/bare": (codes.NO_GGUF, "yard/bare has no GGUF files"),
        }
        async with system_yard(tmp_path / "yard") as yard:
            for repo, (code, sentence) in cases.items():
                told = await fails(yard, repo, "--quant", "Q4_1")
                assert sentence in told, told
                # What is not in a repository is not there the next time either.
                again = "once that is mended: yardctl job retry j-" in told
                assert again == (code != codes.NO_GGUF)
                assert failed(yard).code == code
                assert [step.name for step in failed(yard).steps] == ["registry"]
                _, why = await yard.told("model", "serve", repo, "--plan", *TINY, expect=1)
                assert sentence in why, why
                assert "job retry" not in why
            for repo in ("yard/gated", "yard/none"):
                _, why = await yard.told("registry", "show", repo, expect=1)
                assert cases[repo][1] in why
            hub.fault(Fault(at="api", path="yard/busy", status=429, headers=limited))
            _, why = await yard.told("registry", "show", "yard/busy", expect=1)
            assert "limits how often we may ask; it asks to wait 2 s" in why
            hub.faults.clear()
            assert "Q4_1" in await yard.ctl("registry", "show", "yard/busy", "--quant", "Q4_1")
            # What is wrong with the request itself is no job.
            jobs = len(await yard.in_log("job.started"))
            _, why = await yard.told("model", "serve", "nonsense", expect=2)
            assert '"nonsense" is not a repository; it looks like owner/name' in why
            await yard.told("model", "serve", REPO, "--on-demand", "--replicas", "2", expect=64)
            await yard.told("job", "watch", "j-none", expect=1)
            await yard.told("job", "retry", "j-none", expect=2)
            assert len(yard.of("job.started")) == jobs
            assert yard.of("model.added") == []
            assert yard.of("file.fetching") == []

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c63_a_model_whose_engine_fails_leaves_its_entry_off_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header passes and the checksum is right, but the tensors end early: only the engine finds out."""

    async def story(hub: Hub) -> None:
        whole = tiny(tmp_path / "models")
        cut = Held(whole.read(0, whole.size - 4096))
        repo = hub.repo(REPO)
        repo.commit({FILE: cut})
        async with system_yard(tmp_path / "yard", settings=IMPATIENT) as yard:
            told = await fails(yard, REPO, "--file", FILE, "--name", "cut")
            job = failed(yard)
            assert (job.code, job.steps[-1].name) == (codes.QUARANTINED, "placement")
            assert "it failed to start " in job.error
            assert "is quarantined: " in job.error
            assert job.error in told
            # The engine's own last line, which names what is wrong with the file.
            assert re.search(r"not within (the )?file bounds|corrupted|incomplete", job.error), (
                job.error
            )
            entry = (await yard.in_log("model.changed"))[-1].state
            assert isinstance(entry, Model)
            assert (entry.scaling.min, entry.scaling.max) == (0, 0)
            assert job.error[:40] in entry.off_reason
            assert entry.off_reason.startswith(f"serve job {job.id} failed: ")
            assert entry.off_reason[:60] in await yard.ctl("model", "show", "cut")
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("cut"))
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "model_off"
            # A retry tries again from the placement on, with nothing fetched, and says the same.
            before = hub.counters.bytes_of(PATH)
            again = await yard.told("job", "retry", job.id, expect=1)
            assert f"job {job.id} goes on at placement" in "".join(again)
            assert failed(yard).attempt == 2
            assert hub.counters.bytes_of(PATH) == before
            # Repaired at the registry: what it holds by then is another commit, and another model.
            repo.commit({FILE: whole})
            await yard.ctl("model", "rm", "cut", "--wait")
            good = await over(yard, await begin(yard, REPO, "--file", FILE, "--name", "cut", *TINY))
            assert good.state == "done", good

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_an_engine_that_aborts_is_a_failed_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks a debugger, where there is one, for its stack; nobody waits for that."""

    async def story(hub: Hub) -> None:
        # llama.cpp finds out while it computes that it has no such addition, and aborts.
        path = ggufs.write(tmp_path / "bert.gguf", "bert")
        hub.repo(REPO).commit({FILE: OnDisk(path)})
        async with system_yard(tmp_path / "yard", settings=IMPATIENT) as yard:
            await fails(yard, REPO, "--file", FILE, "--name", "m")
            assert failed(yard).code == codes.QUARANTINED
            assert "unsupported types" in failed(yard).error

    with hub_of(monkeypatch) as hub:
        run(story(hub), 60)


@pytest.mark.timeout(120)
def test_req_c35_a_download_that_fails_fails_the_job_at_once_and_a_retry_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes, then a page of HTML instead of the file, then a registry that is right again."""

    async def story(hub: Hub) -> None:
        content = tiny(tmp_path / "models", size=16 * MIB)
        hub.repo(REPO).commit({FILE: content})
        async with system_yard(tmp_path / "yard") as yard:
            hub.fault(Fault(at="cdn", path=FILE, wrong_at=9 * MIB))
            told = await fails(yard, REPO, "--file", FILE, "--name", "m", "--on-demand")
            job = failed(yard)
            assert (job.code, job.steps[-1].name) == (codes.CHECKSUM_MISMATCH, "mirror")
            assert "the mirror could not fetch it: " in told
            assert content.sha256[:12] in told
            assert list((tmp_path / "yard/mirror/blobs").iterdir()) == []
            hub.faults.clear()
            hub.fault(Fault(at="cdn", path=FILE, html=True))
            again = await yard.told("job", "retry", job.id, expect=1)
            assert failed(yard).code == codes.NOT_GGUF, again
            assert list((tmp_path / "yard/mirror/blobs").iterdir()) == []
            hub.faults.clear()
            whole = await yard.ctl("job", "retry", job.id)
            assert "mirror      done     16 MiB, checksums match the registry" in whole
            assert (await over(yard, job.id, after=yard.of("job.started")[-1].seq)).attempt == 3

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_scn_c7_what_cannot_fit_fails_before_a_byte_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room on no card, and no room on the mirror's disk: both with numbers, in seconds."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=64 * MIB)})
        narrow = {"nodeagent": {"cpu_memory_bytes": 64 * MIB}}
        async with system_yard(tmp_path / "narrow", settings=narrow) as yard:
            told = await fails(yard, REPO, "--file", FILE)
            assert failed(yard).code == codes.NO_CAPACITY
            assert re.search(r"no node can host it: .*needs 1\.0 GiB, .*64 MiB", told), told
        full = {"controlplane": {"mirror_keep_free_bytes": 2**60}}
        async with system_yard(tmp_path / "full", settings=full) as yard:
            told = await fails(yard, REPO, "--file", FILE)
            assert failed(yard).code == codes.DISK_FULL
            assert re.search(r"the mirror's disk has \S+ \S+ free, and 64 MiB of 64 MiB", told), (
                told
            )
        assert hub.counters.bytes_of(PATH) < 64 * MIB

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c32_a_download_without_progress_fails_and_says_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        size = 16 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        settings = {"controlplane": {"mirror_no_progress_s": 2.0}}
        async with system_yard(tmp_path / "yard", settings=settings) as yard:
            job = await begin(yard, REPO, "--file", FILE, "--name", "m", "--on-demand", *TINY)
            await step_of(yard, job, "mirror", "running")
            hub.fault(Fault(at="cdn", path=FILE, stall_at=10 * MIB))
            hub.pace.set(0)
            before = hub.counters.bytes_of(PATH)
            ended = await over(yard, job)
            assert (ended.state, ended.code) == ("failed", codes.NO_PROGRESS), ended
            assert "at 10.0 MiB of 16.0 MiB" in ended.error
            hub.faults.clear()
            await yard.ctl("job", "retry", job)
            assert hub.counters.bytes_of(PATH) - before <= size + MIB, "nothing is fetched twice"

    with hub_of(monkeypatch, bytes_per_s=MIB / 4) as hub:
        run(story(hub), 110)
