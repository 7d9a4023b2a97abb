"""The driver of vLLM keeps the contract of `AdapterDriver` with a fake vLLM in every dialect, and when that fails."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nodeagent.drivers import lora
from nodeagent.drivers.driver import AdapterDone, AdapterFault
from nodeagent.drivers.vllm import PREFIXES, RUNTIME, VllmDriver
from schemas import codes
from tests.support.adapter_contract import CHECKS, Rig
from tests.support.aio import run
from tests.support.fake_vllm import fake_vllm, tell

KEY = "ek"
DIALECTS = ("python", "old", "rust")


@contextmanager
def rig_of(
    dialect: str, folder: Path, variables: Mapping[str, str] | None = None, **script: Any
) -> Iterator[Rig]:
    """A fake vLLM as this node would start it, with other `variables` where they are given."""
    root = folder / "sets"
    root.mkdir()
    environment = {PREFIXES: str(root), **(variables or {})}
    with fake_vllm(
        adapters=True, key=KEY, dialect=dialect, environment=environment, **script
    ) as endpoint:
        yield Rig(
            driver=VllmDriver("", {}, adapter_root=root),
            endpoint=endpoint,
            key=KEY,
            model="smollm2",
            root=root,
            tells_why=dialect != "rust",
            shadows=dialect == "old",
        )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_vllm_loads_adapters(
    dialect: str, check: Callable[[Rig], Awaitable[None]], tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        await check(rig)

    with rig_of(dialect, tmp_path, tokens=2000, pace_s=0.005) as rig:
        run(story(rig))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scn_d2_already_loaded_is_told_with_the_folder_it_was_loaded_from(
    dialect: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        theirs, ours = rig.adapter("theirs"), rig.adapter("ours")
        tell(rig.endpoint, "register", name="a@00000001", path=str(theirs))
        assert await rig.load("a@00000001", ours) == AdapterDone(already=True)
        assert await rig.listed() == {"a@00000001": str(theirs)}

    with rig_of(dialect, tmp_path) as rig:
        run(story(rig))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("off", ["environment", "fault"])
def test_req_bugb7_an_engine_without_the_routes_says_so_to_every_question(
    dialect: str, off: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        if off == "fault":
            tell(rig.endpoint, "fault", fault="lora-route-off")
        assert await rig.driver.loads_adapters(rig.endpoint, KEY) is False
        for found in (
            await rig.load("a@00000001", rig.adapter("a")),
            await rig.unload("a@00000001"),
        ):
            assert isinstance(found, AdapterFault)
            assert (found.whose, found.code, found.known) == ("replica", codes.ROUTE_OFF, True)

    closed = {RUNTIME: "0"} if off == "environment" else {}
    with rig_of(dialect, tmp_path, closed) as rig:
        run(story(rig))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_req_b59_a_load_that_hangs_is_the_replica_s_and_the_list_answers_meanwhile(
    dialect: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        tell(rig.endpoint, "fault", fault="lora-hangs", adapter="slow*")
        found = await rig.load("slow@00000001", rig.adapter("slow"), timeout_s=0.3)
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_TIMEOUT, True)
        assert await rig.listed() == {}
        assert await rig.load("quick@00000001", rig.adapter("quick")) == AdapterDone()

    with rig_of(dialect, tmp_path) as rig:
        run(story(rig))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_that_dies_of_a_load_is_the_replica_s_until_a_second_one_does(
    dialect: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        tell(rig.endpoint, "fault", fault="lora-dies")
        found = await rig.load("a@00000001", rig.adapter("a"))
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, False)
        gone = await rig.driver.list_adapters(rig.endpoint, KEY)
        assert isinstance(gone, AdapterFault)
        assert (gone.whose, gone.code, gone.known) == ("replica", codes.LOAD_FAILED, True)

    with rig_of(dialect, tmp_path) as rig:
        run(story(rig))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_that_fails_is_the_replica_s_fault_and_is_not_known(
    dialect: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        tell(rig.endpoint, "fault", fault="lora-500", times=1)
        found = await rig.load("a@00000001", rig.adapter("a"))
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, False)
        assert await rig.load("a@00000001", rig.adapter("a")) == AdapterDone()
        tell(rig.endpoint, "fault", fault="unload-500", times=1)
        assert isinstance(await rig.unload("a@00000001"), AdapterFault)
        assert list(await rig.listed()) == ["a@00000001"]

    with rig_of(dialect, tmp_path) as rig:
        run(story(rig))


@pytest.mark.parametrize("fault", ["list-hangs", "list-500", "list-garbage"])
def test_req_b26_a_list_that_cannot_be_read_is_a_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "LIST_S", 0.3)

    async def story(rig: Rig) -> None:
        tell(rig.endpoint, "fault", fault=fault)
        found = await rig.driver.list_adapters(rig.endpoint, KEY)
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code) == ("replica", codes.LOAD_FAILED)

    with rig_of("python", tmp_path) as rig:
        run(story(rig))


def test_rust_takes_adapters_from_below_the_node_s_own_folder_alone(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        elsewhere = rig.root.parent / "elsewhere"
        found = await rig.load("a@00000001", rig.adapter(str(elsewhere)))
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.known) == ("replica", True)
        assert str(rig.root) not in found.text

    with rig_of("rust", tmp_path) as rig:
        run(story(rig))
    with fake_vllm(adapters=True, dialect="rust") as endpoint:
        found = run(
            VllmDriver("", {}).load_adapter(
                endpoint, "", name="a@00000001", path=str(tmp_path), timeout_s=5
            )
        )
        assert isinstance(found, AdapterFault)
        assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, True)


def test_an_engine_that_was_not_started_for_adapters_has_none(tmp_path: Path) -> None:
    async def story() -> None:
        with fake_vllm(key=KEY) as endpoint:
            driver = VllmDriver("", {})
            assert await driver.list_adapters(endpoint, KEY) == ()
            assert await driver.loads_adapters(endpoint, KEY) is False
            assert await driver.running_adapters(endpoint, KEY) is None

    run(story())
