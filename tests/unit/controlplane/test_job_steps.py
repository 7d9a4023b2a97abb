"""A serve job from the registry to the catalog: what each step says, checks and leaves behind."""

from datetime import timedelta

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.domain import filesets
from controlplane.domain.reports import HeaderRead, RepoRead, StepFailed
from controlplane.domain.work import Fetch, ReadHeader, ReadRepo
from schemas import codes
from schemas.commands import JobRetry, MirrorGc, ModelAdd, ModelRemove
from schemas.file import FileDeleted
from schemas.job import Job
from tests.support.serving import COMMIT, join, llamacpp, repo, serve_yard, sha_of, shape
from tests.support.worlds import GIB

SHARDS = tuple(f"big/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3))


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


# -- the check ahead of the download


def test_req_c41_an_architecture_no_engine_loads_fails_before_the_download() -> None:
    y = serve_yard(engines=(llamacpp("llama", "qwen2", version="b6000"),))
    y.header = shape(architecture="mamba9")
    y.serve()
    y.run_workers()
    job = y.job()
    assert job.code == codes.ARCHITECTURE_UNKNOWN
    assert job.error == (
        "llama.cpp b6000 on the nodes cannot run this: it does not know the architecture 'mamba9'"
    )
    assert y.steps() == [("registry", "done"), ("check", "failed")]
    assert y.fetched == []


def test_req_c41_one_node_whose_engine_loads_it_is_enough() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    join(y, "n2", engines=(llamacpp("llama", "mamba9"),))
    y.settle()
    y.header = shape(architecture="mamba9")
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().state == "done"


def test_req_c45_a_header_without_an_architecture_is_said_and_not_held_against_it() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    y.header, y.header_why = None, "version 7"
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().state == "done"
    assert y.job().steps[1].detail.startswith("architecture not read (version 7)")


def test_req_c43_the_estimate_says_its_parts() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    detail = y.job().steps[3].detail
    assert detail.startswith("llama, weights 1.0 GiB + KV cache ")
    assert "for 16384 tokens" in detail
    assert "engine" in detail
    made = y.job().estimate
    assert made is not None
    assert made.basis == "header"
    [profile] = y.world.models["model"].profiles
    assert profile.memory_bytes == -(-made.total_bytes // GIB) * GIB


def test_req_c44_without_a_shape_memory_follows_from_the_size_and_says_so() -> None:
    y = serve_yard(repo(size=3 * GIB))
    y.header = None
    y.serve(replicas=0)
    y.run_workers()
    made = y.job().estimate
    assert made is not None
    assert (made.basis, made.total_bytes) == ("size", 6 * GIB)
    assert "by the size of the files alone" in y.job().steps[1].detail


def test_req_c42_of_a_set_of_shards_the_first_is_read() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.header = shape(split_count=3)
    y.serve("o/m", quant="Q8_0", replicas=0)
    paths: list[tuple[str, bool]] = []
    for _ in range(20):
        for task in y.tasks():
            if isinstance(task, ReadHeader):
                paths.append((task.path, task.mirrored))
            y.reports.append(y.perform(task))
        y.settle()
    assert paths == [(SHARDS[0], False), (SHARDS[0], True)]
    assert y.job().state == "done"
    made = y.job().estimate
    assert made is not None
    assert made.basis == "header"
    assert made.weights_bytes == 3 * GIB, "of all shards"


def test_a_file_that_is_a_shard_of_something_else_is_told() -> None:
    y = serve_yard()
    y.header = shape(split_count=4)
    y.serve()
    y.run_workers()
    assert y.job().code == codes.SHARD_MISSING
    assert "4 shards" in y.job().error


def test_scn_c7_a_disk_smaller_than_the_files_is_refused_before_the_download() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.free_bytes = 2 * GIB
    y.serve("o/m", quant="Q8_0")
    y.run_workers()
    assert y.job().code == codes.DISK_FULL
    assert y.job().error == (
        "the mirror's disk has 2 GiB free, and 3 GiB of 3 GiB are still to be fetched; "
        "`yardctl mirror gc` removes what nothing needs, or give the mirror more disk"
    )
    assert y.fetched == []


def test_scn_c7_what_is_there_already_needs_no_room() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    y.free_bytes = 0
    y.serve("o/m", quant="Q8_0", replicas=0, name="again")
    y.run_workers()
    assert y.job("j-0002").state == "done"
    assert len(y.fetched) == 3


def test_scn_c7_what_a_fetch_has_reserved_needs_no_room_again() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.free_bytes = 2 * GIB
    y.reserved = {filesets.file_key("o/m", COMMIT, SHARDS[0]): GIB}
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    assert y.job().state == "done"


def test_scn_c7_the_same_bytes_at_another_commit_need_no_room() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    y.hub["o/m"] = repo("o/m", *SHARDS, commit="f" * 40)
    y.free_bytes = 0
    y.serve("o/m", quant="Q8_0", replicas=0, name="again")
    y.run_workers()
    assert y.job("j-0002").state == "done"


def test_scn_c12_a_context_longer_than_the_models_names_both_numbers() -> None:
    y = serve_yard()
    y.header = shape(trained_context=2048)
    y.serve(context_length=4096)
    y.run_workers()
    assert y.job().code == codes.CONTEXT_TOO_LONG
    assert "4096" in y.job().error
    assert "2048" in y.job().error
    assert y.fetched == []


def test_scn_c12_the_number_used_is_the_number_passed_and_shown() -> None:
    y = serve_yard()
    y.header = shape(trained_context=512)
    y.serve(replicas=0)
    y.run_workers()
    job, entry = y.job(), y.world.models["model"]
    assert job.context_length == entry.context_length == 512
    assert "context 512 tokens" in job.steps[1].detail
    assert entry.max_output == 512, "an answer is no longer than the context"
    y.header = shape(trained_context=8192)
    y.serve(replicas=0, name="b", context_length=8000)
    y.run_workers()
    assert y.world.models["b"].context_length == 8000
    # Two slots of 8192 leave each request what it was promised; four would not.
    assert y.world.models["b"].profiles[0].args == ("--ctx-size", "16384", "--parallel", "2")


def test_req_c51_a_model_that_fits_on_no_node_fails_before_the_download_with_the_report() -> None:
    y = serve_yard(repo(size=40 * GIB))
    y.serve()
    y.run_workers()
    assert y.job().code == codes.NO_CAPACITY
    assert y.job().error.startswith("no node can host it: n1/cpu: needs ")
    assert "has 16.0 GiB" in y.job().error
    assert y.fetched == []


def test_a_yard_without_nodes_says_so() -> None:
    y = serve_yard(gib=0)
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.NO_CAPACITY, "no node has joined this yard")


def test_a_yard_whose_nodes_are_all_away_says_so() -> None:
    y = serve_yard()
    y.stop_agent("n1")
    y.serve()
    y.run_workers()
    assert (y.job().code, y.job().error) == (codes.NO_CAPACITY, "no node is reachable")


def test_a_model_that_fits_only_when_others_leave_is_not_refused() -> None:
    y = serve_yard(gib=3)
    y.serve(name="one")
    y.advance(10)
    y.serve(name="two", replicas=0)
    y.run_workers()
    assert y.job("j-0002").state == "done"
    assert "others must leave first" in y.job("j-0002").steps[1].detail


# -- the mirror


def test_req_c29_files_are_fetched_at_the_pinned_commit() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    [task] = y.tasks()
    assert isinstance(task, Fetch)
    assert (task.repo, task.commit, task.path) == ("Owner/Model-GGUF", COMMIT, "model-Q4_K_M.gguf")


def test_req_c30_every_file_is_asked_for_and_one_that_is_there_is_no_failure() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    assert len(y.fetched) == 3
    y.serve("o/m", quant="Q8_0", replicas=0, name="again")
    y.run_workers()
    assert y.job("j-0002").state == "done"
    assert len(y.fetched) == 3


def test_req_c31_a_fetch_that_fails_fails_the_job() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.fails["Fetch"] = (codes.DISK_FULL, "no space left")
    y.serve("o/m", quant="Q8_0")
    y.run_workers()
    assert y.job().state == "failed"
    assert y.job().code == codes.DISK_FULL


def test_req_c32_a_fetch_without_progress_fails_whatever_the_whole_took() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    y.now += timedelta(hours=30)
    y.settle()
    assert y.job().state == "running", "hours of progress are no failure"
    y.fails["Fetch"] = (codes.NO_PROGRESS, "no byte came for 300 s")
    y.run_workers()
    assert y.job().error == "the mirror could not fetch it: no byte came for 300 s"


def test_req_c33_the_step_says_how_many_files_are_there() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    for here in (1, 2):
        y.reports.append(y.perform(y.tasks()[0]))
        y.now += timedelta(seconds=6)
        y.settle()
        assert f"{here} of 3 files are there, {here} GiB of 3 GiB" in y.job().steps[2].detail


def test_req_c34_other_files_of_that_commit_are_none_of_its_business() -> None:
    y = serve_yard(repo("o/m", "a-Q8_0.gguf", "a-Q4_K_M.gguf"))
    y.serve("o/m", quant="Q8_0", name="eight")
    y.run_workers()
    y.serve("o/m", name="four")
    for _ in range(3):
        y.settle()
        due = [t for t in y.tasks() if not isinstance(t, Fetch)]
        y.reports.extend(y.perform(task) for task in due)
    y.settle()
    assert y.job("j-0002").steps[-1].name == "mirror"
    assert y.job("j-0002").steps[-1].state == "running", "BUG C-1"
    y.run_workers()
    assert len(y.fetched) == 2


def test_req_c35_a_failed_copy_fails_the_job_at_once_with_its_reason() -> None:
    y = serve_yard()
    y.fails["Fetch"] = (codes.SIZE_MISMATCH, "it has 7 bytes")
    y.serve()
    y.run_workers()
    assert y.job().error == "the mirror could not fetch it: it has 7 bytes"
    assert y.job().code == codes.SIZE_MISMATCH


def test_req_c35_a_failure_without_a_text_is_not_overlooked() -> None:
    y = serve_yard()
    y.fails["Fetch"] = ("", "")
    y.serve()
    y.run_workers()
    assert y.job().state == "failed"


def test_inv_5_a_file_nothing_can_be_written_about_is_not_waited_for() -> None:
    y = serve_yard()
    y.serve()
    y.reports.append(y.perform(y.tasks()[0]))
    y.settle()
    [key] = y.world.files
    subject = y.world.subject("file", key)
    y.world.heads[subject] = replace(
        y.world.heads[subject], writable=False, type="", problem="not JSON"
    )
    y.run_workers()
    assert y.job().code == codes.BROKEN
    assert y.job().error.endswith(f"{subject} cannot be written: not JSON")


def test_req_c36_the_step_is_done_when_every_file_of_the_set_is_present() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0")
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    for left in (3, 2, 1):
        tasks = y.tasks()
        assert len(tasks) == left
        assert y.steps()[2] == ("mirror", "running")
        y.reports.append(y.perform(tasks[-1]))
        y.settle()
    assert y.steps()[2] == ("mirror", "done")


def test_req_c38_the_source_names_content_by_the_key_of_the_first_file() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    key = filesets.file_key("o/m", COMMIT, SHARDS[0])
    assert y.world.models["model"].source == f"mirror:{key}"


def test_req_c39_the_step_ends_with_the_size_and_what_the_checksums_say() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().steps[2].detail == "1 GiB, checksums match the registry"


def test_req_c37_nothing_is_claimed_of_checksums_nobody_published() -> None:
    y = serve_yard(repo(published=False))
    y.serve(replicas=0)
    y.run_workers()
    assert y.job().steps[2].detail == (
        "1 GiB, nothing to compare with: the registry publishes no checksum of it"
    ), "BUG C-4"


def test_req_c37_of_a_mixed_set_it_is_said_how_many_were_compared() -> None:
    mixed = repo("o/m", *SHARDS)
    first, *rest = mixed.files
    mixed = replace(mixed, files=(replace(first, sha256=None), *rest))
    y = serve_yard(mixed)
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    assert "for 2 of 3 files" in y.job().steps[2].detail


def test_req_c40_nothing_is_polled_while_the_mirror_works() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    decided = len(y.decisions)
    for _ in range(50):
        y.now += timedelta(seconds=60)
        y.settle()
    assert len(y.decisions) == decided, "BUG C-5: hours without news are no event"


# -- the catalog


def test_req_c46_the_entry_is_the_one_a_person_would_write() -> None:
    y = serve_yard(engines=(llamacpp("llama"),))
    y.serve(name="m", aliases=["a"], description="d", replicas=3)
    y.run_workers()
    entry = y.world.models["m"]
    assert (entry.aliases, entry.description) == (("a",), "d")
    assert (entry.context_length, entry.max_output) == (4096, 1024)
    assert (entry.scaling.min, entry.scaling.max) == (3, 3)
    [profile] = entry.profiles
    assert (profile.name, profile.engine, profile.card) == ("cpu", "llamacpp", ("cpu",))
    assert (profile.weight, profile.priority) == (1, 100)
    assert profile.args[:2] == ("--ctx-size", "16384")
    [added] = [item for item in y.log if item.type == "model.added"]
    [step] = [
        item
        for item in y.log
        if item.noun == "job" and item.seq == added.seq + 1 and isinstance(item.state, Job)
    ]
    assert step.state is not None
    assert y.steps()[4] == ("catalog", "done"), "in the same batch"


def test_weights_the_processor_gets_in_another_order_are_read_and_not_mapped() -> None:
    engines = (llamacpp("llama", kinds=("cpu", "gpu")),)
    mapped, read = (
        serve_yard(engines=engines, gpu_gib=24, header=shape(repacked=share)) for share in (0, 0.9)
    )
    for y in (mapped, read):
        y.serve()
        y.advance(10)
    cpu, gpu = read.world.models["model"].profiles
    assert cpu.args[-2:] == ("--load-mode", "none")
    assert "--load-mode" not in (*gpu.args, *mapped.world.models["model"].profiles[0].args)
    [job] = read.world.jobs.values()
    assert job.estimate is not None
    assert job.estimate.repacked_bytes == 0, "one copy is all there is"


def test_req_c50_a_gpu_that_llamacpp_can_use_gets_a_profile_that_comes_first() -> None:
    engines = (llamacpp("llama", kinds=("cpu", "gpu")),)
    y = serve_yard(engines=engines, gpu_gib=24)
    y.serve()
    y.advance(10)
    cpu, gpu = y.world.models["model"].profiles
    assert gpu.card == ("gpu",)
    assert gpu.priority > cpu.priority
    assert gpu.args == (*cpu.args, "--n-gpu-layers", "999")
    [(_, item)] = y.items("model")
    assert item.cards == ("gpu0",)


def test_req_c50_a_gpu_no_engine_can_use_gets_none() -> None:
    y = serve_yard(engines=(llamacpp("llama"),), gpu_gib=24)
    y.serve(replicas=0)
    y.run_workers()
    assert [p.name for p in y.world.models["model"].profiles] == ["cpu"]


def test_req_c12_who_asked_is_in_the_catalog() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    [added] = [item for item in y.log if item.type == "model.added"]
    assert getattr(added.event, "by", None) == "admin"


def test_req_c47_a_name_taken_during_the_download_fails_the_job() -> None:
    y = serve_yard()
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    entry = {
        "name": "model",
        "source": "/m.gguf",
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "1GiB"}],
    }
    y.do(ModelAdd(entry=entry))
    y.run_workers()
    assert y.steps()[-1] == ("catalog", "failed")
    assert y.job().code == codes.EXISTS
    assert y.world.models["model"].source == "/m.gguf", "and the other one is left alone"


def test_the_very_same_entry_is_no_hindrance() -> None:
    y = serve_yard()
    y.serve()
    y.advance(10)
    y.serve()
    y.advance(10)
    second = y.job("j-0002")
    assert second.state == "done"
    assert second.steps[4].detail == "model is in the catalog already, 1 replica kept running"
    assert y.started("model") == 1
    assert y.events("model").count("model.added") == 1


def test_an_entry_with_other_options_is_not_the_same() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    y.serve(replicas=0, aliases=["new"], ctx_pool=8192)
    y.run_workers()
    second = y.job("j-0002")
    assert second.code == codes.EXISTS
    assert "aliases, ctx_pool" in second.error


def test_req_c48_on_demand_the_job_is_done_with_its_entry() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    job = y.job()
    assert job.state == "done"
    assert job.steps[4].detail == "added on demand: it loads when first asked for"
    scaling = y.world.models["model"].scaling
    assert (scaling.min, scaling.max) == (0, 1)
    assert y.items() == []


def test_req_c7_on_demand_placement_and_smoke_test_are_skipped() -> None:
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    assert y.steps()[4:] == [
        ("catalog", "done"),
        ("placement", "skipped"),
        ("smoke test", "skipped"),
    ]


@pytest.mark.parametrize(("replicas", "said"), [(1, "1 replica"), (2, "2 replicas")])
def test_req_c49_the_catalog_step_ends_with_the_name_and_how_many(replicas: int, said: str) -> None:
    y = serve_yard()
    y.serve(replicas=replicas)
    y.run_workers()
    assert y.job().steps[4].detail == f"model added, {said}"


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
