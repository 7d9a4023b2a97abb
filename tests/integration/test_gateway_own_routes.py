"""What the gateway answers about itself, and that asking never starts, wakes or keeps a model."""

import asyncio
import json
import logging
import re
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from schemas.model import Scaling
from tests.support.aio import run, until
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"


def test_the_list_tells_how_each_model_stands(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("cold")
            await yard.model("off", scaling=Scaling())
            await yard.model("up", aliases=("alias of up",))
            engine = await yard.engine()
            await yard.replica(engine, model="up")
            await yard.model("on-its-way")
            await yard.activation("loading", model="on-its-way", since=datetime.now(UTC))
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                body = (await client.get("/v1/models")).json()
                assert body["object"] == "list"
                assert {m["id"]: m["status"] for m in body["data"]} == {
                    "cold": "idle",
                    "off": "off",
                    "up": "ready",
                    "on-its-way": "loading",
                }
                assert all(m["object"] == "model" and m["owned_by"] for m in body["data"])
                one = (await client.get("/v1/models/alias%20of%20up")).json()
                assert (one["id"], one["model"], one["status"]) == ("alias of up", "up", "ready")
                missing = await client.get("/v1/models/nothing")
                assert missing.status_code == 404
                assert missing.json()["error"]["code"] == "model_not_found"

    run(story())


@pytest.mark.parametrize("name", ["org/model", "m:7b", "my model", "模型", "a%2Fb", "q.w-e_r~t"])
def test_scn_b7_a_model_id_is_one_name_in_body_path_and_subject(tmp_path: Path, name: str) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(name)
            engine = await yard.engine(model=name)
            gateway = await yard.gateway()
            async with AsyncOpenAI(
                base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="mine", max_retries=0
            ) as client:
                asked = asyncio.create_task(
                    client.chat.completions.create(
                        model=name, messages=[{"role": "user", "content": "hi"}]
                    )
                )
                assert (await yard.wish()).model == name
                await yard.replica(engine, model=name)
                assert (await asked).model == name
                assert engine.seen[0].body["model"] == name
                # openai puts the id into the path unescaped or escaped, by its version.
                found = await client.models.retrieve(name)
                assert found.id == name

    run(story())


def test_scn_b2_an_alias_is_renamed_for_the_engine_and_named_back_to_the_client(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model(aliases=("a-much-longer-alias",))
            engine = await yard.engine(model="m")
            await yard.replica(engine, has_key=True)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, json=chat("a-much-longer-alias"))
                assert answer.json()["model"] == "a-much-longer-alias"
                sent = engine.seen[0]
                assert sent.body["model"] == "m"
                assert int(sent.headers["content-length"]) == len(
                    json.dumps(sent.body, separators=(",", ":")).encode()
                )
                async with client.stream(
                    "POST", PATH, json=chat("a-much-longer-alias", stream=True)
                ) as streamed:
                    frames = [
                        json.loads(line[6:])
                        async for line in streamed.aiter_lines()
                        if line.startswith("data: {")
                    ]
                assert {f["model"] for f in frames} == {"a-much-longer-alias"}

    run(story())


def test_the_openai_client_works_unchanged(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine, has_key=True)
            gateway = await yard.gateway()
            async with AsyncOpenAI(
                base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="mine", max_retries=0
            ) as client:
                streamed = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                text = "".join([c.choices[0].delta.content or "" async for c in streamed])
                assert text.startswith("w0 w1")
                assert [m.id async for m in client.models.list()] == ["m"]
                with pytest.raises(openai.NotFoundError) as caught:
                    await client.chat.completions.create(model="x", messages=[])
                assert caught.value.code == "model_not_found"
            # The client's own key stays here; the engine got its launch's.
            assert engine.seen[0].headers["authorization"] == f"Bearer {engine.key}"
            assert "mine" not in json.dumps(engine.seen[0].headers)

    run(story())


def test_inv_10_scrapes_and_listings_start_nothing_and_are_no_use(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.model("up")
            engine = await yard.engine()
            await yard.replica(engine, model="up")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for path in ("/v1/models", "/v1/models/m", "/metrics", "/healthz", "/readyz"):
                    for method in ("GET", "HEAD"):
                        answer = await client.request(method, path)
                        assert answer.status_code == 200, path
            assert await yard.activates() == []
            assert engine.seen == []
            assert engine.probes == 0
            count = len(yard.beacons)
            await until(lambda: len(yard.beacons) > count + 1, "two more beacons")
            assert yard.beacons[-1].last_use_age_s == {}
            assert yard.beacons[-1].inflight == {}

    run(story())


def test_a_large_page_of_numbers_goes_out_as_it_is_written(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                small = await client.get("/metrics")
                assert int(small.headers["content-length"]) == len(small.content)
                for n in range(500):
                    gateway.metrics.of_requests.count(
                        f"m-{n}", "ok", "", duration_s=0.1, first_s=0.1, tokens=None
                    )
                large = await client.get("/metrics")
                assert large.headers["transfer-encoding"] == "chunked"
                assert large.text.endswith("\n")
                told = [line for line in large.text.splitlines() if 'model="m-' in line]
                assert len(told) > 500 * 15
                whole = gateway.metrics.render().decode().splitlines()
                assert told == [line for line in whole if 'model="m-' in line]
                assert (await client.head("/metrics")).content == b""
                assert (await client.get("/healthz")).status_code == 200

    run(story())


def test_scn_a12_probes_every_moment_leave_the_idle_clock_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway(beacon_s=0.05)
            async with yard.client(gateway) as client:
                assert (await client.post(PATH, json=chat())).status_code == 200
                await until(lambda: yard.beacons[-1].last_use_age_s != {}, "the use to be told")
                first = yard.beacons[-1].last_use_age_s["m"]
                for _ in range(20):
                    await client.get("/v1/models")
                    await client.get("/metrics")
                await until(
                    lambda: yard.beacons[-1].last_use_age_s["m"] > first + 0.1,
                    "the age to grow in spite of the probes",
                )
            assert len(engine.seen) == 1

    run(story())


def test_inv_2_management_routes_never_reach_an_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for path in (
                    "/v1/load_lora_adapter",
                    "/v1/unload_lora_adapter",
                    "/sleep",
                    "/slots",
                    "/invocations",
                    "/collective_rpc",
                    "/v1/files",
                    "/engines/m/slots",
                    "/v1//chat/completions",
                ):
                    answer = await client.post(path, json=chat())
                    assert answer.status_code == 403, path
                    assert answer.json()["error"]["code"] == "route_not_forwarded"
                assert (await client.post("/elsewhere", json=chat())).status_code == 404
                # Published by no replica of the model: an inference path it does not serve.
                answer = await client.post("/v1/embeddings", json=chat())
                assert answer.status_code == 501
                assert answer.json()["error"]["code"] == "endpoint_not_supported"
                assert answer.headers["x-should-retry"] == "false"
                other = await client.post("/engines/m/pooling", json=chat())
                assert other.status_code == 403
                assert other.json()["error"]["code"] == "route_not_forwarded"
                assert (await client.get(PATH)).status_code == 405
                assert (await client.get(PATH)).headers["allow"] == "POST"
            assert engine.seen == []
            assert await yard.activates() == []

    run(story())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "provide a model"),
        (b'{"model": ""}', "provide a model"),
        (b'{"model": 5}', "model"),
    ],
)
def test_scn_b13_a_request_that_names_no_model_reaches_none(
    tmp_path: Path, body: bytes, said: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_request"
            assert said in answer.json()["error"]["message"]
            assert engine.seen == []

    run(story())


def test_scn_b3_curls_default_type_is_read_as_json_and_multipart_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            form = {"content-type": "application/x-www-form-urlencoded"}
            async with yard.client(gateway) as client:
                answer = await client.post(PATH, content=json.dumps(chat()), headers=form)
                assert answer.status_code == 200
                assert engine.seen[0].headers["content-type"] == "application/json"
                for headers in (
                    {"content-type": "multipart/form-data; boundary=x"},
                    {"content-encoding": "br"},
                ):
                    answer = await client.post(PATH, content=b"x", headers=headers)
                    assert answer.status_code == 415
                    assert answer.json()["error"]["code"] == "unsupported_media_type"

    run(story())


def test_scn_b6_cors_on_every_answer_and_a_preflight_without_a_key(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            await yard.model("off", scaling=Scaling())
            gateway = await yard.gateway(cors_origins=("https://page.example",))
            page = {"origin": "https://page.example"}
            async with yard.client(gateway) as client:
                preflight = await client.options(
                    PATH,
                    headers={**page, "access-control-request-headers": "authorization, x-a"},
                )
                assert preflight.status_code == 204
                assert preflight.headers["access-control-allow-headers"] == "authorization, x-a"
                answers = [
                    preflight,
                    await client.post(PATH, json=chat(), headers=page),
                    await client.post(PATH, json=chat(stream=True), headers=page),
                    await client.post(PATH, json=chat("off"), headers=page),
                    await client.post(PATH, json=chat("nothing"), headers=page),
                    await client.get("/nowhere", headers=page),
                ]
                assert [a.status_code for a in answers] == [204, 200, 200, 503, 404, 404]
                for answer in answers:
                    origins = answer.headers.get_list("access-control-allow-origin")
                    assert origins == ["https://page.example"]
                stranger = await client.get(
                    "/v1/models", headers={"origin": "https://evil.example"}
                )
                assert "access-control-allow-origin" not in stranger.headers

    run(story())


def test_the_timeline_of_a_cold_request_has_every_step_in_order(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                asked = asyncio.create_task(
                    client.post(PATH, json=chat(stream=True), headers={"x-request-id": "mine-1"})
                )
                await yard.wish()
                await yard.replica(engine)
                answer = await asked
                assert answer.headers["x-request-id"] == "mine-1"
                told = (await client.get("/yard/timeline", params={"request": "mine-1"})).json()
                missing = await client.get("/yard/timeline", params={"request": "other"})
                unnamed = await client.get("/yard/timeline")
            assert missing.status_code == 404
            assert unnamed.status_code == 404
            assert "?request=" in unnamed.json()["error"]["message"]
            assert (told["request"], told["model"]) == ("mine-1", "m")
            order = [
                "received",
                "joined",
                "activate_sent",
                "woken",
                "written_to_engine",
                "first_byte",
                "last_byte",
            ]
            assert list(told["marks_ms"]) == order
            times = list(told["marks_ms"].values())
            assert times == sorted(times)
            assert datetime.fromisoformat(told["written_to_engine"]).tzinfo is not None

    run(story())


def test_a_request_id_that_is_none_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                answer = await client.get("/healthz", headers={"x-request-id": "bad id\t!"})
                assert re.fullmatch(r"[0-9a-f]{16}-1", answer.headers["x-request-id"])

    run(story())


def test_the_access_log_has_ids_and_no_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> list[bytes]:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine, has_key=True)
            async with yard.own_gateway() as gateway:
                key = {"authorization": "Bearer the-clients-key"}
                async with yard.client(gateway, headers=key) as client:
                    await client.post(PATH, json=chat(user="a secret word"))
                    await client.post(PATH, json=chat("nothing"))
            # The end of a gateway writes what was collected.
            return b"".join(yard.access).splitlines()

    with caplog.at_level(logging.DEBUG):
        lines = run(story())
    served, refused = (json.loads(line) for line in lines)
    assert (served["logger"], served["message"], served["level"]) == (
        "gateway.access",
        "request",
        "info",
    )
    assert (served["status"], served["code"]) == (200, "ok")
    assert (served["model"], served["replica"]) == ("m", "r-1")
    assert served["request"]
    assert datetime.fromisoformat(served["time"]).tzinfo is not None
    assert (refused["status"], refused["code"]) == (404, "model_not_found")
    everything = "".join(str(vars(r)) for r in caplog.records) + repr(lines)
    for secret in ("a secret word", "the-clients-key", "hello"):
        assert secret not in everything


def test_metrics_count_by_catalog_model_and_code(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            engine = await yard.engine()
            await yard.replica(engine)
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                await client.post(PATH, json=chat())
                await client.post(PATH, json=chat("made-up"))
                text = (await client.get("/metrics")).text
            assert 'yard_gateway_requests_total{code="ok",model="m"} 1.0' in text
            assert 'yard_gateway_requests_total{code="model_not_found",model=""} 1.0' in text
            assert "made-up" not in text
            for name in ("inflight", "waiting", "synced", "connected", "position"):
                assert f"yard_gateway_{name}" in text

    run(story())


def test_a_base_url_with_v1_too_few_or_too_often_is_told_which_was_meant(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for asked, status, meant in (
                    ("/chat/completions", 404, "/v1/chat/completions"),
                    ("/messages", 404, "/v1/messages"),
                    ("/v1/v1/messages", 403, "/v1/messages"),
                    ("/nothing", 404, None),
                    ("/v1/moderations", 403, None),
                    ("/v1/v1/moderations", 403, None),
                ):
                    answer = await client.post(asked, json=chat())
                    assert answer.status_code == status
                    message = answer.json()["error"]["message"]
                    told = f"; did the base URL mean {meant}?"
                    assert (told in message) if meant else ("base URL" not in message)

    run(story())
