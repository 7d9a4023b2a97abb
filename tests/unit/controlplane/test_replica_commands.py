"""`replica.park` and `replica.resume`: what they do, and every sentence with which they are refused."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from schemas import codes
from schemas.commands import ModelLoad, ModelScale, Outcome, ReplicaPark, ReplicaResume
from schemas.model import EngineName, ModelChanged, Parking, ParkWay
from schemas.node import NodeChanged
from schemas.plan import Stop
from schemas.replica import ReplicaReady
from tests.support.parking import ParkingYard, parkable, parking_yard
from tests.support.worlds import model, profile


def served(y: ParkingYard, name: str = "a") -> str:
    y.request(name)
    y.until(lambda: y.ready(name), 20)
    y.until(lambda: y.activation(name).answered, 10)
    y.advance(12)
    return y.ready(name)[0]


def stop_of(y: ParkingYard, id_: str) -> Stop | None:
    return next(item.stop for _, item in y.items() if item.replica == id_)


def refusal(outcome: Outcome) -> tuple[str | None, str]:
    assert outcome.status == "rejected"
    return outcome.code, outcome.sentence


def by_hand(y: ParkingYard, name: str = "a") -> str:
    """Model `name` served and parked by a person."""
    id_ = served(y, name)
    assert y.do(ReplicaPark(replica=id_)).status == "accepted"
    y.until(lambda: y.world.replicas[id_].phase == "parked", 10)
    return id_


# -- park


def test_park_drains_a_ready_replica_and_must_park_it() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    outcome = y.do(ReplicaPark(replica=id_), actor="ada")
    assert outcome.status == "accepted"
    assert "after 60 s it serves on" in outcome.sentence
    assert any(ref.endswith(f".{id_}") for ref in outcome.refs)
    stop = stop_of(y, id_)
    assert stop is not None
    assert (stop.reason, stop.park, stop.take_back, stop.force) == ("park", "must", True, False)
    assert y.phase("a") == "idle"
    assert y.activation("a").reason == "parked by ada"
    y.until(lambda: y.world.replicas[id_].phase == "parked", 10)
    y.advance(3600, by=60)
    assert y.world.replicas[id_].phase == "parked", "until somebody asks"


def test_a_replica_parked_by_hand_comes_back_when_somebody_asks() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = by_hand(y)
    assert y.request("a") == "waits"
    y.until(lambda: y.ready("a") == [id_], 10)


def test_inv_3_requests_that_run_when_a_person_parks_are_not_ended() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y.request("a", stream_s=90)
    y.do(ReplicaPark(replica=id_))
    y.advance(59)
    assert y.world.replicas[id_].phase == "draining"
    y.advance(3)
    assert y.world.replicas[id_].phase == "ready"
    assert stop_of(y, id_) is None
    assert (y.phase("a"), len(y.streams)) == ("ready", 1)


def test_what_must_be_parked_and_cannot_be_serves_on() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y.do(ReplicaPark(replica=id_))
    stop = stop_of(y, id_)
    assert stop is not None
    # The agent found no RAM for it.
    kept = replace(y.world.replicas[id_], taken_back=stop.decision, reason="not parked: no RAM")
    y._tell(kept, ReplicaReady(taken_back=stop.decision))
    y.settle()
    assert stop_of(y, id_) is None
    assert y.phase("a") == "ready"
    assert "not parked: no RAM" in y.activation("a").reason


def test_parking_again_says_so_and_changes_nothing() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y.do(ReplicaPark(replica=id_))
    again = y.do(ReplicaPark(replica=id_))
    assert (again.status, again.refs) == ("accepted", ())
    assert "already" in again.sentence
    y.until(lambda: y.world.replicas[id_].phase == "parked", 10)
    again = y.do(ReplicaPark(replica=id_))
    assert again.sentence == f"{id_} is parked already"


def test_park_of_one_of_two_leaves_the_demand_with_the_other() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(parkable("a", 6, maximum=2))
    served(y)
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    first = y.activation("a").replica
    assert first is not None
    y.do(ReplicaPark(replica=first))
    now = y.activation("a")
    assert (now.phase, now.replicas) == ("ready", 1)
    assert now.replica != first
    y.advance(10)
    assert len(y.ready("a")) == 1


def test_park_ends_what_a_load_holds() -> None:
    y = parking_yard().add(parkable("a"))
    y.do(ModelLoad(model="a", for_s=36000))
    y.until(lambda: y.ready("a"), 20)
    y.advance(12)
    by = y.ready("a")[0]
    y.do(ReplicaPark(replica=by))
    assert (y.phase("a"), y.activation("a").hold_until) == ("idle", None)
    y.advance(60)
    assert y.world.replicas[by].phase == "parked"


def test_park_of_what_min_keeps_is_refused_with_what_to_do() -> None:
    y = parking_yard().add(parkable("a", minimum=1, maximum=2))
    y.until(lambda: y.ready("a"), 20)
    [id_] = y.ready("a")
    code, sentence = refusal(y.do(ReplicaPark(replica=id_)))
    assert code == codes.CONFLICT
    assert "keeps 1 running (min) and 0 would be left" in sentence
    assert "yardctl model scale a --min 0 --max 2" in sentence
    assert stop_of(y, id_) is None


def test_park_of_one_beside_those_min_keeps_is_allowed() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(parkable("a", 6, minimum=1, maximum=2))
    y.until(lambda: y.ready("a"), 20)
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    assert y.do(ReplicaPark(replica=y.ready("a")[1])).status == "accepted"


@pytest.mark.parametrize("body", [ReplicaPark(replica="r-none"), ReplicaResume(replica="r-none")])
def test_an_unknown_replica_is_not_found(body: ReplicaPark | ReplicaResume) -> None:
    y = parking_yard().add(parkable("a"))
    code, sentence = refusal(y.do(body))
    assert code == codes.NOT_FOUND
    assert "r-none" in sentence
    assert "yardctl replica list" in sentence


@pytest.mark.parametrize("verb", [ReplicaPark, ReplicaResume])
def test_one_that_ended_is_a_conflict_that_names_the_way_on(
    verb: type[ReplicaPark] | type[ReplicaResume],
) -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y._stop(y.world.replicas[id_])
    y.settle()
    code, sentence = refusal(y.do(verb(replica=id_)))
    assert code == codes.CONFLICT
    assert "has ended (stopped)" in sentence
    assert "yardctl model load a" in sentence


def test_only_a_ready_one_can_be_parked() -> None:
    y = parking_yard().add(parkable("a"))
    y.engine("a").load_s = 60
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 5)
    [(_, item)] = y.items()
    code, sentence = refusal(y.do(ReplicaPark(replica=item.replica)))
    assert code == codes.CONFLICT
    assert "is starting; only a ready one can be parked" in sentence


def test_one_that_was_planned_and_not_started_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    y.send_activate("a")
    y.settle()
    [(_, item)] = y.items()
    code, sentence = refusal(y.do(ReplicaPark(replica=item.replica)))
    assert (code, "not started yet" in sentence) == (codes.CONFLICT, True)


def test_a_node_nobody_hears_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y.fall_silent("n1")
    y.now += timedelta(seconds=31)
    y.settle()
    code, sentence = refusal(y.do(ReplicaPark(replica=id_)))
    assert code == codes.CONFLICT
    assert "agent of n1 is unreachable" in sentence


def test_a_node_whose_agent_is_stopped_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = served(y)
    y.stop_agent("n1")
    code, sentence = refusal(y.do(ReplicaPark(replica=id_)))
    assert (code, "not running" in sentence) == (codes.CONFLICT, True)


@pytest.mark.parametrize(
    ("engine", "parking", "ways", "said"),
    [
        ("llamacpp", None, ("checkpoint",), "give the profile a `parking:` way"),
        ("vllm", None, (), "cannot park it by sleep, it has none"),
        ("vllm", Parking(way="none"), ("sleep",), "give the profile a `parking:` way"),
        ("llamacpp", Parking(way="checkpoint"), ("command",), "its ways are command"),
        ("llamacpp", Parking(way="command", park=("p",), resume=("r",)), (), "allow_commands"),
    ],
)
def test_what_has_no_way_to_be_parked_cannot_and_says_what_would_change_that(
    engine: EngineName, parking: Parking | None, ways: tuple[ParkWay, ...], said: str
) -> None:
    y, id_ = on_engine(engine, parking, ways)
    code, sentence = refusal(y.do(ReplicaPark(replica=id_)))
    assert code == codes.CANNOT_PARK
    assert said in sentence
    assert id_ in sentence
    assert "unload a" in sentence, "and what to do instead"


@pytest.mark.parametrize(
    ("engine", "parking", "ways"),
    [
        ("vllm", None, ("sleep",)),
        ("vllm", Parking(way="checkpoint"), ("checkpoint", "sleep")),
        ("llamacpp", Parking(way="checkpoint"), ("checkpoint",)),
        ("llamacpp", Parking(way="command", park=("p",), resume=("r",)), ("command",)),
    ],
)
def test_what_has_a_way_can_be_parked(
    engine: EngineName, parking: Parking | None, ways: tuple[ParkWay, ...]
) -> None:
    y, id_ = on_engine(engine, parking, ways)
    assert y.do(ReplicaPark(replica=id_)).status == "accepted"


def on_engine(
    engine: EngineName, parking: Parking | None, ways: tuple[ParkWay, ...]
) -> tuple[ParkingYard, str]:
    """Model a ready on an engine with these ways to be parked by, on a node that allows no commands."""
    y = parking_yard().add(model("a", profiles=[profile(engine=engine, parking=parking)]))
    y.can_park("n1", *ways, engine=engine)
    id_ = served(y)
    # What the node allows may have changed since the start.
    node = replace(y.world.nodes["n1"], allow_commands=False)
    y.append("node", ("n1",), NodeChanged(), node)
    [(_, item)] = y.items()
    assert item.launch.parking == parking
    return y, id_


def test_what_is_on_no_gpu_cannot_be_parked() -> None:
    y = ParkingYard()
    y.node("n1", {"cpu": 8}, kind="cpu")
    y.can_park("n1", "sleep", engine="vllm")
    y.add(model("a", profiles=[profile(engine="vllm", card=("cpu",))]))
    id_ = served(y)
    code, sentence = refusal(y.do(ReplicaPark(replica=id_)))
    assert (code, "runs on cpu" in sentence) == (codes.CANNOT_PARK, True)


# -- resume


def test_resume_brings_a_parked_replica_back_as_a_use_of_its_model() -> None:
    y = parking_yard().add(parkable("a", idle_s=300))
    id_ = by_hand(y)
    y.now += timedelta(hours=2)
    outcome = y.do(ReplicaResume(replica=id_), actor="ada")
    assert outcome.status == "accepted"
    assert f"{id_} comes back to n1/gpu0" in outcome.sentence
    assert stop_of(y, id_) is None
    assert y.phase("a") in ("placing", "loading")
    y.until(lambda: y.ready("a") == [id_], 10)
    assert y.started("a") == 2, "one start and one resume"
    y.advance(200, by=10)
    assert y.ready("a") == [id_], "it counts as a use"
    y.until(lambda: y.world.replicas[id_].phase == "parked", 400)


def test_resume_says_when_it_should_be_ready() -> None:
    y = parking_yard().add(parkable("a"))
    y.resume_s = 3
    id_ = by_hand(y)
    y.do(ReplicaResume(replica=id_))
    y.until(lambda: y.ready("a"), 10)
    y.advance(12)
    y.do(ReplicaPark(replica=id_))
    y.until(lambda: y.world.replicas[id_].phase == "parked", 10)
    y.do(ReplicaResume(replica=id_))
    assert y.activation("a").expected_ready_at == y.now + timedelta(seconds=3)


def test_resume_of_what_is_ready_or_on_its_way_back_says_so() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = by_hand(y)
    y.do(ReplicaResume(replica=id_))
    again = y.do(ReplicaResume(replica=id_))
    assert (again.status, "on its way back" in again.sentence) == ("accepted", True)
    y.until(lambda: y.ready("a"), 10)
    assert y.do(ReplicaResume(replica=id_)).sentence == f"{id_} is ready already"


def test_resume_of_what_is_not_parked_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    y.engine("a").load_s = 60
    y.request("a")
    y.until(lambda: y.phase("a") == "loading", 5)
    [(_, item)] = y.items()
    code, sentence = refusal(y.do(ReplicaResume(replica=item.replica)))
    assert (code, "is starting, not parked" in sentence) == (codes.CONFLICT, True)


def test_resume_above_max_is_a_conflict_that_names_who_runs() -> None:
    y = parking_yard(gpu0=8, gpu1=8).add(parkable("a", 6, maximum=2))
    served(y)
    y.do(ModelLoad(model="a"))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.advance(12)
    parked_, left = y.ready("a")
    y.do(ReplicaPark(replica=parked_))
    y.until(lambda: y.world.replicas[parked_].phase == "parked", 10)
    y.world.models["a"] = replace(
        y.world.models["a"], scaling=replace(y.world.models["a"].scaling, max=1)
    )
    code, sentence = refusal(y.do(ReplicaResume(replica=parked_)))
    assert code == codes.CONFLICT
    assert f"runs 1 of at most 1 already ({left})" in sentence


def test_resume_of_an_older_revision_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = by_hand(y)
    edited = model("a", profiles=[profile(engine="vllm", args=("--max-model-len", "4096"))])
    y.append("model", ("a",), ModelChanged(by="test", fields=("profiles",)), edited)
    id_again = y.send(ReplicaResume(replica=id_))
    y.settle()
    code, sentence = refusal(y.world.outcomes[id_again])
    assert (code, "older entry of a" in sentence) == (codes.CONFLICT, True)


def test_resume_of_an_off_model_is_a_conflict() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = by_hand(y)
    y.send(ModelScale(model="a", min=0, max=0))
    second = y.send(ReplicaResume(replica=id_))
    y.settle()
    code, sentence = refusal(y.world.outcomes[second])
    assert (code, "is off (max 0)" in sentence) == (codes.CONFLICT, True)


def test_resume_onto_a_kept_card_is_refused_with_who_keeps_it() -> None:
    y = parking_yard().add(parkable("a"))
    id_ = by_hand(y)
    y.claim(name="Half-Life")
    code, sentence = refusal(y.do(ReplicaResume(replica=id_)))
    assert code == codes.CARD_KEPT
    assert "cannot come back to n1/gpu0 now" in sentence
    assert "Half-Life" in sentence
    assert stop_of(y, id_) is not None
    y.end_claim()
    assert y.do(ReplicaResume(replica=id_)).status == "accepted"


def test_resume_onto_a_card_others_use_is_refused_with_numbers() -> None:
    y = parking_yard().add(parkable("a", 6), parkable("b", 6))
    id_ = by_hand(y)
    y.request("b", stream_s=1000)
    y.until(lambda: y.ready("b"), 20)
    code, sentence = refusal(y.do(ReplicaResume(replica=id_)))
    assert code == codes.CONFLICT
    assert "GiB" in sentence
    assert stop_of(y, id_) is not None
