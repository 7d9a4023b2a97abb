"""`yardctl events`: the log as lines, from a point in time or a sequence on, and as it grows.

The past comes from the audit, which keeps what the log trimmed, the rest from the log itself; the server
filters by subject, types, models and times are filtered here. A reader that falls behind is told so by a gap line and slows nobody down.
"""

import fnmatch
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from controlplane.ctl.failures import CtlError, UsageMistake
from events.lines import line_of, models_of
from events.log import Broken, EventLog, Follower, Recorded
from events.settings import parse_seconds
from events.subjects import EVT
from schemas.activation import Activation
from schemas.adapter import Adapter
from schemas.api import EventLine, GapLine
from schemas.key import Key
from schemas.messages import TYPE_PREFIX, tag_of
from schemas.replica import Replica
from schemas.slots import Slots

GAP: Final = "the history was replaced; what follows is the last event per subject"
_QUIET: Final = frozenset({"leader.decided", "card.measured"})
"""Types left out of the pretty view of everything: they follow every decision and every reading."""


class Query(Struct, frozen=True, kw_only=True):
    """What to show. `after` None means the last event of every subject first, then live.

    `after` is told from the whole history, also what was trimmed or ended.
    """

    subjects: tuple[str, ...]
    types: tuple[str, ...] = ()
    model: str | None = None
    node: str | None = None
    after: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    follow: bool = False
    live: bool = False


def parse_moment(text: str, now: datetime) -> datetime:
    """`10m` ago, or a time as RFC 3339 writes it. Raises UsageMistake."""
    try:
        return now - timedelta(seconds=parse_seconds(text))
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageMistake(
            f"expected a duration such as 10m or a time such as 2026-01-31T12:00:00Z, got {text!r}"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def parse_subject(text: str, prefix: str) -> str:
    """A filter on events: `replica.>`, `yard.evt.replica.>` and `yard.live.replica.>` mean the same."""
    rest = text
    for head in (f"{prefix}.{EVT}.", f"{prefix}.live."):
        rest = rest.removeprefix(head)
    tokens = rest.split(".")
    if not all(tokens) or any(c.isspace() for c in rest) or ">" in "".join(tokens[:-1]):
        raise UsageMistake(
            f"{text!r} is no subject; expected one such as {prefix}.{EVT}.replica.> or replica.>"
        )
    return f"{prefix}.{EVT}.{rest}"


def wanted(item: Recorded | Broken, query: Query) -> bool:
    """Whether this event was asked for beyond its subject; what cannot be read is always told."""
    if isinstance(item, Broken):
        return True
    if query.since is not None and item.stored_at < query.since:
        return False
    if query.until is not None and item.stored_at > query.until:
        return False
    if query.types and not any(fnmatch.fnmatchcase(short(item), t) for t in query.types):
        return False
    if query.node is not None and query.node not in nodes_of(item):
        return False
    return query.model is None or query.model in models_of(item)


def short(item: Recorded) -> str:
    """`replica.ready`, however the log spells the type."""
    return item.type.removeprefix(TYPE_PREFIX)


def nodes_of(item: Recorded) -> set[str]:
    by_key = ("plan", "nodestate", "node", "card", "replica", "slots")
    found = {item.key[0]} if item.noun in by_key and item.key else set()
    if isinstance(item.state, Activation) and item.state.node is not None:
        found.add(item.state.node)
    return found


def jsonl(line: EventLine | GapLine) -> str:
    return msgspec.json.encode(line).decode()


_STYLES: Final = {
    "ready": "green",
    "accepted": "green",
    "failed": "red",
    "refused": "red",
    "rejected": "red",
    "quarantined": "red",
    "start_failed": "red",
    "stop_failed": "red",
    "lost": "red",
    "unreachable": "red",
    "draining": "yellow",
    "starting": "yellow",
    "loading": "yellow",
    "waiting": "yellow",
    "drifted": "yellow",
}


def pretty(item: Recorded | Broken) -> Text:
    """`12:00:01.123  replica.ready  local/r-abc  load_s=0.4  reason (actor)`, in local time."""
    if isinstance(item, Broken):
        return Text(f"seq {item.seq}  {item.subject}  cannot be read: {item.why}", style="red")
    kind = short(item)
    text = Text()
    text.append(item.time.astimezone().strftime("%H:%M:%S.%f")[:-3], style="dim")
    text.append("  ")
    text.append(f"{kind:<22}", style=_STYLES.get(kind.rpartition(".")[2], "bold"))
    text.append(" ")
    text.append("/".join(item.key) or "-", style="cyan")
    details = _details(item)
    if details:
        text.append("  " + details)
    if item.reason:
        text.append(f"  {item.reason}", style="italic")
    if item.actor and not item.actor.startswith("system"):
        text.append(f"  ({item.actor})", style="dim")
    if item.problem:
        text.append(f"  {item.problem}", style="red")
    return text


def _details(item: Recorded) -> str:
    """What changed, in a few words; ids and numbers, no nested things."""
    parts: list[str] = []
    if isinstance(item.state, Replica | Slots):
        parts.append(item.state.model)
    elif isinstance(item.state, Adapter):
        parts.append(f"of {item.state.base}")
    elif isinstance(item.state, Key):
        parts.append(item.state.name)
    if item.event is None or tag_of(item.event) != short(item):
        return " ".join(parts)
    for name in item.event.__struct_fields__:
        value: Any = getattr(item.event, name)
        if value is None or value in ((), "", {}):
            continue
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        elif isinstance(value, float):
            value = f"{value:.3g}"
        elif isinstance(value, datetime):
            value = value.astimezone().strftime("%H:%M:%S")
        elif isinstance(value, dict):
            value = json.dumps(value)
        parts.append(f"{name}={value}")
    return " ".join(parts)


async def tail(log: EventLog, query: Query, output: str, out: Console) -> None:
    """Prints until everything stored was told, or for ever with `follow`. Raises CtlError."""
    follower: Follower
    if query.live:
        follower = log.follow(query.subjects, after=(await log.identity()).last_seq)
    elif query.after is None:
        follower = log.follow(query.subjects)
    else:
        follower = log.history(query.subjects, after=query.after, since=query.since)
    quiet = output == "pretty" and not query.types
    try:
        while True:
            batch = await follower.next()
            if batch.reset:
                told = jsonl(GapLine(gap=GAP)) if output == "jsonl" else f"-- {GAP}"
                print(told, flush=True)
            for item in batch.items:
                if not wanted(item, query) or (quiet and _is_quiet(item, query.subjects)):
                    continue
                if output == "jsonl":
                    print(jsonl(line_of(item)), flush=True)
                else:
                    out.print(pretty(item), soft_wrap=True)
            if not query.follow:
                if not batch.connected:
                    raise CtlError("NATS went away before everything was read")
                if batch.synced:
                    return
    finally:
        await follower.close()


def _is_quiet(item: Recorded | Broken, subjects: Sequence[str]) -> bool:
    """Only in the view of everything: who names a subject wants all of it."""
    everything = len(subjects) == 1 and subjects[0].endswith(f".{EVT}.>")
    return everything and isinstance(item, Recorded) and short(item) in _QUIET
