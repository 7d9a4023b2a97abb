"""Reads one profile of a catalog entry and says everything that is wrong with it.

It does not know where the profile will run; placement does.
"""

import re
from typing import Any, Final, cast

from controlplane.domain.fields import Fields, shown
from controlplane.domain.parkings import read_parking
from controlplane.domain.quantities import DURATION, SIZE, read_bytes, read_seconds
from schemas import llamacpp_flags, vllm_flags
from schemas.commands import Problem
from schemas.model import EngineName, Profile, SecretRef

PLACEHOLDERS: Final = ("PORT", "HOST", "MODEL", "SOURCE")
"""What a command may name as `${…}`; the agent puts the values in, no shell does."""

MOST_CARDS: Final = 64
"""Cards of one replica; no machine has more."""

_ENGINES: Final[tuple[EngineName, ...]] = ("llamacpp", "vllm", "command")
_PLACEHOLDER: Final = re.compile(r"\$\{([^}]*)\}?")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_PROFILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_HEALTH: Final = re.compile(r"/[\x21-\x7e]*")
_RESERVED_ENV: Final = ("YARD_LAUNCH_ID",)
_CARD_PATTERN: Final = re.compile(r"[^\s/]+/[^\s/]+")
_KINDS: Final = ("cpu", "gpu")


def read_profile(raw: object, path: str, source: str, problems: list[Problem]) -> Profile | None:
    """The profile at `path`; None when its name or engine cannot be told.

    `source` is the entry's, needed by `llamacpp` and by a command that names `${SOURCE}`.
    """
    fields = Fields(raw, path, problems)
    if not fields.readable:
        return None
    name = fields.take_text("name", required=True)
    if fields.has("name") and name and _PROFILE_NAME.fullmatch(name) is None:
        fields.refuse("name", "expected 1 to 63 letters, digits, '.', '_' or '-'")
    engine: EngineName | None = fields.take_choice("engine", _ENGINES)
    memory_bytes = fields.take_quantity("memory", _some_bytes, SIZE, default=0, required=True)
    start_timeout_s = fields.take_quantity("start_timeout", _some_time, DURATION, default=600.0)
    before = len(problems)
    args = fields.take_texts("args")
    readable = len(problems) == before
    before = len(problems)
    command = fields.take_command("command")
    splittable = len(problems) == before
    health = fields.take_text("health", default="/health")
    if _HEALTH.fullmatch(health) is None:
        fields.refuse("health", f"expected a path such as /health, got {shown(health)}")
    key_env = fields.take_text("key_env") if fields.has("key_env") else None
    fields.take("key_env")
    env = _env(fields)
    _check_key_env(fields, key_env, env)
    card = _card(fields)
    cards = fields.take_int("cards", default=1, low=1, high=MOST_CARDS)
    exclusive = fields.take_flag("exclusive")
    weight = fields.take_int("weight", default=1, low=1)
    priority = fields.take_int("priority", default=100, low=-(2**31))
    parking = read_parking(fields, path, engine, problems)
    fields.close()
    match engine:
        case "llamacpp":
            _check_llamacpp(fields, args if readable else (), source)
        case "vllm":
            _check_vllm(fields, args if readable else (), source)
        case "command":
            if splittable:
                _check_command(fields, command, source)
        case None:
            return None
    return Profile(
        name=name,
        engine=engine,
        memory_bytes=memory_bytes,
        args=args,
        command=command,
        health=health,
        key_env=key_env,
        env=env,
        start_timeout_s=start_timeout_s,
        card=card,
        cards=cards,
        exclusive=exclusive,
        weight=weight,
        priority=priority,
        parking=parking,
    )


def _some_bytes(given: object) -> int | None:
    return read_bytes(given) or None


def _some_time(given: object) -> float | None:
    return read_seconds(given) or None


def _env(fields: Fields) -> dict[str, str | SecretRef]:
    given = fields.take("env")
    if not fields.has("env"):
        return {}
    if not isinstance(given, dict):
        fields.refuse("env", f"expected a mapping of names to texts, got {shown(given)}")
        return {}
    found: dict[str, str | SecretRef] = {}
    for name, value in cast("dict[Any, Any]", given).items():
        at = f"env.{name}"
        if not isinstance(name, str) or _ENV_NAME.fullmatch(name) is None:
            fields.refuse(at, "expected a variable name of letters, digits and '_'")
        elif name in _RESERVED_ENV:
            fields.refuse(at, "this variable is set by the launcher")
        elif isinstance(value, str):
            if "\x00" in value:
                fields.refuse(at, "expected a text without zero bytes")
            found[name] = value
        elif isinstance(value, dict):
            secret = _secret(cast("dict[Any, Any]", value))
            if secret is None:
                fields.refuse(at, "expected a text or {secret: NAME}")
            else:
                found[name] = secret
        else:
            hint = "; write it in quotes" if isinstance(value, bool | int | float) else ""
            fields.refuse(at, f"expected a text or {{secret: NAME}}, got {shown(value)}{hint}")
    return found


def _secret(given: dict[Any, Any]) -> SecretRef | None:
    name = given.get("secret")
    if set(given) != {"secret"} or not isinstance(name, str):
        return None
    return SecretRef(secret=name) if _SECRET_NAME.fullmatch(name) else None


def _check_key_env(fields: Fields, key_env: str | None, env: dict[str, str | SecretRef]) -> None:
    if key_env is None:
        return
    if _ENV_NAME.fullmatch(key_env) is None or key_env in _RESERVED_ENV:
        fields.refuse("key_env", "expected a variable name of letters, digits and '_'")
    elif key_env in env:
        fields.refuse("key_env", f"{key_env} is set in env too; the key goes there alone")


def _card(fields: Fields) -> tuple[str, ...]:
    """Kinds or `node/card` patterns; `*` and `?` stand for any characters within a part."""
    patterns = fields.take_texts("card", one_is_enough=True)
    if not fields.has("card"):
        return ("cpu",)
    if not patterns:
        fields.refuse("card", "expected cpu, gpu, or patterns of node/card such as local/gpu0")
    for pattern in patterns:
        if pattern not in _KINDS and _CARD_PATTERN.fullmatch(pattern) is None:
            fields.refuse(
                "card",
                "expected cpu, gpu, or patterns of node/card such as local/gpu0, "
                f"got {shown(pattern)}",
            )
    return patterns


def _check_llamacpp(fields: Fields, args: tuple[str, ...], source: str) -> None:
    for field in ("command", "health", "key_env"):
        if fields.has(field):
            fields.refuse(field, f"{field} belongs to engine command; llamacpp has its own")
    if not source:
        fields.refuse(
            "engine",
            "engine llamacpp needs the entry's `source`: a path of a GGUF file on the node, or mirror:KEY",
        )
    for problem in llamacpp_flags.read(args)[1]:
        fields.refuse(f"args[{problem.index}]", problem.sentence)


def _check_vllm(fields: Fields, args: tuple[str, ...], source: str) -> None:
    if fields.has("command"):
        fields.refuse(
            "command", "engine vllm makes its own command line; put vLLM flags into `args`"
        )
    if not source:
        fields.refuse(
            "engine", "engine vllm needs the entry's `source`: a path on the node, or a repository"
        )
    for sentence in vllm_flags.problems(args):
        fields.refuse("args", sentence)


def _check_command(fields: Fields, command: tuple[str, ...], source: str) -> None:
    if fields.has("args"):
        fields.refuse("args", "args belong to engine llamacpp; put them into `command`")
    if not fields.has("command"):
        fields.refuse("command", "engine command needs `command`: a list, or one text to be split")
        return
    if not command:
        fields.refuse("command", "expected at least the program to run")
        return
    if not command[0]:
        fields.refuse("command", "expected the program to run first, got an empty text")
    for word in command:
        if "\x00" in word:
            fields.refuse("command", "expected texts without zero bytes")
        for found in _PLACEHOLDER.finditer(word):
            if found[1] not in PLACEHOLDERS or not found[0].endswith("}"):
                known = " ".join(f"${{{p}}}" for p in PLACEHOLDERS)
                fields.refuse("command", f"{found[0]} is not known; known: {known}")
            elif found[1] == "SOURCE" and not source:
                fields.refuse("command", "${SOURCE} is used, but the entry has no `source`")
