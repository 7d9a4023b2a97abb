"""A fake of `vllm serve`: takes its command line and answers word for word as vLLM 0.32 was measured to.

    python -I -S vllm.py serve MODEL --served-model-name NAME --host H --port P [--enable-sleep-mode] …
    python -I -S vllm.py --version

Standard library only; it must not import the project: it stands for a stranger's program. What no command
line of vLLM's says (how long, how big, what goes wrong) comes from the environment, see `Script`. Adapters
are vllm_lora.py's affair. With --enable-lora every answer begins with who gives it: `[base] w0 w1 …`, or the
marker of the adapter (tests/support/lora.py). Its own doors, which need no key:

    GET  /fake/counters   requests, sleeps, connections
    GET  /fake/lora       loads, unloads, names evicted in use, who answered how often
    POST /fake/fault      a fault from now on: {"fault", "adapter": "a*", "times": 1, "status", "body"}
    POST /fake/clear      no faults any more
    POST /fake/script     changes `Script`: {"lora_load_s": 2}
    POST /fake/forget     forgets one adapter {"name"} or all, as after a restart in place
    POST /fake/register   lists an adapter that nobody loaded: {"name", "path"}
"""

import json
import os
import select
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

# Run with -I: the folder of the program is not where modules are looked for.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
# pyright: reportMissingImports=false
import vllm_args
import vllm_lora
import vllm_words

KEYED = ("/v1", "/v2", "/inference", "/cohere")
"""Below these the key is asked for; everything else answers anybody."""

FAULTS = """
sleep-hangs        POST /sleep gets no answer
sleep-never-ends   it answers 200 and never says that it sleeps
sleep-dies         it answers 200 and exits with 1
sleep-fails        it answers 500
sleep-keeps        it sleeps and gives no memory back
wake-hangs         POST /wake_up gets no answer
wake-never-ends    it answers 200 and goes on saying that it sleeps
wake-fails         it answers 500
wake-dies          it answers 200 and exits with 1
first-hangs        after waking, no completion is answered
first-fails        after waking, completions are answered 500
"""
FAULTS += vllm_words.FAULTS


class Script:
    """What to do, each from FAKE_VLLM_<NAME>. Times are seconds, memory MiB.

    load_s       before it listens
    tokens       of an answer, unless the request asks for fewer
    pace_s       between two tokens
    lag_s        between the answer to /sleep or /wake_up and its being done
    weights_mib  on the device while awake; in RAM (really taken) while asleep
    kv_mib       on the device while awake
    context_mib  on the device as long as it lives
    dialect      python, old or rust: how it answers about adapters, see vllm_lora.py
    lora_load_s  how long it reads an adapter
    unload_s     how long an unload takes
    processes    front ends, each with a list of adapters of its own; connections go to them in turn
    lora_log     a file it appends loads, unloads and requests to, a JSON line each
    faults       names of FAULTS, separated by commas
    The device is that of tests/support/fake_nvml.py, if FAKE_NVML names its file, and there the cards of
    CUDA_VISIBLE_DEVICES.
    """

    load_s = 0.0
    tokens = 5
    pace_s = 0.0
    lag_s = 0.0
    weights_mib = 0
    kv_mib = 0
    context_mib = 0
    dialect = "python"
    lora_load_s = 0.0
    unload_s = 0.0
    processes = 1
    lora_log = ""
    faults = ""

    def __init__(self) -> None:
        known = {line.split()[0] for line in FAULTS.strip().splitlines() if line}
        for name in [name for name in vars(Script) if not name.startswith("_")]:
            told = os.environ.get(f"FAKE_VLLM_{name.upper()}")
            if told is not None:
                setattr(self, name, type(getattr(Script, name))(told))
        if os.environ.get("VLLM_USE_RUST_FRONTEND") == "1":
            self.dialect = "rust"
        assert self.dialect in vllm_words.VERSIONS, self.dialect
        names = list(filter(None, self.faults.split(",")))
        self.wrong = vllm_words.Faults(names, known)


class Gone(Exception):
    """The client's connection is closed, or the request was aborted."""


class Device:
    """What it has on its card and in RAM, told to whoever plays the driver."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.held = bytearray()

    def awake(self) -> None:
        self.held = bytearray()
        script = self.script
        self.tell(script.weights_mib + script.kv_mib + script.context_mib)

    def asleep(self) -> None:
        self.held = bytearray(self.script.weights_mib << 20)
        for page in range(0, len(self.held), 4096):
            self.held[page] = 1
        if "sleep-keeps" not in self.script.wrong:
            self.tell(self.script.context_mib)

    def tell(self, mib: int) -> None:
        state = os.environ.get("FAKE_NVML")
        if not state:
            return
        sys.path.append(os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))
        import fake_nvml  # pyright: ignore[reportMissingImports] - run from elsewhere

        for device in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
            fake_nvml.use(state, device, os.getpid(), mib << 20)


class Engine:
    """Sleep, requests and counters of the one engine behind all connections."""

    def __init__(self, script: Script, args: dict) -> None:
        self.script = script
        self.model = args["model"]
        self.names = [args.get("served-model-name") or args["model"]]
        self.may_sleep = "enable-sleep-mode" in args
        self.device = Device(script)
        self.change = threading.Condition()
        self.lora = vllm_lora.Adapters(self.change, script, args, script.wrong, self.names)
        self.sleeping = False
        self.going = False
        self.woken = False
        self.cuts = 0
        self.running = 0
        self.waiting = 0
        names = ("completions", "asked_asleep", "finished", "aborted", "tokens", "sleeps", "wakes")
        names += ("connections", "metrics_asleep")
        self.counters: dict[str, int] = dict.fromkeys(names, 0)

    def count(self, name: str) -> None:
        with self.change:
            self.counters[name] += 1

    def sleep(self, mode: str) -> None:
        """Lets running requests finish (`wait`) or cuts them, then sleeps, `lag_s` later."""
        with self.change:
            self.going = True
            if mode == "abort":
                self.cuts += 1
            while self.running:
                self.change.wait()
        self.later(self.fall_asleep, "sleep")

    def fall_asleep(self) -> None:
        with self.change:
            self.counters["sleeps"] += 1
            self.device.asleep()
            self.sleeping = True

    def wake(self) -> None:
        self.later(self.rise, "wake")

    def rise(self) -> None:
        with self.change:
            self.counters["wakes"] += 1
            self.device.awake()
            self.sleeping, self.going, self.woken = False, False, True
            self.change.notify_all()

    def later(self, then, what: str) -> None:
        wrong = self.script.wrong
        if f"{what}-dies" in wrong:
            threading.Timer(0.05, os._exit, (1,)).start()
        elif f"{what}-never-ends" not in wrong:
            if self.script.lag_s:
                threading.Timer(self.script.lag_s, then).start()
            else:
                then()

    def metrics(self) -> str:
        label = f'{{engine="0",model_name="{self.names[0]}"}}'
        return (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{label} {float(self.running)}\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{label} {float(self.waiting)}\n"
            "# TYPE vllm:generation_tokens counter\n"
            f"vllm:generation_tokens_total{label} {float(self.counters['tokens'])}\n"
        ) + self.lora.metrics()

    def cards(self, process: int) -> list[dict]:
        """What /v1/models lists: a base card for each served name, and behind them the adapters."""
        return [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self.model,
                "parent": None,
                "max_model_len": 2048,
                "permission": [],
            }
            for name in self.names
        ] + self.lora.cards(process)


class Connection(BaseHTTPRequestHandler):
    """One client's requests, in order."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    disable_nagle_algorithm = True
    engine: Engine
    key = ""
    development = False

    def setup(self) -> None:
        engine = self.engine
        engine.count("connections")
        self.process = engine.counters["connections"] % engine.script.processes
        super().setup()

    def log_message(self, format, *args) -> None:
        return

    def do_GET(self) -> None:
        self.route("GET")

    def do_POST(self) -> None:
        self.route("POST")

    def route(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        keyed = url.path.startswith(KEYED)
        if keyed and self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send(401, {"error": "Unauthorized"})
            return
        work = ROUTES.get((method, url.path))
        if work is None and self.development:
            work = DEVELOPMENT.get((method, url.path))
        if work is None:
            self.send(404, {"detail": "Not Found"})
            return
        try:
            work(self)
        except (Gone, OSError):
            self.close_connection = True

    # Routes

    def health(self) -> None:
        self.send(200, "")

    def models(self) -> None:
        wrong = self.engine.script.wrong
        if wrong.hit("list-hangs"):
            self.silence(lambda: True)
        if wrong.hit("list-500"):
            self.error(500, "InternalServerError", "EngineCore encountered an issue.")
        elif wrong.hit("list-garbage"):
            self.send(200, '{"object": "list", "data": [{"id":', "application/json")
        else:
            self.send(200, {"object": "list", "data": self.engine.cards(self.process)})

    def load_adapter(self) -> None:
        self.about_adapter(self.engine.lora.load)

    def unload_adapter(self) -> None:
        self.about_adapter(self.engine.lora.unload)

    def about_adapter(self, work) -> None:
        """An answer of vllm_lora's; a body that is no JSON is refused as FastAPI's handler does."""
        if not self.engine.lora.routes:
            self.send(*vllm_lora.OFF)
            return
        kind = self.headers.get("Content-Type", "").lower().split(";", 1)[0]
        if kind != "application/json":
            text = "['Unsupported Media Type: Only 'application/json' is allowed']"
            self.error(400, "Bad Request", text)
            return
        body = self.json()
        if body is None:
            return
        answer = work(self.process, body)
        if answer is vllm_lora.HANGS:
            self.silence(lambda: True)
        status, content = answer
        plain = isinstance(content, str)
        kind = "text/plain; charset=utf-8" if plain else "application/json"
        self.send(status, content, kind)

    def lora(self) -> None:
        self.send(200, self.engine.lora.told())

    def fault(self) -> None:
        self.engine.script.wrong.add(self.json() or {})
        self.send(200, {})

    def clear(self) -> None:
        self.engine.script.wrong.clear()
        self.send(200, {})

    def script(self) -> None:
        for name, value in (self.json() or {}).items():
            assert name in vars(Script), name
            setattr(self.engine.script, name, type(getattr(Script, name))(value))
        self.send(200, {})

    def forget(self) -> None:
        self.engine.lora.forget((self.json() or {}).get("name"))
        self.send(200, {})

    def register(self) -> None:
        body = self.json() or {}
        self.engine.lora.register(body["name"], body["path"])
        self.send(200, {})

    def metrics(self) -> None:
        if self.engine.going:
            self.engine.count("metrics_asleep")
        self.send(200, self.engine.metrics(), "text/plain; version=0.0.4; charset=utf-8")

    def counters(self) -> None:
        engine = self.engine
        told = {"sleeping": engine.sleeping, "pid": os.getpid(), "argv": sys.argv[1:]}
        self.send(200, {**engine.counters, **told, "running": engine.running})

    def sleep(self) -> None:
        engine = self.engine
        level = int(self.query.get("level", "1"))
        if "sleep-hangs" in engine.script.wrong:
            self.silence(lambda: True)
        if not engine.may_sleep or "sleep-fails" in engine.script.wrong:
            # An assertion in the engine: `Sleep mode is not enabled in the model config`.
            self.send(500, "Internal Server Error", "text/plain; charset=utf-8")
            return
        engine.sleep(self.query.get("mode", "abort"))
        self.send(200, {"status": "sleeping", "level": level})

    def wake_up(self) -> None:
        if "wake-hangs" in self.engine.script.wrong:
            self.silence(lambda: True)
        if "wake-fails" in self.engine.script.wrong:
            self.send(500, "Internal Server Error", "text/plain; charset=utf-8")
            return
        self.engine.wake()
        self.send(200, {"status": "awake", "tags": None})

    def is_sleeping(self) -> None:
        self.send(200, {"is_sleeping": self.engine.sleeping})

    def chat(self) -> None:
        self.generate("chat.completion", chat=True)

    def complete(self) -> None:
        self.generate("text_completion", chat=False)

    # Answers

    def generate(self, kind: str, *, chat: bool) -> None:
        engine = self.engine
        asked = self.json()
        if asked is None:
            return
        try:
            named = engine.lora.find(self.process, asked.get("model"))
        except vllm_words.Refused as refused:
            self.send(refused.status, vllm_words.envelope(engine.script.dialect, refused))
            return
        engine.count("completions")
        if engine.going or engine.sleeping:
            engine.count("asked_asleep")
            self.silence(lambda: engine.going or engine.sleeping)
        if engine.woken and "first-hangs" in engine.script.wrong:
            self.silence(lambda: True)
        if engine.woken and "first-fails" in engine.script.wrong:
            self.error(500, "InternalServerError", "EngineCore encountered an issue.")
            return
        self.mark = "[base] " if engine.lora.on else ""
        marker = ""
        if named is not None:
            try:
                marker = engine.lora.begin(named)
            except vllm_words.Refused as refused:
                self.send(refused.status, vllm_words.envelope(engine.script.dialect, refused))
                return
            self.mark = f"[{marker}] "
        with engine.change:
            engine.running += 1
        try:
            self.answer(asked, kind, chat=chat)
            engine.count("finished")
        except (Gone, OSError):
            engine.count("aborted")
            raise Gone from None
        finally:
            with engine.change:
                engine.running -= 1
                engine.change.notify_all()
            if named is not None:
                engine.lora.end(named, marker)

    def answer(self, asked: dict, kind: str, *, chat: bool) -> None:
        script = self.engine.script
        wanted = asked.get("max_completion_tokens") or asked.get("max_tokens") or script.tokens
        count = min(int(wanted), script.tokens)
        reason = "length" if count < script.tokens else "stop"
        common = {"id": "cmpl-fake", "created": int(time.time()), "model": asked["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
        if not asked.get("stream"):
            text = self.mark + "".join(self.tokens(count))
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": reason, **said}
            self.send(200, {**common, "object": kind, "choices": [choice], "usage": usage})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        kind = f"{kind}.chunk" if chat else kind
        for number, word in enumerate(self.tokens(count)):
            word = word if number else self.mark + word
            said = {"delta": {"content": word}} if chat else {"text": word}
            choice = {"index": 0, "finish_reason": None, **said}
            self.frame({**common, "object": kind, "choices": [choice]})
        said = {"delta": {}} if chat else {"text": ""}
        last = {"index": 0, "finish_reason": reason, **said}
        self.frame({**common, "object": kind, "choices": [last]})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def tokens(self, count: int):
        cuts = self.engine.cuts
        for number in range(count):
            time.sleep(self.engine.script.pace_s)
            if self.engine.cuts != cuts:
                raise Gone
            self.engine.count("tokens")
            yield f"w{number} "

    def silence(self, while_) -> None:
        """No answer at all as long as `while_` holds; ends early when the client goes away."""
        self.engine.waiting += 1
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        try:
            while while_():
                if poll.poll(20):
                    raise Gone
        finally:
            self.engine.waiting -= 1

    def send(self, status: int, body: object, kind: str = "application/json") -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        # One write: a head on its own would be a packet, and a wake-up of the other side, of its own.
        self._headers_buffer += [b"\r\n", content]
        self.flush_headers()

    def error(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        refused = vllm_words.Refused(status, kind, message, param)
        self.send(status, vllm_words.envelope(self.engine.script.dialect, refused))

    def json(self) -> dict | None:
        """The body of the request; None: it is no JSON object, and that was answered."""
        try:
            body = json.loads(self.body)
        except ValueError:
            body = None
        if isinstance(body, dict):
            return body
        self.error(400, "BadRequestError", "the body is not JSON")
        return None

    def frame(self, body: dict) -> None:
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()


ROUTES = {
    ("GET", "/health"): Connection.health,
    ("GET", "/metrics"): Connection.metrics,
    ("GET", "/v1/models"): Connection.models,
    ("POST", "/v1/chat/completions"): Connection.chat,
    ("POST", "/v1/completions"): Connection.complete,
    ("POST", "/v1/load_lora_adapter"): Connection.load_adapter,
    ("POST", "/v1/unload_lora_adapter"): Connection.unload_adapter,
    ("GET", "/fake/counters"): Connection.counters,
    ("GET", "/fake/lora"): Connection.lora,
    ("POST", "/fake/fault"): Connection.fault,
    ("POST", "/fake/clear"): Connection.clear,
    ("POST", "/fake/script"): Connection.script,
    ("POST", "/fake/forget"): Connection.forget,
    ("POST", "/fake/register"): Connection.register,
}

DEVELOPMENT = {
    ("POST", "/sleep"): Connection.sleep,
    ("POST", "/wake_up"): Connection.wake_up,
    ("GET", "/is_sleeping"): Connection.is_sleeping,
}
"""These exist with VLLM_SERVER_DEV_MODE=1 only."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        # HTTPServer looks up this machine's name here, which may take seconds.
        socketserver.TCPServer.server_bind(self)


def main() -> None:
    if sys.argv[1:] in (["--version"], ["-v"]):
        print(vllm_words.VERSIONS[Script().dialect])  # noqa: T201
        return
    if sys.argv[1:2] != ["serve"]:
        vllm_args.usage_error("the command is `serve`")
    args = vllm_args.read_args(sys.argv[2:])
    script = Script()
    wrong = vllm_args.wrong_arguments(args)
    if wrong:
        os.write(2, f"ValueError: {wrong}\n".encode())
        raise SystemExit(1)
    engine = Engine(script, args)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    time.sleep(script.load_s)
    Connection.engine = engine
    Connection.key = os.environ.get("VLLM_API_KEY", "")
    Connection.development = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    engine.device.awake()
    address = (args.get("host", "127.0.0.1"), int(args.get("port", "8000")))
    server = Server(address, Connection)
    os.write(2, b"INFO: Application startup complete.\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
