"""`yardctl up` and the demo speak to this machine straight, whatever proxy the environment names."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controlplane.ctl import up
from controlplane.ctl.demo import registry_environment
from controlplane.ctl.supervisor import Supervisor
from controlplane.ctl.up import NODE, Yard
from events.secrets import api_token_path, ensure_secret
from tests.support.aio import run

MODELS = [{"name": "off", "scaling": {"max": 0}}, {"name": "smol", "scaling": {"max": 1}}]
NODES = [{"id": NODE, "running": True}]


def yard_story(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[Yard], Awaitable[None]],
) -> list[bytes]:
    """Runs `story` with an API that answers and a proxy in the environment; what the proxy was sent."""
    through: list[bytes] = []

    async def api(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1]
        body = json.dumps({"data": MODELS if path == b"/v1/models" else NODES}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        writer.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        through.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def whole() -> None:
        async with (
            await asyncio.start_server(api, "127.0.0.1", 0) as served,
            await asyncio.start_server(proxy, "127.0.0.1", 0) as leading_out,
        ):
            port = served.sockets[0].getsockname()[1]
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                monkeypatch.setenv(
                    name, f"http://127.0.0.1:{leading_out.sockets[0].getsockname()[1]}"
                )
            ensure_secret(api_token_path(tmp_path))
            yard = Yard(
                yard_id="y",
                data=tmp_path,
                gateway_port=port,
                api_port=port,
                nats_port=1,
                monitoring_port=2,
            )
            await story(yard)

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    run(whole())
    return through


def test_the_apis_token_never_leaves_for_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        assert await up._first_model(yard) == "smol"
        await up._wait_for_node(yard, Supervisor(print, lambda: None), 5.0)

    assert yard_story(tmp_path, monkeypatch, story) == []


def test_the_demos_registry_is_asked_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "intranet")
    told = registry_environment("http://127.0.0.1:9")
    assert told["HF_ENDPOINT"] == "http://127.0.0.1:9"
    assert told["no_proxy"] == told["NO_PROXY"] == "intranet,127.0.0.1,localhost"
