"""Which layers slide is a table of ours; the engine is asked for each architecture of it, and for the pattern keys."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.domain import ggufshape
from controlplane.domain.ggufheader import Header, parse
from controlplane.domain.shape import ModelShape
from tests.hub import ggufs
from tests.support import engine_memory

LAYERS = 12
NEEDED: dict[str, dict[str, Any]] = {
    "afmoe": {"expert_feed_forward_length": 8, "expert_shared_count": 1},
    "cohere2": {"logit_scale": 1.0},
    "cohere2moe": {
        "logit_scale": 1.0,
        "leading_dense_block_count": 1,
        "expert_feed_forward_length": 8,
    },
    "exaone-moe": {"expert_feed_forward_length": 8, "expert_gating_func": 1},
    "exaone4": {"block_count": 64},
    "gemma-embedding2": {"embedding_length_per_layer_input": 8},
    "gemma4": {
        "embedding_length_per_layer_input": 8,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
    },
    "gpt-oss": {"expert_feed_forward_length": 8},
    "granite_swa": {"logit_scale": 1.0},
    "laguna": {"leading_dense_block_count": 1, "expert_feed_forward_length": 8},
    "llama4": {"expert_feed_forward_length": 8, "interleave_moe_layer_step": 1},
    "maple": {"expert_feed_forward_length": 8, "swiglu_clamp_exp": 1.0},
    "mellum": {"expert_feed_forward_length": 8},
    "mimo2": {"expert_feed_forward_length": 8},
    "step35": {"expert_feed_forward_length": 8},
}
"""Keys without which the engine does not come to the layers."""

LISTED = frozenset(name for name, rule in ggufshape.SLIDING.items() if rule.period == 1)
PATTERN = [True, True, False, True] * (LAYERS // 4)


def header_only(path: Path, architecture: str, keys: dict[str, Any]) -> Path:
    """A GGUF with a header as asked for and one tensor nobody looks for: it gets as far as its layers."""
    sizes = ggufs.Sizes(layers=LAYERS)
    ggufs.KINDS["header-only"] = lambda _: ggufs.Model(
        architecture=architecture,
        keys=ggufs.basic_keys(sizes)
        | {"attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": sizes.window}
        | NEEDED.get(architecture, {})
        | keys,
        tensors={"nobody.weight": (32,)},
    )
    try:
        return ggufs.write(path, "header-only", sizes=sizes)
    finally:
        del ggufs.KINDS["header-only"]


TRIES = 5
"""An engine that cannot load a file ends at once, and what its log's own thread has not written is lost."""


def shape(path: Path) -> ModelShape:
    header = parse(path.read_bytes())
    assert isinstance(header, Header)
    made = ggufshape.shape_of(header)
    assert isinstance(made, ModelShape)
    return made


def agree(path: Path) -> ModelShape:
    """Our reading, after the engine's was found to be the same."""
    ours = shape(path)
    log, engine = "", ()
    for _ in range(TRIES):
        log = engine_memory.load(path, engine_memory.TRACING).log
        engine = engine_memory.sliding_layers(log)
        if len(engine) == ours.layers:
            break
    assert len(engine) == ours.layers, log[-1500:]
    assert (ours.sliding or (False,) * ours.layers) == engine
    return ours


@pytest.mark.parametrize("architecture", sorted(ggufshape.SLIDING))
def test_the_engine_gives_the_same_layers_a_window(architecture: str, tmp_path: Path) -> None:
    keys = {"attention.sliding_window_pattern": PATTERN} if architecture in LISTED else {}
    ours = agree(header_only(tmp_path / "model.gguf", architecture, keys))
    assert any(ours.sliding)


@pytest.mark.parametrize("architecture", ["gemma3", "cohere2moe", "gpt-oss"])
@pytest.mark.parametrize("pattern", [3, PATTERN], ids=["a period", "a list"])
def test_a_pattern_in_the_file_goes_before_the_engine_s_own(
    architecture: str, pattern: object, tmp_path: Path
) -> None:
    keys = {"attention.sliding_window_pattern": pattern}
    agree(header_only(tmp_path / "model.gguf", architecture, keys))


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("exaone4", {"block_count": LAYERS}),
        ("gemma3", {"attention.sliding_window": 0}),
        ("llama4", {"attention.sliding_window": 0}),
        ("phi3", {}),
        ("qwen2", {"attention.sliding_window_pattern": 3}),
    ],
)
def test_a_window_in_the_file_need_not_mean_that_a_layer_slides(
    architecture: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    ours = agree(header_only(tmp_path / "model.gguf", architecture, keys))
    assert not any(ours.sliding)
