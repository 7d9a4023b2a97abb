"""Which replicas are left out for how they answer: when, for how long, and which never."""

import asyncio

import pytest

from gateway.clock import LoopClock
from gateway.domain.admission import Route
from gateway.domain.answers import Answer
from gateway.domain.outliers import IN_A_ROW, LONGEST_S, Outliers, is_good
from gateway.gateway import Gateway
from gateway.inhand import Run
from schemas.replica import Replica
from schemas.settings import GatewaySettings
from tests.support.aio import run
from tests.support.gateway_world import CHAT, Story, changes, folded

ALL = ("r-1", "r-2", "r-3", "r-4")


def fail(
    outliers: Outliers, replica: str, now_s: float = 0.0, *, ready: tuple[str, ...] = ALL
) -> bool:
    """Fails as often in a row as leaves a replica out."""
    told = [outliers.bad(replica, ready, (), now_s) for _ in range(IN_A_ROW)]
    assert not any(told[:-1])
    return told[-1]


@pytest.mark.parametrize(
    ("status", "complete", "good"),
    [
        (200, True, True),
        (400, True, True),
        (429, True, True),
        (501, True, True),
        (500, True, False),
        (503, True, False),
        (200, False, False),
    ],
)
def test_what_speaks_for_an_engine(status: int, complete: bool, good: bool) -> None:
    assert is_good(status, complete=complete) is good


def test_failures_in_a_row_leave_it_out_and_a_good_answer_between_does_not() -> None:
    outliers = Outliers()
    for _ in range(3):
        for _ in range(IN_A_ROW - 1):
            assert not outliers.bad("r-1", ALL, (), 0.0)
        outliers.good("r-1")
    assert fail(outliers, "r-1")
    assert outliers.until_s == {"r-1": 5.0}
    # What ends there meanwhile says nothing new.
    assert not outliers.bad("r-1", ALL, (), 1.0)
    assert outliers.until_s == {"r-1": 5.0}


def test_each_time_is_twice_as_long_until_it_is_forgiven() -> None:
    outliers = Outliers()
    now_s = 0.0
    assert fail(outliers, "r-1", now_s)
    lasted = []
    for _ in range(6):
        lasted.append(outliers.until_s["r-1"] - now_s)
        now_s = outliers.until_s["r-1"]
        assert outliers.back("r-1")
        assert not outliers.back("r-1")
        # On trial: one more is enough.
        assert outliers.bad("r-1", ALL, (), now_s)
    assert lasted == [5.0, 10.0, 20.0, 40.0, 80.0, 80.0]
    assert outliers.until_s["r-1"] == now_s + LONGEST_S
    now_s = outliers.until_s["r-1"] + 301.0
    outliers.back("r-1")
    outliers.good("r-1")
    assert fail(outliers, "r-1", now_s)
    assert outliers.until_s["r-1"] == now_s + 5.0


def test_never_more_than_half_and_never_the_last_that_answers() -> None:
    outliers = Outliers()
    assert fail(outliers, "r-1")
    assert fail(outliers, "r-2")
    for replica in ("r-3", "r-4"):
        assert not fail(outliers, replica)
    alone = Outliers()
    assert not fail(alone, "r-1", ready=("r-1",))
    two = Outliers()
    told = [two.bad("r-1", ("r-1", "r-2"), {"r-2"}, 0.0) for _ in range(9)]
    assert not any(told)
    # It goes once the other answers again.
    assert two.bad("r-1", ("r-1", "r-2"), (), 0.0)


def test_with_fewer_ready_some_come_back_and_the_first_left_out_first() -> None:
    outliers = Outliers()
    fail(outliers, "r-1", 0.0)
    fail(outliers, "r-2", 1.0)
    assert outliers.too_many(set(ALL)) == []
    assert outliers.too_many({"r-1", "r-2", "r-3"}) == ["r-1"]
    assert outliers.too_many({"r-1", "r-2"}) == ["r-1"]
    assert outliers.too_many({"r-2"}) == ["r-2"]
    outliers.forget("r-1")
    assert outliers.too_many({"r-2", "r-3"}) == []


def a_gateway(world: Story, count: int) -> Gateway:
    gateway = Gateway("gw", GatewaySettings(), LoopClock())
    gateway.is_connected = lambda: True
    model = world.model()
    gateway.install(
        folded(model, *[world.replica(f"r-{n + 1}") for n in range(count)]), synced=True
    )
    return gateway


def taken(gateway: Gateway, *, by_id: bool = False) -> set[str]:
    """Where the next requests go."""
    found: set[str] = set()
    runs: list[Run] = []
    for _ in range(12):
        route = gateway.admit("m", CHAT, accepted=True)
        assert isinstance(route, Route)
        begun = gateway.start(route, lambda _: None, needs_seat=not by_id)
        assert isinstance(begun, Run)
        assert not isinstance(begun, Answer)
        runs.append(begun)
        found.add(begun.replica.id)
    for begun in runs:
        gateway.finish(begun, used=True)
    return found


def known(gateway: Gateway, id: str) -> Replica:
    assert gateway.table is not None
    return gateway.table.replicas[id]


def test_one_that_fails_gets_nothing_until_its_time_is_over_and_a_probe_passed() -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), 3)
        asked: list[str] = []
        gateway.on_suspect = lambda replica: asked.append(replica.id)
        for _ in range(IN_A_ROW):
            gateway.judge(known(gateway, "r-2"), good=False)
        assert taken(gateway) == {"r-1", "r-3"}
        # A response it holds is asked for there all the same.
        assert taken(gateway, by_id=True) == {"r-1", "r-2", "r-3"}
        # A probe that passes before its time is over, for another reason, changes nothing.
        gateway.suspect(known(gateway, "r-2"), "broke")
        gateway.trust("r-2")
        assert taken(gateway) == {"r-1", "r-3"}
        loop = asyncio.get_running_loop()
        [handle] = gateway.ejections._timers.values()
        assert handle.when() == pytest.approx(loop.time() + 5.0, abs=2.0)
        asked.clear()
        handle._run()  # its time is over
        handle.cancel()
        assert asked == ["r-2"]
        assert taken(gateway) == {"r-1", "r-3"}
        gateway.trust("r-2")
        assert taken(gateway) == {"r-1", "r-2", "r-3"}
        assert not gateway.ejections._timers
        gateway.close()

    run(story())


def test_one_that_is_stalled_counts_as_failing() -> None:
    async def story() -> None:
        gateway = a_gateway(Story(), 2)
        for _ in range(IN_A_ROW):
            gateway.on_stall(known(gateway, "r-1"))
        assert taken(gateway) == {"r-2"}
        gateway.close()
        assert not gateway.ejections._timers

    run(story())


def test_one_left_out_is_taken_when_it_is_the_only_one_left() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world, 2)
        for _ in range(IN_A_ROW):
            gateway.judge(known(gateway, "r-1"), good=False)
        assert taken(gateway) == {"r-2"}
        # The other one does not answer: what answers badly is better than nothing.
        gateway.suspect(known(gateway, "r-2"), "refused_connection")
        assert taken(gateway) == {"r-1"}
        gateway.trust("r-2")
        assert taken(gateway) == {"r-2"}
        # The other one is gone: it is back before its time.
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica("r-2", "stopped")), position=world.seq)
        assert taken(gateway) == {"r-1"}
        assert len(gateway.ejections) == 0
        gateway.close()

    run(story())


def test_a_launch_that_is_over_leaves_nothing() -> None:
    async def story() -> None:
        world = Story()
        gateway = a_gateway(world, 2)
        for _ in range(IN_A_ROW):
            gateway.judge(known(gateway, "r-1"), good=False)
        table = gateway.table
        assert table is not None
        gateway.apply(changes(table, world.replica("r-1", "parked")), position=world.seq)
        assert len(gateway.ejections) == 0
        assert not gateway.ejections._timers
        gateway.apply(changes(table, world.replica("r-1")), position=world.seq)
        assert taken(gateway) == {"r-1", "r-2"}
        # What ends there after it is over is nobody's failure.
        gateway.judge(known(gateway, "r-1"), good=False)
        gateway.close()

    run(story())
