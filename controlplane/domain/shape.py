"""Holds what a GGUF header says of a model that matters for loading it: its shape, per layer where that differs.

Data only; ggufshape.py tells it from a header, estimate.py computes with it.
"""

from msgspec import Struct


class ModelShape(Struct, frozen=True, kw_only=True):
    """The shape of one model. Counts are per model unless they say per layer; a per-layer tuple has one
    entry for each of `layers`, in order.

    `heads_kv` 0 in a layer: that layer keeps no attention cache (recurrent, or shares another's).
    `sliding` True: that layer's cache holds at most `sliding_window` tokens (0: no such layer).
    `kv_rank` above 0: attention is MLA and caches `kv_rank` + `rope_dims` values per token and layer.
    `recurrent` True: that layer keeps a state of `conv_state` + `ssm_state` values per sequence; `inner`
    and `conv_channels` are how wide it is inside.
    `split_count` is what the file says of its own shards (1: a single file). `causal` False: an embedding
    or reranking model without a generation cache. `embeds` True: the file asks to be used for embeddings,
    whether or not the engine keeps a cache for it. `indexer_length` above 0: each token and layer also
    keeps a key of that many values for sparse attention. `repacked` is the share of the weights' bytes,
    0 to 1, of which an engine on a processor makes a second copy.
    """

    architecture: str
    layers: int
    embedding: int
    vocabulary: int
    trained_context: int
    feed_forward: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    heads_kv: tuple[int, ...] = ()
    key_length: int = 0
    value_length: int = 0
    key_length_sliding: int = 0
    value_length_sliding: int = 0
    sliding_window: int = 0
    sliding: tuple[bool, ...] = ()
    kv_rank: int = 0
    rope_dims: int = 0
    recurrent: tuple[bool, ...] = ()
    conv_state: int = 0
    ssm_state: int = 0
    inner: int = 0
    conv_channels: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    causal: bool = True
    embeds: bool = False
    indexer_length: int = 0
    repacked: float = 0.0
    split_count: int = 1
    quant: str = ""
    name: str = ""
