"""How an agent ends a serving replica: never under a request, except when the wish says so."""

import asyncio

import httpx
import pytest

from schemas.beacons import GatewayBeacon
from tests.support.agent_yard import Hand, a_stop, an_item, beside, memory_yard
from tests.support.aio import run

LONG = ("--tokens", "400", "--pace-s", "0.01")


async def a_stream(endpoint: str, replica: str, ended: list[str]) -> None:
    """Reads a streamed answer to its end, and notes how it ended."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    headers = {"Authorization": f"Bearer key-of-{replica}"}
    try:
        async with (
            httpx.AsyncClient(timeout=20) as client,
            client.stream(
                "POST", f"{endpoint}/v1/chat/completions", json=body, headers=headers
            ) as answer,
        ):
            text = "".join([part async for part in answer.aiter_text()])
        ended.append("whole" if "[DONE]" in text else "short")
    except httpx.HTTPError as error:
        ended.append(type(error).__name__)


class Busy:
    """A gateway with requests running on r-1."""

    def __init__(self, hand: Hand, name: str = "g2") -> None:
        self.hand = hand
        self.name = name
        self.inflight = 1
        self.position: int | None = None

    async def beat(self) -> None:
        n = 0
        while True:
            n += 1
            newest = self.hand.seen[-1].seq if self.hand.seen else 0
            body = GatewayBeacon(
                gateway=self.name,
                incarnation="x",
                n=n,
                position=newest if self.position is None else self.position,
                inflight={"r-1": self.inflight} if self.inflight else {},
            )
            await self.hand.wire.beacon("gateway", self.name, body)
            await asyncio.sleep(0.03)


def test_scn_a13_a_long_answer_is_not_cut_by_an_idle_stop(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1", "--tokens", "60", "--pace-s", "0.01"))
            ready = await hand.phase("r-1", "ready")
            ended: list[str] = []
            # No gateway tells of this request: the engine's own count must hold the drain.
            async with beside(a_stream(ready.endpoint, "r-1", ended)):
                async with httpx.AsyncClient() as client:
                    async with asyncio.timeout(5):
                        while True:
                            told = await client.get(f"{ready.endpoint}/script/counters")
                            if told.json()["requests"]:
                                break
                await hand.plan(an_item("r-1", stop=a_stop()))
                await hand.phase("r-1", "stopped")
            assert ended == ["whole"]

    run(story())


def test_inv_3_a_gateway_with_a_request_there_holds_the_drain(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            busy = Busy(hand)
            async with beside(busy.beat()):
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                await hand.plan(an_item("r-1", stop=a_stop()))
                await hand.phase("r-1", "draining")
                with pytest.raises(AssertionError):
                    await hand.phase("r-1", "stopped", 0.7)
                busy.inflight = 0
                await hand.phase("r-1", "stopped", 2.0)

    run(story())


def test_inv_1_a_gateway_that_has_not_seen_the_drain_holds_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            behind = Busy(hand)
            behind.inflight = 0
            async with beside(behind.beat()):
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                behind.position = hand.seen[-1].seq
                await hand.plan(an_item("r-1", stop=a_stop()))
                await hand.phase("r-1", "draining")
                with pytest.raises(AssertionError):
                    await hand.phase("r-1", "stopped", 0.7)
                behind.position = None
                await hand.phase("r-1", "stopped", 2.0)

    run(story())


def test_an_idle_stop_is_taken_back_at_its_bound_and_the_replica_serves_on(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            async with beside(Busy(hand).beat()):
                await hand.plan(an_item("r-1"))
                first = await hand.phase("r-1", "ready")
                stop = a_stop("d-9", take_back=True, drain_timeout_s=0.3)
                await hand.plan(an_item("r-1", stop=stop))
                await hand.phase("r-1", "draining")
                back = await hand.phase("r-1", "ready")
                assert (back.taken_back, back.stop_decision) == ("d-9", None)
                assert back.endpoint == first.endpoint
                # The same wish, still in the plan, is not begun again.
                await hand.plan(an_item("r-1", stop=stop), an_item("r-2"))
                await hand.phase("r-2", "ready")
                assert hand.replica("r-1").phase == "ready"
                # A later one is.
                await hand.plan(an_item("r-1", stop=a_stop("d-10", force=True)), an_item("r-2"))
                stopped = await hand.phase("r-1", "stopped")
                assert (stopped.stop_decision, stopped.taken_back) == ("d-10", None)

    run(story())


def test_a_drain_for_another_model_ends_its_stragglers_at_the_bound(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            async with beside(Busy(hand).beat()):
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                stop = a_stop(reason="drain", drain_timeout_s=0.3, for_model="other")
                await hand.plan(an_item("r-1", stop=stop))
                stopped = await hand.phase("r-1", "stopped")
                assert stopped.reason == "bound, 1 requests were running"
                draining = next(i for i in hand.seen if i.type == "replica.draining")
                assert draining.reason == "room for other"

    run(story())


def test_force_ends_running_requests_at_once(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1", *LONG))
            ready = await hand.phase("r-1", "ready")
            ended: list[str] = []
            async with beside(a_stream(ready.endpoint, "r-1", ended), Busy(hand).beat()):
                await hand.plan(an_item("r-1", *LONG, stop=a_stop(force=True)))
                await hand.phase("r-1", "stopped", 5.0)
            assert ended != ["whole"]

    run(story())


def test_force_that_comes_later_ends_a_drain_that_waits(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            async with beside(Busy(hand).beat()):
                await hand.plan(an_item("r-1"))
                await hand.phase("r-1", "ready")
                await hand.plan(an_item("r-1", stop=a_stop("d-1")))
                await hand.phase("r-1", "draining")
                await hand.plan(an_item("r-1", stop=a_stop("d-2", force=True)))
                stopped = await hand.phase("r-1", "stopped", 5.0)
                assert stopped.stop_decision == "d-2"

    run(story())


def test_demand_that_comes_back_during_a_drain_keeps_the_replica(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            async with beside(Busy(hand).beat()):
                await hand.plan(an_item("r-1"))
                first = await hand.phase("r-1", "ready")
                await hand.plan(an_item("r-1", stop=a_stop("d-1")))
                await hand.phase("r-1", "draining")
                await hand.plan(an_item("r-1"))
                back = await hand.phase("r-1", "ready")
                assert (back.taken_back, back.endpoint) == ("d-1", first.endpoint)
                assert back.ready_at == first.ready_at

    run(story())


def test_with_no_gateway_at_all_it_listens_before_it_stops(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.plan(an_item("r-1", stop=a_stop()))
            draining = await hand.phase("r-1", "draining")
            stopped = await hand.phase("r-1", "stopped")
            assert (stopped.since - draining.since).total_seconds() >= 0.2

    run(story())


def test_a_replica_that_is_planned_no_more_is_drained_as_lost(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            await hand.plan(an_item("r-1"))
            await hand.phase("r-1", "ready")
            await hand.plan()
            stopped = await hand.phase("r-1", "stopped")
            assert stopped.stop_decision == "lost-r-1"
            assert "replica.draining" in hand.types("r-1")

    run(story())


def test_scn_a6_a_wish_to_stop_a_loading_one_comes_from_the_plan_alone(tmp_path):
    """A loading replica holds its memory: a second start is refused, and the first goes on."""

    async def story():
        async with memory_yard(tmp_path) as yard, yard.agent():
            hand = yard.hand
            big = 3 * 1024**3
            first = an_item("r-1", "--load-s", "0.4", memory_bytes=big)
            await hand.plan(first)
            await hand.phase("r-1", "starting")
            await hand.plan(first, an_item("r-2", memory_bytes=big))
            refused = await hand.phase("r-2", "refused")
            assert refused.reason == "cpu: needs 3.0 GiB, 1.0 GiB free of 4.0 GiB"
            await hand.phase("r-1", "ready")

    run(story())
