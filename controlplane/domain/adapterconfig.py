"""Reads `adapter_config.json`: its bytes become an AdapterConfig, or a sentence that says what is wrong with them.

It checks types and lengths, not whether an engine can serve what they say: that is preflight's affair.
"""

from typing import Any, Final, TypeGuard

import msgspec

from controlplane.domain.filesets import ADAPTER_CONFIG, Refusal
from controlplane.domain.reports import AdapterConfig
from schemas.codes import NOT_AN_ADAPTER

CONFIG_BYTES: Final = 1024**2
"""A longer one is refused; real ones have a few KiB."""

MODULES_MOST: Final = 4096
TEXT_MOST: Final = 512
PATTERN_MOST: Final = 8192
"""Characters of a regular expression in place of a list of modules."""
RANK_MOST: Final = 2**20

LORA: Final = "LORA"


class _Wrong(Exception):
    """Says which field is wrong and how."""


def read_config(raw: bytes) -> AdapterConfig | Refusal:
    """1 too long   2 no JSON object   3 a field of another type, or none where engines need one   4 read."""
    if len(raw) > CONFIG_BYTES:  # 1
        return _refused(f"has more than {CONFIG_BYTES // 1024} KiB")
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _refused("is not JSON")  # 2
    if not isinstance(told, dict):
        return _refused("is not a JSON object")
    try:
        return _read(told)  # pyright: ignore[reportUnknownArgumentType] - keys of JSON are text
    except _Wrong as wrong:
        return _refused(str(wrong))  # 3


def _read(told: dict[str, Any]) -> AdapterConfig:
    kind = _text(told, "peft_type") or LORA
    is_lora = kind.upper() == LORA
    missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in told]
    if is_lora and missing:
        raise _Wrong(f"lacks {', '.join(missing)}, without which no engine loads it")
    if is_lora:
        _number(told, "lora_alpha")
    modules, by_pattern = _targets(told)
    return AdapterConfig(
        # Other kinds have other fields; they are refused by their kind.
        r=_rank(told.get("r"), "r") if is_lora else 0,
        peft_type=kind.upper(),
        base_model_name_or_path=_text(told, "base_model_name_or_path").strip(),
        rank_pattern=_ranks(told),
        target_modules=modules,
        targets_by_pattern=by_pattern,
        modules_to_save=_names(told, "modules_to_save"),
        use_dora=_flag(told, "use_dora"),
        use_rslora=_flag(told, "use_rslora"),
        bias=_text(told, "bias").lower() or "none",
        lora_bias=_flag(told, "lora_bias"),
        trains_tokens=bool(told.get("trainable_token_indices")),
        replicates_layers=bool(told.get("layer_replication")),
    )


def _targets(told: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    given = told.get("target_modules")
    if isinstance(given, str):
        return (_short(given, "target_modules", PATTERN_MOST),), True
    return _names(told, "target_modules"), False


def _ranks(told: dict[str, Any]) -> dict[str, int]:
    given = told.get("rank_pattern")
    if given is None:
        return {}
    if not _is_object(given) or len(given) > MODULES_MOST:
        raise _Wrong(f"has a rank_pattern that is no object of at most {MODULES_MOST} ranks")
    return {
        _short(name, "rank_pattern", PATTERN_MOST): _rank(rank, "rank_pattern")
        for name, rank in given.items()
    }


def _rank(given: object, name: str) -> int:
    # `true` is a number to Python, and a rank to nobody.
    if type(given) is not int or not 1 <= given <= RANK_MOST:
        raise _Wrong(f"has a rank in {name} that is no whole number from 1 to {RANK_MOST}")
    return given


def _number(told: dict[str, Any], name: str) -> None:
    given = told.get(name)
    if type(given) not in (int, float):
        raise _Wrong(f"has {name} that is no number")


def _flag(told: dict[str, Any], name: str) -> bool:
    given = told.get(name)
    if given is not None and type(given) is not bool:
        raise _Wrong(f"has {name} that is neither true nor false")
    return bool(given)


def _text(told: dict[str, Any], name: str) -> str:
    given = told.get(name)
    if given is None:
        return ""
    if not isinstance(given, str):
        raise _Wrong(f"has {name} that is no text")
    return _short(given, name, TEXT_MOST)


def _names(told: dict[str, Any], name: str) -> tuple[str, ...]:
    """Each once, in order of name: lists that were sets come in any order."""
    given = told.get(name)
    if given is None:
        return ()
    if not _is_list(given) or len(given) > MODULES_MOST:
        raise _Wrong(f"has {name} that is no list of at most {MODULES_MOST} names")
    found: set[str] = set()
    for one in given:
        if not isinstance(one, str):
            raise _Wrong(f"has {name} with something that is no name")
        found.add(_short(one, name, TEXT_MOST))
    return tuple(sorted(found))


def _short(text: str, name: str, most: int) -> str:
    if len(text) > most or not text.isprintable():
        raise _Wrong(f"has a text in {name} that is not printable or longer than {most} characters")
    return text


def _is_object(given: object) -> TypeGuard[dict[str, object]]:
    return isinstance(given, dict)


def _is_list(given: object) -> TypeGuard[list[object]]:
    return isinstance(given, list)


def _refused(what: str) -> Refusal:
    return Refusal(code=NOT_AN_ADAPTER, sentence=f"{ADAPTER_CONFIG} {what}")
