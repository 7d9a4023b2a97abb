"""Brings replicas of a `ParkingYard` to where tests of parking begin."""

from datetime import timedelta

from schemas.plan import PlanItem
from tests.support.parking import ParkingYard
from tests.support.placing import scene_of


def served(y: ParkingYard, name: str = "a") -> str:
    """Model `name` ready and answered; its replica."""
    y.request(name)
    y.until(lambda: y.ready(name), 20)
    y.until(lambda: y.activation(name).answered, 10)
    y.advance(12)
    return y.ready(name)[0]


def parked(y: ParkingYard, name: str = "a") -> str:
    """Model `name` used once and parked for lack of demand; its replica."""
    id_ = served(y, name)
    y.until(lambda: y.world.replicas[id_].phase == "parked", 90, "it idles and is parked")
    return id_


def draining(y: ParkingYard) -> str:
    """Model `a` used once, its idle stop just begun: its replica drains."""
    id_ = served(y)
    y.now += timedelta(seconds=3600)
    y.settle()
    assert y.phase("a") == "idle"
    y.act()
    assert y.world.replicas[id_].phase == "draining"
    return id_


def item_of(y: ParkingYard, id_: str) -> PlanItem:
    return next(item for _, item in y.items() if item.replica == id_)


def hold(y: ParkingYard, id_: str) -> str:
    now = scene_of(y)
    return now.hold(now.index.items[id_])
