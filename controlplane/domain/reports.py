"""What the workers beside the leader found out: facts handed to its decisions, never decisions themselves.

A report lost with its process is made again: work.py says what is to be done from the log alone. One that
is out of date (another attempt, a step that is over) is consumed without an event.
"""

from typing import Literal

from msgspec import Struct

from controlplane.domain.repo import Repo
from controlplane.domain.shape import ModelShape
from schemas.adapter import AdapterFile


class RepoRead(Struct, frozen=True, kw_only=True):
    """The step `registry` of `job` read its repository."""

    job: str
    attempt: int
    repo: Repo


class HeaderRead(Struct, frozen=True, kw_only=True):
    """A `check` step (`index` in Job.steps) read the header. `shape` None: it gives none, `why` says so.

    `free_bytes` is what the mirror's disk can still take, less what it keeps free; `reserved` are the bytes of
    it that files on their way hold already, by key.
    """

    job: str
    attempt: int
    index: int
    shape: ModelShape | None
    architecture: str = ""
    why: str = ""
    free_bytes: int | None = None
    reserved: dict[str, int] = {}


class SmokeAnswered(Struct, frozen=True, kw_only=True):
    """`generation_s` leaves out the prompt's time, `prompt_s`; both in seconds."""

    job: str
    attempt: int
    replica: str
    reply: str
    completion_tokens: int
    generation_s: float
    prompt_s: float = 0.0


class StepFailed(Struct, frozen=True, kw_only=True):
    """What `job` was doing at `index` came to nothing: why, as code and sentence.

    `unanswered`: the replica's connection was refused or broke before an answer. It may just have ended, and
    that be told a moment later, so the smoke test is tried again while the replica counts as ready.
    """

    job: str
    attempt: int
    index: int
    code: str
    sentence: str
    unanswered: bool = False


class FileStored(Struct, frozen=True, kw_only=True):
    """`mirror` holds the whole file; its size, magic and (`compared`) published sha256 were checked."""

    key: str
    mirror: str
    sha256: str
    bytes: int
    compared: bool
    origin: Literal["registry", "mirror", "store", "source"]


class FileFault(Struct, frozen=True, kw_only=True):
    """A fetch, a verification or (`removal`) a removal of `key` failed on `mirror`."""

    key: str
    mirror: str
    code: str
    sentence: str
    removal: bool = False


class FileGone(Struct, frozen=True, kw_only=True):
    """`mirror` has no copy of `key` any more (removed as asked, or found missing)."""

    key: str
    mirror: str


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """What an `adapter_config.json` says, its types checked and its lengths bounded; judged by preflight.

    Names are the file's own. `rank_pattern` are ranks of single modules. `target_modules` are names, or the
    one word or regular expression it gives in place of a list: then `targets_by_pattern`. What a field
    does not say, or says as null, is its default here.
    """

    r: int
    peft_type: str = "LORA"
    base_model_name_or_path: str = ""
    rank_pattern: dict[str, int] = {}
    target_modules: tuple[str, ...] = ()
    targets_by_pattern: bool = False
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    trains_tokens: bool = False
    """`trainable_token_indices` is set: it changes embeddings."""
    replicates_layers: bool = False
    """`layer_replication` is set: it was trained for a model of more layers than its base has."""


class AdapterRead(Struct, frozen=True, kw_only=True):
    """The configuration and the files of an adapter, read where it comes from, at `commit`.

    `repo` and `commit` are those of its files' keys: the registry's own spelling and its commit, or the URL
    or path of its folder and a sum over what lies there. `files` are the weights, then the configuration.
    `files.of_adapter` makes the files of the mirrors from it.
    """

    adapter: str
    incarnation: str
    repo: str
    commit: str
    config: AdapterConfig
    files: tuple[AdapterFile, ...]


class AdapterUnreadable(Struct, frozen=True, kw_only=True):
    """The adapter cannot be read where it comes from, or is none: why, as code and sentence."""

    adapter: str
    incarnation: str
    code: str
    sentence: str


Report = (
    RepoRead
    | HeaderRead
    | SmokeAnswered
    | StepFailed
    | FileStored
    | FileFault
    | FileGone
    | AdapterRead
    | AdapterUnreadable
)
