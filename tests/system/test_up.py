"""yardctl up as a person runs it: what it prints, Ctrl-C, being killed, and folders in use."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from controlplane.ctl.supervisor import python_argv
from controlplane.ctl.up import free_ports
from nodeagent.app import locked
from tests.support.aio import run, until
from tests.support.ports import PORTS, engine_environment
from tests.system.test_kills import engines_of
from tests.system.yard import chat, scripted_model


@asynccontextmanager
async def up(data: Path, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *python_argv("controlplane.ctl", "up", "--data", str(data), *own_ports(), *more),
        env={**os.environ, **engine_environment()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.communicate()


def with_ports(*ports: int) -> list[str]:
    flags = ("--gateway-port", "--api-port", "--nats-port")
    return [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]


def own_ports() -> list[str]:
    """Ports that no test beside this one has."""
    return with_ports(*PORTS.take(3))


async def base_url(process: asyncio.subprocess.Process) -> str:
    """Reads what `up` prints until the line that ends its greeting."""
    assert process.stdout is not None
    text = ""
    while "Ctrl-C" not in text:
        line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError(text + (await process.stderr.read()).decode())
        text += line.decode()
    found = re.search(r"base URL\s+(\S+)/v1", text)
    assert found is not None, text
    assert "curl" in text
    return found[1]


def living(pids: list[int]) -> list[int]:
    """Those of `pids` that are not gone and not zombies."""
    found = []
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def write_catalog(folder: Path) -> Path:
    path = folder / "catalog.yaml"
    path.write_text(json.dumps([scripted_model("m", "--load-s", "0.1")]), encoding="utf-8")
    return path


@pytest.mark.timeout(90)
def test_inv_6_ctrl_c_stops_all_of_it_engines_too(tmp_path: Path) -> None:
    async def story() -> None:
        data = tmp_path / "data"
        catalog = ("--catalog", str(write_catalog(tmp_path)))
        async with up(data, *catalog, *with_ports(0, 0, 0)) as process:
            url = await base_url(process)
            async with httpx.AsyncClient(timeout=30) as http:
                answer = await http.post(f"{url}/v1/chat/completions", json=chat("m"))
                assert answer.status_code == 200, answer.text
            pids = list(json.loads((data / "yard.json").read_text())["pids"].values())
            assert len(pids) == 4
            assert engines_of(data)
            process.send_signal(signal.SIGINT)
            await process.communicate()
            assert process.returncode == 0
            assert living(pids) == []
            assert engines_of(data) == set()

    run(story(), 80)


@pytest.mark.timeout(120)
def test_inv_6_up_killed_leaves_engines_to_the_next_up(tmp_path: Path) -> None:
    async def story() -> None:
        data = tmp_path / "data"
        async with up(data, "--catalog", str(write_catalog(tmp_path))) as first:
            url = await base_url(first)
            async with httpx.AsyncClient(timeout=30) as http:
                assert (
                    await http.post(f"{url}/v1/chat/completions", json=chat("m"))
                ).status_code == 200
            engines = engines_of(data)
            pids = list(json.loads((data / "yard.json").read_text())["pids"].values())
            first.kill()
            await first.communicate()
            await until(lambda: living(pids) == [], "the services to end with their supervisor", 20)
            assert engines_of(data) == engines, "engines stay"
        async with up(data) as second:
            url = await base_url(second)
            async with httpx.AsyncClient(timeout=30) as http:
                assert (
                    await http.post(f"{url}/v1/chat/completions", json=chat("m"))
                ).status_code == 200
            assert engines_of(data) == engines, "adopted"
        assert engines_of(data) == set()

    run(story(), 110)


@pytest.mark.timeout(120)
def test_the_log_and_the_secrets_alone_are_the_yard(tmp_path: Path) -> None:
    """What the page on operating says to back up is enough to go on in another folder."""

    async def story() -> None:
        data, restored = tmp_path / "data", tmp_path / "restored"
        async with up(data, "--catalog", str(write_catalog(tmp_path))) as first:
            await base_url(first)
            first.send_signal(signal.SIGINT)
            await first.communicate()
        for kept in ("nats", "secrets"):
            shutil.copytree(data / kept, restored / kept)
        async with up(restored) as second:
            url = await base_url(second)
            async with httpx.AsyncClient(timeout=30) as http:
                answer = await http.post(f"{url}/v1/chat/completions", json=chat("m"))
                assert answer.status_code == 200, answer.text

    run(story(), 110)


@pytest.mark.timeout(60)
def test_req_x1_a_second_up_on_one_folder_is_told_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with up(tmp_path / "data") as first:
            await base_url(first)
            async with up(tmp_path / "data") as second:
                _, err = await second.communicate()
                assert second.returncode == 1
                assert b"another `yardctl up` runs on" in err
                assert b"Traceback" not in err

    run(story(), 50)


@pytest.mark.timeout(60)
def test_req_x1_an_agent_that_works_in_the_folder_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        data = tmp_path / "data"
        with locked(data / "nodeagent" / "lock"):
            async with up(data) as process:
                _, err = await process.communicate()
        assert process.returncode == 1
        assert b"another agent works in" in err
        assert b"Traceback" not in err

    run(story(), 50)


@pytest.mark.timeout(60)
def test_an_agent_that_was_deposed_is_not_started_against_the_other(tmp_path: Path) -> None:
    """Two supervisors that start their agents again and again would take the node in turns."""

    async def story() -> None:
        data = tmp_path / "data"
        async with up(data) as process:
            await base_url(process)
            yard = json.loads((data / "yard.json").read_text())
            other = await asyncio.create_subprocess_exec(
                *python_argv("nodeagent", "--id", "local", "--data", str(tmp_path / "other")),
                env={**os.environ, **other_agent(data, tmp_path / "other", yard["nats_port"])},
                stdin=asyncio.subprocess.DEVNULL,
            )
            assert process.stderr is not None
            told = (await process.stderr.readline()).decode()
            assert told.startswith("nodeagent ended (exit code 3) and is not started again"), told
            assert other.returncode is None
            other.terminate()
            await other.wait()
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert process.returncode == 0
            assert b"no agent was there to stop engines" in err

    run(story(), 50)


def other_agent(data: Path, other: Path, nats_port: int) -> dict[str, str]:
    """What an agent with a data folder of its own needs to be the same node of that yard."""
    shutil.copytree(data / "secrets", other / "secrets")
    return {"YARD_NATS_URL": f"nats://127.0.0.1:{nats_port}"}


@pytest.mark.timeout(60)
def test_req_x1_a_taken_port_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, up(tmp_path / "data", "--gateway-port", str(port)) as process:
            _, err = await process.communicate()
            assert process.returncode == 1
            assert f"port {port} is in use".encode() in err
            assert b"--gateway-port" in err
            assert os.listdir(tmp_path / "data") != []

    run(story(), 50)


def test_the_free_ports_of_a_yard_all_differ() -> None:
    """A port that was looked at and let go may be given again at once."""
    few = free_ports(3)
    many = free_ports(500, few)
    assert len({*few, *many}) == 503
