"""yardctl as a program: every ending is an exit code and a sentence, never a traceback."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.ctl import acts, connect, main, reads, show
from controlplane.ctl.connect import Api, find_place
from controlplane.ctl.failures import CtlError, NotKnownYet, RejectedByYard, Unreachable
from tests.support.aio import run

Ctl = Callable[..., int]


@pytest.fixture
def ctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    for name in ("YARD_NATS", "YARD_API", "YARD_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YARD_DATA", str(tmp_path / "data"))
    return lambda *arguments: main.main(list(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("model",),
        ("model", "add"),
        ("model", "scale", "a", "--min", "x", "--max", "1"),
        ("model", "scale", "a", "--min", "-1", "--max", "1"),
        ("model", "load", "a", "--for", "soon"),
        ("status", "-o", "yaml"),
        ("events", "--since", "yesterday"),
        ("events", "a b"),
        ("up", "--catalog", "/nowhere.yaml"),
        ("up", "--gateway-port", "99999"),
        ("apply", "-f", "/nowhere.yaml"),
        ("command", "wait", "\udcff"),
    ],
)
def test_a_usage_mistake_is_64(
    ctl: Ctl, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl(*arguments) == 64
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize("arguments", [("--help",), ("model", "--help"), ("--version",)])
def test_help_is_no_failure(ctl: Ctl, arguments: tuple[str, ...]) -> None:
    assert ctl(*arguments) == 0


def test_no_yard_is_69_and_says_how_to_start_one(
    ctl: Ctl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl("status") == 69
    assert "yardctl up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RejectedByYard("no [exists]", "a.yaml:3: taken"), 2),
        (NotKnownYet("ask again"), 3),
        (Unreachable("nobody"), 69),
        (CtlError("broken"), 1),
        (RuntimeError("a fault of ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_failure_has_its_code_and_no_traceback(
    ctl: Ctl,
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(acts, "cordon", failing)
    assert ctl("node", "cordon", "n") == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out == ""
    if isinstance(error, RejectedByYard):
        assert said.err == "yardctl: no [exists]\n  a.yaml:3: taken\n"


def test_a_wrong_catalog_is_refused_before_anything_is_asked(
    ctl: Ctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("- name: a\n  name: b\n")
    assert ctl("apply", "-f", str(file)) == 64
    assert capsys.readouterr().err == f"yardctl: {file}:2: the key 'name' is given twice\n"


def test_model_add_takes_one_entry(
    ctl: Ctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("- {name: a}\n- {name: b}\n")
    assert ctl("model", "add", "-f", str(file)) == 64
    assert "use `yardctl apply`" in capsys.readouterr().err


def test_more_entries_than_one_command_carries_are_refused(
    ctl: Ctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("".join(f"- {{name: m{n}, description: {'x' * 100}}}\n" for n in range(800)))
    assert ctl("apply", "-f", str(file)) == 64
    assert "in several files" in capsys.readouterr().err


# Where the yard is ------------------------------------------------------------------------------------


def test_addresses_come_from_flags_environment_file_defaults_in_that_order(tmp_path: Path) -> None:
    none = find_place(data=tmp_path, environment={})
    assert (none.nats_url, none.api_url) == ("nats://127.0.0.1:4222", "http://127.0.0.1:8081")
    assert none.monitoring_url is None
    ports = {"nats_port": 1, "api_port": 2, "monitoring_port": 3, "gateway_port": 4}
    (tmp_path / "yard.json").write_text(json.dumps(ports))
    environment = {"YARD_DATA": str(tmp_path)}
    file = find_place(environment=environment)
    assert (file.nats_url, file.api_url) == ("nats://127.0.0.1:1", "http://127.0.0.1:2")
    assert (file.monitoring_url, file.gateway_url) == ("http://127.0.0.1:3", "http://127.0.0.1:4")
    environment |= {"YARD_NATS": "nats://n", "YARD_API": "http://a/"}
    assert find_place(environment=environment).nats_url == "nats://n"
    assert find_place(environment=environment).api_url == "http://a"
    assert find_place(environment=environment, nats="nats://f").nats_url == "nats://f"


def test_a_damaged_yard_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "yard.json").write_text("[1")
    assert find_place(data=tmp_path, environment={}).nats_url == "nats://127.0.0.1:4222"


# The API ----------------------------------------------------------------------------------------------


def asked(handler: Callable[[httpx.Request], httpx.Response], path: str = "/v1/models") -> Any:
    async def story() -> Any:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            return await Api(client, "http://yard").data(path)

    return run(story())


def test_states_are_read_without_their_position() -> None:
    body = {"data": [{"name": "a"}], "applied_seq": 5}
    assert asked(lambda _: httpx.Response(200, json=body)) == [{"name": "a"}]


def test_a_refusal_of_the_api_is_told_in_its_own_words() -> None:
    body = {"error": {"code": "not_found", "sentence": "there is no model 'a'"}}
    with pytest.raises(CtlError, match="there is no model 'a'"):
        asked(lambda _: httpx.Response(404, json=body))


def test_something_else_on_the_port_is_no_yard() -> None:
    with pytest.raises(CtlError, match="is not a yard's API"):
        asked(lambda _: httpx.Response(200, text="<html>"))


def test_an_api_that_does_not_answer_is_unreachable() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unreachable, match=r"http://yard does not answer"):
        asked(refuse)


def test_a_name_may_hold_anything_and_stays_one_path() -> None:
    assert reads.path_of("models", "a/b ü?") == "/v1/models/a%2Fb%20%C3%BC%3F"


@pytest.mark.parametrize("name", ["a", "tiny"])
def test_a_model_is_shown_by_its_name_or_an_alias(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"name": "a", "aliases": ["tiny"]}

    def answer(request: httpx.Request) -> httpx.Response:
        bodies = {"/v1/models": [entry], "/v1/models/a": entry}
        return httpx.Response(200, json={"data": bodies[request.url.path], "applied_seq": 5})

    async def story() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await reads.show_model(Api(client, "http://yard"), name, "json")

    run(story())
    assert json.loads(capsys.readouterr().out) == entry


@pytest.mark.parametrize(("extra", "most"), [((), 2), (("--max", "3"), 3)])
def test_a_scale_without_max_keeps_exactly_min(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], most: int
) -> None:
    asked_for: list[tuple[str, int, int]] = []

    async def scale(_: Any, name: str, minimum: int, maximum: int, *__: Any) -> None:
        asked_for.append((name, minimum, maximum))

    monkeypatch.setattr(main.acts, "scale", scale)
    assert ctl("model", "scale", "a", "--min", "2", *extra) == 0
    assert asked_for == [("a", 2, most)]


# How it looks -----------------------------------------------------------------------------------------


def test_what_a_command_says_of_itself_has_no_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """An outcome that was read from the log holds tuples; one from the API, lists."""
    show.print_fields({"id": "x", "refs": ("a", "b"), "lines": (), "problems": ("two words",)})
    assert capsys.readouterr().out == "id:       x\nrefs:     a, b\nproblems:\n  - two words\n"


MODEL = {
    "name": "a",
    "aliases": ["x"],
    "scaling": {"min": 0, "max": 2},
    "profiles": [{"name": "cpu"}],
}


KEPT = MODEL | {"scaling": {"min": 2, "max": 2}}


@pytest.mark.parametrize(
    ("model", "phases", "demand", "expected"),
    [
        (MODEL, [], "idle", ("a", "0..2", "idle", "0/0", "cpu", "x")),
        (MODEL, ["ready", "starting"], "ready", ("a", "0..2", "ready", "1/2", "cpu", "x")),
        (MODEL, ["starting", "failed"], "loading", ("a", "0..2", "starting", "0/1", "cpu", "x")),
        (MODEL, [], "refused", ("a", "0..2", "refused", "0/0", "cpu", "x")),
        (KEPT, ["ready"], "ready", ("a", "2", "ready", "1/2", "cpu", "x")),
        (KEPT, ["ready"] * 3, "ready", ("a", "2", "ready", "3/3", "cpu", "x")),
        (MODEL | {"scaling": {}}, [], "idle", ("a", "off", "off", "0/0", "cpu", "x")),
    ],
)
def test_a_row_of_models(
    model: dict[str, Any], phases: list[str], demand: str, expected: tuple[str, ...]
) -> None:
    replicas: list[reads.Row] = [{"model": "a", "phase": phase} for phase in phases]
    activations: list[reads.Row] = [{"model": "a", "phase": demand}]
    assert reads.model_row(model, replicas, activations) == expected


@pytest.mark.parametrize(
    ("standing", "running", "expected"),
    [
        (None, True, "reachable"),
        (None, False, "agent stopped"),
        ({"admin": "cordoned", "reach": "reachable"}, True, "cordoned"),
        ({"admin": "cordoned", "reach": "lost"}, True, "lost"),
    ],
)
def test_a_node_in_one_word(standing: Any, running: bool, expected: str) -> None:
    assert reads.standing_of({"standing": standing, "running": running}) == expected


def test_a_table_on_a_pipe_is_plain_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_table(("name", "why"), [("a", "w" * 300), ("bb", "x")], "none")
    assert capsys.readouterr().out.splitlines() == [
        "NAME  WHY",
        "a     " + "w" * 300,
        "bb    x",
    ]
    show.print_table(("name",), [], "there is none")
    assert capsys.readouterr().out == "there is none\n"


def test_one_thing_is_told_field_by_field(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_fields(
        {
            "name": "a",
            "empty": "",
            "memory_bytes": 1024**3,
            "off": False,
            "scaling": {"min": 0, "max": 1},
            "profiles": [{"name": "p"}],
            "aliases": ["x", "y"],
        }
    )
    assert capsys.readouterr().out == (
        "name:         a\n"
        "memory_bytes: 1 GiB\n"
        "off:          no\n"
        "scaling:\n"
        "  min: 0\n"
        "  max: 1\n"
        "profiles:\n"
        "  -\n"
        "    name: p\n"
        "aliases:      x, y\n"
    )


def test_figures() -> None:
    assert [show.length(s) for s in (-1, 59, 60, 7200, 200000)] == ["0s", "59s", "1m", "2h", "2d"]
    assert show.size(None) == "-"
    assert show.mode({"min": 2, "max": 2}) == "2"
    assert connect.HOST == "127.0.0.1"


def test_the_program_starts_without_the_clients_it_may_not_need() -> None:
    heavy = "{'httpx', 'nats', 'litestar', 'uvicorn', 'aiosqlite', 'psutil'}"
    look = f"import sys, controlplane.ctl.main; print(sorted({heavy} & sys.modules.keys()))"
    found = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=30, check=True
    )
    assert found.stdout.strip() == "[]"
