"""A scripted engine: an OpenAI-compatible server that takes as long, and fails as, a test tells it.

    python -I -S scripted.py --port PORT [--load-s 0.5] [--pace-s 0.01] [--tokens 20] …

Standard library only, and little of it, so that it listens within 100 ms; scripted_endpoints.py beside it answers
all but chat, completions and embeddings. Every field of `Script`
is a flag (`--load-s 2`), a variable (`SCRIPTED_LOAD_S=2`), a member of a POST to /script, and, for one
request alone, a member of the body's `script`. It must not import the project: it stands for
strangers' programs.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time

# Run with -I, it finds nothing beside itself.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import scripted_endpoints as more

KEYLESS = ("/health", "/script", "/script/counters", "/script/requests")


class Script:
    """What to do. Times are seconds; 0 or empty turns a thing off.

    load_s              from process start until it listens (with listen_early: answers 503 until then)
    pace_s              between two tokens
    first_byte_s        before the head of an answer
    tokens              of an answer, unless the request asks for fewer
    slots               requests worked on at once; more are deferred; 0: any number
    crash_at_start      exit with 3 after load_s, this being the last line
    crash_after_tokens  exit with 4 in the middle of an answer, after that many tokens
    cut_after_tokens    close that request's connection instead, and live on
    hang_in_load        never listen
    fork_grandchild     a grandchild that ignores SIGTERM, in its own session with 2
    ignore_sigterm      only SIGKILL ends it
    unready             /health answers 503
    wrong_key           every request is answered 401
    html_502            every request is answered 502 with a page of HTML
    status              every request is answered with this status and an error of OpenAI's form
    memory_mib          touched at start, so that the process has it
    without             paths, with commas between, that it has no route for; `by_id`: those of responses
    model               the name it serves; replies carry it
    key_env             the variable its key is in; without that variable it asks for none
    """

    load_s = 0.0
    pace_s = 0.0
    first_byte_s = 0.0
    tokens = 5
    slots = 0
    crash_at_start = ""
    crash_after_tokens = 0
    cut_after_tokens = 0
    hang_in_load = 0
    listen_early = 0
    fork_grandchild = 0
    ignore_sigterm = 0
    unready = 0
    wrong_key = 0
    html_502 = 0
    status = 0
    memory_mib = 0
    without = ""
    model = "scripted"
    key_env = "API_KEY"

    def change(self, fields: dict) -> "Script":
        """Sets fields by name, each as the kind it has; raises KeyError or ValueError."""
        for name, value in fields.items():
            present = getattr(Script, name, None)
            if present is None or callable(present) or name.startswith("_"):
                raise KeyError(f"no field {name!r} in a script")
            setattr(self, name, type(present)(value))
        return self

    def all(self) -> dict:
        names = [name for name in vars(Script) if not name.startswith("_")]
        return {name: getattr(self, name) for name in names if not callable(getattr(Script, name))}

    def with_(self, fields: dict) -> "Script":
        return Script().change({**self.all(), **fields})


class Gone(Exception):
    """The client's connection is closed."""


class Engine:
    """The server's state: its script, its counters, the requests it saw. One thread a connection."""

    def __init__(self, script: Script, began: float) -> None:
        self.script = script
        self.began = began
        self.key = os.environ.get(script.key_env, "")
        self.loaded = False
        self.counters = {
            "requests": 0,
            "finished": 0,
            "aborted": 0,
            "unauthorized": 0,
            "connections": 0,
            "tokens": 0,
            "responses": 0,
        }
        self.responses: dict[str, dict] = {}
        self.lock = threading.Lock()
        self.processing = 0
        self.waiting: list[object] = []
        self.seen: list[dict] = []

    def count(self, name: str) -> int:
        with self.lock:
            self.counters[name] += 1
            return self.counters[name]

    def admit(self, ticket: object) -> bool:
        """Whether the request may be worked on now; requests are deferred in order of arrival."""
        with self.lock:
            if ticket not in self.waiting:
                self.waiting.append(ticket)
            slots = self.script.slots
            if self.waiting[0] is not ticket or (slots and self.processing >= slots):
                return False
            self.waiting.pop(0)
            self.processing += 1
            return True

    def leave(self, ticket: object) -> None:
        with self.lock:
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            else:
                self.processing -= 1

    def metrics(self) -> str:
        return (
            "# HELP llamacpp:requests_processing Number of requests processing.\n"
            "# TYPE llamacpp:requests_processing gauge\n"
            f"llamacpp:requests_processing {self.processing}\n"
            f"llamacpp:requests_deferred {len(self.waiting)}\n"
            f"llamacpp:n_decode_total {self.counters['tokens'] + self.counters['requests']}\n"
        )


class Connection:
    """One client: requests in order, each answered before the next is read."""

    def __init__(self, engine: Engine, peer: socket.socket) -> None:
        self.engine = engine
        self.peer = peer
        self.poll = select.poll()
        self.poll.register(peer, select.POLLIN | select.POLLRDHUP)
        self.close = False
        self.buffer = b""
        self.number = 0

    def serve(self) -> None:
        try:
            while not self.close:
                request = self.read_request()
                if request is None:
                    return
                self.answer(*request)
        except OSError:
            return
        finally:
            self.peer.close()

    def pause(self, wait_s: float) -> None:
        """Sleeps, and raises Gone as soon as the client goes away meanwhile."""
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            for _, event in self.poll.poll(max(0.0, left) * 1000):
                if event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    raise Gone
                piece = self.peer.recv(65536)
                if not piece:
                    raise Gone
                # What it sends ahead is its next request.
                self.buffer += piece
            if left <= 0:
                return

    def more(self) -> None:
        piece = self.peer.recv(65536)
        if not piece:
            raise Gone
        self.buffer += piece

    def line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            self.more()
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def exactly(self, size: int) -> bytes:
        pieces = [self.buffer]
        have = len(self.buffer)
        while have < size:
            pieces.append(self.peer.recv(1 << 20))
            if not pieces[-1]:
                raise Gone
            have += len(pieces[-1])
        whole = b"".join(pieces)
        self.buffer = whole[size:]
        return whole[:size]

    def read_request(self):
        try:
            method, target, _ = (self.line()).decode("latin-1").split(" ", 2)
            headers = {}
            while line := self.line():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            if headers.get("expect", "").lower() == "100-continue":
                self.peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = b""
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((self.line()).split(b";")[0], 16):
                    body += self.exactly(size)
                    self.line()
                while self.line():
                    pass
            elif "content-length" in headers:
                body = self.exactly(int(headers["content-length"]))
        except (Gone, ValueError, OSError):
            return None
        self.close = headers.get("connection", "").lower() == "close"
        return method, target.partition("?")[0], headers, body

    def answer(self, method: str, path: str, headers: dict, body: bytes) -> None:
        engine = self.engine
        if path == "/health":
            healthy = engine.loaded and not engine.script.unready
            self.send(200 if healthy else 503, {"status": "ok" if healthy else "loading model"})
        elif path.startswith("/script"):
            self.control(method, path, body)
        elif not engine.loaded:
            self.error(503, "Loading model", "unavailable_error")
        elif engine.script.wrong_key or (
            engine.key and headers.get("authorization") != f"Bearer {engine.key}"
        ):
            engine.count("unauthorized")
            self.error(401, "Invalid API Key", "authentication_error")
        elif path == "/metrics":
            self.send(200, engine.metrics())
        elif path in ("/v1/models", "/models"):
            card = {"id": engine.script.model, "object": "model", "owned_by": "scripted"}
            self.send(200, {"object": "list", "data": [card]})
        elif path in WORK and path not in engine.script.without.split(","):
            if method == "POST":
                self.work(path, headers, body)
            else:
                self.error(405, "Method Not Allowed", "invalid_request_error")
        elif path.startswith(more.RESPONSE) and "by_id" not in engine.script.without.split(","):
            more.by_id(self, method, path)
        else:
            self.error(404, f"no route {method} {path}", "not_found_error")

    def control(self, method: str, path: str, body: bytes) -> None:
        """GET /script, POST /script {field: value}, GET /script/counters, GET /script/requests."""
        engine = self.engine
        if path == "/script/counters":
            state = {
                "processing": engine.processing,
                "deferred": len(engine.waiting),
                "pid": os.getpid(),
                "launch": os.environ.get("YARD_LAUNCH_ID"),
            }
            self.send(200, {**engine.counters, **state})
        elif path == "/script/requests":
            self.send(200, engine.seen)
        elif method == "POST":
            try:
                engine.script.change(json.loads(body))
            except (KeyError, ValueError, TypeError) as error:
                self.error(400, str(error), "invalid_request_error")
                return
            self.send(200, engine.script.all())
        else:
            self.send(200, engine.script.all())

    def work(self, path: str, headers: dict, body: bytes) -> None:
        engine = self.engine
        kind = headers.get("content-type", "")
        form = kind.startswith("multipart/")
        try:
            asked = more.read_form(kind, body) if form else json.loads(body)
            told = asked.get("script") or {}
            script = engine.script.with_(json.loads(told) if isinstance(told, str) else told)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            self.error(400, f"bad request: {error}", "invalid_request_error")
            return
        self.number = engine.count("requests")
        engine.seen.append({"path": path, "headers": headers, "body": asked})
        del engine.seen[:-100]
        ticket = object()
        try:
            while not engine.admit(ticket):
                self.pause(0.002)
            self.pause(script.first_byte_s)
            if script.html_502:
                self.send(502, "<html><body><h1>502 Bad Gateway</h1></body></html>", "text/html")
            elif script.status:
                self.error(script.status, "scripted failure", "server_error")
            else:
                WORK[path](self, script, asked)
            engine.count("finished")
        except (Gone, OSError):
            engine.count("aborted")
            self.close = True
        finally:
            engine.leave(ticket)

    def tokens(self, script: Script, asked: dict):
        """The words of an answer in their time, with whatever befalls it on the way."""
        wanted = (
            asked.get("max_completion_tokens")
            or asked.get("max_tokens")
            or asked.get("max_output_tokens")
            or script.tokens
        )
        for number in range(min(int(wanted), script.tokens)):
            if script.crash_after_tokens and number >= script.crash_after_tokens:
                say(f"scripted: crashing after {number} tokens")
                os._exit(4)
            if script.cut_after_tokens and number >= script.cut_after_tokens:
                raise Gone
            self.pause(script.pace_s)
            self.engine.count("tokens")
            yield f"w{number} "

    def chat(self, script: Script, asked: dict) -> None:
        self.generate(script, asked, "chat.completion", chat=True)

    def complete(self, script: Script, asked: dict) -> None:
        self.generate(script, asked, "text_completion", chat=False)

    def generate(self, script: Script, asked: dict, kind: str, *, chat: bool) -> None:
        prompt = len(json.dumps(asked.get("messages") or asked.get("prompt") or "").split())
        common = {
            "id": f"scripted-{self.number}",
            "created": int(time.time()),
            "model": script.model,
        }
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or script.tokens
        reason = "length" if int(limit) < script.tokens else "stop"
        count, text = 0, ""
        if not asked.get("stream"):
            for word in self.tokens(script, asked):
                count, text = count + 1, text + word
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": reason, **said}
            body = {**common, "object": kind, "choices": [choice], "usage": usage(prompt, count)}
            self.send(200, body)
            return
        kind = f"{kind}.chunk" if chat else kind
        self.head(200, "text/event-stream", "Transfer-Encoding: chunked")
        if chat:
            self.frame({**common, "object": kind, "choices": [delta({"role": "assistant"})]})
        for word in self.tokens(script, asked):
            count += 1
            choice = delta({"content": word}) if chat else {"index": 0, "text": word}
            self.frame({**common, "object": kind, "choices": [choice]})
        last = delta({}) if chat else {"index": 0, "text": ""}
        self.frame({**common, "object": kind, "choices": [{**last, "finish_reason": reason}]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            body = {**common, "object": kind, "choices": [], "usage": usage(prompt, count)}
            self.frame(body)
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def embed(self, script: Script, asked: dict) -> None:
        texts = asked.get("input") or [""]
        texts = [texts] if isinstance(texts, str) else texts
        cards = [
            {"object": "embedding", "index": at, "embedding": [len(str(text)) / 100.0] * 8}
            for at, text in enumerate(texts)
        ]
        used = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        body = {"object": "list", "data": cards, "model": script.model, "usage": used}
        self.send(200, body)

    def head(self, status: int, kind: str, framing: str) -> None:
        ending = "Connection: close\r\n" if self.close else ""
        self.peer.sendall(
            f"HTTP/1.1 {status} {PHRASES.get(status, 'Scripted')}\r\n"
            f"Content-Type: {kind}\r\n{framing}\r\n{ending}\r\n".encode()
        )

    def send(self, status: int, body: object, kind: str = "application/json") -> None:
        if isinstance(body, str):
            kind = "text/plain" if kind == "application/json" else kind
            content = body.encode()
        else:
            content = json.dumps(body).encode()
        self.head(status, kind, f"Content-Length: {len(content)}")
        self.peer.sendall(content)

    def error(self, status: int, message: str, kind: str) -> None:
        self.send(status, {"error": {"message": message, "type": kind, "code": status}})

    def frame(self, body: dict) -> None:
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, content: bytes) -> None:
        self.peer.sendall(b"%x\r\n%b\r\n" % (len(content), content))


WORK = {
    "/v1/chat/completions": Connection.chat,
    "/v1/completions": Connection.complete,
    "/v1/embeddings": Connection.embed,
    **more.WORK,
}
PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


def usage(prompt: int, count: int) -> dict:
    total = prompt + count
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": total}


def delta(content: dict) -> dict:
    return {"index": 0, "delta": content, "finish_reason": None}


def say(line: str) -> None:
    os.write(2, line.encode() + b"\n")


def fork_grandchild(script: Script) -> None:
    """As a wrapper does that forks the real engine and forgets it."""
    if os.fork() != 0:
        return
    if script.fork_grandchild >= 2:
        os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(f"scripted: grandchild {os.getpid()}")
        while True:
            signal.pause()
    os._exit(0)


def serve(script: Script, host: str, port: int, began: float) -> None:
    engine = Engine(script, began)
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind((host, port))
    if script.listen_early:
        door.listen(1024)
        threading.Thread(target=load, args=(engine, door), daemon=True).start()
    else:
        load(engine, door)
    while True:
        peer = door.accept()[0]
        engine.count("connections")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(engine, peer).serve, daemon=True).start()


def load(engine: Engine, door: socket.socket) -> None:
    script = engine.script
    time.sleep(max(0.0, script.load_s - (time.monotonic() - engine.began)))
    if script.crash_at_start:
        say(script.crash_at_start)
        os._exit(3)
    while script.hang_in_load:
        time.sleep(60)
    engine.loaded = True
    if not script.listen_early:
        door.listen(1024)
    say("scripted: listening on http://{}:{}".format(*door.getsockname()))
    if "YARD_READY_FD" in os.environ:
        os.write(int(os.environ["YARD_READY_FD"]), b"ready\n")


def read_script(arguments: list[str]) -> tuple[Script, str, int]:
    """Flags over environment over defaults. A flag without a value is 1."""
    prefix = "SCRIPTED_"
    fields: dict[str, str] = {
        name[len(prefix) :].lower(): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }
    at = 0
    while at < len(arguments):
        name = arguments[at].removeprefix("--").replace("-", "_")
        at += 1
        if at < len(arguments) and not arguments[at].startswith("--"):
            fields[name] = arguments[at]
            at += 1
        else:
            fields[name] = "1"
    host, port = fields.pop("host", "127.0.0.1"), int(fields.pop("port", "0"))
    return Script().change(fields), host, port


def main() -> None:
    began = time.monotonic()
    script, host, port = read_script(sys.argv[1:])
    held = bytearray(script.memory_mib << 20)
    for page in range(0, len(held), 4096):
        held[page] = 1
    if script.fork_grandchild:
        fork_grandchild(script)
    # As most servers do: the first SIGTERM ends it, whatever runs.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.ignore_sigterm else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serve(script, host, port, began)


if __name__ == "__main__":
    main()
