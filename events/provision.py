"""Creates a yard's streams and brings existing ones up to date, or refuses; it never deletes one."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from events.connection import Connection
from events.ids import new_id
from events.log import LogError, LogFull, Misconfigured, Unavailable
from events.lookup import NO_STREAM
from events.retry import Action, ServerError, classify
from events.streams import (
    MINIMUM_SERVER,
    StreamSpec,
    compare,
    creation,
    stream_specs,
    version_of,
)
from events.transport import Denied, NoAnswer, NoResponders, NotSent

log = logging.getLogger(__name__)

_ROUNDS: Final = 3
_PAUSE_S: Final = 0.1
_TIMEOUT_S: Final = 5.0


class _Answer(Struct, frozen=True, kw_only=True):
    config: dict[str, Any] = {}
    error: ServerError | None = None


async def ensure_streams(
    connection: Connection, yard_id: str, schema: int, *, mint: Callable[[], str] = new_id
) -> None:
    """Makes the streams be there as `events/streams.py` has them.

    Raises Misconfigured for a server older than 2.12.3, for a stream of another yard and for one that could
    only be changed with loss; LogFull when the server has no room for them; Unavailable when nobody answers.
    A stream the yard can do without is only warned about when there is no room for it.
    """
    if not connection.connected:
        raise Unavailable("not connected")
    if version_of(connection.server_version) < MINIMUM_SERVER:
        wanted = ".".join(str(n) for n in MINIMUM_SERVER)
        raise Misconfigured(
            f"nats-server {connection.server_version or 'of unknown version'}: {wanted} or newer is needed"
        )
    for spec in stream_specs(connection.prefix):
        try:
            await _ensure(connection, spec, yard_id, schema, mint)
        except LogFull as full:
            if spec.needed:
                raise
            log.warning("no room for a stream", extra={"stream": spec.name, "why": str(full)})


async def _ensure(
    connection: Connection, spec: StreamSpec, yard_id: str, schema: int, mint: Callable[[], str]
) -> None:
    """A few rounds: when another instance creates the stream first, its work is compared like any other.

    While it does, the server may also say that there is no room: it counts both attempts.
    """
    failure: LogError | None = None
    for _ in range(_ROUNDS):
        found = await _ask(connection, f"$JS.API.STREAM.INFO.{spec.name}", None)
        if found.error is not None:
            if found.error.err_code != NO_STREAM:
                raise Unavailable(f"{spec.name}: {found.error.description}")
            config = creation(spec, yard_id=yard_id, schema=schema, stream_id=mint())
            made = await _ask(connection, f"$JS.API.STREAM.CREATE.{spec.name}", config)
            if made.error is None:
                log.info("stream created", extra={"stream": spec.name})
                return
            failure = _failure(spec, made.error)
            await asyncio.sleep(_PAUSE_S)
            continue
        verdict = compare(spec, found.config, yard_id=yard_id, schema=schema, stream_id=mint())
        fields = {"stream": spec.name, "differences": "; ".join(verdict.differences)}
        match verdict.action:
            case "leave":
                if verdict.differences:
                    log.warning("stream of a newer version left as it is", extra=fields)
            case "refuse":
                raise Misconfigured(f"{spec.name}: {'; '.join(verdict.differences)}")
            case "update":
                done = await _ask(connection, f"$JS.API.STREAM.UPDATE.{spec.name}", verdict.config)
                if done.error is not None:
                    raise _failure(spec, done.error)
                log.info("stream updated", extra=fields)
        return
    assert failure is not None, "every other way out of a round returns or raises"
    raise failure


def _failure(spec: StreamSpec, error: ServerError) -> LogError:
    sentence = f"{spec.name}: {error.description}"
    match classify(error):
        case Action.FULL:
            return LogFull(error.err_code or 0, sentence)
        case Action.AGAIN:
            return Unavailable(sentence)
        case _:
            return Misconfigured(sentence)


async def _ask(connection: Connection, subject: str, body: dict[str, Any] | None) -> _Answer:
    payload = b"" if body is None else msgspec.json.encode(body)
    try:
        raw = await connection.request(subject, payload, timeout_s=_TIMEOUT_S)
    except Denied as error:
        raise Misconfigured(str(error)) from error
    except (NotSent, NoAnswer, NoResponders) as error:
        raise Unavailable(f"no answer on {subject}") from error
    return msgspec.json.decode(raw, type=_Answer)
