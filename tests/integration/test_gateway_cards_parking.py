"""What parking, resuming and claims do to requests on a card and to those beside it, over real HTTP."""

import asyncio
from pathlib import Path

from tests.support.aio import run, until
from tests.support.gateway_cards import (
    GPU0,
    PATH,
    first_event,
    last_event,
    nothing_left,
    scopes_asked_for,
    two_gpus,
    waits,
)
from tests.support.gateway_yard import chat


def test_inv_1_a_parked_replica_gives_its_unanswered_requests_to_another(tmp_path: Path) -> None:
    """A parked engine is silent: nothing would ever time out by itself."""

    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, engines):
            for engine in engines:
                engine.gate.clear()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(4)]
                await until(lambda: [e.running for e in engines] == [2, 2], "two each")
                await yard.replica(engines[0], "r-gpu0", "parked", cards=("gpu0",))
                await engines[1].until_seen(4)
                engines[1].gate.set()
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                # Nothing more goes there, however busy the other is.
                assert (await client.post(PATH, json=chat())).status_code == 200
                await until(lambda: engines[0].running == 0, "the parked engine to be left alone")
            assert [len(e.seen) for e in engines] == [2, 5]
            lost = gateway.metrics.registry.get_sample_value(
                "yard_gateway_rerouted_total", {"loss": "stopped"}
            )
            assert lost == 2
            nothing_left(gateway)

    run(story())


def test_inv_5_a_stream_at_an_engine_that_is_parked_ends_with_an_error_frame(
    tmp_path: Path,
) -> None:
    """Its process lives and its connection stands: without the log's word the client would hang."""

    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0") as (yard, (engine,)):
            engine.pace_s, engine.tokens = 0.01, 100_000
            gateway = await yard.gateway()
            async with (
                yard.client(gateway) as client,
                client.stream("POST", GPU0 + PATH, json=chat(stream=True)) as streamed,
            ):
                lines = streamed.aiter_lines()
                await first_event(lines)
                await yard.replica(engine, "r-gpu0", "draining", cards=("gpu0",))
                await yard.replica(
                    engine, "r-gpu0", "parked", cards=("gpu0",), reason="lease l-1 wants gpu0"
                )
                async with asyncio.timeout(5.0):
                    frame = await last_event(lines)
            assert frame["error"]["code"] == "engine_error"
            assert frame["error"]["message"] == (
                "the engine r-gpu0 was parked: lease l-1 wants gpu0"
            )
            await until(lambda: engine.running == 0, "the engine's request to be closed")
            nothing_left(gateway)

    run(story())


def test_inv_1_a_parked_replica_that_resumes_serves_those_who_waited_over_a_new_connection(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0") as (yard, (engine,)):
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=chat())).status_code == 200
                made = engine.connections
                await yard.replica(engine, "r-gpu0", "draining", cards=("gpu0",))
                await yard.applied(
                    gateway, await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                )
                engine.gate.clear()  # asleep: it would take a request and say nothing
                asked = [
                    asyncio.create_task(client.post(base + PATH, json=chat()))
                    for base in ("", GPU0)
                ]
                await waits(gateway, 1)
                await waits(gateway, 1, "n1~gpu0")

                async def both() -> bool:
                    return await scopes_asked_for(yard) == ["any", "n1~gpu0"]

                await until(both, "a wish for each scope")
                await yard.applied(
                    gateway, await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                )
                assert len(engine.seen) == 1
                engine.gate.set()
                await yard.replica(engine, "r-gpu0", cards=("gpu0",), resume_s=0.4)
                assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
                assert len(engine.seen) == 3
                assert engine.connections == made + 2
            nothing_left(gateway)

    run(story())


def test_a_suspicion_from_before_the_park_does_not_keep_a_resumed_replica_out(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0") as (yard, (engine,)):
            port = engine.port
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                await engine.kill()  # out of this gateway's reach for a while
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await until(lambda: "r-gpu0" in gateway.gateway.ejected, "it to be left out")
                seq = await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                await yard.applied(gateway, seq)
                assert not gateway.gateway.ejected
                await engine.start(port)
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                await yard.replica(engine, "r-gpu0", cards=("gpu0",))
                assert (await asked).status_code == 200
                assert not gateway.gateway.ejected
            nothing_left(gateway)

    run(story())


def test_inv_1_a_resume_that_is_refused_or_fails_leaves_its_waiters_to_a_cold_start(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0") as (yard, (engine,)):
            gateway = await yard.gateway(wait_s=30.0)
            await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await waits(gateway, 1)
                await yard.activation("placing", replica="r-gpu0")
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                # No room after all; then it was tried again and the engine did not come back.
                await yard.replica(engine, "r-gpu0", "parked", cards=("gpu0",))
                await yard.replica(engine, "r-gpu0", "starting", cards=("gpu0",))
                seq = await yard.replica(
                    engine, "r-gpu0", "failed", cards=("gpu0",), code="resume_failed"
                )
                await yard.applied(gateway, seq)
                await asyncio.sleep(0)
                assert not asked.done()
                await yard.activation("loading", replica="r-new")
                await yard.replica(await yard.engine(), "r-new", cards=("gpu1",))
                assert (await asked).status_code == 200
            assert engine.seen == []
            nothing_left(gateway)

    run(story())


def test_a_claim_ends_the_streams_of_its_card_and_plain_requests_go_to_the_other(
    tmp_path: Path,
) -> None:
    """What the agent of a card tells when a game claims it: forced, so nothing is waited for."""

    async def story() -> None:
        async with two_gpus(tmp_path, "gpu0", "gpu1") as (yard, engines):
            for engine in engines:
                engine.pace_s, engine.tokens = 0.01, 100_000
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                async with client.stream("POST", GPU0 + PATH, json=chat(stream=True)) as streamed:
                    lines = streamed.aiter_lines()
                    await first_event(lines)
                    why = "claim doom keeps gpu0"
                    # The engine is deaf to the signal at first: the word of its agent is enough.
                    await yard.replica(
                        engines[0], "r-gpu0", "draining", cards=("gpu0",), reason=why, forced=True
                    )
                    async with asyncio.timeout(5.0):
                        frame = await last_event(lines)
                    assert frame["error"]["code"] == "engine_error"
                    assert frame["error"]["message"] == f"the engine r-gpu0 was stopped: {why}"
                await yard.replica(engines[0], "r-gpu0", "stopped", cards=("gpu0",), reason=why)
                await engines[0].kill()
                engines[1].pace_s, engines[1].tokens = 0.0, 3
                answer = await client.post(PATH, json=chat())
                assert answer.status_code == 200
                assert answer.headers["x-yard-waited-ms"] == "0"
                assert len(engines[1].seen) == 1
                # On the claimed card itself a request waits.
                asked = asyncio.create_task(client.post(GPU0 + PATH, json=chat()))
                await waits(gateway, 1, "n1~gpu0")
                asked.cancel()
                await waits(gateway, 0, "n1~gpu0")
            nothing_left(gateway)

    run(story())
