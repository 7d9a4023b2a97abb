"""The clients and the streaming engine of the HTTP benchmarks, each a process of its own that prints one JSON line.

They are as cheap as Python on uvloop can be, for they share the machine with what is measured; they check what they
get, and a benchmark whose answers are wrong ends instead of printing numbers. They measure nothing but times.

    python bench/load.py unary  PORT CLIENTS SECONDS [--header NAME:VALUE] [--model NAME]
    python bench/load.py stream PORT CLIENTS TOKENS [--spread S] [--each N] [--leave SHARE] [--header …] [--model …]
    python bench/load.py engine PORT[,PORT…] TOKENS [--gap S]
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import uvloop

MODEL: Final = "tiny"

EVENT: Final = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,\
"delta":{"content":" token"}}]}\n\n'

LAST_EVENTS: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],"usage":\
{"prompt_tokens":60,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)

MARK: Final = b'"content":" token"'
"""What every token of a stream holds once."""


def body_of(model: str, *, stream: bool) -> bytes:
    """A chat of some 300 bytes, as the benchmarks send it."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello. " * 20}],
    }
    if stream:
        fields["stream"] = True
    return json.dumps(fields).encode()


ANSWER: Final = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello. " * 20},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100},
    }
)


def request_of(model: str, headers: Sequence[str], *, stream: bool) -> bytes:
    """The request every client sends, head and body."""
    body = body_of(model, stream=stream)
    more = "".join(f"{header}\r\n" for header in headers).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\n"
        b"accept: application/json\r\ncontent-type: application/json\r\n%b"
        b"content-length: %d\r\n\r\n%b" % (more, len(body), body)
    )


class _Unary(asyncio.Protocol):
    """Sends a request as soon as the answer before is complete."""

    def __init__(
        self, request: bytes, stop_at: float, took: list[float], done: Callable[[], None]
    ) -> None:
        self.request = request
        self.stop_at = stop_at
        self.took = took
        self.done = done
        self.missing = -1
        self.buffer = b""
        self.ended = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended:
            raise SystemExit("a connection was closed without an answer")

    def ask(self) -> None:
        self.asked = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.missing < 0:
            data = self.buffer + data if self.buffer else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.buffer = data
                return
            self.buffer = b""
            head = data[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"answered {data[:300]!r}")
            _, found, length = head.partition(b"content-length:")
            if not found:
                raise SystemExit(f"an answer without a length: {head!r}")
            self.missing = int(length.split(b"\r\n", 1)[0]) - (len(data) - end - 4)
        else:
            self.missing -= len(data)
        if self.missing == 0:
            self.missing = -1
            now = time.perf_counter()
            self.took.append(now - self.asked)
            if now < self.stop_at:
                self.ask()
            else:
                self.ended = True
                self.transport.close()
                self.done()


async def unary(port: int, clients: int, seconds: float, request: bytes) -> dict[str, float]:
    """Requests per second and latencies in milliseconds."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    finished = asyncio.Semaphore(0)
    begun = time.perf_counter()
    for _ in range(clients):
        await loop.create_connection(
            lambda: _Unary(request, begun + seconds, took, finished.release), "127.0.0.1", port
        )
    for _ in range(clients):
        await finished.acquire()
    elapsed = time.perf_counter() - begun
    took.sort()
    return {
        "count": len(took),
        "rate": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[len(took) * 99 // 100] * 1000,
    }


class _Stream(asyncio.Protocol):
    """Reads one stream to its end and counts its tokens; may leave behind so many of them."""

    def __init__(
        self, request: bytes, done: Callable[["_Stream"], None], leave_after: int | None
    ) -> None:
        self.request = request
        self.done = done
        self.leave_after = leave_after
        self.tokens = 0
        self.first_s = 0.0
        self.problem = ""
        self.ended = False
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.asked = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.tokens:
            if not self.tail and not data.startswith(b"HTTP/1.1 200"):
                self.end(f"answered {data[:300]!r}")
                return
            if MARK in data:
                self.first_s = time.perf_counter() - self.asked
        # Tokens may be cut by the network; what could be half of one is looked at again.
        data = self.tail + data
        self.tokens += data.count(MARK)
        last = data.rfind(MARK)
        self.tail = data[max(last + len(MARK) if last >= 0 else 0, len(data) - len(MARK) + 1) :]
        left = self.leave_after is not None and self.tokens >= self.leave_after
        if left or data.endswith(b"0\r\n\r\n"):
            self.end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"broke after {self.tokens} tokens: {exc}")

    def end(self, problem: str) -> None:
        if not self.ended:
            self.ended = True
            self.problem = problem
            self.transport.close()
            self.done(self)


async def stream(
    port: int,
    clients: int,
    tokens: int,
    request: bytes,
    *,
    spread_s: float,
    each: int,
    leave: float,
) -> dict[str, float]:
    """Milliseconds to the first token of each stream; every one of `clients` reads `each` streams in a row.

    They begin spread over `spread_s`. A share `leave` of them goes away somewhere in the middle, which is no error;
    any other end before all its tokens is one.
    """
    loop = asyncio.get_running_loop()
    first: list[float] = []
    seen = errors = 0
    problems: set[str] = set()
    rng = random.Random(1)

    async def one(index: int) -> None:
        nonlocal seen, errors
        await asyncio.sleep(spread_s * index / clients)
        for _ in range(each):
            ended: asyncio.Future[_Stream] = loop.create_future()
            leaving = rng.randrange(1, tokens) if rng.random() < leave else None
            made = partial(_Stream, request, ended.set_result, leaving)
            await loop.create_connection(made, "127.0.0.1", port)
            read = await ended
            seen += read.tokens
            if read.first_s:
                first.append(read.first_s)
            if read.problem or (leaving is None and read.tokens != tokens):
                errors += 1
                problems.add(read.problem or f"{read.tokens} tokens of {tokens}")

    begun = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(clients)))
    took = time.perf_counter() - begun
    first.sort()
    return {
        "tokens": seen,
        "errors": errors,
        "problems": sorted(problems)[:5],  # pyright: ignore[reportReturnType]
        "took_s": took,
        "first_p50_ms": statistics.median(first) * 1000 if first else 0.0,
        "first_p99_ms": first[len(first) * 99 // 100] * 1000 if first else 0.0,
    }


class _Engine(asyncio.Protocol):
    """Answers every POST with a stream of tokens, one each `gap_s`; a GET with what runs here."""

    def __init__(self, home: "_Engines") -> None:
        self.home = home
        self.left = 0
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self.buffer = data
            return
        head = data[:end].lower()
        _, found, length = head.partition(b"content-length:")
        whole = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
        if len(data) < whole:
            self.buffer = data
            return
        self.buffer = data[whole:]
        if head.startswith(b"get"):
            self.say(self.home.told(head.split(b" ", 2)[1]))
            return
        self.left = self.home.tokens
        self.home.running += 1
        self.home.served += 1
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.timer = self.home.loop.call_later(self.home.gap_s, self.tick)

    def say(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def tick(self) -> None:
        self.timer = None
        home = self.home
        if self.transport.is_closing():
            home.running -= 1
            return
        self.left -= 1
        self.transport.write(home.chunk)
        if self.left:
            self.timer = home.loop.call_later(home.gap_s, self.tick)
        else:
            home.running -= 1
            self.transport.write(home.last)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.home.running -= 1


class _Engines:
    """What the connections of one engine share."""

    def __init__(self, tokens: int, gap_s: float) -> None:
        self.tokens = tokens
        self.gap_s = gap_s
        self.running = 0
        self.served = 0
        self.loop = asyncio.get_running_loop()
        self.chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        last = LAST_EVENTS % (tokens, 60 + tokens)
        self.last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)

    def told(self, target: bytes) -> bytes:
        if target == b"/v1/models":
            return json.dumps(
                {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            ).encode()
        if target == b"/running":
            return json.dumps({"running": self.running, "served": self.served}).encode()
        return b'{"model_path":"tiny","served_model_name":"tiny"}'


async def engine(ports: Sequence[int], tokens: int, gap_s: float) -> None:
    """Serves on all ports until told to stop."""
    loop = asyncio.get_running_loop()
    home = _Engines(tokens, gap_s)
    servers = [
        await loop.create_server(lambda: _Engine(home), "127.0.0.1", port, backlog=4096)
        for port in ports
    ]
    await until_told_to_stop()
    for server in servers:
        server.close()


async def until_told_to_stop() -> None:
    """Returns on SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", choices=("unary", "stream", "engine"))
    parser.add_argument("port", help="the port; an engine takes several")
    parser.add_argument("numbers", nargs="+", type=float)
    parser.add_argument("--header", action="append", default=[])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--leave", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.02)
    given = parser.parse_args()
    ports = [int(port) for port in given.port.split(",")]
    if given.role == "engine":
        uvloop.run(engine(ports, int(given.numbers[0]), given.gap))
        return
    clients = int(given.numbers[0])
    if given.role == "unary":
        request = request_of(given.model, given.header, stream=False)
        row = uvloop.run(unary(ports[0], clients, given.numbers[1], request))
    else:
        request = request_of(given.model, given.header, stream=True)
        row = uvloop.run(
            stream(
                ports[0],
                clients,
                int(given.numbers[1]),
                request,
                spread_s=given.spread,
                each=given.each,
                leave=given.leave,
            )
        )
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
