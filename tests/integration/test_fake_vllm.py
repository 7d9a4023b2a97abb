"""The fake vLLM answers as vLLM 0.32 was measured to, or every test of parking that uses it would prove nothing."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nodeagent import processes
from nodeagent.drivers.vllm import VllmDriver
from schemas.beacons import EngineCounters
from tests.support import fake_nvml
from tests.support.aio import run, until
from tests.support.fake_vllm import FAKE, fake_vllm
from tests.support.scripted import ask

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "a"}]}
SHORT_S = 0.4
"""Long enough for a fake to answer, when it would."""


def post(endpoint: str, path: str, body: object = None, **fields) -> httpx.Response:
    return httpx.post(f"{endpoint}{path}", json=body, timeout=fields.pop("timeout", 5), **fields)


def test_it_answers_whole_and_as_a_stream() -> None:
    with fake_vllm() as endpoint:
        whole = post(endpoint, "/v1/chat/completions", {**CHAT, "max_tokens": 3}).json()
        assert whole["choices"][0]["message"]["content"] == "w0 w1 w2 "
        asked = {**CHAT, "stream": True}
        with httpx.stream("POST", f"{endpoint}/v1/chat/completions", json=asked) as answer:
            frames = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        words = [
            json.loads(frame)["choices"][0]["delta"].get("content", "") for frame in frames[:-1]
        ]
        assert ("".join(words), frames[-1]) == ("w0 w1 w2 w3 w4 ", "[DONE]")
        text = post(endpoint, "/v1/completions", {"model": "smollm2", "prompt": "x"}).json()
        assert text["choices"][0]["text"] == "w0 w1 w2 w3 w4 "


def test_it_lists_its_base_model_and_knows_no_other() -> None:
    with fake_vllm() as endpoint:
        (card,) = httpx.get(f"{endpoint}/v1/models").json()["data"]
        assert (card["id"], card["root"], card["parent"]) == ("smollm2", "/models/smollm2", None)
        unknown = post(endpoint, "/v1/chat/completions", {**CHAT, "model": "zzz"})
        assert unknown.status_code == 404
        error = unknown.json()["error"]
        assert error["type"] == "NotFoundError"
        assert error["message"] == "The model `zzz` does not exist. Valid aliases: smollm2."


def test_it_asks_for_its_key_below_v1_alone() -> None:
    with fake_vllm(key="ek") as endpoint:
        assert post(endpoint, "/v1/chat/completions", CHAT).status_code == 401
        assert httpx.get(f"{endpoint}/v1/models").status_code == 401
        right = {"Authorization": "Bearer ek"}
        assert post(endpoint, "/v1/chat/completions", CHAT, headers=right).status_code == 200
        for path in ("/health", "/metrics", "/is_sleeping"):
            assert httpx.get(f"{endpoint}{path}").status_code == 200
        assert post(endpoint, "/sleep?level=1").status_code == 200


def test_asleep_it_is_healthy_and_answers_no_completion_until_it_wakes() -> None:
    with fake_vllm() as endpoint:
        asleep = post(endpoint, "/sleep?level=1&mode=wait")
        assert (asleep.status_code, asleep.text) == (200, '{"status": "sleeping", "level": 1}')
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": True}
        with pytest.raises(httpx.ReadTimeout):
            post(endpoint, "/v1/chat/completions", CHAT, timeout=SHORT_S)
        assert httpx.get(f"{endpoint}/health").status_code == 200
        assert httpx.get(f"{endpoint}/v1/models").status_code == 200
        awake = post(endpoint, "/wake_up")
        assert (awake.status_code, awake.json()) == (200, {"status": "awake", "tags": None})
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": False}
        assert post(endpoint, "/v1/chat/completions", CHAT).status_code == 200
        assert ask(endpoint, "/fake/counters")["asked_asleep"] == 1


def test_it_sleeps_only_with_both_the_flag_and_the_development_mode() -> None:
    with fake_vllm(development=False) as endpoint:
        absent = post(endpoint, "/sleep?level=1")
        assert (absent.status_code, absent.json()) == (404, {"detail": "Not Found"})
        assert httpx.get(f"{endpoint}/is_sleeping").status_code == 404
    with fake_vllm(sleeps=False) as endpoint:
        assert post(endpoint, "/sleep?level=1").status_code == 500


@pytest.mark.parametrize(("mode", "words"), [("wait", 40), ("abort", None)])
def test_a_sleep_waits_for_running_requests_or_cuts_them(mode: str, words: int | None) -> None:
    async def story() -> None:
        with fake_vllm(tokens=40, pace_s=0.01) as endpoint:
            async with httpx.AsyncClient(timeout=10) as client:
                url = f"{endpoint}/v1/completions"
                asked = {"model": "smollm2", "prompt": "x"}
                running = asyncio.create_task(client.post(url, json=asked))
                driver = VllmDriver()

                async def one() -> bool:
                    return (await driver.counters(endpoint, "")).inflight == 1

                await until(one, "one running request in its metrics")
                assert (
                    await client.post(f"{endpoint}/sleep?level=1&mode={mode}")
                ).status_code == 200
                if words is None:
                    with pytest.raises(httpx.RemoteProtocolError):
                        await running
                else:
                    text = (await running).json()["choices"][0]["text"]
                    assert len(text.split()) == words
                counters = ask(endpoint, "/fake/counters")
                assert counters["aborted" if words is None else "finished"] == 1
                assert counters["sleeping"]

    run(story())


def test_it_says_so_before_the_sleep_is_done() -> None:
    async def story() -> None:
        with fake_vllm(lag_s=0.3) as endpoint:
            assert post(endpoint, "/sleep?level=1&mode=wait").status_code == 200
            assert ask(endpoint, "/is_sleeping") == {"is_sleeping": False}
            await until(lambda: ask(endpoint, "/is_sleeping")["is_sleeping"], "its sleep")

    run(story())


def test_it_tells_what_it_has_on_the_device_and_in_ram(tmp_path: Path) -> None:
    state = tmp_path / "nvml.json"
    cards = fake_nvml.a_card(0), fake_nvml.a_card(1)
    fake_nvml.write(state, *cards)
    device = {"FAKE_NVML": str(state), "CUDA_VISIBLE_DEVICES": cards[1]["uuid"]}

    def used_mib() -> int:
        first, second = fake_nvml.read(state)["cards"]
        assert first["processes"] == []
        return sum(process["bytes"] for process in second["processes"]) >> 20

    with fake_vllm(weights_mib=20, kv_mib=5, context_mib=2, device=device) as endpoint:
        assert used_mib() == 27
        before = ram_mib(endpoint)
        post(endpoint, "/sleep?level=1")
        assert used_mib() == 2
        assert ram_mib(endpoint) >= before + 18
        post(endpoint, "/wake_up")
        assert used_mib() == 27
    fake_nvml.write(state, *cards)
    with fake_vllm(weights_mib=20, faults="sleep-keeps", device=device) as endpoint:
        post(endpoint, "/sleep?level=1")
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": True}
        assert used_mib() == 20


def ram_mib(endpoint: str) -> int:
    return processes.resident_bytes(ask(endpoint, "/fake/counters")["pid"]) >> 20


def test_its_sleep_fails_as_told() -> None:
    with fake_vllm(faults="sleep-hangs") as endpoint, pytest.raises(httpx.ReadTimeout):
        post(endpoint, "/sleep?level=1", timeout=SHORT_S)
    with fake_vllm(faults="sleep-never-ends") as endpoint:
        assert post(endpoint, "/sleep?level=1").status_code == 200
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": False}
        with pytest.raises(httpx.ReadTimeout):
            post(endpoint, "/v1/chat/completions", CHAT, timeout=SHORT_S)
    with fake_vllm(faults="sleep-fails") as endpoint:
        assert post(endpoint, "/sleep?level=1").status_code == 500


def test_its_waking_fails_as_told() -> None:
    with fake_vllm(faults="wake-hangs") as endpoint:
        post(endpoint, "/sleep?level=1")
        with pytest.raises(httpx.ReadTimeout):
            post(endpoint, "/wake_up", timeout=SHORT_S)
    with fake_vllm(faults="wake-never-ends") as endpoint:
        post(endpoint, "/sleep?level=1")
        assert post(endpoint, "/wake_up").status_code == 200
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": True}
    with fake_vllm(faults="first-hangs") as endpoint:
        post(endpoint, "/sleep?level=1")
        post(endpoint, "/wake_up")
        assert httpx.get(f"{endpoint}/is_sleeping").json() == {"is_sleeping": False}
        with pytest.raises(httpx.ReadTimeout):
            post(endpoint, "/v1/chat/completions", CHAT, timeout=SHORT_S)


@pytest.mark.parametrize("step", ["sleep", "wake"])
def test_it_dies_after_its_answer_as_told(step: str) -> None:
    async def story() -> None:
        with fake_vllm(faults=f"{step}-dies") as endpoint:
            assert post(endpoint, "/sleep?level=1").status_code == 200
            if step == "wake":
                assert post(endpoint, "/wake_up").status_code == 200

            def gone() -> bool:
                try:
                    httpx.get(f"{endpoint}/health")
                except httpx.TransportError:
                    return True
                return False

            await until(gone, "its end")

    run(story())


def test_its_metrics_are_those_the_driver_reads() -> None:
    with fake_vllm() as endpoint:
        post(endpoint, "/v1/chat/completions", {**CHAT, "max_tokens": 3})
        told = run(VllmDriver().counters(endpoint, ""))
        assert told == EngineCounters(inflight=0, requests_total=3)


@pytest.mark.parametrize(
    "words",
    [("serve", "m", "--no-such-flag"), ("serve", "m", "--port"), ("serve",), ("chat", "m")],
)
def test_it_ends_as_argparse_does_at_a_command_line_it_does_not_know(
    words: tuple[str, ...],
) -> None:
    argv = (sys.executable, "-I", "-S", str(FAKE), *words)
    ended = subprocess.run(argv, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"error: " in ended.stderr
