"""What every engine that loads adapters must do through its driver, as checks on one rig: an engine and its driver.

The same checks run on a fake engine in each of its dialects. The adapters are tiny and fit no real model; whoever
runs them on a real engine gives the rig a base of that shape.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from nodeagent.drivers.driver import AdapterDone, AdapterDriver, AdapterFault, ListedAdapter
from schemas import codes
from tests.support.aio import until
from tests.support.lora import write_adapter

LOAD_S = 60.0


def real(path: str | Path) -> str:
    """Where a path leads."""
    return os.path.realpath(path)


@dataclass(frozen=True)
class Rig:
    """A running engine that takes adapters of rank 16 from below `root`.

    `tells_why`: whether a refused load says what is wrong with the adapter. `shadows`: whether it takes an adapter
    under its base model's name.
    """

    driver: AdapterDriver
    endpoint: str
    key: str
    model: str
    root: Path
    tells_why: bool
    shadows: bool

    async def load(
        self, name: str, path: Path, timeout_s: float = LOAD_S
    ) -> AdapterDone | AdapterFault:
        return await self.driver.load_adapter(
            self.endpoint, self.key, name=name, path=str(path), timeout_s=timeout_s
        )

    async def unload(self, name: str) -> AdapterDone | AdapterFault:
        return await self.driver.unload_adapter(
            self.endpoint, self.key, name=name, timeout_s=LOAD_S
        )

    async def listed(self) -> dict[str, str]:
        """Root by name, links resolved: some engines list the path they resolved."""
        found = await self.driver.list_adapters(self.endpoint, self.key)
        assert isinstance(found, tuple), found
        names: list[ListedAdapter] = list(found)
        assert len({one.name for one in names}) == len(names)
        return {one.name: real(one.root) for one in names}

    def adapter(self, folder: str, **config: object) -> Path:
        """The folder of a new adapter."""
        return write_adapter(self.root / folder, **config)  # pyright: ignore[reportArgumentType]

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.AsyncClient(base_url=self.endpoint, headers=headers, timeout=LOAD_S)

    @contextlib.asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[None]:
        """A request to `name` that is answered for as long as this lasts."""
        body = {"model": name, "prompt": "x", "stream": True, "max_tokens": 2000}
        async with (
            self.client() as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            await anext(lines)
            yield


async def its_routes_are_there(rig: Rig) -> None:
    before = await rig.listed()
    assert await rig.driver.loads_adapters(rig.endpoint, rig.key) is True
    assert await rig.listed() == before


async def what_is_loaded_is_listed_with_its_folder_and_what_is_unloaded_is_not(rig: Rig) -> None:
    one, two = rig.adapter("one"), rig.adapter("two", rank=16)
    assert await rig.load("one@00000001", one) == AdapterDone()
    assert await rig.load("two@00000002", two) == AdapterDone()
    assert await rig.listed() == {
        "one@00000001": real(one),
        "two@00000002": real(two),
    }
    assert await rig.unload("one@00000001") == AdapterDone()
    assert list(await rig.listed()) == ["two@00000002"]
    assert await rig.unload("two@00000002") == AdapterDone()
    assert await rig.listed() == {}


async def names_hold_whatever_signs_adapters_are_called_by(rig: Rig) -> None:
    folder = rig.adapter("signs")
    name = "org/büro: a, \"b\" 'c'@00000001"
    assert await rig.load(name, folder) == AdapterDone()
    assert list(await rig.listed()) == [name]
    async with rig.client() as client:
        asked = {"model": name, "prompt": "x", "max_tokens": 1}
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 200
    assert await rig.unload(name) == AdapterDone()


async def a_second_load_of_a_name_is_done_already_and_the_list_tells_of_what(rig: Rig) -> None:
    one, other = rig.adapter("here"), rig.adapter("there")
    assert await rig.load("a@00000001", one) == AdapterDone()
    assert await rig.load("a@00000001", one) == AdapterDone(already=True)
    # What somebody else put under that name stays there: only its root says so.
    assert await rig.load("a@00000001", other) == AdapterDone(already=True)
    assert await rig.listed() == {"a@00000001": real(one)}


async def an_unload_of_what_is_not_there_is_done_already(rig: Rig) -> None:
    assert await rig.unload("nobody@00000001") == AdapterDone(already=True)


async def loads_of_one_name_at_once_end_in_one_adapter(rig: Rig) -> None:
    folder = rig.adapter("at-once")
    answers = await asyncio.gather(*(rig.load("a@00000001", folder) for _ in range(8)))
    assert all(isinstance(answer, AdapterDone) for answer in answers)
    assert not all(answer.already for answer in answers if isinstance(answer, AdapterDone))
    assert list(await rig.listed()) == ["a@00000001"]


async def a_refused_adapter_is_known_by_its_words_and_never_by_the_status(rig: Rig) -> None:
    refused = {
        codes.RANK_TOO_HIGH: (
            rig.adapter("rank", rank=64),
            rig.adapter("pattern", rank_pattern={"q_proj": 64}),
        ),
        codes.UNSUPPORTED_ADAPTER: (
            rig.adapter("saves", modules_to_save=["lm_head"]),
            rig.adapter("dora", use_dora=True),
            rig.adapter("modules", target_modules=("q_proj", "conv")),
        ),
    }
    for code, folders in refused.items():
        for folder in folders:
            found = await rig.load(f"{folder.name}@00000001", folder)
            assert isinstance(found, AdapterFault), folder
            if rig.tells_why:
                assert (found.whose, found.code, found.known) == ("adapter", code, True), found
            else:
                assert (found.whose, found.known) == ("replica", False), found
            assert str(rig.root) not in found.text
    assert await rig.listed() == {}


async def an_empty_list_of_whole_modules_is_none(rig: Rig) -> None:
    """Its words say `being None`; what it looks at is whether there are any."""
    assert await rig.load("a@00000001", rig.adapter("none", modules_to_save=[])) == AdapterDone()
    assert list(await rig.listed()) == ["a@00000001"]


async def both_numbers_of_a_rank_are_in_its_words(rig: Rig) -> None:
    found = await rig.load("high@00000001", rig.adapter("high", rank=64))
    assert isinstance(found, AdapterFault)
    if rig.tells_why:
        assert "64" in found.text
        assert "16" in found.text


async def a_folder_without_an_adapter_is_the_replicas_fault(rig: Rig) -> None:
    empty = rig.root / "empty"
    empty.mkdir()
    gone = rig.adapter("gone")
    shutil.rmtree(gone)
    for folder in (empty, gone):
        found = await rig.load("a@00000001", folder)
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code) == ("replica", codes.FILES_MISSING), found
        assert str(rig.root) not in found.text
    assert await rig.listed() == {}


async def two_replicas_with_other_folders_say_the_same_of_one_adapter(rig: Rig) -> None:
    texts: set[str] = set()
    for node in ("node-1", "node-2"):
        found = await rig.load("a@00000001", rig.adapter(f"{node}/sets/key", use_dora=True))
        assert isinstance(found, AdapterFault)
        texts.add(found.text)
    assert len(texts) == 1, texts


async def an_adapter_never_takes_the_bases_name(rig: Rig) -> None:
    found = await rig.load(rig.model, rig.adapter("shadow"))
    if rig.shadows:
        assert found == AdapterDone()
    else:
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code) == ("adapter", codes.LOAD_REFUSED)


async def a_wrong_key_is_the_replicas_fault_and_says_nothing_of_routes(rig: Rig) -> None:
    folder = rig.adapter("keyed")
    found = await rig.driver.load_adapter(
        rig.endpoint, "wrong", name="a@00000001", path=str(folder), timeout_s=LOAD_S
    )
    assert isinstance(found, AdapterFault)
    assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, True)
    assert isinstance(await rig.driver.list_adapters(rig.endpoint, "wrong"), AdapterFault)
    assert await rig.driver.loads_adapters(rig.endpoint, "wrong") is None
    assert await rig.listed() == {}


async def what_runs_is_told_while_it_runs(rig: Rig) -> None:
    for name in ("busy@00000001", "idle@00000002"):
        assert await rig.load(name, rig.adapter(name[:4])) == AdapterDone()

    async def busy() -> frozenset[str] | None:
        return await rig.driver.running_adapters(rig.endpoint, rig.key)

    assert await busy() == frozenset()
    async with rig.running("busy@00000001"):

        async def told() -> bool:
            return await busy() == {"busy@00000001"}

        await until(told, "the running adapter in its metrics")

    async def idle() -> bool:
        return await busy() == frozenset()

    await until(idle, "nothing running in its metrics")


CHECKS: tuple[Callable[[Rig], Awaitable[None]], ...] = (
    its_routes_are_there,
    what_is_loaded_is_listed_with_its_folder_and_what_is_unloaded_is_not,
    names_hold_whatever_signs_adapters_are_called_by,
    a_second_load_of_a_name_is_done_already_and_the_list_tells_of_what,
    an_unload_of_what_is_not_there_is_done_already,
    loads_of_one_name_at_once_end_in_one_adapter,
    a_refused_adapter_is_known_by_its_words_and_never_by_the_status,
    an_empty_list_of_whole_modules_is_none,
    both_numbers_of_a_rank_are_in_its_words,
    a_folder_without_an_adapter_is_the_replicas_fault,
    two_replicas_with_other_folders_say_the_same_of_one_adapter,
    an_adapter_never_takes_the_bases_name,
    a_wrong_key_is_the_replicas_fault_and_says_nothing_of_routes,
    what_runs_is_told_while_it_runs,
)
