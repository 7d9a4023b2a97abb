"""A gateway without NATS, without a control plane, and at its own beginning and end."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from events.memory import MemoryLog, MemoryWire
from gateway.app import run_gateway
from gateway.domain.snapshot import decode
from gateway.keys import engine_keys
from schemas.settings import GatewaySettings
from tests.support.aio import run, until
from tests.support.gateway_yard import YARD_SECRET, Yard, chat, memory_yard

PATH = "/v1/chat/completions"


async def written(yard: Yard, gateway_id: str, position: int) -> Path:
    """Waits until the snapshot holds that position."""
    path = yard.data / "gateway" / gateway_id / "routes.json"
    await until(
        lambda: path.exists() and decode(path.read_bytes()).position >= position,
        f"a snapshot at {position}",
        timeout_s=12.0,
    )
    return path


def test_log_23_a_gateway_started_without_nats_serves_from_its_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(aliases=("x",))
            await yard.model("cold")
            engine = await yard.engine()
            seq = await yard.replica(engine, has_key=True)
            async with yard.own_gateway("gw"):
                await written(yard, "gw", seq)
            async with yard.own_gateway("gw", connected=False) as again:
                assert not again.gateway.synced
                async with yard.client(again) as client:
                    for name in ("m", "x"):
                        assert (await client.post(PATH, json=chat(name))).status_code == 200
                    cold = await client.post(PATH, json=chat("cold"))
                    assert cold.json()["error"]["code"] == "yard_unavailable"
                    # It may be newer than the snapshot.
                    unknown = await client.post(PATH, json=chat("nothing"))
                    assert unknown.json()["error"]["code"] == "yard_unavailable"
                    assert (await client.get("/readyz")).status_code == 200
                    listed = (await client.get("/v1/models")).json()
                    assert listed["stale"] is True
                    # Nothing it says confirms an event it has not read.
                    assert yard.beacons[-1].position in (0, seq)
                    yard.logs["gw"].connection.reconnect()
                    await until(lambda: again.gateway.synced, "the log to be read")
                    assert (await client.post(PATH, json=chat("nothing"))).status_code == 404
                    assert (await client.post(PATH, json=chat())).status_code == 200

    run(story())


def test_a_hung_engine_of_the_snapshot_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app.FIRST_LOOK_S", 0.05)
    monkeypatch.setattr("gateway.probe.TIMEOUT_S", 60.0)

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("live")
            await yard.model("hung")
            live, hung = await yard.engine(), await yard.engine()
            await yard.replica(live, "r-1", model="live", has_key=True)
            seq = await yard.replica(hung, "r-2", model="hung", has_key=True)
            async with yard.own_gateway("gw"):
                await written(yard, "gw", seq)
            hung.probe_gate.clear()
            # It opens though one engine never answered, and long before the probe's own time is up.
            async with (
                yard.own_gateway("gw", connected=False) as again,
                yard.client(again) as client,
            ):
                assert "r-2" in again.gateway.ejected
                assert (await client.post(PATH, json=chat("live"))).status_code == 200
                waiting = asyncio.ensure_future(client.post(PATH, json=chat("hung")))
                await until(lambda: again.gateway.open_tickets == 1, "somebody waiting for it")
                hung.probe_gate.set()
                assert (await waiting).status_code == 200
                await until(lambda: not again.gateway.ejected, "both to be trusted")

    run(story())


def test_log_24_a_dead_endpoint_of_the_snapshot_is_not_routed_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            live, dead = await yard.engine(), await yard.engine()
            await yard.replica(live, "r-1", has_key=True)
            seq = await yard.replica(dead, "r-2", has_key=True)
            async with yard.own_gateway("gw"):
                await written(yard, "gw", seq)
            port = dead.port
            await dead.kill()
            # Another engine took the port of the dead one.
            stranger = await yard.engine()
            await stranger.kill()
            stranger.key = "another launch"
            await stranger.start(port)
            async with yard.own_gateway("gw", connected=False) as again:
                assert set(again.gateway.ejected) == {"r-2"}
                async with yard.client(again) as client:
                    for _ in range(4):
                        assert (await client.post(PATH, json=chat())).status_code == 200
                assert stranger.seen == []
                assert len(live.seen) == 4

    run(story())


def test_without_a_table_and_a_snapshot_the_port_stays_shut_until_the_log_is_read(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            opened = asyncio.Event()

            async def gateway() -> None:
                async with yard.own_gateway("gw", connected=False) as running:
                    assert running.gateway.synced
                    opened.set()

            starting = asyncio.create_task(gateway())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.8):
                    await opened.wait()
            yard.logs["gw"].connection.reconnect()
            async with asyncio.timeout(5.0):
                await opened.wait()
            await starting

    run(story())


def test_an_unreadable_snapshot_is_no_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            path = tmp_path / "gateway" / "gw" / "routes.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(b'{"format": 99}')
            async with yard.own_gateway("gw") as running:
                assert running.gateway.synced

    run(story())


def test_when_nats_goes_away_ready_models_serve_and_cold_ones_say_so_at_once(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.model("cold")
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway(wait_s=30.0)
            yard.logs["gw"].connection.disconnect()
            async with yard.client(gateway) as client:
                for _ in range(3):
                    assert (await client.post(PATH, json=chat())).status_code == 200
                async with asyncio.timeout(2.0):
                    answer = await client.post(PATH, json=chat("cold"))
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "yard_unavailable"
                assert answer.headers["retry-after"] == "5"
                # It is still ready: what it knows is good.
                assert (await client.get("/readyz")).status_code == 200
                assert (await client.get("/readyz")).json()["connected"] is False
                yard.logs["gw"].connection.reconnect()
                await until(gateway.gateway.is_connected, "the connection to be back")
                asked = asyncio.create_task(client.post(PATH, json=chat("cold")))
                assert (await yard.wish()).model == "cold"
                await yard.replica(engine, "r-2", model="cold")
                assert (await asked).status_code == 200

    run(story())


def test_a_waiter_outlives_a_restart_of_nats(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading", replica="r-1")
            engine = await yard.engine()
            gateway = await yard.gateway(wait_s=30.0)
            connection = yard.logs["gw"].connection
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(client.post(PATH, json=chat()))
                await until(lambda: len(gateway.gateway.room) == 1, "it to wait")
                connection.disconnect()
                await until(lambda: not gateway.gateway.is_connected(), "the loss to be noticed")
                await yard.replica(engine)
                connection.reconnect()
                assert (await asked).status_code == 200

    run(story())


def test_a_replaced_history_is_read_into_a_new_table_while_the_old_one_serves(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            first = gateway.gateway.table
            yard.broker.replace_events()
            yard.heads.clear()
            await yard.model("other")
            await until(lambda: gateway.gateway.table is not first, "the table to be replaced")
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=chat())).status_code == 404
                assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == [
                    "other"
                ]

    run(story())


def test_a_stopping_gateway_finishes_what_runs_and_turns_new_requests_away(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            engine.gate.clear()
            await yard.replica(engine)
            async with httpx.AsyncClient(timeout=10.0) as client:
                async with yard.own_gateway("gw") as gateway:
                    url = f"http://127.0.0.1:{gateway.port}{PATH}"
                    running = asyncio.create_task(client.post(url, json=chat()))
                    await engine.until_seen(1)
                    gateway.gateway.draining = True
                    refused = await client.post(url, json=chat())
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "draining"
                    assert refused.headers["retry-after"] == "1"
                    asyncio.get_running_loop().call_later(0.2, engine.gate.set)
                answer = await running
            assert answer.status_code == 200
            assert yard.beacons[-1].leaving
            assert yard.beacons[-1].inflight == {}
            assert [b.n for b in yard.beacons] == sorted(b.n for b in yard.beacons)

    run(story())


def test_who_waits_at_a_stopping_gateway_is_still_served_when_the_model_is_ready(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading")
            engine = await yard.engine()
            async with httpx.AsyncClient(timeout=10.0) as client:
                async with yard.own_gateway("gw", drain_s=5.0, wait_s=30.0) as gateway:
                    url = f"http://127.0.0.1:{gateway.port}{PATH}"
                    asked = asyncio.create_task(client.post(url, json=chat()))
                    await until(lambda: len(gateway.gateway.room) == 1, "it to wait")
                    gateway.gateway.draining = True
                    await yard.replica(engine)
                answer = await asked
            assert answer.status_code == 200

    run(story())


def test_a_stopping_gateway_dismisses_who_still_waits_before_its_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.activation("loading")
            async with httpx.AsyncClient(timeout=10.0) as client:
                async with yard.own_gateway("gw", drain_s=0.4, wait_s=30.0) as gateway:
                    url = f"http://127.0.0.1:{gateway.port}{PATH}"
                    asked = asyncio.create_task(client.post(url, json=chat()))
                    await until(lambda: len(gateway.gateway.room) == 1, "it to wait")
                answer = await asked
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"

    run(story())


def test_a_failing_task_of_the_gateway_ends_it(tmp_path: Path) -> None:
    """A dead side task stops its process: better gone and restarted than deaf."""

    class Broken(MemoryWire):
        async def beacon(self, kind: str, name: str, body: object) -> None:  # type: ignore[override]
            raise RuntimeError("the wire is broken")

    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            log = MemoryLog(yard.broker, source="/gateway/gw")
            with pytest.raises(ExceptionGroup) as caught:
                async with run_gateway(
                    "gw",
                    GatewaySettings(listen="127.0.0.1:0"),
                    data=tmp_path,
                    events=log,
                    wire=Broken(log.connection),
                    engine_key=engine_keys(YARD_SECRET),
                ):
                    await asyncio.sleep(30)
            assert "the wire is broken" in repr(caught.value.exceptions)

    run(story())


def test_the_snapshot_is_plain_json_with_the_streams_identity(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            async with yard.own_gateway("gw"):
                path = await written(yard, "gw", 1)
            content = json.loads(path.read_bytes())
            identity = await yard.log.identity()
            assert content["stream_id"] == identity.stream_id
            assert content["position"] == 1
            assert [p.name for p in path.parent.iterdir()] == ["routes.json"]

    run(story())
