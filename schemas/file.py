"""A file that a mirror keeps, of a registry, a URL or a folder: what was published of it, who has a copy.

The key is fixed before the first byte: sha256, in hex, of `repo@commit/path`. What the bytes are is known
by their own sha256, which names them in every store.
"""

from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

CopyPhase = Literal["fetching", "present", "failed", "verifying", "removing"]

BUSY_PHASES: Final[frozenset[str]] = frozenset({"fetching", "verifying", "removing"})
"""Phases in which its mirror has something to do."""


class Copy(Struct, frozen=True, kw_only=True):
    """One mirror's copy; a mirror that is not listed has none (absent).

    `code` and `reason` say why it `failed`, or why it is still there while it is `removing`. `tries` counts failed fetches in a row.
    `retry_at` is when a failed one that something still needs is fetched again.
    """

    mirror: str
    phase: CopyPhase
    since: datetime
    code: str = ""
    reason: str = ""
    tries: int = 0
    retry_at: datetime | None = None


class File(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.file.<key>`.

    `repo` is a repository of the registry, or the URL or absolute path of an adapter's folder; then `commit` is a
    sum over what lay there when it was read, and `published_*` what was read. Otherwise
    `published_*` is what the registry said at `commit` (no sha256 for files outside LFS); `sha256` and
    `bytes` what a mirror counted over the whole file. `path` is within the repository, `/` between folders.
    """

    key: str
    repo: str
    commit: str
    path: str
    published_bytes: int
    published_sha256: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    copies: tuple[Copy, ...] = ()


class FileAbsent(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.absent"):
    """Known, and not on `mirror` (empty: on none yet)."""

    mirror: str = ""


class FileFetching(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.fetching"):
    mirror: str


class FilePresent(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.present"):
    """The whole file is there and its magic, size and sha256 were checked.

    `compared`: its sha256 was compared with a published one. `origin`: where the bytes came from: `registry`,
    `mirror` (another live one), `store` (they were there already) or `source` (an adapter's URL or folder).
    """

    mirror: str
    compared: bool
    origin: Literal["registry", "mirror", "store", "source"]


class FileFailed(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.failed"):
    mirror: str
    code: str


class FileVerifying(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.verifying"):
    mirror: str


class FileRemoving(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.removing"):
    mirror: str


class FileDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="file.deleted"):
    """A tombstone."""


FileEvent = (
    FileAbsent
    | FileFetching
    | FilePresent
    | FileFailed
    | FileVerifying
    | FileRemoving
    | FileDeleted
)
