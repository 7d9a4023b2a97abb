"""Runs one short program of this node to its end and tells how it ended. No shell, no input, no way to linger:
whoever is cancelled in between, or bounded, leaves nothing of it running."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping
from typing import IO

from msgspec import Struct

OUTPUT_BYTES = 2000
"""So much of the end of its output is kept."""


class Ran(Struct, frozen=True, kw_only=True):
    """`status` is the exit code, -N for signal N; `output` the end of what it printed, both streams."""

    status: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line that says anything."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


async def run(argv: tuple[str, ...], environment: Mapping[str, str]) -> Ran:
    """Runs it. Raises OSError when it cannot be started. Cancelled, its process group is killed."""
    # A file, not a pipe: what it leaves in the background may hold its output open for ever.
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return Ran(status=status, output=_end_of(output))


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - OUTPUT_BYTES, 0))
    return file.read().decode(errors="replace")
