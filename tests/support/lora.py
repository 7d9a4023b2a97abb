"""Writes folders that hold a LoRA adapter: a valid, tiny safetensors file and the configuration beside it.

The file's own metadata carries a `marker`, which the fake vLLM answers with: so a test sees which adapter
answered, however often the files were copied.
"""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
BASE: Final = "yard/tiny-base"
_HIDDEN: Final = 4


def config_of(
    *,
    rank: int = 8,
    base: str = BASE,
    target_modules: Sequence[str] = ("q_proj", "v_proj"),
    **more: Any,
) -> dict[str, Any]:
    """An `adapter_config.json` as peft writes it; `more` replaces its fields (None stays None)."""
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": list(target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **more,
    }


def weights_of(
    marker: str,
    *,
    rank: int = 8,
    target_modules: Sequence[str] = ("q_proj", "v_proj"),
    padding: int = 0,
) -> bytes:
    """The bytes of a safetensors file of zeros; `padding` more bytes of them, as a tensor of its own."""
    tensors: dict[str, tuple[int, ...]] = {}
    for module in target_modules:
        block = "self_attn" if module.endswith(("q_proj", "k_proj", "v_proj", "o_proj")) else "mlp"
        path = f"base_model.model.model.layers.0.{block}.{module}"
        tensors[f"{path}.lora_A.weight"] = (rank, _HIDDEN)
        tensors[f"{path}.lora_B.weight"] = (_HIDDEN, rank)
    if padding:
        tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] = (
            math.ceil(padding / 4),
        )
    head: dict[str, Any] = {"__metadata__": {"format": "pt", "marker": marker}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        head[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write_adapter(
    folder: Path,
    marker: str = "",
    *,
    rank: int = 8,
    base: str = BASE,
    target_modules: Sequence[str] = ("q_proj", "v_proj"),
    padding: int = 0,
    **more: Any,
) -> Path:
    """Makes `folder` an adapter that answers as `marker` (by default the folder's name); returns it.

    `more` are fields of its configuration: `use_dora=True`, `rank_pattern={"q_proj": 64}`, …
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(rank=rank, base=base, target_modules=target_modules, **more)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = weights_of(
        marker or folder.name, rank=rank, target_modules=target_modules, padding=padding
    )
    (folder / WEIGHTS).write_bytes(weights)
    return folder
