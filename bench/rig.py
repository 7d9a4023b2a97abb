"""Starts the processes of the HTTP benchmarks, reads their CPU time, and prints rows with their spread.

Nothing here measures by itself. Whatever is started ends with its block, its whole group with it.
"""

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent

_CONF: Final = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 100000000; keepalive_timeout 600s;
  {upstream}
  server {{
    {listen}
    {locations}
  }}
}}
"""

_PROXY: Final = (
    'location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";'
    " proxy_buffering off; }"
)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_open(port: int, process: "subprocess.Popen[bytes]", timeout_s: float = 120.0) -> None:
    """Until somebody listens there; SystemExit when the process ends or the time does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"nothing listens on port {port} after {timeout_s:g} s")


@contextmanager
def running(
    port: int, argv: Sequence[str], *, log: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[psutil.Process]:
    """The process while it runs; what it says goes to `log`, else to the terminal."""
    with (log or Path(os.devnull)).open("wb") as out:
        process = subprocess.Popen(
            argv,
            start_new_session=True,
            stdout=out if log else None,
            stderr=out if log else None,
            env={**os.environ, **(env or {})},
        )
        try:
            try:
                wait_open(port, process)
            except SystemExit as problem:
                said = log.read_text(errors="replace")[-2000:] if log else ""
                raise SystemExit(f"{problem}\n{said}") from None
            yield psutil.Process(process.pid)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def nginx_binary() -> str:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        raise SystemExit("nginx is not installed; on Debian: apt-get install nginx-light")
    return binary


@contextmanager
def nginx(
    ports: Sequence[int], locations: str, engines: Sequence[int] = ()
) -> Iterator[psutil.Process]:
    """An nginx with one worker; yields the worker."""
    upstream = ""
    if engines:
        servers = " ".join(f"server 127.0.0.1:{port};" for port in engines)
        upstream = f"upstream engine {{ {servers} keepalive 4096; keepalive_requests 100000000; }}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        listen = " ".join(f"listen 127.0.0.1:{port} backlog=4096;" for port in ports)
        config.write_text(
            _CONF.format(dir=folder, listen=listen, upstream=upstream, locations=locations)
        )
        argv = [nginx_binary(), "-c", str(config), "-p", folder, "-e", f"{folder}/error.log"]
        with running(ports[0], argv) as master:
            deadline = time.monotonic() + 10
            while not master.children():  # it listens before it forks
                if time.monotonic() > deadline:
                    raise SystemExit("nginx started no worker")
                time.sleep(0.01)
            yield master.children()[0]


@contextmanager
def nginx_engine(ports: Sequence[int], answer: str, models: str) -> Iterator[psutil.Process]:
    """An engine that answers every POST with `answer`, from nginx's memory."""
    locations = (
        "default_type application/json;"
        f" location / {{ return 200 '{answer}'; }}"
        f" location = /v1/models {{ return 200 '{models}'; }}"
        " location = /health { return 200 'ok'; }"
    )
    with nginx(ports, locations) as worker:
        yield worker


@contextmanager
def nginx_proxy(port: int, engines: Sequence[int]) -> Iterator[psutil.Process]:
    """nginx as a proxy in front of engines."""
    with nginx([port], _PROXY, engines) as worker:
        yield worker


def load(*arguments: object, quiet: bool = False) -> dict[str, Any]:
    """The row of one run of bench/load.py; SystemExit when it got no proper answers."""
    argv = [sys.executable, str(ROOT / "bench" / "load.py"), *map(str, arguments)]
    errors = subprocess.DEVNULL if quiet else None
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, stderr=errors)
    if done.returncode != 0:
        raise SystemExit(f"{argv[2:]} failed")
    return json.loads(done.stdout)


@contextmanager
def streaming_engine(ports: Sequence[int], tokens: int, gap_s: float) -> Iterator[psutil.Process]:
    """The streaming engine of bench/load.py."""
    listen = ",".join(map(str, ports))
    argv = [sys.executable, str(ROOT / "bench" / "load.py"), "engine", listen, str(tokens)]
    with running(ports[-1], [*argv, "--gap", str(gap_s)]) as process:
        yield process


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and everything it started."""
    return [process, *process.children(recursive=True)]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of all their threads so far, to the nanosecond the kernel accounts them by."""
    total = 0
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the extremes."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
