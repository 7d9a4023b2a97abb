"""Requests that lose their replica: routed again before the first byte, ended with a frame after it."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.http.bodies import Body
from tests.support.aio import run, until
from tests.support.gateway_yard import Yard, chat, memory_yard

PATH = "/v1/chat/completions"


async def two_engines(yard: Yard) -> None:
    """A model that two replicas serve; the gateway prefers one of them, the same each time."""
    await yard.model()
    for n in (1, 2):
        engine = await yard.engine()
        await yard.replica(engine, f"r-{n}", has_key=True)


def test_inv_1_a_stopped_replica_gives_its_unanswered_requests_to_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_engines(yard)
            for engine in yard.engines:
                engine.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(4)]
                await until(
                    lambda: sum(len(e.seen) for e in yard.engines) == 4, "all to be at an engine"
                )
                # Spread by load: two each. The first replica is stopped with two of them unanswered.
                assert [len(e.seen) for e in yard.engines] == [2, 2]
                await yard.replica(yard.engines[0], "r-1", "stopped")
                await yard.engines[1].until_seen(4)
                yard.engines[1].gate.set()
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            assert yard.engines[0].finished == 0
            await until(lambda: yard.engines[0].running == 0, "the engine's requests to be closed")

    run(story())


def test_inv_1_requests_of_the_only_replica_wait_for_its_successor(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            first, second = await yard.engine(), await yard.engine()
            first.gate.clear()
            await yard.replica(first, "r-1")
            await yard.activation("ready", replica="r-1")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await first.until_seen(1)
                await yard.replica(first, "r-1", "parked")
                # Nobody serves it now: it is asked for again, at the revision that was seen.
                assert (await yard.wish()).rev == 1
                await yard.replica(second, "r-2")
                answer = await asked
            assert answer.status_code == 200
            assert (len(first.seen), len(second.seen)) == (1, 1)

    run(story())


def test_inv_1_who_was_let_in_waits_for_a_successor_though_the_room_is_full(
    tmp_path: Path,
) -> None:
    """Its bounds are for those who come: whoever lost its replica was accepted before."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            first, second = await yard.engine(), await yard.engine()
            first.gate.clear()
            await yard.replica(first, "r-1")
            await yard.activation("ready", replica="r-1")
            gateway = await yard.gateway(waiting_requests=1)
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(3)]
                await first.until_seen(3)
                await yard.replica(first, "r-1", "stopped")
                await until(lambda: gateway.gateway.open_tickets == 3, "all to wait")
                late = await client.post(PATH, json=chat())
                assert late.json()["error"]["code"] == "queue_full"
                await yard.replica(second, "r-2")
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}

    run(story())


def test_scn_a11_an_engine_that_does_not_know_the_launch_never_answers_its_clients(
    tmp_path: Path,
) -> None:
    """Engine A died and its port was taken by engine B: B says 401, and the request goes elsewhere."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_engines(yard)
            stranger = yard.engines[0]
            stranger.key = "the key of another launch"
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for _ in range(6):
                    answer = await client.post(PATH, json=chat())
                    assert answer.status_code == 200
            assert stranger.seen == []
            assert stranger.unauthorized >= 1
            assert len(yard.engines[1].seen) == 6

    run(story())


def test_a_401_is_never_passed_on_even_when_there_is_nobody_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine, has_key=True)
            await yard.activation("ready", replica="r-1")
            engine.key = "the key of another launch"
            gateway = await yard.gateway(no_decision_s=0.4)
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat())
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "yard_unavailable"
            assert "Invalid API Key" not in answer.text

    run(story())


def test_a_dead_endpoint_is_left_out_until_it_answers_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_engines(yard)
            dead = yard.engines[0]
            port = dead.port
            await dead.kill()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for _ in range(4):
                    assert (await client.post(PATH, json=chat())).status_code == 200
                assert len(yard.engines[1].seen) == 4
                await dead.start(port)
                await until(lambda: not gateway.gateway.ejected, "its own probe to pass")
                dead.gate.clear()
                yard.engines[1].gate.clear()
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(2)]
                await dead.until_seen(1)
                dead.gate.set()
                yard.engines[1].gate.set()
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}

    run(story())


def test_scn_b9_before_the_first_byte_a_broken_request_is_served_by_another_replica(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await two_engines(yard)
            for engine in yard.engines:
                engine.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(2)]
                await yard.engines[0].until_seen(1)
                await yard.engines[0].kill()
                yard.engines[1].gate.set()
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            assert len(yard.engines[1].seen) == 2

    run(story())


def test_a_request_that_breaks_two_engines_is_not_tried_on_a_third(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            for n in range(3):
                engine = await yard.engine(drop_next=1)
                await yard.replica(engine, f"r-{n}")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat())
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "engine_error"
            assert answer.headers["x-should-retry"] == "true"
            assert sum(len(e.seen) for e in yard.engines) == 2

    run(story())


def test_one_dropped_request_on_the_only_replica_is_sent_again_once_it_answers_a_probe(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(drop_next=1)
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat())
            assert answer.status_code == 200
            assert len(engine.seen) == 2
            assert engine.probes >= 1
            # It was there all the time: nobody was asked to start it.
            assert await yard.activates() == []

    run(story())


def test_a_crash_of_the_only_replica_is_waited_out(tmp_path: Path) -> None:
    """kill -9 of the engine: requests without a byte wait for the next launch, the stream ends with a frame."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(tokens=1000, pace_s=0.01)
            await yard.replica(engine)
            await yard.activation("ready", replica="r-1")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                async with client.stream("POST", PATH, json=chat(stream=True)) as streamed:
                    lines = streamed.aiter_lines()
                    async for line in lines:
                        if line.startswith("data: "):
                            break
                    engine.gate.clear()
                    quiet = asyncio.create_task(client.post(PATH, json=chat()))
                    await engine.until_seen(2)
                    await engine.kill()
                    await yard.replica(None, "r-1", "failed", was_ready=True, last_line="killed")
                    rest = [line async for line in lines if line.startswith("data: ")]
                frame = json.loads(rest[-1].removeprefix("data: "))
                assert frame["error"]["code"] == "engine_error"
                assert "data: [DONE]" not in rest
                # A crash of a served replica is no failed start: its waiter stays.
                await yard.activation("loading", replica="r-2", since=datetime.now(UTC))
                successor = await yard.engine()
                await yard.replica(successor, "r-2")
                answer = await quiet
            assert answer.status_code == 200

    run(story())


def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            old, new = await yard.engine(), await yard.engine()
            old.gate.clear()
            await yard.replica(old, "r-1")
            # So slow that only edges and the drain itself send beacons.
            gateway = await yard.gateway(beacon_s=60.0)
            async with yard.client(gateway) as client:
                running = asyncio.create_task(client.post(PATH, json=chat()))
                await old.until_seen(1)
                seq = await yard.replica(old, "r-1", "draining")
                # The drain is confirmed at once: a position behind the event, and what still runs.
                await until(
                    lambda: any(
                        b.position >= seq and b.inflight == {"r-1": 1} for b in yard.beacons
                    ),
                    "the beacon that confirms the drain",
                )
                await yard.applied(gateway, await yard.replica(new, "r-2"))
                assert (await client.post(PATH, json=chat())).status_code == 200
                assert len(new.seen) == 1
                old.gate.set()
                assert (await running).status_code == 200
                await until(
                    lambda: yard.beacons[-1].position >= seq and not yard.beacons[-1].inflight,
                    "the beacon that ends the drain",
                )

    run(story())


def test_scn_b8_a_client_that_leaves_closes_the_engines_request(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            engine.gate.clear()
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await engine.until_seen(1)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await until(lambda: engine.aborted == 1, "the engine to be left", timeout_s=1.0)
                await until(
                    lambda: not gateway.gateway.usage.by_replica, "the count to be given back"
                )

    run(story())


def test_scn_b8_a_client_that_leaves_while_its_large_body_is_read_again_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias is put right in the body behind the choice of the replica; a large one is on the disk."""
    reading = asyncio.Event()
    calls = 0
    read_all = Body.read_all

    async def slow_disk(self: Body) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 2:
            reading.set()
            await asyncio.Event().wait()
        return await read_all(self)

    monkeypatch.setattr(Body, "read_all", slow_disk)

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(aliases=("tiny",))
            await yard.replica(await yard.engine())
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(
                    client.post(PATH, json=chat("tiny", user="u" * 400_000))
                )
                await reading.wait()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await until(
                    lambda: not gateway.gateway.usage.by_replica, "the count to be given back"
                )

    run(story())


def test_a_body_is_kept_until_the_first_byte_of_the_answer_and_no_longer(tmp_path: Path) -> None:
    """Behind it nothing can be sent again, and a stream may run for minutes."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(pace_s=0.05, tokens=1000)
            await yard.replica(engine)
            gateway = await yard.gateway()
            budget = gateway.server.budget
            async with (
                yard.client(gateway) as client,
                client.stream("POST", PATH, json=chat(stream=True)) as answer,
            ):
                async for _ in answer.aiter_bytes():
                    break
                assert gateway.server.active == 1
                assert budget.used_bytes == 0

    run(story())


def test_scn_e1_models_of_a_silent_node_answer_while_the_probe_passes_and_503_after(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway(no_decision_s=0.4)
            await yard.tell(yard.story.node(reach="unreachable"))
            async with yard.client(gateway) as client:
                await until(lambda: engine.probes > 0, "the silent node's engine to be probed")
                assert (await client.post(PATH, json=chat())).status_code == 200
                await engine.kill()
                # The next look at the node finds it dead; no request has to.
                await yard.tell(yard.story.node(reach="unreachable"))
                await until(lambda: "r-1" in gateway.gateway.ejected, "it to be left out")
                answer = await client.post(PATH, json=chat())
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "yard_unavailable"
                assert answer.headers["retry-after"] == "5"

    run(story())


def test_a_dropped_request_is_retried_even_while_nats_is_away(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine(drop_next=1)
            await yard.replica(engine)
            gateway = await yard.gateway()
            yard.logs["gw"].connection.disconnect()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat())
            assert answer.status_code == 200
            assert len(engine.seen) == 2

    run(story())


def test_requests_that_fail_again_and_again_never_leave_a_replica_out_for_good(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for _ in range(12):
                    engine.drop_next = 2
                    answer = await client.post(PATH, json=chat())
                    assert answer.status_code == 502
                assert (await client.post(PATH, json=chat())).status_code == 200
                await until(lambda: not gateway.gateway.ejected, "it to be trusted")

    run(story())
