"""Says which arguments of `vllm serve` a profile may not use, and what its arguments say about adapters.

vLLM has several hundred flags and grows some with every release, so what is not refused here is let through and
checked by vLLM itself. Refused are those the yard sets, those that open doors, and those that run code or
programs a profile names. What loads adapters is a profile's to say or to leave open; what is left open the yard
sets. The catalog and the driver both read this; it imports no engine.
"""

from typing import Final

from msgspec import Struct

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


RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be in every version, besides `_RANK_OF_NEWER`."""

_RANK_OF_NEWER: Final = 1
"""Newer versions take it as well; the yard chooses it for nobody."""

DEFAULT_RANK: Final = 16
"""The rank an engine is started for while no adapter needs more."""

MOST_ON_CARD: Final = 8
"""Places on the card for which the yard asks by itself: each costs memory there, used or not."""

_INTEGERS: Final = ("max-lora-rank", "max-loras", "max-cpu-loras")
_LORA: Final = (*_INTEGERS, "lora-target-modules", "enable-lora", "no-enable-lora")
_SHORTEST: Final = len("max-c")
"""Characters of the shortest form of one of these that stands for no other."""


class LoraFlags(Struct, frozen=True, kw_only=True):
    """What a profile's arguments say about adapters; None: they leave it open.

    `on_card` is `--max-loras` (adapters in one batch), `in_ram` is `--max-cpu-loras` (the engine's own cache).
    `problems` are values that cannot be read, a sentence each.
    """

    enabled: bool | None = None
    rank: int | None = None
    on_card: int | None = None
    in_ram: int | None = None
    target_modules: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()


def read_lora(args: tuple[str, ...]) -> LoraFlags:
    """The flags about adapters under every way vLLM lets them be written; of one given twice the last counts."""
    numbers: dict[str, int | None] = {}
    enabled: bool | None = None
    modules: tuple[str, ...] | None = None
    problems: list[str] = []
    for place, word in enumerate(args):
        if not word.startswith("--"):
            continue
        name, sign, given = word.partition("=")
        flag = _lora_flag(name[2:].replace("_", "-"))
        if flag is None:
            continue
        values = (given,) if sign else _values(args, place + 1)
        if flag in _INTEGERS:
            number = _whole(values[0]) if values else None
            if number is None or number < 1:
                got = repr(values[0]) if values else "nothing"
                problems.append(f"--{flag} needs a whole number of at least 1, got {got}")
            else:
                numbers[flag] = number
        elif flag == "lora-target-modules":
            modules = tuple(value for value in values if value)
            if not modules:
                problems.append(f"--{flag} needs at least one name")
        else:
            enabled = flag == "enable-lora"
    return LoraFlags(
        enabled=enabled,
        rank=numbers.get("max-lora-rank"),
        on_card=numbers.get("max-loras"),
        in_ram=numbers.get("max-cpu-loras"),
        target_modules=modules,
        problems=tuple(problems),
    )


def lora_problems(args: tuple[str, ...], limit: int) -> tuple[str, ...]:
    """Why an engine started so could not keep `limit` adapters loaded (at least 1), a sentence each."""
    flags = read_lora(args)
    found = list(flags.problems)
    if flags.enabled is False:
        found.append(f"--no-enable-lora is given, and max_loaded_adapters is {limit}")
    if flags.rank is not None and flags.rank not in (_RANK_OF_NEWER, *RANKS):
        *most, last = (_RANK_OF_NEWER, *RANKS)
        found.append(
            f"--max-lora-rank {flags.rank} is none that the engine starts with: "
            f"it takes {', '.join(map(str, most))} or {last}"
        )
    if flags.in_ram is not None and flags.in_ram < limit:
        found.append(
            f"--max-cpu-loras {flags.in_ram} is below max_loaded_adapters {limit}: "
            "the engine would drop adapters by itself"
        )
    if flags.in_ram is not None and flags.on_card is not None and flags.on_card > flags.in_ram:
        found.append(
            f"--max-loras {flags.on_card} is above --max-cpu-loras {flags.in_ram}: "
            "the engine would not start"
        )
    return tuple(found)


def lora_room(args: tuple[str, ...], limit: int) -> int:
    """How many adapters the engine's own cache holds: as its arguments say, else one more than are kept loaded,
    so that one can be loaded before another is given up."""
    flags = read_lora(args)
    return flags.in_ram if flags.in_ram is not None else max(limit + 1, flags.on_card or 0)


def lora_rank(args: tuple[str, ...], rank: int) -> int:
    """The rank the engine is started for: as its arguments say, else `rank`, the entry's (0: none asked for)."""
    flags = read_lora(args)
    return flags.rank if flags.rank is not None else max(rank, DEFAULT_RANK)


def lora_args(args: tuple[str, ...], limit: int, rank: int) -> tuple[str, ...]:
    """The arguments the yard adds to a profile's so that `limit` adapters of the entry's `rank` can be loaded.

    Nothing for a limit of 0, and nothing that the profile says itself.
    """
    if limit <= 0:
        return ()
    flags = read_lora(args)
    room = lora_room(args, limit)
    added: list[str] = []
    if not flags.enabled:
        added.append("--enable-lora")
    if flags.on_card is None:
        added += ["--max-loras", str(min(limit, MOST_ON_CARD, room))]
    if flags.in_ram is None:
        added += ["--max-cpu-loras", str(room)]
    if flags.rank is None:
        added += ["--max-lora-rank", str(lora_rank(args, rank))]
    return tuple(added)


def next_rank(rank: int) -> int | None:
    """The smallest rank an engine can be started for that takes adapters of `rank`; None: there is none."""
    return next((known for known in RANKS if known >= rank), None)


def _lora_flag(name: str) -> str | None:
    """The flag about adapters that `name` stands for, shortened to where it is still one of them alone."""
    if name in _LORA:
        return name
    if len(name) < _SHORTEST:
        return None
    found = [flag for flag in _LORA if flag.startswith(name)]
    return found[0] if len(found) == 1 else None


def _values(args: tuple[str, ...], start: int) -> tuple[str, ...]:
    """The words behind a flag up to the next one."""
    found: list[str] = []
    for word in args[start:]:
        if word.startswith("-") and not _is_number(word):
            break
        found.append(word)
    return tuple(found)


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
