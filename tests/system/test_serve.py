"""`yardctl model serve` on a whole yard: what a person sees, joins, cancels, retries, and finds again later."""

import asyncio
from pathlib import Path

import pytest

from controlplane.ctl import supervisor
from schemas.job import Job
from tests.hub.contents import Held, OnDisk
from tests.hub.faults import Fault
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.system.hubs import (
    FILE,
    MIB,
    REPO,
    SMALL,
    TINY,
    begin,
    hub_of,
    key_of,
    latest,
    over,
    sent,
    step_of,
    tiny,
)
from tests.system.yard import SMOLLM2, SystemYard, chat, client, system_yard

PATH = f"{REPO}/{FILE}"
STEPS = ("registry", "check", "mirror", "check", "catalog", "placement", "smoke test")
HEADER = 9 * MIB
"""Bytes that reading a header ahead of the download may cost."""


def of_nouns(yard: SystemYard, *nouns: str) -> list[int]:
    return [event.seq for event in yard.events if event.noun in nouns]


@pytest.mark.timeout(120)
def test_req_c2_one_command_brings_a_model_from_the_registry_to_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is printed as it changes, and the end is the model's own reply."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: OnDisk(SMOLLM2), "README.md": Held(b"# hello\n")})
        async with system_yard(tmp_path) as yard:
            told = await yard.ctl(
                "model", "serve", REPO, "--quant", "q4_1", "--name", "smol", "--alias", "s", *SMALL
            )
            lines = [line.split(maxsplit=2) for line in told.splitlines()]
            done = [line[0] for line in lines if len(line) > 1 and line[1] == "done"]
            assert done == ["registry", "check", "mirror", "check", "catalog", "placement"], told
            assert "smoke test  running  asking r-" in told
            assert "smoke test  done" in told
            assert "smol answers (" in told.splitlines()[-1]
            (job,) = [e.state for e in await yard.in_log("job.done")]
            assert isinstance(job, Job)
            assert tuple(step.name for step in job.steps) == STEPS
            assert told.rstrip().endswith(job.reply)
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("s", max_tokens=4))
                assert answer.status_code == 200, answer.text
            # One machine, one copy: what the node runs is what the mirror holds.
            mirrored = next((tmp_path / "mirror" / "blobs").iterdir())
            (named,) = (tmp_path / "files" / "sets").glob("*/*.gguf")
            assert mirrored.samefile(named)

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c34_two_quants_of_one_commit_never_complete_on_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUG C-1: the second job waits for its own file although the first one's is there at that commit."""
    files = {
        f"tiny-{quant}.gguf": tiny(tmp_path / "models", seed)
        for seed, quant in enumerate(("Q8_0", "Q4_K_M"))
    }

    async def story(hub: Hub) -> None:
        commit = hub.repo(REPO).commit(files)
        hub.fault(Fault(at="cdn", path="tiny-Q4_K_M.gguf", skip=1, stall_at=4096))
        async with system_yard(tmp_path / "yard") as yard:
            first = await begin(yard, REPO, "--quant", "Q8_0", "--name", "a", "--on-demand", *TINY)
            assert (await over(yard, first)).state == "done"
            second = await begin(yard, REPO, "--name", "b", "--on-demand", *TINY)
            await step_of(yard, second, "mirror", "running")
            await until(
                lambda: any(
                    r.at == "cdn" and r.path.endswith("Q4_K_M.gguf")
                    for r in hub.counters.counts().requests
                ),
                "the second file to be asked for",
            )
            # While its own file stalls, whatever else is decided does not complete it.
            third = await begin(yard, REPO, "--quant", "Q8_0", "--name", "c", "--on-demand", *TINY)
            assert (await over(yard, third)).state == "done"
            now = latest(yard, second)
            assert now is not None
            assert (now.state, now.steps[-1].name) == ("running", "mirror")
            hub.faults.clear()
            assert (await over(yard, second)).state == "done"
            sources = {e.key[0]: e.state.source for e in await yard.in_log("model.added")}
            assert sources == {
                name: f"mirror:{key_of(commit, f'tiny-{quant}.gguf')}"
                for name, quant in (("a", "Q8_0"), ("b", "Q4_K_M"), ("c", "Q8_0"))
            }

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_scn_c9_jobs_that_want_one_file_share_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request joins; another name is another job, and waits for the same download."""

    async def story(hub: Hub) -> None:
        size = 64 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            asked = (REPO, "--file", FILE, "--on-demand", *TINY)
            first = await begin(yard, *asked, "--name", "one")
            await sent(hub, PATH, 8 * MIB)
            told = await yard.ctl("model", "serve", *asked, "--name", "one", "--detach")
            assert f"joined: job {first}" in told
            assert f"job watch {first}" in told
            other = await begin(yard, *asked, "--name", "two")
            assert other != first
            assert (await over(yard, first)).state == "done"
            assert (await over(yard, other)).state == "done"
            assert hub.counters.bytes_of(PATH) <= size + 8 * MIB
            assert len(await yard.in_log("file.present")) == 1
            assert {e.key[0] for e in await yard.in_log("job.started")} == {first, other}

    with hub_of(monkeypatch, bytes_per_s=12 * MIB) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_cancelled_job_leaves_the_download_to_another_that_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        size = 32 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            asked = (REPO, "--file", FILE, "--on-demand", *TINY)
            first, other = [await begin(yard, *asked, "--name", name) for name in ("a", "b")]
            for job in (first, other):
                await step_of(yard, job, "mirror", "running")
            await sent(hub, PATH, 8 * MIB)
            await yard.ctl("job", "cancel", first)
            hub.pace.set(0)
            assert (await over(yard, other)).state == "done"
            assert (await over(yard, first)).state == "cancelled"
            streams = [r for r in hub.counters.counts().requests if r.at == "cdn" and r.sent > MIB]
            assert [r.sent for r in streams] == [size], "one request, never broken off"
            assert {e.key[0] for e in await yard.in_log("model.added")} == {"b"}

    with hub_of(monkeypatch, bytes_per_s=4 * MIB) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_cancelled_job_stops_the_download_and_a_retry_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        size = 48 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            job = await begin(yard, REPO, "--file", FILE, "--on-demand", *TINY)
            await step_of(yard, job, "mirror", "running")
            before = hub.counters.bytes_of(PATH)
            await sent(hub, PATH, before + 24 * MIB)
            hub.pace.set(MIB)
            told = await yard.ctl("job", "cancel", job)
            cancelled = await yard.event("job.cancelled")

            def ended() -> bool:
                """The request for the bytes is over."""
                done = [r for r in hub.counters.counts().requests if r.at == "cdn"]
                return bool(done) and done[-1].sent >= 20 * MIB

            await until(ended, "the hub's stream to end", 1.0)
            assert hub.counters.bytes_of(PATH) < size
            hub.pace.set(0)
            assert f"job {job} cancelled; left: what came so far of 1 file" in told
            assert "no catalog entry" in told
            assert "cancelled" in await yard.ctl("job", "list")
            again = await yard.ctl("job", "retry", job)
            assert "mirror      done" in again
            assert (await over(yard, job, after=cancelled.seq)).attempt == 2
            assert hub.counters.bytes_of(PATH) <= before + size + 8 * MIB
            await yard.ctl("job", "cancel", job, expect=2)

    with hub_of(monkeypatch, bytes_per_s=25 * MIB) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(180)
def test_req_c5_a_job_outlives_every_process_and_is_watched_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two terminals watch; everything is stopped in the middle and started again; the job goes on and is told whole."""

    async def story(hub: Hub) -> None:
        size = 80 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            job = await begin(yard, REPO, "--file", FILE, "--name", "long", "--on-demand", *TINY)
            await sent(hub, PATH, 24 * MIB)
            hub.pace.set(2 * MIB)
        assert hub.counters.bytes_of(PATH) < size
        hub.pace.set(10 * MIB)
        async with system_yard(tmp_path / "yard") as yard:
            watching = [asyncio.create_task(yard.ctl("job", "watch", job)) for _ in range(2)]
            told = await asyncio.gather(*watching)
            for one in told:
                assert "registry    done" in one
                assert "mirror      done     80 MiB, checksums match the registry" in one
                assert "long is served: it loads when first asked for" in one
            assert hub.counters.bytes_of(PATH) <= size + 2 * 8 * MIB
        async with system_yard(tmp_path / "yard") as yard:
            # Over, and still told whole by a yard that was started since.
            late = await yard.ctl("job", "watch", job)
            steps = [line[: line.index("  ")].strip() for line in late.splitlines()[:-1]]
            assert steps == list(STEPS), late
            assert late.splitlines()[-1] == told[0].splitlines()[-1]
            assert "mirror      done     80 MiB" in await yard.ctl("job", "show", job)

    with hub_of(monkeypatch, bytes_per_s=25 * MIB) as hub:
        run(story(hub), 170)


@pytest.mark.timeout(150)
def test_inv_6_all_processes_die_at_once_in_the_middle_of_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of all of them, as when a machine goes down; what was fetched is not fetched again."""
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.5,))

    async def story(hub: Hub) -> None:
        size = 48 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            job = await begin(yard, REPO, "--file", FILE, "--name", "m", *TINY)
            await step_of(yard, job, "mirror", "running")
            header = hub.counters.bytes_of(PATH)
            await sent(hub, PATH, header + 24 * MIB)
            pids = dict(yard.running.supervisor.pids)
            assert set(pids) == {"nats", "controlplane", "gateway", "nodeagent"}
            for part in pids:
                yard.kill(part)
            done = await over(yard, job)
            assert (done.state, done.attempt) == ("done", 1), done
            assert hub.counters.bytes_of(PATH) <= header + size + 8 * MIB
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("m", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch, bytes_per_s=16 * MIB) as hub:
        run(story(hub), 140)


@pytest.mark.timeout(120)
def test_a_job_is_begun_once_when_nobody_is_there_to_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NATS nothing is sent; without a control plane the wish is kept, and its end not known yet."""
    # Longer than yardctl looks for a server that is gone.
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (8.0,))

    async def story(hub: Hub) -> None:
        repo = "yard/old-name"
        hub.repo(repo).commit({FILE: tiny(tmp_path / "models")})
        hub.shelf.rename(repo, REPO)
        async with system_yard(tmp_path / "yard") as yard:
            asked = ("model", "serve", repo, "--file", FILE, "--on-demand", *TINY)
            yard.kill("controlplane")
            _, why = await yard.told(*asked, "--timeout", "1s", expect=3)
            assert "yardctl command wait" in why, why
            job = await yard.event("job.started", timeout_s=40)
            done = await over(yard, job.key[0])
            assert done.state == "done", done
            # Renamed since: what it is called now is what counts, for the entry's name too.
            assert (done.request.repo, done.repo) == (repo, REPO)
            assert done.model == "smollm2-135m-instruct"
            yard.kill("nats")
            await yard.told(*asked, "--name", "other", expect=69)
            await until(lambda: "nats" in yard.running.supervisor.pids, "nats to be back", 20)
            await yard.ctl("job", "list")
            assert len(await yard.in_log("job.started")) == 1

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(90)
def test_a_plan_changes_nothing_and_tells_what_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: OnDisk(SMOLLM2)})
        async with system_yard(tmp_path) as yard:
            mark = yard.position
            told = await yard.ctl("model", "serve", REPO, "--quant", "Q4_1", "--plan", *SMALL)
            for said in (
                "SmolLM2-135M-Instruct.Q4_1",
                "93.",
                "llama",
                "weights",
                "KV cache",
                "local/cpu",
            ):
                assert said in told, told
            _, why = await yard.told("model", "serve", REPO, "--quant", "Q9_X", "--plan", expect=1)
            assert "it has: SmolLM2-135M-Instruct.Q4_1" in why
            _, long = await yard.told(
                "model",
                "serve",
                REPO,
                "--quant",
                "Q4_1",
                "--plan",
                "--ctx-pool",
                "99999",
                "--context-length",
                "99999",
                expect=1,
            )
            assert "the model was trained for 8192" in long or "was trained for" in long
            # A marker behind it all: whatever a plan might have written comes before this.
            await yard.ctl("node", "cordon", "local")
            await yard.event("nodestate.cordoned")
            wrote = [
                e
                for e in yard.events
                if e.seq > mark
                and e.noun in ("job", "file", "model", "record", "activation", "plan")
            ]
            assert wrote == []
            assert hub.counters.bytes_of(PATH) < 3 * HEADER
            assert not any((tmp_path / "mirror" / "partial").iterdir())

    with hub_of(monkeypatch) as hub:
        run(story(hub), 80)
