"""When vLLM counts as ready: it is well, and it is this launch's engine that says so."""

import pytest

from nodeagent.drivers.vllm import VllmDriver
from tests.support.aio import run
from tests.support.fake_vllm import fake_vllm, tell
from tests.support.ports import free_port
from tests.support.scripted_http import Asked, response, scripted_http

DRIVER = VllmDriver("", {})


def test_it_is_ready_when_it_is_well_and_takes_the_launch_s_key() -> None:
    with fake_vllm(key="ek") as endpoint:
        assert run(DRIVER.probe(endpoint, "ek"))
        # Another engine on that port says that it is well, too.
        assert not run(DRIVER.probe(endpoint, "another launch's"))
        assert not run(DRIVER.probe(endpoint, "ek", health="/nowhere"))
        tell(endpoint, "fault", fault="list-500", times=1)
        assert not run(DRIVER.probe(endpoint, "ek"))
        assert run(DRIVER.probe(endpoint, "ek"))
    assert not run(DRIVER.probe(f"http://127.0.0.1:{free_port()}", "ek"))


@pytest.mark.parametrize("status", [503, 500, 404, 204])
def test_an_engine_that_is_not_well_is_not_ready(status: int) -> None:
    def reply(asked: Asked) -> bytes:
        return response(status if asked.path == "/health" else 200, "{}")

    async def story() -> None:
        async with scripted_http(reply) as server:
            assert not await DRIVER.probe(server.endpoint, "ek")
            assert {asked.path for asked in server.asked} == {"/health", "/v1/models"}

    run(story())


def test_both_questions_are_asked_at_once_so_that_one_probe_takes_no_longer_than_one() -> None:
    def reply(asked: Asked) -> bytes | None:
        return None if asked.path == "/health" else response(200, "{}")

    async def story() -> None:
        async with scripted_http(reply) as server:
            assert not await DRIVER.probe(server.endpoint, "ek")
            assert {asked.path for asked in server.asked} == {"/health", "/v1/models"}

    run(story())
