"""Asks one registry: what a repository holds, and for the first bytes of its files.

It asks when it is told to and never by itself. Every question is bounded in time, transient faults are
tried again within that bound, and whatever goes wrong is a RegistryFault.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final, TypeVar
from urllib.parse import urlsplit

from controlplane.domain.repo import Repo
from controlplane.registry import faults
from controlplane.registry.credentials import read_token
from controlplane.registry.faults import Asked, RegistryFault
from controlplane.registry.listing import read_listing
from controlplane.registry.rangedfile import RangedFile
from controlplane.registry.ranges import READ_BYTES, Part, Ranges
from controlplane.registry.retrying import retried
from controlplane.registry.threads import beside

T = TypeVar("T")

ENDPOINT: Final = "https://huggingface.co"
TIMEOUT_S: Final = 10.0
RETRY_FOR_S: Final = 30.0
_ATTEMPT_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 100 * 1024
"""No single try takes longer than this (and the time the bytes take at that rate), however they drip."""


class Registry:
    """One registry. Made in a running event loop or before it; `close` it there, or use `async with`.

    `timeout_s` bounds connecting and each wait for more bytes, `retry_for_s` all tries of one question.
    """

    def __init__(
        self,
        *,
        endpoint: str = ENDPOINT,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        self.endpoint = endpoint.strip().rstrip("/") or ENDPOINT
        self._token = read_token(token)
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._ranges = Ranges(self._token, timeout_s)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Registry":
        """The registry that HF_ENDPOINT names, asked with HF_TOKEN."""
        return cls(
            endpoint=environment.get("HF_ENDPOINT", ""), token=environment.get("HF_TOKEN", "")
        )

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def token(self) -> str | None:
        """The token itself, for a request to this registry's own host and nothing else; None without one.

        Raises RegistryFault when what was given cannot be one.
        """
        if self._token is None:
            return None
        if not self._token.sendable:
            raise faults.bad_token()
        return self._token.reveal()

    async def __aenter__(self) -> "Registry":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._ranges.close()

    async def repo(self, repo_id: str, revision: str | None = None) -> Repo:
        """The repository at `revision` (a branch, tag or commit; None: its main branch), its commit pinned.

        The answer has the registry's own spelling of its id, also when it was renamed. Of a gated one it is
        found out here whether our account has access, so that no later step fails of it. Raises
        RegistryFault.
        """
        asked = self._asked(repo_id, revision or None)
        repo = await self._tried(lambda: self._listing(asked))
        if repo.gated is not None:
            await self._check_access(repo)
        return repo

    async def head(self, repo_id: str, commit: str, path: str, start: int, length: int) -> bytes:
        """`length` bytes (64 MiB at most) of a file from `start` on; fewer at its end alone.

        Raises RegistryFault.
        """
        return (await self._read(repo_id, commit, path, start, length)).read

    def open(self, repo_id: str, commit: str, path: str, size: int) -> RangedFile:
        """The file of `size` bytes as one that is read bit by bit; nothing is asked before it is read."""

        async def read_range(offset: int, length: int) -> bytes:
            return await self.head(repo_id, commit, path, offset, min(length, READ_BYTES))

        return RangedFile(read_range, size)

    async def _check_access(self, repo: Repo) -> None:
        """Asks for one byte of a file: only that tells whether the account was let in."""
        if self._token is None:
            raise faults.needs_token(self._asked(repo.id, repo.commit))
        models = sorted(
            file.path for file in repo.files if file.path.lower().endswith(".gguf") and file.bytes
        )
        # Without one there is nothing to download either, and the choice of a file set says so.
        if models:
            await self._read(repo.id, repo.commit, models[0], 0, 1)

    async def _read(self, repo_id: str, commit: str, path: str, start: int, length: int) -> Part:
        asked = self._asked(repo_id, commit, path)

        async def attempt() -> Part:
            at_most_s = _ATTEMPT_S + length / _SLOWEST_BYTES_PER_S
            return await self._bounded(asked, self._ranges.read(asked, start, length), at_most_s)

        return await self._tried(attempt)

    async def _listing(self, asked: Asked) -> Repo:
        answer = await self._bounded(
            asked,
            beside(lambda: read_listing(asked, self._token, self._timeout_s), "registry"),
        )
        if isinstance(answer, RegistryFault):
            raise answer
        return answer

    def _asked(self, repo_id: str, revision: str | None, path: str = "") -> Asked:
        """The question, when it can be asked at all."""
        try:
            address = urlsplit(self.endpoint)
            fine = address.scheme in ("http", "https") and bool(address.hostname)
            fine = fine and (address.port is None or address.port > 0)
        except ValueError:
            fine = False
        if not fine:
            raise faults.no_endpoint(self.endpoint)
        self.token()
        return Asked(
            endpoint=self.endpoint,
            repo=repo_id,
            revision=revision,
            path=path,
            with_token=self._token is not None,
        )

    async def _tried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await retried(attempt, self._retry_for_s)

    async def _bounded(
        self, asked: Asked, answer: Awaitable[T], at_most_s: float = _ATTEMPT_S
    ) -> T:
        try:
            return await asyncio.wait_for(answer, at_most_s)
        except TimeoutError:
            raise faults.unreachable(asked, f"no whole answer within {at_most_s:g} s") from None
