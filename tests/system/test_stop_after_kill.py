"""A yard is stopped when its agent was just killed: its engines end all the same, for nobody comes after it."""

from pathlib import Path

import pytest

from controlplane.ctl import supervisor
from tests.support.aio import run, until
from tests.system.test_kills import engines_of, load_model
from tests.system.yard import scripted_model, system_yard


@pytest.mark.timeout(120)
@pytest.mark.parametrize("starts", [False, True], ids=["between two starts", "while it starts"])
def test_inv_7_no_engine_outlives_a_yard_whose_agent_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.0,) if starts else (60.0,))

    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(scripted_model("steady", "--load-s", "0.1"))
            await load_model(yard, "steady")
            assert len(engines_of(yard.data)) == 1
            pids = yard.running.supervisor
            old = yard.kill("nodeagent")
            gone = (
                (lambda: pids.pids.get("nodeagent", old) != old)
                if starts
                else (lambda: "nodeagent" not in pids.pids)
            )
            await until(gone, "its end, and the next one where there is to be one")
        assert yard.said[-1].startswith("nodeagent ended (signal SIGKILL)"), yard.said
        await until(lambda: engines_of(tmp_path) == set(), "launchers to end with their engines")

    run(story(), 110)
