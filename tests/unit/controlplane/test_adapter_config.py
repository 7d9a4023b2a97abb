"""What `adapter_config.json` may say, and the sentence for each thing it may not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.adapterconfig import CONFIG_BYTES, MODULES_MOST, RANK_MOST, read_config
from controlplane.domain.filesets import Refusal
from controlplane.domain.preflight import Fits, preflight
from controlplane.domain.reports import AdapterConfig
from schemas import codes
from tests.support.adapter_yard import base_model
from tests.support.lora import config_of


def read(**fields: Any) -> AdapterConfig | Refusal:
    return read_config(json.dumps(config_of(**fields)).encode())


def config(**fields: Any) -> AdapterConfig:
    found = read(**fields)
    assert isinstance(found, AdapterConfig), found
    return found


def test_a_configuration_as_peft_writes_it() -> None:
    assert config(rank=16, base="o/base", target_modules=["v_proj", "q_proj", "v_proj"]) == (
        AdapterConfig(r=16, base_model_name_or_path="o/base", target_modules=("q_proj", "v_proj"))
    )


def test_scn_d9_everything_that_preflight_refuses_by_is_read() -> None:
    found = config(
        rank_pattern={"q_proj": 64},
        modules_to_save=["lm_head", "embed_tokens"],
        use_dora=True,
        use_rslora=True,
        bias="lora_only",
        lora_bias=True,
        trainable_token_indices=[1, 2],
        layer_replication=[[0, 4], [2, 5]],
    )
    assert found.rank_pattern == {"q_proj": 64}
    assert found.modules_to_save == ("embed_tokens", "lm_head")
    assert found.use_dora
    assert found.use_rslora
    assert found.bias == "lora_only"
    assert found.lora_bias
    assert found.trains_tokens
    assert found.replicates_layers


@pytest.mark.parametrize("none", [None, []])
def test_no_whole_modules_may_be_written_as_an_empty_list(none: list[str] | None) -> None:
    found = config(base="x/llama", modules_to_save=none)
    assert found.modules_to_save == ()
    assert isinstance(preflight(found, base_model()), Fits)


@pytest.mark.parametrize("pattern", ["all-linear", r".*\.(q|v)_proj"])
def test_modules_may_be_one_word_or_an_expression(pattern: str) -> None:
    found = read_config(json.dumps({**config_of(), "target_modules": pattern}).encode())
    assert isinstance(found, AdapterConfig)
    assert (found.target_modules, found.targets_by_pattern) == ((pattern,), True)


def test_what_is_null_or_absent_is_the_default() -> None:
    bare = json.dumps({"r": 8, "lora_alpha": 16, "target_modules": None}).encode()
    nulls = {name: None for name in config_of() if name not in ("r", "lora_alpha")}
    full = json.dumps({"r": 8, "lora_alpha": 1.5, **nulls}).encode()
    assert read_config(bare) == read_config(full) == AdapterConfig(r=8)


def test_another_kind_is_read_as_far_as_its_name_and_judged_by_it() -> None:
    found = read_config(b'{"peft_type": "prefix_tuning", "num_virtual_tokens": 8}')
    assert isinstance(found, AdapterConfig)
    assert (found.peft_type, found.r) == ("PREFIX_TUNING", 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": None}, "rank in r"),
        ({"r": True}, "rank in r"),
        ({"r": 0}, "rank in r"),
        ({"r": -8}, "rank in r"),
        ({"r": "8"}, "rank in r"),
        ({"r": 8.0}, "rank in r"),
        ({"r": RANK_MOST + 1}, "rank in r"),
        ({"lora_alpha": "16"}, "lora_alpha that is no number"),
        ({"lora_alpha": None}, "lora_alpha that is no number"),
        ({"rank_pattern": [8]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": "64"}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"target_modules": 7}, "target_modules"),
        ({"target_modules": ["q_proj", 7]}, "target_modules"),
        ({"target_modules": ["x"] * (MODULES_MOST + 1)}, "target_modules"),
        ({"target_modules": ["x" * 600]}, "longer than"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"use_dora": "yes"}, "neither true nor false"),
        ({"bias": 3}, "bias that is no text"),
        ({"base_model_name_or_path": ["a"]}, "no text"),
        ({"base_model_name_or_path": "a\nb"}, "not printable"),
        ({"peft_type": 1}, "peft_type"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    refusal = read_config(json.dumps({**config_of(), **change}).encode())
    assert isinstance(refusal, Refusal)
    assert refusal.code == codes.NOT_AN_ADAPTER
    assert refusal.sentence.startswith("adapter_config.json has ")
    assert said in refusal.sentence


@pytest.mark.parametrize("name", ["r", "lora_alpha", "target_modules"])
def test_what_engines_cannot_do_without_has_to_be_there(name: str) -> None:
    told = config_of()
    del told[name]
    refusal = read_config(json.dumps(told).encode())
    assert isinstance(refusal, Refusal)
    assert f"lacks {name}" in refusal.sentence


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is not JSON"),
        (b"<html>", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'"r"', "is not a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b" " * (CONFIG_BYTES + 1), "has more than 1024 KiB"),
    ],
)
def test_what_is_no_object_of_json_is_refused(raw: bytes, said: str) -> None:
    refusal = read_config(raw)
    assert isinstance(refusal, Refusal)
    assert said in refusal.sentence


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(config_of())), _JSON))
def test_no_value_of_any_field_is_more_than_a_sentence(told: dict[str, Any]) -> None:
    found = read_config(json.dumps({**config_of(), **told}).encode())
    if isinstance(found, Refusal):
        assert len(found.sentence) < 300
        assert found.sentence.isprintable()
    elif found.peft_type == "LORA":
        assert found.r >= 1


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_a_sentence(raw: bytes) -> None:
    assert isinstance(read_config(raw), Refusal | AdapterConfig)
