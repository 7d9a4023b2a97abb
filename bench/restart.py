"""Measures a control plane's restart with many aggregates: time to served reads and memory, once.

Fills a real nats-server with models, starts a control plane twice (empty projection, then from its file)
and prints the seconds until `/v1/models/<last>` answers and until it leads, and its CPU time and memory (RSS, USS).

    python -m bench.restart [--aggregates 100000]
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from bench.rig import free_port
from events.connection import connect
from events.jetstream import JetStreamLog
from events.log import Draft
from events.provision import ensure_streams
from events.roles import inbox_prefix
from events.secrets import (
    api_token_path,
    ensure_secret,
    nats_password_path,
    read_secret,
    yard_secret_path,
)
from events.server import answers, command_line, prepare
from schemas.messages import SCHEMA
from schemas.model import Model, ModelAdded, Profile, Scaling
from schemas.settings import NatsSettings

HOST = "127.0.0.1"
BATCH = 500


def model(n: int) -> Model:
    profile = Profile(name="any", engine="command", command=("server",), memory_bytes=1 << 30)
    return Model(
        name=f"m{n:06}",
        incarnation="i",
        scaling=Scaling(min=0, max=1),
        profiles=(profile,),
        order=n,
    )


async def fill(url: str, data: Path, count: int) -> None:
    """Appends `count` models in atomic batches."""
    user = "control"
    connection = await connect(
        NatsSettings(url=url),
        name="filler",
        user=user,
        password=read_secret(nats_password_path(data, user)),
        inbox_prefix=inbox_prefix(user),
    )
    await ensure_streams(connection, "bench", SCHEMA)
    log = JetStreamLog(connection, source="/cp/filler")
    for start in range(0, count, BATCH):
        await log.append_batch(
            [
                Draft(
                    subject=f"yard.evt.model.m{n:06}",
                    event=ModelAdded(by="bench"),
                    state=model(n),
                    expected_seq=0,
                    rev=1,
                )
                for n in range(start, min(count, start + BATCH))
            ],
            epoch=0,
        )
    await connection.close()


async def answered(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def measure(url: str, data: Path, last: str, label: str) -> None:
    """Starts one control plane and prints its row."""
    port = free_port()
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controlplane", "--data", str(data), "--nats", url,
        "--listen", f"{HOST}:{port}", "--id", "cp-1",
        env={**os.environ, "YARD_ID": "bench", "YARD_YARD_LOG_LEVEL": "ERROR"},
    )  # fmt: skip
    marks: dict[str, float] = {}
    token = read_secret(api_token_path(data))
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{HOST}:{port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        ) as client:
            for path, name in (
                ("/healthz", "listening"),
                (f"/v1/models/{last}", "reads"),
                ("/readyz", "ready"),
            ):
                while not await answered(client, path):  # noqa: ASYNC110 - nobody tells us
                    await asyncio.sleep(0.02)
                marks[name] = time.monotonic() - began
            looked_at = psutil.Process(process.pid)
            memory = looked_at.memory_full_info()
            cpu = looked_at.cpu_times()
    finally:
        process.terminate()
        await process.wait()
    print(
        f"{label:24} listening {marks['listening']:6.2f} s   reads {marks['reads']:6.2f} s   "
        f"ready {marks['ready']:6.2f} s   CPU {cpu.user + cpu.system:6.2f} s   RSS {memory.rss >> 20} MiB   USS {memory.uss >> 20} MiB",
        flush=True,
    )


async def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        ensure_secret(api_token_path(data))
        ensure_secret(yard_secret_path(data))
        port = free_port()
        server = await asyncio.create_subprocess_exec(
            *command_line(
                prepare(data, ["local"]),
                data / "nats" / "store",
                host=HOST,
                port=port,
                monitoring_port=free_port(),
            ),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert await answers(HOST, port, 10)
            url = f"nats://{HOST}:{port}"
            began = time.monotonic()
            await fill(url, data, count)
            print(f"{count} aggregates written in {time.monotonic() - began:.1f} s", flush=True)
            last = f"m{count - 1:06}"
            await measure(url, data, last, "without a projection")
            await measure(url, data, last, "with its projection")
        finally:
            server.terminate()
            await server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aggregates", type=int, default=100_000)
    asyncio.run(main(parser.parse_args().aggregates))
