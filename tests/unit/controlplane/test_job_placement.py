"""A serve job from its entry to the model's own reply: waiting, failing early, being asked, being let down."""

import re
from datetime import timedelta

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.domain.index import StepIndex
from controlplane.domain.reports import FileGone, SmokeAnswered, StepFailed
from controlplane.domain.work import Fetch, Smoke
from controlplane.domain.world import World
from controlplane.identifiers import new_job_id
from schemas import codes
from schemas.commands import CatalogApply, JobCancel, JobRetry, ModelLoad, ModelRemove, ModelScale
from schemas.model import Model
from schemas.node import NodeState, NodeStateCordoned, NodeStateJoined
from schemas.record import Quarantine, Record, RecordQuarantined
from tests.support.serving import ServeYard, join, llamacpp, repo, serve_yard, shape
from tests.support.worlds import GIB, SETTINGS


def placing(**fields: object) -> ServeYard:
    """A yard whose job waits for its replica; the engine takes long to load."""
    y = serve_yard(compares=True, **fields)  # type: ignore[arg-type]
    y.engine("model").load_s = 100.0
    y.serve()
    y.run_workers()
    assert y.steps()[-1] == ("placement", "running")
    return y


def off(y: ServeYard) -> Model:
    entry = y.world.models["model"]
    assert (entry.scaling.min, entry.scaling.max) == (0, 0)
    return entry


def test_req_c54_the_first_ready_replica_ends_the_wait() -> None:
    y = placing()
    y.advance(50)
    assert y.job().steps[5].detail == "r-0001 is starting on n1"
    y.advance(60)
    assert y.job().steps[5].detail == "r-0001 ready on n1 at http://127.0.0.1:20000"
    assert y.job().replica == "r-0001"


def test_req_c52_a_model_given_up_fails_the_job_at_once() -> None:
    y = placing()
    y.engine("model").load_s = 1.0
    y.engine("model").fails = 99
    y.until(lambda: y.job().state != "running", 1500)
    job = y.job()
    assert job.code == codes.QUARANTINED
    assert job.error == "it failed to start 5 times and is quarantined: error: out of luck"
    assert y.world.records["model"].quarantined is not None


def test_failed_starts_are_told_while_it_waits() -> None:
    y = placing()
    y.engine("model").load_s = 1.0
    y.engine("model").fails = 1
    y.advance(12)
    assert "1 start failed, the last with: error: out of luck" in y.job().steps[5].detail
    y.advance(30)
    assert y.job().state == "done"


def test_req_c55_a_ready_replica_comes_before_what_the_record_says() -> None:
    y = placing()
    y.advance(99)
    model = y.world.models["model"]
    given_up = Quarantine(since=y.now, until=y.now + timedelta(hours=1), reason="r")
    for replica in list(y.world.replicas.values()):
        y.engine("model").load_s = 0.0
        y._load(replica)  # pyright: ignore[reportPrivateUsage]
    y.append(
        "record",
        ("model",),
        RecordQuarantined(until=given_up.until),
        Record(model="model", incarnation=model.incarnation, quarantined=given_up),
    )
    y.run_workers()
    assert y.job().state == "done"


def test_req_c53_no_place_on_any_node_fails_with_the_report_and_not_before_a_pass_looked() -> None:
    y = placing(gib=4)
    y.turn()
    assert y.job().state == "running"
    # The node that had room is taken out of service, and what loaded there ends.
    state = y.world.nodestates["n1"]
    y.append("nodestate", ("n1",), NodeStateCordoned(by="t"), replace(state, admin="cordoned"))
    y.fail("r-0001")
    y.settle()
    assert y.job().state == "running", "its backoff runs, nothing was looked for a place yet"
    y.now += timedelta(seconds=60)
    y.run_workers()
    job = y.job()
    assert job.code == codes.NO_CAPACITY
    assert job.error == "no node can host it: n1: is cordoned"


def test_req_c53_nothing_is_judged_while_no_node_is_heard() -> None:
    y = serve_yard()
    y.serve()
    y.run_workers()
    state = y.world.nodestates["n1"]
    y.stop_agent("n1")
    y.advance(20)
    assert y.job().state == "running"
    del state


def test_a_node_that_joins_later_is_used() -> None:
    y = placing()
    y.stop_agent("n1")
    y.advance(10)
    join(y, "n2")
    y.advance(1900, by=10)
    assert y.job().state in ("done", "failed")


def test_req_c56_the_wait_is_bounded_from_when_the_step_began() -> None:
    y = serve_yard(settings=msgspec.structs.replace(SETTINGS, job_ready_s=120.0))
    y.engine("model").load_s = 10_000.0
    y.serve()
    y.run_workers()
    began = y.job().steps[5].since
    assert began is not None
    y.advance(119, by=7)
    assert y.job().state == "running"
    y.advance(2)
    job = y.job()
    assert job.code == codes.NOT_READY
    assert job.error == "no replica was ready after 2 min: r-0001 is starting on n1"
    assert job.ended_at is not None
    assert job.ended_at - began < timedelta(seconds=123)


def test_req_c63_a_failed_placement_leaves_the_entry_off_with_its_reason_and_the_files() -> None:
    y = placing()
    y.engine("model").load_s = 1.0
    y.engine("model").fails = 99
    y.until(lambda: y.job().state != "running", 1500)
    entry = off(y)
    assert entry.off_reason.startswith("serve job j-0001 failed: it failed to start 5 times")
    assert y.copies() == ["present"]
    failed = next(item for item in y.log if item.type == "job.failed")
    changed = next(item for item in y.log if item.seq == failed.seq - 1)
    assert changed.type == "model.changed"
    y.advance(10)
    assert y.items() == []


def test_req_c63_a_failed_smoke_test_leaves_the_entry_off_too() -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "the replica answered 500: broken")
    y.serve()
    y.advance(20)
    assert "the replica answered 500: broken" in off(y).off_reason
    assert y.steps()[-1] == ("smoke test", "failed")
    assert y.items() == [], "the replica gives its memory back"


def test_req_c63_retry_goes_on_with_the_entry_on_again() -> None:
    y = placing()
    y.engine("model").load_s = 1.0
    y.engine("model").fails = 5
    y.until(lambda: y.job().state != "running", 1500)
    outcome = y.do(JobRetry(job="j-0001"))
    assert outcome.sentence == "job j-0001 goes on at placement"
    entry = y.world.models["model"]
    assert (entry.scaling.min, entry.scaling.max, entry.off_reason) == (1, 1, "")
    assert y.world.records["model"].quarantined is None
    y.advance(10)
    assert y.job().state == "done"
    assert y.fetched == [next(iter(y.world.files))]


def test_req_c63_an_entry_that_served_before_the_job_came_is_not_switched_off() -> None:
    y = serve_yard()
    y.serve()
    y.advance(10)
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "no")
    y.serve()
    y.advance(10)
    assert y.job("j-0002").state == "failed"
    assert y.world.models["model"].scaling.min == 1
    assert y.ready("model")


@pytest.mark.parametrize("wish", ["scale", "apply", "still off"])
def test_the_reason_goes_when_somebody_switches_the_entry_on(wish: str) -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "no")
    y.serve()
    y.advance(20)
    entry = off(y)
    refusal = y.do(ModelLoad(model="model"))
    assert entry.off_reason in refusal.sentence
    raw = {
        "name": "model",
        "source": entry.source,
        "scaling": {"min": 0, "max": 0 if wish == "still off" else 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "2GiB"}],
    }
    if wish == "scale":
        y.do(ModelScale(model="model", min=0, max=1))
    else:
        assert y.do(CatalogApply(entries=[raw])).status == "accepted"
    after = y.world.models["model"].off_reason
    assert after == (entry.off_reason if wish == "still off" else "")


def test_an_entry_removed_while_the_job_runs_fails_it_saying_so() -> None:
    y = placing()
    y.do(ModelRemove(model="model"))
    job = y.job()
    assert (job.state, job.error) == (
        "failed",
        "its catalog entry 'model' was removed while the job ran",
    )


def test_an_entry_switched_off_while_the_job_runs_fails_it_saying_so() -> None:
    y = placing()
    y.do(ModelScale(model="model", min=0, max=0))
    assert y.job().state == "failed"
    assert "was switched off" in y.job().error
    assert y.world.models["model"].off_reason == ""


# -- the smoke test


def test_req_c58_the_replica_is_asked_straight_where_it_listens() -> None:
    y = serve_yard()
    y.fails["Smoke"] = ("", "")
    y.serve()
    y.run_workers()
    y.fails.clear()
    task = None
    for _ in range(20):
        y.now += timedelta(seconds=1)
        y.settle()
        y.act()
        y.settle()
        task = next((t for t in y.tasks() if isinstance(t, Smoke)), None)
        if task is not None:
            break
    assert task is not None
    assert (task.replica, task.node, task.endpoint) == ("r-0001", "n1", "http://127.0.0.1:20000")
    assert (task.model, task.attempt, task.index) == ("model", 1, 6)


def test_req_c60_what_the_replica_answered_fails_the_job() -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "the replica answered 503: busy")
    y.serve()
    y.advance(10)
    assert (y.job().code, y.job().error) == (codes.SMOKE_FAILED, "the replica answered 503: busy")


def test_req_c61_tokens_per_second_are_completion_tokens_over_generation_time() -> None:
    y = serve_yard(reply="  Hello.\n")
    y.serve()
    y.advance(10)
    job = y.job()
    assert (job.reply, job.tokens_per_second, job.prompt_s) == ("Hello.", 40.0, 0.1)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (5, 0.0)])
def test_req_c61_nothing_is_divided_by_nothing(tokens: int, seconds: float) -> None:
    y = asked()
    answer = SmokeAnswered(
        job="j-0001",
        attempt=1,
        replica="r-0001",
        reply="x",
        completion_tokens=tokens,
        generation_s=seconds,
    )
    y.reports.append(answer)
    y.settle()
    assert y.job().state == "done"
    assert y.job().tokens_per_second is None


def test_req_c62_the_job_ends_with_the_speed_and_the_quoted_reply() -> None:
    y = serve_yard()
    y.serve()
    y.advance(10)
    assert y.job().state == "done"
    assert y.job().steps[6].detail == '40.0 tokens/s, "Hello there."'


def asked() -> ServeYard:
    """A yard whose job has asked r-0001 to say hello and has no answer yet."""
    y = serve_yard()
    y.serve()
    y.run_workers()
    for _ in range(40):
        y.now += timedelta(seconds=0.5)
        y.settle()
        y.act()
        y.settle()
        if y.job().steps[-1].name == "smoke test":
            return y
    raise AssertionError(y.tail())


def test_a_replica_that_vanishes_before_its_answer_is_no_failure() -> None:
    y = asked()
    y.engine("model").load_s = 20.0
    y.fail("r-0001")
    y.reports.append(
        StepFailed(job="j-0001", attempt=1, index=6, code=codes.SMOKE_FAILED, sentence="gone")
    )
    y.settle()
    job = y.job()
    assert (job.state, job.replica) == ("running", None)
    assert job.steps[6].detail == "r-0001 is failed: waiting for a ready replica"
    assert not any(isinstance(task, Smoke) for task in y.tasks())
    y.advance(60)
    job = y.job()
    assert (job.state, job.replica) == ("done", "r-0002")


def test_an_answer_of_a_replica_that_is_not_asked_any_more_is_late() -> None:
    y = asked()
    y.engine("model").load_s = 20.0
    y.fail("r-0001")
    y.settle()
    y.reports.append(
        SmokeAnswered(
            job="j-0001",
            attempt=1,
            replica="r-0001",
            reply="x",
            completion_tokens=1,
            generation_s=1.0,
        )
    )
    y.settle()
    assert y.job().state == "running"


def test_cancel_in_the_smoke_test_keeps_what_serves() -> None:
    y = asked()
    y.do(JobCancel(job="j-0001"))
    assert y.tasks() == ()
    assert y.ready("model")


def test_an_embedding_model_is_not_asked_to_say_hello() -> None:
    y = serve_yard()
    y.header = shape(causal=False)
    y.serve()
    y.advance(10)
    assert y.job().state == "done"
    assert y.steps()[6] == ("smoke test", "skipped")
    assert "--embeddings" in y.world.models["model"].profiles[0].args


def test_req_c3_nobody_watching_changes_nothing_and_a_job_of_another_leader_goes_on() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    y.serve()
    for _ in range(200):
        y.index = StepIndex()
        y.reports.clear()
        y.now += timedelta(seconds=0.5)
        y.settle()
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
        y.act()
        if y.job().state != "running":
            break
    assert y.job().state == "done"
    assert len(y.fetched) == 1


def test_waiting_for_room_is_told() -> None:
    y = serve_yard(gib=3)
    y.serve(name="one")
    y.advance(10)
    y.now += timedelta(seconds=60)
    y.request("one", stream_s=500)
    y.serve(name="two")
    y.advance(30)
    job = y.job("j-0002")
    assert job.state == "running"
    assert "needs 2.0 GiB" in job.steps[5].detail


def test_a_waiting_job_says_little() -> None:
    y = serve_yard()
    y.engine("model").load_s = 1000.0
    y.serve()
    y.run_workers()
    before = y.events("job").count("job.step")
    y.advance(900, by=3)
    assert y.events("job").count("job.step") - before <= 2


def test_a_joined_node_state_is_no_reason_to_look_twice() -> None:
    y = placing()
    y.append("nodestate", ("n9",), NodeStateJoined(), NodeState(node="n9", since=y.now))
    assert y.settle() == []


def test_scn_c11_measured_memory_replaces_the_estimate_for_later_placements() -> None:
    y = serve_yard(repo(size=3 * GIB))
    y.engine("model").measured_bytes = 1 * GIB
    y.serve()
    y.advance(10)
    y.do(ModelScale(model="model", min=0, max=1))
    y.do(ModelScale(model="model", min=0, max=0))
    y.advance(10)
    y.do(ModelScale(model="model", min=1, max=1))
    y.advance(10)
    [(_, item)] = y.items("model")
    assert item.memory_bytes == GIB * 110 // 100


def test_an_entry_somebody_changed_is_still_the_jobs_own_at_a_retry() -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "no")
    y.serve()
    y.advance(20)
    entry = off(y)
    raw = {
        "name": "model",
        "source": entry.source,
        "scaling": {"min": 0, "max": 0},
        "profiles": [
            {"name": "cpu", "engine": "llamacpp", "memory": "1GiB", "args": ["--ctx-size", "512"]}
        ],
    }
    assert y.do(CatalogApply(entries=[raw])).status == "accepted"
    y.fails.clear()
    assert y.do(JobRetry(job="j-0001")).sentence == "job j-0001 goes on at placement"
    y.advance(20)
    assert y.job().state == "done"
    assert y.world.models["model"].profiles[0].args == ("--ctx-size", "512")


def test_an_entry_scaled_to_min_0_ends_the_wait_as_on_demand() -> None:
    y = placing()
    y.do(ModelScale(model="model", min=0, max=1))
    y.advance(5)
    assert y.job().state == "running", "a replica is on its way, and may well be ready"
    y.fail("r-0001")
    y.advance(5)
    job = y.job()
    assert (job.state, job.error) == ("done", "")
    assert y.steps()[-2:] == [("placement", "skipped"), ("smoke test", "skipped")]
    assert job.steps[-1].detail.startswith("its entry was scaled to min 0 meanwhile")
    assert y.world.models["model"].scaling.max == 1, "it can be asked for"


def test_an_entry_scaled_to_min_0_is_waited_for_while_somebody_asks() -> None:
    y = placing()
    y.do(ModelLoad(model="model"))
    y.do(ModelScale(model="model", min=0, max=1))
    y.advance(120)
    assert y.job().state == "done"
    assert y.job().reply == "Hello there."


def test_replicas_asked_for_of_an_entry_on_demand_are_kept_from_then_on() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.advance(5)
    y.do(ModelScale(model="model", min=0, max=4))
    y.serve(replicas=2)
    y.advance(20)
    assert y.job("j-0002").state == "done"
    assert y.job("j-0002").reply == "Hello there."
    scaling = y.world.models["model"].scaling
    assert (scaling.min, scaling.max) == (2, 4)


def test_req_c63_an_entry_of_a_cancelled_attempt_is_still_the_jobs_own() -> None:
    y = placing()
    y.do(JobCancel(job="j-0001"))
    for key in y.world.files:
        y.stores.discard(("cp1", key))
        y.reports.append(FileGone(key=key, mirror="cp1"))
    y.settle()
    y.do(JobRetry(job="j-0001"))
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "no")
    y.advance(150)
    assert y.job().state == "failed"
    assert off(y).off_reason


def test_nothing_is_due_for_a_job_that_cannot_be_written() -> None:
    y = serve_yard()
    y.serve()
    subject = y.world.subject("job", "j-0001")
    assert len(y.tasks()) == 1
    y.world.heads[subject] = replace(y.world.heads[subject], writable=False, problem="newer")
    assert y.tasks() == ()
    assert y.do(JobCancel(job="j-0001")).code == codes.UPGRADE_REQUIRED


def test_a_replica_that_does_not_answer_is_asked_again_until_the_bound() -> None:
    y = asked()
    y.engine("model").load_s = 20.0
    unanswered = StepFailed(
        job="j-0001",
        attempt=1,
        index=6,
        code=codes.SMOKE_FAILED,
        sentence="refused",
        unanswered=True,
    )
    y.reports.append(unanswered)
    y.settle()
    assert y.job().state == "running"
    assert any(isinstance(task, Smoke) for task in y.tasks()), "it is due again"
    y.now += timedelta(seconds=SETTINGS.job_ready_s)
    y.settle()
    assert (y.job().state, y.job().error) == ("failed", "r-0001 gave no answer within 30 min")


def test_req_c57_the_node_of_the_replica_is_named() -> None:
    y = serve_yard(gib=1)
    join(y, "n2")
    y.settle()
    y.serve()
    y.advance(10)
    assert y.job().steps[5].detail == "r-0001 ready on n2 at http://127.0.0.1:20000"


def test_req_c5_a_job_is_in_the_log_and_goes_on_from_there() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    due = y.tasks()
    history, y.world, y.index = y.log, World(), StepIndex()
    for item in history:
        y.world.apply(item)
    assert y.tasks() == due
    y.advance(20)
    assert y.job().state == "done"


def test_req_c8_ids_of_jobs_are_never_the_same() -> None:
    ids = {new_job_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"j-[a-z2-7]{10}", id_) for id_ in ids)


@pytest.mark.parametrize("way", ["twice", "two leaders"])
def test_inv_4_one_download_per_file_however_many_ask(way: str) -> None:
    y = serve_yard()
    for n in range(4):
        y.serve(name=f"m{n}", replicas=0)
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    fetches = [task for task in y.tasks() if isinstance(task, Fetch)]
    assert len(fetches) == 1
    if way == "two leaders":
        y.index = StepIndex()
        assert [task for task in y.tasks() if isinstance(task, Fetch)] == fetches
    y.run_workers()
    assert len(y.fetched) == 1
    assert {job.state for job in y.world.jobs.values()} == {"done"}
