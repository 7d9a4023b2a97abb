"""Says how much memory an engine will use for a model, and of what that is made.

The formulas are those of llama.cpp, which docs/memory.md holds against the engine's own figures. It knows
nothing of cards, and it never says less than it knows: what it cannot tell it takes as the larger.
"""

from collections.abc import Mapping
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

ENGINE_BYTES: Final = 32 * 1024**2
TOKEN_BYTES: Final = 320
"""What the process takes apart from its model: itself, and its tables for each token of the vocabulary.
Measured, see docs/memory.md."""

_GIB: Final = 1024**3
_VALUE_BYTES: Final = 4
_INPUT_VALUES: Final = 16
"""Positions, token numbers and the like, for each token of a batch."""

_PAD: Final = 256

FlashAttention = Literal["auto", "on", "off"]


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What of a profile's arguments changes the memory of the engine.

    `ctx_pool` 0: as many tokens as the model was trained for. `unified` True: all slots share one pool,
    else each has an equal part. `swa_full` True: sliding layers keep the whole context too.
    `embedding` True: the engine answers with embeddings, and a result is kept for every token.
    `repack` True: on a processor, part of the weights gets a second copy beside the mapped file.
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
    embedding: bool = False
    repack: bool = True


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
    embedding: bool = False,
    repack: bool = True,
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
            embedding=embedding,
            repack=repack,
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
    types: dict[object, CacheType] = {
        number: name for name, number in llamacpp_flags.CACHE_TYPES.items()
    }
    attention: dict[object, FlashAttention] = {-1: "auto", 0: "off", 1: "on"}

    def count(path: str, default: int) -> int:
        value = found.get(path, default)
        return value if isinstance(value, int) and value > 0 else default

    return EngineOptions(
        ctx_pool=count("n_ctx", 0),
        slots=count("n_parallel", SLOTS),
        batch=count("n_batch", BATCH),
        ubatch=count("n_ubatch", UBATCH),
        cache_type_k=types.get(found.get("cache_type_k"), "f16"),
        cache_type_v=types.get(found.get("cache_type_v"), "f16"),
        flash_attention=attention.get(found.get("flash_attn_type", -1), "auto"),
        unified=bool(found.get("kv_unified", False)),
        swa_full=bool(found.get("swa_full", False)),
        embedding=bool(found.get("embedding", False)),
        repack=_repacks(found),
    )


def _repacks(found: Mapping[str, llamacpp_flags.Value]) -> bool:
    """Without a mapped file the second copy is the only one; `--no-repack` makes none."""
    modes = llamacpp_flags.LOAD_MODES
    unmapped = found.get("load_mode") in (modes["none"], modes["dio"])
    return not unmapped and not found.get("no_extra_bufts", False)


def estimate_with(shape: ModelShape, weights_bytes: int, given: EngineOptions) -> MemoryEstimate:
    """The memory of one engine with this model, so started; every part in bytes."""
    ctx_pool = given.ctx_pool or shape.trained_context
    repacked_bytes = round(weights_bytes * shape.repacked) if given.repack else 0
    kv_bytes = _kv_bytes(shape, ctx_pool, given)
    state_bytes = _state_bytes(shape, given.slots)
    compute_bytes = _compute_bytes(shape, ctx_pool, given)
    engine_bytes = ENGINE_BYTES + TOKEN_BYTES * shape.vocabulary
    return MemoryEstimate(
        basis="header",
        weights_bytes=weights_bytes,
        repacked_bytes=repacked_bytes,
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        compute_bytes=compute_bytes,
        engine_bytes=engine_bytes,
        total_bytes=sum(
            (weights_bytes, repacked_bytes, kv_bytes, state_bytes, compute_bytes, engine_bytes)
        ),
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
    if made.repacked_bytes:
        parts.append(f"repacked for the processor {amount(made.repacked_bytes)}")
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
    return layers * (shape.conv_state + shape.ssm_state) * _VALUE_BYTES * slots


def _compute_bytes(shape: ModelShape, ctx_pool: int, given: EngineOptions) -> int:
    """The buffer of the largest graph: what is alive at its fullest moment, for one batch of tokens.

    The moments looked at: attention, feed-forward (or its experts), a recurrent layer, the output. The
    masks are there at all of them. And what answers are copied to, for each slot.
    """
    batch = min(given.ubatch, given.batch, _padded(ctx_pool))
    attends = any(shape.heads_kv) or not shape.causal
    cells, streams = _cells(ctx_pool, given)
    flash = given.flash_attention != "off"
    masks, longest = _masks(shape, cells, batch, streams, given) if attends else (0, 0)
    moments = [_feed_forward_values(shape), _recurrent_values(shape, batch)]
    if attends:
        scores = 0 if flash else max(shape.heads) * longest
        moments.append(_attention_values(shape, flash) + scores)
    peak = max(moments) * batch
    outputs = batch if given.embedding else given.slots
    if shape.causal:
        peak = max(peak, shape.vocabulary * outputs + 6 * shape.embedding * batch)
    copied = (shape.vocabulary + shape.embedding) * given.slots
    return (peak + _INPUT_VALUES * batch + copied) * _VALUE_BYTES + masks * batch * (
        2 if flash else _VALUE_BYTES
    )


def _masks(
    shape: ModelShape, cells: int, batch: int, streams: int, given: EngineOptions
) -> tuple[int, int]:
    """Values of the attention masks for each token of a batch, and the longest of them.

    One for each kind of cache. Slots with a pool each share the batch, so only their own part counts.
    """
    if not shape.causal:
        return batch, batch
    sliding = shape.sliding or (False,) * shape.layers
    kinds = {slides for heads, slides in zip(shape.heads_kv, sliding, strict=True) if heads}
    lengths = [_sliding_cells(shape, cells, given) if slides else cells for slides in kinds]
    return sum(lengths), max(lengths)


def _attention_values(shape: ModelShape, flash: bool) -> int:
    """For each token: queries, keys, values and, without a score matrix, the result, in the widest layer."""
    widest = 0
    for heads, heads_kv in zip(shape.heads, _present_heads_kv(shape), strict=True):
        if shape.kv_rank:
            # The queries are brought to the compressed rows; the result comes back from them.
            absorbed = heads * (2 * shape.kv_rank + shape.rope_dims)
            widest = max(widest, absorbed + (heads * shape.kv_rank if flash else 0))
            continue
        query = heads * shape.key_length
        rows = heads_kv * (shape.key_length + shape.value_length)
        widest = max(widest, query + rows + (heads * shape.value_length if flash else 0))
    return 5 * shape.embedding + widest


def _present_heads_kv(shape: ModelShape) -> tuple[int, ...]:
    """An encoder keeps no keys, but it makes some: as many as it has heads."""
    return shape.heads_kv if shape.causal else shape.heads


def _feed_forward_values(shape: ModelShape) -> int:
    """For each token: what goes in, gate, up and their product, in the widest layer."""
    gated = 3 if shape.causal else 1
    dense = 5 * shape.embedding + gated * max(shape.feed_forward, default=0)
    if not shape.experts_used:
        return dense
    used = shape.experts_used
    through = 5 * shape.embedding + 3 * used * shape.expert_feed_forward
    gathered = 3 * shape.embedding + 2 * used * shape.embedding
    return max(dense, through, gathered)


def _recurrent_values(shape: ModelShape, batch: int) -> int:
    """For each token: the projections into a recurrent layer, its convolution and its result."""
    if not any(shape.recurrent):
        return 0
    channels = max(shape.conv_channels, shape.inner)
    projected = shape.inner + channels
    states = -(-shape.ssm_state // max(batch, 1))
    return 5 * shape.embedding + projected + 2 * channels + 2 * shape.inner + states
