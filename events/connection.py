"""Keeps one connection to NATS: connects without blocking its owner, reconnects, rebuilds a closed client.

Callbacks of the client library only note what happened; nothing is awaited inside them, because they run
in its read path. Nothing here knows of events or streams. Bytes are never buffered while disconnected: a
publish that failed must not be stored after the reconnect.
"""

import asyncio
import contextlib
import logging
import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription as ClientSubscription

from events.delivery import DirectClient, Handler, Message, Receiver
from events.transport import Answers, Denied, NoAnswer, NoResponders, NotSent, Outgoing
from schemas.settings import NatsSettings

log = logging.getLogger(__name__)

INBOX_ROOT: Final = "_INBOX_"
"""How every inbox of a yard begins; who serves requests answers to such subjects only."""

FIRST_WAIT_S: Final = 2.0
_RECONNECT_FIRST_S: Final = 0.05
_RECONNECT_LONGEST_S: Final = 2.0
_DENIED: Final = re.compile(
    r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE
)


class Handle(Receiver):
    """One subscription, kept over reconnects and rebuilt clients until `close`."""

    def __init__(self, connection: "Connection", subject: str, handler: Handler) -> None:
        super().__init__(handler)
        self.subject = subject
        self._connection = connection
        self.current: ClientSubscription | None = None

    async def close(self) -> None:
        """Ends it; no message is handed over afterwards."""
        await self._connection.drop(self)


class Connection:
    """A Transport on NATS that also subscribes. Made by `connect`, ended by `close`."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        user: str,
        password: str | Callable[[], str],
        inbox_prefix: str,
        prefix: str,
        ping_interval_s: float = 10.0,
        connect_timeout_s: float = 2.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._url = url
        self._name = name
        self._user = user
        self._password = password
        self._inbox_prefix = inbox_prefix or f"{INBOX_ROOT}{user or 'anonymous'}"
        self._prefix = prefix
        self._ping_interval_s = ping_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._jitter = jitter
        self._client: Client | None = None
        self._up = asyncio.Event()
        self._first_try = asyncio.Event()
        self._client_closed = asyncio.Event()
        self._closing = False
        self._generation = 0
        self._handles: set[Handle] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._waiting: dict[str, tuple[str, asyncio.Future[Message]]] = {}
        self._requests = 0
        self._inbox = f"{self._inbox_prefix}.{secrets.token_hex(8)}"
        self._denied: str | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def prefix(self) -> str:
        return self._prefix

    @property
    def connected(self) -> bool:
        client = self._client
        return self._up.is_set() and client is not None and client.is_connected

    @property
    def generation(self) -> int:
        """Grows with every connection made: what was delivered before may have gaps after."""
        return self._generation

    @property
    def server_version(self) -> str:
        """Of the server last connected to; empty before the first."""
        client = self._client
        return "" if client is None else str(client._server_info.get("version", ""))

    @property
    def last_denied(self) -> str | None:
        """The server's last sentence about a missing permission, for people."""
        return self._denied

    def start(self) -> None:
        """Begins connecting; returns at once."""
        self._supervisor = asyncio.get_running_loop().create_task(
            self._supervise(), name=f"nats {self._name}"
        )

    async def close(self) -> None:
        """Ends everything; pending requests fail with NoAnswer."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._went_down()

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is a connection, waiting for one at most `timeout_s`."""
        if not self.connected and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
        return self.connected

    async def wait_first_try(self, timeout_s: float) -> None:
        """Returns when the first attempt succeeded or failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first_try.wait()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` when the connection is made or lost; the result ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Hands bytes to the socket. Raises NotSent."""
        await self._publish(subject, payload, "", headers)

    async def publish_with_reply(self, subject: str, payload: bytes, reply: str) -> None:
        """Hands bytes to the socket, to be answered on `reply`, any number of times. Raises NotSent."""
        await self._publish(subject, payload, reply, None)

    def new_inbox(self) -> str:
        """A subject nobody else listens on, below this user's own inbox prefix."""
        return f"{self._inbox_prefix}.{secrets.token_hex(11)}"

    async def respond(
        self, reply: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers a request. Raises NotSent; Denied for a reply subject that is no inbox of this yard."""
        if not reply.startswith(INBOX_ROOT):
            raise Denied(f"{reply!r} is no inbox")
        await self._publish(reply, payload, "", headers)

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The payload of the one answer. Raises NotSent, NoAnswer, NoResponders, Denied."""
        return (
            await self.request_message(subject, payload, timeout_s=timeout_s, headers=headers)
        ).data

    async def request_message(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        """The whole answer, headers included."""
        with self._asking(subject) as (inbox, answered):
            await self._publish(subject, payload, inbox, headers)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await answered
            except TimeoutError as error:
                raise NoAnswer(subject) from error
        return _responded(subject, answer)

    async def request_all(self, messages: Sequence[Outgoing], *, timeout_s: float) -> Answers:
        """See Transport.request_all. All of it leaves in one write."""
        first, *middle, last = messages
        with (
            self._asking(first.subject) as (first_inbox, began),
            self._asking(last.subject) as (last_inbox, ended),
        ):
            # Nothing is awaited between these but the library's hand-over, which never waits.
            await self._publish(first.subject, first.payload, first_inbox, first.headers)
            for one in middle:
                await self._publish(one.subject, one.payload, "", one.headers)
            await self._publish(last.subject, last.payload, last_inbox, last.headers)
            with contextlib.suppress(TimeoutError, NoAnswer):
                async with asyncio.timeout(timeout_s):
                    await ended
            return Answers(first=_answer(first.subject, began), last=_answer(last.subject, ended))

    @contextlib.contextmanager
    def _asking(self, subject: str) -> Iterator[tuple[str, asyncio.Future[Message]]]:
        """An inbox for one answer, and the answer to come."""
        self._requests += 1
        token = str(self._requests)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, future)
        try:
            yield f"{self._inbox}.{token}", future
        finally:
            self._waiting.pop(token, None)
            if future.done() and not future.cancelled():
                future.exception()

    async def subscribe(self, subject: str, handler: Handler) -> Handle:
        """Subscribes now or as soon as there is a connection, and again after each one."""
        handle = Handle(self, subject, handler)
        self._handles.add(handle)
        if self._client is not None and self._client.is_connected:
            await self._attach(self._client, handle)
        return handle

    async def drop(self, handle: Handle) -> None:
        """Ends a subscription; see Handle.close."""
        handle.open = False
        self._handles.discard(handle)
        current, handle.current = handle.current, None
        if current is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await current.unsubscribe()

    async def probe(self, timeout_s: float) -> None:
        """Asks the server for a sign of life and reconnects when none comes."""
        client = self._client
        if client is None or not self.connected:
            return
        try:
            await client.flush(timeout=max(1, round(timeout_s)))
        except (nats.errors.Error, OSError):
            await self.force_reconnect()

    async def force_reconnect(self) -> None:
        """Gives up a connection that looks alive but answers nothing."""
        if self._client is not None:
            self._went_down()
            await self._client.force_reconnect()

    async def _publish(
        self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None
    ) -> None:
        client = self._client
        if client is None or not self.connected:
            raise NotSent(subject)
        try:
            # A fresh dict: the library changes the one it is given.
            await client.publish(subject, payload, reply, dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as error:
            raise NotSent(f"{subject}: {error}") from error

    async def _attach(self, client: Client, handle: Handle) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            handle.current = await client.subscribe(handle.subject, cb=handle.receive)

    def _answered(self, message: Message) -> None:
        waiting = self._waiting.get(message.subject.rsplit(".", 1)[1])
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    async def _supervise(self) -> None:
        """Builds a client, waits until it is closed for good, builds the next."""
        answers = Handle(self, f"{self._inbox}.*", self._answered)
        self._handles.add(answers)
        attempt = 0
        while not self._closing:
            client = DirectClient()
            self._client_closed.clear()
            try:
                await client.connect(
                    servers=[self._url],
                    name=self._name,
                    user=self._user or None,
                    password=self._password or None,
                    inbox_prefix=self._inbox_prefix,
                    pending_size=-1,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]
                    connect_timeout=self._connect_timeout_s,  # type: ignore[arg-type]
                    ping_interval=self._ping_interval_s,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                    reconnect_to_server_handler=self._next_attempt,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                )
                self._client = client
                for handle in list(self._handles):
                    await self._attach(client, handle)
                attempt = 0
                self._went_up()
                await self._client_closed.wait()
                log.warning("nats client closed, building another", extra={"nats": self._name})
            except (nats.errors.Error, OSError, TimeoutError) as error:
                log.warning("nats connect failed", extra={"nats": self._name, "error": str(error)})
            finally:
                self._went_down()
                with contextlib.suppress(nats.errors.Error, OSError):
                    await _end(client)
            attempt += 1
            await asyncio.sleep(self._delay_s(attempt))

    def _delay_s(self, attempt: int) -> float:
        longest = min(_RECONNECT_LONGEST_S, _RECONNECT_FIRST_S * 2.0 ** min(attempt, 10))
        return longest * (0.25 + 0.75 * self._jitter())

    def _next_attempt(self, servers: list[Any], _info: dict[str, Any]) -> tuple[None, float]:
        return None, self._delay_s(max((int(s.reconnects) for s in servers), default=0))

    def _went_up(self) -> None:
        self._generation += 1
        self._up.set()
        self._first_try.set()
        self._tell()

    def _went_down(self) -> None:
        if self._up.is_set():
            self._up.clear()
            self._tell()
        for subject, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(NoAnswer(f"{subject}: the connection was lost"))

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def _on_disconnected(self) -> None:
        client = self._client
        if client is not None:
            # What was queued but not written would be stored after the reconnect, when its caller has
            # long been told that it failed. Subscriptions are replayed by the library from its own list.
            client._pending.clear()
            client._pending_data_size = 0
        self._went_down()

    async def _on_reconnected(self) -> None:
        self._went_up()

    async def _on_closed(self) -> None:
        self._client_closed.set()

    async def _on_error(self, error: Exception) -> None:
        self._first_try.set()
        text = str(error)
        denied = _DENIED.search(text)
        if denied is None:
            log.debug("nats error", extra={"nats": self._name, "error": text})
            return
        self._denied = text
        log.warning("nats permission missing", extra={"nats": self._name, "error": text})
        # The library lowers the case of the server's sentence, so subjects are compared that way.
        for subject, future in list(self._waiting.values()):
            if subject.lower() == denied[2].lower() and not future.done():
                future.set_exception(Denied(text))


def _responded(subject: str, answer: Message) -> Message:
    if answer.status == "503":
        raise NoResponders(subject)
    return answer


def _answer(subject: str, future: asyncio.Future[Message]) -> bytes | None:
    """What has been answered so far. Raises NoResponders, Denied."""
    if not future.done() or future.cancelled():
        return None
    try:
        return _responded(subject, future.result()).data
    except NoAnswer:
        return None


async def _end(client: Client) -> None:
    """Closes a client also when it never got as far as being connected."""
    if not client.is_closed:
        await client.close()
    transport = getattr(client, "_transport", None)
    if transport is not None:
        transport.close()


async def connect(
    settings: NatsSettings,
    *,
    name: str,
    user: str,
    password: str | Callable[[], str],
    inbox_prefix: str,
    prefix: str = "yard",
    first_wait_s: float = FIRST_WAIT_S,
) -> Connection:
    """A connection that keeps trying for as long as it is open.

    Returns as soon as the first attempt succeeded or failed, at the latest after `first_wait_s`: without
    a server `connected` is False and everything else starts all the same.
    """
    connection = Connection(
        settings.url,
        name=name,
        user=user,
        password=password,
        inbox_prefix=inbox_prefix,
        prefix=prefix,
    )
    connection.start()
    await connection.wait_first_try(first_wait_s)
    return connection
