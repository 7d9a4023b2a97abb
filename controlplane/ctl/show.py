"""Prints what yardctl read: lists as tables or JSON, one thing as lines or JSON.

It only arranges; every value comes from the API as it is.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controlplane.ctl.connect import Listed

WIDE: Final = 4096
"""Columns of a table that no person's terminal shows: lines of a pipe are never cut."""

_COLOURS: Final[Mapping[str, str]] = {
    "ready": "green",
    "accepted": "green",
    "reachable": "green",
    "loaded": "green",
    "starting": "yellow",
    "reading": "yellow",
    "fetching": "yellow",
    "running": "yellow",
    "loading": "yellow",
    "placing": "yellow",
    "waiting": "yellow",
    "wanted": "yellow",
    "draining": "yellow",
    "leaving": "yellow",
    "unloading": "yellow",
    "unreachable": "yellow",
    "cordoned": "yellow",
    "failed": "red",
    "refused": "red",
    "rejected": "red",
    "quarantined": "red",
    "lost": "red",
    "stop_failed": "red",
}


class _Console(Console):
    """rich ends the program when a pipe closes; that is for main() to decide."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Colours and width of the terminal; on a pipe neither."""
    made = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    return (
        made
        if made.is_terminal
        else _Console(
            stderr=stderr, highlight=False, markup=False, emoji=False, width=WIDE, color_system=None
        )
    )


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    empty: str,
    notes: Sequence[str] = (),
) -> None:
    """A table without lines, or the sentence `empty` when there is nothing; `notes` below it, a line each."""
    found = list(rows)
    if found:
        _print_rows(columns, found)
    elif not notes:
        print(empty)
    for note in notes:
        print(note)


def notes_of(listed: Listed) -> list[str]:
    """What a list cannot show as it is now: the control plane could not read the last event of it."""
    old = [row for row in listed.rows if (row.get("event") or {}).get("problem")]
    return [
        *map(unread_line, listed.unread),
        *(
            f"{_noun(row['event'])} {row.get('name') or row.get('id') or row['event']['subject']}: shown as it was "
            f"before its last event, which this control plane cannot read ({row['event']['problem']})"
            for row in old
        ),
    ]


def unread_line(one: Mapping[str, Any]) -> str:
    """One that is there but has no state to show, because the control plane is older than who wrote it."""
    return (
        f"{_noun(one['event'])} {one['name']}: written by a newer version ({one['event'].get('problem')}), which this "
        "control plane cannot read"
    )


def _noun(event: Mapping[str, Any]) -> str:
    return str(event.get("subject", "")).partition(".evt.")[2].partition(".")[0]


def _print_rows(columns: Sequence[str], found: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper(), overflow="fold", no_wrap=column in ("id", "since"))
    for row in found:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    # On a pipe rich fills up the lines with spaces, which no reader wants.
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as capture:
        out.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_fields(value: Mapping[str, Any], indent: str = "") -> None:
    """One thing, a field per line; what is empty is left out."""
    width = max((len(name) for name, v in value.items() if _told(v)), default=0)
    for name, field in value.items():
        if not _told(field):
            continue
        if isinstance(field, dict):
            print(f"{indent}{name}:")
            print_fields(field, indent + "  ")
        elif isinstance(field, list | tuple) and any(_takes_a_line(item) for item in field):
            print(f"{indent}{name}:")
            for item in field:
                if isinstance(item, dict):
                    print(f"{indent}  -")
                    print_fields(item, indent + "    ")
                else:
                    print(f"{indent}  - {item}")
        else:
            many = isinstance(field, list | tuple)
            text = ", ".join(map(str, field)) if many else _plain(name, field)
            print(f"{indent}{name + ':':<{width + 1}} {text}")


def _told(value: Any) -> bool:
    return value is not None and value not in ("", [], (), {})


def _takes_a_line(item: Any) -> bool:
    return isinstance(item, dict | list | tuple) or (isinstance(item, str) and " " in item)


def _plain(name: str, value: Any) -> str:
    if (name == "bytes" or name.endswith("_bytes")) and isinstance(value, int):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def size(amount: int | float | None) -> str:
    """`1.5 GiB`; `-` when there is none."""
    if not amount:
        return "-"
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}".replace(".0 ", " ")


def age(moment: str | None, now: datetime) -> str:
    """How long ago an RFC 3339 time was, as `12s`, `5m`, `3h`, `2d`."""
    if not moment:
        return "-"
    then = parse_time(moment)
    return "-" if then is None else length((now - then).total_seconds())


def length(seconds: float) -> str:
    whole = int(max(0.0, seconds))
    for unit, span in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= span:
            return f"{whole // span}{unit}"
    return f"{whole}s"


def parse_time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def mode(scaling: Mapping[str, Any]) -> str:
    """`off`, `0..2`, `1`: the limits of a model as a column."""
    low, high = scaling.get("min", 0), scaling.get("max", 0)
    if high == 0:
        return "off"
    return str(low) if low == high else f"{low}..{high}"


def idle(scaling: Mapping[str, Any]) -> str:
    seconds = float(scaling.get("idle_timeout_s", 0.0))
    return "never" if seconds <= 0 else str(timedelta(seconds=seconds)).removesuffix(":00")
