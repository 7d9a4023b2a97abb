"""What yardctl prints about jobs, files and repositories, and what it refuses before it asks anybody."""

import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from controlplane.ctl import connect, jobwatch, main, serving
from controlplane.ctl.connect import Api, Place
from controlplane.ctl.failures import CtlError, RejectedByYard, Unreachable
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from schemas.commands import JobServe, Outcome
from tests.support.aio import run

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
STARTED = "2026-01-01T11:00:00Z"
FILE_SET = {"name": "smol-Q4_1", "first": "smol-Q4_1.gguf", "shards": 2, "bytes": 3 * 1024**2}
JOB: dict[str, Any] = {
    "id": "j-1",
    "request": {"repo": "acme/smol", "replicas": 1},
    "by": "anna",
    "state": "done",
    "started": STARTED,
    "attempt": 1,
    "error": "",
    "repo": "acme/smol",
    "commit": "c0ffee" * 6 + "c0ff",
    "model": "smol",
    "incarnation": "not for people",
    "file_set": FILE_SET,
    "estimate": {"total_bytes": 5 * 1024**2, "kv_bytes": 7},
    "steps": [
        {"name": "registry", "state": "done", "detail": "smol"},
        {"name": "smoke test", "state": "done", "detail": '80.0 tokens/s, "Hello!"'},
    ],
    "reply": "Hello!",
    "tokens_per_second": 80.0,
    "event": {"seq": 7},
}


def said(
    answer: Any, work: Callable[[Api], Awaitable[None]], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines of stdout when the API answers every question with `answer`."""

    async def story() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": answer}))
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await work(Api(client, "http://yard"))

    run(story())
    return capsys.readouterr().out.splitlines()


def test_a_job_is_shown_as_a_person_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(JOB, lambda api: serving.show_job(api, "j-1", "table"), capsys)
    told = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
    assert told["repository"] == "acme/smol at c0ffeec0ffee"
    assert told["files"] == "smol-Q4_1, 3 MiB in 2 files"
    assert told["memory"] == "5 MiB"
    assert told["speed"] == "80.0 tokens/s"
    assert told["reply"] == "Hello!"
    assert "incarnation" not in told
    assert "event" not in told
    assert lines[-2:] == [
        "  registry    done     smol",
        '  smoke test  done     80.0 tokens/s, "Hello!"',
    ]


def test_a_job_that_just_began_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    young = {"id": "j-2", "state": "running", "request": {"repo": "a/b"}, "started": STARTED}
    lines = said(young, lambda api: serving.show_job(api, "j-2", "table"), capsys)
    assert lines[0].split() == ["id:", "j-2"]
    assert "steps:" not in lines


def test_jobs_are_listed_one_a_line_whatever_their_reasons_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = {**JOB, "id": "j-2", "state": "failed", "error": "no room:\n gpu0 has 1 GiB free"}
    lines = said([failed, JOB], lambda api: serving.list_jobs(api, "table", NOW), capsys)
    assert len(lines) == 3
    assert "no room: gpu0 has 1 GiB free" in lines[1] + lines[2]
    assert all(line.endswith("1h") for line in lines[1:])


def plan(**over: Any) -> dict[str, Any]:
    place = {"node": "n", "cards": ["gpu0", "gpu1"], "profile": "gpu", "rank": 2, "reason": "free"}
    return {
        "repo": "acme/smol",
        "commit": "c0ffee" * 7,
        "model": "smol",
        "file_set": FILE_SET,
        "fetched_bytes": 0,
        "places": [place],
        "problems": [],
        **over,
    }


def test_a_plan_says_what_is_to_be_fetched_and_where_it_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def show(api: Api) -> None:
        await serving.show_plan(api, JobServe(repo="acme/smol"), "table")

    lines = said(plan(), show, capsys)
    assert "where it would fit:" in lines
    assert lines[-1].split() == ["n/gpu0+gpu1", "gpu", "2", "free"]
    lines = said(plan(fetched_bytes=3 * 1024**2), show, capsys)
    assert any(line.endswith("nothing: the mirror has it") for line in lines)
    nowhere = [{"node": "n", "cards": ["cpu"], "profile": "cpu", "rank": None, "reason": "full"}]
    with pytest.raises(CtlError) as refused:
        said(
            plan(places=nowhere, problems=[{"code": "no_capacity", "sentence": "no room"}]),
            show,
            capsys,
        )
    assert refused.value.lines == ("no room [no_capacity]",)
    assert "it fits nowhere:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("registry", "show", "abc"),
        ("registry", "show", "a/b/c"),
        ("registry", "show", "../jobs"),
        ("registry", "show", "https://huggingface.co/a/b"),
        ("job", "show", ""),
        ("job", "watch", ""),
        ("mirror", "show", ""),
        ("--api", "http://127.0.0.1:abc", "job", "list"),
    ],
)
def test_what_cannot_be_meant_is_64_before_anybody_is_asked(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(connect, "secret", lambda _: "token")
    assert main.main(arguments) == 64
    assert "fault of yardctl" not in capsys.readouterr().err


def test_a_question_that_is_wrong_is_rejected_as_a_command_would_be() -> None:
    body = {"error": {"code": "invalid", "sentence": "replicas is at most 1000"}}

    async def story() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(400, json=body))
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            await Api(client, "http://yard").post("/v1/plan", {})

    with pytest.raises(RejectedByYard, match=r"at most 1000 \[invalid\]"):
        run(story())


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (asyncio.CancelledError(), True),
        (Unreachable("no NATS answers"), True),
        (CtlError("job j-1 failed: no room"), False),
    ],
)
def test_whoever_leaves_a_job_is_told_that_it_goes_on(
    error: BaseException,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    async def sent(*_: Any) -> Outcome:
        return Outcome(
            id="c",
            actor="admin",
            name="job.serve",
            status="accepted",
            at=NOW,
            refs=("yard.evt.job.j-1",),
        )

    async def left(*_: Any) -> None:
        raise error

    monkeypatch.setattr(serving, "send", sent)
    monkeypatch.setattr(jobwatch, "watch", left)
    place = Place(data=tmp_path, nats_url="nats://x", api_url="http://x")
    with pytest.raises(type(error)):
        run(serving.serve(place, JobServe(repo="a/b"), 1.0, detach=False))
    assert ("yardctl job watch j-1" in capsys.readouterr().err) is is_told


def test_a_terminal_without_the_character_gets_another_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = [{"name": "smol", "quant": "Q4_1", "bytes": 1024, "shards": 1, "picked": True}]
    view = {"repo": "a/b", "commit": "c0ffee", "sets": sets, "sentence": "picks smol"}

    @contextlib.asynccontextmanager
    async def opened(_: Place) -> AsyncIterator[Api]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": view}))
        async with httpx.AsyncClient(transport=transport, base_url="http://yard") as client:
            yield Api(client, "http://yard")

    raw = io.BytesIO()
    monkeypatch.setattr(main, "open_api", opened)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main.main(["registry", "show", "a/b"]) == 0
    sys.stdout.flush()
    assert b"?  smol" in raw.getvalue()


def test_a_verification_is_not_waited_for_without_nats() -> None:
    async def story() -> None:
        broker = MemoryBroker()
        log = MemoryLog(broker, source="/ctl")
        checking = asyncio.create_task(serving._verified(log, ["yard.evt.file.k"]))
        log.connection.disconnect()
        with pytest.raises(Unreachable, match="mirror list"):
            await checking

    run(story())
