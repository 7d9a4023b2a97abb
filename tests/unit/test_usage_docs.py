"""docs/usage.md says what the code does: every option, column, parameter and number of it is real."""

import re
from pathlib import Path

import rich_click as click

from controlplane.ctl import usagereads
from controlplane.ctl.main import cli
from controlplane.projections.usagefile import DIMENSIONS
from events.streams import USAGE_KEPT_DAYS, stream_specs
from gateway.domain.tally import MAX_ROWS, OTHER

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")


def table_below(head: str) -> list[str]:
    """The first cells of a table."""
    lines = TEXT[TEXT.index(head) :].split("\n\n", 1)[0].splitlines()[2:]
    return [line.split("|")[1].strip() for line in lines]


def test_the_synopsis_has_every_option_and_no_other() -> None:
    (line,) = re.findall(r"^    yardctl usage .*$", TEXT, re.MULTILINE)
    options = {
        name
        for parameter in cli.commands["usage"].params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--") and name != "--output"
    }
    assert set(re.findall(r"--[a-z-]+", line)) == options
    (told,) = re.findall(r"--by ([a-z|]+)\]", line)
    assert set(told.split("|")) == set(usagereads.BY) == set(DIMENSIONS)


def test_the_columns_are_those_that_are_shown() -> None:
    assert table_below("| column |") == list(usagereads.SUMS)
    head = TEXT[TEXT.index("KEY  ") :].splitlines()[0]
    assert re.split(r"\s{2,}", head) == [c.upper() for c in ("key", "model", *usagereads.SUMS)]


def test_the_parameters_are_those_of_the_api() -> None:
    assert table_below("| parameter |") == ["`since`, `until`", "`by`", "`key`", "`model`"]


def test_its_numbers_are_those_of_the_code() -> None:
    (usage,) = (s for s in stream_specs() if s.name == "YARD_USAGE")
    assert f"({usage.config['max_bytes'] // 2**20} MiB) or {USAGE_KEPT_DAYS} days old" in TEXT
    assert f"above {MAX_ROWS:,} rows" in TEXT
    assert f"`{OTHER}`" in TEXT
