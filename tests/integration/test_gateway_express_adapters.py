"""Requests for adapters without a task, while what their names stand for and what their gateway counts on changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.adapterdesk import Seeking
from gateway.domain.admission import Route
from gateway.gateway import Run
from gateway.http.exchange import Exchange
from schemas.adapternames import engine_name, pin_name
from tests.support.aio import run, until
from tests.support.express_both import told_apart
from tests.support.express_yard import CHAT, ask, body_of, fields_of, status_of, watch
from tests.support.gateway_agent import a_yard_with, agent, nothing_left
from tests.support.gateway_agent import refused as refusing
from tests.support.gateway_world import an_adapter
from tests.support.gateway_yard import memory_yard
from tests.support.http_wire import Peer, connected

POET = engine_name("poet", an_adapter().version)


async def said(peer: Peer, name: str) -> str:
    """What the engine was asked for, on one connection after another request."""
    await peer.send(ask(body_of(name)))
    head, body = await peer.message()
    assert status_of(head) == 200, body
    assert json.loads(body)["model"] == name
    return json.loads(body)["choices"][0]["message"]["content"].partition("]")[0][1:]


def test_an_alias_that_moves_is_told_of_whom_it_moved_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with connected(gateway.port) as peer:
                for _ in range(3):
                    assert await said(peer, "rhymer") == POET
                await yard.tell(yard.story.adapter("poet"))
                seq = await yard.tell(yard.story.adapter("bard", aliases=("rhymer",)))
                await yard.applied(gateway, seq)
                for _ in range(3):
                    assert (await said(peer, "rhymer")).startswith("bard@")
                assert await said(peer, "poet") == POET
            nothing_left(gateway)
        lines = [json.loads(line) for block in yard.access for line in block.splitlines()]
        assert [line["adapter"] for line in lines] == [*["poet"] * 3, *["bard"] * 3, "poet"]

    run(story())


def test_an_answer_that_is_there_is_asked_for_once_whatever_became_of_its_pin(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            (engine,) = await a_yard_with(yard, made)
            gateway = await yard.gateway()
            async with connected(gateway.port) as peer:
                for _ in range(2):
                    assert await said(peer, "poet") == POET
                ways = watch(gateway)
                # More than is taken in one piece.
                engine.tokens = 20_000
                engine.gate.clear()
                await peer.send(ask(body_of("poet")))
                await engine.until_seen(3)
                asks = len(made.asks)
                made.answers = [refusing(whose="adapter")] * 3
                pin = pin_name("poet", an_adapter().version)
                await yard.applied(gateway, await made.evict("r-1", "poet"))
                held = gateway.gateway.pins.get("r-1", pin)
                assert held is not None
                assert not held.engine_name
                assert engine.names is not None
                engine.names.add(POET)  # that is where it was, as long as it was asked
                engine.gate.set()
                head, body = await peer.message()
                assert status_of(head) == 200, body
                assert fields_of(head)["x-yard-adapter"] == "hit"
                assert ways.all == (1, 0, 1)
                assert len(made.asks) == asks
                assert len(engine.seen) == 3
            await until(lambda: not gateway.gateway.usage.by_replica, "the end of the request")
            nothing_left(gateway)

    run(story())


def test_what_is_asked_ahead_is_asked_once_and_told_of_whom_it_was_asked_for(
    tmp_path: Path,
) -> None:
    """One client of three leaves before the answer is there; the load is the first one's all the same."""

    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            ways = watch(gateway)
            made.gate.clear()
            async with connected(gateway.port) as first, connected(gateway.port) as other:
                await first.send(ask(body_of("poet")))
                await made.until_asked(1)
                await other.send(ask(body_of("poet")))
                async with connected(gateway.port) as gone:
                    await gone.send(ask(body_of("poet")))
                    await until(
                        lambda: gateway.gateway.usage.by_replica == {"r-1": 3}, "all to wait"
                    )
                await until(
                    lambda: gateway.gateway.usage.by_replica == {"r-1": 2}, "one to be gone"
                )
                made.gate.set()
                hows = []
                for peer in (first, other):
                    head, _ = await peer.message()
                    assert status_of(head) == 200
                    hows.append(fields_of(head)["x-yard-adapter"])
                assert hows == ["loaded", "joined"]
                assert await said(other, "poet") == POET
            assert len(made.asks) == 1
            assert len(made.loads) == 1
            # Two found no kept connection to their engine.
            assert ways.all == (4, 0, 2)
            nothing_left(gateway)

    run(story())


def test_what_was_asked_ahead_does_not_answer_another_question(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            state, adapters = gateway.gateway, gateway.adapters
            async with connected(gateway.port) as peer:
                assert await said(peer, "poet") == POET
            await until(lambda: state.desk.pins.trusted(state.clock.now_s()) == 1, "a pin")
            state.pins.revoke("r-1", pin_name("poet", an_adapter().version))
            route = state.admit("poet", CHAT, accepted=True)
            assert isinstance(route, Route)
            run_ = state.start(route, lambda _: None, Seeking("poet"))
            assert isinstance(run_, Run)
            adapters.ask_ahead(run_)
            # Its agent is silent for a moment, so it goes out by what the log says; and its engine has lost it.
            state.desk.unheard("n1", 2.0)
            assert await adapters.secure(run_, Exchange()) == POET
            state.desk.heard("n1")
            assert await adapters.secure(run_, Exchange(), gone=POET) == POET
            assert [one.gone for one in made.asks] == ["", "", POET]
            state.finish(run_, used=False)
            nothing_left(gateway)

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_is_loaded_for_it_is_answered_as_by_the_handler(
    tmp_path: Path, stream: bool
) -> None:
    """Loaded, joined, and there by its agent's word after the pin was not trusted any more."""
    body = body_of("poet", stream=stream)

    async def play(data: Path, express: bool) -> tuple[list[Any], tuple[int, int, int]]:
        async with memory_yard(data) as yard, agent(yard) as made:
            await a_yard_with(yard, made)
            gateway = await yard.gateway()
            seen: list[Any] = []
            async with connected(gateway.port) as one, connected(gateway.port) as other:
                await one.send(ask(body_of("m")))
                await other.send(ask(body_of("m")))
                await one.message()
                await other.message()
                ways = watch(gateway, express=express)
                made.gate.clear()
                await one.send(ask(body))
                await made.until_asked(1)
                await other.send(ask(body))
                await until(lambda: gateway.gateway.usage.by_replica == {"r-1": 2}, "both to wait")
                made.gate.set()
                answers = [await one.message(), await other.message()]
                pin = pin_name("poet", an_adapter().version)
                held = gateway.gateway.pins.get("r-1", pin)
                assert held is not None
                held.proven_s = None
                await one.send(ask(body))
                answers.append(await one.message())
                for head, content in answers:
                    fields = told_apart(head)
                    waited = int(fields.pop("x-yard-waited-ms"))
                    seen.append((status_of(head), fields, content, waited < 10_000))
            assert [fields["x-yard-adapter"] for _, fields, _, _ in seen] == [
                "loaded",
                "joined",
                "hit",
            ]
            numbers = gateway.metrics.render().decode().splitlines()
            seen.append(
                [
                    n
                    for n in numbers
                    if n.startswith(("yard_gateway_adapter", "yard_gateway_requests_t"))
                    and "_sum" not in n
                    and "_bucket" not in n
                ]
            )
            nothing_left(gateway)
            marks = [t for kept in gateway.timelines._by_model.values() for t in kept]
            seen.append([sorted(t.marks) for t in marks])
        lines = [json.loads(line) for block in yard.access for line in block.splitlines()]
        told = ("model", "adapter", "how", "code", "replica", "complete")
        seen.append([[line[name] for name in told] for line in lines])
        assert all(line["waited_ms"] <= line["duration_ms"] for line in lines)
        return seen, ways.all

    async def story() -> None:
        with_it, ways = await play(tmp_path / "one", express=True)
        without, others = await play(tmp_path / "other", express=False)
        assert with_it == without
        assert (ways, others) == ((3, 0, 0), (0, 3, 0))

    run(story())


@pytest.mark.parametrize("how", ["the gateway", "the replica", "the agent"])
def test_what_ends_while_an_agent_is_asked_is_the_handlers_to_tell(
    tmp_path: Path, how: str
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard, agent(yard) as made:
            await a_yard_with(yard, made, "r-1", "r-2")
            gateway = await yard.gateway()
            async with connected(gateway.port) as peer:
                await peer.send(ask(body_of("m")))
                await peer.message()
                ways = watch(gateway)
                made.gate.clear()
                if how == "the agent":
                    made.answers = [refusing(whose="adapter")]
                await peer.send(ask(body_of("poet")))
                await made.until_asked(1)
                if how == "the gateway":
                    gateway.adapters.dismiss()
                elif how == "the replica":
                    lost = made.asks[0].replica
                    await yard.replica(made.engines[lost], lost, "stopped", adapter_slots=4)
                    await made.until_asked(2)
                    made.gate.set()
                head, body = await peer.message()
                told = json.loads(body)
                assert (status_of(head), told.get("error", told).get("code")) == {
                    "the gateway": (503, "draining"),
                    "the replica": (200, None),
                    "the agent": (400, "invalid_request"),
                }[how]
                assert ways.all == (1, 0, 1)
            made.gate.set()
            await until(lambda: gateway.adapters.open_questions == 0, "the questions to end")
            nothing_left(gateway)

    run(story())
