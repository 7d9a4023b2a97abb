"""The end of a serve job, placement and smoke test, while things happen to the engine and to the room it needs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from controlplane.ctl.supervisor import python_argv
from schemas import codes
from schemas.model import Model
from schemas.replica import Replica
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.system.hubs import FILE, MIB, REPO, TINY, begin, hub_of, latest, over, step_of, tiny
from tests.system.yard import SystemYard, chat, client, scripted_model, system_yard

ASKED = (REPO, "--file", FILE, "--name", "m", *TINY)
ROOM_FOR_ONE = {"nodeagent": {"cpu_memory_bytes": 1100 * MIB}}


def holder(name: str = "holder") -> dict[str, object]:
    """A model that keeps one replica and nearly all of the node's memory."""
    entry = scripted_model(name, profile={"memory": "512MiB"})
    return entry | {"scaling": {"min": 1, "max": 1}}


async def engine(yard: SystemYard, *, after: int = 0) -> Replica:
    """The job's replica, as soon as it is ready."""
    event = await yard.event(
        "replica.ready", lambda e: e.state.model == "m", after=after, timeout_s=40
    )
    assert isinstance(event.state, Replica)
    assert event.state.pid is not None
    return event.state


@pytest.mark.timeout(120)
def test_req_c51_a_job_waits_for_room_and_goes_on_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is said, and ends by the event that makes room; a job cancelled in it says what it leaves."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models")})
        async with system_yard(tmp_path / "yard", settings=ROOM_FOR_ONE) as yard:
            await yard.add(holder())
            await yard.event("replica.ready", lambda e: e.state.model == "holder")
            job = await begin(yard, *ASKED)
            waiting = await yard.when(
                lambda e: e.key == (job,) and "waiting for room" in e.reason,
                "the wait",
                timeout_s=40,
            )
            assert "needs 1.0 GiB" in waiting.reason
            told = await yard.ctl("job", "cancel", job)
            assert "1 of 1 file (1.4 MiB) on the mirror" in told
            assert "the catalog entry 'm' with 1 replica kept running" in told
            before = yard.position
            await yard.ctl("job", "retry", job, "--detach")
            await step_of(yard, job, "placement", "running", after=before)
            await yard.ctl("model", "scale", "holder", "--min", "0", "--max", "1")
            await yard.ctl("model", "unload", "holder")
            done = await over(yard, job, after=before)
            assert (done.state, done.attempt) == ("done", 2), done
            assert done.replica == (await engine(yard)).id

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_an_engine_that_dies_while_it_is_asked_to_say_hello_is_replaced_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models")})
        settings = {"controlplane": {"backoff_s": 0.5}}
        async with system_yard(tmp_path / "yard", settings=settings) as yard:
            await yard.add(holder())
            job = await begin(yard, *ASKED)
            first = await engine(yard)
            assert first.pid is not None
            # Stood still, it can have answered nobody before it dies.
            os.kill(first.pid, signal.SIGSTOP)
            now = latest(yard, job)
            assert now is not None
            if now.state == "done":
                pytest.fail("the engine answered before it could be stopped; nothing was shown")
            await step_of(yard, job, "smoke test", "running")
            os.kill(first.pid, signal.SIGKILL)
            done = await over(yard, job)
            assert done.state == "done", done
            assert done.replica not in (None, first.id)
            assert done.reply

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c63_a_smoke_test_without_an_answer_leaves_the_entry_off_and_a_retry_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models")})
        settings = {
            "controlplane": {"smoke_timeout_s": 4.0, "drain_timeout_s": 2.0},
            "nodeagent": {"stop_grace_s": 1.0},
        }
        async with system_yard(tmp_path / "yard", settings=settings) as yard:
            job = await begin(yard, *ASKED)
            stopped = (await engine(yard)).pid
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            failed = await over(yard, job)
            assert (failed.state, failed.code) == ("failed", codes.SMOKE_FAILED), failed
            assert failed.error == "the replica did not answer within 4 s"
            off = (await yard.in_log("model.changed"))[-1].state
            assert isinstance(off, Model)
            assert (off.scaling.max, off.off_reason) == (
                0,
                f"serve job {job} failed: the replica did not answer within 4 s",
            )
            # Off: its replica goes too, deaf to the polite signal as it is.
            await yard.event("replica.stopped", timeout_s=40)
            await until(lambda: not Path(f"/proc/{stopped}").exists(), "the engine to be gone")
            mark = yard.position
            told = await yard.ctl("job", "retry", job)
            assert "placement   done" in told
            assert "m answers (" in told
            done = await over(yard, job, after=mark)
            assert (done.state, done.attempt) == ("done", 2)
            on = (await yard.in_log("model.changed"))[-1].state
            assert isinstance(on, Model)
            assert (on.scaling.min, on.scaling.max, on.off_reason) == (1, 1, "")
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("m", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c3_leaving_the_terminal_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `model serve` says how to watch on, and the job ends as if nobody had watched."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=16 * MIB)})
        async with system_yard(tmp_path / "yard") as yard:
            process = await asyncio.create_subprocess_exec(
                *python_argv("controlplane.ctl", "model", "serve", *ASKED, "--on-demand"),
                env={**os.environ, "YARD_DATA": str(yard.data)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            await yard.event("file.fetching", timeout_s=40)
            assert process.stdout is not None
            while b"mirror" not in await process.stdout.readline():
                continue
            process.send_signal(signal.SIGINT)
            _, why = await process.communicate()
            assert process.returncode == 130
            (job,) = {e.key[0] for e in await yard.in_log("job.started")}
            assert f"the job goes on: yardctl job watch {job}" in why.decode()
            hub.pace.set(0)
            assert (await over(yard, job)).state == "done"

    with hub_of(monkeypatch, bytes_per_s=2 * MIB) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_req_c48_on_demand_nothing_runs_until_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models")})
        async with system_yard(tmp_path / "yard") as yard:
            told = await yard.ctl("model", "serve", *ASKED, "--on-demand")
            assert "catalog     done     added on demand: it loads when first asked for" in told
            assert "placement   skipped" in told
            assert "smoke test  skipped" in told
            assert told.splitlines()[-1] == "m is served: it loads when first asked for"
            added = (await yard.in_log("model.added"))[-1].state
            assert isinstance(added, Model)
            assert (added.scaling.min, added.scaling.max) == (0, 1)
            assert [e for e in yard.events if e.noun in ("replica", "activation", "plan")] == []
            async with client(yard.gateway()) as http:
                answer = await http.post("/v1/chat/completions", json=chat("m", max_tokens=2))
                assert answer.status_code == 200, answer.text

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_an_entry_that_is_taken_away_under_a_job_ends_it_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed while the job waits for room; a retry adds it again, with nothing fetched."""

    async def story(hub: Hub) -> None:
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models")})
        async with system_yard(tmp_path / "yard", settings=ROOM_FOR_ONE) as yard:
            await yard.add(holder())
            await yard.event("replica.ready", lambda e: e.state.model == "holder")
            job = await begin(yard, *ASKED)
            await step_of(yard, job, "placement", "running")
            await yard.ctl("model", "rm", "m")
            ended = await over(yard, job)
            assert (ended.state, ended.code) == ("failed", codes.CONFLICT)
            assert ended.error == "its catalog entry 'm' was removed while the job ran"
            before = hub.counters.bytes_of(f"{REPO}/{FILE}")
            told = await yard.ctl("job", "retry", job, "--detach")
            assert "its entry 'm' was removed meanwhile and is added again" in told
            await yard.ctl("model", "rm", "holder")
            done = await over(yard, job, after=yard.of("job.failed")[-1].seq)
            assert (done.state, done.attempt) == ("done", 2), done
            assert hub.counters.bytes_of(f"{REPO}/{FILE}") == before

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)
