"""Says what bytes are and whether they are the published ones: magic, size, sha256, and the sentences for "no"."""

import re
from typing import Final

from controlplane.domain.adaptersources import place_of, told_by
from controlplane.mirror.domain import safetensors
from schemas import codes
from schemas.settings import GIB, KIB, MIB

MAGIC: Final = b"GGUF"
SNIFFED: Final = 64
"""Bytes looked at to say what something is that should have been a model."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN: Final = 12


def is_gguf(path: str) -> bool:
    return path.lower().endswith(".gguf")


def is_safetensors(path: str) -> bool:
    return path.lower().endswith(".safetensors")


def telling_bytes(path: str) -> int:
    """How many first bytes tell whether a file is what its name says."""
    if is_safetensors(path):
        return safetensors.BEGINNING
    return len(MAGIC)


def begins_right(path: str, first: bytes, total: int) -> bool:
    """Whether a file of `total` bytes may begin like that, as far as its name says what it is."""
    if is_safetensors(path):
        return safetensors.may_begin(first, total)
    return not is_gguf(path) or MAGIC.startswith(first[: len(MAGIC)])


def wrong_kind(path: str) -> str:
    """The code for bytes that are not what the file's name says."""
    return codes.NOT_GGUF if is_gguf(path) else codes.NOT_AN_ADAPTER


def unreachable(repo: str) -> str:
    """The code for a place that does not give the file."""
    is_registry = place_of(repo) == "registry"
    return codes.REGISTRY_UNREACHABLE if is_registry else codes.SOURCE_UNREACHABLE


def what_it_is(first: bytes, content_type: str = "") -> str:
    """What the first bytes of an answer look like, for the sentence that refuses them."""
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or (
        text.startswith(b"<") and "html" in content_type.lower()
    ):
        return "an HTML page"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    if text.startswith(b"<?xml"):
        return "an XML document"
    if text.startswith((b"{", b"[")):
        return "JSON"
    if not first:
        return "empty"
    if not any(first):
        return "zeros"
    return f"something that begins with {first[:4].hex(' ')}"


def not_that(path: str, first: bytes, content_type: str = "") -> str:
    """Why a file with these first bytes is not kept."""
    if is_safetensors(path) and safetensors.has_header(first):
        count = safetensors.header_bytes(first)
        return f"{path} is cut short: it ends within its header, which has {count} bytes"
    kind = "a safetensors" if is_safetensors(path) else "a GGUF"
    return f"{path} is not {kind} file: what came is {what_it_is(first, content_type)}"


def plain_sha256(published: str | None) -> str | None:
    """The published sha256 as it is compared: trimmed, lower case. None or blank: none was published."""
    return (published or "").strip().lower() or None


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def malformed(path: str, published: str) -> str:
    """A published sha256 that no file can have; told before the download, and never sliced blindly."""
    return (
        f"{path} cannot be checked: the registry published {published[:80]!r} as its sha256, "
        "which is not 64 hexadecimal digits"
    )


def mismatch(path: str, actual: str, expected: str, who: str = "the registry published") -> str:
    return (
        f"{path}: the sha256 of its bytes begins with {actual[:_SHOWN]}, {who} {expected[:_SHOWN]}"
    )


def wrong_size(path: str, actual: int, published: int, repo: str = "") -> str:
    return f"{path} has {actual} bytes, {told_by(repo)} {published}"


def in_units(count: int) -> str:
    """Bytes for people, in the largest unit that keeps the number above one."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def no_room(path: str, *, missing: int, free: int, kept: int, folder: str) -> str:
    """Why a file is not begun: what it still needs, what may be used, what is never used, all of one disk."""
    return (
        f"no room for {path}: {in_units(missing)} more are needed and {in_units(max(0, free))} may be "
        f"used in {folder} ({in_units(kept)} are kept free)"
    )


def filled_up(path: str, *, stored: int, total: int, folder: str) -> str:
    return (
        f"the disk of {folder} filled up at {in_units(stored)} of {in_units(total)} of {path}; "
        "what is there is kept for the next try"
    )
