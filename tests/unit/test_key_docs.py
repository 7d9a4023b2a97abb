"""docs/keys.md says what the code does: every option and every code is real, and none is left out."""

import re
from pathlib import Path

import msgspec
import rich_click as click

from controlplane.ctl.main import cli
from gateway.domain.answers import CODES
from schemas.key import KEY_PREFIX
from schemas.settings import GatewaySettings

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
SYNOPSIS = TEXT[TEXT.index("    yardctl key create") : TEXT.index("## Creating one")]


def options_of(command: click.Command) -> set[str]:
    """The long options of a command, without those every command has."""
    found = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }
    return found - {"--output", "--timeout", "--help"}


def test_every_command_is_shown_with_every_option() -> None:
    group = cli.commands["key"]
    assert isinstance(group, click.Group)
    shown = re.split(r"yardctl key (\w+)", SYNOPSIS)[1:]
    told = dict(zip(shown[::2], shown[1::2], strict=True))
    assert set(told) == set(group.commands)
    for name, command in group.commands.items():
        assert set(re.findall(r"--[a-z-]+", told[name])) == options_of(command), name


def test_the_table_of_options_tells_each_of_a_new_key() -> None:
    group = cli.commands["key"]
    assert isinstance(group, click.Group)
    table = TEXT[TEXT.index("| option |") : TEXT.index("## Using it")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = set(re.findall(r"--[a-z-]+", " ".join(rows)))
    assert told == options_of(group.commands["create"])


def test_the_codes_that_are_explained_have_that_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {code for _, code in rows} == {
        "invalid_api_key",
        "key_not_allowed",
        "key_may_not_activate",
        "rate_limit_exceeded",
    }
    for status, code in rows:
        assert CODES[code].status == int(status)  # pyright: ignore[reportArgumentType]


def test_the_settings_that_are_explained_are_those_there_are() -> None:
    table = TEXT[TEXT.index("| `gateway.keys` |") : TEXT.index("A yard that asked")]
    (field,) = (f for f in msgspec.structs.fields(GatewaySettings) if f.name == "keys")
    told = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(told) == sorted(["auto", "required", "off"])
    assert all(f"'{value}'" in str(field.type) for value in told)


def test_the_key_that_is_shown_looks_like_one() -> None:
    (shown,) = re.findall(rf"^{KEY_PREFIX}_.*$", TEXT, re.MULTILINE)
    assert re.fullmatch(rf"{KEY_PREFIX}_[a-z2-7]{{12}}_[A-Za-z0-9_-]{{43}}", shown)
    assert shown.split("_")[1] in TEXT[TEXT.index("yardctl key revoke ci") :]
