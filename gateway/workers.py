"""Runs several worker processes of one gateway on one listening socket: starts, restarts and succeeds them.

It serves nothing and knows no model. To everybody else each worker is a gateway of its own; what they share is the
socket, which this process binds and never accepts from.

    start     each worker is told its number, the socket and a pipe on which it says that it serves
    end of one  another is started after a pause; when none ever served, whatever is wrong is wrong with all: end
    SIGHUP    new workers on the same socket; once all of them serve, the old ones finish what they have. When one
              of the new ones does not come to serve, they end and the old ones stay
    SIGTERM   all finish what they have
    told      whoever was told to end and has not by the end of its drain and a grace is killed: it hangs
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

from events.service import FatalError, Service
from gateway.listening import bound_socket, inherited_socket, socket_of

log = logging.getLogger("gateway.workers")

NUMBER: Final = "YARD_WORKER_NUMBER"
SOCKET: Final = "YARD_WORKER_SOCKET"
READY: Final = "YARD_WORKER_READY"
PARENT: Final = "YARD_WORKER_PARENT"
OF: Final = "YARD_WORKER_OF"

RESTART_DELAYS_S: Final = (0.2, 1.0, 5.0)
STEADY_S: Final = 60.0
"""A worker that ran this long is started again with the first delay."""

SUCCEED_S: Final = 120.0
"""So long new workers have to come to serve."""

GRACE_S: Final = 15.0
"""So long after the end of its drain a worker may still write its snapshot, its accounts and its last beacon."""

_PR_SET_PDEATHSIG: Final = 1


class AsWorker:
    """What a worker process was given by its parent, and how it says that it serves."""

    def __init__(self, number: int, of: str, sock: socket.socket, ready: int) -> None:
        self.number = number
        self.of = of
        """The id of the gateway that it is a part of."""
        self.sock = sock
        self._ready = ready

    def serves(self) -> None:
        """Tells the parent, once, that requests are answered here now."""
        with contextlib.suppress(OSError):
            os.write(self._ready, b"1")
        os.close(self._ready)


def as_worker(environment: MutableMapping[str, str]) -> AsWorker | None:
    """What this process was given, if it is a worker. It ends with its parent: nobody would end it otherwise, and
    its port would stay taken. Raises FatalError."""
    number = environment.pop(NUMBER, None)
    if number is None:
        return None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if environment.pop(PARENT) != str(os.getppid()):
        raise FatalError("the gateway this worker belongs to is gone")
    ready = int(environment.pop(READY))
    os.set_inheritable(ready, False)
    return AsWorker(
        int(number), environment.pop(OF), socket_of(int(environment.pop(SOCKET))), ready
    )


@dataclass(slots=True, eq=False)
class Worker:
    """One process. `serves` is True once it does, False when it ended before."""

    number: int
    process: asyncio.subprocess.Process
    serves: "asyncio.Future[bool]"
    began_s: float
    deadline: asyncio.TimerHandle | None = None
    """When it is killed; None as long as nobody told it to end."""


class Crew:
    """The workers of one gateway. `argv` starts one, given its id behind; `end_s` it has, once it is told to end."""

    def __init__(
        self,
        id: str,
        count: int,
        sock: socket.socket,
        argv: Sequence[str],
        stopping: asyncio.Event,
        *,
        end_s: float,
    ) -> None:
        self._id = id
        self._count = count
        self._sock = sock
        self._argv = argv
        self._stopping = stopping
        self._end_s = end_s
        self._loop = asyncio.get_running_loop()
        self._succession = asyncio.Event()
        self._changed = asyncio.Event()
        self._current: set[Worker] = set()
        self._all: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._any_served = False
        self._failed: str | None = None

    def succeed(self) -> None:
        """New workers take over."""
        self._succession.set()
        self._changed.set()

    async def run(self) -> None:
        """Runs until `stopping` is set, then until the last worker has ended. Raises FatalError."""
        stopped = asyncio.create_task(self._wake_when_stopping())
        try:
            for _ in range(self._count):
                self._current.add(await self._start())
            while not self._stopping.is_set() and self._failed is None:
                if self._succession.is_set():
                    self._succession.clear()
                    await self._succeed()
                    continue
                await self._changed.wait()
                self._changed.clear()
        finally:
            self._stopping.set()
            # Connections that nobody will serve are refused at once, not kept until the last worker has ended.
            self._sock.close()
            for worker in self._all:
                self._end(worker, signal.SIGTERM)
            while self._tasks:
                await asyncio.wait(self._tasks)
            await stopped
        if self._failed is not None:
            raise FatalError(self._failed)

    async def _wake_when_stopping(self) -> None:
        await self._stopping.wait()
        self._changed.set()

    async def _succeed(self) -> None:
        """All new workers, or none: a new program that cannot serve must not end one that does."""
        new: list[Worker] = []
        try:
            while len(new) < self._count:
                new.append(await self._start())
        except OSError as problem:
            log.error("a worker cannot be started", extra={"why": str(problem)})
        deadline_s = self._loop.time() + SUCCEED_S
        while not self._stopping.is_set() and not all(w.serves.done() for w in new):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        if len(new) == self._count and all(map(self._serves, new)):
            old, self._current = self._current, set(new)
            for worker in old:
                self._end(worker, signal.SIGHUP)
            log.info("workers succeeded", extra={"workers": sorted(w.number for w in new)})
            return
        for worker in new:
            self._end(worker, signal.SIGTERM)
        if not self._stopping.is_set():
            log.error("the new workers do not serve; the old ones stay")

    def _serves(self, worker: Worker) -> bool:
        """It came to serve, and has not ended since."""
        return worker in self._all and worker.serves.done() and worker.serves.result()

    async def _start(self) -> Worker:
        """The id is one that nobody has who may still run: of two with one id neither could be believed."""
        taken = {w.number for w in self._all}
        number = next(n for n in range(1, 2 * len(taken) + 2) if n not in taken)
        reading, writing = os.pipe()
        given = {
            NUMBER: str(number),
            OF: self._id,
            SOCKET: str(self._sock.fileno()),
            READY: str(writing),
            PARENT: str(os.getpid()),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *(*self._argv, "--id", f"{self._id}.{number}"),
                env={**os.environ, **given},
                pass_fds=(self._sock.fileno(), writing),
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        worker = Worker(number, process, self._loop.create_future(), self._loop.time())
        self._all.add(worker)
        self._loop.add_reader(reading, self._heard, worker, reading)
        task = asyncio.create_task(self._watch(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._stopping.is_set():
            self._end(
                worker, signal.SIGTERM
            )  # It was asked for while nothing was there to be told.
        return worker

    def _heard(self, worker: Worker, reading: int) -> None:
        """The pipe of a worker holds its word, or was closed without one."""
        serves = os.read(reading, 1) == b"1"
        self._loop.remove_reader(reading)
        os.close(reading)
        self._any_served = self._any_served or serves
        if not worker.serves.done():
            worker.serves.set_result(serves)
        self._changed.set()

    async def _watch(self, worker: Worker) -> None:
        status = await worker.process.wait()
        self._all.discard(worker)
        if worker.deadline is not None:
            worker.deadline.cancel()
        if not worker.serves.done():
            worker.serves.set_result(False)
        self._changed.set()
        current = self._current
        if self._stopping.is_set() or worker not in current:
            return
        current.discard(worker)
        log.error("a worker ended", extra={"worker": worker.number, "status": status})
        if not self._any_served:
            self._failed = f"no worker came to serve (the first ended with {status})"
            return
        if self._loop.time() - worker.began_s > STEADY_S:
            self._failures = 0
        delay_s = RESTART_DELAYS_S[min(self._failures, len(RESTART_DELAYS_S) - 1)]
        self._failures += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        if self._stopping.is_set() or current is not self._current:
            return  # Successors are all there shall be.
        try:
            again = await self._start()
        except OSError as problem:
            self._failed = f"a worker cannot be started: {problem}"
            self._changed.set()
            return
        if current is self._current:
            current.add(again)
        else:
            self._end(again, signal.SIGTERM)

    def _end(self, worker: Worker, number: int) -> None:
        """Tells it to finish what it has; told again it has no more time than it had."""
        if worker.deadline is None:
            worker.deadline = self._loop.call_later(self._end_s, self._kill, worker)
        _signal(worker, number)

    def _kill(self, worker: Worker) -> None:
        # Stopped or stuck: nothing else would end it, and all others would wait for it for ever.
        log.error(
            "a worker did not end in time and is killed",
            extra={"worker": worker.number, "pid": worker.process.pid, "after_s": self._end_s},
        )
        _signal(worker, signal.SIGKILL)


def _signal(worker: Worker, number: int) -> None:
    if worker.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(number)


async def run_crew(service: Service, arguments: Sequence[str]) -> None:
    """The gateway as several workers; `arguments` are those of this process. Raises FatalError."""
    settings = service.settings.gateway
    sock = inherited_socket(os.environ) or bound_socket(settings.listen)
    loop = asyncio.get_running_loop()
    argv = [sys.executable, "-m", "gateway", *arguments, "--workers", "0"]
    try:
        crew = Crew(
            service.id,
            settings.workers,
            sock,
            argv,
            service.stopping,
            end_s=settings.drain_s + GRACE_S,
        )
        loop.add_signal_handler(signal.SIGHUP, crew.succeed)
        log.info("workers start", extra={"gateway": service.id, "count": settings.workers})
        await crew.run()
    finally:
        sock.close()
