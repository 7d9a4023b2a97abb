"""yardctl adapter against a whole yard with two fake vLLM engines, as a person types it, with its exit codes."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from schemas.adapternames import engine_name
from tests.support.aio import run, until
from tests.support.fake_vllm import tell as tell_engine
from tests.support.lora import write_adapter
from tests.system.adapters import BASE, base_entry, replicas_ready, settings_for
from tests.system.yard import SystemYard, chat, client, rows, system_yard

Story = Callable[[SystemYard], Awaitable[None]]

pytestmark = pytest.mark.timeout(120)
"""Two engines and dozens of calls; beside other tests that takes its time."""


def tell(folder: Path, story: Story, *args: str, replicas: int = 2, limit: int = 2) -> None:
    async def whole() -> None:
        settings = settings_for(folder, cards=2)
        async with system_yard(folder / "data", settings=settings) as yard:
            await yard.add(base_entry(folder, *args, replicas=replicas, limit=limit, aliases=["t"]))
            await replicas_ready(yard, replicas)
            await story(yard)

    run(whole(), timeout_s=110)


async def add(yard: SystemYard, source: Path, *more: str, expect: int = 0) -> tuple[str, str]:
    """`adapter add` under the folder's name."""
    arguments = ("adapter", "add", source.name, "--base", BASE, "--source", str(source), *more)
    return await yard.told(*arguments, expect=expect)


async def ask(yard: SystemYard, model: str) -> str:
    """What a chat with it answers; the fake begins with who answered."""
    async with client(yard.gateway()) as http:
        answer = await http.post("/v1/chat/completions", json=chat(model))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["message"]["content"]


def test_req_b1_an_adapter_is_added_asked_for_shown_and_removed(tmp_path: Path) -> None:
    sql = write_adapter(tmp_path / "loras" / "sql", "sql", rank=16)

    async def story(yard: SystemYard) -> None:
        assert "yardctl adapter add" in await yard.ctl("adapter", "list")
        out, _ = await add(yard, sql, "--alias", "tables")
        assert f"ask for sql or tables or {BASE}:sql" in out.splitlines()[-1]
        assert "sql is loaded nowhere" in await yard.ctl("adapter", "holders", "sql")
        for name in ("sql", "tables", f"{BASE}:sql", "t:sql"):
            assert (await ask(yard, name)).startswith("[sql]")
        assert (await ask(yard, BASE)).startswith("[base]")
        held = await rows(yard, "adapter", "holders", "tables")
        assert {(h["adapter"], h["node"], h["state"], h["how"]) for h in held} == {
            ("sql", "local", "loaded", "loaded")
        }
        assert all(h["uses"] == 0 and h["idle_s"] is not None for h in held)
        replica = held[0]["replica"]

        async def shown() -> bool:
            return replica in await yard.ctl("adapter", "show", f"{BASE}:sql")

        await until(shown, "the replica that has it")
        (listed,) = await rows(yard, "adapter", "list", "--base", BASE)
        assert (listed["phase"], listed["rank"]) == ("ready", 16)
        assert "sql" in await yard.ctl("events", "--model", BASE, "--type", "slots.*")
        assert "sql removed" in await yard.ctl("adapter", "rm", "sql")
        await yard.event("slots.evicted", lambda e: e.key[1] == replica)
        await yard.ctl("adapter", "show", "sql", expect=1)
        await yard.ctl("adapter", "rm", "sql", expect=2)
        await yard.ctl("adapter", "holders", "sql", expect=1)

    tell(tmp_path, story)


def test_scn_d9_what_cannot_be_served_is_refused_with_its_reason(tmp_path: Path) -> None:
    loras = tmp_path / "loras"
    wrong = {
        "rank": write_adapter(loras / "rank", rank=64),
        "base": write_adapter(loras / "base", base="acme/other-model"),
        "dora": write_adapter(loras / "dora", use_dora=True),
        "saved": write_adapter(loras / "saved", modules_to_save=["lm_head"]),
    }
    empty = loras / "empty"
    empty.mkdir()
    says = {
        "rank": "its rank 64 is above --max-lora-rank 16",
        "base": "'acme/other-model'",
        "dora": "[unsupported_adapter]",
        "saved": "modules_to_save",
        "empty": "[not_an_adapter]",
    }

    async def story(yard: SystemYard) -> None:
        for name, folder in {**wrong, "empty": empty}.items():
            _, err = await add(yard, folder, expect=1)
            assert says[name] in err, err
        states = {row["name"]: row["phase"] for row in await rows(yard, "adapter", "list")}
        assert set(states.values()) == {"refused"}
        assert "rank_too_high" in await yard.ctl("adapter", "list")
        # Added again as it should have been, under the same name.
        write_adapter(wrong["rank"], "rank", rank=8)
        await add(yard, wrong["rank"])
        await add(yard, wrong["base"], "--trust-base", "--no-wait")
        await yard.event("adapter.ready", lambda e: e.key == ("base",))
        await add(yard, wrong["rank"], expect=2)
        assert (await ask(yard, "rank")).startswith("[rank]")
        # One namespace: neither a model's name nor an alias is free.
        for taken in (BASE, "t", f"{BASE}:rank"):
            _, err = await yard.told(
                "adapter", "add", taken, "--base", BASE, "--source", str(wrong["rank"]), expect=2
            )
            assert "[exists]" in err or "[invalid]" in err, err
        _, err = await yard.told("model", "rm", BASE, expect=2)
        assert "[in_use]" in err

    tell(tmp_path, story, "--max-lora-rank", "16")


def test_scn_d8_a_person_loads_pins_and_unloads_by_hand(tmp_path: Path) -> None:
    names = ("one", "two", "three")
    folders = [write_adapter(tmp_path / "loras" / n, n) for n in names]

    async def story(yard: SystemYard) -> None:
        for folder in folders:
            await add(yard, folder, *(("--pin",) if folder.name == "one" else ()))
        out = await yard.ctl("adapter", "load", "one")
        assert out.count("one: loaded in r-") == 2
        held = await rows(yard, "adapter", "holders", "one")
        assert [h["how"] for h in held] == ["person", "person"]
        assert "by hand" in await yard.ctl("adapter", "holders")
        replica = held[0]["replica"]
        await yard.ctl("adapter", "load", "two", "--replica", replica)
        await yard.ctl("adapter", "load", "three", "--replica", replica)
        # Two places: the pinned one stays, the other made way.
        there = {
            h["adapter"] for h in await rows(yard, "adapter", "holders") if h["replica"] == replica
        }
        assert there == {"one", "three"}
        out = await yard.ctl("adapter", "unload", "three", "--replica", replica)
        assert out.startswith(f"three: unloaded in {replica} on local")
        assert await rows(yard, "adapter", "holders", "three") == []
        assert "one is pinned no more" in await yard.ctl("adapter", "unpin", "one")
        assert (await yard.ctl("adapter", "unload", "one")).count("one: unloaded in r-") == 2
        assert "one is loaded nowhere" in await yard.ctl("adapter", "unload", "one")
        await yard.ctl("adapter", "load", "one", "--replica", "r-nowhere", expect=1)
        await yard.ctl("adapter", "load", "nobody", expect=1)

    tell(tmp_path, story)


def test_req_b4_what_is_loaded_is_known_from_ones_own_loads_and_from_the_engines_list(
    tmp_path: Path,
) -> None:
    """An agent is killed; its successor knows what was loaded, and finds what the engine got meanwhile."""
    folders = [write_adapter(tmp_path / "loras" / n, n) for n in ("one", "two")]

    async def story(yard: SystemYard) -> None:
        for folder in folders:
            await add(yard, folder)
        await yard.ctl("adapter", "load", "one")
        (replica,) = await rows(yard, "replica", "list")
        two = next(row for row in await rows(yard, "adapter", "list") if row["name"] == "two")
        path = yard.data / "files" / "sets" / two["files"][0]["key"]
        await until(path.is_dir, "the files of two on the node")
        at = yard.position
        yard.kill("nodeagent")
        name = engine_name("two", two["version"])
        tell_engine(replica["endpoint"], "register", name=name, path=str(path))
        await yard.event("slots.drifted", after=at)
        held = {row["adapter"]: row["how"] for row in await rows(yard, "adapter", "holders")}
        assert held == {"one": "person", "two": "found"}
        assert "found there" in await yard.ctl("adapter", "holders", "two")

    tell(tmp_path, story, replicas=1)
