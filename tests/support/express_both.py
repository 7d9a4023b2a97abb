"""Plays a story twice, with and without the way that needs no task, and compares all that can be seen of it from outside.

What must be the same is said here, once: answers, what engines were asked, lines of the log, numbers, marks, accounts. Ids
and times are looked at for their form. Which stories there are is tests/support/express_cases.py's.
"""

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.key import Key
from tests.support.aio import run, until
from tests.support.express_yard import (
    CHAT,
    GOOD,
    Engine,
    Scene,
    Speech,
    ask,
    body_of,
    fields_of,
    put_key,
    says,
    scene,
    status_of,
)
from tests.support.http_wire import Peer, connected

OF_ITS_OWN = ("time", "request", "trace", "duration_ms", "first_ms")
"""Fields of an access line that no two requests share."""


@dataclass
class Case:
    """Requests with this body, one after another on one connection; between them engines answer `answers`.

    `taken` and `handed` of them: those that go without a task, and that are handed over on the way. None: whoever lost
    an engine's connection asks for a new one.
    """

    body: bytes = field(default_factory=body_of)
    path: str = CHAT
    headers: tuple[str, ...] = ()
    version: str = "1.1"
    key: Key | None = None
    answers: tuple[Speech, ...] = ()
    always: Speech | None = None
    requests: int = 3
    taken: int = 3
    handed: int | None = 0
    statuses: tuple[int, ...] = (200, 200, 200)


@dataclass
class Seen:
    """What can be seen of the story from outside."""

    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    asked: list[list[tuple[str, dict[str, str], bytes]]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    marks: list[list[str]] = field(default_factory=list)
    used: Any = None
    ways: tuple[int, int, int] = (0, 0, 0)


def told_apart(head: bytes) -> dict[str, str]:
    """The headers of an answer but for ids and times, whose form is looked at instead."""
    found = fields_of(head)
    for name in ("x-request-id", "request-id"):
        if name in found:
            assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", found[name]), found[name]
            found[name] = "an id"
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", found.pop("date"))
    for name in found:
        if name.startswith("x-ratelimit-reset-"):
            assert re.fullmatch(r"(\d+m)?\d+s", found[name]), found[name]
            found[name] = "a time"
    return found


def asked_of(engine: Engine) -> list[tuple[str, dict[str, str], bytes]]:
    """What an engine was asked but for ids, whose form is looked at instead."""
    found: list[tuple[str, dict[str, str], bytes]] = []
    for head, body in engine.asked:
        fields = fields_of(head)
        span = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", fields.pop("traceparent"))
        assert span is not None
        assert fields.pop("x-request-id").endswith(f"-{span[2]}")
        assert fields.pop("host") == engine.url.removeprefix("http://")
        found.append((head.split(b"\r\n")[0].decode(), fields, body))
    return found


async def see(made: Scene, case: Case) -> Seen:
    """Plays the case."""
    seen = Seen()
    for engine in made.engines:
        engine.asked.clear()
    one_after_another(made.engines, [*case.answers], case.always or says(GOOD))
    made.yard.access.clear()
    made.ways.forget()
    if case.key is not None:
        await put_key(made, case.key)
    async with AsyncExitStack() as stack:
        peer: Peer | None = None
        for _ in range(case.requests):
            if peer is None:
                peer = await stack.enter_async_context(connected(made.gateway.port, limit=1 << 18))
            await peer.send(ask(case.body, case.path, *case.headers, version=case.version))
            head, body = await peer.message()
            # Anthropic's errors tell it inside.
            body = re.sub(rb'"request_id":"[0-9a-f]{16}-[0-9a-f]+"', b'"request_id":"an id"', body)
            seen.answers.append((status_of(head), told_apart(head), body))
            if b"connection: close" in head.lower():
                await peer.gone()
                peer = None
            # Whoever lost its engine had it looked at.
            await until(lambda: not made.gateway.gateway.ejected, "the engines to be trusted")
    await made.quiet()
    lines = await made.until_lines(case.requests)
    seen.ways = made.ways.all
    for line in lines:
        assert line["duration_ms"] >= line["first_ms"] >= -1
        assert re.fullmatch(r"[0-9a-f]{32}", line["trace"])
        timeline = made.gateway.timelines.find(line["request"])
        assert timeline is not None
        assert timeline.trace.trace == line["trace"]
        assert list(timeline.marks.values()) == sorted(timeline.marks.values())
        seen.marks.append([timeline.model, *timeline.marks])
        seen.lines.append({k: v for k, v in line.items() if k not in OF_ITS_OWN})
        seen.lines[-1]["first"] = line["first_ms"] >= 0
    assert len({line["request"] for line in lines}) == case.requests
    seen.asked = [asked_of(engine) for engine in made.engines]
    seen.numbers = made.numbers()
    if case.key is not None:
        ledger, now_s = made.gateway.limits.ledger, made.gateway.gateway.clock.now_s()
        reading = ledger.read(case.key, now_s)
        seen.used = (reading.requests, reading.tokens)
    return seen


def one_after_another(engines: list[Engine], speeches: list[Speech], always: Speech) -> None:
    """Whichever engine is asked next says the first of these, and what they always say behind them."""

    async def speech(peer: Peer) -> bool:
        return await (speeches.pop(0) if speeches else always)(peer)

    for engine in engines:
        engine.always = speech


async def play(
    data: Path, cases: dict[str, Case], express: bool, fields: dict[str, Any]
) -> tuple[dict[str, Seen], Any]:
    """What is seen of each, and the accounts of all, with or without the way that needs no task."""
    async with scene(data / str(express), express=express, **fields) as made:
        seen = {name: await see(made, case) for name, case in cases.items()}
        expected = sum(case.requests for case in cases.values()) + len(made.engines)
        await until(
            lambda: sum(row[0] for row in made.accounts().values()) >= expected, "the accounts"
        )
        return seen, made.accounts()


def check(tmp_path: Path, cases: dict[str, Case], **fields: Any) -> dict[str, Seen]:
    """Plays these both ways, and compares all that is seen."""

    async def story() -> dict[str, Seen]:
        (plain, accounts), (handled, same) = await asyncio.gather(
            play(tmp_path, cases, True, fields), play(tmp_path, cases, False, fields)
        )
        for name, case in cases.items():
            one, other = plain[name], handled[name]
            for what in ("answers", "asked", "lines", "numbers", "marks", "used"):
                assert getattr(one, what) == getattr(other, what), (name, what)
            taken, left, handed = one.ways
            assert (taken, left) == (case.taken, case.requests - case.taken), name
            assert handed == case.handed or (handed and case.handed is None), name
            assert other.ways == (0, case.requests, 0), name
            assert tuple(status for status, _, _ in one.answers) == case.statuses, name
        assert accounts == same
        return plain

    return run(story(), 60.0)
