"""The real llama.cpp under a real launcher: loads, answers under its name, keeps its door, gives back."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import msgspec
from msgspec import structs

from nodeagent import processes
from nodeagent.drivers.driver import EngineStart, StartRefused
from nodeagent.drivers.llamacpp import (
    AUDIO_PATHS,
    EMBEDDING_PATHS,
    PATHS,
    RERANKING_PATHS,
    LlamacppDriver,
)
from nodeagent.launching import Ended, LaunchEnded, Launcher, LaunchReady, Running
from schemas.beacons import EngineCounters
from schemas.plan import Launch
from tests.support.aio import run, until
from tests.support.launches import REPLICA, launcher, no_secrets
from tests.support.ports import free_port

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = "key-of-this-launch-0123"
LAUNCH = Launch(
    model="smollm2",
    incarnation="i",
    profile="cpu",
    revision="1",
    engine="llamacpp",
    source=str(MODEL),
    # One thread: several wait for each other by spinning, which a busy machine punishes.
    args=("--ctx-size", "2048", "--parallel", "1", "--threads", "1"),
)


def prepare(driver: LlamacppDriver, launch: Launch = LAUNCH, port: int = 0) -> EngineStart:
    start = driver.prepare(
        launch,
        replica=REPLICA,
        host="127.0.0.1",
        port=port or free_port(),
        key=KEY,
        secrets=no_secrets,
    )
    assert not isinstance(start, StartRefused), start
    return start


def talk(start: EngineStart) -> httpx.AsyncClient:
    """A client with patience: other tests may share these two cores."""
    return httpx.AsyncClient(base_url=start.endpoint, timeout=45.0)


def _proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def launch(made: Launcher, start: EngineStart) -> Running | Ended:
    return await made.start(REPLICA, start, grace_s=5.0, log_bytes=1 << 20)


async def ready(made: Launcher, start: EngineStart) -> Running:
    running = await launch(made, start)
    assert isinstance(running, Running), running
    if not running.ready:
        event = await asyncio.wait_for(made.events.get(), 30.0)
        assert isinstance(event, LaunchReady), event
    return running


def test_llamacpp_serves_under_the_catalog_s_name_from_the_moment_it_is_ready(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        driver = LlamacppDriver()
        start = prepare(driver)
        async with launcher(tmp_path) as made, talk(start) as client:
            running = await ready(made, start)
            # Ready means that it answers: the very next request is served.
            headers = {"Authorization": f"Bearer {KEY}"}
            asked = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "Say hello."}],
                "max_tokens": 4,
            }
            answer = await client.post("/v1/chat/completions", json=asked, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "smollm2"
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert await driver.probe(start.endpoint, KEY)

            wrong = await client.post("/v1/chat/completions", json=asked)
            assert wrong.status_code == 401
            for place in ("cmdline", "status"):
                assert KEY.encode() not in _proc(running.pid, place)
            for path in (tmp_path / "replicas" / REPLICA).iterdir():
                assert KEY.encode() not in path.read_bytes(), path
            assert await made.memory_bytes(REPLICA) > MODEL.stat().st_size

            result = await made.stop(REPLICA, 5.0)
            assert result.survivors == ()
            assert not result.killed
            assert await made.memory_bytes(REPLICA) == 0
            assert not await driver.probe(start.endpoint, KEY)
            assert await driver.counters(start.endpoint, KEY) == EngineCounters()

    run(story(), 60.0)


def test_llamacpp_s_own_counters_show_a_request_at_work_and_that_it_worked(tmp_path: Path) -> None:
    async def story() -> None:
        driver = LlamacppDriver()
        start = prepare(driver)
        async with launcher(tmp_path) as made, talk(start) as client:
            await ready(made, start)
            idle = await driver.counters(start.endpoint, KEY)
            assert idle.inflight == 0
            headers = {"Authorization": f"Bearer {KEY}"}
            asked = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            async with client.stream(
                "POST", "/v1/completions", json=asked, headers=headers
            ) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line:
                        break
                busy = await driver.counters(start.endpoint, KEY)
                assert busy.inflight == 1

            async def quiet() -> bool:
                return (await driver.counters(start.endpoint, KEY)).inflight == 0

            # The client has gone, and the engine noticed.
            await until(quiet, "the engine to be idle")
            after = await driver.counters(start.endpoint, KEY)
            assert after.requests_total is not None
            assert idle.requests_total is not None
            assert after.requests_total > idle.requests_total
            assert await driver.counters(start.endpoint, "wrong") == EngineCounters()

    run(story(), 60.0)


def test_llamacpp_says_why_it_could_not_load(tmp_path: Path) -> None:
    async def story() -> None:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(MODEL.read_bytes()[: 1 << 20])
        start = prepare(LlamacppDriver(), msgspec.structs.replace(LAUNCH, source=str(broken)))
        async with launcher(tmp_path) as made:
            await launch(made, start)
            event = await asyncio.wait_for(made.events.get(), 30.0)
            assert isinstance(event, LaunchEnded)
            assert event.exit_status == 1
            assert not event.was_ready
            assert "error loading model" in event.last_line

    run(story(), 60.0)


def test_llamacpp_says_that_its_port_is_taken(tmp_path: Path) -> None:
    async def story() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            start = prepare(LlamacppDriver(), port=taken.getsockname()[1])
            async with launcher(tmp_path) as made:
                await launch(made, start)
                event = await asyncio.wait_for(made.events.get(), 30.0)
                assert isinstance(event, LaunchEnded)
                assert event.exit_status == 1
                assert "couldn't bind" in event.last_line

    run(story(), 60.0)


def test_llamacpp_can_be_stopped_in_the_middle_of_its_load(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await launch(made, prepare(LlamacppDriver()))
            assert isinstance(running, Running)
            result = await made.stop(REPLICA, 5.0)
            assert (result.exit_status, result.survivors, result.killed) == (
                -signal.SIGTERM,
                (),
                False,
            )

    run(story(), 60.0)


def test_llamacpp_takes_every_kind_of_setting(tmp_path: Path) -> None:
    """A flag, numbers, a word that stands for a number, and one inside a group."""

    async def story() -> None:
        args = (
            *("--ctx-size", "1024", "--cache-type-k", "q8_0", "--threads", "2", "--flash-attn"),
            *("on", "--no-warmup", "--temp", "0.0", "--embeddings", "--pooling", "mean"),
        )
        start = prepare(LlamacppDriver(), msgspec.structs.replace(LAUNCH, args=args))
        async with launcher(tmp_path) as made, talk(start) as client:
            await ready(made, start)
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = await client.post(
                "/v1/embeddings", json={"input": "hello"}, headers=headers, timeout=30.0
            )
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["data"][0]["embedding"]) > 100

    run(story(), 60.0)


def test_llamacpp_killed_while_it_serves_is_told_with_its_signal(tmp_path: Path) -> None:
    async def story() -> None:
        async with launcher(tmp_path) as made:
            running = await ready(made, prepare(LlamacppDriver()))
            os.kill(running.pid, signal.SIGKILL)
            event = await asyncio.wait_for(made.events.get(), 10.0)
            assert isinstance(event, LaunchEnded)
            assert (event.exit_status, event.was_ready) == (-9, True)
            written = json.loads((tmp_path / "replicas" / REPLICA / "exit.json").read_bytes())
            assert written["launch"] == REPLICA
            assert not processes.is_same(running.pid, running.start_time)

    run(story(), 60.0)


def test_llamacpp_has_the_paths_its_driver_tells_and_only_those_that_are_on(tmp_path: Path) -> None:
    """Each path is asked for nothing, and one of each kind for work: what is off says so, what is on says no 501."""
    off = (*EMBEDDING_PATHS, *RERANKING_PATHS)
    # The model has no tokens to fill in with, and no ears.
    of_the_model = {"/infill"}
    headers = {"Authorization": f"Bearer {KEY}"}

    async def story(folder: Path, args: tuple[str, ...]) -> None:
        driver = LlamacppDriver()
        start = prepare(driver, structs.replace(LAUNCH, args=(*LAUNCH.args, *args)))
        async with launcher(folder) as made, talk(start) as client:
            await ready(made, start)
            found = await driver.routes(start.endpoint, KEY, (*start.paths, "/v2/rerank"))
            assert of_the_model.issuperset({*start.paths} - {*found})
            assert "/v2/rerank" not in found
            for path in (*PATHS, *off, *AUDIO_PATHS):
                body = {"model": "smollm2", "input": "a", "content": "a", "tokens": [1]}
                body |= {"query": "a", "documents": ["b"], "max_tokens": 1, "n_predict": 1}
                body |= {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
                answer = await client.post(path, json=body, headers=headers)
                if path in start.paths and path not in of_the_model:
                    assert answer.status_code == 200, (path, answer.text)
                else:
                    assert answer.status_code == 501, (path, answer.text)

    for at, args in enumerate(((), ("--reranking",))):
        (tmp_path / str(at)).mkdir()
        run(story(tmp_path / str(at), args), 90.0)
