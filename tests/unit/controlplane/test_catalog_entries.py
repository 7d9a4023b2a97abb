"""One catalog entry: what is read, and that every mistake is named with its path and what was expected."""

from typing import Any

import pytest

from controlplane.domain import entries
from controlplane.domain.entries import ParsedEntry
from controlplane.domain.revision import profile_revision
from schemas import codes
from schemas.commands import Problem
from schemas.model import Parking, Profile, Scaling, SecretRef

GIB = 1024**3


def llama(**over: Any) -> dict[str, Any]:
    profile = {"name": "cpu", "engine": "llamacpp", "memory": "1GiB"} | over
    return {name: value for name, value in profile.items() if value is not ...}


def command(**over: Any) -> dict[str, Any]:
    profile = {
        "name": "any",
        "engine": "command",
        "command": "python3 server.py --port ${PORT}",
        "memory": "2GiB",
    } | over
    return {name: value for name, value in profile.items() if value is not ...}


def entry(profile: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    whole = {
        "name": "smollm2",
        "source": "/models/a.gguf",
        "profiles": [llama() if profile is None else profile],
    } | over
    return {name: value for name, value in whole.items() if value is not ...}


def read(raw: object) -> ParsedEntry:
    found = entries.parse(raw, "[0]")
    assert isinstance(found, ParsedEntry), found
    return found


def problems(raw: object) -> list[tuple[str, str]]:
    found = entries.parse(raw, "[0]")
    assert isinstance(found, tuple), found
    assert all(isinstance(problem, Problem) for problem in found)
    return [(problem.path, problem.sentence) for problem in found]


def test_the_entries_of_the_documentation_are_read_whole() -> None:
    found = read(
        {
            "name": "smollm2",
            "aliases": ["tiny"],
            "description": "small",
            "source": "/models/SmolLM2-135M-Instruct.Q4_1.gguf",
            "context_length": 2048,
            "max_output": 1024,
            "scaling": {"min": 0, "max": 1, "idle_timeout": "5s"},
            "profiles": [
                llama(args=["--ctx-size", "2048"], weight=1, priority=100),
                command(
                    name="other",
                    health="/ok",
                    key_env="API_KEY",
                    start_timeout="120s",
                    card=["gpu", "local/gpu0"],
                    env={"HF_TOKEN": {"secret": "hf"}, "MODE": "fast"},
                    exclusive=True,
                ),
            ],
        }
    )
    assert found == ParsedEntry(
        name="smollm2",
        aliases=("tiny",),
        description="small",
        source="/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        context_length=2048,
        max_output=1024,
        scaling=Scaling(min=0, max=1, idle_timeout_s=5.0),
        profiles=(
            Profile(name="cpu", engine="llamacpp", memory_bytes=GIB, args=("--ctx-size", "2048")),
            Profile(
                name="other",
                engine="command",
                memory_bytes=2 * GIB,
                command=("python3", "server.py", "--port", "${PORT}"),
                health="/ok",
                key_env="API_KEY",
                start_timeout_s=120.0,
                card=("gpu", "local/gpu0"),
                env={"HF_TOKEN": SecretRef(secret="hf"), "MODE": "fast"},
                exclusive=True,
            ),
        ),
    )


def test_defaults() -> None:
    profile = read(entry(command())).profiles[0]
    assert profile.health == "/health"
    assert profile.card == ("cpu",)
    assert (profile.weight, profile.priority, profile.start_timeout_s) == (1, 100, 600.0)
    assert profile.key_env is None


# What the limits mean -------------------------------------------------------------------------------


def scaling(**given: Any) -> Scaling:
    return read(entry(scaling=given)).scaling


def test_req_a02_min_0_with_a_max_runs_none_until_asked() -> None:
    assert scaling(min=0, max=3) == Scaling(min=0, max=3, idle_timeout_s=900.0)


def test_req_a03_on_demand_needs_no_field_of_its_own() -> None:
    ((path, sentence),) = problems(entry(on_demand=True))
    assert path == "[0].on_demand"
    assert sentence.startswith("there is no field on_demand")
    assert scaling(min=0, max=1).max == 1


def test_req_a04_0_0_is_off() -> None:
    assert scaling(min=0, max=0) == Scaling(min=0, max=0)


def test_req_a05_a_zero_max_is_never_filled_in() -> None:
    assert scaling(max=0).max == 0
    assert scaling(min=0, max=0, idle_timeout="1h").max == 0
    assert scaling().max == 0
    assert scaling(idle_timeout="1h").max == 0


def test_req_a06_no_scaling_stanza_is_off() -> None:
    assert read(entry()).scaling == Scaling(min=0, max=0)


def test_req_a07_an_absent_max_is_min_and_a_smaller_one_is_refused() -> None:
    assert scaling(min=2).max == 2
    assert problems(entry(scaling={"min": 1, "max": 0})) == [
        (
            "[0].scaling.max",
            "max (0) is below min (1); give a max of at least min, or leave max out to keep "
            "exactly min",
        )
    ]


def test_req_a08_idle_timeout_defaults_to_15_minutes_and_0_is_never() -> None:
    assert scaling(max=1).idle_timeout_s == 900.0
    assert scaling(max=1, idle_timeout=0).idle_timeout_s == 0.0
    assert scaling(max=1, idle_timeout="0s").idle_timeout_s == 0.0
    assert scaling(max=1, idle_timeout="8h").idle_timeout_s == 28800.0


# Names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a", "a" * 200, "Qwen/Qwen2.5-7B:latest", "模型", "🦙 7b", "with space", "*.>", "%2E", "."],
)
def test_any_visible_text_is_a_name(name: str) -> None:
    assert read(entry(name=name, aliases=[f"x{name}"[:200]])).name == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "expected 1 to 200 characters, got 0"),
        ("a" * 201, "expected 1 to 200 characters, got 201"),
        (" a", "without spaces at its ends"),
        ("a\u00a0", "without spaces at its ends"),
        ("a\nb", "without control characters or line breaks"),
        ("a\x7fb", "without control characters"),
        ("a\u2028b", "without control characters or line breaks"),
        ("a\ud800b", "without control characters"),
        (7, "expected a text, got 7; write it in quotes"),
        (None, "expected a text, got nothing"),
    ],
)
def test_what_is_not_a_name_is_refused(name: object, expected: str) -> None:
    ((path, sentence),) = problems(entry(name=name))
    assert path == "[0].name"
    assert expected in sentence


def test_aliases_differ_from_the_name_and_from_each_other() -> None:
    assert problems(entry(aliases=["b", "smollm2", "b"])) == [
        ("[0].aliases[1]", "an alias must differ from the name"),
        ("[0].aliases[2]", "the alias 'b' is given twice"),
    ]
    assert problems(entry(aliases="tiny")) == [
        ("[0].aliases", "expected a list of texts, got 'tiny'")
    ]


# Everything else that can be wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "path", "expected"),
    [
        ("smollm2", "[0]", "expected a mapping of fields, got a text"),
        (None, "[0]", "expected a mapping of fields, got nothing"),
        (entry(name=...), "[0].name", "name is missing"),
        (entry(sclaing={}), "[0].sclaing", "there is no field sclaing; did you mean scaling?"),
        (entry(zzz=1), "[0].zzz", "there is no field zzz; known: name, aliases"),
        (entry(profiles=[]), "[0].profiles", "at least one profile, got an empty list"),
        (entry(profiles=...), "[0].profiles", "expected a list of at least one profile"),
        (entry(profiles={"a": 1}), "[0].profiles", "got a mapping"),
        (entry(context_length=0), "[0].context_length", "expected a whole number of at least 1"),
        (entry(context_length=True), "[0].context_length", "got true or false"),
        (entry(context_length="2048"), "[0].context_length", "got '2048'"),
        (entry(context_length=5, max_output=6), "[0].max_output", "at most context_length (5)"),
        (entry(description=["a"]), "[0].description", "expected a text, got a list"),
        (entry(scaling=[]), "[0].scaling", "expected a mapping of fields, got a list"),
        (entry(scaling=None), "[0].scaling", "expected a mapping of fields, got nothing"),
        (entry(scaling={"min": -1}), "[0].scaling.min", "of at least 0, got -1"),
        (entry(scaling={"max": 1.5}), "[0].scaling.max", "a whole number of at least 0, got 1.5"),
        (entry(scaling={"max": None}), "[0].scaling.max", "got nothing"),
        (entry(scaling={"mix": 1}), "[0].scaling.mix", "did you mean min?"),
        (entry(scaling={"max": 1, "idle_timeout": "5 parsecs"}), "[0].scaling.idle_timeout", "5s"),
        (entry(scaling={"max": 1, "idle_timeout": -5}), "[0].scaling.idle_timeout", "0 = never"),
        (entry(source="models/a.gguf"), "[0].source", "expected an absolute path on the node"),
        (entry(source="/a\x00b"), "[0].source", "without control characters"),
        (entry(source="ftp://x/y"), "[0].source", "expected an absolute path on the node"),
        (entry(source="https://"), "[0].source", "expected an absolute path on the node"),
        (entry(source="hf://nobody"), "[0].source", "expected an absolute path on the node"),
        (entry(source=...), "[0].profiles[0].engine", "engine llamacpp needs the entry's `source`"),
        (entry(llama(memory=...)), "[0].profiles[0].memory", "memory is missing; expected a size"),
        (entry(llama(memory="lots")), "[0].profiles[0].memory", "a size such as 512MiB or 8GiB"),
        (entry(llama(memory=0)), "[0].profiles[0].memory", "expected a size"),
        (entry(llama(memory=True)), "[0].profiles[0].memory", "got true or false"),
        (entry(llama(memory="-1GiB")), "[0].profiles[0].memory", "got '-1GiB'"),
        (entry(llama(name=...)), "[0].profiles[0].name", "name is missing"),
        (entry(llama(name="a b")), "[0].profiles[0].name", "expected 1 to 63 letters"),
        (
            entry(llama(engine=...)),
            "[0].profiles[0].engine",
            "expected one of llamacpp, vllm, command",
        ),
        (entry(llama(engine="sglang")), "[0].profiles[0].engine", "got 'sglang'"),
        (entry(llama(weight=0)), "[0].profiles[0].weight", "of at least 1, got 0"),
        (entry(llama(priority="high")), "[0].profiles[0].priority", "got 'high'"),
        (entry(llama(cards=65)), "[0].profiles[0].cards", "at least 1, got 65"),
        (entry(llama(exclusive="yes")), "[0].profiles[0].exclusive", "expected true or false"),
        (entry(llama(start_timeout=0)), "[0].profiles[0].start_timeout", "expected a duration"),
        (entry(llama(card="tpu")), "[0].profiles[0].card", "expected cpu, gpu, or patterns"),
        (entry(llama(card=[])), "[0].profiles[0].card", "expected cpu, gpu, or patterns"),
        (entry(llama(card="a/b/c")), "[0].profiles[0].card", "got 'a/b/c'"),
        (entry(llama(card=["cpu", 3])), "[0].profiles[0].card[1]", "expected a text, got 3"),
        (entry(llama(memroy=1)), "[0].profiles[0].memroy", "did you mean memory?"),
        (entry("x"), "[0].profiles[0]", "expected a mapping of fields"),
        (entry(llama(args=["-c", 5])), "[0].profiles[0].args[1]", "got 5; write it in quotes"),
        (entry(llama(args="-c 5")), "[0].profiles[0].args", "expected a list of texts"),
        (
            entry(llama(args=["-c", "5", "--parralel", "1"])),
            "[0].profiles[0].args[2]",
            "did you mean --parallel?",
        ),
        (entry(llama(args=["--port", "1"])), "[0].profiles[0].args[0]", "the agent sets it"),
        (entry(llama(command="x")), "[0].profiles[0].command", "belongs to engine command"),
        (entry(llama(health="/x")), "[0].profiles[0].health", "belongs to engine command"),
        (entry(llama(key_env="K")), "[0].profiles[0].key_env", "belongs to engine command"),
        (entry(llama(env=["A"])), "[0].profiles[0].env", "expected a mapping of names to texts"),
        (entry(llama(env={"A": 1})), "[0].profiles[0].env.A", "got 1; write it in quotes"),
        (entry(llama(env={"A B": "1"})), "[0].profiles[0].env.A B", "expected a variable name"),
        (entry(llama(env={"A": {}})), "[0].profiles[0].env.A", "{secret: NAME}"),
        (entry(llama(env={"A": {"secret": "../x"}})), "[0].profiles[0].env.A", "{secret: NAME}"),
        (
            entry(llama(env={"YARD_LAUNCH_ID": "x"})),
            "[0].profiles[0].env.YARD_LAUNCH_ID",
            "set by the launcher",
        ),
        (entry(command(command=...)), "[0].profiles[0].command", "engine command needs `command`"),
        (entry(command(command="")), "[0].profiles[0].command", "at least the program to run"),
        (entry(command(command=[])), "[0].profiles[0].command", "at least the program to run"),
        (entry(command(command=["", "x"])), "[0].profiles[0].command", "got an empty text"),
        (entry(command(command="a 'b")), "[0].profiles[0].command", "no closing quotation"),
        (entry(command(command="a ${HOME}")), "[0].profiles[0].command", "${HOME} is not known"),
        (entry(command(command="a ${PORT")), "[0].profiles[0].command", "${PORT is not known"),
        (
            entry(command(command="a ${SOURCE}"), source=...),
            "[0].profiles[0].command",
            "${SOURCE} is used, but the entry has no `source`",
        ),
        (entry(command(args=["x"])), "[0].profiles[0].args", "args belong to engine llamacpp"),
        (entry(command(health="health")), "[0].profiles[0].health", "a path such as /health"),
        (entry(command(key_env="A-B")), "[0].profiles[0].key_env", "expected a variable name"),
        (
            entry(command(key_env="K", env={"K": "x"})),
            "[0].profiles[0].key_env",
            "K is set in env too",
        ),
        (
            entry(profiles=[llama(), llama()]),
            "[0].profiles[1].name",
            "the profile 'cpu' is given twice",
        ),
        (entry(description="x" * 9000), "[0]", "the entry is 9.2 KiB large"),
    ],
)
def test_a_mistake_is_refused_with_its_path_and_what_was_expected(
    raw: object, path: str, expected: str
) -> None:
    found = problems(raw)
    assert len(found) == 1, found
    assert found[0][0] == path
    assert expected in found[0][1]


def test_inv_9_every_mistake_of_an_entry_is_named_at_once() -> None:
    raw = entry(llama(memory=0, weight=0, args=["--nope"]), name="", aliases=[1], extra=1)
    assert [path for path, _ in problems(raw)] == [
        "[0].name",
        "[0].aliases[0]",
        "[0].profiles[0].memory",
        "[0].profiles[0].weight",
        "[0].profiles[0].args[0]",
        "[0].extra",
    ]


@pytest.mark.parametrize(
    "source",
    ["https://example.org/a.gguf", "http://h/a", "hf://owner/repo", "hf://o/r@main/q/a.gguf"],
)
def test_a_remote_source_is_understood_and_refused_until_there_is_a_mirror(source: str) -> None:
    found = entries.parse(entry(source=source), "[0]")
    assert isinstance(found, tuple)
    ((path, sentence),) = problems(entry(source=source))
    assert path == "[0].source"
    assert sentence.startswith("needs the mirror")
    assert entries.code_of(found) == codes.NEEDS_MIRROR


def test_a_remote_source_beside_another_mistake_is_invalid() -> None:
    found = entries.parse(entry(source="hf://o/r", extra=1), "[0]")
    assert isinstance(found, tuple)
    assert entries.code_of(found) == codes.INVALID


def test_a_command_is_split_as_a_shell_would_and_no_shell_reads_it() -> None:
    found = read(entry(command(command="run 'a b' \"$X\" ; ${PORT}")))
    assert found.profiles[0].command == ("run", "a b", "$X", ";", "${PORT}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("1GiB", GIB), ("1.5 GiB", GIB * 3 // 2), ("512mib", 512 * 1024**2), (1000, 1000), ("5", 5)],
)
def test_sizes(given: object, expected: int) -> None:
    assert read(entry(llama(memory=given))).profiles[0].memory_bytes == expected


@pytest.mark.parametrize(
    ("given", "expected"), [("5s", 5.0), ("15m", 900.0), ("8h", 28800.0), ("250ms", 0.25), (3, 3.0)]
)
def test_durations(given: object, expected: float) -> None:
    assert read(entry(llama(start_timeout=given))).profiles[0].start_timeout_s == expected


# Parking and vLLM ----------------------------------------------------------------------------------


def parked(parking: Any, **over: Any) -> dict[str, Any]:
    return entry(llama(parking=parking, **over))


def vllm(*args: str, **over: Any) -> dict[str, Any]:
    return {"name": "gpu", "engine": "vllm", "memory": "8GiB", "card": "gpu", **over} | (
        {"args": list(args)} if args else {}
    )


def test_a_way_to_park_is_read_short_and_whole() -> None:
    assert read(parked("checkpoint")).profiles[0].parking == Parking(way="checkpoint")
    assert read(entry(vllm(parking="sleep"))).profiles[0].parking == Parking(way="sleep")
    hooks = {"way": "command", "park": "kill -STOP {pid}", "resume": ["kill", "-CONT", "{pid}"]}
    assert read(parked(hooks | {"timeout": "9s"})).profiles[0].parking == Parking(
        way="command",
        park=("kill", "-STOP", "{pid}"),
        resume=("kill", "-CONT", "{pid}"),
        timeout_s=9.0,
    )
    assert read(entry()).profiles[0].parking is None


@pytest.mark.parametrize(
    ("parking", "path", "said"),
    [
        ("sleep", "way", "engine llamacpp has no sleep"),
        ("nap", "way", "expected one of sleep, checkpoint, command, none, got 'nap'"),
        ({}, "way", "expected one of"),
        (7, "", "expected a mapping of fields, got a number"),
        ("command", "park", "needs `park`"),
        ("command", "resume", "needs `resume`"),
        ({"way": "command", "park": "a {port}", "resume": "b"}, "park", "{port} is not known"),
        ({"way": "command", "park": "a '", "resume": "b"}, "park", "cannot be split"),
        ({"way": "command", "park": "a\0", "resume": "b"}, "park", "zero bytes"),
        ({"way": "checkpoint", "park": "a"}, "park", "belongs to parking by command"),
        ({"way": "none", "timeout": "2h"}, "timeout", "at most 3600 s"),
        ({"way": "none", "wait": 1}, "wait", "there is no field wait"),
    ],
)
def test_a_wrong_way_to_park_is_refused_with_its_path(parking: Any, path: str, said: str) -> None:
    at = "[0].profiles[0].parking" + (f".{path}" if path else "")
    assert any(where == at and said in sentence for where, sentence in problems(parked(parking)))


@pytest.mark.parametrize(
    "flag", ["--port", "--host=0", "--api-key", "--enable-sleep-mode", "--model"]
)
def test_flags_the_yard_sets_are_refused_to_a_vllm_profile(flag: str) -> None:
    (found,) = problems(entry(vllm(flag)))
    assert found[0] == "[0].profiles[0].args"
    assert flag.partition("=")[0] in found[1]


def test_a_vllm_profile_needs_weights_and_brings_no_command() -> None:
    assert read(entry(vllm("--max-model-len", "4096"))).profiles[0].engine == "vllm"
    without = problems(entry(vllm()) | {"source": ""})
    assert any("needs the entry's `source`" in said for _, said in without)
    both = problems(entry(vllm() | {"command": "x"}))
    assert any("makes its own command line" in said for _, said in both)


def test_a_replica_may_take_several_cards() -> None:
    assert read(entry(llama(cards=4))).profiles[0].cards == 4


def test_an_entry_says_how_many_requests_a_replica_runs_at_once() -> None:
    assert read(entry()).as_model(incarnation="i", order=0).concurrency == 0
    limited = read(entry(concurrency=4)).as_model(incarnation="i", order=0)
    assert limited.concurrency == 4
    # It concerns gateways alone: no engine is started anew for it.
    free = read(entry()).as_model(incarnation="i", order=0)
    assert profile_revision(limited, limited.profiles[0]) == profile_revision(
        free, free.profiles[0]
    )
    for wrong in (0, -1, True, "4", 1.5):
        [(path, sentence)] = problems(entry(concurrency=wrong))
        assert path == "[0].concurrency"
        assert "whole number of at least 1" in sentence
