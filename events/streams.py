"""Holds the yard's streams as data, in the server's own field names, and compares them with what is there.

Pure. It decides create, update, leave or refuse; it never decides to delete, because a stream that differs
still holds the only copy of the truth.
"""

from typing import Any, Final, Literal

from msgspec import Struct

from events.subjects import PREFIX

CONFIG_REV: Final = 2
"""Counts changes of the table below; a program leaves settings of a newer revision alone."""

MINIMUM_SERVER: Final = (2, 12, 3)
YARD_ID: Final = "yard.id"
STREAM_ID: Final = "yard.stream_id"
SCHEMA: Final = "yard.schema"
REV: Final = "yard.config_rev"

_SECOND: Final = 1_000_000_000
_DAY: Final = 86_400 * _SECOND
_MIB: Final = 1024 * 1024

USAGE_KEPT_DAYS: Final = 90
"""So long it is known what was used; the totals made of it are kept no longer."""

FIXED: Final = ("retention", "storage", "sources")
"""What cannot be changed without losing messages: a difference is refused."""

ONE_WAY: Final = ("deny_delete", "deny_purge", "allow_msg_ttl")
"""The server never takes these back."""

OPERATORS: Final = ("max_bytes", "num_replicas", "placement")
"""Sized by whoever runs the server: set at creation, then left as found."""


class StreamSpec(Struct, frozen=True, kw_only=True):
    """One stream; `config` are fields of the JetStream API, without the name and the metadata.

    `needed`: the yard does not work without it; one that is not may be left out where the server has no room.
    """

    name: str
    config: dict[str, Any]
    needed: bool = True


class Verdict(Struct, frozen=True, kw_only=True):
    """What to do about a stream that exists. `config` is the whole configuration to send for `update`."""

    action: Literal["leave", "update", "refuse"]
    differences: tuple[str, ...] = ()
    config: dict[str, Any] = {}


def stream_name(kind: str, prefix: str = PREFIX) -> str:
    """`YARD_EVENTS` for `EVENTS`; another prefix gives another yard's streams on the same server."""
    return f"{prefix.upper()}_{kind}"


def stream_specs(prefix: str = PREFIX) -> tuple[StreamSpec, ...]:
    """Every stream of a yard, sources before who reads them."""
    events, commands = stream_name("EVENTS", prefix), stream_name("COMMANDS", prefix)
    limits = {"retention": "limits", "num_replicas": 1, "allow_direct": False}
    return (
        StreamSpec(
            name=events,
            config={
                **limits,
                "subjects": [f"{prefix}.evt.>"],
                "storage": "file",
                "max_age": 0,
                "max_msgs_per_subject": 64,
                "max_bytes": 2048 * _MIB,
                "discard": "new",
                "max_msg_size": 256 * 1024,
                "duplicate_window": 600 * _SECOND,
                "allow_atomic": True,
                "allow_msg_ttl": True,
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                "deny_purge": False,  # a rollup is a purge
                "republish": {"src": f"{prefix}.evt.>", "dest": f"{prefix}.live.>"},
            },
        ),
        StreamSpec(
            name=commands,
            config={
                **limits,
                "subjects": [f"{prefix}.cmd.>"],
                "storage": "file",
                "max_age": _DAY,
                "max_bytes": 256 * _MIB,
                "discard": "new",
                "max_msg_size": 64 * 1024,
                "duplicate_window": 600 * _SECOND,
                "allow_msg_ttl": True,
                "deny_delete": True,
                "deny_purge": True,
            },
        ),
        StreamSpec(
            name=stream_name("PROGRESS", prefix),
            config={
                **limits,
                "subjects": [f"{prefix}.prog.>"],
                "storage": "memory",
                "max_age": _DAY,
                "max_msgs_per_subject": 500,
                "max_bytes": 256 * _MIB,
                "discard": "old",
                "max_msg_size": 16 * 1024,
            },
        ),
        StreamSpec(
            name=stream_name("AUDIT", prefix),
            config={
                **limits,
                "sources": [{"name": events}, {"name": commands}],
                "storage": "file",
                "compression": "s2",
                "max_age": 90 * _DAY,
                "max_bytes": 2048 * _MIB,
                "discard": "old",
            },
        ),
        StreamSpec(
            name=stream_name("USAGE", prefix),
            config={
                **limits,
                "subjects": [f"{prefix}.use.>"],
                "storage": "file",
                "compression": "s2",
                "max_age": USAGE_KEPT_DAYS * _DAY,
                "max_bytes": 512 * _MIB,
                "discard": "old",
                "max_msg_size": 512 * 1024,
                "duplicate_window": 600 * _SECOND,
            },
            needed=False,
        ),
    )


def creation(spec: StreamSpec, *, yard_id: str, schema: int, stream_id: str) -> dict[str, Any]:
    """The configuration a new stream begins with. `stream_id` is minted anew for every creation."""
    return {
        "name": spec.name,
        **spec.config,
        "metadata": _metadata(yard_id, schema, stream_id),
    }


def compare(
    spec: StreamSpec, found: dict[str, Any], *, yard_id: str, schema: int, stream_id: str
) -> Verdict:
    """What to do about `found`, the server's configuration of that stream.

    1 another yard's stream, or a difference that cannot be undone without loss: refuse
    2 written by a newer program: leave, whatever differs
    3 differences in settings that are ours: update, keeping every field we do not know
    """
    metadata: dict[str, str] = found.get("metadata") or {}
    owner = metadata.get(YARD_ID, yard_id)
    if owner != yard_id:  # 1
        return Verdict(action="refuse", differences=(f"belongs to yard {owner}",))
    differing = tuple(
        f"{field}: {_normal(field, found.get(field))!r}, expected {_normal(field, wanted)!r}"
        for field, wanted in spec.config.items()
        if field not in OPERATORS and _normal(field, found.get(field)) != _normal(field, wanted)
    )
    fields = {d.split(":", 1)[0] for d in differing}
    fatal = fields & set(FIXED) | {f for f in fields & set(ONE_WAY) if not spec.config[f]}
    if fatal:
        return Verdict(
            action="refuse", differences=tuple(d for d in differing if d.split(":", 1)[0] in fatal)
        )
    found_rev, found_schema = _number(metadata, REV), _number(metadata, SCHEMA)
    if found_rev > CONFIG_REV or found_schema > schema:  # 2
        return Verdict(action="leave", differences=differing)
    kept = {k: v for k, v in metadata.items() if not k.startswith("_nats.")}
    marked = {**kept, **_metadata(yard_id, schema, metadata.get(STREAM_ID) or stream_id)}
    if not differing and marked == kept:
        return Verdict(action="leave")
    ours = {k: v for k, v in spec.config.items() if k not in OPERATORS}
    return Verdict(  # 3
        action="update", differences=differing, config={**found, **ours, "metadata": marked}
    )


def version_of(text: str) -> tuple[int, int, int]:
    """`2.15.1-beta` -> (2, 15, 1); what is not a version counts as (0, 0, 0)."""
    parts = text.split("-", 1)[0].split("+", 1)[0].split(".")
    if len(parts) != 3 or not all(p.isdigit() for p in parts):
        return (0, 0, 0)
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def _metadata(yard_id: str, schema: int, stream_id: str) -> dict[str, str]:
    return {
        YARD_ID: yard_id,
        STREAM_ID: stream_id,
        SCHEMA: str(schema),
        REV: str(CONFIG_REV),
    }


def _number(metadata: dict[str, str], key: str) -> int:
    text = metadata.get(key, "0")
    return int(text) if text.isdigit() else 0


def _normal(field: str, value: Any) -> Any:
    """A field's value with the server's ways of leaving it out put back."""
    if field == "sources":
        sources: list[dict[str, Any]] = value or []
        return [source.get("name") for source in sources]
    if field == "republish":
        republish: dict[str, Any] = value or {}
        return (republish.get("src"), republish.get("dest"))
    if field == "compression":
        return value or "none"
    if field in ("max_msgs_per_subject", "max_msg_size"):
        return value or -1
    return value or (0 if isinstance(value, int) else value) or False
