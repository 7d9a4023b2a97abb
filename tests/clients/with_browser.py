"""Asks a call by `fetch` from a page in headless Chromium, which comes from another origin than the gateway.

The page is served here and asks here for its next call, so nothing of the browser is driven from outside: what a
page cannot do, this client cannot. It judges nothing.
"""

import asyncio
import base64
import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

from tests.clients.calls import Call, File
from tests.clients.judging import Reply
from tests.clients.yard import ClientYard

NAME: Final = "fetch in Chromium"
PAGE: Final = Path(__file__).with_name("page.html")
ANSWER_S: Final = 60.0
FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ENDS: Final = object()


class Pages:
    """Serves the page, of an origin of its own, to one browser; hands out calls one by one, and takes what the page tells of each."""

    def __init__(self) -> None:
        self.calls: Queue[Any] = Queue()
        self.told: Queue[dict[str, Any]] = Queue()
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Nothing: what was asked is in the transcript."""

            def do_GET(self) -> None:
                if self.path == "/":
                    self._send(200, PAGE.read_bytes(), "text/html")
                elif self.path == "/next":
                    call = pages.calls.get()
                    if call is ENDS:
                        # Its page is gone with its browser.
                        self.close_connection = True
                    else:
                        self._send(200, json.dumps(call).encode(), "application/json")
                else:
                    self._send(404, b"", "text/plain")

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                pages.told.put(json.loads(self.rfile.read(size)))
                self._send(200, b"", "text/plain")

            def _send(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.origin = f"http://localhost:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.calls.put(ENDS)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def spelled(call: Call, base: str, key: str) -> dict[str, Any]:
    """The call as the page makes it."""
    headers = {**call.headers, **({"Authorization": f"Bearer {key}"} if key else {})}
    made: dict[str, Any] = {"url": base + call.path, "method": call.method, "headers": headers}
    if call.json is not None:
        headers["Content-Type"] = "application/json"
        made["text"] = json.dumps(call.json)
    if call.file is not None:
        made["content"] = base64.b64encode(call.file.content).decode()
    if call.form:
        made["form"] = [_part(name, part) for name, part in call.form]
    return made


def _part(name: str, part: str | File) -> dict[str, str]:
    if isinstance(part, str):
        return {"name": name, "value": part}
    content = base64.b64encode(part.content).decode()
    return {"name": name, "file": part.name, "type": part.type, "content": content}


class Browser:
    """A page that is open. `ask` raises AssertionError with what the page was told when it was not let see an answer."""

    def __init__(self, yard: ClientYard, pages: Pages) -> None:
        self._yard = yard
        self._pages = pages

    async def ask(self, call: Call) -> Reply:
        told = await self.try_(call)
        if "failed" in told:
            raise AssertionError(f"{call.title}: the page was not let see it: {told['failed']}")
        return Reply(status=told["status"], headers=told["headers"], text=told["text"])

    async def try_(self, call: Call) -> dict[str, Any]:
        """What the page told: `status`, `headers` and `text`, or `failed`."""
        self._pages.calls.put(spelled(call, self._yard.base, self._yard.keys[call.key]))
        try:
            return await asyncio.to_thread(self._pages.told.get, timeout=ANSWER_S)
        except Empty:
            raise AssertionError(f"{call.title}: the page told nothing in {ANSWER_S} s") from None


def program() -> str:
    """Where Chromium is; raises AssertionError that says how to get it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "Chromium is not installed; on Debian: apt-get install chromium"
    return found


@asynccontextmanager
async def browser(yard: ClientYard, pages: Pages, profile: Path) -> AsyncIterator[Browser]:
    """Opens the page in a new profile."""
    process = await asyncio.create_subprocess_exec(
        program(),
        *FLAGS,
        f"--user-data-dir={profile}",
        # Without a port it would end once the page is there.
        "--remote-debugging-port=0",
        f"{pages.origin}/",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Browser(yard, pages)
    finally:
        process.terminate()
        await process.wait()
