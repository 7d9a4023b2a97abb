"""Whether an adapter was trained on the model that is to serve it, told by names alone."""

import pytest

from controlplane.domain.basenames import likeness

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CACHED = "/cache/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.mark.parametrize(
    ("trained_on", "base"),
    [
        (LLAMA, LLAMA),
        (LLAMA, "Meta-Llama/llama-3.1-8b-instruct"),
        (LLAMA, CACHED),
        (CACHED, CACHED),
        (LLAMA, "/models/Llama-3.1-8B-Instruct"),
        (LLAMA, "/models/Llama-3.1-8B-Instruct/"),
        ("/home/anna/llama-3.1-8b-instruct", "/models/Llama-3.1-8B-Instruct"),
        ("C:\\models\\Llama-3.1-8B-Instruct", LLAMA),
        # A packed copy is that model, whoever made it.
        ("unsloth/Llama-3.1-8B-Instruct-unsloth-bnb-4bit", LLAMA),
        (LLAMA, "someone/Llama-3.1-8B-Instruct-AWQ-INT4"),
        (LLAMA, "/models/Llama-3.1-8B-Instruct.Q4_K_M.gguf"),
        (LLAMA, "bartowski/Llama-3.1-8B-Instruct-GGUF"),
        ("q/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct-FP8-dynamic"),
        (LLAMA, "neuralmagic/Llama-3.1-8B-Instruct-quantized.w8a8"),
    ],
)
def test_one_model_under_several_names(trained_on: str, base: str) -> None:
    assert likeness(trained_on, (base,)) == "same"


@pytest.mark.parametrize(
    ("trained_on", "base"),
    [
        (LLAMA, "Qwen/Qwen2.5-7B-Instruct"),
        (LLAMA, "meta-llama/Llama-3.1-8B"),
        (LLAMA, "/models/Llama-3.1-70B-Instruct"),
        # The very same name of another owner may be anything.
        (LLAMA, "someone/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.1-8B", "/models/Llama-3.1-8B-Instruct"),
    ],
)
def test_scn_d9_another_model_is_told_from_the_base(trained_on: str, base: str) -> None:
    assert likeness(trained_on, (base,)) == "other"


@pytest.mark.parametrize(
    ("trained_on", "base"),
    [
        ("", LLAMA),
        (LLAMA, ""),
        ("./", LLAMA),
        ("/data/run7/checkpoint-1200", LLAMA),
        ("/data/model", LLAMA),
        (LLAMA, "/models/0e9e39f249a16976918f6564b8830bc894c89659"),
    ],
)
def test_what_names_no_model_is_not_compared(trained_on: str, base: str) -> None:
    assert likeness(trained_on, (base,)) == "unknown"


def test_one_name_that_fits_is_enough() -> None:
    assert likeness(LLAMA, ("/models/other", LLAMA)) == "same"
    assert likeness(LLAMA, ()) == "unknown"


def test_a_name_made_to_keep_the_comparison_busy_does_not() -> None:
    """An expression that tries every way to divide this would not end."""
    name = "a" + "_q4" * 170 + "!"
    assert likeness(name, ("_q4" * 170,)) == "other"
