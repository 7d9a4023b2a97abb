"""Lets people and programs of this machine ask about its cards, over a unix socket in the data folder.

One line of JSON is one ask, and each answer is one. It works without any network and decides nothing: the
desk does. Who asks is what the kernel says of the other end, never what the ask says.
"""

import asyncio
import contextlib
import logging
import os
import pwd
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from nodeagent import processes
from nodeagent.domain.asks import wrong_with
from nodeagent.keeper import boot_id
from schemas import codes
from schemas.card import ProcessRef
from schemas.cardasks import CardAnswer, CardAsk, ClaimStart, LeaseAcquire

log = logging.getLogger(__name__)

SOCKET: Final = "cards.sock"
NODE: Final = "node"
"""A file beside the socket that names the node whose agent answers there."""

MOST_BYTES: Final = 64 * 1024
"""Of an ask, its line's end included."""

MOST_ASKERS: Final = 256
"""Open connections; a program that forgets to close its own must not use up the agent's descriptors."""

FIRST_S: Final = 10.0
WRITE_S: Final = 10.0
LINGER_S: Final = 1.0


class Desk(Protocol):
    """What it needs of `nodeagent.desk.Desk`."""

    def ask(self, ask: CardAsk, *, by: str, process: ProcessRef | None = None) -> CardAnswer:
        """Decides and reserves in one step."""
        ...

    def answers(self, id: str, /) -> AsyncIterator[CardAnswer]:
        """What follows an answer `waiting`, up to the one that is final."""
        ...

    def gone(self, id: str, /) -> None:
        """The asker left: its place in line ends."""
        ...

    def durable(self) -> Awaitable[None]:
        """Done when everything decided so far would survive a crash."""
        ...


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The process at the other end, by the kernel's word."""

    pid: int
    uid: int
    name: str


class _Refused(Exception):
    """The ask is answered without the desk."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = CardAnswer(status="refused", code=code, sentence=sentence)


_decoder: Final = msgspec.json.Decoder(CardAsk)


def ask_of(line: bytes) -> CardAsk:
    """The ask a line holds. Raises ValueError with a sentence that says what is wrong with it."""
    try:
        ask = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"this is no ask about cards: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("an ask is one line of JSON, and this is none") from None
    problem = wrong_with(ask)
    if problem:
        raise ValueError(problem)
    return ask


class Door:
    """The socket of one node. `folder` is the agent's part of the data folder; times in seconds."""

    def __init__(
        self,
        desk: Desk,
        folder: Path,
        node: str,
        *,
        first_s: float = FIRST_S,
        write_s: float = WRITE_S,
    ) -> None:
        self._desk = desk
        self._folder = folder.absolute()
        self._node = node
        self._first_s = first_s
        self._write_s = write_s
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self) -> None:
        """Binds the socket, in place of a stale one. Only this user gets through the folder to it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self._folder, 0o700)
        whole = self._folder / f"{NODE}.new"
        whole.write_text(self._node, encoding="utf-8")
        whole.replace(self._folder / NODE)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=folder)
            # A socket's address holds 107 bytes; a data folder may lie deeper than that.
            listener.bind(f"/proc/self/fd/{folder}/{SOCKET}")
            os.chmod(SOCKET, 0o600, dir_fd=folder)
            listener.setblocking(False)
            self._server = await asyncio.start_unix_server(
                self._visited, sock=listener, limit=MOST_BYTES
            )
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(folder)

    async def close(self) -> None:
        """Nobody gets in any more. Whoever waits keeps the place in line: the next agent serves them."""
        self._closing = True
        if self._server is not None:
            self._server.close()
            self._server = None
            (self._folder / SOCKET).unlink(missing_ok=True)
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.create_task(self._serve(reader, writer), name="card ask")
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = _peer(writer)
            if len(self._visits) > MOST_ASKERS:
                raise _Refused(codes.CONFLICT, "too many others ask this node at the moment")
            if peer.uid not in (os.getuid(), 0):
                raise _Refused(codes.NOT_HERE, "only the agent's own user may ask here")
            asked = False
            while await self._converse(reader, writer, peer, asked):
                asked = True
        except _Refused as refused:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._write(writer, refused.answer)
                await _linger(reader, writer)
        except (ConnectionError, TimeoutError) as error:
            log.info("an asker was lost", extra={"problem": repr(error)})
        except Exception:
            if not self._closing:
                log.exception("an ask about cards failed")
                sentence = "the agent failed to decide this; its log has the reason"
                with contextlib.suppress(Exception):
                    await self._write(
                        writer, CardAnswer(status="refused", code="internal", sentence=sentence)
                    )
        finally:
            writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer, asked: bool
    ) -> bool:
        """One ask and its answers. False when the asker has no more; raises _Refused when it is bad."""
        line = await self._line(reader, asked)
        if line is None:
            return False
        try:
            ask = ask_of(line)
        except ValueError as error:
            raise _Refused(codes.INVALID, str(error)) from None
        process = _process_of(ask, peer)
        answer = self._desk.ask(ask, by=peer.name, process=process)
        waiting = answer.status == "waiting"
        id_ = answer.id or getattr(ask, "id", "")
        try:
            await self._desk.durable()
            await self._write(writer, answer)
            if waiting:
                await self._wait(id_, reader, writer)
                waiting = False
        finally:
            if waiting and not self._closing:
                self._desk.gone(id_)
        if answer.status == "refused":
            log.info("card ask refused", extra={"code": answer.code, "sentence": answer.sentence})
        return True

    async def _line(self, reader: asyncio.StreamReader, asked: bool) -> bytes | None:
        """None when no ask comes any more; one who has `asked` before need not say so."""
        try:
            async with asyncio.timeout(self._first_s):
                return await reader.readuntil(b"\n")
        except TimeoutError:
            if asked:
                return None
            raise _Refused(codes.INVALID, f"no ask came within {self._first_s:g} s") from None
        except asyncio.LimitOverrunError:
            raise _Refused(
                codes.INVALID, f"an ask has at most {MOST_BYTES // 1024} KiB, this one has more"
            ) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise _Refused(codes.INVALID, "the ask ends in the middle of its line") from None

    async def _wait(
        self, id_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes on what becomes of a waiter. Raises ConnectionResetError when the asker left."""
        answers = self._desk.answers(id_)
        leaving = asyncio.create_task(reader.read(1))
        coming: asyncio.Task[CardAnswer | None] | None = None
        try:
            while True:
                coming = asyncio.create_task(_next(answers))
                await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    if leaving.result():
                        raise _Refused(codes.INVALID, "this connection has an ask waiting already")
                    raise ConnectionResetError("the asker left while it waited")
                answer = coming.result()
                if answer is None:
                    return
                await self._desk.durable()
                await self._write(writer, answer)
                if answer.status != "waiting":
                    return
        finally:
            for task in (coming, leaving):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
            close = getattr(answers, "aclose", None)
            if close is not None:
                await close()

    async def _write(self, writer: asyncio.StreamWriter, answer: CardAnswer) -> None:
        """Raises TimeoutError when the asker does not read, ConnectionResetError when it left."""
        if writer.is_closing():  # uvloop takes a write on a lost connection for a fault of ours
            raise ConnectionResetError("the asker left")
        writer.write(msgspec.json.encode(answer) + b"\n")
        async with asyncio.timeout(self._write_s):
            await writer.drain()


async def _next(answers: AsyncIterator[CardAnswer]) -> CardAnswer | None:
    return await anext(answers, None)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads what is still on its way: closing on it would take the answer from the other end."""
    if writer.is_closing():
        return
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(MOST_BYTES):
                pass


def _peer(writer: asyncio.StreamWriter) -> Peer:
    raw = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", raw)
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return Peer(pid=pid, uid=uid, name=name)


def _process_of(ask: CardAsk, peer: Peer) -> ProcessRef | None:
    """The process whose life the lease or claim shares. Raises _Refused for one that may not be named."""
    if not isinstance(ask, LeaseAcquire | ClaimStart) or ask.process is None:
        return None
    pid = ask.process
    if isinstance(ask, LeaseAcquire) and pid != peer.pid:
        raise _Refused(
            codes.INVALID, f"a lease can share the life of its asker, {peer.pid}, not of {pid}"
        )
    found = processes.look(pid)
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        found = None
        owner = -1
    if found is None or not found.alive:
        raise _Refused(codes.NOT_FOUND, f"there is no process {pid}")
    if peer.uid not in (owner, 0):
        raise _Refused(codes.INVALID, f"process {pid} belongs to another user")
    return ProcessRef(pid=pid, started=found.start_time, boot=boot_id())
