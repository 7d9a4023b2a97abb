"""Pins on the wire: what a gateway's beacons list, when it gives a pin back, and what it does when nobody answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.app import RunningGateway
from gateway.domain.pins import TRUST_S
from schemas.adapterasks import Ensure
from schemas.adapternames import engine_name, pin_name
from schemas.beacons import GatewayBeacon, Pin
from tests.support.aio import run, until
from tests.support.gateway_agent import (
    EnsureAnswer,
    FakeAgent,
    a_yard_with,
    agent,
    nothing_left,
)
from tests.support.gateway_world import a_slot, an_adapter
from tests.support.gateway_yard import Yard, chat, memory_yard

PATH = "/v1/chat/completions"
POET = engine_name("poet", an_adapter().version)
PIN = pin_name("poet", an_adapter().version)


async def two_adapters(yard: Yard, made: FakeAgent, *replicas: str) -> None:
    """`a_yard_with` an adapter `other` besides."""
    await a_yard_with(yard, made, *replicas)
    await yard.tell(yard.story.adapter("other"))


def age(gateway: RunningGateway, seconds: float) -> None:
    """Nothing was heard of any pin's agent for so long."""
    for held in list(gateway.gateway.pins._all()):  # pyright: ignore[reportPrivateUsage]
        if held.proven_s is not None:
            held.proven_s -= seconds


async def ask(yard: Yard, gateway: RunningGateway, name: str = "poet", **fields: Any) -> Any:
    async with yard.client(gateway) as client:
        return await client.post(PATH, json=chat(name, **fields))


def latest(made: FakeAgent) -> GatewayBeacon:
    return made.beacons[-1]


def test_a_pin_is_listed_before_the_agent_is_asked_until_it_is_given_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway(beacon_s=0.02)
            await until(lambda: bool(made.beacons), "a beacon")
            made.gate.clear()
            asked = asyncio.create_task(ask(yard, gateway))
            await made.until_asked(1)
            # The first beacon behind the ask lists it, and every later one: the agent gives up on less.
            n = made.asks[0].n
            await until(lambda: latest(made).n > n + 2, "three beacons more")
            behind = [b for b in made.beacons if b.n > n]
            assert all(b.pins == {"r-1": {PIN: Pin(1, 0.0)}} for b in behind)
            assert all(b.inflight == {"r-1": 1} for b in behind[1:])
            assert all(b.pins == {} for b in made.beacons if b.n <= n)
            made.gate.set()
            assert (await asked).status_code == 200
            await until(
                lambda: latest(made).pins == {} or latest(made).pins["r-1"][PIN].uses == 0,
                "an idle pin",
            )
            assert latest(made).pins["r-1"][PIN].uses == 0

    run(story())


def test_a_recall_is_answered_at_once_unless_the_pin_is_in_use(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            # Beacons come by themselves once in a minute: what comes sooner was meant.
            gateway = await yard.gateway(beacon_s=60.0)
            engine = made.engines["r-1"]
            await ask(yard, gateway)
            await ask(yard, gateway, "other")
            engine.gate.clear()
            running = asyncio.create_task(ask(yard, gateway))
            await engine.until_seen(3)
            await until(lambda: latest(made).inflight == {"r-1": 1}, "the running request")
            other = pin_name("other", an_adapter("other").version)
            before = latest(made).n
            await made.beacon(recall={"r-1": (PIN, other)})
            await until(lambda: latest(made).n > before, "a beacon at once")
            assert set(latest(made).pins["r-1"]) == {PIN}
            # Nothing to give back: no beacon, or agents and gateways would chase each other.
            before = latest(made).n
            await made.beacon(recall={"r-1": (PIN, "never@00000000"), "r-9": (PIN,)})
            engine.gate.set()
            assert (await running).headers["x-yard-adapter"] == "hit"
            await until(lambda: latest(made).inflight == {}, "the end of it")
            assert latest(made).n == before + 1
            # What was given back is asked for again.
            asks = len(made.asks)
            assert (await ask(yard, gateway, "other")).headers["x-yard-adapter"] == "hit"
            assert len(made.asks) == asks + 1

    run(story())


def test_a_use_that_ends_where_another_adapter_waits_for_a_place_is_told_at_once(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway(beacon_s=60.0)
            await ask(yard, gateway)
            engine = made.engines["r-1"]
            engine.gate.clear()
            running = asyncio.create_task(ask(yard, gateway))
            await engine.until_seen(2)
            asks = len(made.asks)
            made.gate.clear()
            waiting = asyncio.create_task(ask(yard, gateway, "other"))
            await made.until_asked(asks + 1)
            await until(lambda: gateway.gateway.usage.by_replica == {"r-1": 2}, "both")
            engine.gate.set()
            assert (await running).status_code == 200
            await until(
                lambda: (
                    PIN in latest(made).pins.get("r-1", {})
                    and latest(made).pins["r-1"][PIN].uses == 0
                ),
                "a beacon that tells of the end",
            )
            made.gate.set()
            assert (await waiting).status_code == 200
            nothing_left(gateway)

    run(story())


def test_trust_goes_on_while_the_agent_echoes_and_ends_when_it_does_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway(beacon_s=0.02)
            await ask(yard, gateway)
            heard = latest(made).n
            await until(lambda: latest(made).n > heard + 1, "beacons behind the ask")
            age(gateway, TRUST_S)
            # An agent that says nothing of this gateway, or means its predecessor, proves nothing.
            await made.beacon(echoes=False)
            await made.beacon(heard={"gw": latest(made).n}, heard_from={"gw": "another life"})
            await ask(yard, gateway)
            assert len(made.asks) == 2
            age(gateway, TRUST_S)
            await made.beacon()
            assert (await ask(yard, gateway)).headers["x-yard-adapter"] == "hit"
            assert len(made.asks) == 2

    run(story())


@pytest.mark.parametrize("how", ["evicted", "leaving", "gone"])
def test_an_adapter_the_log_says_is_gone_is_nobodys_hit(tmp_path: Path, how: str) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway()
            await ask(yard, gateway)
            if how == "evicted":
                seq = await made.evict("r-1", "poet")
            elif how == "leaving":
                leaving = a_slot("poet", leaving=True)
                seq = await yard.tell(yard.story.slots("r-1", leaving))
            else:
                seq = await yard.tell(yard.story.slots_gone("r-1"))
            await yard.applied(gateway, seq)
            await ask(yard, gateway)
            assert len(made.asks) == 2

    run(story())


def test_scn_d8_who_waits_for_what_a_person_has_unloaded_does_not_keep_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway(beacon_s=0.02)
            await ask(yard, gateway)
            engine = made.engines["r-1"]
            engine.gate.clear()
            running = asyncio.create_task(ask(yard, gateway))
            await engine.until_seen(2)
            leaving = a_slot("poet", leaving=True)
            await yard.applied(gateway, await yard.tell(yard.story.slots("r-1", leaving)))
            asks, gave_up = len(made.asks), False

            def as_told(asked: Ensure) -> EnsureAnswer:
                """Until a beacon behind the first ask lists no pin, it stays."""
                nonlocal gave_up
                first = made.asks[asks].n
                gave_up = any(b.n > first and not b.pins for b in made.beacons)
                if not gave_up:
                    made.answers.append(as_told)
                    return EnsureAnswer(status="waiting", code="in_use")
                return EnsureAnswer(status="ready", engine_name=POET, how="loaded")

            made.answers.append(as_told)
            waiting = [asyncio.create_task(ask(yard, gateway)) for _ in range(3)]
            await made.until_asked(asks + 2)
            # What runs is told of as long as it runs, whoever waits.
            assert not gave_up
            assert latest(made).pins["r-1"][PIN].uses >= 1
            engine.gate.set()
            assert (await running).status_code == 200
            answers = await asyncio.gather(*waiting)
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert gave_up
            nothing_left(gateway)

    run(story())


def test_a_new_version_is_another_adapter(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway()
            await ask(yard, gateway)
            newer = an_adapter(version="abcdef012345")
            seq = await yard.tell(yard.story.adapter(version=newer.version))
            await yard.applied(gateway, seq)
            answer = await ask(yard, gateway)
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert [a.version for a in made.asks] == [an_adapter().version, newer.version]
            seen = [s.body["model"] for s in made.engines["r-1"].seen]
            assert seen == [POET, engine_name("poet", newer.version)]

    run(story())


def test_what_is_loaded_is_served_without_its_agent(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            async with agent(yard) as made:
                await two_adapters(yard, made)
                gateway = await yard.gateway()
                await ask(yard, gateway)
                await until(
                    lambda: bool(gateway.gateway.table.adapters.places["r-1"].loaded),  # type: ignore[union-attr]
                    "the slots event",
                )
                engines = made.engines
            # Its agent is gone; engines go on.
            age(gateway, TRUST_S)
            answer = await ask(yard, gateway)
            assert answer.headers["x-yard-adapter"] == "unpinned"
            assert answer.json()["model"] == "poet"
            async with agent(yard, engines=engines) as made:
                # One that is there again is asked again, once it is heard of.
                made.slots["r-1"] = {PIN: a_slot("poet")}
                await made.beacon()
                answer = await ask(yard, gateway)
            assert answer.headers["x-yard-adapter"] == "hit"
            assert len(made.asks) == 1

    run(story())


def test_what_its_agent_said_counts_although_the_log_was_not_told_any_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            async with agent(yard, tells=False) as made:
                await two_adapters(yard, made)
                gateway = await yard.gateway()
                await ask(yard, gateway)
            age(gateway, TRUST_S)
            assert (await ask(yard, gateway)).headers["x-yard-adapter"] == "unpinned"
            yard.logs["gw"].connection.disconnect()
            await until(lambda: not gateway.gateway.is_connected(), "the loss to be seen")
            assert (await ask(yard, gateway)).headers["x-yard-adapter"] == "unpinned"

    run(story())


def test_a_cold_adapter_goes_to_a_node_whose_agent_answers(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard, "n2") as made:
            await two_adapters(yard, made, "r-2")
            for id in ("r-1", "r-3", "r-4"):
                engine = await yard.engine(names=set())
                await yard.replica(engine, id, node="n1", adapter_slots=4)
            gateway = await yard.gateway()
            for name in ("poet", "other"):
                answer = await ask(yard, gateway, name)
                assert answer.headers["x-yard-adapter"] == "loaded"
            assert {a.replica for a in made.asks} == {"r-2"}

    run(story())


def test_a_cold_adapter_without_any_agent_is_told_so_in_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            for id in ("r-1", "r-2"):
                await yard.replica(await yard.engine(names=set()), id, adapter_slots=4)
            gateway = await yard.gateway(no_decision_s=0.6)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            answer = await ask(yard, gateway)
            assert 0.5 < loop.time() - began_s < 5
            assert answer.json()["error"]["code"] == "yard_unavailable"
            assert answer.headers["x-should-retry"] == "true"
            # It asked now and then, not as fast as it could.
            asks = 'yard_gateway_adapter_asks_total{answer="silent"} '
            (line,) = [x for x in gateway.metrics.render().decode().splitlines() if asks in x]
            assert 2 <= float(line.removeprefix(asks)) <= 8

    run(story())


def test_an_agent_that_comes_back_in_time_serves_the_request_that_waited(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            engine = await yard.engine(names=set())
            await yard.model(max_loaded_adapters=4)
            await yard.tell(yard.story.adapter())
            await yard.replica(engine, adapter_slots=4)
            gateway = await yard.gateway()
            asked = asyncio.create_task(ask(yard, gateway))
            await until(lambda: bool(gateway.gateway.desk.is_silent("n1")), "nobody to answer")
            async with agent(yard, engines={"r-1": engine}):
                answer = await asked
            assert answer.headers["x-yard-adapter"] == "loaded"

    run(story())


@pytest.mark.parametrize("status", ["not_here", "refused"])
def test_an_agent_that_cannot_say_yet_is_asked_again(tmp_path: Path, status: Any) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            gateway = await yard.gateway()
            # It has not read of this replica, or of this version, what the gateway has.
            made.answers = [EnsureAnswer(status=status, code="other_version", sentence="later")]
            answer = await ask(yard, gateway)
            assert answer.headers["x-yard-adapter"] == "loaded"
            assert len(made.asks) == 2

    run(story())


def test_without_a_connection_what_is_loaded_is_served_and_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            await ask(yard, gateway)
            await until(
                lambda: len(gateway.gateway.table.adapters.places) == 1,  # type: ignore[union-attr]
                "the slots event",
            )
            yard.logs["gw"].connection.disconnect()
            await until(lambda: not gateway.gateway.is_connected(), "the loss to be seen")
            assert (await ask(yard, gateway)).headers["x-yard-adapter"] == "hit"
            age(gateway, TRUST_S)
            answers = [await ask(yard, gateway) for _ in range(4)]
            assert [a.headers["x-yard-adapter"] for a in answers] == ["unpinned"] * 4
            cold = await ask(yard, gateway, "other")
            assert cold.json()["error"]["code"] == "yard_unavailable"
            assert len(made.asks) == 1
            # The engine is the guard: what it dropped meanwhile is no wrong answer.
            for engine in made.engines.values():
                assert engine.names is not None
                engine.names.clear()
            lost = await ask(yard, gateway)
            assert lost.json()["error"]["code"] in ("yard_unavailable", "start_failed")

    run(story())


def test_a_gateway_that_starts_without_nats_serves_what_its_snapshot_knows(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await two_adapters(yard, made)
            async with yard.own_gateway() as gateway:
                await ask(yard, gateway)
                await until(
                    lambda: bool(gateway.gateway.table.adapters.places),  # type: ignore[union-attr]
                    "the slots event",
                )
            async with yard.own_gateway(connected=False) as gateway:
                answer = await ask(yard, gateway, "m:poet")
                assert answer.headers["x-yard-adapter"] == "unpinned"
                assert answer.json()["model"] == "m:poet"
                unknown = await ask(yard, gateway, "m:nobody")
                assert unknown.json()["error"]["code"] == "yard_unavailable"
            assert len(made.asks) == 1

    run(story())
