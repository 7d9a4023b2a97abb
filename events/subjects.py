"""Builds and takes apart every subject of a yard; names become percent-encoded tokens and back."""

from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

EVT: Final = "evt"
CMD: Final = "cmd"
PREFIX: Final = "yard"

# Unreserved in a token besides letters and digits. '.', '*', '>', '%' and white space are encoded,
# and so is every non-ASCII character (as UTF-8), so one name has exactly one spelling.
_SAFE: Final = "-_"


class NotASubject(ValueError):
    """The text is not a subject this yard uses."""


def encode_token(name: str) -> str:
    """One subject token for any non-empty name, reversible: `qwen2.5-7b` -> `qwen2%2E5-7b`.

    Raises NotASubject for an empty name.
    """
    if not name:
        raise NotASubject("an empty name has no token")
    # quote() leaves '.' and '~' alone whatever `safe` says.
    return quote(name, safe=_SAFE).replace(".", "%2E").replace("~", "%7E")


def decode_token(token: str) -> str:
    """The name a token stands for. Raises NotASubject when it is not the spelling we would write."""
    name = unquote(token, errors="strict") if "%" in token else token
    if encode_token(name) != token:
        raise NotASubject(f"{token!r} is not how a name is spelled in a subject")
    return name


@lru_cache(maxsize=65536)
def event_subject(noun: str, *key: str, prefix: str = PREFIX) -> str:
    """`yard.evt.<noun>.<key…>`; the noun may hold a dot (`leader.current`)."""
    return ".".join((prefix, EVT, noun, *(encode_token(k) for k in key)))


def command_subject(actor: str, name: str, prefix: str = PREFIX) -> str:
    """`yard.cmd.<actor>.<noun>.<verb>` for a command name such as `model.add`."""
    return f"{prefix}.{CMD}.{encode_token(actor)}.{name}"


def beacon_subject(kind: str, name: str, prefix: str = PREFIX) -> str:
    return f"{prefix}.beacon.{kind}.{encode_token(name)}"


def usage_subject(gateway: str, prefix: str = PREFIX) -> str:
    """`yard.use.gateway.<gateway>`: what requests of that gateway used."""
    return f"{prefix}.use.gateway.{encode_token(gateway)}"


def rpc_subject(what: str, node: str, prefix: str = PREFIX) -> str:
    return f"{prefix}.rpc.{what}.{encode_token(node)}"


def progress_subject(writer: str, kind: str, name: str, prefix: str = PREFIX) -> str:
    """`yard.prog.<writer>.<kind>.<name>`; the writer is the user or node whose right it is."""
    return f"{prefix}.prog.{encode_token(writer)}.{encode_token(kind)}.{encode_token(name)}"
