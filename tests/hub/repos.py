"""What the hub holds: repositories with their commits, who may read them, and which names moved.

It knows no HTTP; answers.py says what a reader is told.
"""

import hashlib
import threading
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tests.hub.contents import Content

Gate = Literal["auto", "manual"]


class Entry(Struct, frozen=True, kw_only=True):
    """One file of a commit. Outside LFS no sha256 is published."""

    content: Content
    lfs: bool = True

    @property
    def blob_id(self) -> str:
        """Stands for git's id of the blob: 40 hex digits that follow from the content."""
        return hashlib.sha1(self.content.sha256.encode(), usedforsecurity=False).hexdigest()


class Repository:
    """A repository: its commits, newest last, and the names that point at them.

    `listed` False leaves its files out of a reader's list who has no access, as some hubs do.
    """

    def __init__(self, repo_id: str, *, gated: Gate | None = None, private: bool = False) -> None:
        self.id = repo_id
        self.gated = gated
        self.private = private
        self.disabled = False
        self.commits: dict[str, dict[str, Entry]] = {}
        self.refs: dict[str, str] = {}

    def commit(self, files: Mapping[str, Content | Entry], *, ref: str = "main") -> str:
        """Adds a commit that holds exactly `files`; `ref` then points at it. Returns its id."""
        entries = {
            path: file if isinstance(file, Entry) else Entry(content=file)
            for path, file in files.items()
        }
        said = f"{self.id} {len(self.commits)} {sorted(entries)}"
        commit = hashlib.sha1(said.encode(), usedforsecurity=False).hexdigest()
        # A copy takes the place of what readers in other threads may be walking through.
        self.commits = {**self.commits, commit: entries}
        self.refs = {**self.refs, ref: commit}
        return commit

    @property
    def main(self) -> str:
        return self.refs["main"]

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a tag or a commit's own id means."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class Reader(Struct, frozen=True, kw_only=True):
    """Whom a token stands for: repositories it was let into, and those whose owners have not answered yet."""

    granted: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()


class Shelf:
    """Every repository, the names that moved, and the tokens that are known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._repos: dict[str, Repository] = {}
        self._moved: dict[str, str] = {}
        self._readers: dict[str, Reader] = {}

    def add(self, repo: Repository) -> Repository:
        with self._lock:
            self._repos[repo.id.lower()] = repo
        return repo

    def remove(self, repo_id: str) -> None:
        with self._lock:
            del self._repos[repo_id.lower()]

    def rename(self, old: str, new: str) -> None:
        """What was `old` is `new` from now on; the old name leads there."""
        with self._lock:
            repo = self._repos.pop(old.lower())
            repo.id = new
            self._repos[new.lower()] = repo
            self._moved[old.lower()] = new

    def find(self, repo_id: str) -> Repository | None:
        with self._lock:
            return self._repos.get(repo_id.lower())

    def moved(self, repo_id: str) -> str | None:
        """The new name of one that was renamed; also the right spelling of one that exists."""
        with self._lock:
            new = self._moved.get(repo_id.lower())
            if new is not None:
                return new
            repo = self._repos.get(repo_id.lower())
            return repo.id if repo is not None and repo.id != repo_id else None

    def admit(self, token: str, reader: Reader) -> None:
        with self._lock:
            self._readers[token] = reader

    def reader(self, token: str) -> Reader | None:
        with self._lock:
            return self._readers.get(token)
