"""A job's course as lines: every change once, amounts that add up, an ending that says what to do."""

from datetime import UTC, datetime

from msgspec.structs import replace

from controlplane.ctl.jobview import Amount, Amounts, belongs, ending, is_over, news
from schemas.file import Copy, File
from schemas.job import FileSet, Job, JobStep, ServeRequest, StepName, StepState
from schemas.progress import FileProgress

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SET = FileSet(name="smol-Q4_1", first="smol-Q4_1.gguf", bytes=1000)
JOB = Job(
    id="j-1",
    request=ServeRequest(repo="acme/smol"),
    by="admin",
    state="running",
    started=NOW,
    repo="acme/smol",
    commit="c0ffee",
    model="smol",
    file_set=SET,
)


def step(name: StepName, state: StepState, detail: str) -> JobStep:
    return JobStep(name=name, state=state, detail=detail, at=NOW)


def file(
    key: str = "k",
    path: str = "smol-Q4_1.gguf",
    present: bool = False,
    repo: str = "acme/smol",
    commit: str = "c0ffee",
) -> File:
    copies = (Copy(mirror="cp-1", phase="present", since=NOW),) if present else ()
    return File(key=key, path=path, published_bytes=1000, copies=copies, repo=repo, commit=commit)


def test_each_change_of_a_step_is_told_once() -> None:
    reading = replace(JOB, steps=(step("registry", "running", "reading acme/smol"),))
    read = replace(JOB, steps=(step("registry", "done", "smol"), step("check", "running", "…")))
    assert [line.text() for line in news(None, reading)] == [
        "registry    running  reading acme/smol"
    ]
    assert [(n.name, n.state) for n in news(reading, read)] == [
        ("registry", "done"),
        ("check", "running"),
    ]
    assert news(read, read) == ()
    later = replace(
        read, steps=tuple(replace(s, at=datetime(2027, 1, 1, tzinfo=UTC)) for s in read.steps)
    )
    assert news(read, later) == ()


def test_whoever_comes_late_is_told_all_steps() -> None:
    steps = (step("registry", "done", "a"), step("check", "done", "b"))
    assert len(news(None, replace(JOB, steps=steps))) == 2


def test_an_ending_says_what_came_of_it() -> None:
    done = replace(JOB, state="done", reply="Hello!", tokens_per_second=140.04)
    assert ending(done) == ("smol answers (140.0 tokens/s): Hello!",)
    assert ending(replace(JOB, state="done")) == ("smol is served: it loads when first asked for",)
    failed = ending(replace(JOB, state="failed", error="no room"))
    assert failed == ("job j-1 failed: no room", "once that is mended: yardctl job retry j-1")
    wrong = replace(JOB, state="failed", error="no such file", code="no_such_file")
    assert ending(wrong) == ("job j-1 failed: no such file",)  # the same again helps nobody
    cancelled = ending(replace(JOB, state="cancelled"))
    assert cancelled[1] == "go on with it: yardctl job retry j-1"
    assert ending(replace(JOB, state="joined", joined="j-0"))[0].startswith("job j-0 ")
    assert ending(JOB) == ()
    assert [is_over(replace(JOB, state=s)) for s in ("running", "joined")] == [False, True]


def test_files_of_the_set_are_its_shards_at_its_commit() -> None:
    assert belongs(file(), JOB)
    assert not belongs(file(path="smol-Q8_0.gguf"), JOB)
    assert not belongs(file(commit="beef"), JOB)
    assert not belongs(file(repo="acme/other"), JOB)
    assert not belongs(file(), replace(JOB, file_set=None))
    sharded = replace(
        JOB, file_set=replace(SET, first="q/m-00001-of-00003.gguf", shards=3, name="q/m")
    )
    assert belongs(file(path="q/m-00003-of-00003.gguf"), sharded)
    assert not belongs(file(path="q/n-00003-of-00003.gguf"), sharded)


def test_progress_adds_up_over_the_files_of_a_set() -> None:
    amounts = Amounts(files={"a": file("a", present=True), "b": file("b"), "c": file("c")})
    assert amounts.of_mirror(replace(SET, bytes=3000)) is None  # nothing is on its way yet
    amounts.mirror["a"] = FileProgress(key="a", bytes=10, total_bytes=1000, rate_bytes_s=9.0)
    amounts.mirror["b"] = FileProgress(key="b", bytes=500, total_bytes=1000, rate_bytes_s=50.0)
    told = amounts.of_mirror(replace(SET, bytes=3000))
    assert told is not None
    assert told == Amount(what="fetching", bytes=1500, total=3000, rate_bytes_s=50.0)
    assert told.text() == "fetching 1.5 KiB of 2.9 KiB (50 %), 50 B/s, 30s left"


def test_an_amount_without_total_or_rate_claims_neither() -> None:
    assert Amount(what="fetching", bytes=512, total=0, rate_bytes_s=3.0).text() == "fetching 512 B"
    told = Amount(what="hashing", bytes=2048, total=1024, rate_bytes_s=0.0).text()
    assert told == "hashing 2 KiB of 1 KiB (100 %)"


def test_a_nodes_fetch_is_told_by_the_furthest() -> None:
    amounts = Amounts()
    assert amounts.of_node() is None
    amounts.node["n1"] = FileProgress(key="k", bytes=1, total_bytes=9)
    amounts.node["n2"] = FileProgress(key="k", bytes=5, total_bytes=9)
    told = amounts.of_node()
    assert told is not None
    assert told.bytes == 5


def test_a_job_that_was_not_asked_for_a_reply_is_served_all_the_same() -> None:
    ready = replace(JOB, state="done", replica="r-1")
    assert ending(ready) == ("smol is served and ready",)


def test_a_detail_of_several_lines_stays_on_one() -> None:
    failed = replace(JOB, steps=(step("placement", "failed", "no room:\n  gpu0 is full"),))
    assert [line.text() for line in news(None, failed)] == [
        "placement   failed   no room: gpu0 is full"
    ]
