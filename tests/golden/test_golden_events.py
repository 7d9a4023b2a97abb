"""Every event type in every version ever written has a stored sample, and this program still reads it."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from events.codec import StoredMessage, decode_event, encode_event
from events.log import Draft, Recorded
from events.upcasts import UPCASTS
from schemas.messages import NOUNS, Noun
from tests.golden.record import FOLDER, golden_path, wanted

STORED_AT = datetime(2026, 2, 3, tzinfo=UTC)


def _tag(event: type[Struct]) -> str:
    return str(event.__struct_config__.tag)


def _read(event: type[Struct], version: int) -> tuple[dict[str, Any], Recorded]:
    path = golden_path(_tag(event), version)
    assert path.exists(), (
        f"{_tag(event)} version {version} has no golden file: python -m tests.golden.record"
    )
    payload = path.read_bytes()
    envelope: dict[str, Any] = msgspec.json.decode(payload)
    item = decode_event(
        StoredMessage(seq=9, subject=envelope["subject"], payload=payload, stored_at=STORED_AT)
    )
    assert isinstance(item, Recorded), item
    return envelope, item


@pytest.mark.parametrize(
    ("noun", "event", "version"),
    [pytest.param(*w, id=f"{_tag(w[1])}.v{w[2]}") for w in wanted()],
)
def test_a_stored_sample_is_read_whole(noun: Noun, event: type[Struct], version: int) -> None:
    envelope, item = _read(event, version)
    assert item.problem is None
    assert item.type == _tag(event)
    assert isinstance(item.event, event)
    assert (item.rev, item.epoch, item.actor) == (3, 2, "alice")
    assert (item.causationid, item.correlationid) == ("cause", "correlation")
    if item.type.endswith(".deleted"):
        assert item.state is None
        return
    assert isinstance(item.state, noun.state)
    if version == noun.version:
        # Every stored field is still there under its name and with its value: nothing was renamed away.
        state, change = msgspec.to_builtins(item.state), msgspec.to_builtins(item.event)
        stored = envelope["data"]
        assert _within(state, stored["state"]) == _plain(stored["state"])
        assert _within(change, stored["change"]) == _plain(stored["change"])


def _within(read: Any, stored: Any) -> Any:
    """What was read of the stored fields alone: a field added later, at any depth, has its default."""
    if isinstance(stored, dict) and isinstance(read, dict):
        return {key: _within(read.get(key), value) for key, value in stored.items()}
    if isinstance(stored, list) and isinstance(read, list | tuple) and len(read) == len(stored):
        return tuple(_within(r, s) for r, s in zip(read, stored, strict=True))
    return read


def _plain(stored: dict[str, Any]) -> dict[str, Any]:
    """msgspec writes tuples as lists and to_builtins keeps them tuples."""
    return {k: _tuples(v) for k, v in stored.items()}


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return value


def test_the_first_version_of_a_replica_counted_memory_in_mebibytes() -> None:
    for event in NOUNS["replica"].events:
        if _tag(event).endswith(".deleted"):
            continue
        old, new = _read(event, 1)[1], _read(event, 2)[1]
        assert getattr(old.state, "memory_bytes", None) == 7 * 1024 * 1024
        assert old.state is not None
        assert new.state is not None
        assert msgspec.structs.replace(old.state, memory_bytes=7) == new.state


def test_no_golden_file_is_of_a_type_nobody_knows() -> None:
    known = {golden_path(_tag(event), version).name for _, event, version in wanted()}
    assert {p.name for p in FOLDER.iterdir()} <= known


def test_every_version_step_exists_and_none_too_many() -> None:
    steps = {(noun.name, v) for noun in NOUNS.values() for v in range(1, noun.version)}
    assert set(UPCASTS) == steps
    assert steps, "the path of a version step must stay exercised"


def test_what_is_written_is_read_the_same() -> None:
    for _, event, version in wanted():
        envelope, item = _read(event, version)
        assert item.event is not None
        again = encode_event(
            Draft(
                subject=item.subject,
                event=item.event,
                state=item.state,
                expected_seq=0,
                rev=item.rev,
                reason=item.reason,
                actor=item.actor,
                causationid=item.causationid,
                correlationid=item.correlationid,
                time=item.time,
            ),
            id_=item.id,
            source=item.source,
            epoch=item.epoch,
            now=STORED_AT,
        )
        decoded = decode_event(
            StoredMessage(seq=9, subject=item.subject, payload=again, stored_at=STORED_AT)
        )
        assert decoded == item, envelope["type"]
