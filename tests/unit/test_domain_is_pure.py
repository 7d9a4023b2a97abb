"""Domain modules are told the time and the ids; they ask for neither, whatever they are called."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path
    for package in ("controlplane", "nodeagent", "gateway")
    for path in (ROOT / package / "domain").glob("*.py")
)
FORBIDDEN_MODULES = {"time", "random", "uuid", "secrets", "os", "asyncio", "socket", "logging"}
FORBIDDEN_CALLS = {"now", "utcnow", "today", "urandom", "uuid4", "monotonic"}


def faults(source: str) -> list[str]:
    """What a module does that only a shell may do."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.partition(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)):
                found += [module] if module.partition(".")[0] in FORBIDDEN_MODULES else []
            case ast.Call(func=ast.Attribute(attr=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{name}()")
            case ast.AsyncFunctionDef(name=name):
                found.append(f"async {name}")
            case _:
                pass
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parts[-3]}.{p.stem}")
def test_req_x8_time_ids_and_chance_are_arguments(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", ["time"]),
        ("from os import path", ["os"]),
        ("from datetime import datetime\ndatetime.now()", ["now()"]),
        ("async def f(): ...", ["async f"]),
        ("def f(now): return now", []),
    ],
)
def test_the_check_itself_sees_what_is_forbidden(source: str, expected: list[str]) -> None:
    assert faults(source) == expected


def test_there_is_a_domain_to_check() -> None:
    assert len(MODULES) > 20
