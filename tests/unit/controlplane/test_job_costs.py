"""What many jobs and files that nothing happens to cost each decision: nothing."""

from collections import Counter
from datetime import timedelta

import pytest
from msgspec.structs import replace

from controlplane.domain import files, jobs, needs
from controlplane.domain.index import StepIndex
from schemas.commands import ModelScale
from schemas.file import Copy, File, FilePresent
from schemas.job import JobDone
from tests.support.serving import COMMIT, ServeYard, serve_yard
from tests.support.worlds import GIB

JOBS, FILES = 2000, 5000


def crowded() -> ServeYard:
    """One model that serves, and what a year of others left."""
    y = serve_yard()
    y.serve(replicas=0)
    y.run_workers()
    over = y.job()
    for n in range(JOBS):
        id_ = f"j-over-{n:04}"
        done = replace(over, id=id_, ended_at=y.now + timedelta(seconds=n))
        y.append("job", (id_,), JobDone(), done)
    for n in range(FILES):
        file = File(
            key=f"{n:064x}",
            repo="o/other",
            commit=COMMIT,
            path=f"{n}.gguf",
            published_bytes=GIB,
            copies=(Copy(mirror="cp1", phase="present", since=y.now),),
        )
        event = FilePresent(mirror="cp1", compared=True, origin="registry")
        y.append("file", (file.key,), event, file)
    y.index = StepIndex()
    y.step()
    return y


def test_a_decision_looks_only_at_the_jobs_and_files_something_happened_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y = crowded()
    calls: Counter[str] = Counter()
    for module, name in (
        (jobs, "look_after"),
        (jobs, "due_at"),
        (files, "look_after"),
        (files, "due_at"),
        (needs, "keys_of_set"),
        (needs, "keys_of_job"),
    ):
        inner = getattr(module, name)

        def counted(*args: object, inner: object = inner, name: str = name) -> object:
            calls[name] += 1
            return inner(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    y.step()
    assert calls == {}, "nothing happened"
    y.do(ModelScale(model="model", min=1, max=1))
    y.settle()
    assert sum(calls.values()) < 40, calls
    calls.clear()
    y.serve(name="other", replicas=0)
    y.run_workers()
    assert y.world.models["other"].name == "other"
    assert sum(calls.values()) < 300, calls
    calls.clear()
    y.now += timedelta(seconds=y.settings.job_kept_s - 60)
    y.step()
    assert sum(calls.values()) < 100, calls
