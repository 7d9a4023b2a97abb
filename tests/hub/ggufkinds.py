"""Says of what every kind of model is made: its keys and its tensors, as small as the sizes asked for.

The names are those the engine looks for. Nothing is written here; ggufs.py does that.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

Shape = tuple[int, ...]
Keys = dict[str, Any]

VOCABULARY: Final = 512
CONTEXT: Final = 1024


class Model(Struct, frozen=True, kw_only=True):
    """What is written: the architecture, its keys (without the prefix) and the tensors with their lengths,
    the shortest step first as in ggml. `tokenizer` is `llama` or `bert`."""

    architecture: str
    keys: Keys
    tensors: dict[str, Shape]
    tokenizer: str = "llama"
    general: Keys = {}


class Sizes(Struct, frozen=True, kw_only=True):
    """The sizes all kinds are made from, so that a test may make one of them larger."""

    layers: int = 4
    embedding: int = 128
    heads: int = 4
    heads_kv: int = 2
    head_length: int = 32
    feed_forward: int = 256
    vocabulary: int = VOCABULARY
    context: int = CONTEXT
    window: int = 64
    experts: int = 4
    experts_used: int = 2
    inner: int = 256
    state: int = 32


# Tensors ---------------------------------------------------------------------------------------------


def _weights(
    names: Mapping[str, Shape], layer: int | None = None, bare: str = ""
) -> dict[str, Shape]:
    """Names with the layer before and `.weight` behind, unless they end otherwise already or are `bare`."""
    prefix = "" if layer is None else f"blk.{layer}."
    found: dict[str, Shape] = {}
    for name, shape in names.items():
        whole = name.endswith((".bias", ".weight")) or name in ("ssm_a", "ssm_d", bare)
        found[f"{prefix}{name}" if whole else f"{prefix}{name}.weight"] = shape
    return found


def _ends(sizes: Sizes, *, tied: bool = False) -> dict[str, Shape]:
    names: dict[str, Shape] = {
        "token_embd": (sizes.embedding, sizes.vocabulary),
        "output_norm": (sizes.embedding,),
    }
    if not tied:
        names["output"] = (sizes.embedding, sizes.vocabulary)
    return _weights(names)


def _attention(sizes: Sizes, heads_kv: int, *, norms: bool = False) -> dict[str, Shape]:
    wide, narrow = sizes.heads * sizes.head_length, heads_kv * sizes.head_length
    names: dict[str, Shape] = {
        "attn_norm": (sizes.embedding,),
        "attn_q": (sizes.embedding, wide),
        "attn_k": (sizes.embedding, narrow),
        "attn_v": (sizes.embedding, narrow),
        "attn_output": (wide, sizes.embedding),
    }
    if norms:
        names["attn_q_norm"] = (sizes.head_length,)
        names["attn_k_norm"] = (sizes.head_length,)
    return names


def _feed_forward(sizes: Sizes, width: int = 0) -> dict[str, Shape]:
    width = width or sizes.feed_forward
    return {
        "ffn_norm": (sizes.embedding,),
        "ffn_gate": (sizes.embedding, width),
        "ffn_up": (sizes.embedding, width),
        "ffn_down": (width, sizes.embedding),
    }


def _experts(sizes: Sizes, width: int) -> dict[str, Shape]:
    return {
        "ffn_norm": (sizes.embedding,),
        "ffn_gate_inp": (sizes.embedding, sizes.experts),
        "ffn_gate_exps": (sizes.embedding, width, sizes.experts),
        "ffn_up_exps": (sizes.embedding, width, sizes.experts),
        "ffn_down_exps": (width, sizes.embedding, sizes.experts),
    }


def basic_keys(sizes: Sizes) -> Keys:
    """The keys every architecture with attention has."""
    return {
        "block_count": sizes.layers,
        "context_length": sizes.context,
        "embedding_length": sizes.embedding,
        "feed_forward_length": sizes.feed_forward,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.heads_kv,
        "attention.key_length": sizes.head_length,
        "attention.value_length": sizes.head_length,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.head_length,
        "rope.freq_base": 10000.0,
    }


# Kinds -----------------------------------------------------------------------------------------------


def _llama(sizes: Sizes) -> Model:
    """Attention with fewer key heads than query heads."""
    tensors = _ends(sizes)
    for layer in range(sizes.layers):
        names = {**_attention(sizes, sizes.heads_kv), **_feed_forward(sizes)}
        tensors |= _weights(names, layer)
    return Model(architecture="llama", keys=basic_keys(sizes), tensors=tensors)


def _qwen3moe(sizes: Sizes) -> Model:
    """A mixture of experts."""
    tensors = _ends(sizes)
    width = sizes.feed_forward // 2
    for layer in range(sizes.layers):
        names = {**_attention(sizes, sizes.heads_kv, norms=True), **_experts(sizes, width)}
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "expert_count": sizes.experts,
        "expert_used_count": sizes.experts_used,
        "expert_feed_forward_length": width,
    }
    return Model(architecture="qwen3moe", keys=keys, tensors=tensors)


def _qwen3_embedding(sizes: Sizes) -> Model:
    """An embedding model with a causal architecture: the engine keeps a cache for it all the same."""
    tensors = _ends(sizes, tied=True)
    for layer in range(sizes.layers):
        names = {**_attention(sizes, sizes.heads_kv, norms=True), **_feed_forward(sizes)}
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {"pooling_type": 3}
    return Model(architecture="qwen3", keys=keys, tensors=tensors)


def _gemma3(sizes: Sizes) -> Model:
    """Five sliding layers to one that is not."""
    tensors = _ends(sizes, tied=True)
    for layer in range(sizes.layers):
        names = {
            **_attention(sizes, sizes.heads_kv, norms=True),
            **_feed_forward(sizes),
            "post_attention_norm": (sizes.embedding,),
            "post_ffw_norm": (sizes.embedding,),
        }
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {"attention.sliding_window": sizes.window}
    return Model(architecture="gemma3", keys=keys, tensors=tensors)


def _gpt_oss(sizes: Sizes) -> Model:
    """Sliding and full layers in turn, with experts."""
    tensors = _ends(sizes)
    width = sizes.feed_forward // 2
    wide, narrow = sizes.heads * sizes.head_length, sizes.heads_kv * sizes.head_length
    for layer in range(sizes.layers):
        names = {
            **_attention(sizes, sizes.heads_kv),
            **_experts(sizes, width),
            "post_attention_norm": (sizes.embedding,),
            "attn_sinks": (sizes.heads,),
            "attn_q.bias": (wide,),
            "attn_k.bias": (narrow,),
            "attn_v.bias": (narrow,),
            "attn_output.bias": (sizes.embedding,),
            "ffn_gate_inp.bias": (sizes.experts,),
            "ffn_gate_exps.bias": (width, sizes.experts),
            "ffn_up_exps.bias": (width, sizes.experts),
            "ffn_down_exps.bias": (sizes.embedding, sizes.experts),
        }
        del names["ffn_norm"]
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "attention.sliding_window": sizes.window,
        "expert_count": sizes.experts,
        "expert_used_count": sizes.experts_used,
        "expert_feed_forward_length": width,
    }
    return Model(architecture="gpt-oss", keys=keys, tensors=tensors)


def _deepseek2(sizes: Sizes) -> Model:
    """Latent attention: one compressed row a token instead of keys and values by head."""
    rank, rope, query_rank = 64, 16, 48
    key, value, width = 48, 32, sizes.feed_forward // 4
    tensors = _ends(sizes)
    for layer in range(sizes.layers):
        names: dict[str, Shape] = {
            "attn_norm": (sizes.embedding,),
            "attn_q_a": (sizes.embedding, query_rank),
            "attn_q_a_norm": (query_rank,),
            "attn_q_b": (query_rank, sizes.heads * key),
            "attn_kv_a_mqa": (sizes.embedding, rank + rope),
            "attn_kv_a_norm": (rank,),
            "attn_k_b": (key - rope, rank, sizes.heads),
            "attn_v_b": (rank, value, sizes.heads),
            "attn_output": (sizes.heads * value, sizes.embedding),
        }
        if layer == 0:
            names |= _feed_forward(sizes)
        else:
            names |= _experts(sizes, width) | {
                "ffn_gate_shexp": (sizes.embedding, width),
                "ffn_up_shexp": (sizes.embedding, width),
                "ffn_down_shexp": (width, sizes.embedding),
            }
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": query_rank,
        "rope.dimension_count": rope,
        "leading_dense_block_count": 1,
        "expert_count": sizes.experts,
        "expert_used_count": sizes.experts_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": width,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }
    return Model(architecture="deepseek2", keys=keys, tensors=tensors)


def _mamba(sizes: Sizes) -> Model:
    """A state in every layer and no cache at all."""
    inner, state, rank, kernel = sizes.inner, sizes.state, 8, 4
    tensors = _ends(sizes, tied=True)
    for layer in range(sizes.layers):
        names: dict[str, Shape] = {
            "attn_norm": (sizes.embedding,),
            "ssm_in": (sizes.embedding, 2 * inner),
            "ssm_conv1d": (kernel, inner),
            "ssm_conv1d.bias": (inner,),
            "ssm_x": (inner, rank + 2 * state),
            "ssm_dt": (rank, inner),
            "ssm_dt.bias": (inner,),
            "ssm_a": (state, inner),
            "ssm_d": (inner,),
            "ssm_out": (inner, sizes.embedding),
        }
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    return Model(architecture="mamba", keys=keys, tensors=tensors)


def _mamba2_layer(sizes: Sizes, inner: int, groups: int, state: int, heads: int) -> Keys:
    channels = inner + 2 * groups * state
    return {
        "ssm_in": (sizes.embedding, inner + channels + heads),
        "ssm_conv1d": (4, channels),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (1, heads),
        "ssm_d": (1, heads),
        "ssm_norm": (inner // groups, groups),
        "ssm_out": (inner, sizes.embedding),
    }


def _granitehybrid(sizes: Sizes) -> Model:
    """Layers with a state, and now and then one with a cache."""
    inner, groups, state, heads = sizes.inner, 1, sizes.state, 8
    heads_kv = [sizes.heads_kv if layer % 4 == 3 else 0 for layer in range(sizes.layers)]
    tensors = _ends(sizes, tied=True)
    for layer, kept in enumerate(heads_kv):
        names: dict[str, Shape] = {"attn_norm": (sizes.embedding,), **_feed_forward(sizes)}
        if kept:
            names |= _attention(sizes, kept)
        else:
            names |= _mamba2_layer(sizes, inner, groups, state, heads)
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "attention.head_count_kv": heads_kv,
        "attention.scale": 0.1,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
    return Model(architecture="granitehybrid", keys=keys, tensors=tensors)


def _falcon_h1(sizes: Sizes) -> Model:
    """A state and a cache in every layer."""
    inner, groups, state, heads = sizes.inner, 1, sizes.state, 8
    tensors = _ends(sizes)
    for layer in range(sizes.layers):
        names = {
            **_attention(sizes, sizes.heads_kv),
            **_feed_forward(sizes),
            **_mamba2_layer(sizes, inner, groups, state, heads),
        }
        # The one name the engine reads without an ending.
        tensors |= _weights(names, layer, bare="ffn_norm")
    keys = basic_keys(sizes) | {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
    return Model(architecture="falcon-h1", keys=keys, tensors=tensors)


def _lfm2(sizes: Sizes) -> Model:
    """Short convolutions, and now and then attention."""
    kernel = 3
    heads_kv = [sizes.heads_kv if layer % 2 else 0 for layer in range(sizes.layers)]
    tensors = _ends(sizes, tied=True)
    del tensors["output_norm.weight"]
    tensors["token_embd_norm.weight"] = (sizes.embedding,)
    for layer, kept in enumerate(heads_kv):
        names: dict[str, Shape] = {"attn_norm": (sizes.embedding,), **_feed_forward(sizes)}
        if kept:
            names |= _attention(sizes, kept, norms=True)
        else:
            names |= {
                "shortconv.conv": (kernel, sizes.embedding),
                "shortconv.in_proj": (sizes.embedding, 3 * sizes.embedding),
                "shortconv.out_proj": (sizes.embedding, sizes.embedding),
            }
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "attention.head_count_kv": heads_kv,
        "shortconv.l_cache": kernel,
        "vocab_size": sizes.vocabulary,
    }
    return Model(architecture="lfm2", keys=keys, tensors=tensors)


def _deci(sizes: Sizes) -> Model:
    """Another number of key heads in every layer, and none in some."""
    choice = (sizes.heads, sizes.heads_kv, 0, 1)
    heads_kv = [choice[layer % 4] for layer in range(sizes.layers)]
    tensors = _ends(sizes)
    for layer, kept in enumerate(heads_kv):
        names = _feed_forward(sizes)
        if kept:
            names |= _attention(sizes, kept)
        tensors |= _weights(names, layer)
    keys = basic_keys(sizes) | {
        "attention.head_count": [sizes.heads if kept else 0 for kept in heads_kv],
        "attention.head_count_kv": heads_kv,
        "feed_forward_length": [sizes.feed_forward] * sizes.layers,
        "vocab_size": sizes.vocabulary,
    }
    return Model(architecture="deci", keys=keys, tensors=tensors)


def _bert(sizes: Sizes) -> Model:
    """An encoder: no cache."""
    width, long = sizes.embedding, sizes.feed_forward
    tensors = _weights(
        {
            "token_embd": (width, sizes.vocabulary),
            "token_types": (width, 2),
            "position_embd": (width, sizes.context),
            "token_embd_norm": (width,),
            "token_embd_norm.bias": (width,),
        }
    )
    for layer in range(sizes.layers):
        names: dict[str, Shape] = {}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            names |= {name: (width, width), f"{name}.bias": (width,)}
        for name in ("attn_output_norm", "layer_output_norm"):
            names |= {name: (width,), f"{name}.bias": (width,)}
        names |= {"ffn_up": (width, long), "ffn_up.bias": (long,)}
        names |= {"ffn_down": (long, width), "ffn_down.bias": (width,)}
        tensors |= _weights(names, layer)
    keys: Keys = {
        "block_count": sizes.layers,
        "context_length": sizes.context,
        "embedding_length": width,
        "feed_forward_length": long,
        "attention.head_count": sizes.heads,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.causal": False,
        "pooling_type": 2,
    }
    return Model(architecture="bert", keys=keys, tensors=tensors, tokenizer="bert")


KINDS: Final[dict[str, Callable[[Sizes], Model]]] = {
    "llama": _llama,
    "qwen3moe": _qwen3moe,
    "qwen3-embedding": _qwen3_embedding,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "mamba": _mamba,
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "lfm2": _lfm2,
    "deci": _deci,
    "bert": _bert,
}
"""Every kind by name."""
