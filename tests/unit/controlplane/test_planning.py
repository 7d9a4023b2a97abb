"""Plans end in time whatever a registry does, and never hold more than a few headers in memory at once."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from controlplane import headers
from controlplane.domain.ggufheader import HEADER_BYTES_MAX, More, NotGguf, Prefix
from controlplane.domain.repo import Repo, RepoFile
from controlplane.identifiers import new_ids
from controlplane.planning import NotAnswered, Planner, ServeAsked
from controlplane.registry.rangedfile import KEPT_BYTES
from schemas.api import PlanView
from schemas.settings import ControlplaneSettings
from tests.support.aio import run, until

REPO = Repo(
    id="a/b",
    commit="c" * 40,
    files=(RepoFile(path="b-Q4_K_M.gguf", bytes=9, sha256=None),),
    gated=None,
    private=False,
    suggested_name="b",
)
ASKED = ServeAsked(repo="a/b")


class Registry:
    """Answers when `gate` is open; the file is no GGUF file."""

    def __init__(self, *, at: str) -> None:
        self.gate = asyncio.Event()
        self.at = at
        self.reading = 0
        self.most = 0

    async def repo(self, repo_id: str, revision: str | None) -> Repo:
        assert (repo_id, revision) == ("a/b", None)
        if self.at == "repo":
            await self.gate.wait()
        return REPO

    def open(self, *_: Any) -> "Registry":
        return self

    async def prefix(self, at_least: int) -> Prefix:
        del at_least
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.gate.wait()
        finally:
            self.reading -= 1
        return b"<html> and no GGUF file whatsoever"


class Store:
    def has(self, key: str) -> bool:
        del key
        return False


def planner(registry: Registry, *, answer_s: float) -> Planner:
    return Planner(
        registry=cast(Any, registry),
        store=cast(Any, Store()),
        far=headers.Headers(),
        world=lambda: cast(Any, None),
        live=lambda: cast(Any, None),
        ids=new_ids(),
        settings=ControlplaneSettings(),
        now=lambda: datetime.now(UTC),
        answer_s=answer_s,
    )


@pytest.mark.parametrize("at", ["repo", "header"])
def test_a_plan_ends_in_time_and_says_what_was_slow(at: str) -> None:
    async def story() -> None:
        registry = Registry(at=at)
        with pytest.raises(NotAnswered) as refused:
            await planner(registry, answer_s=0.05).plan(ASKED)
        assert refused.value.code == "registry_unreachable"
        assert "a/b within 0.05 s" in str(refused.value)
        assert registry.reading == 0

    run(story())


def test_a_repository_is_shown_in_time_or_not_at_all() -> None:
    async def story() -> None:
        asking = planner(Registry(at="repo"), answer_s=0.05)
        with pytest.raises(NotAnswered):
            await asking.registry("a/b", quant=None, file=None, revision=None)

    run(story())


def test_only_a_few_headers_are_read_at_once() -> None:
    async def story() -> None:
        registry = Registry(at="header")
        asking = planner(registry, answer_s=10)
        plans = [asyncio.create_task(asking.plan(ASKED)) for _ in range(headers.AT_ONCE + 3)]
        await until(lambda: registry.reading == headers.AT_ONCE, "the first headers")
        registry.gate.set()
        found: list[PlanView] = await asyncio.gather(*plans)
        assert [plan.problems[0].code for plan in found] == ["not_gguf"] * len(plans)
        assert registry.most == headers.AT_ONCE

    run(story())


def test_a_header_that_drips_gives_its_turn_to_the_next() -> None:
    async def story() -> None:
        reading = headers.Headers(at_once=1, whole_s=0.05)

        async def never(at_least: int) -> Prefix:
            del at_least
            await asyncio.Event().wait()
            raise AssertionError

        async def page(at_least: int) -> Prefix:
            del at_least
            return b"<html> and no GGUF file whatsoever"

        slow = asyncio.create_task(reading.shape(never))
        await asyncio.sleep(0)
        assert isinstance(await reading.shape(page), NotGguf)
        with pytest.raises(headers.TooSlow, match=r"did not come whole within 0\.05 s"):
            await slow

    run(story())


@pytest.mark.parametrize("steps", [1, 3, 40_000_000, 100 * 1024**2])
def test_no_header_is_asked_for_beyond_what_is_kept_of_a_file(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that wants a little more each time meets its own bound, not the file's."""
    asked: list[int] = []

    def parse(prefix: Prefix) -> More | NotGguf:
        if len(prefix) >= HEADER_BYTES_MAX:
            return NotGguf(sentence="it is too long")
        return More(at_least_bytes=min(len(prefix) + steps, HEADER_BYTES_MAX))

    def read() -> Callable[[int], Awaitable[Prefix]]:
        async def prefix(at_least: int) -> Prefix:
            asked.append(at_least)
            assert at_least <= KEPT_BYTES
            return cast(Prefix, range(at_least))  # of that length, and no memory

        return prefix

    monkeypatch.setattr(headers, "parse", parse)
    assert run(headers.read_shape(read())) == NotGguf(sentence="it is too long")
    assert asked[-1] == HEADER_BYTES_MAX
    assert len(asked) < 20
