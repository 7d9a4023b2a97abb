"""What yardctl reads of API keys from the API, and prints.

Reading has no effects. Nobody can read a secret: the yard does not have it.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from controlplane.ctl.connect import Api
from controlplane.ctl.reads import path_of
from controlplane.ctl.show import (
    age,
    length,
    notes_of,
    parse_time,
    print_fields,
    print_json,
    print_table,
)

Row = Mapping[str, Any]

COLUMNS: Final = (
    "id",
    "name",
    "state",
    "models",
    "starts models",
    "limits",
    "priority",
    "expires",
    "created",
)


async def list_keys(api: Api, output: str, now: datetime) -> None:
    """All of them by name, those first that are not over."""
    keys = await api.listed("/v1/keys")
    found: list[Row] = list(keys.rows)
    found.sort(key=lambda row: (state(row, now) != "valid", row["name"], row["id"]))
    if output == "json":
        print_json([*({**row, "state": state(row, now)} for row in found), *keys.unread])
        return
    print_table(
        COLUMNS,
        (columns(row, now) for row in found),
        "there are no keys; create one: yardctl key create --name NAME",
        notes_of(keys),
    )


async def show_key(api: Api, said: str, output: str, now: datetime) -> None:
    """One by its id or name. Raises CtlError when there is none."""
    row: Row = await api.data(path_of("keys", said))
    found = {"id": row["id"], "name": row["name"], "state": state(row, now), **row}
    if output == "json":
        print_json(found)
        return
    named = {"models": found["models"] or ["all"]}
    limits = {field: found[field] or "no limit" for field in ("rpm", "tpm", "parallel")}
    print_fields({**found, **named, **limits, "expires_at": found["expires_at"] or "never"})


def state(row: Row, now: datetime) -> str:
    """`revoked`, `expired` or `valid`, by this machine's clock."""
    if row["revoked_at"] is not None:
        return "revoked"
    expires_at = parse_time(row["expires_at"] or "")
    return "expired" if expires_at is not None and expires_at <= now else "valid"


def columns(row: Row, now: datetime) -> tuple[str, ...]:
    return (
        row["id"],
        row["name"],
        state(row, now),
        ", ".join(row["models"]) or "all",
        "yes" if row["may_activate"] else "no",
        limits(row),
        row["priority"],
        _expires(row, now),
        f"{age(row['created_at'], now)} ago",
    )


def limits(row: Row) -> str:
    """`60 rpm, 10000 tpm, 4 parallel`; `-` when there is none."""
    told = [f"{row[field]} {field}" for field in ("rpm", "tpm", "parallel") if row[field]]
    return ", ".join(told) or "-"


def _expires(row: Row, now: datetime) -> str:
    at = parse_time(row["expires_at"] or "")
    if at is None:
        return "never"
    left_s = (at - now).total_seconds()
    return f"in {length(left_s)}" if left_s > 0 else f"{length(-left_s)} ago"
