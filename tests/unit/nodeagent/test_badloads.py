"""Whose fault a failed load is, for how long it is remembered, and what is told of it."""

from datetime import timedelta

from nodeagent.domain import badloads
from nodeagent.domain.badloads import Fault
from schemas import codes
from schemas.slots import MOST_BAD
from tests.support.slotting import START, VERSION, moment

UNKNOWN = Fault(whose="replica", code=codes.LOAD_FAILED, text="cannot do 'a@1' 0x7fA3", known=False)


def fail(bads, fault=UNKNOWN, *, others=(), name="a@1", at=0.0, strip=("a@1",)):
    return badloads.failed(
        bads,
        others,
        name,
        adapter=name[0],
        version=VERSION,
        fault=fault,
        strip=strip,
        now=moment(at).now,
    )


def test_req_bugb6_the_same_unknown_text_from_two_replicas_is_the_adapters_fault():
    first, bad = fail({})
    assert bad.whose == "replica"
    other = Fault(
        whose="replica", code=codes.LOAD_FAILED, text="Cannot do  'a@1.1' 0x81", known=False
    )
    _, bad = fail({}, other, others=(first,), strip=("a@1.1",))
    assert bad.whose == "adapter"


def test_req_bugb6_another_text_another_adapter_or_a_known_fault_is_no_second_witness():
    first, _ = fail({})
    other = Fault(whose="replica", code=codes.LOAD_FAILED, text="something else", known=False)
    assert fail({}, other, others=(first,))[1].whose == "replica"
    assert fail({}, others=(first,), name="b@1")[1].whose == "replica"
    known = Fault(whose="replica", code=codes.LOAD_TIMEOUT, text=UNKNOWN.text)
    assert fail({}, known, others=(first,))[1].whose == "replica"
    said, _ = fail({}, known)
    assert fail({}, others=(said,))[1].whose == "replica"
    # The same replica twice is one witness.
    assert fail(first, others=())[1].whose == "replica"


def test_each_failure_in_a_row_is_remembered_for_twice_as_long_up_to_a_bound():
    bads, rests = {}, []
    for _ in range(7):
        bads, bad = fail(bads)
        rests.append((bad.until - START).total_seconds())
    assert rests == [15, 30, 60, 120, 240, 300, 300]
    adapters = Fault(whose="adapter", code=codes.RANK_TOO_HIGH, text="64 > 16")
    assert fail({}, adapters)[1].until - START == timedelta(seconds=60)


def test_a_failure_counts_until_its_time_or_until_it_is_forgiven():
    bads, bad = fail({})
    assert badloads.standing(bads, "a@1", moment(14.9).now) == bad
    assert badloads.standing(bads, "a@1", moment(15.0).now) is None
    assert badloads.standing(badloads.forgiven(bads, "a@1"), "a@1", START) is None
    assert badloads.forgiven(bads, "b@1") is bads


def test_the_newest_failures_that_still_count_are_told_and_not_too_many_are_kept():
    bads = {}
    for n in range(badloads.MOST_KEPT + 5):
        bads, _ = fail(bads, name=f"{n:03}@1", at=float(n) / 100)
    assert len(bads) == badloads.MOST_KEPT
    told = badloads.told(bads, moment(3.0).now)
    assert len(told) == MOST_BAD
    assert told[-1].until == max(bad.until for bad in bads.values())
    assert badloads.told(bads, moment(1000.0).now) == ()


def test_what_an_engine_says_is_cut_where_it_gets_long():
    long = Fault(whose="replica", code=codes.LOAD_FAILED, text="x" * 5000)
    assert len(fail({}, long)[1].reason) == badloads.LONGEST_TEXT
