"""docs/adapters.md and the README say what the code does: entries are read, the command line and the codes are real."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.domain.entries import ParsedEntry, parse
from nodeagent.drivers.driver import EngineStart
from nodeagent.drivers.vllm import PREFIXES, RUNTIME, VllmDriver
from schemas import codes
from schemas.plan import Launch
from schemas.vllm_flags import RANKS
from tests.support.fake_vllm import vllm_program

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[Any]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def entries(text: str) -> list[dict[str, Any]]:
    return [entry for block in blocks(text) if isinstance(block, list) for entry in block]


@pytest.mark.parametrize("raw", [*entries(TEXT), *entries(README)], ids=lambda raw: raw["name"])
def test_every_entry_that_is_shown_is_accepted(raw: dict[str, Any]) -> None:
    found = parse(raw, "[0]")
    assert isinstance(found, ParsedEntry), found


def started(tmp_path: Path, **more: Any) -> EngineStart:
    """What the driver makes of the entry that is shown."""
    (raw,) = entries(TEXT)
    entry = parse(raw, "[0]")
    assert isinstance(entry, ParsedEntry)
    (profile,) = entry.profiles
    weights = tmp_path / "weights"
    weights.mkdir()
    launch = Launch(
        model=entry.name, incarnation="i", revision="v", profile=profile.name, engine="vllm",
        source=str(weights), args=profile.args,
        adapters=entry.max_loaded_adapters, **more,
    )  # fmt: skip
    driver = VllmDriver(
        vllm_program(tmp_path / "bin"), {}, adapter_root=tmp_path / "files" / "sets"
    )
    start = driver.prepare(
        launch, replica="r-1", host="127.0.0.1", port=20000, key="k", secrets=lambda name: name
    )
    assert isinstance(start, EngineStart), start
    return start


def test_the_command_line_that_is_shown_is_the_one_that_is_run(tmp_path: Path) -> None:
    shown = re.search(r"    (vllm serve .*?)\n\n", TEXT, re.DOTALL)
    assert shown is not None
    words = shlex.split(shown[1].replace("\\\n", " ").replace("PORT", "20000"))
    argv = list(started(tmp_path).argv)
    assert words[:2] == ["vllm", argv[1]]
    assert words[3:] == argv[3:]


def test_the_variables_that_are_shown_are_the_ones_that_are_set(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| `(VLLM_\w+)` \| (.*?) \|", TEXT, re.MULTILINE))
    environment = started(tmp_path).environment
    assert set(rows) == {name for name in environment if name.startswith("VLLM_")}
    assert rows[RUNTIME] == f"`{environment[RUNTIME]}`"
    assert environment[PREFIXES] == str(tmp_path / "files" / "sets")
    assert rows[PREFIXES] == "`DATA/files/sets`"


def test_the_ranks_that_are_shown_are_those_there_are() -> None:
    assert f"16, or the next of {', '.join(map(str, RANKS))} that" in TEXT


def test_every_code_that_is_explained_exists() -> None:
    known = {value for name, value in vars(codes).items() if name.isupper()}
    catalog, load = (
        TEXT[TEXT.index(begin) : TEXT.index(end)]
        for begin, end in (
            ("### What is refused before", "*Which base counts"),
            ("## When a load fails", "A failure evicts nobody"),
        )
    )
    told = [
        set(re.findall(r"`(\w+)`", row.split("|")[1]))
        for row in (*catalog.splitlines(), *load.splitlines())
        if row.startswith("| `")
    ]
    assert len(told) >= 10
    assert set().union(*told) <= known
    of_adapters = {
        codes.NO_ADAPTERS, codes.NOT_AN_ADAPTER, codes.UNSUPPORTED_ADAPTER, codes.RANK_TOO_HIGH,
        codes.WRONG_BASE, codes.LOAD_REFUSED, codes.LOAD_FAILED, codes.LOAD_TIMEOUT,
        codes.FILES_MISSING, codes.ROUTE_OFF,
    }  # fmt: skip
    assert of_adapters <= set().union(*told)
