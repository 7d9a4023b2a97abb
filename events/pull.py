"""Reads one stream through one standing pull request: no message lost, none out of order, memory bounded.

It hands over raw messages and says where continuity ended; it decodes nothing. nats-py's own fetch and
ordered consumer are not used: the one withholds messages, the other loses them.
"""

import asyncio
import contextlib
import logging
import random
import re
import secrets
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import Struct

from events.codec import StoredMessage
from events.connection import Connection, Handle
from events.delivery import DESCRIPTION, Message
from events.envelope import SOURCE, TRACEPARENT, origin_of, traceparent_of
from events.log import Misconfigured
from events.retry import ServerError, pause_s
from events.transport import Denied, TransportError

log = logging.getLogger(__name__)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_NS: Final = 1_000_000_000
_SOURCED: Final = SOURCE.encode()
_TRACED: Final = TRACEPARENT.encode()
_UNNAMED: Final = re.compile(r"[^A-Za-z0-9_-]")


class PullTimes(Struct, frozen=True, kw_only=True):
    """The clockwork of a standing pull; tests make it small.

    A consumer nobody asks is kept by the server for `inactive_threshold_s`.
    """

    batch: int = 500
    expires_s: float = 30.0
    heartbeat_s: float = 1.0
    inactive_threshold_s: float = 300.0
    request_timeout_s: float = 2.0


DEFAULT_TIMES: Final = PullTimes()


class Lost(Exception):
    """Continuity ended: open again behind the last message taken."""


class _Created(Struct, frozen=True, kw_only=True):
    num_pending: int = 0
    error: ServerError | None = None


class StandingPull:
    """One consumer at a time. The owner calls `open`, then `take` until it raises Lost, then `open` again."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        filters: tuple[str, ...],
        times: PullTimes = DEFAULT_TIMES,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = filters
        self._times = times
        self._jitter = jitter
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._stop_listening = connection.on_change(self._wake.set)
        self._inbox = ""
        self._handle: Handle | None = None
        self._consumer = ""
        self._expected_consumer_seq = 1
        self._credit = 0
        self._heard_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._ended: str | None = None
        self._generation = -1
        self._failures = 0
        self.reopened = 0

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def backlog(self) -> int:
        """Messages received and not taken; never more than two batches."""
        return len(self._messages)

    async def open(self, start_seq: int | None) -> int:
        """Makes the consumer: from `start_seq`, or from the last message per subject for None.

        Returns how many messages are waiting for it. Raises Lost when that failed (`pause` before the
        next), Misconfigured when this user may not read that.
        """
        await self._discard()
        generation = self._connection.generation
        self.reopened += 1
        try:
            pending = await self._create(start_seq)
        except Denied as error:
            await self._discard()
            raise Misconfigured(str(error)) from error
        except (TransportError, Lost) as error:
            await self._discard()
            raise Lost(str(error)) from error
        self._failures = 0
        self._generation = generation
        return pending

    async def take(self, limit: int) -> tuple[list[tuple[StoredMessage, int]], bool]:
        """Waits for messages; each comes with how many are still pending behind it at the server.

        Returns at most `limit`, and whether the connection still stands. Raises Lost when continuity
        ended and everything delivered before was taken.
        """
        while True:
            if self._messages:
                if self._ended is None and self._connection.connected:
                    await self._refill(self._credit)
                # Nothing is awaited behind this line: whoever is cancelled has taken nothing.
                taken = self._drain(limit)
                if taken:
                    return taken, True
            if not self._connection.connected:
                return [], False
            if self._ended is not None or self._generation != self._connection.generation:
                raise Lost(self._ended or "reconnected")
            await self._refill(self._credit + len(self._messages))
            self._wake.clear()
            if self._messages:
                continue
            silence_s = 2.5 * self._times.heartbeat_s
            left = self._heard_at + silence_s - self._loop.time()
            if left <= 0:
                self._ended = "two heartbeats missed"
                continue
            if self._alarm is None:
                self._alarm = self._loop.call_later(left, self._ring)
            await self._wake.wait()

    async def pause(self) -> None:
        """After a failure to open: longer with each, and never the same for two readers."""
        self._failures += 1
        if self._failures > 1:
            # Connected by the look of it, but nothing works: a half-open connection must not last.
            await self._connection.probe(self._times.request_timeout_s)
        await asyncio.sleep(pause_s(self._failures, self._jitter()))

    async def rest(self, longest_s: float) -> None:
        """Until the connection is another, at most so long: for what no try now would change."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._wake.wait()

    async def wait_connected(self) -> None:
        """Waits without a bound for a connection."""
        while not self._connection.connected:
            self._wake.clear()
            if not self._connection.connected:
                await self._wake.wait()

    async def close(self) -> None:
        """Deletes the consumer as far as the server can be reached."""
        self._stop_listening()
        await self._discard()

    def _ring(self) -> None:
        """Wakes who waits, to look whether it was silent for too long. One timer serves many waits: a busy
        reader would make and cancel one for every few messages."""
        self._alarm = None
        self._wake.set()

    def _drain(self, limit: int) -> list[tuple[StoredMessage, int]]:
        """Takes delivered messages up to the first gap in the consumer's own count."""
        taken: list[tuple[StoredMessage, int]] = []
        messages = self._messages
        expected = self._expected_consumer_seq
        while messages and len(taken) < limit:
            message = messages.popleft()
            # $JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<seq>.<count>.<time>.<pending>[.<token>]
            fields = message.reply.split(".")
            at = 4 if len(fields) < 11 else 6
            if int(fields[at + 2]) != expected:
                self._ended = f"expected delivery {expected}, got {fields[at + 2]}"
                messages.clear()
                break
            expected += 1
            nanos = int(fields[at + 3])
            taken.append(
                (
                    StoredMessage(
                        seq=int(fields[at + 1]),
                        subject=message.subject,
                        payload=message.data,
                        stored_at=_EPOCH + timedelta(microseconds=nanos // 1000),
                        origin=origin_of(message.header(SOURCE)) if _SOURCED in message.head else 0,
                        traceparent=traceparent_of(message.header(TRACEPARENT))
                        if _TRACED in message.head
                        else "",
                    ),
                    int(fields[at + 4]),
                )
            )
        self._expected_consumer_seq = expected
        return taken

    def _on_message(self, message: Message) -> None:
        self._heard_at = self._loop.time()
        if message.reply.startswith("$JS.ACK."):
            self._credit -= 1
            self._messages.append(message)
            if self._credit <= self._times.batch // 2 or len(self._messages) == 1:
                self._wake.set()
            return
        headers = message.headers
        match message.status:
            case "100":  # a heartbeat
                return
            case "404" | "408":
                # This request is over, with that much of it unused.
                unused = headers.get("Nats-Pending-Messages", "")
                self._credit -= int(unused) if unused.isdigit() else self._credit
            case status:
                # Consumer deleted, leadership changed, server going: begin anew.
                self._ended = f"{status} {headers.get(DESCRIPTION, '')}".strip()
        self._wake.set()

    async def _refill(self, outstanding: int) -> None:
        """Asks for another batch when half of one is used; only a reader that takes gets more."""
        if outstanding > self._times.batch // 2:
            return
        try:
            await self._ask()
        except TransportError as error:
            self._ended = str(error)

    async def _ask(self) -> None:
        times = self._times
        body = msgspec.json.encode(
            {
                "batch": times.batch,
                "expires": int(times.expires_s * _SECOND_NS),
                "idle_heartbeat": int(times.heartbeat_s * _SECOND_NS),
            }
        )
        self._credit += times.batch
        self._heard_at = self._loop.time()
        await self._connection.publish_with_reply(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}", body, self._inbox
        )

    async def _create(self, start_seq: int | None) -> int:
        self._inbox = self._connection.new_inbox()
        self._handle = await self._connection.subscribe(self._inbox, self._on_message)
        name = f"{_UNNAMED.sub('-', self._connection.name)[:64]}-{secrets.token_hex(6)}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "last_per_subject" if start_seq is None else "by_start_sequence",
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(self._times.inactive_threshold_s * _SECOND_NS),
        }
        if start_seq is not None:
            config["opt_start_seq"] = max(1, start_seq)
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{name}"
        if len(self._filters) == 1:
            # With one filter the server lets permissions name it, so an agent can be held to its plan.
            config["filter_subject"] = self._filters[0]
            subject += f".{self._filters[0]}"
        else:
            config["filter_subjects"] = list(self._filters)
        # Named before it is made: a cancelled attempt is cleaned up as well.
        self._consumer = name
        raw = await self._connection.request(
            subject,
            msgspec.json.encode(
                {"stream_name": self._stream, "config": config, "action": "create"}
            ),
            timeout_s=self._times.request_timeout_s,
        )
        created = msgspec.json.decode(raw, type=_Created)
        if created.error is not None:
            raise Lost(created.error.description)
        self._expected_consumer_seq = 1
        self._credit = 0
        self._ended = None
        await self._ask()
        return created.num_pending

    async def _discard(self) -> None:
        """Forgets the consumer; the server is told when it can be, else it forgets by itself."""
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.cancel()
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()
        self._messages.clear()
        consumer, self._consumer = self._consumer, ""
        if consumer and self._connection.connected:
            with contextlib.suppress(TransportError):
                await self._connection.request(
                    f"$JS.API.CONSUMER.DELETE.{self._stream}.{consumer}",
                    b"",
                    timeout_s=self._times.request_timeout_s,
                )
