"""Holds what a registry says of a repository at one commit. Data only; filesets.py chooses from it."""

from msgspec import Struct


class RepoFile(Struct, frozen=True, kw_only=True):
    """`sha256` is None for a file outside LFS, of which the registry publishes none."""

    path: str
    bytes: int
    sha256: str | None = None


class Repo(Struct, frozen=True, kw_only=True):
    """`id` is the registry's own spelling; `gated` as it says: None, `auto` or `manual`."""

    id: str
    commit: str
    files: tuple[RepoFile, ...]
    gated: str | None = None
    private: bool = False
    suggested_name: str = ""
