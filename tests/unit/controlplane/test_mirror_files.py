"""What the leader's mirror is to do with each file, and what people may wish for it."""

from datetime import timedelta

import msgspec
import pytest

from controlplane.domain import files, filesets
from controlplane.domain.needs import needed_files
from controlplane.domain.reports import FileFault, FileGone, FileStored
from controlplane.domain.work import Fetch, Remove, Verify
from events.envelope import MAX_EVENT_BYTES
from schemas import codes
from schemas.commands import (
    JobCancel,
    JobRetry,
    MirrorGc,
    MirrorRemove,
    MirrorVerify,
    ModelAdd,
    ModelRemove,
)
from schemas.file import Copy, File, FileAbsent, FileFetching
from schemas.replica import Replica, ReplicaFetching
from tests.support.serving import COMMIT, ServeYard, repo, serve_yard, sha_of
from tests.support.worlds import GIB

SHARDS = tuple(f"m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3))
PATH = "model-Q4_K_M.gguf"
KEY = filesets.file_key("Owner/Model-GGUF", COMMIT, PATH)


def fetching(**fields: object) -> ServeYard:
    """A yard whose job waits for its one file."""
    y = serve_yard(**fields)  # type: ignore[arg-type]
    y.serve()
    for _ in range(2):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    assert y.copies() == ["fetching"]
    return y


def served(**fields: object) -> ServeYard:
    """A yard whose mirror has the file and whose entry needs it."""
    y = serve_yard(**fields)  # type: ignore[arg-type]
    y.serve(replicas=0)
    y.run_workers()
    assert y.copies() == ["present"]
    return y


def lone(y: ServeYard) -> File:
    [file] = y.world.files.values()
    return file


def stored(**fields: object) -> FileStored:
    defaults: dict[str, object] = {
        "key": KEY,
        "mirror": "cp1",
        "sha256": sha_of(PATH),
        "bytes": GIB,
        "compared": True,
        "origin": "registry",
    }
    return FileStored(**{**defaults, **fields})  # type: ignore[arg-type]


# -- fetching


def test_a_needed_file_is_fetched_with_what_was_published_of_it() -> None:
    y = fetching()
    [task] = y.tasks()
    assert task == Fetch(
        key=KEY,
        repo="Owner/Model-GGUF",
        commit=COMMIT,
        path=PATH,
        bytes=GIB,
        sha256=sha_of(PATH),
    )
    y.reports.append(y.perform(task))
    y.settle()
    file = lone(y)
    assert (file.sha256, file.bytes) == (sha_of(PATH), GIB)
    assert y.copies() == ["present"]


def test_a_file_present_elsewhere_is_fetched_to_the_leaders_own_mirror_from_there() -> None:
    y = served()
    y.mirror = "cp2"
    y.settle()
    assert y.copies("cp1") == ["present"]
    assert y.copies("cp2") == ["fetching"]
    [task] = y.tasks()
    assert isinstance(task, Fetch)
    assert task.others == ("cp1",)
    y.run_workers()
    assert y.copies("cp2") == ["present"]
    assert len(y.fetched) == 1, "the registry was asked once"
    assert lone(y).copies[1].mirror == "cp2"


def test_one_mirror_at_a_time_fetches_a_file() -> None:
    y = fetching()
    y.mirror = "cp2"
    y.settle()
    assert [(c.mirror, c.phase) for c in lone(y).copies] == [("cp2", "fetching")]


def test_a_mirror_that_is_gone_keeps_what_the_log_says_it_has() -> None:
    y = served()
    y.mirror = "cp2"
    y.run_workers()
    assert y.copies("cp1") == ["present"]


def test_a_leader_without_a_mirror_fetches_nothing() -> None:
    y = serve_yard(mirror="")
    y.serve()
    y.run_workers()
    assert y.job().steps[-1].name == "mirror"
    assert y.copies() == ["absent"]
    y.now += timedelta(seconds=6)
    y.settle()
    assert "has no mirror" in y.job().steps[-1].detail
    y.mirror = "cp1"
    y.run_workers()
    assert y.steps()[2] == ("mirror", "done")


def test_a_fetch_nobody_needs_any_more_ends() -> None:
    y = fetching()
    y.do(JobCancel(job="j-0001"))
    (copy,) = y.world.files[KEY].copies
    assert (copy.phase, copy.code) == ("failed", "interrupted")
    assert y.tasks() == ()
    y.do(JobRetry(job="j-0001"))
    assert y.copies() == ["fetching"], "it is no fault that a retry would wait for"


def test_what_a_cancelled_fetch_left_is_collected() -> None:
    y = fetching()
    y.do(JobCancel(job="j-0001"))
    outcome = y.do(MirrorGc())
    assert "1 file" in outcome.sentence
    assert y.copies() == ["removing"]
    y.run_workers()
    assert y.copies() == ["absent"]
    assert y.do(MirrorGc()).sentence.startswith("nothing to remove")


def test_a_failed_copy_only_an_entry_needs_is_fetched_again_later_each_time() -> None:
    y = served()
    y.mirror = "cp2"
    y.stores.clear()
    y.fails["Fetch"] = ("no_progress", "no byte came")
    waits: list[float] = []
    for _ in range(8):
        y.run_workers()
        mine = files.copy_on(lone(y), "cp2")
        assert mine is not None
        assert (mine.phase, mine.code, mine.reason) == ("failed", "no_progress", "no byte came")
        assert mine.retry_at is not None
        waits.append((mine.retry_at - y.now).total_seconds())
        wake = y.step().wake_at
        assert wake is not None
        assert wake <= mine.retry_at
        y.now = mine.retry_at
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    y.fails.clear()
    y.run_workers()
    assert y.copies("cp2") == ["present"]


def test_a_job_that_comes_later_does_not_wait_for_the_backoff() -> None:
    y = served()
    y.mirror = "cp2"
    y.stores.clear()
    y.fails["Fetch"] = ("no_progress", "no byte came")
    y.run_workers()
    assert y.copies("cp2") == ["failed"]
    y.fails.clear()
    y.now += timedelta(seconds=1)
    y.serve(replicas=0, name="other")
    y.run_workers()
    assert y.job("j-0002").state == "done"


@pytest.mark.parametrize("phase", ["present", "removing"])
def test_a_late_fault_of_a_file_that_is_there_changes_nothing(phase: str) -> None:
    y = served()
    if phase == "removing":
        y.do(ModelRemove(model="model"))
        y.do(MirrorRemove(what=KEY))
    seq = y.world.position
    y.reports.append(FileFault(key=KEY, mirror="cp1", code="x", sentence="y"))
    y.reports.append(FileFault(key="0" * 64, mirror="cp1", code="x", sentence="y"))
    y.settle()
    assert y.world.position == seq


def test_a_late_copy_is_taken_as_the_fact_it_is() -> None:
    y = fetching()
    y.do(JobCancel(job="j-0001"))
    y.reports.append(stored())
    y.settle()
    assert y.copies() == ["present"]
    seq = y.world.position
    y.reports.append(stored(origin="store"))
    y.settle()
    assert y.world.position == seq


def test_req_c37_other_bytes_than_published_are_no_copy_and_both_sums_are_named() -> None:
    y = fetching()
    y.reports.append(stored(sha256="beef" * 16))
    y.settle()
    assert y.job().code == codes.CHECKSUM_MISMATCH
    assert f"{PATH} has the sha256 beefbeefbeef" in y.job().error
    assert f"the registry published {sha_of(PATH)[:12]}" in y.job().error
    assert y.copies() == ["failed"]


def test_req_c37_checksums_are_compared_in_any_case() -> None:
    y = fetching()
    y.reports.append(stored(sha256=sha_of(PATH).upper()))
    y.settle()
    assert y.copies() == ["present"]


@pytest.mark.parametrize("short", ["", "ab"])
def test_req_c37_a_short_checksum_is_a_sentence_and_no_crash(short: str) -> None:
    y = fetching()
    y.reports.append(stored(sha256=short))
    y.settle()
    assert y.job().code == codes.CHECKSUM_MISMATCH, "BUG C-3"


def test_a_size_that_was_not_published_is_no_copy() -> None:
    y = fetching()
    y.reports.append(stored(bytes=7))
    y.settle()
    assert y.job().code == codes.SIZE_MISMATCH
    assert "7 bytes" in y.job().error


def test_two_mirrors_have_the_same_bytes_of_a_file_nobody_published_a_sum_of() -> None:
    y = served()
    file = lone(y)
    y.mirror = "cp2"
    y.settle()
    y.reports.append(stored(mirror="cp2", sha256="beef" * 16))
    y.settle()
    assert file.sha256 is not None
    mine = files.copy_on(lone(y), "cp2")
    assert mine is not None
    assert mine.code == codes.CHECKSUM_MISMATCH


def test_the_shards_of_a_set_begin_and_end_in_one_decision_each() -> None:
    y = serve_yard(repo("Owner/Model-GGUF", *SHARDS))
    y.serve(quant="Q8_0", replicas=0)
    made = []
    for _ in range(3):
        y.reports.extend(y.perform(task) for task in y.tasks())
        made += y.settle()
    begun = [d for d in made if any(isinstance(c.event, FileFetching) for c in d.changes)]
    assert [len(d.changes) for d in begun] == [3]
    y.run_workers()
    assert y.job().state == "done"
    y.do(ModelRemove(model="model"))
    y.do(MirrorGc())
    y.now += timedelta(days=8)
    y.reports.extend(y.perform(task) for task in y.tasks())
    ended = [d for d in y.settle() if any(c.noun == "file" and c.state is None for c in d.changes)]
    assert [len(d.changes) for d in ended] == [3]
    assert y.world.files == {}


def test_a_file_nobody_has_and_nobody_needs_ends() -> None:
    y = fetching()
    y.do(JobCancel(job="j-0001"))
    assert y.copies() == ["failed"], "what came is kept for a retry"
    y.now += timedelta(days=7, seconds=1)
    y.settle()
    assert y.copies() == ["removing"], "the job is gone, nobody will go on with it"
    y.run_workers()
    assert y.world.files == {}
    assert y.events("file")[-1] == "file.deleted"


# -- needs


def test_who_needs_a_file_is_told_by_entry_and_job() -> None:
    y = served()
    assert needed_files(y.world) == {KEY: ("model 'model'",)}
    y.serve(name="b")
    y.reports.extend(y.perform(task) for task in y.tasks())
    y.settle()
    assert needed_files(y.world) == {KEY: ("model 'model'", "job j-0002")}


def test_an_entry_needs_every_shard_of_its_set() -> None:
    y = serve_yard(repo("o/m", *SHARDS))
    y.serve("o/m", quant="Q8_0", replicas=0)
    y.run_workers()
    keys = sorted(filesets.file_key("o/m", COMMIT, path) for path in SHARDS)
    assert sorted(needed_files(y.world)) == keys


def test_an_entry_by_hand_may_name_content_of_the_mirror_and_needs_it() -> None:
    y = served()
    entry = {
        "name": "again",
        "source": f"mirror:{KEY}",
        "scaling": {"min": 0, "max": 1},
        "profiles": [{"name": "cpu", "engine": "llamacpp", "memory": "2GiB"}],
    }
    assert y.do(ModelAdd(entry=entry)).status == "accepted"
    y.do(ModelRemove(model="model"))
    assert needed_files(y.world) == {KEY: ("model 'again'",)}
    unknown = y.do(ModelAdd(entry={**entry, "name": "x", "source": f"mirror:{'0' * 64}"}))
    assert unknown.status == "rejected"
    assert "names no file of the mirrors" in unknown.sentence


# -- mirror.remove


@pytest.mark.parametrize(
    "what",
    [
        KEY,
        KEY[:8],
        KEY[:12].upper(),
        "owner/model-gguf",
        f"Owner/Model-GGUF@{COMMIT}",
        f"owner/model-gguf@{COMMIT[:7]}/{PATH}",
        f"owner/model-gguf/{PATH}",
    ],
)
def test_what_is_to_be_removed_is_named_in_many_ways(what: str) -> None:
    y = served()
    y.do(ModelRemove(model="model"))
    outcome = y.do(MirrorRemove(what=what))
    assert outcome.status == "accepted", outcome.sentence
    assert outcome.sentence == "1 file, 1 GiB to be removed"
    assert y.tasks() == (Remove(key=KEY),)
    y.run_workers()
    assert y.world.files == {}, "nobody has it and nobody needs it"
    assert y.stores == set()


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("", codes.INVALID),
        ("abc", codes.INVALID),
        (KEY[:7], codes.INVALID),
        ("0" * 64, codes.NOT_FOUND),
        ("o/other", codes.NOT_FOUND),
        ("owner/model-gguf/x.gguf", codes.NOT_FOUND),
        ("owner/model-gguf@fff", codes.NOT_FOUND),
    ],
)
def test_what_names_no_file_is_refused(what: str, code: str) -> None:
    assert served().do(MirrorRemove(what=what)).code == code


def test_what_somebody_needs_is_not_removed_and_who_is_named() -> None:
    y = served()
    outcome = y.do(MirrorRemove(what=KEY))
    assert outcome.code == codes.IN_USE
    assert f"Owner/Model-GGUF/{PATH} is needed by model 'model'" in outcome.sentence
    assert y.copies() == ["present"]


def test_what_a_running_job_will_need_is_not_removed_before_its_mirror_step() -> None:
    y = served()
    y.do(ModelRemove(model="model"))
    y.serve(name="b")
    y.reports.extend(y.perform(task) for task in y.tasks())
    y.settle()
    assert y.job("j-0002").steps[-1].name == "check"
    assert "job j-0002" in y.do(MirrorRemove(what=KEY)).sentence
    assert y.do(MirrorGc()).sentence.startswith("nothing to remove")


def reading(y: ServeYard) -> None:
    """A node is just fetching the file for a replica of the model."""
    [(node, item)] = y.items("model")
    fresh = y._fresh(node, item, "fetching")  # pyright: ignore[reportPrivateUsage]
    y.append("replica", (node, fresh.id), ReplicaFetching(source=f"mirror:{KEY}"), fresh)


def test_what_a_node_is_reading_is_not_removed_though_its_entry_is_gone() -> None:
    y = serve_yard()
    y.serve()
    y.run_workers()
    reading(y)
    y.do(ModelRemove(model="model"))
    y.settle()
    assert isinstance(y.world.replicas["r-0001"], Replica)
    outcome = y.do(MirrorRemove(what=KEY))
    assert outcome.code == codes.IN_USE
    assert "replica r-0001 on n1" in outcome.sentence
    assert y.do(MirrorGc()).sentence.startswith("nothing to remove")
    y._stop(y.world.replicas["r-0001"])  # pyright: ignore[reportPrivateUsage]
    assert y.do(MirrorGc()).sentence == "1 file, 1 GiB to be removed"


def test_copies_of_other_mirrors_are_theirs_to_remove() -> None:
    y = served()
    y.mirror = "cp2"
    y.run_workers()
    y.do(ModelRemove(model="model"))
    outcome = y.do(MirrorRemove(what=KEY))
    assert outcome.sentence.endswith("cp1 removes its own when it leads")
    y.run_workers()
    assert [(c.mirror, c.phase) for c in lone(y).copies] == [("cp1", "removing")]
    y.mirror = "cp1"
    y.run_workers()
    assert y.world.files == {}


def test_removing_twice_is_said() -> None:
    y = served()
    y.do(ModelRemove(model="model"))
    y.do(MirrorRemove(what=KEY))
    assert y.do(MirrorRemove(what=KEY)).sentence == "nothing of it is on a mirror"


# -- mirror.verify


def test_a_disk_that_does_not_remove_says_why_once_and_is_tried_again() -> None:
    y = served()
    y.do(ModelRemove(model="model"))
    y.do(MirrorGc())
    y.fails["Remove"] = (codes.DISK_FAILED, "its folder cannot be written")
    for _ in range(3):
        y.reports.extend(y.perform(task) for task in y.tasks())
        y.settle()
    [copy] = lone(y).copies
    assert (copy.phase, copy.code) == ("removing", codes.DISK_FAILED)
    assert copy.reason == "its folder cannot be written"
    assert y.events("file")[-2:] == ["file.removing", "file.removing"], "the wish, and why not yet"
    del y.fails["Remove"]
    y.run_workers()
    assert y.world.files == {} or lone(y).copies == ()


def test_verify_reads_every_copy_of_the_leaders_mirror_again() -> None:
    y = served()
    outcome = y.do(MirrorVerify())
    assert outcome.sentence == "1 file, 1 GiB to be read again on cp1"
    assert y.tasks() == (Verify(key=KEY, sha256=sha_of(PATH), bytes=GIB),)
    y.run_workers()
    assert y.copies() == ["present"]


def test_a_copy_that_rotted_is_fetched_again() -> None:
    y = served()
    y.do(MirrorVerify(what=KEY[:8]))
    y.fails["Verify"] = (codes.CHECKSUM_MISMATCH, "it has other bytes")
    y.run_workers()
    assert y.copies() == ["failed"]
    y.stores.clear()
    y.now += timedelta(seconds=60)
    y.run_workers()
    assert y.copies() == ["present"]
    assert len(y.fetched) == 2


def test_a_copy_that_is_missing_is_fetched_again_at_once() -> None:
    y = served()
    y.stores.clear()
    y.do(MirrorVerify())
    y.run_workers()
    assert y.copies() == ["present"]
    assert len(y.fetched) == 2


def test_verify_says_when_there_is_nothing_to_read_or_no_mirror() -> None:
    y = serve_yard()
    assert "nothing to verify" in y.do(MirrorVerify()).sentence
    assert y.do(MirrorVerify(what="o/m")).code == codes.NOT_FOUND
    y.mirror = ""
    assert y.do(MirrorVerify()).code == codes.CONFLICT


# -- mirror.gc


def test_gc_shows_and_removes_what_nobody_needs() -> None:
    y = serve_yard(repo("o/m", "a-Q8_0.gguf", "a-Q4_K_M.gguf"))
    y.serve("o/m", replicas=0, name="four")
    y.serve("o/m", replicas=0, name="eight", quant="Q8_0")
    y.run_workers()
    y.do(ModelRemove(model="eight"))
    key = filesets.file_key("o/m", COMMIT, "a-Q8_0.gguf")
    dry = y.do(MirrorGc(dry_run=True))
    assert dry.lines == (f"{key[:12]}  o/m/a-Q8_0.gguf  1 GiB", "total: 1 file, 1 GiB")
    assert y.copies() == ["present", "present"]
    assert y.do(MirrorGc()).sentence == "1 file, 1 GiB to be removed"
    y.run_workers()
    assert [f.path for f in y.world.files.values()] == ["a-Q4_K_M.gguf"]
    assert y.do(MirrorGc()).sentence == "nothing to remove: all of it is needed"


def test_gc_takes_a_great_many_in_several_turns() -> None:
    y = serve_yard()
    for n in range(files.AT_ONCE + 5):
        key = filesets.file_key("o/m", COMMIT, str(n))
        copy = Copy(mirror="cp1", phase="present", since=y.now)
        file = File(
            key=key,
            repo="o/m",
            commit=COMMIT,
            path="long/" * 60 + str(n),
            published_bytes=1,
            copies=(copy,),
        )
        y.append("file", (key,), FileAbsent(), file)
    shown = y.do(MirrorGc(dry_run=True))
    outcome = y.do(MirrorGc())
    assert "5 more are left, ask again" in outcome.sentence
    for answer in (shown, outcome):
        assert len(msgspec.json.encode(answer)) < MAX_EVENT_BYTES - 4096, "one event holds it"
        assert "lines more)" in answer.lines[-1]
    assert len(y.tasks()) == files.AT_ONCE


def test_gone_is_taken_from_a_copy_that_should_be_there() -> None:
    y = served()
    y.reports.append(FileGone(key=KEY, mirror="cp1"))
    y.settle()
    assert y.copies() == ["fetching"], "the entry needs it"
