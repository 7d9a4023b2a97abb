"""The shape that is told from a header, for each kind of model the engine treats in its own way."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.domain.ggufheader import Header, parse
from controlplane.domain.ggufshape import NoShape, shape_of
from controlplane.domain.shape import ModelShape
from tests.hub import ggufs


def read(path: Path) -> ModelShape:
    header = parse(path.read_bytes())
    assert isinstance(header, Header), header
    shape = shape_of(header)
    assert isinstance(shape, ModelShape), shape
    return shape


def of(tmp_path: Path, kind: str, layers: int = 8, **extra: Any) -> ModelShape:
    path = tmp_path / f"{kind}.gguf"
    return read(ggufs.write(path, kind, sizes=ggufs.Sizes(layers=layers), extra=extra))


def header(**values: Any) -> Header:
    return Header(
        version=3,
        values=values,
        arrays={},
        lengths={},
        tensors=0,
        weights_bytes=0,
        matrix_bytes={},
        vocabulary_rows=0,
        header_bytes=0,
    )


def test_plain_attention(tmp_path: Path) -> None:
    shape = of(tmp_path, "llama")
    assert (shape.architecture, shape.layers, shape.embedding) == ("llama", 8, 128)
    assert shape.heads == (4,) * 8
    assert shape.heads_kv == (2,) * 8
    assert (shape.key_length, shape.value_length) == (32, 32)
    assert (shape.vocabulary, shape.trained_context) == (ggufs.VOCABULARY, ggufs.CONTEXT)
    assert (shape.sliding, shape.recurrent, shape.kv_rank) == ((), (), 0)
    assert (shape.causal, shape.embeds, shape.quant) == (True, False, "F16")
    assert shape.repacked == 0.0


def test_without_key_heads_and_lengths_they_follow_from_the_heads() -> None:
    shape = shape_of(
        header(
            **{
                "general.architecture": "gpt2",
                "gpt2.block_count": 2,
                "gpt2.embedding_length": 64,
                "gpt2.attention.head_count": 4,
            }
        )
    )
    assert isinstance(shape, ModelShape)
    assert shape.heads_kv == (4, 4)
    assert (shape.key_length, shape.value_length) == (16, 16)


def test_experts(tmp_path: Path) -> None:
    shape = of(tmp_path, "qwen3moe")
    assert (shape.experts, shape.experts_used, shape.expert_feed_forward) == (4, 2, 128)


def test_key_heads_by_layer(tmp_path: Path) -> None:
    assert of(tmp_path, "deci").heads_kv == (4, 2, 0, 1) * 2


def test_sliding_layers(tmp_path: Path) -> None:
    shape = of(tmp_path, "gemma3")
    assert shape.sliding == (True,) * 5 + (False,) + (True,) * 2
    assert shape.sliding_window == 64


def test_latent_attention(tmp_path: Path) -> None:
    shape = of(tmp_path, "deepseek2")
    assert (shape.kv_rank, shape.rope_dims) == (64, 16)
    assert shape.heads_kv == (1,) * 8


def test_a_latent_rank_alone_is_no_latent_cache() -> None:
    """MiniCPM3 and older DeepSeek files: the engine unfolds the rows and keeps keys and values."""
    shape = shape_of(
        header(
            **{
                "general.architecture": "minicpm3",
                "minicpm3.block_count": 2,
                "minicpm3.embedding_length": 64,
                "minicpm3.attention.head_count": 4,
                "minicpm3.attention.head_count_kv": 4,
                "minicpm3.attention.kv_lora_rank": 32,
                "minicpm3.attention.key_length": 24,
            }
        )
    )
    assert isinstance(shape, ModelShape)
    assert (shape.kv_rank, shape.heads_kv, shape.key_length) == (0, (4, 4), 24)


def test_states_in_every_layer(tmp_path: Path) -> None:
    shape = of(tmp_path, "mamba")
    assert shape.recurrent == (True,) * 8
    assert shape.heads_kv == (0,) * 8
    assert (shape.conv_state, shape.ssm_state) == (3 * 256, 256 * 32)


def test_states_in_some_layers(tmp_path: Path) -> None:
    shape = of(tmp_path, "granitehybrid")
    assert shape.recurrent == (True, True, True, False) * 2
    assert shape.heads_kv == (0, 0, 0, 2) * 2
    assert shape.conv_state == 3 * (256 + 2 * 32)


def test_a_state_and_a_cache_in_every_layer(tmp_path: Path) -> None:
    shape = of(tmp_path, "falcon-h1")
    assert shape.recurrent == (True,) * 8
    assert shape.heads_kv == (2,) * 8


def test_short_convolutions(tmp_path: Path) -> None:
    shape = of(tmp_path, "lfm2")
    assert shape.recurrent == (True, False) * 4
    assert (shape.conv_state, shape.ssm_state) == (2 * 128, 0)


def test_an_encoder_keeps_no_cache(tmp_path: Path) -> None:
    shape = of(tmp_path, "bert")
    assert (shape.causal, shape.embeds) == (False, True)
    assert shape.heads_kv == (0,) * 8


def test_an_embedding_model_of_a_causal_architecture_keeps_one(tmp_path: Path) -> None:
    shape = of(tmp_path, "qwen3-embedding")
    assert (shape.causal, shape.embeds) == (True, True)
    assert shape.heads_kv == (2,) * 8


def test_attention_every_nth_layer() -> None:
    keys = {
        "general.architecture": "qwen3next",
        "qwen3next.block_count": 8,
        "qwen3next.embedding_length": 64,
        "qwen3next.attention.head_count": 4,
        "qwen3next.attention.head_count_kv": 2,
        "qwen3next.ssm.conv_kernel": 4,
        "qwen3next.ssm.inner_size": 128,
        "qwen3next.ssm.state_size": 16,
        "qwen3next.ssm.group_count": 2,
    }
    shape = shape_of(header(**keys))
    assert isinstance(shape, ModelShape)
    assert shape.heads_kv == (0, 0, 0, 2) * 2
    assert (shape.conv_state, shape.ssm_state) == (3 * (128 + 2 * 2 * 16), 128 * 16)
    shape = shape_of(header(**keys, **{"qwen3next.full_attention_interval": 2}))
    assert isinstance(shape, ModelShape)
    assert shape.heads_kv == (0, 2) * 4


def test_a_receptance_model_shifts_tokens_and_keeps_a_matrix() -> None:
    shape = shape_of(
        header(
            **{
                "general.architecture": "rwkv7",
                "rwkv7.block_count": 2,
                "rwkv7.embedding_length": 64,
                "rwkv7.wkv.head_size": 16,
            }
        )
    )
    assert isinstance(shape, ModelShape)
    assert shape.recurrent == (True, True)
    assert (shape.conv_state, shape.ssm_state) == (2 * 64, 64 * 16)


def test_later_layers_that_use_an_earlier_cache() -> None:
    keys = {
        "general.architecture": "gemma3n",
        "gemma3n.block_count": 30,
        "gemma3n.embedding_length": 64,
        "gemma3n.attention.head_count": 4,
        "gemma3n.attention.head_count_kv": 2,
        "gemma3n.attention.sliding_window": 512,
    }
    shape = shape_of(header(**keys))
    assert isinstance(shape, ModelShape)
    assert shape.heads_kv == (2,) * 20 + (0,) * 10
    shape = shape_of(header(**keys, **{"gemma3n.attention.shared_kv_layers": 25}))
    assert isinstance(shape, ModelShape)
    assert shape.heads_kv == (2,) * 5 + (0,) * 25


def test_the_share_of_weights_that_is_repacked(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "q4.gguf", "llama", quant=ggufs.Quant.Q4_0)
    header = parse(path.read_bytes())
    assert isinstance(header, Header)
    embedding = 128 * ggufs.VOCABULARY * 18 // 32
    assert header.weights_bytes is not None
    matrices = header.matrix_bytes[ggufs.Quant.Q4_0.value]
    assert read(path).repacked == matrices / header.weights_bytes
    norms = header.weights_bytes - matrices - embedding
    assert 0 < norms < 8192


def test_req_c42_the_first_shard_tells_the_shape_of_the_set(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "model.gguf", "llama", quant=ggufs.Quant.Q4_0)
    first, *others = ggufs.shards(path, tmp_path, 3)
    whole, part = read(path), read(first)
    assert (whole.split_count, part.split_count) == (1, 3)
    assert part.heads_kv == whole.heads_kv
    assert part.repacked == pytest.approx(whole.repacked, rel=0.3)
    for other in others:
        header = parse(other.read_bytes())
        assert isinstance(header, Header)
        assert isinstance(shape_of(header), NoShape)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "names no architecture"),
        ({"general.architecture": ""}, "names no architecture"),
        ({"general.architecture": 3}, "names no architecture"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "a mmproj and not a model"),
        ({"general.architecture": "llama"}, "layers and sizes of a llama"),
        (
            {
                "general.architecture": "llama",
                "llama.block_count": 2**31,
                "llama.embedding_length": 64,
            },
            "layers and sizes of a llama",
        ),
        (
            {
                "general.architecture": "llama",
                "llama.block_count": -1,
                "llama.embedding_length": "64",
            },
            "layers and sizes of a llama",
        ),
    ],
)
def test_req_c45_a_header_that_tells_no_shape_says_why(values: dict[str, Any], says: str) -> None:
    found = shape_of(header(**values))
    assert isinstance(found, NoShape)
    assert says in found.sentence
