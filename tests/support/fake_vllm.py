"""Starts fake vLLM servers for tests, each a process of its own, under a program that is called `vllm`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.scripted import free_port

FAKE = Path(__file__).parents[1] / "engines" / "vllm.py"


def vllm_program(folder: Path) -> str:
    """An executable `vllm` in `folder`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def fake_env(**script: object) -> dict[str, str]:
    """The environment that tells a fake vLLM what to do; see `Script` in tests/engines/vllm.py."""
    return {f"FAKE_VLLM_{name.upper()}": str(value) for name, value in script.items()}


@contextmanager
def fake_vllm(
    *flags: str,
    key: str = "",
    development: bool = True,
    sleeps: bool = True,
    model: str = "smollm2",
    device: Mapping[str, str] | None = None,
    **script: object,
) -> Iterator[str]:
    """A running fake's endpoint. `device` are variables that tell it of a fake driver's cards."""
    port = free_port()
    argv = [sys.executable, "-I", "-S", str(FAKE), "serve", "/models/smollm2", *flags]
    argv += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
    if sleeps:
        argv.append("--enable-sleep-mode")
    environment = {**os.environ, **(device or {}), **fake_env(**script)}
    if development:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if key:
        environment["VLLM_API_KEY"] = key
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
    try:
        _listens(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _listens(port: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
