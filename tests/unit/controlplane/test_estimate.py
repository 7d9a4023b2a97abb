"""The estimate by value: caches, states and buffers counted by hand, and what a person reads of them."""

import pytest

from controlplane.domain import estimate
from controlplane.domain.estimate import (
    EngineOptions,
    by_size,
    estimate_for_args,
    explain,
    options,
    round_up_gib,
)
from controlplane.domain.shape import ModelShape
from schemas.job import MemoryEstimate

GIB = 1024**3
LLAMA = ModelShape(
    architecture="llama",
    layers=2,
    embedding=64,
    vocabulary=1000,
    trained_context=8192,
    feed_forward=(256, 256),
    heads=(4, 4),
    heads_kv=(2, 2),
    key_length=16,
    value_length=32,
)


def shape(**changes: object) -> ModelShape:
    from msgspec import structs

    return structs.replace(LLAMA, **changes)


def made(of: ModelShape = LLAMA, *args: str) -> MemoryEstimate:
    return estimate_for_args(of, 1000, args or ("--ctx-size", "4096"))


def test_keys_and_values_of_every_layer_for_every_token() -> None:
    assert made().kv_bytes == 4096 * 2 * 2 * (16 + 32) * 2


@pytest.mark.parametrize(
    ("args", "cells"),
    [
        (("--ctx-size", "1"), 256),
        (("--ctx-size", "4097"), 4352),
        (("--ctx-size", "1000", "--parallel", "3"), 3 * 512),
        (("--ctx-size", "1000", "--parallel", "3", "--kv-unified"), 1024),
        (("--ctx-size", "0"), 8192),
        (("--parallel", "1"), 8192),
    ],
)
def test_tokens_are_counted_as_the_engine_pads_them(args: tuple[str, ...], cells: int) -> None:
    assert made(LLAMA, *args).kv_bytes == cells * 2 * 2 * (16 + 32) * 2


@pytest.mark.parametrize(
    ("kind", "key_row", "value_row"),
    [
        ("f32", 128, 256),
        ("bf16", 64, 128),
        ("q8_0", 34, 68),
        ("q4_0", 18, 36),
        ("q4_1", 20, 40),
        ("iq4_nl", 18, 36),
        ("q5_0", 22, 44),
        ("q5_1", 24, 48),
    ],
)
def test_a_quantised_cache_is_counted_in_blocks(kind: str, key_row: int, value_row: int) -> None:
    args = ("--ctx-size", "256", "--cache-type-k", kind, "--cache-type-v", kind)
    assert made(LLAMA, *args).kv_bytes == 256 * 2 * (key_row + value_row)


def test_a_sliding_layer_keeps_its_window_and_a_batch() -> None:
    gemma = shape(
        sliding=(True, False),
        sliding_window=100,
        key_length_sliding=16,
        value_length_sliding=16,
    )
    full, row, short = 4096 * 2 * (16 + 32) * 2, 2 * (16 + 16) * 2, 768
    assert made(gemma).kv_bytes == full + short * row
    args = ("--ctx-size", "4096", "--swa-full")
    assert made(gemma, *args).kv_bytes == full + 4096 * row
    args = ("--ctx-size", "4096", "--ubatch-size", "64")
    assert made(gemma, *args).kv_bytes == full + 256 * row
    args = ("--ctx-size", "4096", "--parallel", "4")
    assert made(gemma, *args).kv_bytes == full + 4 * short * row
    args = ("--ctx-size", "4096", "--parallel", "4", "--kv-unified")
    assert made(gemma, *args).kv_bytes == full + 1024 * row
    args = ("--ctx-size", "512")
    assert made(gemma, *args).kv_bytes == full // 8 + 512 * row


def test_latent_attention_keeps_one_row_and_the_indexers_key() -> None:
    deepseek = shape(heads_kv=(1, 1), kv_rank=512, rope_dims=64)
    assert made(deepseek).kv_bytes == 4096 * 2 * 576 * 2
    sparse = shape(heads_kv=(1, 1), kv_rank=512, rope_dims=64, indexer_length=128)
    assert made(sparse).kv_bytes == 4096 * 2 * (576 + 128) * 2


def test_layers_without_key_heads_keep_nothing() -> None:
    assert made(shape(heads_kv=(2, 0))).kv_bytes == made().kv_bytes // 2
    assert made(shape(heads_kv=(0, 0))).kv_bytes == 0


def test_a_state_is_kept_for_each_slot_and_not_for_each_token() -> None:
    mamba = shape(heads_kv=(0, 2), recurrent=(True, False), conv_state=30, ssm_state=70, inner=10)
    assert made(mamba).state_bytes == 100 * 4
    assert made(mamba, "--ctx-size", "9000", "--parallel", "3").state_bytes == 3 * 100 * 4


def test_an_encoder_has_no_cache_and_no_words_to_choose_from() -> None:
    bert = shape(heads_kv=(0, 0), causal=False, embeds=True, vocabulary=10**6)
    found = made(bert)
    assert (found.kv_bytes, found.state_bytes) == (0, 0)
    assert 0 < found.compute_bytes < 10 * 1024**2


def test_embeddings_of_a_generating_model_need_a_result_for_every_token() -> None:
    wordy = shape(vocabulary=100_000)
    assert made(wordy).compute_bytes < 10 * 1024**2
    embedding = made(wordy, "--ctx-size", "4096", "--embedding")
    assert embedding.compute_bytes > 512 * 100_000 * 4


def test_without_flash_attention_scores_are_held() -> None:
    off = made(LLAMA, "--ctx-size", "4096", "--flash-attn", "off")
    assert off.compute_bytes >= 4096 * 512 * (4 + 1) * 4
    assert made().compute_bytes < off.compute_bytes / 2
    assert made(LLAMA, "--ctx-size", "4096", "--flash-attn", "on") == made()


def test_the_buffer_follows_the_batch_and_never_exceeds_the_context() -> None:
    half = made(LLAMA, "--ctx-size", "4096", "--ubatch-size", "256")
    assert half.compute_bytes == pytest.approx(made().compute_bytes / 2, rel=0.01)
    assert made(LLAMA, "--ctx-size", "256") == made(
        LLAMA, "--ctx-size", "256", "--ubatch-size", "256"
    )
    assert made(LLAMA, "--ctx-size", "4096", "--batch-size", "256") == half


def test_repacked_weights_are_there_twice_unless_the_file_is_not_mapped() -> None:
    half = shape(repacked=0.5)
    assert made(half).repacked_bytes == 500
    assert made(half).total_bytes == made().total_bytes + 500
    for args in (("--no-repack",), ("--no-mmap",), ("--load-mode", "none")):
        assert made(half, *args).repacked_bytes == 0
    assert estimate.estimate(half, weights_bytes=1000, ctx_pool=256, repack=False).total_bytes > 0


def test_arguments_and_keywords_say_the_same() -> None:
    args = ("-c", "4096", "-np", "2", "-ctk", "q8_0", "-ctv", "q4_0", "-fa", "on", "-b", "64")
    told = options((*args, "-ub", "32", "-kvu", "--swa-full", "--embedding", "-nr"))
    assert told == EngineOptions(
        ctx_pool=4096,
        slots=2,
        batch=64,
        ubatch=32,
        cache_type_k="q8_0",
        cache_type_v="q4_0",
        flash_attention="on",
        unified=True,
        swa_full=True,
        embedding=True,
        repack=False,
    )
    by_name = estimate.estimate(
        LLAMA,
        weights_bytes=1000,
        ctx_pool=4096,
        slots=2,
        batch=64,
        ubatch=32,
        cache_type_k="q8_0",
        cache_type_v="q4_0",
        flash_attention="on",
        unified=True,
        swa_full=True,
        embedding=True,
        repack=False,
    )
    assert by_name == estimate.estimate_with(LLAMA, 1000, told)
    assert options(()) == EngineOptions()
    assert options(("--nonsense", "--ctx-size", "x")) == EngineOptions()


def test_req_c43_the_text_names_every_part_and_the_sum() -> None:
    whole = MemoryEstimate(
        basis="header",
        weights_bytes=3 * GIB,
        repacked_bytes=2 * GIB,
        kv_bytes=GIB,
        state_bytes=GIB // 2,
        compute_bytes=GIB // 4,
        engine_bytes=GIB // 8,
        total_bytes=7 * GIB,
        ctx_pool=16384,
    )
    assert explain(whole) == (
        "weights 3.0 GiB + repacked for the processor 2.0 GiB + KV cache 1.0 GiB for 16384 tokens "
        "+ recurrent state 512 MiB + compute 256 MiB + engine 128 MiB = 7.0 GiB"
    )
    assert "KV cache" not in explain(made(shape(heads_kv=(0, 0))))
    assert "recurrent" not in explain(made())


def test_req_c43_the_parts_add_up_and_the_sum_is_rounded_up_to_a_gib() -> None:
    found = made(shape(repacked=0.3))
    parts = (found.weights_bytes, found.repacked_bytes, found.kv_bytes, found.state_bytes)
    assert sum((*parts, found.compute_bytes, found.engine_bytes)) == found.total_bytes
    assert round_up_gib(1) == round_up_gib(GIB) == GIB
    assert round_up_gib(GIB + 1) == 2 * GIB
    assert round_up_gib(0) == 0


@pytest.mark.parametrize(("weights", "gib"), [(0, 2), (GIB, 3), (2 * GIB, 5), (10 * GIB - 1, 16)])
def test_req_c44_the_rule_of_thumb_is_half_as_much_again_and_two_gib(
    weights: int, gib: int
) -> None:
    found = by_size(weights, 4096)
    assert (found.basis, found.total_bytes, found.ctx_pool) == ("size", gib * GIB, 4096)
    assert "by the size of the files alone" in explain(found)


def test_a_recurrent_model_that_tells_no_context_is_estimated_all_the_same() -> None:
    recurrent = shape(recurrent=(True, True), heads_kv=(0, 0), trained_context=0, ssm_state=64)
    found = made(recurrent, "--ctx-size", "0")
    assert found.total_bytes > found.weights_bytes
