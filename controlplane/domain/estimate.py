"""Says how much memory an engine will use for a model, and of what that is made.

The formulas are those of llama.cpp, which docs/memory.md holds against the engine's own figures. It knows
nothing of cards, and it never says less than it knows: what it cannot tell it takes as the larger.
"""

from typing import Final, Literal

from msgspec import Struct

from controlplane.domain.memory import amount
from controlplane.domain.shape import ModelShape
from schemas import llamacpp_flags
from schemas.job import MemoryEstimate

CacheType = str

CACHE_BLOCKS: Final[dict[str, tuple[int, int]]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
"""Values in a block, and bytes of it, of each type a cache may have."""

SLOTS: Final = 1
BATCH: Final = 2048
UBATCH: Final = 512
"""What the embedded engine takes where a profile says nothing."""

ENGINE_BYTES: Final = 64 * 1024**2
"""What the process takes apart from its model; measured, see docs/memory.md."""

_GIB: Final = 1024**3
_STATE_VALUE_BYTES: Final = 4
_PAD: Final = 256

FlashAttention = Literal["auto", "on", "off"]


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What of a profile's arguments changes the memory of the engine.

    `ctx_pool` 0: as many tokens as the model was trained for. `unified` True: all slots share one pool,
    else each has an equal part. `swa_full` True: sliding layers keep the whole context too.
    """

    ctx_pool: int = 0
    slots: int = SLOTS
    batch: int = BATCH
    ubatch: int = UBATCH
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: FlashAttention = "auto"
    unified: bool = False
    swa_full: bool = False


def estimate(
    shape: ModelShape,
    *,
    weights_bytes: int,
    ctx_pool: int,
    slots: int = SLOTS,
    cache_type_k: CacheType = "f16",
    cache_type_v: CacheType = "f16",
    flash_attention: FlashAttention = "auto",
    batch: int = BATCH,
    ubatch: int = UBATCH,
    unified: bool = False,
    swa_full: bool = False,
) -> MemoryEstimate:
    """The memory of one engine with this model; every part in bytes."""
    return estimate_with(
        shape,
        weights_bytes,
        EngineOptions(
            ctx_pool=ctx_pool,
            slots=slots,
            batch=batch,
            ubatch=ubatch,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            flash_attention=flash_attention,
            unified=unified,
            swa_full=swa_full,
        ),
    )


def estimate_for_args(
    shape: ModelShape, weights_bytes: int, args: tuple[str, ...]
) -> MemoryEstimate:
    """The memory of the engine a profile with these llama-server arguments starts."""
    return estimate_with(shape, weights_bytes, options(args))


def options(args: tuple[str, ...]) -> EngineOptions:
    """What these llama-server arguments say; an argument that is wrong counts as absent."""
    found = {setting.path: setting.value for setting in llamacpp_flags.read(args)[0]}
    types = {number: name for name, number in llamacpp_flags.CACHE_TYPES.items()}
    attention: dict[object, FlashAttention] = {-1: "auto", 0: "off", 1: "on"}

    def count(path: str, default: int) -> int:
        value = found.get(path, default)
        return value if isinstance(value, int) and value > 0 else default

    return EngineOptions(
        ctx_pool=count("n_ctx", 0),
        slots=count("n_parallel", SLOTS),
        batch=count("n_batch", BATCH),
        ubatch=count("n_ubatch", UBATCH),
        cache_type_k=types.get(count("cache_type_k", -1), "f16"),
        cache_type_v=types.get(count("cache_type_v", -1), "f16"),
        flash_attention=attention.get(found.get("flash_attn_type", -1), "auto"),
        unified=bool(found.get("kv_unified", False)),
        swa_full=bool(found.get("swa_full", False)),
    )


def estimate_with(shape: ModelShape, weights_bytes: int, given: EngineOptions) -> MemoryEstimate:
    """The memory of one engine with this model, so started; every part in bytes."""
    ctx_pool = given.ctx_pool or shape.trained_context
    kv_bytes = _kv_bytes(shape, ctx_pool, given)
    state_bytes = _state_bytes(shape, given.slots)
    compute_bytes = _compute_bytes(shape, ctx_pool, given)
    return MemoryEstimate(
        basis="header",
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        compute_bytes=compute_bytes,
        engine_bytes=ENGINE_BYTES,
        total_bytes=weights_bytes + kv_bytes + state_bytes + compute_bytes + ENGINE_BYTES,
        ctx_pool=ctx_pool,
    )


def by_size(weights_bytes: int, ctx_pool: int) -> MemoryEstimate:
    """The rule of thumb for weights whose header gives no shape: half as much again, and 2 GiB."""
    total = (weights_bytes * 3 // (2 * _GIB) + 2) * _GIB
    return MemoryEstimate(
        basis="size", weights_bytes=weights_bytes, total_bytes=total, ctx_pool=ctx_pool
    )


def round_up_gib(size_bytes: int) -> int:
    """The next whole GiB, in bytes."""
    return -(-size_bytes // _GIB) * _GIB


def explain(made: MemoryEstimate) -> str:
    """The parts, for a person: `weights a + KV cache b for N tokens + …`."""
    weights = f"weights {amount(made.weights_bytes)}"
    total = amount(made.total_bytes)
    if made.basis == "size":
        return (
            f"{total} by the size of the files alone: {weights} x 1.5 + 2 GiB, "
            "the header gives no shape"
        )
    parts = [weights]
    if made.kv_bytes:
        parts.append(f"KV cache {amount(made.kv_bytes)} for {made.ctx_pool} tokens")
    if made.state_bytes:
        parts.append(f"recurrent state {amount(made.state_bytes)}")
    parts.append(f"compute {amount(made.compute_bytes)}")
    parts.append(f"engine {amount(made.engine_bytes)}")
    return f"{' + '.join(parts)} = {total}"


def _padded(count: int, to: int = _PAD) -> int:
    return -(-count // to) * to


def _row_bytes(values: int, kind: CacheType) -> int:
    block, size = CACHE_BLOCKS.get(kind, CACHE_BLOCKS["f32"])
    return -(-values // block) * size


def _cells(ctx_pool: int, given: EngineOptions) -> tuple[int, int]:
    """Tokens of one stream, and how many streams there are."""
    if given.unified or given.slots == 1:
        return _padded(ctx_pool), 1
    return _padded(_padded(ctx_pool) // given.slots), given.slots


def _sliding_cells(shape: ModelShape, cells: int, given: EngineOptions) -> int:
    """Tokens a sliding layer keeps: its window for every sequence in the pool, and one batch."""
    if given.swa_full:
        return cells
    sequences = given.slots if given.unified else 1
    ubatch = min(given.ubatch, given.batch)
    return _padded(min(cells, shape.sliding_window * sequences + ubatch))


def _kv_bytes(shape: ModelShape, ctx_pool: int, given: EngineOptions) -> int:
    if not shape.causal:
        return 0
    cells, streams = _cells(ctx_pool, given)
    short = _sliding_cells(shape, cells, given)
    total = 0
    for layer, heads in enumerate(shape.heads_kv):
        if heads == 0:
            continue
        slides = bool(shape.sliding) and shape.sliding[layer]
        total += (short if slides else cells) * _token_bytes(shape, heads, slides, given)
    return total * streams


def _token_bytes(shape: ModelShape, heads: int, slides: bool, given: EngineOptions) -> int:
    """What one layer keeps of one token."""
    if shape.kv_rank:
        return _row_bytes(shape.kv_rank + shape.rope_dims, given.cache_type_k) + _row_bytes(
            shape.indexer_length, given.cache_type_k
        )
    key = shape.key_length_sliding if slides else shape.key_length
    value = shape.value_length_sliding if slides else shape.value_length
    return _row_bytes(heads * key, given.cache_type_k) + _row_bytes(
        heads * value, given.cache_type_v
    )


def _state_bytes(shape: ModelShape, slots: int) -> int:
    layers = sum(shape.recurrent)
    return layers * (shape.conv_state + shape.ssm_state) * _STATE_VALUE_BYTES * slots


def _compute_bytes(shape: ModelShape, ctx_pool: int, given: EngineOptions) -> int:
    cells, _ = _cells(ctx_pool, given)
    ubatch = min(given.ubatch, given.batch)
    widest = max(shape.feed_forward, default=0)
    activations = ubatch * (4 * shape.embedding + 2 * widest) * 4
    mask = cells * ubatch * 2
    outputs = shape.vocabulary * (1 if shape.causal else 0) * 4
    scores = 0
    if given.flash_attention == "off":
        scores = cells * ubatch * max(shape.heads, default=0) * 4
    return activations + mask + outputs + scores
