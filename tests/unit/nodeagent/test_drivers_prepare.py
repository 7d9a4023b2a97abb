"""How launches become process descriptions: what is filled in, what is refused, where keys go."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import (
    Driver,
    EngineStart,
    SecretMissing,
    StartRefused,
    inherited,
    secrets_in,
)
from nodeagent.drivers.llamacpp import LlamacppDriver
from schemas.model import SecretRef
from schemas.plan import Launch

ROOT = Path(__file__).resolve().parents[3]
KEY = "the-key-of-this-launch"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/home/x", "YARD_NATS_URL": "nats://x"}

COMMAND = Launch(
    model="org/my model",
    incarnation="i",
    profile="any",
    revision="1",
    engine="command",
    source="",
    command=("sh", "server.py", "--port=${PORT}", "${HOST}", "${MODEL}", "$HOME", "${PATH}"),
)


def no_secrets(name: str) -> str:
    raise SecretMissing(f"no secret {name!r}")


def prepare(driver: Driver, launch: Launch, secrets=no_secrets) -> EngineStart | StartRefused:
    return driver.prepare(
        launch, replica="r-1", host="127.0.0.1", port=20001, key=KEY, secrets=secrets
    )


def started(driver: Driver, launch: Launch, secrets=no_secrets) -> EngineStart:
    start = prepare(driver, launch, secrets)
    assert isinstance(start, EngineStart), start
    return start


def refused(driver: Driver, launch: Launch, secrets=no_secrets) -> StartRefused:
    found = prepare(driver, launch, secrets)
    assert isinstance(found, StartRefused), found
    return found


@pytest.fixture
def gguf_file(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    return str(path)


def llama(source: str, *args: str) -> Launch:
    return Launch(
        model="smollm2",
        incarnation="i",
        profile="cpu",
        revision="1",
        engine="llamacpp",
        source=source,
        args=args,
    )


def test_command_fills_in_its_four_words_and_nothing_else() -> None:
    start = started(CommandDriver(ENVIRONMENT), COMMAND)
    assert start.argv == (
        *("sh", "server.py", "--port=20001", "127.0.0.1", "org/my model", "$HOME", "${PATH}"),
    )
    assert start.endpoint == "http://127.0.0.1:20001"
    assert start.ready == "probe"
    assert "/v1/chat/completions" in start.paths


def test_command_values_are_not_read_again() -> None:
    """A model named like a word is not replaced a second time."""
    launch = msgspec.structs.replace(COMMAND, model="${PORT}", command=("sh", "${MODEL}"))
    assert started(CommandDriver(ENVIRONMENT), launch).argv == ("sh", "${PORT}")


def test_command_has_a_key_only_where_the_profile_says_how() -> None:
    start = started(CommandDriver(ENVIRONMENT), COMMAND)
    assert not start.has_key
    assert KEY not in start.environment.values()
    launch = msgspec.structs.replace(COMMAND, key_env="API_KEY")
    start = started(CommandDriver(ENVIRONMENT), launch)
    assert start.has_key
    assert start.environment["API_KEY"] == KEY
    assert "API_KEY" in start.secret_names
    assert KEY not in " ".join(start.argv)


def test_engines_do_not_inherit_the_yard_s_own_settings() -> None:
    assert inherited(ENVIRONMENT) == {"PATH": "/usr/bin:/bin", "HOME": "/home/x"}
    start = started(CommandDriver(ENVIRONMENT), COMMAND)
    assert "YARD_NATS_URL" not in start.environment


def test_command_refuses_a_program_or_source_that_is_not_there(tmp_path: Path) -> None:
    launch = msgspec.structs.replace(COMMAND, command=("/nowhere/server",))
    found = refused(CommandDriver(ENVIRONMENT), launch)
    assert (found.code, "/nowhere/server" in found.sentence) == ("invalid", True)
    launch = msgspec.structs.replace(COMMAND, source=str(tmp_path / "gone"))
    found = refused(CommandDriver(ENVIRONMENT), launch)
    assert found.code == "source_missing"
    assert str(tmp_path / "gone") in found.sentence
    assert refused(CommandDriver(ENVIRONMENT), llama("")).code == "invalid"


def test_secrets_come_from_files_and_are_marked(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("hf_secret\n")
    launch = msgspec.structs.replace(COMMAND, env={"HF_TOKEN": SecretRef(secret="hf"), "A": "b"})
    start = started(CommandDriver(ENVIRONMENT), launch, secrets_in(tmp_path))
    assert start.environment["HF_TOKEN"] == "hf_secret"
    assert start.environment["A"] == "b"
    assert start.secret_names == ("HF_TOKEN",)
    launch = msgspec.structs.replace(COMMAND, env={"T": SecretRef(secret="none")})
    found = refused(CommandDriver(ENVIRONMENT), launch, secrets_in(tmp_path))
    assert found.code == "secret_missing"
    assert "'none'" in found.sentence


@pytest.mark.parametrize(
    "name",
    ["yard.key", "node-local.key", "nats-admin.password", "api.token", "../x", "", "a/b", ".x"],
)
def test_the_yard_s_own_secrets_are_given_to_no_engine(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    for own in ("yard.key", "node-local.key", "nats-admin.password", "api.token", ".x"):
        (tmp_path / "in" / own).write_text("own")
    (tmp_path / "x").write_text("outside")
    with pytest.raises(SecretMissing):
        secrets_in(tmp_path / "in")(name)


def test_a_profile_may_let_the_engine_keep_past_prompts(gguf_file: str) -> None:
    start = started(LlamacppDriver(environment=ENVIRONMENT), llama(gguf_file, "--cache-ram", "64"))
    given = dict(zip(start.argv[3::2], start.argv[4::2], strict=True))
    assert json.loads(given["--set"]) == {"cache_ram_mib": 64}


def test_llamacpp_runs_our_child_with_the_flags_as_attributes(gguf_file: str) -> None:
    start = started(LlamacppDriver(environment=ENVIRONMENT), llama(gguf_file, "--ctx-size", "2048"))
    assert start.argv[:2] == (sys.executable, "-I")
    given = dict(zip(start.argv[3::2], start.argv[4::2], strict=True))
    assert json.loads(given.pop("--set")) == {"n_ctx": 2048, "cache_ram_mib": 0}
    assert given == {
        "--model": gguf_file,
        "--alias": "smollm2",
        "--host": "127.0.0.1",
        "--port": "20001",
    }
    assert start.ready == "pipe"
    assert start.has_key
    assert start.environment["YARD_ENGINE_KEY"] == KEY
    assert start.environment["GGML_NO_BACKTRACE"], "one that aborts waits for no debugger"
    assert start.secret_names == ("YARD_ENGINE_KEY",)
    assert KEY not in " ".join(start.argv)


def test_llamacpp_by_path_passes_arguments_through_and_ours_win(gguf_file: str) -> None:
    driver = LlamacppDriver("/opt/llama-server", environment=ENVIRONMENT)
    start = started(driver, llama(gguf_file, "--some-new-flag", "--port", "1"))
    assert start.argv[:4] == ("/opt/llama-server", "--some-new-flag", "--port", "1")
    assert start.argv[-4:] == ("--port", "20001", "--metrics", "--slots")
    assert start.ready == "probe"
    assert start.environment["LLAMA_API_KEY"] == KEY
    assert KEY not in " ".join(start.argv)


def test_llamacpp_refuses_flags_it_cannot_set(gguf_file: str) -> None:
    found = refused(LlamacppDriver(environment=ENVIRONMENT), llama(gguf_file, "--no-such-flag"))
    assert found.code == "invalid"
    assert "--no-such-flag" in found.sentence


def test_llamacpp_refuses_what_is_no_gguf(tmp_path: Path) -> None:
    driver = LlamacppDriver(environment=ENVIRONMENT)
    assert refused(driver, llama(str(tmp_path / "gone.gguf"))).code == "source_missing"
    assert refused(driver, llama("")).code == "source_missing"
    assert refused(driver, llama(str(tmp_path))).code == "source_missing"
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<!doctype html>")
    found = refused(driver, llama(str(page)))
    assert found.code == "source_invalid"
    assert "is not a GGUF file" in found.sentence
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    assert refused(driver, llama(str(empty))).code == "source_invalid"


def test_drivers_say_what_they_are(tmp_path: Path) -> None:
    info = LlamacppDriver(environment=ENVIRONMENT).info()
    assert info.name == "llamacpp"
    assert info.version.startswith("xllamacpp 20")
    assert {"llama", "qwen2", "gemma3"} <= set(info.architectures)
    assert CommandDriver(ENVIRONMENT).info().name == "command"
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho 'version: 6999 (abcdef)' >&2\n")
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    assert LlamacppDriver(str(server)).info().version == "llama-server 6999 (abcdef)"
    assert "unknown" in LlamacppDriver(str(tmp_path / "gone")).info().version


def test_the_names_gguf_knows_are_had_without_what_it_brings() -> None:
    ask = (
        "import sys\nfrom nodeagent.drivers.llamacpp import LlamacppDriver\n"
        "LlamacppDriver().info()\nassert 'numpy' not in sys.modules\n"
        "import gguf\nfrom nodeagent.drivers import llamacpp\n"
        "assert llamacpp._known_architectures() == set(gguf.MODEL_ARCH_NAMES.values())\n"
    )
    # In a process of its own: tests bring numpy themselves.
    subprocess.run([sys.executable, "-c", ask], check=True, cwd=ROOT)


def test_no_driver_claims_what_it_does_not_implement() -> None:
    for driver in (CommandDriver(ENVIRONMENT), LlamacppDriver(environment=ENVIRONMENT)):
        assert driver.capabilities.parking == hasattr(driver, "park")
        assert driver.capabilities.adapters == hasattr(driver, "load_adapter")


def a_llama_server(folder: Path, devices: str) -> Path:
    server = folder / "llama-server"
    server.write_text(
        f"#!/bin/sh\nif [ $1 = --list-devices ]; then cat <<'END'\n{devices}\nEND\n"
        "else echo 'version: 6999 (abcdef)'; fi\n"
    )
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    return server


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ("Available devices:", ("cpu",)),
        ("Available devices:\n  BLAS: OpenBLAS (0 MiB, 0 MiB free)", ("cpu",)),
        ("Available devices:\n  RPC0: 10.0.0.2:50052 (16000 MiB, 15000 MiB free)", ("cpu",)),
        (
            "ggml_cuda_init: found 1 CUDA devices:\nAvailable devices:\n"
            "  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)",
            ("cpu", "gpu"),
        ),
        ("Available devices:\n  Vulkan0: Radeon (TM) (8176 MiB, 8000 MiB free)", ("cpu", "gpu")),
        ("error: unknown argument: --list-devices", ("cpu",)),
    ],
)
def test_a_llama_server_runs_on_gpu_cards_only_where_it_lists_one(tmp_path, devices, kinds):
    server = a_llama_server(tmp_path, devices)
    info = LlamacppDriver(str(server), environment=ENVIRONMENT).info()
    assert (info.card_kinds, info.version) == (kinds, "llama-server 6999 (abcdef)")


def test_the_embedded_engine_runs_on_what_its_own_build_sees():
    assert LlamacppDriver(environment=ENVIRONMENT).info().card_kinds == ("cpu",)
    assert LlamacppDriver("/no/such/llama-server").info().card_kinds == ("cpu",)
