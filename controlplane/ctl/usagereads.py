"""What yardctl reads of usage from the API, and prints: sums of requests, tokens and times.

Reading has no effects. It adds nothing up itself: what is shown together was summed up by the control plane.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from controlplane.ctl.connect import Api
from controlplane.ctl.show import print_json, print_table

Row = Mapping[str, Any]

BY: Final = ("key", "model", "adapter", "day")
"""What sums may be kept apart by, in the order of the columns."""

SUMS: Final = (
    "requests",
    "failed",
    "prompt",
    "cached",
    "completion",
    "first token",
    "duration",
    "waited",
)


async def show_usage(
    api: Api,
    output: str,
    now: datetime,
    days: int,
    by: Sequence[str],
    key: str | None,
    model: str | None,
) -> None:
    """The last `days` days, this one among them. Raises CtlError when the API refuses."""
    since = (now.astimezone(UTC) - timedelta(days=days - 1)).date().isoformat()
    query: dict[str, Any] = {"since": since, "by": ",".join(by)}
    if key is not None:
        query["key"] = key
    if model is not None:
        query["model"] = model
    found: list[Row] = (await api.get("/v1/usage", **query))["data"]
    if output == "json":
        print_json(found)
        return
    apart = [name for name in BY if name in by]
    found.sort(key=lambda total: tuple(_order(total, name) for name in apart))
    print_table(
        (*apart, *SUMS),
        (columns(total, apart) for total in found),
        _nothing(since, key, model),
    )
    if any(total["row"]["estimated"] for total in found):
        print(
            "\n~ engines did not tell the tokens of some requests: their events are counted instead"
        )


def _nothing(since: str, key: str | None, model: str | None) -> str:
    """What was looked for stands there: whether a name was mistyped is not known, it may have been removed."""
    by = "" if key is None else f" by a key {key!r}"
    of = "" if model is None else f" of a model {model!r}"
    return f"nothing was used{of}{by} since {since}"


def columns(total: Row, apart: Sequence[str]) -> tuple[str, ...]:
    """One line; times are means, those to the first token of the requests that had one."""
    row: Row = total["row"]
    requests = row["requests"]
    mark = "~" if row["estimated"] else ""
    return (
        *(_named(total, name) for name in apart),
        f"{requests}",
        f"{row['failed']}",
        f"{row['prompt_tokens']}",
        f"{row['cached_tokens']}",
        f"{mark}{row['completion_tokens']}",
        _mean(row["first_token_ms"], row["first_tokens"]),
        _mean(row["duration_ms"], requests),
        _mean(row["waited_ms"], requests),
    )


def _named(total: Row, name: str) -> str:
    if name == "day":
        return str(total["day"])
    value = str(total["row"][name])
    if name == "key":
        # Names are given anew when a key is over; the id says which it was.
        return f"{total['key_name']} ({value})" if total["key_name"] else value or "without a key"
    return value or "-"


def _order(total: Row, name: str) -> tuple[str, str]:
    """Keys stand by their names, as people look for them; those without a key first."""
    if name == "day":
        return str(total["day"]), ""
    value = str(total["row"][name])
    return (str(total["key_name"]).casefold(), value) if name == "key" else (value, "")


def _mean(sum_ms: int, count: int) -> str:
    """`340 ms`, `12.3 s`."""
    if not count:
        return "-"
    mean = sum_ms / count
    return f"{mean:.0f} ms" if mean < 10_000 else f"{mean / 1000:.1f} s"
