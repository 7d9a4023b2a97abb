"""What the agent remembers of gateways, on a clock of the test's own."""

from nodeagent.beacons import Gateways
from schemas.beacons import GatewayBeacon


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
