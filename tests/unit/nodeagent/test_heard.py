"""What the agent remembers of gateways, on a clock of the test's own."""

import asyncio

from nodeagent.beacons import Gateways, Pulse
from nodeagent.domain.pins import Pins, uses_in
from schemas.beacons import AgentBeacon, EngineCounters, GatewayBeacon, Pin
from tests.support.aio import run, until


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.up = True
        self.gateways = Gateways(monotonic=lambda: self.now, connected=lambda: self.up)

    def hear(self, name: str = "g1", n: int = 1, **fields) -> None:
        given = {"position": 5, **fields}
        self.gateways.hear(name, GatewayBeacon(gateway=name, incarnation="x", n=n, **given))


def test_a_gateways_last_beacon_counts_with_its_age():
    world = World()
    world.hear(n=1, inflight={"r-1": 2}, waiting={"m": 3})
    world.hear(n=2, position=8, inflight={"r-1": 1}, waiting={"m": 3}, leaving=True)
    world.now += 4
    (heard,) = world.gateways.about("r-1", "m")
    assert (heard.age_s, heard.position, heard.inflight, heard.waiting, heard.leaving) == (
        4.0,
        8,
        1,
        3,
        True,
    )
    (other,) = world.gateways.about("r-2", "other")
    assert (other.inflight, other.waiting) == (0, 0)
    assert world.gateways.numbers() == {"g1": 2}


def test_the_age_of_the_connection_begins_anew_with_every_loss_somebody_saw():
    world = World()
    assert world.gateways.connected_s() == 0
    world.now += 5
    assert world.gateways.connected_s() == 5
    world.up = False
    assert world.gateways.connected_s() is None
    world.up = True
    world.now += 5
    assert world.gateways.connected_s() == 0
    world.now += 2
    # Too short for anybody to look: the follower tells of it.
    world.gateways.connection_lost()
    assert world.gateways.connected_s() == 0


def test_a_gateway_silent_for_an_hour_is_forgotten():
    world = World()
    world.hear()
    world.hear("g2")
    world.now += 3599
    world.hear("g2", n=2)
    world.now += 2
    assert [g.name for g in world.gateways.about("r-1", "m")] == ["g2"]


def test_each_beacon_wakes_the_drains():
    world = World()
    woken = []
    world.gateways.on_heard = lambda: woken.append(1)
    world.hear()
    assert woken == [1]


def test_pins_are_heard_and_the_number_heard_is_told_with_whose_it_is():
    gateways = Gateways(monotonic=lambda: 5.0, connected=lambda: True)
    before: list[object] = []
    gateways.on_pins = before.append
    listed = {"r-1": {"a@01234567": Pin(1)}}
    beacon = GatewayBeacon(gateway="g1", incarnation="i7", n=3, position=0, pins=listed)
    gateways.hear("g1", beacon)
    assert uses_in(gateways.pins, "r-1", 5.0)["a@01234567"].uses == 1
    assert (gateways.numbers(), gateways.incarnations()) == ({"g1": 3}, {"g1": "i7"})
    assert before == [Pins()]


def test_a_recall_is_told_at_once_and_waits_for_no_engine():
    async def story():
        asked: list[int] = []
        told: list[AgentBeacon] = []
        recall: dict[str, tuple[str, ...]] = {}

        async def counters():
            asked.append(1)
            return {"r-1": EngineCounters(inflight=2)}

        class Ears:
            async def beacon(self, kind, name, body):
                told.append(body)

        pulse = Pulse(
            Ears(),  # type: ignore[arg-type]
            Gateways(monotonic=lambda: 5.0, connected=lambda: True),
            node="n1",
            every_s=60.0,
            epoch=lambda: 7,
            position=lambda: 1,
            counters=counters,
            recall=lambda: recall,
        )
        beating = asyncio.ensure_future(pulse.run())
        await until(lambda: len(told) == 1, "the first beacon")
        recall["r-1"] = ("a@01234567",)
        pulse.recall_now()
        await until(lambda: len(told) == 2, "the recall")
        pulse.beat_now()
        await until(lambda: len(told) == 3, "a whole beacon")
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert len(asked) == 2
        assert [beacon.recall for beacon in told] == [{}, recall, recall]
        assert {beacon.replicas["r-1"].inflight for beacon in told} == {2}

    run(story())
