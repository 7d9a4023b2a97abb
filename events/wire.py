"""Beacons and request/reply on core NATS: heard or missed, never stored, never repeated.

Typed at both ends. It keeps no state beyond its subscriptions; what a beacon means is others' affair.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from events.codec import UNREADABLE
from events.connection import INBOX_ROOT, Connection, Handle
from events.delivery import Message
from events.log import Misconfigured, Unavailable
from events.subjects import NotASubject, beacon_subject, decode_token, progress_subject, rpc_subject
from events.transport import Denied, NoAnswer, NoResponders, NotSent, TransportError

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Struct)

ERROR_HEADER: Final = "Yard-Error"


class WireSubscription:
    """A subscription and, for a responder, the answers it is still working on."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends it; answers under way are cancelled."""
        if self.handle is not None:
            await self.handle.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class JetStreamWire:
    """The Wire on a connection. `undecodable` and `refused` count what was dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.undecodable = 0
        self.refused = 0

    async def beacon(self, kind: str, name: str, body: Struct) -> None:
        """See Wire.beacon."""
        await self._say(beacon_subject(kind, name, self._connection.prefix), body)

    async def progress(self, writer: str, kind: str, name: str, body: Struct) -> None:
        """See Wire.progress."""
        await self._say(progress_subject(writer, kind, name, self._connection.prefix), body)

    async def _say(self, subject: str, body: Struct) -> None:
        try:
            await self._connection.publish(subject, msgspec.json.encode(body))
        except TransportError:
            # The next one comes by itself, and silence while disconnected is the truth.
            return

    async def on_beacon(
        self, kind: str, body_type: type[B], handler: Callable[[str, B], None]
    ) -> WireSubscription:
        """See Wire.on_beacon."""
        return await self._listen(
            f"{self._connection.prefix}.beacon.{kind}.*",
            body_type,
            lambda tokens, body: handler(tokens[-1], body),
        )

    async def on_progress(
        self, kind: str, body_type: type[B], handler: Callable[[str, str, B], None]
    ) -> WireSubscription:
        """See Wire.on_progress."""
        return await self._listen(
            f"{self._connection.prefix}.prog.*.{kind}.*",
            body_type,
            lambda tokens, body: handler(tokens[-3], tokens[-1], body),
        )

    async def _listen(
        self, subject: str, body_type: type[B], handler: Callable[[list[str], B], None]
    ) -> WireSubscription:
        decoder = msgspec.json.Decoder(body_type)

        def heard(message: Message) -> None:
            try:
                tokens = [decode_token(token) for token in message.subject.split(".")[-3:]]
                body = decoder.decode(message.data)
            except (*UNREADABLE, NotASubject):
                self.undecodable += 1
                return
            handler(tokens, body)

        subscription = WireSubscription()
        subscription.handle = await self._connection.subscribe(subject, heard)
        return subscription

    async def request(
        self, what: str, node: str, body: Struct, reply_type: type[B], *, timeout_s: float
    ) -> B:
        """See Wire.request. A responder's own failure is told as Unavailable with its sentence."""
        subject = rpc_subject(what, node, self._connection.prefix)
        try:
            answer = await self._connection.request_message(
                subject, msgspec.json.encode(body), timeout_s=timeout_s
            )
        except NotSent as error:
            raise Unavailable("not connected") from error
        except NoResponders as error:
            raise Unavailable(f"nobody answers {what} for {node}") from error
        except NoAnswer as error:
            raise Unavailable(f"no answer to {what} from {node} within {timeout_s} s") from error
        except Denied as error:
            raise Misconfigured(str(error)) from error
        failure = answer.header(ERROR_HEADER)
        if failure is not None:
            raise Unavailable(f"{what} of {node} failed: {failure}")
        try:
            return msgspec.json.decode(answer.data, type=reply_type)
        except UNREADABLE as error:
            raise Unavailable(f"{what} of {node} answered something else: {error}") from error

    async def serve(
        self,
        what: str,
        node: str,
        body_type: type[B],
        handler: Callable[[B], Awaitable[Struct]],
    ) -> WireSubscription:
        """See Wire.serve. Requests run side by side; one whose reply is no inbox of this yard is refused,
        because the answer would be published wherever the caller said, with this process's rights.
        """
        decoder = msgspec.json.Decoder(body_type)
        subscription = WireSubscription()

        async def answer(message: Message) -> None:
            headers: dict[str, str] | None = None
            payload = b""
            try:
                payload = msgspec.json.encode(await handler(decoder.decode(message.data)))
            except UNREADABLE as error:
                self.undecodable += 1
                headers = {ERROR_HEADER: _header_text(error)}
            except Exception as error:
                # The caller must learn of it, and one bad request must not end the service.
                log.exception("request failed", extra={"subject": message.subject})
                headers = {ERROR_HEADER: _header_text(error)}
            try:
                await self._connection.respond(message.reply, payload, headers=headers)
            except TransportError as error:
                log.info("answer not sent", extra={"subject": message.subject, "why": str(error)})

        def asked(message: Message) -> None:
            if not message.reply.startswith(INBOX_ROOT):
                self.refused += 1
                return
            task = asyncio.get_running_loop().create_task(answer(message))
            subscription.tasks.add(task)
            task.add_done_callback(subscription.tasks.discard)

        subscription.handle = await self._connection.subscribe(
            rpc_subject(what, node, self._connection.prefix), asked
        )
        return subscription


def _header_text(error: Exception) -> str:
    """ASCII, one line: what a header may hold."""
    text = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
    return " ".join(text.split())[:500]
