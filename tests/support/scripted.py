"""Starts scripted engines for tests, each a process of its own on a free port."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

PROGRAM = Path(__file__).parents[1] / "engines" / "scripted.py"


def command(**script: object) -> tuple[str, ...]:
    """The command line of a scripted engine, with `${PORT}` for a profile of engine `command`."""
    return argv("${PORT}", **script)


def argv(port: int | str, **script: object) -> tuple[str, ...]:
    """The command line of a scripted engine on `port`; see `Script` in tests/engines/scripted.py."""
    flags = [
        word
        for name, value in script.items()
        for word in (f"--{name.replace('_', '-')}", str(int(value) if value is True else value))
    ]
    return (sys.executable, "-I", "-S", str(PROGRAM), "--port", str(port), *flags)


def ask(endpoint: str, path: str, body: object = None, key: str = "") -> Any:
    """One request to the engine's own door, e.g. /script/counters; its JSON answer. Blocks."""
    address = endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@contextmanager
def scripted(key: str = "", **script: object) -> Iterator[str]:
    """A running scripted engine's endpoint; it listens, and has loaded unless told to hang."""
    port = free_port()
    read, write = os.pipe()
    environment = {**os.environ, "YARD_READY_FD": str(write), "API_KEY": key}
    if not key:
        del environment["API_KEY"]
    process = subprocess.Popen(
        argv(port, **script), env=environment, pass_fds=[write], stderr=subprocess.DEVNULL
    )
    os.close(write)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        if script.get("listen_early"):
            _wait_for_door(port)
        elif not script.get("hang_in_load"):
            assert os.read(read, 16) == b"ready\n", "the scripted engine ended at its start"
        yield endpoint
    finally:
        os.close(read)
        process.kill()
        process.wait()


def _wait_for_door(port: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        else:
            return
