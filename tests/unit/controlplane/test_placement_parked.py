"""Where parked copies rank, what they need to come back, and what they are in the way of."""

from msgspec.structs import replace

from controlplane.domain.placement import Wait
from schemas.card import Lease
from schemas.replica import ReplicaParked
from tests.support.placing import VM, all_of, chosen, on, parked_on_gpu1, running, two, verdict
from tests.support.worlds import GIB, T0, Yard, model, profile, yard


def test_req_d16_a_parked_copy_on_a_held_card_comes_before_a_plain_drain() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = parked_on_gpu1(y)
    running(y, "x", "gpu0", 8)
    running(y, "z", "gpu1", 8)
    found = all_of(y, two())
    assert [(c.cards[0], c.rank, c.resumes) for c in found[:2]] == [
        ("gpu1", 4, id_),
        ("gpu0", 4, ""),
    ]
    answer = verdict(y, two())
    assert isinstance(answer, Wait)
    assert [v.item.launch.model for v in answer.victims] == ["z"]


def test_req_d16_a_parked_copy_on_a_kept_card_waits_and_a_free_card_is_taken_instead() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = parked_on_gpu1(y)
    on(y, "gpu1", vm=VM)
    found = [(c.cards[0], c.rank, c.resumes) for c in all_of(y, two()) if c.rank is not None]
    assert found == [("gpu0", 2, ""), ("gpu1", 5, id_)]


def test_a_parked_copy_of_an_older_revision_does_not_come_back() -> None:
    y = yard(gpu0=8, gpu1=8)
    parked_on_gpu1(y)
    y.add(two(args=("--ctx-size", "7")))
    assert chosen(verdict(y, two())) == ("gpu0", 2)


def test_a_refused_resume_is_out_until_the_card_changes() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = parked_on_gpu1(y)
    rev = y.world.cards[("n1", "gpu1")].rev
    refused = replace(y.world.replicas[id_], card_revs={"gpu1": rev})
    y._tell(refused, ReplicaParked(refused=True))
    assert chosen(verdict(y, two())) == ("gpu0", 2)
    assert "had no room for" in next(c.reason for c in all_of(y, two()) if c.resumes)
    on(y, "gpu1")
    assert chosen(verdict(y, two())) == ("gpu1", 1)


def test_a_parked_copy_needs_no_more_than_it_has_not_yet() -> None:
    y = yard(gpu0=8, gpu1=4)
    parked_on_gpu1(y, residual_gib=1)
    assert chosen(verdict(y, two())) == ("gpu1", 1), "1 GiB of its 4 is its own"


def test_a_resume_is_written_as_the_end_of_the_stop_under_the_same_id() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = parked_on_gpu1(y)
    y.request("m")
    y.settle()
    [(_, item)] = y.items("m")
    assert (item.replica, item.stop) == (id_, None)
    assert item.card_revs == {"gpu1": y.world.cards[("n1", "gpu1")].rev}
    activation = y.activation("m")
    assert (activation.phase, activation.replica) == ("placing", id_)
    assert activation.report is not None
    assert activation.report.chosen is not None
    assert activation.report.chosen.resumes == id_


def test_what_a_parked_engine_keeps_is_memory_and_no_hold() -> None:
    y = yard(gpu0=8, gpu1=8)
    parked_on_gpu1(y, residual_gib=2)
    alone = model("alone", profiles=[profile(gib=6, card=("n1/gpu1",), exclusive=True)])
    assert chosen(verdict(y, alone)) == ("gpu1", 2), "beside what is parked"
    more = model("more", profiles=[profile(gib=7, card=("n1/gpu1",))])
    found = verdict(y, more)
    assert isinstance(found, Wait)
    assert [v.item.launch.model for v in found.victims] == ["m"], (
        "it ends, nothing else gives it back"
    )


def test_a_drained_parked_copy_is_ended_and_a_running_one_may_be_parked() -> None:
    y = yard(gpu0=8, gpu1=8)
    id_ = parked_on_gpu1(y, residual_gib=2)
    y.add(model("more", profiles=[profile(gib=7, card=("n1/gpu1",))]))
    y.request("more")
    y.settle()
    stop = y.items("m")[0][1].stop
    assert y.items("m")[0][1].replica == id_
    assert stop is not None
    assert (stop.reason, stop.park, stop.for_model) == ("drain", "never", "more")
    other = yard(gpu0=8)
    running(other, "a", "gpu0", 8)
    other.add(model("b", 8))
    other.request("b")
    other.settle()
    stop = other.items("a")[0][1].stop
    assert stop is not None
    assert (stop.reason, stop.park) == ("drain", "may")


def test_parked_copies_in_ram_are_room_for_a_start_there() -> None:
    y = Yard().node("n1", {"cpu": 8}, kind="cpu")
    y.settle()
    copy = Lease(holder="r-old", memory_bytes=7 * GIB, fence=1, since=T0, kind="parked")
    on(y, "cpu", leases=(copy,))
    assert chosen(verdict(y, model("m", profiles=[profile(gib=6, card=("cpu",))]))) == ("cpu", 2)
