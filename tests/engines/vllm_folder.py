"""Reads the folder of an adapter as vLLM does, and says which paths and configurations it does not take.

Standard library only; it keeps nothing. The words are those of vLLM's sources and measurements.
"""

import json
import os
import struct

from vllm_words import Refused  # pyright: ignore[reportMissingImports]

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What of the base model can carry an adapter."""


def wrong_config(config: dict, max_rank: int) -> str | None:
    """Why the engine refuses such an adapter, in its own words."""
    missing = {"r", "lora_alpha", "target_modules"} - set(config)
    if missing:
        return f"Missing required configuration fields: {missing}"
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > max_rank:
        return f"LoRA rank {rank} is greater than max_lora_rank {max_rank}."
    if config.get("modules_to_save"):
        return "vLLM only supports modules_to_save being None."
    if config.get("use_dora"):
        return "vLLM does not yet support DoRA."
    if config.get("bias", "none") != "none":
        return "base_model.model.model.layers.0.self_attn.q_proj.bias is unsupported LoRA weight"
    targets = config["target_modules"]
    unexpected = sorted(set(targets) - set(MODULES)) if isinstance(targets, list) else []
    if unexpected:
        return f"expected target modules in {list(MODULES)} but received {unexpected}"
    return None


def marker_of(path: str) -> str:
    """`marker` of the safetensors file's own metadata; raises for what is no such file."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(min(length, 1 << 20)))
        size = file.seek(0, os.SEEK_END)
    ends = [entry["data_offsets"][1] for key, entry in head.items() if key != "__metadata__"]
    if size != 8 + length + max(ends, default=0):
        raise ValueError("the file is not as long as its header says")
    return str(head.get("__metadata__", {}).get("marker", ""))


def allow_path(path: str) -> None:
    """The Rust front end's allow-list. What looks like a repository's name passes."""
    parts = path.split("/")
    if not path.startswith("/") and len(parts) == 2 and all(parts) and "." not in parts:
        return
    told = os.environ.get("VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES", "")
    prefixes = [prefix for prefix in told.split(",") if prefix]
    if not prefixes:
        text = "Local LoRA adapter paths require VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"
        raise Refused(400, "BadRequestError", f"{text} to be configured.", "lora_path")
    if not all(os.path.isdir(prefix) for prefix in prefixes):
        text = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES must hold existing directories."
        raise Refused(500, "InternalServerError", text)

    def inside(one: str, within) -> bool:
        return any(os.path.commonpath([one, prefix]) == prefix for prefix in within)

    plain = [os.path.normpath(prefix) for prefix in prefixes]
    if not path.startswith("/") or not inside(os.path.normpath(path), plain):
        text = "Local LoRA adapter path must be absolute and under one of the prefixes in"
        text += " VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES."
        raise Refused(400, "BadRequestError", text, "lora_path")
    if not os.path.exists(path):
        text = "Local LoRA adapter path must exist and be accessible."
        raise Refused(400, "BadRequestError", text, "lora_path")
    if not inside(os.path.realpath(path), [os.path.realpath(prefix) for prefix in prefixes]):
        text = "Local LoRA adapter path is outside the configured allowed prefixes."
        raise Refused(400, "BadRequestError", text, "lora_path")
