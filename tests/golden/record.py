"""Writes the golden file of every event type and version that has none; it never touches one that exists.

Run as `python -m tests.golden.record` after adding an event type or a version, then look at what it wrote
and commit it: from then on that file says what was once stored. It fills every field, so that a renamed or
retyped one shows.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, inspect

from events.codec import encode_event
from events.log import Draft
from events.subjects import event_subject
from schemas.messages import NOUNS, Noun

FOLDER = Path(__file__).parent / "events"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


def golden_path(tag: str, version: int) -> Path:
    return FOLDER / f"{tag}.v{version}.json"


def wanted() -> list[tuple[Noun, type[Struct], int]]:
    """Every (noun, event, version) that was ever written."""
    return [
        (noun, event, version)
        for noun in NOUNS.values()
        for event in noun.events
        for version in range(1, noun.version + 1)
    ]


def sample(kind: inspect.Type, name: str) -> Any:
    """A value of a type with nothing left at its default."""
    match kind:
        case inspect.StrType():
            return f"some-{name}"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 2.5
        case inspect.DateTimeType():
            return NOW
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.UnionType(types=types):
            return sample(next(t for t in types if not isinstance(t, inspect.NoneType)), name)
        case inspect.VarTupleType(item_type=item):
            return (sample(item, name),)
        case inspect.ListType(item_type=item):
            return [sample(item, name)]
        case inspect.DictType(value_type=value):
            return {f"some-{name}": sample(value, name)}
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{f.name: sample(f.type, f.name) for f in fields})
        case inspect.AnyType():
            return {"any": 1}
        case _:
            raise TypeError(f"no sample for {name}: {kind}")


def body(noun: Noun, event: type[Struct], version: int) -> dict[str, Any]:
    """The envelope of one sample, as JSON values."""
    tag = str(event.__struct_config__.tag)
    key = tuple(f"some-{t}" for t in noun.tokens)
    raw = encode_event(
        Draft(
            subject=event_subject(noun.name, *key),
            event=sample(inspect.type_info(event), "event"),
            state=None if tag.endswith(".deleted") else sample(inspect.type_info(noun.state), "x"),
            expected_seq=0,
            rev=3,
            reason="a golden sample",
            actor="alice",
            causationid="cause",
            correlationid="correlation",
            time=NOW,
        ),
        id_="019b8000-0000-7000-8000-000000000000",
        source="/agent/some-node" if noun.writer == "agent" else "/cp/some-instance",
        epoch=2,
        now=NOW,
    )
    envelope: dict[str, Any] = msgspec.json.decode(raw)
    return envelope if version == noun.version else _older(envelope, noun, version)


def _older(envelope: dict[str, Any], noun: Noun, version: int) -> dict[str, Any]:
    """The same as an older program wrote it; a new version adds its case here once, then its file stays."""
    if (noun.name, version) != ("replica", 1):
        raise LookupError(f"say here how {noun.name} version {version} was written")
    state = envelope["data"]["state"]
    if state is not None:
        del state["memory_bytes"]
        state["memory_mib"] = 7
    return {**envelope, "dataschema": "urn:modelyard:replica:1"}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for noun, event, version in wanted():
        path = golden_path(str(event.__struct_config__.tag), version)
        if not path.exists():
            text = msgspec.json.format(msgspec.json.encode(body(noun, event, version)), indent=2)
            path.write_bytes(text + b"\n")
            sys.stdout.write(f"wrote {path.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
