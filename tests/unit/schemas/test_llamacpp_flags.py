"""The table of llama-server flags matches the installed engine; reading arguments refuses what it must."""

import pytest
import xllamacpp

from schemas import llamacpp_flags
from schemas.llamacpp_flags import BY_NAME, FLAGS, Flag, read

ALLOWED = [flag for flag in FLAGS if not flag.refused]


def owner_of(params: object, path: str) -> tuple[object, str]:
    *outer, last = path.split(".")
    target = params
    for name in outer:
        target = getattr(target, name)
    return target, last


def sample(flag: Flag) -> str | None:
    match flag.kind:
        case "none":
            return None
        case "int":
            return str(max(flag.low or 0, 3))
        case "float":
            return "0.5"
        case "inverse":
            return "4"
        case "str":
            # Two attributes check the text they are given.
            return "exps=CPU" if "--override-tensor" in flag.names else "top_k;top_p"
        case "enum":
            return list(flag.words)[-1]
        case "json":
            return '{"thinking": true}'
        case "split":
            return "3,1"


@pytest.mark.parametrize("flag", ALLOWED, ids=lambda flag: flag.names[-1])
def test_every_flag_sets_attributes_the_engine_has(flag: Flag) -> None:
    value = sample(flag)
    for name in flag.names:
        settings, problems = read((name,) if value is None else (name, value))
        assert not problems
        assert settings
        params = xllamacpp.CommonParams()
        for setting in settings:
            target, attribute = owner_of(params, setting.path)
            assert hasattr(target, attribute), setting.path
            wanted = list(setting.value) if isinstance(setting.value, tuple) else setting.value
            setattr(target, attribute, wanted)
            now = getattr(target, attribute)
            assert now == (pytest.approx(wanted) if isinstance(wanted, float | list) else wanted)


@pytest.mark.parametrize("flag", ALLOWED, ids=lambda flag: flag.names[-1])
def test_every_word_of_an_enum_is_accepted_by_the_engine(flag: Flag) -> None:
    for word, number in flag.words.items():
        settings, problems = read((flag.names[0], word))
        assert not problems
        target, attribute = owner_of(xllamacpp.CommonParams(), settings[0].path)
        setattr(target, attribute, number)
        assert getattr(target, attribute) == number


@pytest.mark.parametrize(
    ("words", "enum", "prefix"),
    [
        (llamacpp_flags.CACHE_TYPES, xllamacpp.ggml_type, "GGML_TYPE_"),
        (llamacpp_flags.POOLING, xllamacpp.llama_pooling_type, "LLAMA_POOLING_TYPE_"),
        (
            llamacpp_flags.ROPE_SCALING,
            xllamacpp.llama_rope_scaling_type,
            "LLAMA_ROPE_SCALING_TYPE_",
        ),
        (llamacpp_flags.SPLIT_MODES, xllamacpp.llama_split_mode, "LLAMA_SPLIT_MODE_"),
        (llamacpp_flags.NUMA, xllamacpp.ggml_numa_strategy, "GGML_NUMA_STRATEGY_"),
        (
            llamacpp_flags.REASONING_FORMATS,
            xllamacpp.common_reasoning_format,
            "COMMON_REASONING_FORMAT_",
        ),
    ],
)
def test_the_numbers_are_those_of_the_engine(
    words: dict[str, int], enum: type, prefix: str
) -> None:
    members = {name: int(value) for name, value in enum.__members__.items()}  # type: ignore[attr-defined]
    for word, number in words.items():
        assert members[prefix + word.upper().replace("-", "_")] == number


def test_the_words_that_are_spelled_differently_have_the_engines_numbers() -> None:
    modes = {name: int(value) for name, value in xllamacpp.llama_load_mode.__members__.items()}
    assert {
        "auto": modes["LLAMA_LOAD_MODE_AUTO"],
        "none": modes["LLAMA_LOAD_MODE_NONE"],
        "mmap": modes["LLAMA_LOAD_MODE_MMAP"],
        "mlock": modes["LLAMA_LOAD_MODE_MLOCK"],
        "mmap+mlock": modes["LLAMA_LOAD_MODE_MMAP_MLOCK"],
        "dio": modes["LLAMA_LOAD_MODE_DIRECT_IO"],
    } == llamacpp_flags.LOAD_MODES
    flash = xllamacpp.llama_flash_attn_type
    assert {
        "auto": int(flash.LLAMA_FLASH_ATTN_TYPE_AUTO),
        "off": int(flash.LLAMA_FLASH_ATTN_TYPE_DISABLED),
        "on": int(flash.LLAMA_FLASH_ATTN_TYPE_ENABLED),
    } == llamacpp_flags.FLASH_ATTENTION


def test_no_spelling_belongs_to_two_flags() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names)) == len(BY_NAME)


def sentences(*args: str) -> list[str]:
    return [problem.sentence for problem in read(args)[1]]


def test_an_unknown_flag_is_refused_with_the_nearest_known_one() -> None:
    assert sentences("--ctx-sise", "2048") == [
        "--ctx-sise is not a llama-server flag this version knows; did you mean --ctx-size?"
    ]


@pytest.mark.parametrize(
    "flag", ["--port", "--host", "--api-key", "--model", "--alias", "--tools", "--lora", "--slots"]
)
def test_what_the_agent_decides_is_refused(flag: str) -> None:
    assert len(sentences(flag, "x")) == 1
    assert sentences(flag, "x")[0].startswith(f"{flag} may not be used: ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--ctx-size",), "--ctx-size needs a whole number of at least 0"),
        (
            ("--ctx-size", "many"),
            "--ctx-size takes a whole number of at least 0, not 'many'",
        ),
        (("--ctx-size", "-1"), "--ctx-size takes a whole number of at least 0, not '-1'"),
        (("--ctx-size", "2.0"), "--ctx-size takes a whole number of at least 0, not '2.0'"),
        (("--ctx-size", "99999999999"), "not '99999999999'"),
        (("--temp", "warm"), "--temp takes a number, not 'warm'"),
        (("--temp", "inf"), "--temp takes a number, not 'inf'"),
        (("--flash-attn", "yes"), "--flash-attn takes one of auto, off, on, not 'yes'"),
        (("--rope-scale", "0"), "--rope-scale takes a number above 0, not '0'"),
        (("--chat-template-kwargs", "[1]"), "takes a JSON object"),
        (("--tensor-split", "1,x"), "takes numbers separated by commas"),
        (("--ctx-size=2048",), "write --ctx-size and its value as two arguments"),
        (("2048",), "expected a llama-server flag, got '2048'"),
        (("-c", "1", "--ctx-size", "2"), "-c and --ctx-size; each setting may be given once"),
        (("--mlock", "--no-mmap"), "--mlock and --no-mmap; each setting may be given once"),
        (("--jinja", "--jinja"), "--jinja is given twice"),
    ],
)
def test_a_wrong_value_says_what_was_expected(args: tuple[str, ...], expected: str) -> None:
    found = sentences(*args)
    assert len(found) == 1
    assert expected in found[0]


def test_every_wrong_argument_is_reported_with_its_place() -> None:
    _, problems = read(("--threads", "x", "--nonsense", "--ctx-size", "7"))
    assert [problem.index for problem in problems] == [1, 2]


def test_layers_may_be_a_number_or_a_word() -> None:
    assert read(("-ngl", "all"))[0][0].value == -2
    assert read(("-ngl", "12"))[0][0].value == 12


def test_a_flag_may_set_several_attributes() -> None:
    settings, _ = read(("--reranking",))
    assert {s.path: s.value for s in settings} == {"embedding": True, "pooling_type": 4}
