"""Says how an adapter is called: by a client (`NAME` or `BASE:NAME`), in a pin, and in an engine.

One definition for agents and gateways. An engine-side name holds the version, so a changed adapter is never
answered by its predecessor, and an adapter's name never shadows its base. Pure.
"""

from collections.abc import Iterator
from typing import Final

VERSION_DIGITS: Final = 8
"""Hex digits of the version in an engine-side name."""


def pin_name(adapter: str, version: str) -> str:
    """What names one version of an adapter in beacons: `NAME@0123abcd`."""
    return f"{adapter}@{version[:VERSION_DIGITS]}"


def engine_name(adapter: str, version: str, again: int = 0) -> str:
    """The name an engine serves it under: the pin's, and `.1`, `.2` behind it when that name was taken there by
    something else."""
    name = pin_name(adapter, version)
    return f"{name}.{again}" if again else name


def of_engine_name(name: str) -> tuple[str, str] | None:
    """Adapter and beginning of the version an engine-side name stands for; None: no name of ours."""
    adapter, sign, rest = name.rpartition("@")
    digits, _, again = rest.partition(".")
    is_ours = (
        bool(adapter and sign)
        and len(digits) == VERSION_DIGITS
        and all(digit in "0123456789abcdef" for digit in digits)
        and (again.isdecimal() if "." in rest else True)
    )
    return (adapter, digits) if is_ours else None


def readings(name: str) -> Iterator[tuple[str, str]]:
    """Every (base, adapter) that `BASE:NAME` may mean: names may hold a colon themselves."""
    for at, sign in enumerate(name):
        if sign == ":" and 0 < at < len(name) - 1:
            yield name[:at], name[at + 1 :]
