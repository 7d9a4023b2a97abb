"""Two control planes, each with a mirror of its own: one dies while it downloads, and one copies from the other."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from controlplane.ctl import supervisor
from controlplane.ctl.supervisor import ServiceSpec, python_argv
from schemas.file import File, FilePresent
from tests.hub.server import Hub
from tests.support.aio import run, until
from tests.support.ports import free_port
from tests.system.hubs import (
    FILE,
    MIB,
    REPO,
    TINY,
    begin,
    hub_of,
    latest,
    over,
    sent,
    step_of,
    tiny,
)
from tests.system.yard import SystemYard, system_yard

PATH = f"{REPO}/{FILE}"
HEADER = 8 * MIB


async def second_controlplane(yard: SystemYard, folder: Path) -> None:
    """`cp-2` on the same NATS, with a data folder of its own; ends with the yard."""
    shutil.copytree(yard.data / "secrets", folder / "secrets")
    running = yard.running
    port = free_port()
    argv = python_argv(
        "controlplane",
        *("--config", str(yard.data / "yard.yaml"), "--data", str(folder)),
        *("--nats", running.yard.nats_url, "--listen", f"127.0.0.1:{port}", "--id", "cp-2"),
    )
    await running.supervisor.start(
        ServiceSpec(
            name="controlplane-2",
            argv=argv,
            environment={"YARD_ID": running.yard.yard_id},
            log=yard.data / "logs" / "controlplane-2.log",
        )
    )
    log = yard.data / "logs" / "controlplane-2.log"
    await until(lambda: '"listening"' in log.read_text(), "cp-2 to listen", 30)


def leader(yard: SystemYard) -> str:
    return yard.of("leader.elected")[-1].state.instance


async def take_over(yard: SystemYard, down_s: float) -> None:
    """kill -9 of cp-1; cp-2 leads before its successor is there."""
    before = yard.position
    assert leader(yard) == "cp-1"
    yard.kill("controlplane")
    elected = await yard.event("leader.elected", after=before, timeout_s=down_s)
    assert elected.state.instance == "cp-2"


@pytest.mark.timeout(120)
def test_req_c3_another_control_plane_takes_over_in_the_middle_of_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (8.0,))

    async def story(hub: Hub) -> None:
        size = 64 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        # The node asks whichever mirror has it: nothing is linked.
        settings = {"nodeagent": {"mirror_folder": ""}}
        async with system_yard(tmp_path / "yard", settings=settings) as yard:
            await second_controlplane(yard, tmp_path / "second")
            job = await begin(yard, REPO, "--file", FILE, "--name", "m", *TINY)
            await step_of(yard, job, "mirror", "running")
            await sent(hub, PATH, 24 * MIB)
            await take_over(yard, 8.0)
            hub.pace.set(0)
            done = await over(yard, job)
            assert (done.state, done.attempt) == ("done", 1), done
            present = [e.event for e in await yard.in_log("file.present")]
            assert [(p.mirror, p.origin) for p in present if isinstance(p, FilePresent)] == [
                ("cp-2", "registry")
            ]
            # Whoever led before is not told to go on: one download at a time.
            file = (await yard.in_log("file.present"))[-1].state
            assert isinstance(file, File)
            assert [c.mirror for c in file.copies] == ["cp-2"]
            # Its own mirror had nothing of it; what the first one had is kept, and not fetched twice by it.
            assert hub.counters.bytes_of(PATH) <= 24 * MIB + size + 2 * HEADER
            assert [p.stat().st_size for p in (tmp_path / "second/mirror/blobs").iterdir()] == [
                size
            ]
            (partial,) = [
                p for p in (tmp_path / "yard/mirror/partial").iterdir() if p.suffix != ".json"
            ]
            assert 0 < partial.stat().st_size < size
            assert leader(yard) == "cp-2"

    with hub_of(monkeypatch, bytes_per_s=12 * MIB) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_new_leader_copies_from_the_mirror_that_lives_before_it_asks_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (3.0, 0.2))

    async def story(hub: Hub) -> None:
        size = 32 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            await second_controlplane(yard, tmp_path / "second")
            asked = (REPO, "--file", FILE, "--name", "m", "--on-demand", *TINY)
            first = await begin(yard, *asked)
            assert (await over(yard, first)).state == "done"
            # Nothing needs the file, so the new leader has no hurry to have it.
            await yard.ctl("model", "rm", "m", "--wait")
            await take_over(yard, 3.0)
            log = yard.data / "logs" / "controlplane.log"
            await until(lambda: log.read_text().count('"listening"') == 2, "cp-1 to be back", 30)
            before = hub.counters.bytes_of(PATH)
            second = await begin(yard, *asked)
            done = await over(yard, second)
            assert done.state == "done"
            present = [e.event for e in await yard.in_log("file.present")]
            assert [(p.mirror, p.origin) for p in present if isinstance(p, FilePresent)] == [
                ("cp-1", "registry"),
                ("cp-2", "mirror"),
            ]
            assert hub.counters.bytes_of(PATH) - before <= HEADER, "a header and no more"

    with hub_of(monkeypatch) as hub:
        run(story(hub), 110)


@pytest.mark.timeout(120)
def test_a_leader_stands_still_and_comes_back_deposed_in_the_middle_of_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP instead of a kill: when it wakes, what it fetched meanwhile is no concern of the job any more."""

    async def story(hub: Hub) -> None:
        size = 48 * MIB
        hub.repo(REPO).commit({FILE: tiny(tmp_path / "models", size=size)})
        async with system_yard(tmp_path / "yard") as yard:
            await second_controlplane(yard, tmp_path / "second")
            job = await begin(yard, REPO, "--file", FILE, "--name", "m", "--on-demand", *TINY)
            await sent(hub, PATH, 16 * MIB)
            before = yard.position
            stopped = yard.kill("controlplane", signal.SIGSTOP)
            try:
                elected = await yard.event("leader.elected", after=before, timeout_s=20)
                assert elected.state.instance == "cp-2"
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert (await over(yard, job)).state == "done"
            assert leader(yard) == "cp-2"
            now = latest(yard, job)
            assert now is not None
            assert now.attempt == 1
            assert len(await yard.in_log("job.done")) == 1

    with hub_of(monkeypatch, bytes_per_s=8 * MIB) as hub:
        run(story(hub), 110)
