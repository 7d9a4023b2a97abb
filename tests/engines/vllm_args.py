"""Reads the command line of the fake vLLM as argparse does for vLLM, and refuses what vLLM refuses.

Standard library only; it knows the flags of the arguments the project's tests use, and ends at any other.
"""

import os

ONE = ("served-model-name", "host", "port", "max-model-len", "dtype", "gpu-memory-utilization")
ONE += ("max-num-seqs", "tensor-parallel-size", "kv-cache-memory-bytes", "seed", "quantization")
ONE += ("max-loras", "max-cpu-loras", "max-lora-rank", "load-format", "cpu-offload-gb")
ONE += ("lora-dtype",)
MANY = ("lora-target-modules",)
SWITCHES = ("enable-sleep-mode", "enforce-eager", "enable-lora", "enable-prefix-caching")
SWITCHES += ("fully-sharded-loras",)
"""The flags it knows: as argparse, it ends with 2 at any other."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def read_args(words: list[str]) -> dict:
    """The command line after `serve`. Exits with 2 at what vLLM would not know."""
    found: dict = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            if "model" in found:
                usage_error(f"unrecognized arguments: {word}")
            found["model"] = word
            continue
        name, _, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name in SWITCHES:
            found[name] = True
        elif name.startswith("no-") and name[3:] in SWITCHES:
            found.pop(name[3:], None)
        elif name in MANY:
            found[name] = [value] if value else []
            while not value and at < len(words) and not words[at].startswith("--"):
                found[name].append(words[at])
                at += 1
        elif name in ONE:
            if not value:
                if at >= len(words):
                    usage_error(f"argument --{name}: expected one argument")
                value, at = words[at], at + 1
            found[name] = value
        else:
            usage_error(f"unrecognized arguments: {word}")
    if "model" not in found:
        usage_error("a model is needed")
    return found


def usage_error(text: str) -> None:
    os.write(2, f"vllm serve: error: {text}\n".encode())
    raise SystemExit(2)


def wrong_arguments(args: dict) -> str | None:
    """Why it does not start with these, as vLLM's own configuration says it."""
    if "enable-lora" not in args:
        return None
    loras, rank = int(args.get("max-loras", 1)), int(args.get("max-lora-rank", 16))
    cpu = int(args.get("max-cpu-loras", loras))
    if rank not in RANKS:
        return f"max_lora_rank ({rank}) must be one of {RANKS}."
    if loras < 1:
        return f"max_loras ({loras}) must be greater than 0."
    if cpu < loras:
        return f"max_cpu_loras ({cpu}) must be >= max_loras ({loras})"
    return None
