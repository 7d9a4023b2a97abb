"""When nobody asks any more, and everything that counts as asking."""

from datetime import timedelta

from msgspec.structs import replace

from controlplane.domain import idle
from controlplane.domain.decision import AgentLive, GatewayLive, Live, ReplicaLive
from controlplane.domain.index import StepIndex
from controlplane.domain.scene import Scene
from schemas.beacons import EngineCounters
from schemas.commands import ModelActivate, ModelLoad
from schemas.replica import ReplicaDraining, ReplicaStopped
from tests.support.worlds import Yard, counting_ids, model, yard


def running(**fields: object) -> Yard:
    """Model a, ready, answered, and unused for long enough to be stopped."""
    y = yard().add(model("a", idle_s=60, **fields))  # type: ignore[arg-type]
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(2)
    y.now += timedelta(seconds=300)
    return y


def live(y: Yard, **fields: object) -> Live:
    """Everybody was heard for hours and nobody used anything, but for `fields`."""
    agents = (
        AgentLive(node="n1", epoch=1, age_s=1, heard=500, heard_for_s=2500, trusted_for_s=2490),
    )
    return Live(**{"leading_for_s": 9000.0, "agents": agents, **fields})  # type: ignore[arg-type]


def gateway(**fields: object) -> GatewayLive:
    return GatewayLive(
        **{"gateway": "g", "incarnation": "1", "age_s": 0.5, "position": 1, **fields}  # type: ignore[arg-type]
    )


def idle_s(y: Yard, heard: Live) -> float:
    index = StepIndex()
    index.sync(y.world)
    scene = Scene(
        world=y.world,
        live=heard,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )
    ready = [p for p, hold in scene.holds_of("a") if hold == "ready"]
    return idle.idle_s(scene, y.world.models["a"], ready)


def stops(y: Yard, heard: Live) -> bool:
    index = StepIndex()
    index.sync(y.world)
    scene = Scene(
        world=y.world,
        live=heard,
        now=y.now,
        ids=counting_ids(),
        settings=y.settings,
        index=index,
    )
    decision, _ = idle.stop_idle(scene, "a")
    return decision is not None


def test_req_a8_a_model_nobody_asked_for_is_stopped_and_its_memory_given_back() -> None:
    y = running()
    assert stops(y, live(y))
    y.until(lambda: not y.items(), 10)
    assert y.phase("a") == "idle"
    assert y.world.cards[("n1", "gpu0")].leases == ()
    stop = next(d for d in y.decisions if "idle" in d.what)
    assert [c.noun for c in stop.changes] == ["plan", "activation"], "one batch"


def test_an_orderly_stop_is_not_told_with_what_the_engine_once_wrote() -> None:
    y = running()
    [id_] = y.ready("a")
    written = replace(y.world.replicas[id_], phase="stopped", last_line="W an older warning")
    y._tell(written, ReplicaStopped())
    y.until(lambda: not y.items(), 10)
    [ended] = [d.what for d in y.decisions if "out of the plan" in d.what]
    assert "stopped" in ended
    assert "older warning" not in ended
    assert "older warning" not in y.world.activations[("a", "any")].reason


def test_req_x2_what_a_leaving_node_ends_is_not_started_again_unasked() -> None:
    y = running()
    [id_] = y.ready("a")
    draining = replace(y.world.replicas[id_], phase="draining", stop_decision="leave-n1-1")
    y._tell(draining, ReplicaDraining(decision="leave-n1-1"))
    y.settle()
    assert y.phase("a") == "idle", "a step between draining and stopped asks for nothing"
    assert len(y.items("a")) == 1
    y._stop(draining)
    y.settle()
    assert y.phase("a") == "idle"
    assert y.items() == []


def test_inv_1_who_asks_while_its_node_ends_a_replica_gets_the_next_one() -> None:
    y = running()
    [id_] = y.ready("a")
    draining = replace(y.world.replicas[id_], phase="draining", stop_decision="leave-n1-1")
    y._tell(draining, ReplicaDraining(decision="leave-n1-1"))
    y.settle()
    y.send_activate("a")
    y.settle()
    assert y.phase("a") == "placing"
    y._stop(draining)
    y.settle()
    assert [i.replica for _, i in y.items("a")] != [id_]
    y.until(lambda: y.ready("a"), 10)


def test_req_a8_timeout_zero_is_never() -> None:
    y = yard().add(model("a", idle_s=0))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.now += timedelta(days=30)
    y.turn()
    assert y.ready("a")


def test_req_a9_an_idle_stop_goes_down_to_min() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", minimum=1, maximum=2, idle_s=60))
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.until(lambda: len(y.items("a")) == 1, 100)
    y.advance(300, by=10)
    assert len(y.ready("a")) == 1


def test_req_a10_every_use_resets_the_clock() -> None:
    y = running()
    assert not stops(y, live(y, gateways=(gateway(last_use_age_s={"a": 59.0}),)))
    assert stops(y, live(y, gateways=(gateway(last_use_age_s={"a": 60.0}),)))
    one_of_two = (gateway(last_use_age_s={"a": 500.0}), gateway(last_use_age_s={"a": 3.0}))
    assert not stops(y, live(y, gateways=one_of_two)), "on every gateway"


def test_req_a11_a_request_in_flight_is_use_for_its_whole_duration() -> None:
    y = running()
    [id_] = y.ready("a")
    assert not stops(
        y, live(y, gateways=(gateway(inflight={id_: 1}, last_use_age_s={"a": 900.0}),))
    )


def test_a_waiting_request_is_use() -> None:
    y = running()
    assert not stops(y, live(y, gateways=(gateway(waiting={"a": 1}),)))


def test_inv_3_the_engines_own_counters_are_use() -> None:
    y = running()
    [id_] = y.ready("a")

    def told(changed_age_s: float | None, inflight: int | None) -> Live:
        counters = ReplicaLive(
            counters=EngineCounters(inflight=inflight), changed_age_s=changed_age_s
        )
        return live(
            y,
            agents=(
                AgentLive(
                    node="n1",
                    epoch=1,
                    age_s=1,
                    heard=500,
                    heard_for_s=2500,
                    trusted_for_s=2490,
                    replicas={id_: counters},
                ),
            ),
        )

    assert not stops(y, told(None, 1))
    assert not stops(y, told(59, 0))
    assert stops(y, told(60, 0))
    assert stops(y, told(None, None))


def test_silence_is_no_idleness_a_new_leader_first_listens() -> None:
    y = running()
    assert not stops(y, live(y, leading_for_s=59.0))
    assert stops(y, live(y, leading_for_s=60.0))


def test_three_beacons_of_the_agent_must_have_been_heard() -> None:
    y = running()

    def heard(trusted_for_s: float | None, age_s: float = 0.0) -> Live:
        agent = AgentLive(
            node="n1",
            epoch=1,
            age_s=age_s,
            heard=2 if trusted_for_s is None else 3,
            heard_for_s=4000,
            trusted_for_s=trusted_for_s,
        )
        return live(y, agents=(agent,))

    assert not stops(y, live(y, agents=()))
    assert not stops(y, heard(None))
    assert idle_s(y, heard(0)) == 0, "the third was heard this moment"
    assert not stops(y, heard(59))
    assert stops(y, heard(60))
    assert not stops(y, heard(2490, age_s=31)), "silent now"


def test_a_silent_gateway_counts_as_using_what_it_last_reported() -> None:
    y = running()
    [id_] = y.ready("a")
    assert not stops(y, live(y, gateways=(gateway(age_s=70, inflight={id_: 1}),)))
    assert stops(y, live(y, gateways=(gateway(age_s=121, inflight={id_: 1}),)))
    quiet = ReplicaLive(counters=EngineCounters(inflight=0), changed_age_s=65)
    agent = AgentLive(
        node="n1",
        epoch=1,
        age_s=1,
        heard=500,
        heard_for_s=2500,
        trusted_for_s=2490,
        replicas={id_: quiet},
    )
    assert stops(y, live(y, agents=(agent,), gateways=(gateway(age_s=65, inflight={id_: 1}),)))
    assert stops(y, live(y, gateways=(gateway(age_s=70, last_use_age_s={"a": 1.0}),)))


def test_a_gateway_that_left_cleanly_holds_nothing() -> None:
    y = running()
    [id_] = y.ready("a")
    assert stops(y, live(y, gateways=(gateway(age_s=61, inflight={id_: 1}, leaving=True),)))


def test_scn_a12_a_gateway_that_only_beacons_wakes_and_keeps_nothing() -> None:
    y = running()
    assert stops(y, live(y, gateways=(gateway(),)))
    y.until(lambda: not y.items(), 10)
    before = len(y.log)
    y.advance(600, by=10)
    assert len(y.log) == before


def test_load_counts_as_one_use_and_for_holds_it() -> None:
    y = running()
    y.do(ModelLoad(model="a"))
    y.advance(55)
    assert y.ready("a")
    y.until(lambda: not y.items(), 12)
    y.do(ModelLoad(model="a", for_s=3600))
    y.until(lambda: y.ready("a"), 10)
    y.advance(3500, by=50)
    assert y.ready("a")
    y.until(lambda: not y.items(), 200)


def test_demand_during_an_idle_drain_takes_the_stop_back() -> None:
    y = running()
    [id_] = y.ready("a")
    y.settle()
    y.act()
    assert y.world.replicas[id_].phase == "draining"
    assert y.phase("a") == "idle"
    assert y.request("a") == "waits"
    y.settle()
    assert y.items("a")[0][1].stop is None
    assert y.phase("a") == "placing"
    y.until(lambda: len(y.answered) == 2, 5)
    assert y.started("a") == 1, "the same replica answers"


def test_demand_before_the_drain_began_is_answered_by_the_same_replica() -> None:
    y = running()
    [id_] = y.ready("a")
    y.settle()
    assert y.items("a")[0][1].stop is not None
    y.ask("a")
    y.settle()
    assert y.items("a")[0][1].stop is None
    assert y.phase("a") == "ready"
    assert y.activation("a").replica == id_


def test_a_drain_its_agent_took_back_is_cleared_and_the_model_is_demanded() -> None:
    y = running()
    [id_] = y.ready("a")
    y.settle()
    y.request("a", stream_s=200)
    y.advance(1)
    y.until(lambda: y.world.replicas[id_].taken_back, 70, "the bound passes")
    y.settle()
    [(_, item)] = y.items("a")
    assert item.stop is None
    assert y.phase("a") == "ready"
    assert any(s.replica == id_ for s in y.streams), "the stream was not cut"
    y.until(lambda: not y.items(), 400)


def test_nothing_is_stopped_while_another_replica_loads() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", maximum=2, idle_s=10))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.engine("a").load_s = 60
    y.do(ModelLoad(model="a"))
    y.advance(30)
    assert y.ready("a")


def test_when_to_look_again_is_said() -> None:
    y = yard().add(model("a", idle_s=60))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(2)
    wake_at = y.step().wake_at
    assert wake_at is not None
    assert y.now < wake_at <= y.now + timedelta(seconds=61)


def test_a_request_on_a_gateway_heard_lately_is_use_whatever_the_engine_counted() -> None:
    y = yard().add(model("a", idle_s=5))
    y.request("a", stream_s=600)
    y.until(lambda: y.answered, 10)
    y.now += timedelta(seconds=60)
    [id_] = y.ready("a")
    quiet = ReplicaLive(counters=EngineCounters(inflight=0), changed_age_s=50)
    agent = AgentLive(
        node="n1",
        epoch=1,
        age_s=1,
        heard=500,
        heard_for_s=2500,
        trusted_for_s=2490,
        replicas={id_: quiet},
    )
    busy = gateway(age_s=8.0, inflight={id_: 1})
    assert not stops(y, live(y, agents=(agent,), gateways=(busy,)))
    assert stops(y, live(y, agents=(agent,), gateways=(gateway(age_s=11.0, inflight={id_: 1}),)))


def test_an_idle_stop_lets_the_agent_park_and_takes_a_busy_one_back() -> None:
    y = running()
    [id_] = y.ready("a")
    y.settle()
    [(_, item)] = y.items("a")
    assert item.replica == id_
    assert item.stop is not None
    assert (item.stop.park, item.stop.take_back) == ("may", True)


def test_demands_for_one_card_end_with_the_model_that_is_idle() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2, idle_s=60))
    for scope in ("n1~gpu0", "n1~gpu1"):
        y.send(ModelActivate(model="a", scope=scope), actor="gateway")
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.until(lambda: not y.items(), 200)
    assert {a.phase for a in y.world.activations.values()} == {"idle"}


def test_a_demand_for_one_card_is_not_said_to_be_served_by_another() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 6, minimum=1, maximum=2, idle_s=60))
    y.until(lambda: y.ready("a"), 20)
    [first] = y.ready("a")
    [card] = y.world.replicas[first].cards
    other = "gpu1" if card == "gpu0" else "gpu0"
    y.send(ModelActivate(model="a", scope=f"n1~{other}"), actor="gateway")
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.until(lambda: len(y.items()) == 1, 200)
    [(_, item)] = y.items()
    scoped = y.world.activations[("a", f"n1~{other}")]
    if item.cards == (other,):
        assert (scoped.phase, scoped.replica) == ("ready", item.replica)
    else:
        assert scoped.phase == "idle"


def test_a_demand_that_waits_for_its_own_card_outlives_an_idle_stop_elsewhere() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2, idle_s=30), model("b", 6, idle_s=0))
    y.do(ModelLoad(model="b", for_s=3000))
    y.until(lambda: y.ready("b"), 20)
    [held] = y.world.replicas[y.ready("b")[0]].cards
    y.send(ModelActivate(model="a", scope=f"n1~{held}"), actor="gateway")
    y.send_activate("a")
    y.until(lambda: y.ready("a"), 20)
    assert y.phase("a", f"n1~{held}") == "waiting"
    y.until(lambda: y.phase("a") == "idle", 120)
    assert y.phase("a", f"n1~{held}") == "waiting"
