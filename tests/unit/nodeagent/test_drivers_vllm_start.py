"""How vLLM is started for adapters: what the yard adds to a profile's arguments, and what of it no profile can open."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent.drivers.driver import EngineStart, SecretMissing, StartRefused
from nodeagent.drivers.vllm import PATHS, PREFIXES, RUNTIME, VllmDriver
from nodeagent.parkbook import told_of
from schemas.plan import Launch
from schemas.settings import NodeagentSettings
from tests.support.fake_vllm import vllm_program

LAUNCH = Launch(
    model="org/my model",
    incarnation="i",
    profile="gpu",
    revision="1",
    engine="vllm",
    source="org/some-model",
    args=("--max-model-len", "4096"),
    adapters=4,
)
ROOT = Path("/srv/yard/files/sets")


def no_secrets(name: str) -> str:
    raise SecretMissing(f"no secret {name!r}")


@pytest.fixture
def program(tmp_path: Path) -> str:
    return vllm_program(tmp_path / "bin")


def prepared(
    program: str, launch: Launch, root: Path | None = ROOT, more: Mapping[str, str] | None = None
) -> EngineStart | StartRefused:
    """`more` stands in the environment of the agent."""
    inherited = {"PATH": "/usr/bin:/bin", **(more or {})}
    driver = VllmDriver(program, inherited, adapter_root=root)
    return driver.prepare(
        launch, replica="r-1", host="127.0.0.1", port=20001, key="k", secrets=no_secrets
    )


def started(
    program: str, launch: Launch, root: Path | None = ROOT, more: Mapping[str, str] | None = None
) -> EngineStart:
    start = prepared(program, launch, root, more)
    assert isinstance(start, EngineStart), start
    return start


def added(start: EngineStart) -> tuple[str, ...]:
    """What comes behind the arguments every vLLM of ours has."""
    return start.argv[start.argv.index("--enable-sleep-mode") + 1 :]


def test_what_a_profile_leaves_open_the_yard_sets(program: str) -> None:
    start = started(program, LAUNCH)
    assert added(start) == (
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "5", "--max-lora-rank", "16"),
    )
    assert start.environment[RUNTIME] == "1"
    assert start.environment[PREFIXES] == str(ROOT)


def test_the_engine_is_started_for_the_entry_s_rank_and_a_batch_of_a_few(program: str) -> None:
    many = added(started(program, replace(LAUNCH, adapters=64, lora_rank=128)))
    assert many == (
        *("--enable-lora", "--max-loras", "8", "--max-cpu-loras", "65", "--max-lora-rank", "128"),
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--enable-lora",), ("--max-loras", "4", "--max-cpu-loras", "5", "--max-lora-rank", "32")),
        (
            ("--max_lora_rank=64", "--max-loras", "2"),
            ("--enable-lora", "--max-cpu-loras", "5"),
        ),
        (
            ("--max-cpu-loras", "4"),
            ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "32"),
        ),
        (
            ("--max-loras", "12"),
            ("--enable-lora", "--max-cpu-loras", "12", "--max-lora-rank", "32"),
        ),
        (("--enable-lora", "--max-loras=1", "--max-cpu-loras=9", "--max-lora-rank=8"), ()),
    ],
)
def test_what_a_profile_says_itself_stays(
    program: str, args: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    start = started(program, replace(LAUNCH, args=args, lora_rank=32))
    assert start.argv[3 : 3 + len(args)] == args
    assert added(start) == expected


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--max-cpu-loras", "3"), ("3", "4")),
        (("--max-loras", "9", "--max-cpu-loras", "8"), ("9", "8")),
        (("--no-enable-lora",), ("4",)),
        (("--max-loras", "many"), ("many",)),
    ],
)
def test_an_engine_that_could_not_keep_them_is_not_started(
    program: str, args: tuple[str, ...], told: tuple[str, ...]
) -> None:
    found = prepared(program, replace(LAUNCH, args=args))
    assert isinstance(found, StartRefused)
    assert found.code == "invalid"
    assert all(number in found.sentence for number in told)


def test_inv_2_without_adapters_nothing_opens_the_routes_that_load_them(program: str) -> None:
    opened = {RUNTIME: "True", PREFIXES: "/"}
    none = replace(LAUNCH, adapters=0, lora_rank=64, env=dict(opened))
    start = started(program, none, more=opened)
    assert added(start) == ()
    assert RUNTIME not in start.environment
    assert PREFIXES not in start.environment
    # A profile may load adapters of its own that nobody swaps.
    own = replace(none, args=("--enable-lora", "--lora-modules", "a=/srv/a"))
    assert RUNTIME not in started(program, own, more=opened).environment


def test_inv_2_a_profile_cannot_have_adapters_loaded_from_elsewhere(program: str) -> None:
    start = started(program, replace(LAUNCH, env={PREFIXES: "/:/etc", RUNTIME: "0"}))
    assert start.environment[PREFIXES] == str(ROOT)
    assert start.environment[RUNTIME] == "1"


def test_inv_2_gateways_are_kept_off_the_routes_that_load_adapters(program: str) -> None:
    assert started(program, LAUNCH).paths == PATHS
    assert not any("lora" in path or path == "/v1/models" for path in PATHS)


def test_a_folder_that_no_list_of_folders_can_name_is_not_named(program: str) -> None:
    for root in (Path("/srv/a:/b/sets"), None):
        start = started(program, LAUNCH, root, {PREFIXES: "/"})
        assert start.environment[RUNTIME] == "1"
        assert PREFIXES not in start.environment
    here = started(program, LAUNCH, Path("sets")).environment[PREFIXES]
    assert here == str(Path("sets").absolute())


def test_the_inventory_tells_that_it_loads_adapters(program: str) -> None:
    driver = VllmDriver(program, {"PATH": "/usr/bin:/bin"})
    told = told_of(driver, NodeagentSettings(), {})
    assert told.adapters
    assert driver.info().adapters
