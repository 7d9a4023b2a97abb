"""Runs one service: flags, settings, log, signals and exit code, the same for all of them.

The service itself is a coroutine that gets a `Service` and returns when `stopping` is set.
"""

import argparse
import asyncio
import datetime as dt
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop

from events.secrets import SecretMissing, nats_password_path, read_secret
from events.server import ServerMissing
from events.settings import SettingsError, load
from schemas.settings import Settings

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 64
EXIT_DEPOSED: Final = 3
"""Another agent runs this node. Starting again would depose that one: do not."""
EXIT_LOCKED: Final = 4
"""Another agent works in this data folder."""

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a service to end. Whoever starts one may block them for it: they then wait until it hears them."""

# Attributes every LogRecord has; whatever else it carries was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FatalError(Exception):
    """The service cannot go on; the sentence is for the operator, no traceback is printed."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message and the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


@dataclass(slots=True)
class Service:
    """What a service gets. `signal` is the one that ended it (SIGTERM and SIGINT mean different things)."""

    role: str
    id: str
    data: Path
    settings: Settings
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    signal: int | None = None

    def nats_user(self, default: str) -> str:
        return self.settings.nats.user or default

    def nats_password(self, user: str) -> str:
        """Raises SecretMissing."""
        named = self.settings.nats.password_file
        return read_secret(Path(named) if named else nats_password_path(self.data, user))


Main = Callable[[Service], Awaitable[None]]


def default_data() -> Path:
    """`~/.local/share/modelyard`, or XDG_DATA_HOME's."""
    home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(home) if home else Path.home() / ".local" / "share") / "modelyard"


def start_log(level: str) -> None:
    """JSON lines on stderr, for this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # httpx (and httpx2, huggingface_hub's own) logs every request at INFO, a name and password in its address
    # too; nats its own reconnects through our callbacks already.
    for noisy in ("httpx", "httpx2", "httpcore", "nats"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _arguments(role: str, argv: Sequence[str], numbers: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"yard-{role}",
        allow_abbrev=False,
        description=f"Runs the {role} of a yard until SIGTERM or SIGINT.",
        epilog="All settings and their variables are in docs/configuration.md.",
    )
    parser.add_argument("--config", type=Path, help="YAML file of settings (default: none)")
    parser.add_argument(
        "--data", type=Path, help=f"data folder of the yard (default: {default_data()})"
    )
    parser.add_argument("--nats", metavar="URL", help="NATS server; the setting nats.url")
    if hasattr(getattr(Settings(), role, None), "listen"):
        parser.add_argument(
            "--listen", metavar="HOST:PORT", help=f"where to serve; the setting {role}.listen"
        )
    parser.add_argument("--id", metavar="NAME", help="name of this instance (default: the host's)")
    for name, what in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    return parser.parse_args(argv)


def run_service(
    role: str,
    main: Main,
    argv: Sequence[str] | None = None,
    *,
    numbers: Mapping[str, str] | None = None,
) -> int:
    """Runs `main` until SIGTERM, SIGINT or its own end; returns the exit code.

    Default id: the host name. `--listen` sets the section of the role where it has that setting, and so does a
    flag for each of `numbers`, by name what `--help` says of it.
    """
    flags = numbers or {}
    given = _arguments(role, sys.argv[1:] if argv is None else argv, flags)
    section: dict[str, Any] = {name: getattr(given, name) for name in flags}
    if getattr(given, "listen", None) is not None:
        section["listen"] = given.listen
    try:
        settings = load(given.config, flags={"nats": {"url": given.nats}, role: section})
        logging.getLogger().setLevel(settings.yard.log_level)
    except (SettingsError, ValueError) as error:
        sys.stderr.write(f"yard-{role}: {error}\n")
        return EXIT_USAGE
    start_log(settings.yard.log_level)
    service = Service(
        role=role,
        id=given.id or socket.gethostname(),
        data=(given.data or default_data()).expanduser().absolute(),
        settings=settings,
    )
    log = logging.getLogger(role)

    async def supervised() -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            service.signal = number
            service.stopping.set()

        for number in STOPS:
            loop.add_signal_handler(number, stop, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        await main(service)

    code = 0
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(supervised())
    except* (FatalError, SecretMissing, ServerMissing, SettingsError) as group:
        for error in _leaves(group):
            log.error("cannot go on: %s", error)
        code = EXIT_FAILED
    except* Exception as group:
        for error in _leaves(group):
            log.critical("a task failed: %r", error, exc_info=error)
        code = EXIT_FAILED
    return code


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for member in group.exceptions:
        found += _leaves(member) if isinstance(member, BaseExceptionGroup) else [member]
    return found
