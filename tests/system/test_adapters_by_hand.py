"""Adapters as a person meets them: added, asked for by every name, watched, unloaded, removed; and engines that misbehave."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.aio import run
from tests.support.fake_vllm import tell as tell_engine
from tests.support.lora import write_adapter
from tests.system.adapters import (
    BASE,
    Asked,
    Diary,
    add_adapters,
    ask,
    base_entry,
    replicas_ready,
    settings_for,
)
from tests.system.yard import SystemYard, client, rows, system_yard


def endpoints(yard: SystemYard) -> dict[str, str]:
    """Where each replica of the base answers, as the log told it."""
    return {e.key[1]: e.state.endpoint for e in yard.of("replica.ready") if e.state.model == BASE}


def told_by(answer: Asked) -> tuple[int | None, str, str, str]:
    return answer.status, answer.said, answer.model, answer.how


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dialect", ["python", "old", "rust"])
def test_req_b1_a_person_adds_asks_for_and_removes_an_adapter(dialect: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql")

    async def story() -> None:
        async with (
            system_yard(tmp_path / "data", settings=settings_for(tmp_path, 1)) as yard,
            client(yard.gateway()) as http,
        ):
            entry = base_entry(tmp_path, replicas=1, limit=2, script={"dialect": dialect})
            await yard.add(entry | {"aliases": ["t"]})
            await yard.ctl(
                "adapter", "add", "sql", "--base", BASE, "--source", str(folder), "--alias", "s"
            )
            await replicas_ready(yard, 1)
            assert told_by(await ask(http, "sql")) == (200, "sql", "sql", "loaded")
            for name in ("sql", "tiny:sql", "s", "tiny:s", "t:sql"):
                answer = await ask(http, name, stream=name == "s")
                assert told_by(answer) == (200, "sql", name, "hit")
            assert told_by(await ask(http, BASE)) == (200, "base", BASE, "")
            cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
            assert (cards["sql"]["parent"], cards[BASE].get("parent")) == (BASE, None)
            assert str(folder) not in json.dumps(cards), "no path is told"
            assert str(yard.data) not in json.dumps(cards), "nor one of the node"
            (holder,) = await rows(yard, "adapter", "holders", "sql")
            assert (holder["adapter"], holder["state"], holder["how"]) == (
                "sql",
                "loaded",
                "loaded",
            )
            assert "sql" in await yard.ctl("adapter", "list")
            assert str(folder) in await yard.ctl("adapter", "show", "sql")
            before = yard.position
            await yard.ctl("adapter", "unload", "sql")
            gone = await yard.event("slots.evicted", after=before)
            assert (gone.event.adapter, gone.event.why) == ("sql", "person")
            assert told_by(await ask(http, "sql")) == (200, "sql", "sql", "loaded")
            before = yard.position
            await yard.ctl("adapter", "rm", "sql")
            gone = await yard.event("slots.evicted", after=before)
            assert gone.event.why == "removed"
            unknown = await ask(http, "sql")
            assert (unknown.status, unknown.code.split(":")[0]) == (404, "model_not_found")
            diary = Diary(tmp_path / "diary")
            assert (len(diary.loads()), diary.evicted_in_use(), diary.wrong()) == (2, [], [])

    run(story(), 110)


@pytest.mark.timeout(90)
def test_scn_d1_a_rank_above_the_profiles_is_refused_with_both_numbers_before_any_engine(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "big", rank=64)

    async def story() -> None:
        async with system_yard(tmp_path / "data", settings=settings_for(tmp_path, 1)) as yard:
            await yard.add(base_entry(tmp_path, "--max-lora-rank", "16", replicas=1))
            command = ("adapter", "add", "big", "--base", BASE, "--source", str(folder))
            out, err = await yard.told(*command, expect=1)
            assert "64" in out + err
            assert "16" in out + err
            refused = await yard.event("adapter.refused")
            assert refused.state.code == "rank_too_high"
            await replicas_ready(yard, 1)
            async with client(yard.gateway()) as http:
                answer = await ask(http, "big")
                assert answer.status == 404
                assert "64" in answer.code
            assert Diary(tmp_path / "diary").lines("load") == [], "no engine was asked"

    run(story(), 80)


@pytest.mark.timeout(120)
def test_scn_d4_an_engine_that_forgot_loads_again_and_each_request_is_answered_once(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        settings = settings_for(tmp_path, 1)
        async with system_yard(tmp_path / "data", gateways=2, settings=settings) as yard:
            await yard.add(base_entry(tmp_path, replicas=1, limit=4, script={"lora_load_s": 0.3}))
            await add_adapters(yard, tmp_path / "adapters", ["a", "b"])
            await replicas_ready(yard, 1)
            diary = Diary(tmp_path / "diary")
            async with client(yard.gateway(0)) as one, client(yard.gateway(1)) as two:
                # Ten at once, on two gateways: one load.
                answers = await asyncio.gather(*(ask(http, "a") for http in (one, two) * 5))
                assert {(a.status, a.said) for a in answers} == {(200, "a")}
                assert [a.how for a in answers].count("loaded") == 1
                assert len(diary.lines("load")) == 1
                (endpoint,) = endpoints(yard).values()
                tell_engine(endpoint, "forget")
                answer = await ask(one, "a")
                assert (answer.status, answer.said) == (200, "a")
                assert len(diary.loads()) == 2
                assert len(diary.gone()) == 1, "sent once more, and no oftener"
                assert len(diary.lines("begin")) == 11
                drift = await yard.event("slots.drifted")
                assert [name.partition("@")[0] for name in drift.event.lost] == ["a"]
                # The other gateway's pin is of before: it finds out in the same way or was told.
                answer = await ask(two, "a")
                assert (answer.status, answer.said) == (200, "a")
                assert len(diary.loads()) == 2

    run(story(), 110)


@pytest.mark.timeout(120)
def test_scn_d6_what_one_replica_cannot_load_another_one_does(tmp_path: Path) -> None:
    async def story() -> None:
        settings = settings_for(tmp_path, 2)
        async with (
            system_yard(tmp_path / "data", settings=settings) as yard,
            client(yard.gateway()) as http,
        ):
            await yard.add(base_entry(tmp_path, replicas=2, limit=2))
            names = [f"a{number}" for number in range(8)]
            await add_adapters(yard, tmp_path / "adapters", names)
            await replicas_ready(yard, 2)
            sick, well = sorted(endpoints(yard))
            tell_engine(endpoints(yard)[sick], "fault", fault="lora-500")
            for name in names:
                answer = await ask(http, name)
                assert (answer.status, answer.said) == (200, name), answer
            diary = Diary(tmp_path / "diary")
            assert {line["replica"] for line in diary.loads()} == {well}
            tried = {line["replica"] for line in diary.refused_loads()}
            assert tried == {sick}, "every gateway's first choice of some of them"
            failed = [e for e in await yard.in_log("slots.failed") if e.key[1] == sick]
            assert failed
            assert {e.event.whose for e in failed} == {"replica"}
            (bad,) = [b for b in failed[0].state.bad if b.adapter == failed[0].event.adapter]
            assert bad.until > failed[0].time
            # Whatever fails, nobody had to leave for it: the sick one never held any.
            assert not [e for e in yard.of("slots.evicted") if e.key[1] == sick]
            assert diary.evicted_in_use() == []

    run(story(), 110)
