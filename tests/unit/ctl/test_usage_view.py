"""How usage is asked for and shown: as it was summed up, with means where sums of times mean nothing."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from controlplane.ctl import connect, main, usagereads
from schemas.usage import UsageRow, UsageTotal
from tests.support.aio import run

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def total(name: str = "", day: str = "", **fields: Any) -> Any:
    return msgspec.to_builtins(
        UsageTotal(day=day, row=UsageRow(**({"model": ""} | fields)), key_name=name)
    )


TOLD = [
    total(requests=3, key="", model="m", prompt_tokens=5),
    total(
        "ci",
        key="abc",
        model="m",
        requests=4,
        failed=1,
        prompt_tokens=100,
        cached_tokens=40,
        completion_tokens=50,
        estimated=2,
        first_token_ms=1200,
        first_tokens=3,
        duration_ms=60_000,
        waited_ms=2,
    ),
]


class Read:
    """An API that answers what it was given."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.query: dict[str, str] = {}

    async def get(self, path: str, **query: str) -> Any:
        assert path == "/v1/usage"
        self.query = query
        return {"data": self.told, "applied_seq": 1}


def show(told: Any, output: str = "table", **over: Any) -> dict[str, str]:
    api = Read(told)
    asked = {"days": 30, "by": ("key", "model"), "key": None, "model": None} | over
    run(usagereads.show_usage(api, output, NOW, **asked))  # type: ignore[arg-type]
    return api.query


def test_a_table_of_keys_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    query = show(TOLD)
    assert query == {"since": "2026-01-31", "by": "key,model"}
    head, without, ci, _, note = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["KEY", "MODEL", "REQUESTS", "FAILED"]
    assert without.split() == [
        "without",
        "a",
        "key",
        "m",
        "3",
        "0",
        "5",
        "0",
        "0",
        "-",
        "0",
        "ms",
        "0",
        "ms",
    ]
    assert ci.split() == [
        "ci",
        "(abc)",
        "m",
        "4",
        "1",
        "100",
        "40",
        "~50",
        "400",
        "ms",
        "15.0",
        "s",
        "0",
        "ms",
    ]
    assert note.startswith("~ ")


def test_what_is_asked_is_asked_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    days = [total(day="2026-02-28", requests=1), total(day="2026-03-01", requests=2)]
    query = show(days, days=1, by=("day",), key="a key", model="m")
    assert query == {"since": "2026-03-01", "by": "day", "key": "a key", "model": "m"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["DAY", "REQUESTS"],
        ["2026-02-28", "1"],
        ["2026-03-01", "2"],
    ]


def test_keys_stand_by_their_names_and_their_models_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = [
        total("Zoe", key="a", model="m"),
        total("", key="", model="m"),
        total("adam", key="z", model="n"),
        total("adam", key="z", model="m"),
        total("adam", key="b", model="m"),
    ]
    show(told)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("  ")[0].strip() for line in lines] == [
        "without a key",
        "adam (b)",
        "adam (z)",
        "adam (z)",
        "Zoe (a)",
    ]
    assert [line.split()[2] for line in lines[2:4]] == ["m", "n"]


def test_nothing_used_is_a_sentence_and_json_an_empty_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([])
    assert capsys.readouterr().out == "nothing was used since 2026-01-31\n"
    show([], key="nobody", model="tiny")
    says = "nothing was used of a model 'tiny' by a key 'nobody' since 2026-01-31\n"
    assert capsys.readouterr().out == says
    show([], "json")
    assert json.loads(capsys.readouterr().out) == []
    show(TOLD, "json")
    assert json.loads(capsys.readouterr().out) == TOLD


def test_the_command_takes_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    asked: list[Any] = []

    async def told(api: Any, *args: Any) -> None:
        asked.append(args)

    monkeypatch.setattr(usagereads, "show_usage", told)
    (tmp_path / "secrets").mkdir()
    connect.api_token_path(tmp_path).write_text("token")
    monkeypatch.setenv("YARD_DATA", str(tmp_path))
    assert main.main(["usage"]) == 0
    arguments = ["--days", "7", "--by", "day", "--by", "adapter", "--key", "k", "--model", "m"]
    assert main.main(["usage", *arguments, "-o", "json"]) == 0
    # Of a whole key only the id goes on.
    assert main.main(["usage", "--key", "yk_aaaabbbbcccc_the-secret"]) == 0
    assert [(a[0], *a[2:]) for a in asked] == [
        ("table", 30, ("key", "model"), None, None),
        ("json", 7, ("day", "adapter"), "k", "m"),
        ("table", 30, ("key", "model"), "aaaabbbbcccc", None),
    ]
    for wrong in (["--days", "0"], ["--by", "colour"], ["more"], ["--key", ""]):
        assert main.main(["usage", *wrong]) == 64
    capsys.readouterr()
