"""Whether a drained replica is parked or stopped, by value: one test per case of the decision."""

from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from nodeagent.domain import parking
from nodeagent.domain.parking import (
    KeepInstead,
    Park,
    ParkFacts,
    StopInstead,
    choose,
    is_back,
    is_still,
    not_back,
    parking_of,
    ram_needed,
    ram_of_copy,
)
from nodeagent.parking import weights_bytes
from schemas.model import EngineName, Parking, ParkWay
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_launch, a_stop

WAYS: frozenset[ParkWay] = frozenset({"sleep", "checkpoint", "command"})
FACTS = ParkFacts(
    stop=a_stop(reason="drain", park="may"),
    parking=Parking(way="sleep"),
    ways=WAYS,
    enabled=True,
    on_gpu=True,
    load_s=40.0,
    resume_s=2.5,
    ram_bytes=10 * GIB,
    ram_free_bytes=30 * GIB,
    evict=(),
)


def facts(**fields) -> ParkFacts:
    return replace(FACTS, **fields)


def must(**fields) -> ParkFacts:
    return replace(FACTS, stop=a_stop(reason="park", park="must"), **fields)


def why_stopped(of: ParkFacts) -> str:
    choice = choose(of)
    assert isinstance(choice, StopInstead), choice
    return choice.reason


def test_it_is_parked_when_that_is_quicker_than_loading_and_the_ram_is_there():
    assert choose(FACTS) == Park(
        way="sleep",
        ram_bytes=10 * GIB,
        evict=(),
        reason="parked by sleep, 10.0 GiB of RAM set aside: resuming took 2.5 s, loading 40.0 s",
    )


def test_a_stop_that_is_forced_or_does_not_park_stops_it_without_a_word():
    """A game forces: it waits for no park."""
    assert choose(facts(stop=a_stop(park="never"))) == StopInstead(reason="")
    assert choose(facts(stop=a_stop(park="may", force=True))) == StopInstead(reason="")
    assert choose(facts(stop=a_stop(park="must", force=True))) == StopInstead(reason="")


def test_a_node_that_does_not_park_stops_it():
    assert "parking is false" in why_stopped(facts(enabled=False))


def test_an_engine_without_a_way_is_stopped():
    assert "neither its profile nor its engine" in why_stopped(facts(parking=Parking(way="none")))


def test_a_way_the_node_lacks_is_none():
    lacking = facts(parking=Parking(way="checkpoint"), ways=frozenset({"sleep"}))
    assert why_stopped(lacking) == "this node has no way checkpoint to park"


def test_an_engine_in_ram_gains_nothing():
    assert why_stopped(facts(on_gpu=False)) == "it is in RAM already"


def test_for_a_vm_only_a_checkpoint_lets_go_of_the_device():
    vm = a_stop(reason="vm", park="may")
    assert "still holds the device a VM wants" in why_stopped(facts(stop=vm))
    checkpoint = facts(stop=vm, parking=Parking(way="checkpoint"))
    assert isinstance(choose(checkpoint), Park)


def test_inv_1_nothing_is_parked_that_a_gateway_may_still_send_requests_to():
    """A stopped engine refuses them and they go elsewhere; a parked one would not say a word."""
    silent = facts(silent=("g1", "g2"))
    assert why_stopped(silent) == "g1, g2 fell silent and may not know of it"
    assert "no connection" in why_stopped(facts(connected=False))
    for of in (must(silent=("g1",)), must(connected=False)):
        assert isinstance(choose(of), KeepInstead)


def test_a_park_that_failed_is_not_tried_again_for_a_while():
    told = why_stopped(facts(failed_ago_s=599.0))
    assert told == "a park failed 599 s ago, tried again after 600 s"
    assert isinstance(choose(facts(failed_ago_s=600.0)), Park)


def test_coming_back_that_takes_as_long_as_loading_is_not_worth_the_ram():
    told = why_stopped(facts(resume_s=40.0, load_s=40.0))
    assert told == "resuming took 40.0 s, loading 40.0 s"
    assert isinstance(choose(facts(resume_s=39.9)), Park)


@pytest.mark.parametrize("times", [(None, 40.0), (None, None), (3.0, None)])
def test_what_was_never_measured_is_worth_a_try(times):
    resume_s, load_s = times
    choice = choose(facts(resume_s=resume_s, load_s=load_s))
    assert choice == Park(
        way="sleep",
        ram_bytes=10 * GIB,
        evict=(),
        reason="parked by sleep, 10.0 GiB of RAM set aside",
    )


def test_inv_9_ram_that_is_not_there_is_told_in_numbers():
    told = why_stopped(facts(ram_free_bytes=4 * GIB, evict=None))
    assert told == "cpu: its parked copy needs 10.0 GiB, 4.0 GiB free"


def test_other_parked_copies_make_way_for_it():
    choice = choose(facts(ram_free_bytes=4 * GIB, evict=("r-7", "r-3")))
    assert isinstance(choice, Park)
    assert choice.evict == ("r-7", "r-3")


def test_who_asked_for_a_park_gets_it_whatever_was_measured():
    asked = must(failed_ago_s=1.0, resume_s=90.0)
    assert isinstance(choose(asked), Park)


@pytest.mark.parametrize(
    "lacking",
    [
        {"enabled": False},
        {"parking": Parking(way="none")},
        {"ways": frozenset()},
        {"on_gpu": False},
        {"evict": None},
    ],
)
def test_who_asked_for_a_park_that_cannot_be_keeps_a_replica_that_serves(lacking):
    choice = choose(must(**lacking))
    assert isinstance(choice, KeepInstead)
    assert choice.reason.startswith("not parked: ")
    assert len(choice.reason) > 20


def test_vllm_sleeps_by_itself_and_the_others_stop():
    told = {engine: parking_of(a_launch(engine=engine)).way for engine in get_args(EngineName)}
    assert told == {"vllm": "sleep", "llamacpp": "none", "command": "none"}
    chosen = Parking(way="checkpoint", timeout_s=5.0)
    assert parking_of(a_launch(engine="llamacpp", parking=chosen)) == chosen


def test_the_ram_it_needs_is_what_moves_there_and_what_it_has_there():
    need = ram_needed(
        known_bytes=None, host_bytes=2 * GIB, device_bytes=20 * GIB, weights_bytes=None
    )
    assert need == int(22 * GIB * 1.1)
    # vLLM drops its cache: only weights move.
    need = ram_needed(
        known_bytes=None, host_bytes=2 * GIB, device_bytes=20 * GIB, weights_bytes=8 * GIB
    )
    assert need == int(10 * GIB * 1.1)
    # Files larger than what is on the card: it was made smaller on the way.
    need = ram_needed(known_bytes=None, host_bytes=0, device_bytes=4 * GIB, weights_bytes=8 * GIB)
    assert need == int(4 * GIB * 1.1)


def test_what_a_copy_was_measured_to_need_counts_more_than_any_guess():
    need = ram_needed(
        known_bytes=3 * GIB, host_bytes=2 * GIB, device_bytes=20 * GIB, weights_bytes=8 * GIB
    )
    assert need == int(3 * GIB * 1.1)


def test_a_copy_has_no_less_ram_than_what_must_have_moved_there():
    def of(way: ParkWay, weights: int | None) -> int:
        return ram_of_copy(way, host_bytes=3 * GIB, freed_bytes=20 * GIB, weights_bytes=weights)

    assert of("checkpoint", None) == 20 * GIB
    assert of("sleep", 8 * GIB) == 8 * GIB
    assert of("sleep", 30 * GIB) == 20 * GIB
    assert of("sleep", GIB) == 3 * GIB
    assert of("sleep", None) == 3 * GIB
    assert of("command", 8 * GIB) == 3 * GIB


def test_two_readings_agree_when_neither_card_still_moves():
    assert is_still({"gpu0": GIB, "gpu1": GIB}, {"gpu0": GIB, "gpu1": GIB + 15 * MIB})
    assert not is_still({"gpu0": GIB}, {"gpu0": GIB - 17 * MIB})
    assert not is_still({}, {"gpu0": GIB})


def test_a_card_is_back_but_for_the_engine_s_context():
    assert is_back("sleep", 20 * GIB, 2 * GIB)
    assert not is_back("sleep", 20 * GIB, 14 * GIB)  # as an older vLLM did: 6 of 20 freed
    assert not is_back("sleep", 60 * GIB, 20 * GIB)
    assert is_back("sleep", 3 * GIB, GIB)
    assert not is_back("sleep", 3 * GIB, 2 * GIB)
    assert is_back("checkpoint", 20 * GIB, 10 * MIB)
    assert not is_back("checkpoint", 20 * GIB, 2 * GIB)
    assert is_back("command", 20 * GIB, GIB)
    assert not is_back("none", 20 * GIB, 1)
    assert is_back("sleep", 0, 0)


def test_inv_9_a_card_that_is_not_back_is_told_with_numbers():
    assert not_back("gpu0", "sleep", 20 * GIB, 14 * GIB) == (
        "gpu0 still shows 14.0 GiB of 20.0 GiB after its sleep: the memory did not come back"
    )


def test_the_size_of_weights_is_that_of_their_file_or_folder(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 300)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 200)
    (tmp_path / "more").mkdir()
    assert weights_bytes(str(tmp_path)) == 500
    assert weights_bytes(str(tmp_path / "a.safetensors")) == 300
    assert weights_bytes(str(tmp_path / "gone")) is None
    assert weights_bytes("org/repository") is None
    assert weights_bytes("") is None


def test_every_case_of_the_decision_is_told_apart():
    """No two reasons for a stop read alike."""
    told = [
        why_stopped(facts(enabled=False)),
        why_stopped(facts(parking=Parking(way="none"))),
        why_stopped(facts(ways=frozenset())),
        why_stopped(facts(on_gpu=False)),
        why_stopped(facts(stop=a_stop(reason="vm", park="may"))),
        why_stopped(facts(connected=False)),
        why_stopped(facts(silent=("g1",))),
        why_stopped(facts(failed_ago_s=1.0)),
        why_stopped(facts(resume_s=50.0)),
        why_stopped(facts(evict=None)),
    ]
    assert len(set(told)) == len(told)
    assert parking.HEADROOM > 1
