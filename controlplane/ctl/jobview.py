"""Tells a serve job's course as lines: each step as it changes, and how far its files have come.

Pure: events and progress in, lines out. jobwatch.py follows the log and prints.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from controlplane.ctl.show import length, size
from schemas import codes
from schemas.file import File
from schemas.job import JOB_OVER, FileSet, Job, JobStep
from schemas.progress import FileProgress

ASKED_WRONG: Final = frozenset(
    {
        codes.INVALID,
        codes.EXISTS,
        codes.NO_GGUF,
        codes.NO_SUCH_FILE,
        codes.AMBIGUOUS,
        codes.SHARD_MISSING,
        codes.REVISION_NOT_FOUND,
        codes.CONTEXT_TOO_LONG,
        codes.ARCHITECTURE_UNKNOWN,
        codes.NOT_GGUF,
    }
)
"""Of these another request helps, and not the same one again."""

NAME_WIDTH: Final = 10
STATE_WIDTH: Final = 7
INDENT: Final = NAME_WIDTH + STATE_WIDTH + 4
"""Where a line's detail begins."""
COMMIT_SHOWN: Final = 12


class Line(Struct, frozen=True, kw_only=True):
    """One step as it stands; `state` is also what colours it."""

    name: str
    state: str
    detail: str

    def text(self) -> str:
        detail = " ".join(self.detail.split())
        return f"{self.name:<{NAME_WIDTH}}  {self.state:<{STATE_WIDTH}}  {detail}".rstrip()


class Amount(Struct, frozen=True, kw_only=True):
    """How far the files of a job, or a node's copy of them, have come. `total` 0: not known yet."""

    what: str
    bytes: int
    total: int
    rate_bytes_s: float

    def text(self) -> str:
        """`42.1 MiB of 93.5 MiB (45 %), 12 MiB/s, 4s left`."""
        if not self.total:
            return f"{self.what} {size(self.bytes)}"
        percent = min(100, self.bytes * 100 // self.total)
        told = f"{self.what} {size(self.bytes)} of {size(self.total)} ({percent} %)"
        if self.rate_bytes_s > 0:
            left_s = max(0, self.total - self.bytes) / self.rate_bytes_s
            told += f", {size(self.rate_bytes_s)}/s, {length(left_s)} left"
        return told


def news(before: Job | None, after: Job) -> tuple[Line, ...]:
    """The steps that are new or changed since `before`, in order.

    A new attempt tells all its steps again from the first that is not the same.
    """
    known = before.steps if before is not None else ()
    return tuple(
        _line(step)
        for index, step in enumerate(after.steps)
        if index >= len(known) or _differs(known[index], step)
    )


def _differs(old: JobStep, new: JobStep) -> bool:
    return (old.name, old.state, old.detail) != (new.name, new.state, new.detail)


def _line(step: JobStep) -> Line:
    return Line(name=step.name, state=step.state, detail=step.detail)


def ending(job: Job) -> tuple[str, ...]:
    """What is said once the job is over; empty while it runs."""
    match job.state:
        case "done" if job.reply:
            speed = f" ({job.tokens_per_second:.1f} tokens/s)" if job.tokens_per_second else ""
            return (f"{job.model} answers{speed}: {job.reply}",)
        case "done" if job.replica:
            # An embedding model is not asked, and a model may have nothing to say.
            return (f"{job.model} is served and ready",)
        case "done":
            return (f"{job.model} is served: it loads when first asked for",)
        case "joined":
            return (f"job {job.joined} does the same already; it is watched instead",)
        case "failed":
            said = f"job {job.id} failed: {job.error}"
            if job.code in ASKED_WRONG:
                return (said,)
            return (said, f"once that is mended: yardctl job retry {job.id}")
        case "cancelled":
            why = f": {job.error}" if job.error else ""
            again = f"go on with it: yardctl job retry {job.id}"
            return (f"job {job.id} was cancelled{why}", again)
        case _:
            return ()


def is_over(job: Job) -> bool:
    return job.state in JOB_OVER


def belongs(file: File, job: Job) -> bool:
    """Whether the file is one of the job's set."""
    return (
        job.file_set is not None
        and (file.repo, file.commit) == (job.repo, job.commit)
        and _stem(file.path, job.file_set.shards) == _stem(job.file_set.first, job.file_set.shards)
    )


def _stem(path: str, shards: int) -> str:
    """A shard's path without its number, `-00001-of-00003.gguf`."""
    return path[: -len("-00001-of-00001.gguf")] if shards > 1 else path


def together(
    parts: Iterable[tuple[int, File | None, FileProgress | None]], total: int
) -> Amount | None:
    """How far several files have come into the mirror, of each its size and what is known of it; those present count
    whole. None while nothing moves."""
    done = rate = 0.0
    what = ""
    for size_bytes, file, told in parts:
        if file is not None and any(copy.phase == "present" for copy in file.copies):
            done += size_bytes
        elif told is not None:
            done += told.bytes
            rate += told.rate_bytes_s
            what = what or told.what
    if not what:
        return None
    return Amount(what=what, bytes=int(done), total=total, rate_bytes_s=rate)


@dataclass(slots=True)
class Amounts:
    """The progress heard of one job's files, by file; of the latest word of each."""

    files: dict[str, File] = field(default_factory=dict)
    mirror: dict[str, FileProgress] = field(default_factory=dict)
    node: dict[str, FileProgress] = field(default_factory=dict)

    def of_mirror(self, file_set: FileSet) -> Amount | None:
        """All files of the set together."""
        parts = [
            (file.published_bytes, file, self.mirror.get(key)) for key, file in self.files.items()
        ]
        return together(parts, file_set.bytes)

    def of_node(self) -> Amount | None:
        """The furthest of the nodes that fetch the model."""
        if not self.node:
            return None
        told = max(self.node.values(), key=lambda progress: progress.bytes)
        return Amount(
            what=f"{told.what} to the node",
            bytes=told.bytes,
            total=told.total_bytes,
            rate_bytes_s=told.rate_bytes_s,
        )


def row(job: Mapping[str, object], now_age: str) -> tuple[str, ...]:
    """A line of `job list`, from the API's view of a job."""
    steps = job.get("steps")
    last = steps[-1] if isinstance(steps, Sequence) and steps else {}
    request = job.get("request")
    repo = job.get("repo") or (request.get("repo", "") if isinstance(request, Mapping) else "")
    step = f"{last.get('name', '')}: {last.get('detail', '')}" if isinstance(last, Mapping) else ""
    if job.get("state") in ("failed", "cancelled"):
        step = str(job.get("error") or step)
    return (
        str(job.get("id", "")),
        str(job.get("state", "")),
        str(repo),
        str(job.get("model", "")),
        " ".join(step.split()),
        now_age,
    )


def fields(job: Mapping[str, Any]) -> dict[str, object]:
    """What `job show` tells above the steps, from the API's view of a job; -o json has the rest."""
    commit, chosen = job.get("commit"), job.get("file_set")
    estimate, rate = job.get("estimate"), job.get("tokens_per_second")
    return {
        "id": job.get("id"),
        "state": job.get("state"),
        "error": job.get("error"),
        "code": job.get("code"),
        "joined": job.get("joined"),
        "attempt": job.get("attempt"),
        "by": job.get("by"),
        "started": job.get("started"),
        "ended": job.get("ended_at"),
        "asked for": job.get("request"),
        "repository": f"{job['repo']} at {commit[:COMMIT_SHOWN]}" if commit else None,
        "files": files_text(chosen) if chosen else None,
        "model": job.get("model"),
        "architecture": job.get("architecture"),
        "context": job.get("context_length"),
        "memory": size(estimate["total_bytes"]) if estimate else None,
        "replica": job.get("replica"),
        "speed": f"{rate:.1f} tokens/s" if rate else None,
        "reply": job.get("reply"),
    }


def files_text(chosen: Mapping[str, Any]) -> str:
    """A file set in a few words, from the API's view of it."""
    count = chosen.get("shards", 1)
    return f"{chosen['name']}, {size(chosen['bytes'])} in {count} file{'s' if count > 1 else ''}"
