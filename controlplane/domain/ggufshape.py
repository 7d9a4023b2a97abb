"""Tells the shape of a model from its GGUF header, as llama.cpp would understand it.

A header says less than it seems: which layers use a sliding window, keep a recurrent state or share
another layer's cache is often only known to the engine, per architecture. Those rules are the tables here.
An architecture without an entry is taken as plain attention, which can only be too much.
"""

from typing import Final

from msgspec import Struct

from controlplane.domain.ggufheader import Header
from controlplane.domain.shape import ModelShape

LAYERS_MAX: Final = 1024
_COUNT_MAX: Final = 2**31 - 1

NO_CACHE: Final = frozenset(
    {
        "bert",
        "dream",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "llada",
        "llada-moe",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "rnd1",
        "t5encoder",
        "wavtokenizer-dec",
    }
)
"""The engine keeps no cache for these: encoders, and models that generate by diffusion."""

RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
"""Every layer keeps a state, none a cache."""

HYBRID_BOTH: Final = frozenset({"falcon-h1"})
"""Every layer keeps a state and a cache."""

HYBRID_BY_HEADS: Final = frozenset(
    {"granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "plamo2"}
)
"""A layer without key heads keeps a state."""

HYBRID_BY_HEADS_AND_FEED_FORWARD: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
"""A layer without key heads keeps a state, unless it is a feed-forward layer."""

HYBRID_BY_INTERVAL: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Every n-th layer has attention, the others keep a state."""


class _Sliding(Struct, frozen=True, kw_only=True):
    """Every `period`-th layer is not sliding, the first of them first if `dense_first`; 1: the file must
    list the layers.

    `absent` is the window where the file names none, 0: then no layer slides. `fixed` above 0: the window
    whatever the file says, unless it says 0. `only_layers` above 0: only models with so many layers slide.
    """

    period: int
    absent: int = 0
    fixed: int = 0
    dense_first: bool = False
    only_layers: int = 0


SLIDING: Final[dict[str, _Sliding]] = {
    "afmoe": _Sliding(period=4),
    "cohere2": _Sliding(period=4),
    "cohere2moe": _Sliding(period=4, dense_first=True),
    "exaone-moe": _Sliding(period=4),
    "exaone4": _Sliding(period=4, absent=4096, only_layers=64),
    "gemma-embedding": _Sliding(period=6),
    "gemma-embedding2": _Sliding(period=6),
    "gemma2": _Sliding(period=2, absent=4096),
    "gemma3": _Sliding(period=6),
    "gemma3n": _Sliding(period=5),
    "gemma4": _Sliding(period=1),
    "gpt-oss": _Sliding(period=2),
    "granite_swa": _Sliding(period=1),
    "laguna": _Sliding(period=4, dense_first=True),
    "llama4": _Sliding(period=4, absent=8192, fixed=8192),
    "maple": _Sliding(period=1),
    "mellum": _Sliding(period=4),
    "mimo2": _Sliding(period=1),
    "modern-bert": _Sliding(period=3, dense_first=True),
    "olmo2": _Sliding(period=4),
    "plamo3": _Sliding(period=8),
    "smallthinker": _Sliding(period=4, fixed=4096, dense_first=True),
    "spark2_5": _Sliding(period=1),
    "step35": _Sliding(period=1),
}
"""Which layers the engine gives a short cache. A pattern in the file goes before the period here; the
engine's own log was asked for each (tests/integration/test_sliding_layers.py)."""

REPACKED: Final = frozenset({2, 12, 20, 39})
"""Tensor types (Q4_0, Q4_K, IQ4_NL, MXFP4) of which llama.cpp makes a second copy, laid out for the
processor's vectors; the file stays mapped beside it."""

SHARED_AFTER: Final[dict[str, int]] = {"gemma3n": 20}
"""Layers from this one on use the cache of an earlier one."""

_FILE_TYPES: Final[dict[int, str]] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


class NoShape(Struct, frozen=True, kw_only=True):
    """The header gives no shape; `sentence` says why. `architecture` is what it names all the same, empty for
    a file that is no model (a projector, an adapter) or names none."""

    sentence: str
    architecture: str = ""


class _Keys:
    """The values of one architecture, each within bounds; a wrong one counts as absent."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header = header
        self.prefix = f"{architecture}."

    def number(self, name: str, default: int = 0) -> int:
        value = self.header.values.get(self.prefix + name)
        return value if type(value) is int and 0 <= value <= _COUNT_MAX else default

    def flag(self, name: str, default: bool) -> bool:
        value = self.header.values.get(self.prefix + name)
        return value if isinstance(value, bool) else default

    def has(self, name: str) -> bool:
        return self.prefix + name in self.header.values

    def per_layer(self, name: str, layers: int, default: int = 0) -> tuple[int, ...]:
        """One number for each layer, also where the file gives one for all."""
        listed = self.listed(name)
        if listed is None:
            return (self.number(name, default),) * layers
        # Models with layers for drafting list those too, behind the others.
        return (*listed[:layers], *((default,) * (layers - len(listed))))

    def listed(self, name: str) -> tuple[int, ...] | None:
        found = self.header.arrays.get(self.prefix + name)
        if found is None:
            return None
        return tuple(
            entry if type(entry) is int and 0 <= entry <= _COUNT_MAX else 0 for entry in found
        )

    def listed_flags(self, name: str) -> tuple[bool, ...] | None:
        found = self.header.arrays.get(self.prefix + name)
        return None if found is None else tuple(bool(entry) for entry in found)


def shape_of(header: Header) -> ModelShape | NoShape:
    """The shape, or why there is none: a file of another kind (a projector), or one without the basics."""
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        return NoShape(sentence="its header names no architecture")
    kind = header.values.get("general.type", "model")
    if kind != "model":
        return NoShape(sentence=f"it holds a {str(kind)[:40]} and not a model")
    keys = _Keys(header, architecture)
    layers = keys.number("block_count")
    embedding = keys.number("embedding_length")
    if not 0 < layers <= LAYERS_MAX or embedding == 0:
        return NoShape(
            sentence=f"its header does not tell the layers and sizes of a {architecture}",
            architecture=architecture,
        )
    heads = keys.per_layer("attention.head_count", layers)
    recurrent = _recurrent(keys, architecture, layers)
    kv_rank = keys.number("attention.kv_lora_rank") if keys.has("attention.key_length_mla") else 0
    window, sliding = _sliding(keys, architecture, layers)
    most_heads = max(heads)
    head_length = embedding // most_heads if most_heads else 0
    key_length = keys.number("attention.key_length", head_length)
    value_length = keys.number("attention.value_length", head_length)
    states = _states(keys, embedding, most_heads) if any(recurrent) else _States()
    pooling = header.values.get(f"{architecture}.pooling_type", 0)
    return ModelShape(
        architecture=architecture,
        layers=layers,
        embedding=embedding,
        vocabulary=_vocabulary(header, keys),
        trained_context=keys.number("context_length"),
        feed_forward=keys.per_layer("feed_forward_length", layers),
        heads=heads,
        heads_kv=_heads_kv(keys, architecture, heads, recurrent),
        key_length=key_length,
        value_length=value_length,
        key_length_sliding=keys.number("attention.key_length_swa", key_length) if window else 0,
        value_length_sliding=keys.number("attention.value_length_swa", value_length)
        if window
        else 0,
        sliding_window=window,
        sliding=sliding,
        kv_rank=kv_rank,
        rope_dims=keys.number("rope.dimension_count") if kv_rank else 0,
        recurrent=recurrent if any(recurrent) else (),
        conv_state=states.conv,
        ssm_state=states.ssm,
        inner=states.inner,
        conv_channels=states.channels,
        experts=keys.number("expert_count"),
        experts_used=keys.number("expert_used_count"),
        expert_feed_forward=keys.number("expert_feed_forward_length"),
        causal=architecture not in NO_CACHE,
        embeds=architecture in NO_CACHE or bool(pooling),
        indexer_length=keys.number("attention.indexer.key_length"),
        repacked=_repacked(header),
        split_count=_split_count(header),
        quant=_quant(header),
        name=str(header.values.get("general.name", "")),
    )


def _vocabulary(header: Header, keys: _Keys) -> int:
    """The embedding's rows count: a vocabulary may be shorter than what the weights have room for."""
    return (
        header.vocabulary_rows
        or header.lengths.get("tokenizer.ggml.tokens", 0)
        or keys.number("vocab_size")
    )


def _repacked(header: Header) -> float:
    """The share of the weights with a second copy; of a set of shards, what the first one tells of it."""
    if not header.weights_bytes:
        return 0.0
    twice = sum(size for kind, size in header.matrix_bytes.items() if kind in REPACKED)
    return min(1.0, twice / header.weights_bytes)


def _split_count(header: Header) -> int:
    count = header.values.get("split.count", 1)
    return count if type(count) is int and 1 <= count <= 99_999 else 1


def _quant(header: Header) -> str:
    kind = header.values.get("general.file_type")
    return _FILE_TYPES.get(kind, "") if type(kind) is int else ""


def _recurrent(keys: _Keys, architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture in RECURRENT or architecture in HYBRID_BOTH:
        return (True,) * layers
    if architecture in HYBRID_BY_INTERVAL:
        listed = keys.listed_flags("attention.recurrent_layers")
        if listed is not None:
            return (*listed[:layers], *((False,) * (layers - len(listed))))
        interval = keys.number("full_attention_interval", 4)
        return tuple(interval == 0 or (layer + 1) % interval != 0 for layer in range(layers))
    if architecture in HYBRID_BY_HEADS:
        return tuple(heads == 0 for heads in keys.per_layer("attention.head_count_kv", layers))
    if architecture in HYBRID_BY_HEADS_AND_FEED_FORWARD:
        heads_kv = keys.per_layer("attention.head_count_kv", layers)
        feed_forward = keys.per_layer("feed_forward_length", layers)
        return tuple(h == 0 and f == 0 for h, f in zip(heads_kv, feed_forward, strict=True))
    return (False,) * layers


def _heads_kv(
    keys: _Keys, architecture: str, heads: tuple[int, ...], recurrent: tuple[bool, ...]
) -> tuple[int, ...]:
    """0 where a layer keeps no cache: it keeps a state instead, or uses an earlier layer's."""
    layers = len(heads)
    if architecture in RECURRENT or architecture in NO_CACHE:
        return (0,) * layers
    listed = keys.listed("attention.head_count_kv")
    if listed is None and not keys.has("attention.head_count_kv"):
        found = heads
    else:
        found = keys.per_layer("attention.head_count_kv", layers)
    own = layers
    if keys.has("attention.shared_kv_layers"):
        own = max(0, layers - keys.number("attention.shared_kv_layers"))
    elif architecture in SHARED_AFTER:
        own = SHARED_AFTER[architecture]
    both = architecture in HYBRID_BOTH
    return tuple(
        0 if layer >= own or (recurrent[layer] and not both) else count
        for layer, count in enumerate(found)
    )


def _sliding(keys: _Keys, architecture: str, layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window in tokens, and which layers have it. (0, ()) when none has."""
    rule = SLIDING.get(architecture)
    if rule is None:
        return 0, ()
    if rule.only_layers and layers != rule.only_layers:
        return 0, ()
    window = keys.number("attention.sliding_window", rule.absent)
    if not window:
        return 0, ()
    listed = keys.listed_flags("attention.sliding_window_pattern")
    if listed is not None:
        sliding = (*listed[:layers], *((False,) * (layers - len(listed))))
    else:
        period = keys.number("attention.sliding_window_pattern", rule.period)
        sliding = tuple(_slides(layer, period, rule.dense_first) for layer in range(layers))
    return (rule.fixed or window, sliding) if any(sliding) else (0, ())


def _slides(layer: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    place = layer % period
    return place != 0 if dense_first else place < period - 1


class _States(Struct, frozen=True, kw_only=True):
    """Values of the two states a recurrent layer keeps for each sequence, and how wide it is inside."""

    conv: int = 0
    ssm: int = 0
    inner: int = 0
    channels: int = 0


def _states(keys: _Keys, embedding: int, heads: int) -> _States:
    head_size = keys.number("wkv.head_size")
    if head_size:
        shift = keys.number("token_shift_count", 2) * embedding
        return _States(conv=shift, ssm=embedding * head_size, inner=embedding, channels=embedding)
    short = keys.number("shortconv.l_cache")
    if short:
        return _States(conv=embedding * (short - 1), inner=embedding, channels=embedding)
    kernel = max(0, keys.number("ssm.conv_kernel") - 1)
    delta = keys.number("kda.head_dim")
    if delta:
        inner = heads * delta
        return _States(conv=3 * kernel * inner, ssm=delta * inner, inner=inner, channels=3 * inner)
    inner, size = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    channels = inner + 2 * keys.number("ssm.group_count") * size
    return _States(conv=kernel * channels, ssm=inner * size, inner=inner, channels=channels)
