"""Starts a real nats-server on a free port with its own store, kills it hard, and starts it again there.

A missing or too old server fails the test, it never skips it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from events.server import binary
from events.streams import MINIMUM_SERVER, version_of
from schemas.settings import NatsSettings
from tests.support.ports import free_port

_CONF = """
jetstream {{
  sync_interval: always
  max_file_store: {max_file_store}
  max_memory_store: 256MB
}}
max_payload: 1MB
{extra}
"""


class NatsServer:
    """One server process over possibly several lives. `url` stays the same for all of them."""

    def __init__(
        self,
        folder: Path,
        *,
        extra: str = "",
        max_file_store: str = "6GB",
        configuration: Path | None = None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.store = folder / "store"
        self._log = folder / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if configuration is None:
            configuration = folder / "nats.conf"
            configuration.write_text(_CONF.format(extra=extra, max_file_store=max_file_store))
        self.configuration = configuration

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def settings(self) -> NatsSettings:
        return NatsSettings(url=self.url)

    def start(self) -> None:
        """Returns when the server greets, at the latest after 10 s."""
        assert self._process is None, "already running"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(binary()), "-c", str(self.configuration), "-a", "127.0.0.1", "-p", str(self.port),
                 "-sd", str(self.store)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 10
        while True:
            assert self._process.poll() is None, f"nats-server ended: {self.log_text()[-2000:]}"
            with contextlib.suppress(OSError, ValueError):
                version = self._greeting()["version"]
                assert version_of(str(version)) >= MINIMUM_SERVER, (
                    f"nats-server {version} is too old"
                )
                return
            assert time.monotonic() < deadline, f"nats-server is silent: {self.log_text()[-2000:]}"
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A polite end; does nothing when it is not running."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def restart(self) -> None:
        """kill -9 and a new life on the same port and store."""
        self.kill()
        self.start()

    def reload(self) -> None:
        """SIGHUP: the server reads its configuration again."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGHUP)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
            self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        assert process is not None, "not running"
        process.send_signal(number)
        process.wait(10)

    def _greeting(self) -> dict[str, object]:
        with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            line = connection.makefile("rb").readline()
        greeting: dict[str, object] = json.loads(line.removeprefix(b"INFO "))
        return greeting


@contextlib.contextmanager
def nats_server(folder: Path) -> Iterator[NatsServer]:
    """A running server for one test."""
    with NatsServer(folder) as server:
        yield server
