"""Which launch a port belongs to: told by the mark of who listens, and by nothing else."""

import asyncio
import os
import sys
from pathlib import Path

from nodeagent.listeners import is_anothers
from nodeagent.processes import LAUNCH_DIR, LAUNCH_ID, Mark
from tests.support.aio import run

LISTEN = (
    "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
    "print(s.getsockname()[1], flush=True); input()"
)


async def listening(mark: Mark | None) -> tuple[asyncio.subprocess.Process, int]:
    environment = {k: v for k, v in os.environ.items() if k not in (LAUNCH_ID, LAUNCH_DIR)}
    if mark is not None:
        environment |= {LAUNCH_ID: mark.launch, LAUNCH_DIR: mark.folder}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        LISTEN,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, int(await process.stdout.readline())


async def seen_by(mark: Mark, listener: Mark | None) -> bool:
    """Whether a launch of `mark` holds the port of a process of `listener` for another's."""
    process, port = await listening(listener)
    try:
        return await asyncio.to_thread(is_anothers, port, mark)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def test_scn_a11_who_listens_on_a_port_is_told_by_its_mark(tmp_path: Path) -> None:
    mine = Mark(f"r-{os.getpid()}", str(tmp_path / "mine"))
    same_id = Mark(mine.launch, str(tmp_path / "another yard"))

    async def story() -> None:
        assert not await seen_by(mine, mine)
        assert await seen_by(mine, same_id), "ids of two yards may be equal, folders are not"
        assert await seen_by(mine, Mark("r-other", mine.folder))
        assert not await seen_by(mine, None), "a listener of no launch may be the engine's proxy"

    run(story())


def test_a_port_nobody_listens_on_is_nobodys() -> None:
    assert not is_anothers(1, Mark("r-1", "/nowhere"))
