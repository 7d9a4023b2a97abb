"""What holds for every decision to park, whatever is known."""

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.domain.parking import (
    KeepInstead,
    Park,
    ParkFacts,
    StopInstead,
    choose,
    is_back,
    ram_needed,
)
from schemas.model import Parking, ParkWay
from schemas.plan import Stop
from tests.support.agent_yard import LONG_AGO

WAYS: list[ParkWay] = ["none", "sleep", "checkpoint", "command"]
seconds = st.none() | st.floats(0, 1000)
count = st.integers(0, 1 << 40)


@st.composite
def all_facts(draw) -> ParkFacts:
    stop = Stop(
        decision="d-1",
        reason=draw(st.sampled_from(["idle", "drain", "park", "vm", "lease", "claim"])),
        decided_at=LONG_AGO,
        force=draw(st.booleans()),
        park=draw(st.sampled_from(["never", "may", "must"])),
    )
    return ParkFacts(
        stop=stop,
        parking=Parking(way=draw(st.sampled_from(WAYS))),
        ways=frozenset(draw(st.sets(st.sampled_from(WAYS[1:])))),
        enabled=draw(st.booleans()),
        on_gpu=draw(st.booleans()),
        load_s=draw(seconds),
        resume_s=draw(seconds),
        ram_bytes=draw(count),
        ram_free_bytes=draw(count),
        evict=draw(st.none() | st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple)),
        failed_ago_s=draw(seconds),
        connected=draw(st.booleans()),
        silent=draw(st.sampled_from([(), ("g1",)])),
    )


@given(all_facts())
def test_nothing_is_parked_that_may_not_be_or_cannot_be(facts: ParkFacts):
    if isinstance(choose(facts), Park):
        assert facts.stop.park != "never"
        assert not facts.stop.force
        assert facts.parking.way in facts.ways
        assert facts.enabled
        assert facts.on_gpu
        assert facts.evict is not None
        assert facts.connected
        assert not facts.silent
        assert facts.stop.reason != "vm" or facts.parking.way == "checkpoint"


@given(all_facts())
def test_every_no_says_why_and_only_who_insisted_keeps_it(facts: ParkFacts):
    choice = choose(facts)
    insisted = facts.stop.park == "must" and not facts.stop.force
    assert isinstance(choice, KeepInstead) <= insisted
    if isinstance(choice, StopInstead):
        assert not insisted
        wanted = facts.stop.park != "never" and not facts.stop.force
        assert bool(choice.reason) == wanted


@given(all_facts())
def test_parking_by_itself_never_takes_longer_than_loading_by_what_was_measured(facts: ParkFacts):
    if (
        isinstance(choose(facts), Park)
        and facts.stop.park == "may"
        and facts.resume_s is not None
        and facts.load_s is not None
    ):
        assert facts.resume_s < facts.load_s


@given(st.none() | count, count, count, st.none() | count)
def test_the_ram_reserved_covers_what_is_known_of_the_copy(known, host, device, weights):
    need = ram_needed(
        known_bytes=known, host_bytes=host, device_bytes=device, weights_bytes=weights
    )
    assert need >= (known if known is not None else host)
    more = ram_needed(
        known_bytes=known, host_bytes=host, device_bytes=device + 1, weights_bytes=weights
    )
    assert more >= need


@given(st.sampled_from(WAYS), count, count)
def test_a_card_that_gave_nothing_back_is_never_taken_for_one_that_did(way, before, now):
    if is_back(way, before, now):
        assert now * 2 <= before
        assert is_back(way, before, 0)
