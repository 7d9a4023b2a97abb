"""Reads single messages of one stream from its leader, and tells which stream it is.

Only leader reads: a direct get may answer from behind. It never writes and never retries for long.
"""

import base64
from datetime import datetime
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from events.codec import StoredMessage
from events.envelope import SOURCE, origin_of
from events.log import Misconfigured, StreamIdentity, Unavailable
from events.retry import Action, ServerError, classify
from events.streams import SCHEMA, STREAM_ID
from events.transport import Denied, NoAnswer, NoResponders, NotSent, Transport

NO_MESSAGE: Final = 10037
NO_STREAM: Final = 10059
NO_CONSUMER: Final = 10014

SOURCE_SILENT_S: Final = 30.0
"""A source gives a sign of life every second; what lags behind a silent one is not known."""
_WRITING_S: Final = 0.05
"""A sourced message is stored a moment after it was heard."""


class _Message(Struct, frozen=True, kw_only=True):
    subject: str
    seq: int
    time: datetime
    data: str = ""
    hdrs: str = ""


class _Got(Struct, frozen=True, kw_only=True):
    message: _Message | None = None
    error: ServerError | None = None


class _State(Struct, frozen=True, kw_only=True):
    first_seq: int = 0
    last_seq: int = 0
    messages: int = 0


class _Config(Struct, frozen=True, kw_only=True):
    metadata: dict[str, str] = {}


class _Source(Struct, frozen=True, kw_only=True):
    name: str = ""
    lag: int = 0
    active: int = -1
    """Nanoseconds since the source was heard, -1 for never."""


class _Info(Struct, frozen=True, kw_only=True):
    config: _Config = _Config()
    created: str = ""
    state: _State = _State()
    sources: list[_Source] | None = None
    error: ServerError | None = None


T = TypeVar("T", bound=Struct)


class NoStream(Unavailable):
    """The server answers, and has no such stream."""


class StreamReads:
    """Reads of one stream. Every method raises Unavailable, and Misconfigured when it is denied."""

    def __init__(
        self, transport: Transport, stream: str, *, timeout_s: float = 2.0, tries: int = 3
    ) -> None:
        self._transport = transport
        self._stream = stream
        self._timeout_s = timeout_s
        self._tries = tries

    async def last(self, subject: str) -> StoredMessage | None:
        """The last message of a literal subject."""
        return await self._get({"last_by_subj": subject})

    async def next(self, subject: str, from_seq: int) -> StoredMessage | None:
        """The first message of a subject (wildcards allowed) at or after `from_seq`."""
        return await self._get({"seq": max(1, from_seq), "next_by_subj": subject})

    async def history(self, subject: str, before: int, limit: int = 128) -> list[StoredMessage]:
        """Messages of a literal subject with a smaller sequence than `before`, oldest first."""
        messages: list[StoredMessage] = []
        seq = 1
        for _ in range(limit):
            message = await self.next(subject, seq)
            if message is None or message.seq >= before:
                break
            messages.append(message)
            seq = message.seq + 1
        return messages

    async def at(self, seq: int) -> StoredMessage | None:
        """The message of that sequence, None when it was trimmed."""
        return await self._get({"seq": seq})

    async def identity(self) -> StreamIdentity:
        """Which stream this is and where it ends. Raises NoStream."""
        info = await self._ask(f"$JS.API.STREAM.INFO.{self._stream}", b"", _Info)
        if info.error is not None and info.error.err_code == NO_STREAM:
            raise NoStream(f"{self._stream}: {info.error.description}")
        if info.error is not None:
            raise Unavailable(f"{self._stream}: {info.error.description}")
        schema = info.config.metadata.get(SCHEMA, "0")
        return StreamIdentity(
            stream_id=info.config.metadata.get(STREAM_ID, ""),
            created=info.created,
            last_seq=info.state.last_seq,
            schema=int(schema) if schema.isdigit() else 0,
        )

    async def has_all_of(self, source: str, age_s: float) -> bool:
        """Whether this stream holds all that `source`, which it sources, held `age_s` ago.

        The lag is what the source told last, so it must have been heard since then. True without
        such a source: then there is nothing to wait for.
        """
        info = await self._ask(f"$JS.API.STREAM.INFO.{self._stream}", b"", _Info)
        if info.error is not None:
            raise Unavailable(f"{self._stream}: {info.error.description}")
        return all(
            one.lag == 0 and 0 <= one.active / 1e9 < min(age_s - _WRITING_S, SOURCE_SILENT_S)
            for one in info.sources or ()
            if one.name == source
        )

    async def _get(self, query: dict[str, str | int]) -> StoredMessage | None:
        got = await self._ask(
            f"$JS.API.STREAM.MSG.GET.{self._stream}", msgspec.json.encode(query), _Got
        )
        if got.error is not None:
            if got.error.err_code == NO_MESSAGE:
                return None
            raise Unavailable(f"{self._stream}: {got.error.description}")
        if got.message is None:
            return None
        return StoredMessage(
            seq=got.message.seq,
            subject=got.message.subject,
            payload=base64.b64decode(got.message.data),
            stored_at=got.message.time,
            origin=_origin(got.message.hdrs),
        )

    async def _ask(self, subject: str, query: bytes, answer: type[T]) -> T:
        for attempt in range(1, self._tries + 1):
            last = attempt == self._tries
            try:
                raw = await self._transport.request(subject, query, timeout_s=self._timeout_s)
            except NotSent as error:
                raise Unavailable("not connected") from error
            except Denied as error:
                raise Misconfigured(str(error)) from error
            except (NoAnswer, NoResponders) as error:
                if last:
                    raise Unavailable(f"no answer on {subject}") from error
                continue
            decoded = msgspec.json.decode(raw, type=answer)
            error_ = getattr(decoded, "error", None)
            transient = error_ is not None and classify(error_) is Action.AGAIN
            if not transient or last:
                return decoded
        raise AssertionError("the last try returns or raises")


def _origin(headers: str) -> int:
    for line in base64.b64decode(headers).decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name == SOURCE:
            return origin_of(value.strip())
    return 0
