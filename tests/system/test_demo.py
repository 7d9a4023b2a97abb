"""`make demo` as a person sees it: a model served, the story in its order, exit code 0, nothing left running."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from controlplane.ctl.supervisor import python_argv
from tests.support.aio import run
from tests.support.ports import engine_environment
from tests.system.yard import SMOLLM2

STEPS = (
    "request",
    "activation",
    "starting",
    "ready",
    "request written to the engine",
    "first token",
    "idle",
    "draining",
    "stopped",
    "memory back",
)


def left_behind(folder: Path) -> list[bytes]:
    """Command lines of living processes that name the demo's data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(command)
    return found


# Its engine has a thread for each processor, and they wait for each other by spinning.
@pytest.mark.alone
@pytest.mark.timeout(120)
def test_req_a1_the_demo_tells_the_whole_story_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def story() -> str:
        process = await asyncio.create_subprocess_exec(
            *python_argv("controlplane.ctl.demo", "--"),
            *python_argv("tests.hub", "--file", str(SMOLLM2), "--rate", "40MiB"),
            env={**os.environ, **engine_environment()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode()

    printed = run(story(), 110)
    for step in ("registry", "check", "mirror", "catalog", "placement", "smoke test"):
        assert f"  {step:<10}  done " in printed, printed
    assert "  smollm2 answers (" in printed
    lines = [line.rsplit(" ms   ", 1)[-1] for line in printed.splitlines() if " ms   " in line]
    assert [line for line in lines if line in STEPS] == list(STEPS), printed
    assert left_behind(tmp_path) == []
    assert list(tmp_path.glob("modelyard-demo-*")) == []
