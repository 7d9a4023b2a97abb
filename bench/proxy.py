"""Measures the gateway's HTTP core beside nginx: requests per second, latency, CPU per streamed token.

Both proxies stand in front of the same backends on this machine and take turns, round by round; only
the ratios between rows carry over to another machine. The core does what every request costs (head,
body, the model's name out of the JSON, relay) and nothing of routing, keys or metrics.

    python bench/proxy.py [--rounds 5] [--seconds 3] [--clients 32] [--streams 300] [--tokens 100]

It needs nginx (`apt-get install nginx-light`); no other program is used.
"""

import argparse
import asyncio
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BODY = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "Say hello. " * 20}]}
).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello. " * 20}}],
        "usage": {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100},
    }
)
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,\
"delta":{"content":" token"}}]}\n\n'

NGINX_CONF = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 100000000; keepalive_timeout 600s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{ {location} }}
  }}
}}
"""
PROXY_LOCATION = (
    'proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; '
    "proxy_buffering off;"
)


# -- the parts that run as processes of their own ----------------------------------------------


async def core(port: int, upstream: int) -> None:
    """The gateway's data path alone."""
    from gateway.domain.http_rules import engine_request_headers
    from gateway.domain.request_fields import FieldsProblem, read_fields
    from gateway.http.client import EngineClient
    from gateway.http.messages import Request, Responder
    from gateway.http.server import serve

    client = EngineClient()
    endpoint = f"http://127.0.0.1:{upstream}"

    async def handle(request: Request, responder: Responder) -> None:
        fields = read_fields(await request.body.read_all())
        if isinstance(fields, FieldsProblem):
            await responder.send_error(400, "invalid_request", fields.message)
            return
        response = await client.request(
            endpoint,
            request.method,
            request.path,
            engine_request_headers(request.headers.items),
            request.body,
        )
        await responder.relay(response)

    server = await serve(handle, "127.0.0.1", port)
    await _until_told_to_stop()
    await server.close()
    await client.close()


class _StreamBackend(asyncio.Protocol):
    """Answers a request with `tokens` events, one every 20 ms."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if b"HTTP/1.1\r\n" not in data:
            return
        self.left = self.tokens
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        asyncio.get_running_loop().call_later(0.02, self.tick)

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        self.transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        if self.left:
            asyncio.get_running_loop().call_later(0.02, self.tick)
        else:
            self.transport.write(b"0\r\n\r\n")


async def stream_backend(port: int, tokens: int) -> None:
    """The engine of the stream rounds."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _StreamBackend(tokens), "127.0.0.1", port)
    await _until_told_to_stop()
    server.close()


class _LoadClient(asyncio.Protocol):
    """Sends a request as soon as the answer before is complete."""

    def __init__(self, stop_at: float, took: list[float], done: Callable[[], None]) -> None:
        self.stop_at = stop_at
        self.took = took
        self.done = done
        self.missing = -1
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.asked = time.perf_counter()
        self.transport.write(_request())

    def data_received(self, data: bytes) -> None:
        if self.missing < 0:
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"the proxy answered {head[:60]!r}")
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            self.missing = length - (len(self.buffer) - end - 4)
            self.buffer = b""
        else:
            self.missing -= len(data)
        if self.missing == 0:
            self.missing = -1
            now = time.perf_counter()
            self.took.append(now - self.asked)
            if now < self.stop_at:
                self.ask()
            else:
                self.transport.close()
                self.done()


class _StreamClient(asyncio.Protocol):
    """Reads one stream to its end."""

    def __init__(self, done: Callable[[], None], first: list[float]) -> None:
        self.done = done
        self.first = first
        self.seen = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.asked = time.perf_counter()
        transport.write(_request())

    def data_received(self, data: bytes) -> None:
        if not self.seen and b"data:" in data:
            self.seen = True
            self.first.append(time.perf_counter() - self.asked)
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()
            self.done()


def _request() -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\n"
        b"accept: application/json\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    )


async def load(port: int, clients: int, seconds: float) -> None:
    """Prints one JSON line: requests per second and latencies in milliseconds."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    finished = asyncio.Semaphore(0)
    begun = time.perf_counter()
    for _ in range(clients):
        await loop.create_connection(
            lambda: _LoadClient(begun + seconds, took, finished.release), "127.0.0.1", port
        )
    for _ in range(clients):
        await finished.acquire()
    elapsed = time.perf_counter() - begun
    took.sort()
    row = {
        "rate": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[len(took) * 99 // 100] * 1000,
    }
    print(json.dumps(row), flush=True)


async def stream_load(port: int, clients: int) -> None:
    """Prints one JSON line: the median time to the first event in milliseconds."""
    loop = asyncio.get_running_loop()
    finished = asyncio.Semaphore(0)
    first: list[float] = []
    for _ in range(clients):
        await loop.create_connection(
            lambda: _StreamClient(finished.release, first), "127.0.0.1", port
        )
    for _ in range(clients):
        await finished.acquire()
    print(json.dumps({"first_ms": statistics.median(first) * 1000}), flush=True)


async def _until_told_to_stop() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


# -- the rounds ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_open(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"a process of the benchmark ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"nothing listens on port {port} after 10 s")


@contextmanager
def running(port: int, argv: list[str]) -> Iterator[psutil.Process]:
    """The process while it runs; its whole group is gone afterwards."""
    process = subprocess.Popen(argv, start_new_session=True)
    try:
        wait_open(port, process)
        yield psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)


@contextmanager
def nginx(binary: str, location: str, upstream: int) -> Iterator[tuple[int, psutil.Process]]:
    """An nginx with one worker; yields its port and the worker."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder) / "nginx.conf"
        config.write_text(
            NGINX_CONF.format(dir=folder, port=port, upstream=upstream, location=location)
        )
        argv = [binary, "-c", str(config), "-p", folder, "-e", f"{folder}/error.log"]
        with running(port, argv) as master:
            yield port, master.children()[0]


def own(role: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, f"--role={role}", *map(str, arguments)]


def measure(argv: list[str]) -> dict[str, float]:
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):10.2f}  ({min(values):.2f}..{max(values):.2f})"


def report(title: str, rows: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{title}")
    for metric in next(iter(rows.values())):
        for name, columns in rows.items():
            print(f"  {metric:18} {name:8} {spread(columns[metric])}")
        if {"core", "nginx"} <= rows.keys():
            ratios = [
                ours / theirs
                for ours, theirs in zip(rows["core"][metric], rows["nginx"][metric], strict=True)
                if theirs
            ]
            if ratios:
                print(f"  {'':18} {'ratio':8} {spread(ratios)}")


def unary_rounds(binary: str, options: argparse.Namespace) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    location = f"default_type application/json; return 200 '{ANSWER}';"
    with (
        nginx(binary, location, 1) as (backend, _),
        nginx(binary, PROXY_LOCATION, backend) as (peer, peer_process),
    ):
        port = free_port()
        with running(port, own("core", port, backend)) as process:
            targets = {
                "direct": (backend, None),
                "nginx": (peer, peer_process),
                "core": (port, process),
            }
            for target, _ in targets.values():
                measure(own("load", target, options.clients, 0.5))
            for _ in range(options.rounds):
                for name, (target, proxy) in targets.items():
                    before = cpu_s(proxy) if proxy else 0.0
                    row = measure(own("load", target, options.clients, options.seconds))
                    if proxy:
                        used = cpu_s(proxy) - before
                        row["cpu_us/request"] = used / (row["rate"] * options.seconds) * 1e6
                    else:
                        row["cpu_us/request"] = 0.0
                    for metric, value in row.items():
                        rows.setdefault(name, {}).setdefault(metric, []).append(value)
    report(f"unary, {options.clients} clients, {options.rounds} rounds", rows)


def stream_rounds(binary: str, options: argparse.Namespace) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    backend = free_port()
    with (
        running(backend, own("stream-backend", backend, options.tokens)),
        nginx(binary, PROXY_LOCATION, backend) as (peer, peer_process),
    ):
        port = free_port()
        with running(port, own("core", port, backend)) as process:
            targets = {
                "direct": (backend, None),
                "nginx": (peer, peer_process),
                "core": (port, process),
            }
            for _ in range(options.rounds):
                for name, (target, proxy) in targets.items():
                    before = cpu_s(proxy) if proxy else 0.0
                    row = measure(own("stream-load", target, options.streams))
                    used = cpu_s(proxy) - before if proxy else 0.0
                    row["cpu_us/token"] = used / (options.streams * options.tokens) * 1e6
                    for metric, value in row.items():
                        rows.setdefault(name, {}).setdefault(metric, []).append(value)
    report(f"streams, {options.streams} clients x {options.tokens} tokens", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--only", choices=("unary", "stream"))
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [float(argument) for argument in options.arguments]
    if options.role is not None:
        roles: dict[str, Callable[..., Any]] = {
            "core": lambda port, upstream: core(int(port), int(upstream)),
            "stream-backend": lambda port, tokens: stream_backend(int(port), int(tokens)),
            "load": lambda port, clients, seconds: load(int(port), int(clients), seconds),
            "stream-load": lambda port, clients: stream_load(int(port), int(clients)),
        }
        uvloop.run(roles[options.role](*numbers))
        return
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        raise SystemExit("nginx is not installed; on Debian: apt-get install nginx-light")
    if options.only != "stream":
        unary_rounds(binary, options)
    if options.only != "unary":
        stream_rounds(binary, options)


if __name__ == "__main__":
    main()
