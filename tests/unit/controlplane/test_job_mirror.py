"""The step of a serve job that has its files fetched into the mirror."""

from datetime import timedelta

from msgspec.structs import replace

from controlplane.domain import filesets
from controlplane.domain.work import Fetch
from schemas import codes
from tests.support.serving import COMMIT, SHARDS, repo, serve_yard


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
