"""Sentences that hold for the estimate of any model: never negative, never less for more."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from controlplane.domain.estimate import CACHE_BLOCKS, EngineOptions, estimate_with, round_up_gib
from controlplane.domain.shape import ModelShape

WEIGHTS = 10**9


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    layers = draw(st.integers(1, 12))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=layers, max_size=layers)))

    recurrent = tuple(entry == 1 for entry in each(0, 1)) if draw(st.booleans()) else ()
    sliding = tuple(entry == 1 for entry in each(0, 1)) if draw(st.booleans()) else ()
    latent = draw(st.booleans())
    used = draw(st.integers(0, 4))
    return ModelShape(
        architecture="any",
        layers=layers,
        embedding=draw(st.integers(1, 8192)),
        vocabulary=draw(st.integers(0, 300_000)),
        trained_context=draw(st.integers(0, 131_072)),
        feed_forward=each(0, 16_384),
        heads=each(0, 64),
        heads_kv=each(0, 16),
        key_length=draw(st.integers(0, 256)),
        value_length=draw(st.integers(0, 256)),
        key_length_sliding=draw(st.integers(0, 256)),
        value_length_sliding=draw(st.integers(0, 256)),
        sliding_window=draw(st.integers(1, 8192)) if any(sliding) else 0,
        sliding=sliding if any(sliding) else (),
        kv_rank=512 if latent else 0,
        rope_dims=64 if latent else 0,
        recurrent=recurrent if any(recurrent) else (),
        conv_state=draw(st.integers(0, 10_000)),
        ssm_state=draw(st.integers(0, 1_000_000)),
        inner=draw(st.integers(0, 8192)),
        conv_channels=draw(st.integers(0, 8192)),
        experts=8 if used else 0,
        experts_used=used,
        expert_feed_forward=draw(st.integers(0, 2048)),
        causal=draw(st.booleans()),
        repacked=draw(st.floats(0, 1)),
    )


@st.composite
def engines(draw: st.DrawFn) -> EngineOptions:
    types = st.sampled_from(sorted(CACHE_BLOCKS))
    return EngineOptions(
        ctx_pool=draw(st.integers(0, 200_000)),
        slots=draw(st.integers(1, 16)),
        batch=draw(st.integers(1, 4096)),
        ubatch=draw(st.integers(1, 4096)),
        cache_type_k=draw(types),
        cache_type_v=draw(types),
        flash_attention=draw(st.sampled_from(["auto", "on", "off"])),
        unified=draw(st.booleans()),
        swa_full=draw(st.booleans()),
        embedding=draw(st.booleans()),
        repack=draw(st.booleans()),
    )


@given(shapes(), engines())
def test_no_part_is_negative_and_the_parts_make_the_sum(
    shape: ModelShape, given: EngineOptions
) -> None:
    made = estimate_with(shape, WEIGHTS, given)
    parts = [made.weights_bytes, made.repacked_bytes, made.kv_bytes, made.state_bytes]
    parts += [made.compute_bytes, made.engine_bytes]
    assert min(parts) >= 0
    assert sum(parts) == made.total_bytes
    assert 0 <= round_up_gib(made.total_bytes) - made.total_bytes < 1024**3


@given(shapes(), engines(), st.integers(1, 200_000), st.integers(0, 200_000))
def test_more_context_never_needs_less(
    shape: ModelShape, given: EngineOptions, ctx_pool: int, more: int
) -> None:
    small = estimate_with(shape, WEIGHTS, structs.replace(given, ctx_pool=ctx_pool))
    large = estimate_with(shape, WEIGHTS, structs.replace(given, ctx_pool=ctx_pool + more))
    assert small.kv_bytes <= large.kv_bytes
    assert small.total_bytes <= large.total_bytes


@given(shapes(), engines())
def test_another_layer_never_needs_less(shape: ModelShape, given: EngineOptions) -> None:
    longer = structs.replace(
        shape,
        layers=shape.layers + 1,
        feed_forward=(*shape.feed_forward, shape.feed_forward[-1]),
        heads=(*shape.heads, shape.heads[-1]),
        heads_kv=(*shape.heads_kv, shape.heads_kv[-1]),
        sliding=(*shape.sliding, shape.sliding[-1]) if shape.sliding else (),
        recurrent=(*shape.recurrent, shape.recurrent[-1]) if shape.recurrent else (),
    )
    made, more = estimate_with(shape, WEIGHTS, given), estimate_with(longer, WEIGHTS, given)
    assert made.kv_bytes <= more.kv_bytes
    assert made.state_bytes <= more.state_bytes
    assert made.compute_bytes == more.compute_bytes


@given(shapes(), engines(), st.integers(0, 10**12))
def test_more_weights_never_need_less(shape: ModelShape, given: EngineOptions, more: int) -> None:
    made = estimate_with(shape, WEIGHTS, given)
    assert made.total_bytes <= estimate_with(shape, WEIGHTS + more, given).total_bytes


@given(shapes(), engines())
def test_a_window_never_needs_more_than_the_whole_context(
    shape: ModelShape, given: EngineOptions
) -> None:
    short = estimate_with(shape, WEIGHTS, structs.replace(given, swa_full=False))
    full = estimate_with(shape, WEIGHTS, structs.replace(given, swa_full=True))
    assert short.kv_bytes <= full.kv_bytes
