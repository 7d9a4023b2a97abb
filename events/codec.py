"""Turns drafts into stored bytes and stored bytes back into events, in two steps.

The envelope is decoded first with its body raw, then the body by type and version, so an older program
survives a newer event. It never raises for what a message holds: what cannot be read is Broken, what is
too new is a Recorded with `problem`. The epoch rule needs history and is `events/epochs.py`.
"""

from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from events.envelope import MAX_EVENT_BYTES, Data, Envelope, Written
from events.log import Broken, Draft, Recorded, StoredCommand, Unstorable
from events.subjects import CMD, EVT, PREFIX, NotASubject, decode_token
from events.upcasts import NoUpcast, lift
from schemas.commands import Command
from schemas.messages import NOUNS, TYPE_PREFIX, Noun, tag_of

SCHEMA_PREFIX: Final = "urn:modelyard:"
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding bytes of another program may raise: no JSON or another shape, no text, nested without end."""


class StoredMessage(Struct, frozen=True, kw_only=True):
    """Bytes of a stream as the server hands them over; sequence and time are the server's.

    `origin` is the sequence in the stream this message was sourced from, 0 when it was not; `traceparent` the header
    of that name.
    """

    seq: int
    subject: str
    payload: bytes
    stored_at: datetime
    origin: int = 0
    traceparent: str = ""


class Place(Struct, frozen=True, kw_only=True):
    """What an event subject names. `spec` is None for a noun this program does not know."""

    noun: str
    key: tuple[str, ...]
    spec: Noun | None


class _EventType(Struct, frozen=True, kw_only=True):
    tag: str
    tombstone: bool
    noun: Noun
    change: Any
    state: Any


def is_tombstone(type_: str) -> bool:
    """Whether a short type ends its aggregate."""
    return type_.endswith(".deleted")


def _event_types() -> dict[str, _EventType]:
    types: dict[str, _EventType] = {}
    for noun in NOUNS.values():
        state: Any = msgspec.json.Decoder(noun.state)
        for event in noun.events:
            tag = str(event.__struct_config__.tag)
            types[tag] = _EventType(
                tag=tag,
                tombstone=is_tombstone(tag),
                noun=noun,
                change=msgspec.json.Decoder(event),
                state=state,
            )
    return types


_TYPES: Final = _event_types()
_CURRENT: Final = {
    (TYPE_PREFIX + kind.tag, f"{SCHEMA_PREFIX}{kind.noun.name}:{kind.noun.version}"): kind
    for kind in _TYPES.values()
}
"""What programs of this version write, by an envelope's type and dataschema: nearly every event."""
_ENVELOPE: Final = msgspec.json.Decoder(Envelope)
_ENCODER: Final = msgspec.json.Encoder()
_NULL: Final = Raw(b"null")
_COMMAND: Final = msgspec.json.Decoder(Command)


class _CommandId(Struct, frozen=True, kw_only=True):
    id: str


_COMMAND_ID: Final = msgspec.json.Decoder(_CommandId)


@lru_cache(maxsize=65536)
def place_of(subject: str, prefix: str = PREFIX) -> Place:
    """The noun and decoded key of an event subject. Raises NotASubject."""
    head = f"{prefix}.{EVT}."
    if not subject.startswith(head):
        raise NotASubject(f"{subject!r} is not below {head}>")
    tokens = subject[len(head) :].split(".")
    two = ".".join(tokens[:2])
    noun = two if two in NOUNS else tokens[0]
    spec = NOUNS.get(noun)
    rest = tokens[2:] if noun == two and len(tokens) > 1 else tokens[1:]
    try:
        key = tuple(decode_token(t) for t in rest)
    except UnicodeDecodeError as error:
        raise NotASubject(f"{subject!r} is not UTF-8 below its percent signs") from error
    if spec is not None and len(key) != len(spec.tokens):
        raise NotASubject(
            f"{subject!r} should name {noun} by {', '.join(spec.tokens) or 'nothing'}"
        )
    return Place(noun=noun, key=key, spec=spec)


def encode_event(
    draft: Draft, *, id_: str, source: str, epoch: int, now: datetime, prefix: str = PREFIX
) -> bytes:
    """The bytes of one event. Raises Unstorable for a draft that no reader would accept."""
    try:
        place = place_of(draft.subject, prefix)
    except NotASubject as error:
        raise Unstorable(str(error)) from error
    noun = place.spec
    tag = tag_of(draft.event)
    if noun is None or not isinstance(draft.event, noun.events):
        raise Unstorable(f"{tag} is not an event of {draft.subject}")
    if (draft.state is None) != is_tombstone(tag):
        raise Unstorable(f"{tag} on {draft.subject}: a tombstone, and only it, has no state")
    if draft.state is not None and not isinstance(draft.state, noun.state):
        raise Unstorable(f"{tag} on {draft.subject} carries a {type(draft.state).__name__}")
    body = _ENCODER.encode(
        Written(
            specversion="1.0",
            id=id_,
            source=source,
            type=TYPE_PREFIX + tag,
            subject=draft.subject,
            time=draft.time or now,
            datacontenttype="application/json",
            dataschema=f"{SCHEMA_PREFIX}{noun.name}:{noun.version}",
            actor=draft.actor,
            rev=draft.rev,
            epoch=epoch,
            correlationid=draft.correlationid or msgspec.UNSET,
            causationid=draft.causationid or msgspec.UNSET,
            traceparent=draft.traceparent or msgspec.UNSET,
            data=Data(
                state=_NULL if draft.state is None else Raw(_ENCODER.encode(draft.state)),
                change=Raw(_ENCODER.encode(draft.event)),
                reason=draft.reason,
            ),
        )
    )
    if len(body) > MAX_EVENT_BYTES:
        raise Unstorable(
            f"{tag} on {draft.subject} takes {len(body)} bytes, more than {MAX_EVENT_BYTES}"
        )
    return body


def decode_event(message: StoredMessage, prefix: str = PREFIX) -> Recorded | Broken:
    """What a stored message says. The pipeline, each step before the next:

    1 size  2 envelope  3 subject equal  4 subject's noun and key  5 type known  6 version known, lifted
    7 body of the current version. Steps 5 and 6 fail into `problem`, the others into Broken.
    """

    def broken(why: str) -> Broken:
        return Broken(seq=message.seq, subject=message.subject, why=why)

    if len(message.payload) > MAX_EVENT_BYTES:  # 1
        return broken(f"{len(message.payload)} bytes, more than {MAX_EVENT_BYTES}")
    try:  # 2
        envelope = _ENVELOPE.decode(message.payload)
    except UNREADABLE as error:
        return broken(f"no envelope: {error}")
    if envelope.subject != message.subject:  # 3
        return broken(f"wrong subject: the envelope names {envelope.subject!r}")
    try:  # 4
        place = place_of(message.subject, prefix)
    except NotASubject as error:
        return broken(str(error))
    data = envelope.data
    kind = _CURRENT.get((envelope.type, envelope.dataschema))
    if kind is None or kind.noun is not place.spec:
        if not envelope.type.startswith(TYPE_PREFIX):
            return broken(f"foreign type {envelope.type!r}")
        tag = envelope.type[len(TYPE_PREFIX) :]
        kind = _TYPES.get(tag)
        if place.spec is None or kind is None:  # 5
            return _recorded(message, envelope, place, tag, f"unknown type {tag}")
        if kind.noun.name != place.noun:
            return broken(f"wrong subject: {tag} is no event of {place.noun}")
        version = _version_of(envelope.dataschema, place.noun)
        if version is None:
            return broken(f"dataschema {envelope.dataschema!r} does not name {place.noun}")
        if version > kind.noun.version:  # 6
            return _recorded(message, envelope, place, tag, f"version {version} of {place.noun}")
        if version < kind.noun.version:
            try:
                data = _lifted(data, place.noun, version, kind.noun.version)
            except NoUpcast as error:
                return broken(str(error))
            except (*UNREADABLE, TypeError) as error:
                return broken(f"body of {tag}: {error}")
    try:
        event = kind.change.decode(data.change)  # 7
        state = None if kind.tombstone else kind.state.decode(data.state)
    except (*UNREADABLE, TypeError) as error:
        return broken(f"body of {kind.tag}: {error}")
    return _recorded(message, envelope, place, kind.tag, None, event, state)


def _recorded(
    message: StoredMessage,
    envelope: Envelope,
    place: Place,
    tag: str,
    problem: str | None,
    event: Any = None,
    state: Any = None,
) -> Recorded:
    return Recorded(
        seq=message.seq,
        subject=message.subject,
        noun=place.noun,
        key=place.key,
        id=envelope.id,
        type=tag,
        time=envelope.time,
        stored_at=message.stored_at,
        rev=envelope.rev,
        epoch=envelope.epoch,
        actor=envelope.actor,
        reason=envelope.data.reason,
        event=event,
        state=state,
        causationid=envelope.causationid,
        correlationid=envelope.correlationid,
        traceparent=envelope.traceparent,
        problem=problem,
        source=envelope.source,
    )


@lru_cache(maxsize=1024)
def _version_of(dataschema: str, noun: str) -> int | None:
    head = f"{SCHEMA_PREFIX}{noun}:"
    text = dataschema[len(head) :]
    if not dataschema.startswith(head) or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


def _lifted(data: Data, noun: str, version: int, to: int) -> Data:
    body = lift(
        noun,
        version,
        to,
        {
            "state": msgspec.json.decode(data.state),
            "change": msgspec.json.decode(data.change),
            "reason": data.reason,
        },
    )
    return Data(
        state=Raw(_ENCODER.encode(body["state"])),
        change=Raw(_ENCODER.encode(body["change"])),
        reason=data.reason,
    )


def command_name(command: Command) -> str:
    """The `<noun>.<verb>` of a command, from its body's tag."""
    return str(type(command.body).__struct_config__.tag)


def encode_command(command: Command) -> bytes:
    """The bytes of one command, its body on `yard.cmd.<actor>.<name>`."""
    return _ENCODER.encode(command)


def decode_command(message: StoredMessage, prefix: str = PREFIX) -> StoredCommand:
    """A stored command; the actor and the name are the subject's, and a body that differs is a problem."""
    tokens = message.subject.removeprefix(f"{prefix}.{CMD}.").split(".")
    name = ".".join(tokens[1:])
    problem: str | None = None
    command: Command | None = None
    id_: str | None = None
    try:
        actor = decode_token(tokens[0])
    except (NotASubject, UnicodeDecodeError):
        actor = tokens[0]
        problem = f"{tokens[0]!r} is no actor"
    try:
        command = _COMMAND.decode(message.payload)
        id_ = command.id
        if command_name(command) != name:
            problem = f"the body says {command_name(command)}, the subject {name}"
            command = None
    except UNREADABLE as error:
        problem = f"not a command: {error}"
        try:
            id_ = _COMMAND_ID.decode(message.payload).id
        except UNREADABLE:
            id_ = None
    return StoredCommand(
        seq=message.seq,
        subject=message.subject,
        actor=actor,
        name=name,
        stored_at=message.stored_at,
        command=None if problem else command,
        problem=problem,
        id=id_,
        traceparent=message.traceparent,
    )
