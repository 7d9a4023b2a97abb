"""What a person's wish about a serve job does: started, joined, refused; cancelled; gone on with."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain.jobcommands import request_of
from controlplane.domain.reports import FileGone
from schemas import codes
from schemas.commands import JobCancel, JobRetry, JobServe, MirrorGc, ModelAdd, ModelRemove
from schemas.job import ServeRequest
from tests.support.serving import repo, serve_yard


def asked(**fields: object) -> ServeRequest:
    found = request_of(JobServe(**{"repo": "o/m", **fields}))  # type: ignore[arg-type]
    assert isinstance(found, ServeRequest), found
    return found


def refused(**fields: object) -> str:
    found = request_of(JobServe(**{"repo": "o/m", **fields}))  # type: ignore[arg-type]
    assert not isinstance(found, ServeRequest), found
    assert found.code == codes.INVALID
    return found.sentence


def test_req_c1_the_defaults_are_one_replica_and_q4_k_m() -> None:
    assert asked() == ServeRequest(
        repo="o/m", quant="Q4_K_M", replicas=1, ctx_pool=16384, context_length=4096
    )


@pytest.mark.parametrize(
    ("typed", "read"),
    [("owner/name", "owner/name"), ("  /owner/na.me_1-x/ ", "owner/na.me_1-x"), ("1/2", "1/2")],
)
def test_req_c13_a_repository_is_owner_and_name(typed: str, read: str) -> None:
    assert asked(repo=typed).repo == read


@pytest.mark.parametrize(
    "typed",
    ["", "name", "a/b/c", "-a/b", "a/.b", "a/b c", "a /b", "a/", "https://x/a/b", "ä/b", "a\nb/c"],
)
def test_req_c13_anything_else_is_refused_as_it_was_typed(typed: str) -> None:
    sentence = refused(repo=typed)
    assert sentence.endswith('" is not a repository; it looks like owner/name')
    if typed.isprintable():
        assert sentence.startswith(f'"{typed}"')


def test_req_c14_fewer_than_no_replicas_are_refused() -> None:
    assert "at least 0" in refused(replicas=-1)
    assert "at most 1000" in refused(replicas=1001)


def test_req_c15_the_default_quant_is_for_those_who_name_neither() -> None:
    assert asked(file="a.gguf").quant is None
    assert asked(quant="q8_0").quant == "q8_0"
    assert asked(quant="", file="").quant == "Q4_K_M"
    both = asked(quant="Q8_0", file="a.gguf")
    assert (both.quant, both.file) == ("Q8_0", "a.gguf")


@pytest.mark.parametrize("given", [0, -5])
def test_req_c16_no_number_of_tokens_means_the_default(given: int) -> None:
    request = asked(ctx_pool=given, context_length=given)
    assert (request.ctx_pool, request.context_length) == (16384, 4096)
    assert not request.context_given


def test_req_c17_a_request_may_not_use_more_than_the_pool() -> None:
    sentence = refused(ctx_pool=8192, context_length=8193)
    assert "8193" in sentence
    assert "8192" in sentence
    assert asked(ctx_pool=8192, context_length=8192).context_given
    # A pool smaller than the default context is no contradiction of a person who named no context.
    assert asked(ctx_pool=1024).context_length == 1024


def test_req_c18_name_aliases_and_description_are_taken_and_checked() -> None:
    request = asked(name="n", aliases=["a", "b"], description="d", revision=" main ")
    assert (request.name, request.aliases, request.description) == ("n", ("a", "b"), "d")
    assert request.revision == "main"
    assert "name: expected" in refused(name="x" * 201)
    assert "aliases[0]: expected" in refused(aliases=[""])
    assert "must differ" in refused(name="n", aliases=["n"])
    assert "given twice" in refused(aliases=["a", "a"])
    assert "control characters" in refused(file="a\x1b[0m.gguf")
    assert "control characters" in refused(description="a\x00b")
    assert "too long" in refused(description="x" * 1800)


def test_req_c4_starting_returns_at_once_and_the_job_runs_on_its_own() -> None:
    y = serve_yard()
    outcome = y.serve()
    assert outcome.status == "accepted"
    assert outcome.sentence == "job j-0001 started: owner/model-gguf"
    assert outcome.refs == ("yard.evt.job.j-0001",)
    assert y.job().state == "running"


def test_req_c6_a_job_says_who_asked_for_what_and_when() -> None:
    y = serve_yard()
    y.serve()
    job = y.job()
    assert (job.by, job.started, job.request.repo) == ("admin", y.now, "owner/model-gguf")
    [step] = job.steps
    assert (step.name, step.state, step.at) == ("registry", "running", y.now)


def test_req_c13_a_refused_request_leaves_no_job() -> None:
    y = serve_yard()
    outcome = y.serve("nonsense")
    assert (outcome.status, outcome.code) == ("rejected", codes.INVALID)
    assert y.world.jobs == {}


def test_an_identical_request_joins_the_running_job() -> None:
    y = serve_yard()
    y.serve(name="m")
    again = y.serve("OWNER/model-GGUF", name="m", quant="q4_k_m")
    assert again.status == "accepted"
    assert again.sentence.startswith("joined: job j-0001")
    assert again.refs == ("yard.evt.job.j-0001",)
    assert len(y.world.jobs) == 1
    other = y.serve(name="n")
    assert other.refs == ("yard.evt.job.j-0002",)


def test_a_request_identical_to_a_job_that_is_over_starts_anew() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().state == "done"
    assert y.serve(replicas=0).refs == ("yard.evt.job.j-0002",)


def test_cancel_ends_a_job_and_says_what_was_left() -> None:
    y = serve_yard()
    y.serve()
    outcome = y.do(JobCancel(job="j-0001"))
    assert outcome.sentence == "job j-0001 cancelled; left: no files; no catalog entry"
    job = y.job()
    assert (job.state, job.ended_at) == ("cancelled", y.now)
    assert [(s.state, s.detail) for s in job.steps] == [("skipped", "cancelled by admin")]
    assert y.tasks() == ()


def test_cancel_names_files_bytes_and_the_entry() -> None:
    y = serve_yard(repo("o/m", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"))
    y.serve("o/m", quant="Q8_0")
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    first, second = y.tasks()
    y.reports.append(y.perform(first))
    y.settle()
    outcome = y.do(JobCancel(job="j-0001"))
    assert "1 of 2 files (1 GiB) on the mirror" in outcome.sentence
    assert "what came so far of 1 file (1 GiB), kept for a retry" in outcome.sentence
    assert "no catalog entry" in outcome.sentence
    assert y.tasks() == (), "the download stops"
    assert sorted(y.copies()) == ["failed", "present"]
    del second


def test_cancel_at_placement_leaves_the_entry_and_says_so() -> None:
    y = serve_yard()
    y.serve()
    y.run_workers()
    assert y.job().steps[-1].name == "placement"
    outcome = y.do(JobCancel(job="j-0001"))
    assert "the catalog entry 'model' with 1 replica kept running" in outcome.sentence
    assert y.world.models["model"].scaling.min == 1


def test_cancel_and_retry_refuse_what_they_cannot_do() -> None:
    y = serve_yard()
    assert y.do(JobCancel(job="j-9")).code == codes.NOT_FOUND
    assert y.do(JobRetry(job="j-9")).code == codes.NOT_FOUND
    y.serve(replicas=0)
    running = y.do(JobRetry(job="j-0001"))
    assert (running.code, running.sentence) == (codes.CONFLICT, "job j-0001 is running already")
    y.run_workers()
    done = y.do(JobCancel(job="j-0001"))
    assert (done.code, done.sentence) == (codes.CONFLICT, "job j-0001 is done already")
    assert y.do(JobRetry(job="j-0001")).code == codes.CONFLICT


def test_retry_goes_on_from_the_first_step_that_is_not_done() -> None:
    y = serve_yard()
    y.fails["Fetch"] = ("no_progress", "no byte came")
    y.serve()
    y.run_workers()
    assert y.job().state == "failed"
    assert [s for _, s in y.steps()] == ["done", "done", "failed"]
    y.fails.clear()
    outcome = y.do(JobRetry(job="j-0001"))
    assert outcome.sentence == "job j-0001 goes on at mirror"
    assert outcome.refs[0] == "yard.evt.job.j-0001"
    job = y.job()
    assert (job.state, job.attempt, job.error, job.code) == ("running", 2, "", "")
    y.run_workers()
    y.advance(10)
    assert y.job().state == "done"
    assert len(y.fetched) == 1


def test_retry_of_a_job_that_failed_at_its_first_step_reads_the_registry_again() -> None:
    y = serve_yard()
    y.fails["ReadRepo"] = (codes.RATE_LIMITED, "too many requests")
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.RATE_LIMITED, "too many requests")
    y.fails.clear()
    assert y.do(JobRetry(job="j-0001")).sentence == "job j-0001 goes on at registry"
    y.run_workers()
    y.advance(10)
    assert y.job().state == "done"


def test_retry_fetches_again_what_the_mirror_has_no_more() -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "the replica answered 500: no")
    y.serve()
    y.advance(10)
    assert y.job().state == "failed"
    y.do(ModelRemove(model="model"))
    y.stores.clear()
    [file] = y.world.files.values()
    y.reports.append(FileGone(key=file.key, mirror="cp1"))
    y.settle()
    assert y.copies() == ["absent"]
    y.fails.clear()
    outcome = y.do(JobRetry(job="j-0001"))
    assert outcome.sentence.startswith("job j-0001 goes on at mirror")
    assert "fetched again" in outcome.sentence
    assert "its entry 'model' was removed meanwhile and is added again" in outcome.sentence
    y.advance(10)
    assert y.job().state == "done"
    assert y.ready("model")


def test_retry_says_that_another_model_has_the_name_by_now() -> None:
    y = serve_yard()
    y.fails["Fetch"] = ("no_progress", "no byte came")
    y.serve()
    y.run_workers()
    entry = {
        "name": "model",
        "source": "/m.gguf",
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "1GiB"}],
    }
    assert y.do(ModelAdd(entry=entry)).status == "accepted"
    outcome = y.do(JobRetry(job="j-0001"))
    assert outcome.code == codes.EXISTS
    assert "another model" in outcome.sentence
    assert "--name" in outcome.sentence


def test_retry_is_refused_while_another_job_does_the_same() -> None:
    y = serve_yard()
    y.fails["Fetch"] = ("no_progress", "no byte came")
    y.serve()
    y.run_workers()
    y.fails.clear()
    y.serve()
    outcome = y.do(JobRetry(job="j-0001"))
    assert outcome.code == codes.CONFLICT
    assert "job j-0002" in outcome.sentence


def test_a_job_that_is_over_ends_after_job_kept_s() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.do(ModelRemove(model="model"))
    y.now += timedelta(days=6)
    y.settle()
    assert "j-0001" in y.world.jobs
    y.now += timedelta(days=1, seconds=1)
    y.settle()
    assert y.world.jobs == {}
    assert y.log[-1].type == "job.deleted"
    assert y.step().wake_at is None or y.settle() == []


def test_the_wake_up_is_when_the_first_job_is_to_end() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.do(ModelRemove(model="model"))
    y.gateways.clear()
    wake = y.step().wake_at
    assert wake is not None
    assert wake <= y.now + timedelta(days=7)


def test_joined_jobs_cannot_be_retried() -> None:
    y = serve_yard()
    y.serve(quant="Q4_K_M")
    y.serve(file="model-Q4_K_M.gguf")
    y.run_workers()
    assert y.job("j-0002").state == "joined"
    outcome = y.do(JobRetry(job="j-0002"))
    assert outcome.code == codes.CONFLICT
    assert "joined job j-0001" in outcome.sentence


def test_a_job_carries_its_request_as_it_was_checked() -> None:
    y = serve_yard()
    y.serve(" owner/model-gguf/ ", aliases=["x"])
    assert y.job().request == replace(asked(aliases=["x"]), repo="owner/model-gguf")


def test_an_end_that_cannot_be_written_keeps_nobody_awake() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.do(ModelRemove(model="model"))
    y.gateways.clear()
    for noun, keys in (("job", y.world.jobs), ("file", y.world.files)):
        for key in keys:
            subject = y.world.subject(noun, key)
            y.world.heads[subject] = replace(y.world.heads[subject], writable=False, problem="new")
    y.now += timedelta(days=8)
    y.settle()
    wake = y.step().wake_at
    assert wake is None or wake > y.now + timedelta(seconds=1)
    assert "j-0001" in y.world.jobs


def test_nothing_is_ended_while_the_audit_is_behind() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.do(ModelRemove(model="model"))
    y.audit_behind = True
    y.do(MirrorGc())
    y.run_workers()
    y.now += timedelta(days=8)
    y.settle()
    assert len(y.world.jobs) == len(y.world.files) == 1
    y.audit_behind = False
    y.settle()
    assert y.world.jobs == y.world.files == {}
