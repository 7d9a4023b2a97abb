"""Cold models over real HTTP: who waits, who is woken, who is told what. The test is the control plane."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from gateway.app import RunningGateway
from schemas.model import Scaling
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"


async def waits(gateway: RunningGateway, count: int, model: str = "m") -> None:
    await until(
        lambda: gateway.gateway.room.count((model, "any")) == count, f"{count} requests to wait"
    )


def nothing_left(gateway: RunningGateway) -> None:
    """What every story must end with: no waiter, no timer, nothing counted as running."""
    state = gateway.gateway
    assert len(state.room) == 0
    assert state.open_tickets == 0
    assert state.room.timers == 0
    assert dict(state.usage.by_replica) == {}
    assert gateway.activator.timers == 0


def test_req_a23_a_cold_request_asks_once_waits_and_is_woken_within_50_ms(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                wish = await yard.wish()
                assert (wish.model, wish.scope, wish.rev) == ("m", "any", 0)
                await yard.activation("placing", replica="r-1")
                await yard.replica(None, phase="starting")
                await yard.activation("loading", replica="r-1")
                loop = asyncio.get_running_loop()
                ready_s = loop.time()
                await yard.replica(engine, has_key=True)
                await engine.until_seen(1)
                assert loop.time() - ready_s < 0.05
                answer = await asked
                assert answer.status_code == 200
                assert int(answer.headers["x-yard-waited-ms"]) > 0
            assert len(await yard.activates()) == 1
            nothing_left(gateway)

    run(story())


def test_req_a26_fifty_requests_over_two_gateways_are_one_wish_and_one_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateways = [await yard.gateway("gw-1"), await yard.gateway("gw-2")]
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                clients = [one, two] * 25
                asked = [asyncio.create_task(c.post(PATH, json=chat())) for c in clients]
                await waits(gateways[0], 25)
                await waits(gateways[1], 25)
                await yard.wish()
                await yard.replica(engine)
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            assert len(engine.seen) == 50
            # Both gateways asked; the message id made one of it.
            assert len(await yard.activates()) == 1
            for gateway in gateways:
                nothing_left(gateway)

    run(story())


def test_req_a12_the_wait_is_bounded_and_ends_in_model_loading(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            expected = datetime.now(UTC) + timedelta(seconds=20)
            await yard.activation(
                "loading", since=datetime.now(UTC), expected_ready_at=expected, node="n1"
            )
            gateway = await yard.gateway(wait_s=0.3)
            async with yard.client(gateway) as client:
                loop = asyncio.get_running_loop()
                begun_s = loop.time()
                answer = await client.post(PATH, json=chat())
                assert 0.25 < loop.time() - begun_s < 2.0
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert 17 <= int(answer.headers["retry-after"]) <= 20
            assert answer.headers["x-should-retry"] == "true"
            # It had joined a load that was under way: nothing was asked.
            assert await yard.activates() == []
            nothing_left(gateway)

    run(story())


@pytest.mark.parametrize("wait_s", [0.0, -3.0])
def test_req_a16_a_wait_of_nothing_means_the_default(tmp_path: Path, wait_s: float) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            gateway = await yard.gateway(wait_s=wait_s)
            assert gateway.gateway.wait_s == 45.0

    run(story())


def test_req_a17_the_default_wait_is_45_seconds() -> None:
    assert GatewaySettings().wait_s == 45.0


def test_req_a18_a_client_that_leaves_ends_its_wait_and_frees_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading")
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway, timeout=0.3) as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(PATH, json=chat())
            await waits(gateway, 0)
            nothing_left(gateway)

    run(story())


def test_req_a19_the_load_goes_on_without_the_client_that_asked_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await yard.wish()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await waits(gateway, 0)
                # Nothing takes the wish back; the next request finds the model up.
                assert len(await yard.activates()) == 1
                await yard.applied(gateway, await yard.replica(engine))
                answer = await client.post(PATH, json=chat())
                assert answer.status_code == 200
                assert answer.headers["x-yard-waited-ms"] == "0"

    run(story())


def test_scn_a1_the_second_client_is_served_by_the_load_the_first_one_left(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                first = asyncio.create_task(client.post(PATH, json=chat()))
                await yard.wish()
                await yard.activation("loading", replica="r-1")
                second = asyncio.create_task(client.post(PATH, json=chat()))
                await waits(gateway, 2)
                first.cancel()
                await waits(gateway, 1)
                await yard.replica(engine)
                assert (await second).status_code == 200
            assert len(engine.seen) == 1
            assert len(await yard.activates()) == 1

    run(story())


def test_scn_a2_five_requests_over_two_gateways_and_a_load_longer_than_the_wait(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateways = [await yard.gateway(f"gw-{n}", wait_s=0.3) for n in (1, 2)]
            async with yard.client(gateways[0]) as one, yard.client(gateways[1]) as two:
                asked = [
                    asyncio.create_task(c.post(PATH, json=chat()))
                    for c in (one, two, one, two, one)
                ]
                await yard.wish()
                await yard.activation("loading", replica="r-1", since=datetime.now(UTC))
                answers = await asyncio.gather(*asked)
                assert {a.status_code for a in answers} == {503}
                assert {a.json()["error"]["code"] for a in answers} == {"model_loading"}
                assert all(int(a.headers["retry-after"]) >= 1 for a in answers)
                # The load went on: who comes back waits for the same one, and is served.
                again = asyncio.create_task(two.post(PATH, json=chat()))
                await waits(gateways[1], 1)
                await yard.replica(engine)
                assert (await again).status_code == 200
            assert len(await yard.activates()) == 1

    run(story())


def test_req_a22_a_retry_within_the_load_waits_again_for_the_same_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading", since=datetime.now(UTC))
            gateway = await yard.gateway(wait_s=0.2)
            async with yard.client(gateway) as client:
                for _ in range(2):
                    answer = await client.post(PATH, json=chat())
                    assert answer.json()["error"]["code"] == "model_loading"
            assert await yard.activates() == []

    run(story())


def test_req_a28_a_refused_load_answers_its_waiters_at_once_with_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await yard.wish()
                await yard.activation("loading", replica="r-1")
                await yard.replica(None, phase="failed", last_line="error: no such file")
                await yard.activation(
                    "refused",
                    code="start_failed",
                    reason="error: no such file",
                    retry_at=datetime.now(UTC) + timedelta(seconds=15),
                )
                async with asyncio.timeout(2.0):
                    answer = await asked
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "start_failed"
            assert "error: no such file" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) in (14, 15)
            nothing_left(gateway)

    run(story())


def test_req_a28_a_failed_start_answers_even_when_no_control_plane_refuses_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading", replica="r-1")
            await yard.replica(None, phase="starting")
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await waits(gateway, 1)
                await yard.replica(None, phase="failed", last_line="CUDA out of memory")
                async with asyncio.timeout(2.0):
                    answer = await asked
            assert answer.json()["error"]["code"] == "start_failed"
            assert "CUDA out of memory" in answer.json()["error"]["message"]
            nothing_left(gateway)

    run(story())


def test_req_a15_an_off_model_is_refused_at_once_and_never_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(scaling=Scaling(min=0, max=0))
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                async with asyncio.timeout(5.0):
                    answer = await client.post(PATH, json=chat())
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_off"
            assert "retry-after" not in answer.headers
            assert answer.headers["x-should-retry"] == "false"
            assert await yard.activates() == []

    run(story())


def test_req_a14_an_unknown_model_is_refused_at_once_and_never_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                async with asyncio.timeout(5.0):
                    answer = await client.post(PATH, json=chat("typo"))
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"
            assert await yard.activates() == []
            # A name a client made up is no label.
            assert "typo" not in gateway.metrics.render().decode()

    run(story())


def test_req_a27_demand_is_renewed_until_it_is_decided(tmp_path: Path) -> None:
    """No decision for a while: the same message again, which the log keeps once; then yard_unavailable."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0, resend_s=0.1, no_decision_s=0.5)
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat())
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "yard_unavailable"
            assert answer.headers["retry-after"] == "5"
            assert len(await yard.activates()) == 1
            sent = gateway.metrics.registry.get_sample_value("yard_gateway_activates_total")
            assert sent is not None
            assert sent >= 3
            nothing_left(gateway)

    run(story())


def test_req_x6_a_full_waiting_room_refuses_with_a_time_to_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0, waiting_requests=2)
            async with yard.client(gateway) as client:
                held = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(2)]
                await waits(gateway, 2)
                answer = await client.post(PATH, json=chat())
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "queue_full"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                for task in held:
                    task.cancel()
                await waits(gateway, 0)

    run(story())


def test_scn_a7_three_cold_models_and_room_for_one_never_a_500(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            for name in ("a", "b", "c"):
                await yard.model(name)
            engine = await yard.engine()
            gateway = await yard.gateway(wait_s=0.5)
            async with yard.client(gateway) as client:
                asked = {n: asyncio.create_task(client.post(PATH, json=chat(n))) for n in "abc"}
                for name in "abc":
                    await waits(gateway, 1, name)
                await yard.activation("loading", model="a", replica="r-1")
                for name in "bc":
                    await yard.activation("waiting", model=name, waiting_for=("r-1",))
                await yard.replica(engine, model="a")
                answers = {n: await t for n, t in asked.items()}
            assert answers["a"].status_code == 200
            for name in "bc":
                assert answers[name].status_code == 503
                assert answers[name].json()["error"]["code"] == "no_capacity"
                assert answers[name].headers["x-should-retry"] == "true"
                assert 1 <= int(answers[name].headers["retry-after"]) <= 60

    run(story())


def test_scn_a16_a_gateway_restarted_while_the_model_is_at_zero_says_loading_not_unknown(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading", since=datetime.now(UTC))
            for name in ("gw-first", "gw-restarted"):
                gateway = await yard.gateway(name, wait_s=0.1)
                async with yard.client(gateway) as client:
                    answer = await client.post(PATH, json=chat())
                    assert answer.json()["error"]["code"] == "model_loading"

    run(story())


def test_inv_11_a_storm_for_refused_and_unknown_models_leaves_a_handful_of_messages(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.model("other")
            gateway = await yard.gateway(wait_s=30.0)
            later = datetime.now(UTC) + timedelta(minutes=30)
            seq = await yard.activation(
                "refused", code="model_quarantined", reason="5 starts failed", retry_at=later
            )
            await yard.applied(gateway, seq)

            async def storm(client: httpx.AsyncClient, name: str, status: int) -> None:
                for _ in range(25):
                    answer = await client.post(PATH, json=chat(name))
                    assert answer.status_code == status

            async with yard.client(gateway) as client:
                await asyncio.gather(
                    *(storm(client, "m", 503) for _ in range(4)),
                    *(storm(client, "nothing", 404) for _ in range(4)),
                )
                assert await yard.activates() == []
                # Another model activates as before.
                asked = asyncio.create_task(client.post(PATH, json=chat("other")))
                assert (await yard.wish()).model == "other"
                engine = await yard.engine()
                await yard.replica(engine, model="other")
                assert (await asked).status_code == 200

    run(story())


def test_inv_5_a_model_removed_while_requests_wait_answers_them_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(3)]
                await waits(gateway, 3)
                await yard.tell(yard.story.model_gone())
                async with asyncio.timeout(2.0):
                    answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {404}
            nothing_left(gateway)

    run(story())


def test_two_hundred_waiters_are_woken_by_one_event(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway(wait_s=30.0)
            limits = httpx.Limits(max_connections=300)
            async with yard.client(gateway, limits=limits) as client:
                asked = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(200)]
                await waits(gateway, 200)
                await yard.replica(engine)
                answers = await asyncio.gather(*asked)
            assert {a.status_code for a in answers} == {200}
            nothing_left(gateway)

    run(story(), timeout_s=40.0)


def test_req_a20_a_gateway_that_can_ask_nobody_says_so_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway(wait_s=30.0)
            yard.logs["gw"].connection.disconnect()
            async with yard.client(gateway) as client, asyncio.timeout(2.0):
                answer = await client.post(PATH, json=chat())
            assert answer.json()["error"]["code"] == "yard_unavailable"

    run(story())


def test_req_a21_a_wait_succeeds_with_the_first_ready_replica_whoever_started_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(scaling=Scaling(min=0, max=2))
            engine = await yard.engine()
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await waits(gateway, 1)
                await yard.activation("loading", replica="r-1")
                await yard.replica(None, "r-1", "starting")
                # Not the one its activation names: an operator loaded another.
                await yard.replica(engine, "r-2")
                assert (await asked).status_code == 200

    run(story())


def test_req_x2_nothing_a_client_types_starts_what_nobody_configured(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("off", scaling=Scaling())
            await yard.model("on")
            gateway = await yard.gateway(wait_s=30.0)
            names = ["off", "OFF", "on ", "On", "../on", "o%6e", "yard.evt.model.on", "*", ">"]
            async with yard.client(gateway) as client:
                for name in names:
                    answer = await client.post(PATH, json=chat(name))
                    code = answer.json()["error"]["code"]
                    assert code == ("model_off" if name == "off" else "model_not_found"), name
            assert await yard.activates() == []

    run(story())


def test_req_x3_a_crowd_that_leaves_leaves_the_load_to_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway(wait_s=30.0)
            async with yard.client(gateway) as client:
                crowd = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(20)]
                await waits(gateway, 20)
                await yard.wish()
                for task in crowd:
                    task.cancel()
                await waits(gateway, 0)
                nothing_left(gateway)
                assert len(await yard.activates()) == 1
                await yard.applied(gateway, await yard.replica(engine))
                assert (await client.post(PATH, json=chat())).status_code == 200
            assert len(engine.seen) == 1

    run(story())


def test_a_wish_carries_the_trace_of_whoever_waits_for_it(tmp_path: Path) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway()
            headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat(), headers=headers))
                await yard.wish()
                (stored,) = yard.broker.commands.messages.values()
                await yard.replica(engine)
                assert (await asked).status_code == 200
            # The load hangs below this gateway's span, as the request at the engine does.
            assert stored.traceparent == engine.seen[0].headers["traceparent"]
            assert stored.traceparent.split("-")[1] == trace
            nothing_left(gateway)

    run(story())
