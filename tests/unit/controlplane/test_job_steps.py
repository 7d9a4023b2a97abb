"""A serve job step by step: what each says, what the registry tells it, and what of its past it ignores."""

import msgspec
from msgspec.structs import replace

from controlplane.domain import filesets
from controlplane.domain.reports import HeaderRead, RepoRead, StepFailed
from controlplane.domain.work import Fetch, ReadHeader, ReadRepo
from schemas import codes
from schemas.commands import JobRetry, MirrorGc, ModelAdd, ModelRemove
from schemas.file import FileDeleted
from schemas.job import Job
from tests.support.serving import COMMIT, SHARDS, repo, serve_yard, sha_of, shape
from tests.support.worlds import GIB


def test_req_c11_the_steps_come_in_order_and_say_what_they_do_first() -> None:
    y = serve_yard(compares=True)
    y.serve()
    y.advance(10)
    assert [name for name, _ in y.steps()] == [
        "registry",
        "check",
        "mirror",
        "check",
        "catalog",
        "placement",
        "smoke test",
    ]
    assert {state for _, state in y.steps()} == {"done"}


def test_req_c67_every_step_says_what_it_is_doing_before_it_does() -> None:
    y = serve_yard()
    y.serve()
    y.advance(10)
    said = y.details()
    for text in (
        "reading owner/model-gguf",
        "reading its header from the registry",
        "asking the mirror for model-Q4_K_M",
        "reading its header from the mirror",
        "adding model",
        "waiting for the control plane to place it",
        "asking r-0001 to say hello",
    ):
        assert text in said, said


def test_req_c9_a_step_replaces_itself_and_the_next_is_appended() -> None:
    y = serve_yard()
    y.serve()
    y.run_workers()
    lengths = [
        len(item.state.steps)
        for item in y.log
        if item.noun == "job" and isinstance(item.state, Job)
    ]
    assert lengths == sorted(lengths)
    assert lengths.count(1) == 2, "running, then done"


def test_req_c10_step_and_job_fail_with_the_same_text_and_later_steps_do_not_appear() -> None:
    y = serve_yard()
    y.fails["ReadHeader"] = (codes.NOT_GGUF, "model-Q4_K_M.gguf is no GGUF file")
    y.serve()
    y.run_workers()
    job = y.job()
    assert (job.state, job.code, job.error) == (
        "failed",
        codes.NOT_GGUF,
        "model-Q4_K_M.gguf is no GGUF file",
    )
    assert y.steps() == [("registry", "done"), ("check", "failed")]
    assert job.steps[-1].detail == job.error
    [what] = [d.what for d in y.decisions if "failed at" in d.what]
    for part in ("j-0001", "owner/model-gguf", "check"):
        assert part in what


def test_req_c19_what_the_registry_says_fails_the_job_in_its_own_words() -> None:
    y = serve_yard()
    y.fails["ReadRepo"] = (codes.NEEDS_TOKEN, "o/m is gated and needs a token")
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.NEEDS_TOKEN, "o/m is gated and needs a token")


def test_req_c20_the_name_is_the_requests_else_the_suggestion_and_set_before_the_download() -> None:
    y = serve_yard(repo(name="smol"))
    y.serve()
    y.serve(name="mine")
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    assert y.job("j-0001").model == "smol"
    assert y.job("j-0002").model == "mine"
    assert y.fetched == []


def test_req_c20_a_suggestion_no_catalog_could_take_is_made_fit() -> None:
    y = serve_yard(repo(name=" a\nb\x00c " + "x" * 300))
    y.serve(replicas=0)
    y.run_workers()
    name = y.job().model
    assert name.startswith("a-b-c")
    assert len(name) == 200
    assert name in y.world.models


def test_req_c21_the_registry_step_ends_with_set_size_files_and_revision() -> None:
    y = serve_yard(repo("o/m", *SHARDS, size=3 * GIB // 2))
    y.serve("o/m", quant="Q8_0")
    y.reports.append(y.perform(y.tasks()[0]))
    y.settle()
    assert y.job().steps[0].detail == "big/m-Q8_0, 4.5 GiB, 3 files, 0123456"


def test_the_registry_step_pins_commit_files_and_key() -> None:
    y = serve_yard(repo("O/M", *SHARDS))
    y.serve("o/m", quant="Q8_0")
    y.reports.append(y.perform(y.tasks()[0]))
    y.settle()
    job = y.job()
    assert (job.repo, job.commit) == ("O/M", COMMIT)
    assert len(job.key) == 64, "a digest: the names may be long"
    assert sorted(y.world.files) == sorted(filesets.file_key("O/M", COMMIT, p) for p in SHARDS)
    for file in y.world.files.values():
        assert (file.published_bytes, file.published_sha256) == (GIB, sha_of(file.path))
        assert file.copies == ()


def test_req_c24_a_repository_without_gguf_is_named() -> None:
    y = serve_yard(repo("o/m", "model.safetensors", "mmproj-f16.gguf"))
    y.serve("o/m")
    y.run_workers()
    assert y.job().code == codes.NO_GGUF
    assert y.job().error == "o/m has no GGUF files; the nodes run llama.cpp, which needs one"


def test_req_c25_a_file_named_is_taken_whatever_quant_is_given() -> None:
    y = serve_yard(repo("o/m", "a-Q8_0.gguf", "a-Q4_K_M.gguf"))
    y.serve("o/m", file="a-Q8_0.gguf", quant="Q4_K_M")
    y.run_workers()
    file_set = y.job().file_set
    assert file_set is not None
    assert file_set.first == "a-Q8_0.gguf"


def test_req_c28_no_match_names_what_there_is() -> None:
    y = serve_yard(repo("o/m", "a-Q8_0.gguf", "a-Q5_K_M.gguf"))
    y.serve("o/m")
    y.run_workers()
    assert y.job().code == codes.NO_SUCH_FILE
    for part in ('"Q4_K_M"', "a-Q5_K_M", "a-Q8_0"):
        assert part in y.job().error


def test_two_jobs_for_the_same_files_and_name_become_one() -> None:
    y = serve_yard(compares=True)
    y.serve(quant="Q4_K_M")
    y.serve(file="model-Q4_K_M.gguf")
    y.run_workers()
    second = y.job("j-0002")
    assert (second.state, second.joined) == ("joined", "j-0001")
    assert [s.state for s in second.steps] == ["done"]
    assert "j-0001" in second.steps[0].detail
    assert len(y.fetched) == 1


def test_scn_c9_two_jobs_that_want_the_same_file_share_one_download() -> None:
    y = serve_yard(compares=True)
    y.serve(name="one")
    y.serve(name="two")
    y.advance(20)
    assert len(y.fetched) == 1
    assert [y.job(id_).state for id_ in ("j-0001", "j-0002")] == ["done", "done"]
    assert y.ready("one")
    assert y.ready("two")


def test_scn_c10_the_commit_pinned_at_the_start_is_used_to_the_end() -> None:
    y = serve_yard()
    y.serve(revision="main")
    assert [t.revision for t in y.tasks() if isinstance(t, ReadRepo)] == ["main"]
    y.reports.append(y.perform(y.tasks()[0]))
    y.settle()
    y.hub["owner/model-gguf"] = repo(commit="f" * 40, size=2 * GIB)
    for _ in range(3):
        for task in y.tasks():
            assert isinstance(task, ReadHeader | Fetch)
            assert task.commit == COMMIT
            y.reports.append(y.perform(task))
        y.settle()
    assert y.job().commit == COMMIT
    assert all(file.commit == COMMIT for file in y.world.files.values())


def test_scn_c10_a_retry_that_reads_the_registry_again_asks_for_the_pinned_commit() -> None:
    y = serve_yard()
    y.fails["Smoke"] = (codes.SMOKE_FAILED, "no")
    y.serve(revision="main")
    y.advance(10)
    y.do(ModelRemove(model="model"))
    y.do(MirrorGc())
    y.run_workers()
    # The file's aggregate ends only with the job; here an operator's repair took it.
    [key] = y.world.files
    y.append("file", (key,), FileDeleted(), None)
    assert y.do(JobRetry(job="j-0001")).sentence == "job j-0001 goes on at registry"
    [task] = y.tasks()
    assert isinstance(task, ReadRepo)
    assert task.revision == COMMIT


def test_a_taken_name_fails_before_the_download_and_names_the_way_out() -> None:
    y = serve_yard()
    entry = {
        "name": "model",
        "aliases": ["other"],
        "source": "/m.gguf",
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "1GiB"}],
    }
    y.do(ModelAdd(entry=entry))
    y.serve()
    y.serve(name="other")
    y.serve(name="fine", aliases=["model"])
    y.run_workers()
    for id_, option in (("j-0001", "--name"), ("j-0002", "--name"), ("j-0003", "--alias")):
        job = y.job(id_)
        assert (job.state, job.code) == ("failed", codes.EXISTS)
        assert y.steps(id_) == [("registry", "failed")]
        assert option in job.error
    assert y.fetched == []


def test_another_running_job_holds_its_name_too() -> None:
    y = serve_yard(repo("o/m", "a-Q8_0.gguf", "a-Q4_K_M.gguf"))
    y.serve("o/m")
    y.serve("o/m", quant="Q8_0")
    y.run_workers()
    assert y.job("j-0001").state == "running"
    assert y.job("j-0002").code == codes.EXISTS
    assert "j-0001" in y.job("j-0002").error


# -- reports that come late


def test_reports_of_another_attempt_or_step_change_nothing() -> None:
    y = serve_yard()
    y.serve()
    late = RepoRead(job="j-0001", attempt=2, repo=repo())
    unknown = replace(late, job="j-9")
    header = HeaderRead(job="j-0001", attempt=1, index=3, shape=None)
    failed = StepFailed(job="j-0001", attempt=1, index=1, code="x", sentence="y")
    seq = y.world.position
    y.reports += [late, unknown, header, failed]
    y.settle()
    assert y.reports == []
    assert y.world.position == seq


def test_a_report_told_twice_is_folded_once() -> None:
    y = serve_yard(compares=True)
    y.serve(replicas=0)
    for _ in range(10):
        due = y.tasks()
        y.reports.extend(y.perform(task) for task in (*due, *due))
        y.settle()
    assert y.job().state == "done"
    assert y.events("file") == ["file.absent", "file.fetching", "file.present"]


def test_the_state_of_a_job_stays_small_whatever_is_in_it() -> None:
    long = "ä\n\t" * 4000
    owner, name = "o" * 96 + "/" + "m" * 96, "\U0001f600" * 200
    y = serve_yard(repo(owner, "d" * 130 + "/" + "x" * 150 + "-Q4_K_M.gguf"))
    y.reply = long
    y.header = shape(architecture="a" * 200)
    assert y.serve(owner, name=name, description="d" * 500).status == "accepted"
    y.advance(10)
    assert y.job().state == "done"
    y.fails["Smoke"] = ("x", long)
    y.serve(owner, name=name, description="d" * 500, replicas=2)
    y.run_workers()
    assert (y.job("j-0002").state, y.steps("j-0002")[-1]) == ("failed", ("smoke test", "failed"))
    # Ids and times of a real yard are longer.
    most = max(len(msgspec.json.encode(item.state)) for item in y.log if item.noun == "job")
    assert most + 500 < 8192


def test_req_c2_the_catalog_has_no_entry_of_a_job_that_failed_its_checks() -> None:
    y = serve_yard()
    y.header = shape(trained_context=1024)
    y.serve(context_length=2048)
    y.run_workers()
    assert y.world.models == {}
