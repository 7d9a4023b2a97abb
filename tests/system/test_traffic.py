"""Cold requests, floods and tails over a whole yard: what clients and operators see."""

import asyncio
import json
import time
from pathlib import Path

import nats
import pytest

from events.roles import inbox_prefix
from events.secrets import nats_password_path, read_secret
from tests.support.aio import run, until
from tests.system.yard import chat, client, scripted_model, system_yard


@pytest.mark.timeout(90)
def test_scn_a1_the_first_client_leaves_and_the_second_is_served_by_one_load(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            await yard.add(scripted_model("cold", "--load-s", "1"))
            async with client(yard.gateway()) as http:
                first = asyncio.create_task(http.post("/v1/chat/completions", json=chat("cold")))
                await yard.event("replica.starting")
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                second = await http.post("/v1/chat/completions", json=chat("cold"))
                assert second.status_code == 200, second.text
            assert len(yard.of("replica.starting")) == 1

    run(story(), 80)


@pytest.mark.timeout(90)
def test_scn_a2_five_requests_over_two_gateways_and_a_load_longer_than_the_wait(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        settings = {"gateway": {"wait": "1s"}}
        async with system_yard(tmp_path, gateways=2, settings=settings) as yard:
            await yard.add(scripted_model("cold", "--load-s", "3"))
            async with client(yard.gateway(0)) as one, client(yard.gateway(1)) as two:
                answers = await asyncio.gather(
                    *(
                        http.post("/v1/chat/completions", json=chat("cold"))
                        for http in (one, two, one, two, one)
                    )
                )
                for answer in answers:
                    assert answer.status_code == 503
                    assert answer.json()["error"]["code"] == "model_loading"
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.headers["x-should-retry"] == "true"
                await yard.event("replica.ready")
                again = await one.post("/v1/chat/completions", json=chat("cold"))
                assert again.status_code == 200
            assert len(yard.of("replica.starting")) == 1

    run(story(), 80)


@pytest.mark.timeout(90)
def test_inv_11_no_flood_of_hopeless_requests_fills_the_log(tmp_path: Path) -> None:
    async def story() -> None:
        settings = {"controlplane": {"backoff": "200ms", "quarantine_after": 3}}
        async with system_yard(tmp_path, settings=settings) as yard:
            await yard.add(
                scripted_model("broken", "--crash-at-start", "no such weights"),
                scripted_model("fine", "--load-s", "0.1"),
            )
            async with client(yard.gateway()) as http:
                deadline = time.monotonic() + 30
                while not yard.of("record.quarantined"):
                    assert time.monotonic() < deadline, "it was never given up"
                    answer = await http.post("/v1/chat/completions", json=chat("broken"))
                    assert answer.status_code == 503
                    assert answer.json()["error"]["code"] in ("start_failed", "model_quarantined")
                    assert "no such weights" in answer.json()["error"]["message"]
                before = yard.position
                seen: dict[tuple[int, str], int] = {}
                stop_at = time.monotonic() + 5

                async def hammer(model: str) -> None:
                    while time.monotonic() < stop_at:
                        answer = await http.post("/v1/chat/completions", json=chat(model))
                        key = (answer.status_code, answer.json()["error"]["code"])
                        seen[key] = seen.get(key, 0) + 1

                await asyncio.gather(*(hammer(m) for m in ("broken", "unknown") * 10))
                assert set(seen) == {(503, "model_quarantined"), (404, "model_not_found")}, seen
                assert sum(seen.values()) > 200
                written = [e for e in yard.events if e.seq > before]
                assert len(written) <= 5, [e.type for e in written]
                fine = await http.post("/v1/chat/completions", json=chat("fine"))
                assert fine.status_code == 200, fine.text

    run(story(), 80)


@pytest.mark.timeout(60)
def test_inv_8_a_viewer_sees_what_happened_and_only_that(tmp_path: Path) -> None:
    async def story() -> None:
        async with system_yard(tmp_path) as yard:
            seen: list[dict[str, object]] = []
            viewer = await nats.connect(
                yard.running.yard.nats_url,
                user="viewer",
                password=read_secret(nats_password_path(yard.data, "viewer")),
                inbox_prefix=inbox_prefix("viewer").encode(),
            )
            try:

                async def take(message: object) -> None:
                    seen.append(json.loads(message.data))  # type: ignore[attr-defined]

                await viewer.subscribe("yard.live.>", cb=take)
                await viewer.flush()
                await viewer.flush()
                await yard.add(scripted_model("cold", "--load-s", "0.1"))
                async with client(yard.gateway()) as http:
                    assert (
                        await http.post("/v1/chat/completions", json=chat("cold"))
                    ).status_code == 200
                ready = await yard.event("replica.ready")
                await viewer.flush()
                stored = {"replica.ready", "model.added"}
                await until(
                    lambda: stored <= {str(e["type"]).removeprefix("dev.modelyard.") for e in seen},
                    "the viewer to see them",
                )
                shown = list(seen)
                await until(
                    lambda: {e["id"] for e in shown} <= {e.id for e in yard.events},
                    "every shown event to be one that was stored",
                )
                assert ready.id in {e["id"] for e in shown}
                for event in shown:
                    assert event["specversion"] == "1.0"
                    assert str(event["type"]).startswith("dev.modelyard.")
                    assert "state" in event["data"]  # type: ignore[operator]
            finally:
                await viewer.close()

    run(story(), 50)


@pytest.mark.timeout(60)
def test_inv_10_scrapes_and_listings_neither_load_nor_keep_a_model(tmp_path: Path) -> None:
    async def story() -> None:
        # The clock of idleness begins with the third beacon.
        settings = {"nodeagent": {"beacon": "1s"}}
        async with system_yard(tmp_path, settings=settings) as yard:
            await yard.add(
                scripted_model(
                    "cold",
                    "--load-s",
                    "0.1",
                    scaling={"min": 0, "max": 1, "idle_timeout": "2s"},
                )
            )
            async with client(yard.gateway()) as http:
                for path in ("/v1/models", "/v1/models/cold", "/metrics", "/healthz", "/readyz"):
                    assert (await http.get(path)).status_code == 200, path
                assert yard.of("replica.starting") == []
                assert (
                    await http.post("/v1/chat/completions", json=chat("cold"))
                ).status_code == 200
                stopping = asyncio.create_task(yard.event("replica.stopped", timeout_s=30))
                while not stopping.done():
                    for path in ("/v1/models", "/v1/models/cold", "/metrics", "/healthz"):
                        assert (await http.get(path)).status_code == 200, path
                    await asyncio.wait({stopping}, timeout=0.1)
                await stopping
            await yard.event("card.released")

    run(story(), 55)
