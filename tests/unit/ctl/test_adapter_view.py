"""How adapters, the replicas they are loaded in, and who holds them are shown."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from controlplane.ctl import adapterview
from controlplane.ctl.adapterview import Held
from schemas.adapter import Adapter, AdapterFile
from schemas.adapterasks import Holder
from schemas.file import Copy, File
from schemas.progress import FileProgress

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=5)
ADAPTER = Adapter(
    name="sql",
    incarnation="a-1",
    base="qwen",
    base_incarnation="m-1",
    phase="ready",
    since=EARLIER,
    by="anna",
    source="acme/sql-lora",
    aliases=("tables",),
    pinned=True,
    commit="3998fa4" * 6,
    rank=16,
    trained_on="Qwen/Qwen2.5-7B-Instruct",
    target_modules=("q_proj", "v_proj"),
    files=(
        AdapterFile(key="k1", name="adapter_model.safetensors", bytes=3 * 1024**2),
        AdapterFile(key="k2", name="adapter_config.json", bytes=1024**2),
    ),
    bytes=4 * 1024**2,
    version="0123abcd4567",
)
ROW: dict[str, Any] = msgspec.to_builtins(ADAPTER)


def replica(id_: str, phase: str = "ready", slots: int = 4, model: str = "qwen") -> dict[str, Any]:
    return {"id": id_, "node": "n1", "model": model, "phase": phase, "adapter_slots": slots}


def slots(replica: str, *loaded: dict[str, Any], bad: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"node": "n1", "replica": replica, "loaded": list(loaded), "bad": list(bad)}


def slot(adapter: str = "sql", **more: Any) -> dict[str, Any]:
    return {"adapter": adapter, "version": "0123abcd4567", "since": EARLIER.isoformat(), **more}


def test_a_line_tells_in_how_many_of_the_replicas_it_is_loaded() -> None:
    replicas = [replica("r-1"), replica("r-2"), replica("r-3", slots=0), replica("r-4", model="x")]
    told = [slots("r-1", slot()), slots("r-2", slot("other")), slots("r-4", slot())]
    (row,) = adapterview.adapter_rows([ROW], told, replicas, NOW)
    assert row["loaded"] == "1/2"
    assert (row["rank"], row["size"], row["pinned"], row["since"]) == ("16", "4 MiB", "yes", "5m")
    assert tuple(row) == adapterview.ADAPTER_COLUMNS


@pytest.mark.parametrize("phase", ["parked", "stopped", "failed", "starting"])
def test_what_a_replica_that_answers_nobody_had_loaded_does_not_count(phase: str) -> None:
    told = [slots("r-1", slot())]
    (row,) = adapterview.adapter_rows([ROW], told, [replica("r-1", phase)], NOW)
    assert row["loaded"] == "-"
    assert adapterview.place_lines("sql", told, [replica("r-1", phase)], NOW) == []


def test_a_refused_one_is_not_counted_where_it_never_can_be() -> None:
    refused, able = {**ROW, "phase": "refused"}, [replica("r-1")]
    (row,) = adapterview.adapter_rows([refused], [slots("r-1", slot("other"))], able, NOW)
    assert row["loaded"] == "-"
    (row,) = adapterview.adapter_rows([refused], [slots("r-1", slot())], able, NOW)
    assert row["loaded"] == "1/1", "it was ready before, and leaves"
    (row,) = adapterview.adapter_rows([ROW], [slots("r-1", slot("other"))], able, NOW)
    assert row["loaded"] == "0/1"


def test_a_refused_one_says_why_in_one_line() -> None:
    row = {**ROW, "phase": "refused", "code": "rank_too_high", "reason": "rank 64,\n16 allowed"}
    (told,) = adapterview.adapter_rows([row], [], [], NOW)
    assert told["why"] == "rank 64, 16 allowed [rank_too_high]"
    assert adapterview.fields(row, NOW)["why"] == "rank 64, 16 allowed [rank_too_high]"


def test_an_adapter_that_was_just_added_is_shown_too() -> None:
    bare = {"name": "a", "base": "b", "phase": "reading", "since": EARLIER.isoformat()}
    told = {k: v for k, v in adapterview.fields(bare, NOW).items() if v not in (None, "", [])}
    assert told == {
        "name": "a", "base": "b", "asked for as": "a, b:a", "state": "reading", "since": "5m ago",
    }  # fmt: skip
    assert adapterview.adapter_rows([bare], [], [], NOW)[0]["rank"] == "-"


def test_fields_tell_names_source_and_files() -> None:
    told = adapterview.fields({**ROW, "trust_base": True}, NOW)
    assert told["asked for as"] == "sql, tables, qwen:sql"
    assert told["commit"] == "3998fa43998f"
    assert told["files"] == "4 MiB in 2 files"
    assert told["base compared"] == "no, a person said that it fits"


def test_the_last_event_is_told_with_its_reason_and_actor() -> None:
    event = {"type": "adapter.ready", "time": EARLIER.isoformat(), "reason": "all\nthere"}
    told = adapterview.fields({**ROW, "event": {**event, "actor": "anna"}}, NOW)
    assert told["last event"] == "adapter.ready 5m ago: all there (anna)"


def test_places_tell_how_it_got_there_and_what_failed() -> None:
    bad = {
        "adapter": "sql", "code": "load_failed", "reason": "out of\nmemory",
        "until": (NOW + timedelta(seconds=40)).isoformat(),
    }  # fmt: skip
    over = {**bad, "until": EARLIER.isoformat()}
    told = [
        slots("r-2", slot(how="person", leaving=True), bad=({**bad, "adapter": "x"},)),
        slots("r-1", slot(), slot("x")),
        slots("r-3", bad=(bad, over)),
    ]
    replicas = [replica("r-1"), replica("r-2"), replica("r-3")]
    assert adapterview.place_lines("sql", told, replicas, NOW) == [
        "loaded in:",
        "  r-1 on n1  asked for, 5m ago",
        "  r-2 on n1  by hand, 5m ago, leaving",
        "failed in:",
        "  r-3 on n1  out of memory [load_failed], tried again in 40s",
        "  r-3 on n1  out of memory [load_failed]",
    ]


@pytest.mark.parametrize("name", ["sql", "tables", "qwen:sql", "qwen:tables"])
def test_a_name_an_alias_and_base_and_name_mean_the_same(name: str) -> None:
    other = {**ROW, "name": "other", "aliases": []}
    assert adapterview.find([other, ROW], name) == ROW


@pytest.mark.parametrize("name", ["x", "x:sql", "qwen:x", "qwen:", ":sql", ""])
def test_other_names_mean_nothing(name: str) -> None:
    assert adapterview.find([ROW], name) is None


def test_a_name_wins_over_an_alias_of_another() -> None:
    other = {**ROW, "name": "tables", "aliases": []}
    assert adapterview.find([ROW, other], "tables") == other


@pytest.mark.parametrize(
    ("uses", "idle_s", "told"), [(2, 0.0, "now"), (0, None, "never"), (0, 65.0, "1m ago")]
)
def test_a_holder_tells_its_last_use(uses: int, idle_s: float | None, told: str) -> None:
    holder = Holder(
        replica="r-1", model="qwen", adapter="sql", version="0123abcd4567", state="loaded",
        since=EARLIER, how="loaded", uses=uses, idle_s=idle_s, gateways=("gw-1", "gw-2"),
    )  # fmt: skip
    row = dict(
        zip(
            adapterview.HOLDER_COLUMNS,
            adapterview.holder_row(Held(node="n1", holder=holder), NOW),
            strict=True,
        )
    )
    assert (row["last used"], row["uses"], row["loaded"]) == (told, str(uses), "5m ago")
    assert (row["how"], row["gateways"]) == ("asked for", "gw-1, gw-2")


# Watching --------------------------------------------------------------------------------------------


def test_each_phase_is_said_once() -> None:
    reading = msgspec.structs.replace(ADAPTER, phase="reading")
    fetching = msgspec.structs.replace(ADAPTER, phase="fetching")
    assert adapterview.news(None, reading) == (
        "reading     its configuration and file list, at acme/sql-lora",
    )
    assert adapterview.news(reading, reading) == ()
    assert adapterview.news(
        reading, fetching, "rank 16, 4 MiB;\nits base could not be compared"
    ) == (
        "fits        qwen (trained on Qwen/Qwen2.5-7B-Instruct): rank 16, 4 MiB; its base could not be compared",
    )
    assert adapterview.news(None, msgspec.structs.replace(fetching, trained_on="")) == (
        "fits        qwen: rank 16, 4 MiB",
    )
    assert adapterview.news(fetching, ADAPTER) == (
        "ready       version 0123abcd4567; ask for sql or tables or qwen:sql",
    )
    assert adapterview.news(fetching, msgspec.structs.replace(ADAPTER, phase="refused")) == ()


def file(key: str, phase: Any, **more: Any) -> File:
    copy = Copy(mirror="cp-1", phase=phase, since=NOW, **more)
    return File(
        key=key, repo="acme/sql-lora", commit="c", path=key, published_bytes=9, copies=(copy,)
    )


def test_bytes_are_those_of_all_its_files_together() -> None:
    files = {"k1": file("k1", "fetching"), "k2": file("k2", "present")}
    assert adapterview.amount(ADAPTER, files, {}) is None
    told = FileProgress(key="k1", bytes=1024**2, total_bytes=9, rate_bytes_s=1024.0**2)
    other = FileProgress(key="x", bytes=7, total_bytes=9)
    amount = adapterview.amount(ADAPTER, files, {"k1": told, "x": other})
    assert amount is not None
    assert amount.text() == "fetching 2 MiB of 4 MiB (50 %), 1 MiB/s, 2s left"


def test_a_file_that_does_not_come_says_why_until_it_comes() -> None:
    failed = file("k1", "failed", code="no_progress", reason="no byte came", retry_at=NOW)
    assert adapterview.trouble(failed) == "k1: no byte came [no_progress]; it is fetched again"
    again = Copy(mirror="cp-2", phase="fetching", since=NOW)
    both = msgspec.structs.replace(failed, copies=(*failed.copies, again))
    assert adapterview.trouble(both) is None
    assert adapterview.trouble(file("k1", "present")) is None
    for_good = file("k1", "failed", code="checksum_mismatch", reason="it is not what was published")
    assert adapterview.trouble(for_good) == ("k1: it is not what was published [checksum_mismatch]")
