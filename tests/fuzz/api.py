"""schemathesis against the control plane's API: everything its OpenAPI description says, asked right and wrong.

    make fuzz-api        (python -m tests.fuzz.api .cache/fuzz/bin/st [options of `st run`])

The control plane runs in this process on a log in memory. Following the events is left out, whose
answer has no end, and what is open to everybody. Any 500 fails, an answer that needed no token, a type of content that
is not described. It exits with schemathesis' status.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from events.memory import MemoryLog, MemoryWire
from events.memory_broker import MemoryBroker
from tests.support.aio import until
from tests.support.controlplanes import TOKEN, leads, plane, running

LEFT_OUT: Final = r"/events|/healthz|/readyz|/metrics"
CHECKS: Final = "not_a_server_error,content_type_conformance,ignored_auth"
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")


async def main(argv: list[str]) -> int:
    program, *options = argv
    with tempfile.TemporaryDirectory() as folder:
        log = MemoryLog(MemoryBroker())
        control = plane(log, MemoryWire(log.connection), Path(folder))
        async with running(control):
            await until(leads(control), "a leader")
            await until(lambda: control.model.synced, "a synced projection")
            process = await asyncio.create_subprocess_exec(
                *(program, "--config-file", str(CONFIG)),
                *("run", f"http://127.0.0.1:{control.port}/schema/openapi.json"),
                *("--header", f"Authorization: Bearer {TOKEN}", "--exclude-path-regex", LEFT_OUT),
                *("--checks", CHECKS, "--max-examples", "15", "--request-timeout", "10"),
                *("--workers", "4", "--seed", "1", "--generation-database", "none", *options),
            )
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
