"""How a launch of engine vllm becomes a process: its command line, its key, its sleep, and what it refuses."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent.drivers.driver import EngineStart, SecretMissing, StartRefused
from nodeagent.drivers.vllm import VllmDriver
from schemas import vllm_flags
from schemas.model import Parking
from schemas.node import EngineInfo
from schemas.plan import Launch
from tests.support.fake_vllm import vllm_program

KEY = "the-key-of-this-launch"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/home/x", "YARD_NATS_URL": "nats://x"}
LAUNCH = Launch(
    model="org/my model",
    incarnation="i",
    profile="gpu",
    revision="1",
    engine="vllm",
    source="org/some-model",
    args=("--max-model-len", "4096"),
)


def no_secrets(name: str) -> str:
    raise SecretMissing(f"no secret {name!r}")


def prepare(driver: VllmDriver, launch: Launch) -> EngineStart | StartRefused:
    return driver.prepare(
        launch, replica="r-1", host="127.0.0.1", port=20001, key=KEY, secrets=no_secrets
    )


def started(driver: VllmDriver, launch: Launch) -> EngineStart:
    start = prepare(driver, launch)
    assert isinstance(start, EngineStart), start
    return start


def refused(driver: VllmDriver, launch: Launch) -> StartRefused:
    found = prepare(driver, launch)
    assert isinstance(found, StartRefused), found
    return found


@pytest.fixture
def driver(tmp_path: Path) -> VllmDriver:
    return VllmDriver(vllm_program(tmp_path / "bin"), ENVIRONMENT)


def test_it_serves_under_the_catalog_s_name_on_this_machine_alone(
    driver: VllmDriver, tmp_path: Path
) -> None:
    start = started(driver, LAUNCH)
    assert start.argv == (
        *(str(tmp_path / "bin" / "vllm"), "serve", "org/some-model", "--max-model-len", "4096"),
        *("--served-model-name", "org/my model", "--host", "127.0.0.1", "--port", "20001"),
        "--enable-sleep-mode",
    )
    assert (start.endpoint, start.ready) == ("http://127.0.0.1:20001", "probe")


def test_inv_2_gateways_are_kept_off_its_management_routes(driver: VllmDriver) -> None:
    paths = started(driver, LAUNCH).paths
    assert "/v1/chat/completions" in paths
    of_the_agent = ("lora", "sleep", "wake", "rpc", "cache", "metrics", "invocations", "models")
    assert not [path for path in paths for word in of_the_agent if word in path]
    assert not {"/health", "/load", "/ping", "/version", "/server_info", "/reset"} & {*paths}


def test_its_key_is_in_its_environment_alone(driver: VllmDriver) -> None:
    start = started(driver, LAUNCH)
    assert start.has_key
    assert start.environment["VLLM_API_KEY"] == KEY
    assert "VLLM_API_KEY" in start.secret_names
    assert KEY not in " ".join(start.argv)
    assert "YARD_NATS_URL" not in start.environment


def test_it_can_be_put_to_sleep_unless_it_is_parked_otherwise_or_not_at_all(
    driver: VllmDriver, tmp_path: Path
) -> None:
    def sleeps(driver: VllmDriver, parking: Parking | None) -> bool:
        start = started(driver, replace(LAUNCH, parking=parking))
        development = start.environment.get("VLLM_SERVER_DEV_MODE") == "1"
        assert development == ("--enable-sleep-mode" in start.argv)
        return development

    assert sleeps(driver, None)
    assert sleeps(driver, Parking(way="sleep"))
    assert not sleeps(driver, Parking(way="checkpoint"))
    assert not sleeps(driver, Parking(way="none"))
    node_does_not = VllmDriver(str(tmp_path / "bin" / "vllm"), ENVIRONMENT, parking=False)
    assert not sleeps(node_does_not, None)


def test_inv_2_a_profile_cannot_open_the_development_routes(driver: VllmDriver) -> None:
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "mine", "VLLM_LOGGING_LEVEL": "DEBUG"}
    launch = replace(LAUNCH, env=env, parking=Parking(way="none"))
    start = started(driver, launch)
    assert "VLLM_SERVER_DEV_MODE" not in start.environment
    assert start.environment["VLLM_API_KEY"] == KEY
    assert start.environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "80"),
        ("--port=80",),
        ("--host", "0.0.0.0"),
        ("--uds", "/tmp/x"),
        ("--api-key", "x"),
        ("--api_key=x",),
        ("--served-model-name", "other"),
        ("--served", "other"),
        ("--enable-sleep-mode",),
        ("--enable-sleep",),
        ("--ssl-keyfile", "x"),
        ("--middleware", "evil.module"),
        ("--trust-remote-code",),
        ("--trust_remote_code",),
        ("--worker-cls", "evil.Worker"),
        ("--config", "/tmp/more.yaml"),
        ("--conf", "/tmp/more.yaml"),
        ("--api-server-count", "4"),
        ("-asc", "4"),
        ("--data-parallel-size", "2"),
        ("-dp", "2"),
        ("--dtype", "half", "--", "x"),
        ("another-model", "--dtype", "half"),
    ],
)
def test_inv_2_arguments_that_would_undo_what_the_yard_sets_are_refused(
    driver: VllmDriver, args: tuple[str, ...]
) -> None:
    found = refused(driver, replace(LAUNCH, args=args))
    assert found.code == "invalid"
    assert any(found.sentence.startswith(word.partition("=")[0]) for word in args)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--max-model-len", "4096", "--gpu-memory-utilization", "0.8"),
        ("--tensor-parallel-size=2",),
        ("-tp", "2"),
        ("--max_num_seqs", "8"),
        ("--seed", "-1"),
        ("--compilation-config.level", "3"),
        ("--quantization", "fp8", "--enforce-eager"),
        ("--enable-prefix-caching", "--port-like-flag-nobody-knows", "1"),
    ],
)
def test_arguments_nobody_has_a_reason_to_refuse_are_vllm_s_own_to_judge(
    driver: VllmDriver, args: tuple[str, ...]
) -> None:
    assert vllm_flags.problems(args) == ()
    assert started(driver, replace(LAUNCH, args=args)).argv[3 : 3 + len(args)] == args


def test_it_refuses_weights_that_are_not_there(driver: VllmDriver, tmp_path: Path) -> None:
    here = tmp_path / "weights"
    here.mkdir()
    assert started(driver, replace(LAUNCH, source=str(here))).argv[2] == str(here)
    found = refused(driver, replace(LAUNCH, source=str(tmp_path / "gone")))
    assert found.code == "source_missing"
    assert str(tmp_path / "gone") in found.sentence
    assert refused(driver, replace(LAUNCH, source="")).code == "source_missing"
    for strange in ("--port", "-x/y", "relative", "a/b/c", "../up/there"):
        assert refused(driver, replace(LAUNCH, source=strange)).code == "source_invalid"


def test_a_node_without_vllm_says_so(tmp_path: Path) -> None:
    nowhere = VllmDriver("", {"PATH": str(tmp_path)})
    assert not nowhere.present
    assert refused(nowhere, LAUNCH).sentence == "this node has no vllm on its PATH"
    gone = VllmDriver(str(tmp_path / "vllm"), ENVIRONMENT)
    assert not gone.present
    assert refused(gone, LAUNCH).sentence == f"this node has no vllm at {tmp_path / 'vllm'}"


def test_it_is_found_on_the_path_and_tells_its_version(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    program = vllm_program(folder)
    found = VllmDriver("", {"PATH": f"{folder}:/usr/bin:/bin"})
    assert found.present
    told = found.info()
    assert told == EngineInfo(
        name="vllm",
        version="vllm 0.32.0",
        card_kinds=("gpu",),
        park_ways=("sleep",),
        adapters=True,
    )
    # What is installed beside it is known without starting it, which takes vLLM seconds.
    Path(program).write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "lib" / "python3.12" / "site-packages" / "vllm-0.33.1+cpu.dist-info").mkdir(
        parents=True
    )
    told = VllmDriver(program, ENVIRONMENT, parking=False).info()
    assert told == EngineInfo(
        name="vllm", version="vllm 0.33.1+cpu", card_kinds=("cpu",), adapters=True
    )


def test_a_program_that_tells_no_version_is_run_all_the_same(tmp_path: Path) -> None:
    program = Path(vllm_program(tmp_path / "bin"))
    program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    assert VllmDriver(str(program), ENVIRONMENT).info().version == "vllm"


def test_every_refusal_has_a_reason_that_reads_as_a_sentence() -> None:
    for flag in vllm_flags.REFUSED:
        (told,) = vllm_flags.problems((f"--{flag}",))
        assert told.startswith(f"--{flag} ")
        assert len(told.split()) > 4
