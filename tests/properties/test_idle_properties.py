"""An idle stop never takes a replica anybody may be using, and always comes at last."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain import idle
from controlplane.domain.decision import AgentLive, GatewayLive, Live, ReplicaLive
from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from schemas.beacons import EngineCounters
from tests.support.worlds import Yard, counting_ids, model

AGES = st.one_of(st.none(), st.floats(0, 300))
GATEWAYS = st.lists(
    st.tuples(st.floats(0, 200), AGES, st.booleans(), st.booleans(), st.booleans()), max_size=3
)
TIMEOUT_S = 60.0


def decided(
    gateways: list[tuple[float, float | None, bool, bool, bool]],
    leading_s: float,
    heard: int,
    silent_s: float,
    inflight: int | None,
    changed_s: float | None,
    ready_s: float,
) -> tuple[bool, Live]:
    y = Yard().node("n1").add(model("a", idle_s=TIMEOUT_S))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(1)
    [id_] = y.ready("a")
    y.now = y.world.replicas[id_].since + timedelta(seconds=ready_s)
    live = Live(
        leading_for_s=leading_s,
        gateways=tuple(
            GatewayLive(
                gateway=f"g{n}",
                incarnation="1",
                age_s=age,
                position=1,
                last_use_age_s={} if last is None else {"a": last},
                inflight={id_: 1} if busy else {},
                waiting={"a": 1} if waits else {},
                leaving=leaves,
            )
            for n, (age, last, busy, waits, leaves) in enumerate(gateways)
        ),
        agents=(
            AgentLive(
                node="n1",
                epoch=1,
                age_s=silent_s,
                heard=heard,
                heard_for_s=heard * 5.0 + silent_s,
                trusted_for_s=None if heard < 3 else (heard - 3) * 5.0 + silent_s,
                replicas={
                    id_: ReplicaLive(
                        counters=EngineCounters(inflight=inflight), changed_age_s=changed_s
                    )
                },
            ),
        ),
    )
    index = StepIndex()
    index.sync(y.world)
    scene = Scene(
        world=y.world,
        live=live,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )
    decision, due = idle.stop_idle(scene, "a")
    assert (decision is None) == (due is not None), "stopped, or looked at again"
    assert due is None or due > y.now
    return decision is not None, live


@given(
    GATEWAYS,
    st.floats(0, 300),
    st.integers(1, 60),
    st.floats(0, 40),
    st.sampled_from([None, 0, 0, 1]),
    AGES,
    st.floats(0, 300),
)
def test_inv_3_whoever_may_be_using_it_keeps_it(
    gateways: list[tuple[float, float | None, bool, bool, bool]],
    leading_s: float,
    heard: int,
    silent_s: float,
    inflight: int | None,
    changed_s: float | None,
    ready_s: float,
) -> None:
    stopped, live = decided(gateways, leading_s, heard, silent_s, inflight, changed_s, ready_s)
    for gateway in live.gateways:
        last = gateway.last_use_age_s.get("a")
        recent = last is not None and last + gateway.age_s < TIMEOUT_S
        is_heard = gateway.age_s <= 10
        in_use = bool(gateway.inflight or gateway.waiting) and not gateway.leaving
        if recent or (in_use and is_heard) or (in_use and gateway.age_s < TIMEOUT_S):
            assert not stopped
    if inflight or (changed_s is not None and changed_s < TIMEOUT_S):
        assert not stopped
    if leading_s < TIMEOUT_S or ready_s < TIMEOUT_S or heard < 3 or silent_s > 30:
        assert not stopped


@given(st.lists(st.floats(60.5, 3000), max_size=3), st.sampled_from([None, 0]))
def test_when_everybody_was_quiet_for_long_enough_it_stops(
    last_uses: list[float], inflight: int | None
) -> None:
    gateways = [(0.5, last, False, False, False) for last in last_uses]
    assert decided(gateways, 500, 60, 1, inflight, None, 400)[0]
