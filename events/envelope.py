"""Shapes the bytes of one event: the CloudEvents envelope, its headers, and the ids given to events.

Pure: a clock's reading and random bytes are arguments. It knows nothing of nouns; `events/codec.py` does.
"""

import re
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

MAX_EVENT_BYTES: Final = 256 * 1024
"""The hard limit of one stored event (`max_msg_size` of YARD_EVENTS)."""

TOMBSTONE_TTL_S: Final = 604_800
"""How long a tombstone stays before its subject is empty; a reader away for longer starts afresh."""

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
EXPECTED_SEQ: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SEQ_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
BATCH_ID: Final = "Nats-Batch-Id"
BATCH_SEQUENCE: Final = "Nats-Batch-Sequence"
BATCH_COMMIT: Final = "Nats-Batch-Commit"
ROLLUP: Final = "Nats-Rollup"
TTL: Final = "Nats-TTL"
SOURCE: Final = "Nats-Stream-Source"
TRACEPARENT: Final = "traceparent"
YARD_TYPE: Final = "Yard-Type"
YARD_REV: Final = "Yard-Rev"


class Data(Struct, frozen=True, kw_only=True):
    """What an event says: the whole state after it, what changed, and why. Both stay raw until their type
    and version are known, so a program survives what it cannot read."""

    state: Raw
    change: Raw
    reason: str = ""


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A CloudEvents 1.0 structured JSON envelope with the yard's extensions.

    `subject` repeats the NATS subject, which readers compare: a message somebody made the server store
    under another subject gives itself away. `time` is the producer's clock, for people only.
    """

    id: str
    source: str
    type: str
    subject: str
    time: datetime
    dataschema: str
    rev: int
    epoch: int
    actor: str
    data: Data
    specversion: Literal["1.0"] = msgspec.field(default="1.0")
    datacontenttype: str = "application/json"
    correlationid: str | None = None
    causationid: str | None = None
    traceparent: str | None = None


class Written(Struct, frozen=True, kw_only=True):
    """The envelope as it is written: nothing that CloudEvents requires may be left out for being a default."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str
    time: datetime
    datacontenttype: str
    dataschema: str
    actor: str
    rev: int
    epoch: int
    data: Data
    correlationid: str | msgspec.UnsetType = msgspec.UNSET
    causationid: str | msgspec.UnsetType = msgspec.UNSET
    traceparent: str | msgspec.UnsetType = msgspec.UNSET


def uuid7(now: datetime, random: bytes) -> str:
    """A UUIDv7 of `now` (milliseconds since 1970) and ten random bytes; ids sort by time of minting.

    Raises ValueError when `random` does not hold exactly ten bytes.
    """
    if len(random) != 10:
        raise ValueError("a UUIDv7 takes ten random bytes")
    elapsed = now - datetime(1970, 1, 1, tzinfo=UTC)
    millis = (elapsed.days * 86_400 + elapsed.seconds) * 1000 + elapsed.microseconds // 1000
    raw = bytearray(millis.to_bytes(6, "big") + random)
    raw[6] = (raw[6] & 0x0F) | 0x70
    raw[8] = (raw[8] & 0x3F) | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(header: str | None) -> str:
    """What a `traceparent` header says (W3C Trace Context); empty for anything else."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else ""


def origin_of(source: str | None) -> int:
    """The sequence a `Nats-Stream-Source` header names, `YARD_EVENTS 17 > > …`; 0 without one."""
    fields = (source or "").split(" ")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def event_headers(
    *,
    stream: str,
    type_: str,
    rev: int,
    expected_seq: int | None,
    expected_subject: str | None = None,
    message_id: str | None = None,
    batch: tuple[str, int, bool] | None = None,
    tombstone: bool = False,
    ttl_s: int | None = None,
) -> dict[str, str]:
    """A fresh header dict for one publish (nats-py changes the dict it is given).

    `batch` is (batch id, sequence in the batch, is the last). `expected_subject` moves the check to
    another subject (the fence). A tombstone rolls its subject up, because a TTL alone would bring
    the state before it back when it expires.
    """
    headers = {EXPECTED_STREAM: stream, YARD_TYPE: type_, YARD_REV: str(rev)}
    if expected_seq is not None:
        headers[EXPECTED_SEQ] = str(expected_seq)
    if expected_subject is not None:
        headers[EXPECTED_SEQ_SUBJECT] = expected_subject
    if message_id is not None:
        headers[MSG_ID] = message_id
    if batch is not None:
        headers[BATCH_ID] = batch[0]
        headers[BATCH_SEQUENCE] = str(batch[1])
        if batch[2]:
            headers[BATCH_COMMIT] = "1"
    if tombstone:
        headers[ROLLUP] = "sub"
        headers[TTL] = str(TOMBSTONE_TTL_S)
    elif ttl_s is not None:
        headers[TTL] = str(ttl_s)
    return headers
