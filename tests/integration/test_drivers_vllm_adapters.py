"""The vLLM driver over a real connection: what it sends, how long it waits, and what it makes of no answer at all."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.drivers import asking, lora, vllm
from nodeagent.drivers.driver import AdapterDone, AdapterFault, ListedAdapter
from nodeagent.drivers.lora_answers import FOLDER
from nodeagent.drivers.vllm import VllmDriver
from schemas import codes
from schemas.adapternames import of_engine_name
from schemas.beacons import EngineCounters
from tests.support.aio import run
from tests.support.ports import free_port
from tests.support.scripted_http import Asked, ScriptedHttp, response, scripted_http

NAME = "sql@0123abcd"
PATH = "/srv/yard/files/sets/key"
ADDED = response(200, f"Success: LoRA adapter '{NAME}' added successfully.", "text/plain")
DRIVER = VllmDriver("", {})

Reply = Callable[[Asked], bytes | None] | bytes | None


def told(reply: Reply, question: Callable[[ScriptedHttp], Awaitable[Any]]) -> Any:
    """What the driver makes of `reply`."""

    async def story() -> Any:
        async with scripted_http(reply) as server:
            return await question(server)

    return run(story())


def load(reply: Reply, timeout_s: float = 5.0, path: str = PATH) -> AdapterDone | AdapterFault:
    return told(
        reply,
        lambda server: DRIVER.load_adapter(
            server.endpoint, "ek", name=NAME, path=path, timeout_s=timeout_s
        ),
    )


def unload(reply: Reply, timeout_s: float = 5.0) -> AdapterDone | AdapterFault:
    return told(
        reply,
        lambda server: DRIVER.unload_adapter(server.endpoint, "ek", name=NAME, timeout_s=timeout_s),
    )


def listed(reply: Reply) -> tuple[ListedAdapter, ...] | AdapterFault:
    return told(reply, lambda server: DRIVER.list_adapters(server.endpoint, "ek"))


def routes(reply: Reply) -> bool | None:
    return told(reply, lambda server: DRIVER.loads_adapters(server.endpoint, "ek"))


def running(reply: Reply) -> frozenset[str] | None:
    return told(reply, lambda server: DRIVER.running_adapters(server.endpoint, "ek"))


def error(status: int, kind: str, message: str) -> bytes:
    inner = {"message": message, "type": kind, "param": None, "code": status}
    return response(status, json.dumps({"error": inner}))


def test_req_b47_a_load_and_an_unload_are_posted_as_json_with_the_key() -> None:
    async def story() -> None:
        async with scripted_http(ADDED) as server:
            url = server.endpoint
            done = await DRIVER.load_adapter(url, "ek", name=NAME, path=PATH, timeout_s=5)
            assert done == AdapterDone()
            done = await DRIVER.unload_adapter(url, "ek", name=NAME, timeout_s=5)
            assert done == AdapterDone()
            first, second = server.asked
            assert (first.method, first.path) == ("POST", "/v1/load_lora_adapter")
            assert first.json() == {"lora_name": NAME, "lora_path": PATH}
            assert (second.method, second.path) == ("POST", "/v1/unload_lora_adapter")
            assert second.json() == {"lora_name": NAME}
            for asked in server.asked:
                assert asked.headers["content-type"] == "application/json"
                assert asked.headers["authorization"] == "Bearer ek"

    run(story())


def test_req_b26_the_key_is_shown_only_where_there_is_one() -> None:
    async def story() -> None:
        async with scripted_http(response(200, '{"data":[]}')) as server:
            await DRIVER.list_adapters(server.endpoint, "")
            await DRIVER.list_adapters(server.endpoint, "ek")
            assert [asked.headers.get("authorization") for asked in server.asked] == [
                None,
                "Bearer ek",
            ]

    run(story())


def test_a_name_of_any_signs_arrives_as_it_is() -> None:
    name = 'a "b", c\\d/é\u2028@0123abcd'

    async def story() -> None:
        async with scripted_http(ADDED) as server:
            await DRIVER.load_adapter(server.endpoint, "", name=name, path=PATH, timeout_s=5)
            assert server.asked[0].json()["lora_name"] == name

    run(story())


def test_req_b59_a_load_that_takes_too_long_is_the_replica_s_fault() -> None:
    found = load(None, timeout_s=0.1)
    assert found == AdapterFault(
        whose="replica", code=codes.LOAD_TIMEOUT, text="no answer to the load within 0.1 s"
    )


def test_req_bugb8_each_call_has_its_own_time() -> None:
    assert isinstance(load(ADDED, timeout_s=5), AdapterDone)
    found = unload(None, timeout_s=0.1)
    assert isinstance(found, AdapterFault)
    assert (found.code, found.whose, found.known) == (codes.LOAD_FAILED, "replica", True)
    assert "unload within 0.1 s" in found.text


def test_nobody_at_the_port_is_the_replica_s_fault() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def story() -> None:
        found = await DRIVER.load_adapter(url, "", name=NAME, path=PATH, timeout_s=5)
        assert found == AdapterFault(
            whose="replica", code=codes.LOAD_FAILED, text="nobody answers at its port"
        )
        assert isinstance(await DRIVER.list_adapters(url, ""), AdapterFault)
        assert await DRIVER.loads_adapters(url, "") is None
        assert await DRIVER.running_adapters(url, "") is None

    run(story())


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nSucc"])
def test_an_engine_that_ends_in_a_load_is_the_replica_s_until_a_second_one_does(
    reply: bytes,
) -> None:
    found = load(reply)
    assert isinstance(found, AdapterFault)
    assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, False)
    # The second one has to say the same.
    assert found == load(reply)


def test_what_the_engine_says_does_not_show_paths_of_the_node(tmp_path: Path) -> None:
    real = tmp_path / "real" / "0123456789"
    real.mkdir(parents=True)
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "real")
    path = str(linked / "0123456789")
    for said in (path, str(real)):
        found = load(error(500, "InternalServerError", f"odd tensor in {said}"), path=path)
        assert isinstance(found, AdapterFault)
        assert found.text == f"odd tensor in {FOLDER}"


def test_req_b8_of_a_long_answer_the_beginning_is_enough() -> None:
    rank = "LoRA rank 64 is greater than max_lora_rank 16. " + "trace " * 2000
    found = load(error(500, "InternalServerError", rank))
    assert isinstance(found, AdapterFault)
    # Cut, it is no JSON any more; what it begins with still tells.
    assert (found.whose, found.code) == ("adapter", codes.RANK_TOO_HIGH)

    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"y" * 8000
    assert load(endless) == AdapterDone()


def test_req_b8_a_list_above_its_bound_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "LIST_LIMIT_BYTES", 1000)
    found = listed(response(200, '{"data":[' + " " * 2000 + "]}"))
    assert isinstance(found, AdapterFault)
    assert "1000 bytes" in found.text
    assert listed(response(200, '{"data":[' + " " * 900 + "]}")) == ()


def card(name: object, root: object = "/m", parent: object = None) -> dict[str, object]:
    return {"id": name, "object": "model", "owned_by": "vllm", "root": root, "parent": parent}


def test_req_b25_adapters_are_what_has_a_parent() -> None:
    cards = [card("base"), card("also base"), card(NAME, PATH, "base"), card("x", None, "base")]
    cards += [card("empty", "/e", "")]
    found = listed(response(200, json.dumps({"object": "list", "data": cards})))
    assert found == (ListedAdapter(name=NAME, root=PATH), ListedAdapter(name="x"))


@pytest.mark.parametrize(
    "reply",
    [
        response(200, "<html>"),
        response(200, "[]"),
        response(200, '{"data":null}'),
        response(200, '{"data":[{"parent":"base"}]}'),
        response(200, '{"data":[{"id":7,"parent":"base"}]}'),
        response(200, b'{"data":[{"id":"\xff","parent":"base"}]}'),
        response(201, '{"data":[]}'),
        response(204),
        response(401, '{"error":"Unauthorized"}'),
        response(500, "Internal Server Error"),
        b"",
    ],
)
def test_req_b26_anything_but_a_whole_list_is_an_error(reply: bytes) -> None:
    found = listed(reply)
    assert isinstance(found, AdapterFault)
    assert (found.whose, found.code, found.known) == ("replica", codes.LOAD_FAILED, True)
    assert found.text


def test_req_b6_one_read_of_the_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lora.LIST_S == 5.0
    monkeypatch.setattr(lora, "LIST_S", 0.1)
    found = listed(None)
    assert isinstance(found, AdapterFault)
    assert found.text == "no answer to the list within 0.1 s"


ABSENT = "The lora adapter '{}' cannot be found."


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (error(404, "NotFoundError", ABSENT.format(lora.NOBODY)), True),
        (error(400, "InvalidUserInput", ABSENT.format(lora.NOBODY)), True),
        (
            response(
                404,
                json.dumps(
                    {
                        "error": {
                            "message": f"The model `{lora.NOBODY}` does not exist.",
                            "type": "invalid_request_error",
                            "param": "model",
                            "code": "model_not_found",
                        }
                    }
                ),
            ),
            True,
        ),
        (response(404, '{"detail":"Not Found"}'), False),
        (response(404), False),
        (response(405, '{"detail":"Method Not Allowed"}'), False),
        (response(401, '{"error":"Unauthorized"}'), None),
        (response(503), None),
        (b"", None),
    ],
)
def test_req_bugb7_the_routes_are_probed_and_nothing_is_changed_by_it(
    reply: bytes, expected: bool | None
) -> None:
    assert routes(reply) is expected


def test_the_probe_asks_for_what_cannot_be_there() -> None:
    assert of_engine_name(lora.NOBODY) is None

    async def story() -> None:
        async with scripted_http(response(404, '{"detail":"Not Found"}')) as server:
            await DRIVER.loads_adapters(server.endpoint, "ek")
            (asked,) = server.asked
            assert (asked.path, asked.json()) == (
                "/v1/unload_lora_adapter",
                {"lora_name": lora.NOBODY},
            )

    run(story())


def test_running_adapters_are_read_off_its_metrics() -> None:
    page = (
        "vllm:num_requests_running 1\n"
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a@00000000",'
        'waiting_lora_adapters=""} 1.7e9\n'
    )
    assert running(response(200, page, "text/plain")) == {"a@00000000"}
    assert running(response(200, "vllm:num_requests_running 1\n", "text/plain")) is None
    assert running(response(500, page, "text/plain")) is None
    assert running(b"") is None


def test_a_page_that_got_long_by_its_adapters_tells_what_runs_all_the_same() -> None:
    """Every set of adapters that ever ran together stays on it."""
    lines = "".join(
        f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="a{n}@00000000",'
        f'waiting_lora_adapters=""}} {1_700_000_000 + n}.5\n'
        for n in range(50_000)
    )
    head = "vllm:num_requests_running 3.0\nvllm:generation_tokens_total 71.0\n"
    reply = response(200, head + lines, "text/plain")
    assert len(reply) > 4 << 20
    assert running(reply) == {"a49999@00000000"}
    told_of = told(reply, lambda server: DRIVER.counters(server.endpoint, "ek"))
    assert told_of == EngineCounters(inflight=3, requests_total=71)


def test_half_a_number_at_the_end_of_what_was_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "vllm:num_requests_running 1.0\nvllm:num_requests_waiting 1234.0\n"
    monkeypatch.setattr(vllm, "_COUNTERS_BYTES", page.index("34.0"))
    reply = response(200, page, "text/plain")
    found = told(reply, lambda server: DRIVER.counters(server.endpoint, "ek"))
    assert found == EngineCounters(inflight=1)


@pytest.mark.parametrize(
    ("reply", "why"),
    [(None, "late"), (b"", "broken"), (b"SSH-2.0\r\n", "broken"), (response(200, "y" * 99), "")],
)
def test_why_there_is_no_answer_is_told(reply: bytes | None, why: str) -> None:
    def asked(limit_bytes: int) -> asking.Answer | asking.NoAnswer:
        return told(
            reply,
            lambda server: asking.ask(
                server.endpoint, "GET", "/x", timeout_s=0.2, limit_bytes=limit_bytes
            ),
        )

    found = asked(99)
    if why:
        assert found == asking.NoAnswer(why=why)  # pyright: ignore[reportArgumentType]
    else:
        assert isinstance(found, asking.Answer)
        assert asked(98) == asking.NoAnswer(why="too_long")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1", "nowhere", "http://[::1]:1"])
def test_an_endpoint_that_leads_nowhere_is_nobody(endpoint: str) -> None:
    found = run(asking.ask(endpoint, "GET", "/x"))
    assert found == asking.NoAnswer(why="unreachable")
