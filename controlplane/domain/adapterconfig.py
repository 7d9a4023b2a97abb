"""Holds what the control plane uses of an adapter's `adapter_config.json`, as the file says it.

Whether an engine can serve such an adapter is decided elsewhere (preflight.py); the file itself is read and
bounded by a worker.
"""

from typing import Final

from msgspec import Struct

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """The fields of a PEFT configuration that decide whether an adapter can be served.

    Absent and null fields have these defaults. `target_modules` are names of modules, or their whole paths;
    `target_pattern` is what stands there instead when it is a text (an expression, or `all-linear`).
    """

    peft_type: str = ""
    r: int = 0
    rank_pattern: dict[str, int] = {}
    base_model: str = ""
    """`base_model_name_or_path`."""
    target_modules: tuple[str, ...] = ()
    target_pattern: str = ""
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    trainable_tokens: bool = False
    """`trainable_token_indices` is given: rows of the embeddings were trained."""
    layer_replication: bool = False
    """`layer_replication` is given: the adapter is for a model with layers repeated."""
