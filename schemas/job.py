"""A serve job: from a repository to a replica that answers, in steps that any leader can go on with."""

from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

StepName = Literal["registry", "check", "mirror", "catalog", "placement", "smoke test"]
StepState = Literal["running", "done", "failed", "skipped"]
JobState = Literal["running", "done", "failed", "cancelled", "joined"]

STEPS: Final[tuple[StepName, ...]] = (
    "registry",
    "check",
    "mirror",
    "check",
    "catalog",
    "placement",
    "smoke test",
)
"""In order. The first check reads the header where the registry keeps it, the second the mirror's copy."""

JOB_OVER: Final[frozenset[str]] = frozenset({"done", "failed", "cancelled", "joined"})


class ServeRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for, as checked. `replicas` 0 = on demand. Tokens are counted in `ctx_pool` (what all
    slots of an engine divide) and `context_length` (what one request may use).

    `context_given` False: nobody asked for that `context_length`, so a model trained for less gets less.
    """

    repo: str
    quant: str | None = None
    file: str | None = None
    name: str | None = None
    aliases: tuple[str, ...] = ()
    description: str = ""
    replicas: int = 1
    ctx_pool: int = 16384
    context_length: int = 4096
    context_given: bool = False
    revision: str | None = None


class FileSet(Struct, frozen=True, kw_only=True):
    """The files that make one model. `first` is the path of the first shard, or of the only file;
    the others follow from it (`-00001-of-00003`). `published` counts files with a published sha256."""

    name: str
    first: str
    quant: str = ""
    shards: int = 1
    bytes: int
    published: int = 0


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """What an engine will use, in bytes, and of what it is made.

    `basis` is `header` when computed from the model's shape, `size` when only the file sizes were known.
    `repacked_bytes` is a second copy of some weights, which llama.cpp makes for a processor's vectors beside
    the mapped file. `kv_bytes` is the cache of attention, `state_bytes` that of recurrent layers, for
    `ctx_pool` tokens.
    """

    basis: Literal["header", "size"]
    weights_bytes: int
    repacked_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    compute_bytes: int = 0
    engine_bytes: int = 0
    total_bytes: int
    ctx_pool: int


class JobStep(Struct, frozen=True, kw_only=True):
    """`detail` says what it is doing, or what came of it; `at` is when that was said.

    `since` is when it began, in this attempt.
    """

    name: StepName
    state: StepState
    detail: str
    at: datetime
    since: datetime | None = None


class Job(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.job.<id>`.

    `attempt` counts starts: 1, and one more with each retry. `commit` is pinned by the first step and used
    to the end. `key` (of `repo@commit`, set name and model name) tells identical jobs; `joined` is the job
    this one became. `catalog_at` is when the entry was added. Steps that have not begun do not appear.
    `unmapped`: the engine would copy weights beside a mapped file, so it reads the file instead.
    `generates` False: an embedding model, which cannot be asked to say hello. `entry_found`: the entry was
    in the catalog and on before this job came to it, so it is not switched off when the job fails.
    """

    id: str
    request: ServeRequest
    by: str
    state: JobState
    started: datetime
    attempt: int = 1
    error: str = ""
    code: str = ""
    model: str = ""
    incarnation: str = ""
    entry_found: bool = False
    repo: str = ""
    commit: str = ""
    key: str = ""
    joined: str | None = None
    file_set: FileSet | None = None
    architecture: str = ""
    generates: bool = True
    unmapped: bool = False
    context_length: int | None = None
    estimate: MemoryEstimate | None = None
    catalog_at: datetime | None = None
    replica: str | None = None
    steps: tuple[JobStep, ...] = ()
    reply: str = ""
    tokens_per_second: float | None = None
    prompt_s: float | None = None
    ended_at: datetime | None = None


class JobStarted(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.started"):
    attempt: int = 1


class JobStepped(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.step"):
    """`index` counts `Job.steps` from 0."""

    index: int
    step: StepName
    state: StepState


class JobDone(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.done"):
    tokens_per_second: float | None = None


class JobJoined(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.joined"):
    job: str


class JobFailed(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.failed"):
    step: StepName
    code: str


class JobCancelled(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.cancelled"):
    by: str
    step: StepName | None = None


class JobDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="job.deleted"):
    """A tombstone."""


JobEvent = JobStarted | JobStepped | JobDone | JobJoined | JobFailed | JobCancelled | JobDeleted
