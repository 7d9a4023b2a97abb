"""What starts cost, how they failed, and when the next may be tried."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain import record
from events.log import Broken
from events.subjects import event_subject
from schemas.commands import ModelActivate, ModelLoad
from schemas.model import ModelChanged
from schemas.record import Record
from schemas.replica import ReplicaReady
from tests.support.worlds import GIB, SETTINGS, Yard, model, profile, yard


def failing(count: int = 1000, **cards: float) -> Yard:
    y = yard(**cards).add(model("a"))
    y.engine("a").fails = count
    return y


def ask(y: Yard) -> None:
    y.request("a")
    y.until(lambda: y.phase("a") in ("refused", "ready"), 10)


def test_load_times_and_memory_are_measured_and_the_last_eight_kept() -> None:
    y = yard().add(model("a", idle_s=1))
    y.engine("a").measured_bytes = 2 * GIB
    for n in range(10):
        y.engine("a").load_s = 2.0 + n
        ask_and_stop(y)
    [measured] = y.record("a").measured
    assert measured.memory_bytes == 2 * GIB
    assert measured.load_s == tuple(float(n) for n in range(4, 12))


def ask_and_stop(y: Yard) -> None:
    y.request("a")
    y.until(lambda: y.ready("a"), 30)
    y.until(lambda: not y.items(), 30)


def test_req_a25_a_measured_load_says_when_the_next_will_be_ready() -> None:
    y = yard().add(model("a", idle_s=1))
    y.engine("a").load_s = 7.0
    ask_and_stop(y)
    y.request("a")
    y.turn()
    assert y.phase("a") == "loading"
    started = y.now
    assert y.activation("a").expected_ready_at == started + timedelta(seconds=7)


def test_req_a25_nobody_knows_how_long_a_fetch_takes_only_the_load_after_it() -> None:
    y = yard().add(model("a", idle_s=1))
    y.engine("a").load_s = 7.0
    ask_and_stop(y)
    y.engine("a").fetch_s = 60.0
    y.request("a")
    y.turn()
    assert y.phase("a") == "loading"
    assert y.activation("a").expected_ready_at is None
    y.until(lambda: y.activation("a").expected_ready_at is not None, 70)
    assert y.phase("a") == "loading"
    (started,) = [r.started_at for r in y.world.replicas.values() if r.phase == "starting"]
    assert started is not None
    assert y.activation("a").expected_ready_at == started + timedelta(seconds=7)


def test_ready_is_not_delayed_by_a_measurement_that_comes_later() -> None:
    y = yard().add(model("a"))
    ask(y)
    assert y.record("a").measured[0].memory_bytes == 0
    [id_] = y.ready("a")
    known = y.world.replicas[id_]
    y._tell(replace(known, measured_memory_bytes=3 * GIB), ReplicaReady())
    y.settle()
    [measured] = y.record("a").measured
    assert (measured.memory_bytes, measured.load_s) == (3 * GIB, (2.0,))


def test_req_a28_a_failed_start_answers_with_the_engines_last_line() -> None:
    y = failing(1)
    y.engine("a").last_line = "error: unknown model architecture: 'foo'"
    ask(y)
    activation = y.activation("a")
    assert activation.code == "start_failed"
    assert activation.reason == "error: unknown model architecture: 'foo'"
    assert activation.retry_at is not None
    assert (activation.retry_at - activation.since).total_seconds() == 15
    assert y.refused[-1][2] == "start_failed"
    assert y.items() == []
    stored = [d for d in y.decisions if "failed" in d.what][-1]
    assert sorted(c.noun for c in stored.changes) == ["activation", "plan", "record"], "one batch"


def test_backoff_doubles_from_15_seconds_to_5_minutes() -> None:
    waits = [record.backoff_s(n, SETTINGS) for n in range(1, 9)]
    assert waits == [15, 30, 60, 120, 240, 300, 300, 300]


def test_while_the_backoff_runs_nothing_starts_and_nothing_is_written() -> None:
    y = failing()
    ask(y)
    before = len(y.log)
    for n in range(20):
        y.send(ModelActivate(model="a", rev=n), actor="gateway")
        y.settle()
    assert len(y.log) == before
    y.now += timedelta(seconds=15)
    y.send(ModelActivate(model="a", rev=99), actor="gateway")
    y.settle()
    assert y.phase("a") == "placing"


def give_up(y: Yard) -> None:
    for _ in range(5):
        ask(y)
        y.advance(301, by=50)


def test_five_failed_starts_on_the_only_card_are_given_up_for_half_an_hour() -> None:
    y = failing()
    give_up(y)
    quarantined = y.record("a").quarantined
    assert quarantined is not None
    assert (quarantined.until - quarantined.since).total_seconds() == 1800
    assert y.started("a") == 5
    activation = y.activation("a")
    assert activation.code == "model_quarantined"
    assert activation.retry_at == quarantined.until
    assert "5 starts in a row failed" in activation.reason
    assert "error: out of luck" in activation.reason


@pytest.mark.parametrize("code", ["fetch_failed", "disk_full"])
def test_files_that_cannot_be_brought_to_the_node_say_nothing_against_the_model(code: str) -> None:
    y = failing()
    y.engine("a").fail_code = code
    give_up(y)
    y.advance(301, by=50)
    ask(y)
    assert y.started("a") > 5
    assert y.record("a").quarantined is None
    assert y.activation("a").code == "start_failed"  # it waits like any failed start
    y.engine("a").fail_code = "exited"
    give_up(y)
    assert y.record("a").quarantined is not None


def test_five_failed_starts_on_two_cards_are_given_up_too() -> None:
    y = failing(gpu0=8, gpu1=8)
    give_up(y)
    assert y.record("a").quarantined is not None
    assert {f.card for f in y.record("a").failures} == {"gpu0", "gpu1"}


def test_on_one_of_two_possible_cards_it_is_not_given_up_yet() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 6), model("b", 6, minimum=1))
    y.until(lambda: y.ready("b"), 10)
    y.engine("a").fails = 1000
    for _ in range(6):
        ask(y)
        y.advance(301, by=50)
    assert {f.card for f in y.record("a").failures} == {"gpu1"}
    assert y.record("a").quarantined is None


def test_a_quarantine_ends_by_time_and_starts_are_counted_anew() -> None:
    y = failing(5)
    give_up(y)
    y.advance(1801, by=100)
    assert y.record("a").quarantined is None
    assert y.record("a").failures == ()
    ask(y)
    assert y.phase("a") == "ready"


def test_a_changed_entry_lifts_a_quarantine() -> None:
    y = failing(5)
    give_up(y)
    changed = model("a", profiles=[profile(args=("--n-gpu-layers", "0"))])
    y.append("model", ("a",), ModelChanged(by="t", fields=("profiles",)), changed)
    y.settle()
    assert y.record("a").quarantined is None
    y.send(ModelActivate(model="a"), actor="gateway")
    y.until(lambda: y.ready("a"), 10)


def test_a_change_of_scaling_lifts_nothing() -> None:
    y = failing(5)
    give_up(y)
    changed = model("a", maximum=2)
    y.append("model", ("a",), ModelChanged(by="t", fields=("scaling",)), changed)
    y.settle()
    assert y.record("a").quarantined is not None


def test_load_lifts_a_quarantine() -> None:
    y = failing(5)
    give_up(y)
    assert y.do(ModelLoad(model="a")).status == "accepted"
    y.until(lambda: y.ready("a"), 10)
    assert y.record("a").failures == ()


def test_the_first_crash_in_ten_minutes_restarts_at_once_later_ones_wait() -> None:
    y = yard().add(model("a"))
    ask(y)
    for expected in ("placing", "refused"):
        [id_] = y.ready("a")
        y.fail(id_, last_line="segfault")
        y.settle()
        assert y.phase("a") == expected
        if expected == "placing":
            y.until(lambda: y.ready("a"), 10)
    activation = y.activation("a")
    assert (activation.code, activation.reason) == ("start_failed", "segfault")
    assert activation.retry_at == y.now + timedelta(seconds=15)
    y.advance(16)
    ask(y)
    y.now += timedelta(seconds=601)
    y.request("a")
    y.turn()
    [id_] = y.ready("a")
    y.fail(id_)
    y.settle()
    assert y.phase("a") == "placing", "ten quiet minutes later it is a first one again"


def test_a_kept_model_is_started_again_by_the_reconciler_when_its_backoff_ended() -> None:
    y = yard().add(model("a", minimum=1))
    y.engine("a").fails = 2
    y.turn()
    y.advance(14)
    assert y.started("a") == 1
    y.advance(6)
    assert y.started("a") == 2
    y.advance(34)
    assert y.started("a") == 3
    assert y.ready("a")
    assert "a" not in {m for m, _ in y.world.activations}, "nobody asked"


def test_an_end_while_stopping_is_no_failure() -> None:
    y = yard().add(model("a", idle_s=10))
    ask(y)
    y.advance(2)
    y.now += timedelta(seconds=20)
    y.settle()
    y.act()
    [id_] = [r.id for r in y.world.replicas.values() if r.phase == "draining"]
    y.fail(id_)
    y.settle()
    assert y.record("a").failures == ()
    assert y.items() == []


def test_no_capacity_is_answered_with_its_report_and_when_to_come_back() -> None:
    y = yard(gpu0=8).add(model("a", 20))
    y.request("a")
    y.settle()
    activation = y.activation("a")
    assert (activation.phase, activation.code) == ("refused", "no_capacity")
    assert activation.reason == "gpu0: needs 20.0 GiB, has 8.0 GiB"
    assert activation.report is not None
    assert activation.report.counts == {"memory": 1}
    assert activation.retry_at == y.now + timedelta(seconds=60)
    before = len(y.log)
    y.advance(50)
    y.request("a")
    y.settle()
    assert len(y.log) == before


def test_a_kept_model_that_fits_nowhere_says_so_once() -> None:
    y = yard(gpu0=8).add(model("a", 20, minimum=1))
    y.settle()
    assert y.events("record") == ["record.unplaceable"]
    y.advance(600, by=10)
    assert y.events("record") == ["record.unplaceable"]
    y.node("n2", {"gpu0": 40})
    y.until(lambda: y.ready("a"), 10)
    assert y.record("a").unplaceable is None


def test_replicas_are_counted_once_however_many_there_are() -> None:
    names = {f"gpu{n}": 2.0 for n in range(20)}
    y = Yard().node("n1", names)
    y.add(model("a", minimum=20, maximum=20))
    y.until(lambda: len(y.ready("a")) == 20, 200)
    count = len(y.events("record"))
    assert count == 20
    y.advance(60, by=5)
    assert len(y.events("record")) == count


def test_a_failed_start_on_another_card_waits_twice_as_long() -> None:
    y = failing(gpu0=8, gpu1=8)
    waits: list[float] = []
    for _ in range(3):
        ask(y)
        activation = y.activation("a")
        assert activation.retry_at is not None
        waits.append((activation.retry_at - activation.since).total_seconds())
        y.now = activation.retry_at
    assert waits == [15, 30, 60]
    assert {f.card: f.count for f in y.record("a").failures} == {"gpu0": 2, "gpu1": 1}


@pytest.mark.parametrize("minimum", [0, 1])
def test_a_failure_that_cannot_be_recorded_is_not_started_again_for_ever(minimum: int) -> None:
    y = yard().add(model("a", minimum=minimum), model("b"))
    y._seq += 1
    y.world.apply(Broken(seq=y._seq, subject=event_subject("record", "a"), why="not JSON"))
    y.engine("a").fails = 1000
    y.request("a")
    y.request("b")
    y.advance(30)
    assert y.started("a") == 1
    assert y.step().stuck == ("a (any)",)
    assert y.started("b") == 1


def test_what_a_resume_took_is_no_load_and_ends_no_row_of_failures() -> None:
    y = yard().add(model("a"))
    y.engine("a").measured_bytes = 2 * GIB
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    known = y.record("a")
    replica = y.world.replicas[y.ready("a")[0]]
    back = replace(replica, resume_s=0.75)
    assert record.is_unmeasured(known, back)
    folded = record.fold_ready(known, back, {replica.id}, y.now).state
    assert isinstance(folded, Record)
    [entry] = folded.measured
    assert (entry.resume_s, entry.load_s) == ((0.75,), known.measured[0].load_s)
    assert entry.memory_bytes == 2 * GIB
    assert not record.is_unmeasured(folded, back)
    assert record.is_unmeasured(folded, replace(back, resume_s=0.8)), "the next one"


def test_what_a_park_took_is_measured_without_calling_its_memory_the_models() -> None:
    y = yard().add(model("a"))
    y.engine("a").measured_bytes = 2 * GIB
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    known = y.record("a")
    replica = y.world.replicas[y.ready("a")[0]]
    away = replace(replica, phase="parked", park_s=1.25, measured_memory_bytes=5 * GIB)
    folded = record.fold_ready(known, away, {replica.id}, y.now).state
    assert isinstance(folded, Record)
    [entry] = folded.measured
    assert (entry.park_s, entry.memory_bytes) == ((1.25,), 2 * GIB)
    assert folded.counted == known.counted


def test_times_of_replicas_that_left_the_plan_are_not_remembered_for_ever() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    replica = y.world.replicas[y.ready("a")[0]]
    state = y.record("a")
    for n in range(100):
        other = replace(replica, id=f"r-x{n}", phase="parked", park_s=1.0 + n)
        change = record.fold_ready(state, other, {other.id}, y.now)
        assert isinstance(change.state, Record)
        state = change.state
    assert state.timed == ("r-x99 park 100.0",)


@pytest.mark.parametrize("code", ["parked_lost", "resume_failed"])
def test_a_parked_copy_that_does_not_come_back_counts_against_nobody(code: str) -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    [id_] = y.ready("a")
    for _ in range(6):
        y.fail(id_, code=code, last_line="gone")
        y.settle()
        y.request("a")
        y.until(lambda: y.ready("a"), 10)
        [id_] = y.ready("a")
    assert y.refused == []
    assert y.record("a").failures == ()
    assert y.record("a").quarantined is None
