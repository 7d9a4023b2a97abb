"""What an instance's hands refuse by themselves: a token that is none, and a name that a node might have."""

import asyncio
from typing import Any, cast

import pytest

from controlplane.domain.reports import FileFault, FileStored
from controlplane.domain.work import Fetch
from controlplane.domain.world import World
from controlplane.hands import CONTROL, Hands
from controlplane.headers import Headers
from controlplane.mirror.domain.sources import Source
from controlplane.mirroring import may_read
from controlplane.registry.client import Registry
from events.secrets import mirror_reader, mirror_token, node_secret
from schemas import codes
from tests.support.aio import run, until

SPOILT = "hf_abc def"


def hands_with(fetcher: object, token: str | None = None) -> Hands:
    return Hands(
        mirror="cp-1",
        registry=Registry(token=token),
        far=Headers(),
        store=cast(Any, None),
        fetcher=cast(Any, fetcher),
        others=dict,
        yard_secret="yard",
        smoke_timeout_s=1.0,
        on_progress=lambda _: None,
        fetches=2,
    )


def test_scn_c8_a_token_that_is_none_reaches_no_fetch() -> None:
    """A retry may begin at the mirror step: nothing asked the registry before it."""
    hands = hands_with(None, SPOILT)
    task = Fetch(key="a" * 64, repo="o/m", commit="c" * 40, path="m.gguf", bytes=9, sha256=None)
    found = run(hands.do(task))
    assert isinstance(found, FileFault)
    assert (found.key, found.mirror, found.code) == (task.key, "cp-1", codes.TOKEN_REFUSED)
    assert SPOILT not in found.sentence


@pytest.mark.parametrize("repo", ["/srv/polite", "https://h.test/polite"])
def test_a_token_that_is_none_does_not_hold_up_what_comes_from_elsewhere(repo: str) -> None:
    given: list[Source] = []

    class Fetching:
        async def fetch(self, task: Fetch, *, sources: tuple[Source, ...]) -> FileFault:
            given.extend(sources)
            return FileFault(key=task.key, mirror="cp-1", code="x", sentence="y")

    task = Fetch(key="a" * 64, repo=repo, commit="c" * 40, path="w", bytes=9, sha256=None)
    found = run(hands_with(Fetching(), SPOILT).do(task))
    assert isinstance(found, FileFault)
    assert found.code == "x"
    (source,) = given
    assert (source.origin, source.token) == ("folder" if repo[0] == "/" else "web", "")


def test_no_node_shares_the_name_of_the_control_planes() -> None:
    token = mirror_token(node_secret("yard", CONTROL), CONTROL)
    assert mirror_reader("yard", token) == CONTROL
    assert token.isascii()
    assert token.isprintable()
    # Nothing that starts a program can hand over a NUL, so no agent has this id.
    assert "\0" in CONTROL
    assert may_read(World(), CONTROL)


def test_no_more_files_are_fetched_at_once_than_the_settings_say() -> None:
    async def story() -> None:
        gate = asyncio.Event()
        at_once = 0
        most = 0

        class Slow:
            async def fetch(self, task: Fetch, *, sources: object) -> FileStored:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await gate.wait()
                at_once -= 1
                return FileStored(
                    key=task.key,
                    mirror="cp-1",
                    sha256="0" * 64,
                    bytes=1,
                    compared=False,
                    origin="registry",
                )

        hands = hands_with(Slow())

        def fetch(n: int, path: str, repo: str = "a/b") -> Fetch:
            return Fetch(key=f"{n}", repo=repo, commit="c", path=path, bytes=1, sha256=None)

        tasks = [asyncio.create_task(hands.do(fetch(n, "m.gguf"))) for n in range(50)]
        await until(lambda: at_once == 2, "two to begin")
        tasks += [
            asyncio.create_task(hands.do(fetch(n, "adapter_model.safetensors"))) for n in range(50)
        ]
        await until(lambda: at_once == 4, "two of adapters to begin beside them")
        tasks += [
            asyncio.create_task(hands.do(fetch(n, "adapter_model.safetensors", "/loras/a")))
            for n in range(50)
        ]
        await until(lambda: at_once == 6, "two from folders, whatever web server stands still")
        gate.set()
        await asyncio.gather(*tasks)
        assert most == 6

    run(story())
