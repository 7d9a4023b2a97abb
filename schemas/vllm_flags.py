"""Says which arguments of `vllm serve` a profile may not use, and why.

vLLM has several hundred flags and grows some with every release, so what is not refused here is let through and
checked by vLLM itself. Refused are those the yard sets, those that open doors, and those that run code or
programs a profile names. The catalog and the driver both read this; it imports no engine.
"""

from typing import Final

_OURS: Final = "is set by the yard itself"
_SLEEP: Final = "follows from the profile's parking"
_DOOR: Final = "opens the engine to others than the gateway"
_CODE: Final = "loads code that a catalog may not bring to a node"
_SPREAD: Final = "spreads the engine beyond the one process group that the agent looks after"
_UNSEEN: Final = "reads further arguments from where nobody checks them"

REFUSED: Final[dict[str, str]] = {
    "model": _OURS,
    "host": _OURS,
    "port": _OURS,
    "uds": _OURS,
    "api-key": _OURS,
    "served-model-name": _OURS,
    "root-path": _OURS,
    "enable-sleep-mode": _SLEEP,
    "no-enable-sleep-mode": _SLEEP,
    "grpc": _DOOR,
    "allow-credentials": _DOOR,
    "allowed-origins": _DOOR,
    "allowed-local-media-path": _DOOR,
    "middleware": _CODE,
    "tool-parser-plugin": _CODE,
    "reasoning-parser-plugin": _CODE,
    "io-processor-plugin": _CODE,
    "logits-processors": _CODE,
    "logits-processor-pattern": _CODE,
    "worker-cls": _CODE,
    "worker-extension-cls": _CODE,
    "scheduler-cls": _CODE,
    "trust-remote-code": _CODE,
    "trust-request-chat-template": _CODE,
    "api-server-count": _SPREAD,
    "headless": _SPREAD,
    "data-parallel-size": _SPREAD,
    "data-parallel-size-local": _SPREAD,
    "data-parallel-address": _SPREAD,
    "data-parallel-rpc-port": _SPREAD,
    "data-parallel-backend": _SPREAD,
    "data-parallel-start-rank": _SPREAD,
    "data-parallel-rank": _SPREAD,
    "distributed-executor-backend": _SPREAD,
    "nnodes": _SPREAD,
    "node-rank": _SPREAD,
    "master-addr": _SPREAD,
    "master-port": _SPREAD,
    "config": _UNSEEN,
}
"""Flag without its dashes -> why a profile may not use it. `ssl-…` is refused as a whole."""

_SHORT: Final[dict[str, str]] = {
    "asc": _SPREAD,
    "dp": _SPREAD,
    "dpl": _SPREAD,
    "dpa": _SPREAD,
    "dpp": _SPREAD,
    "dpb": _SPREAD,
    "dpr": _SPREAD,
    "dpn": _SPREAD,
    "n": _SPREAD,
    "r": _SPREAD,
}


def problems(args: tuple[str, ...]) -> tuple[str, ...]:
    """Why these arguments may not be used, a sentence each; empty when they may.

    An argument counts under every way vLLM lets it be written: `--a-b`, `--a_b`, `--a-b=x`, `--a-b.key x`,
    and shortened to where it is still unmistakable, so a shorter form of a refused flag is refused too.
    """
    found: list[str] = []
    for word in args:
        if not word.startswith("-") or _is_number(word):
            continue
        name = word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
        why = _why(name) if word.startswith("--") else _SHORT.get(name)
        if why is not None:
            found.append(f"{word.partition('=')[0]} {why}")
    if args and not args[0].startswith("-"):
        found.append(f"{args[0]} comes before any flag: the weights are the entry's source")
    return tuple(found)


def _why(name: str) -> str | None:
    if not name:
        return "ends the flags, so that the yard's own would not be read"
    if name.startswith("ssl"):
        return _DOOR
    exact = REFUSED.get(name)
    if exact is not None:
        return exact
    return next((why for flag, why in REFUSED.items() if flag.startswith(name)), None)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
