"""Starts fake vLLM servers for tests, each a process of its own, under a program that is called `vllm`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import free_port

FAKE = Path(__file__).parents[1] / "engines" / "vllm.py"

ADAPTER_FLAGS = (
    "--enable-lora",
    "--max-loras",
    "2",
    "--max-cpu-loras",
    "4",
    "--max-lora-rank",
    "16",
)
"""What vLLM was measured with."""


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
    adapters: bool = False,
    environment: Mapping[str, str] | None = None,
    **script: object,
) -> Iterator[str]:
    """A running fake's endpoint. `device` are variables that tell it of a fake driver's cards.

    `adapters` starts it as the one that was measured: with `ADAPTER_FLAGS` and its routes for loads.
    """
    port = free_port()
    argv = [sys.executable, "-I", "-S", str(FAKE), "serve", "/models/smollm2"]
    argv += (*ADAPTER_FLAGS, *flags) if adapters else flags
    argv += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
    if sleeps:
        argv.append("--enable-sleep-mode")
    told = {**os.environ, **(device or {}), **fake_env(**script)}
    if development:
        told["VLLM_SERVER_DEV_MODE"] = "1"
    if key:
        told["VLLM_API_KEY"] = key
    if adapters:
        told["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    told |= environment or {}
    process = subprocess.Popen(argv, env=told, stderr=subprocess.DEVNULL)
    try:
        _listens(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def tell(endpoint: str, door: str, **body: object) -> None:
    """Asks something of a running fake: `tell(endpoint, "fault", fault="lora-500", times=1)`."""
    answer = httpx.post(f"{endpoint}/fake/{door}", json=body, timeout=5)
    assert answer.status_code == 200, (door, body, answer.status_code)


def lora(endpoint: str) -> dict[str, Any]:
    """What a running fake tells of its adapters: loads, unloads, evicted_in_use, answered, resident, …"""
    told: dict[str, Any] = httpx.get(f"{endpoint}/fake/lora", timeout=5).json()
    return told


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
