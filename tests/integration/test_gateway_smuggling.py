"""Requests and answers that two readers could take for two different ones, through a gateway to an engine."""

import asyncio
import re
from pathlib import Path

import pytest

from gateway.http.limits import ServerLimits
from tests.support.http_attacks import ANSWERS, ATTACKS, Attack
from tests.support.http_wire import Peer, Yard, answer, connected, engine, gateway, post, run_on

SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"


@pytest.mark.parametrize("cut", ["whole", "in crumbs"])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_what_the_table_says(name: str, cut: str) -> None:
    attack: Attack = ATTACKS[name]
    seen: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            head, body = await peer.message()
            seen.append(head)
            await peer.send(answer(body))

    async def story() -> None:
        limits = ServerLimits(linger_s=0.2)
        async with (
            engine(script) as raw,
            gateway(Yard(raw.url), limits=limits) as yard,
        ):
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                step = len(attack.sent) if cut == "whole" else 7
                for start in range(0, len(attack.sent), step):
                    client.writer.write(attack.sent[start : start + step])
                    await asyncio.sleep(0)
                for status in attack.got:
                    head, _ = await client.message()
                    assert head.startswith(b"HTTP/1.1 %d " % status)
                if attack.ends:
                    assert await client.rest() == b""
                else:
                    await client.send(post(b"still here"))
                    _, body = await client.message()
                    assert body == b"still here"

    run_on("uvloop", story())
    assert len(seen) == attack.engine + (not attack.ends)
    for head in seen:
        assert len(re.findall(rb"(?i)\r\n(?:content[-_]length|transfer[-_]encoding):", head)) <= 1
        assert b"upgrade" not in head.lower()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_engine_gone_mad_reaches_nobody_else(name: str) -> None:
    sent, status = ANSWERS[name]
    first = True

    async def script(peer: Peer) -> None:
        nonlocal first
        while True:
            _, body = await peer.message()
            mad, first = first, False
            await peer.send(sent if mad else answer(body))

    async def story() -> None:
        async with engine(script) as raw, gateway(Yard(raw.url)) as yard:
            assert yard.server is not None
            async with connected(yard.server.port) as client:
                await client.send(post(b"first"))
                head, body = await client.message()
                assert head.startswith(b"HTTP/1.1 %d " % status)
                assert b"set-cookie" not in head.lower()
                assert b"evil" not in body
            async with connected(yard.server.port) as client:
                await client.send(post(b"second"))
                head, body = await client.message()
                assert head.startswith(b"HTTP/1.1 200 ")
                assert body == b"second"

    run_on("uvloop", story())


def test_the_page_lists_every_attack_with_what_it_gets() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", SECURITY.read_text(), re.MULTILINE)
    said = {name.strip("`"): got for name, got in rows}
    for name, attack in ATTACKS.items():
        assert said[name].startswith(", ".join(map(str, attack.got))), name
    for name, (_, status) in ANSWERS.items():
        assert said[name].startswith(str(status)), name
