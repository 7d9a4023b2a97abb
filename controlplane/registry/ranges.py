"""Reads parts of a registry's files over HTTP ranges, following its redirects by hand.

The token goes to the registry's own origin and nowhere else, not even back there once another host sent us
on. It reads parts of bounded size for headers and probes; whole files are the mirror's affair.
"""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

import httpx
from msgspec import Struct

from controlplane.registry import faults
from controlplane.registry.credentials import Token
from controlplane.registry.faults import Asked, RegistryFault

REDIRECTS: Final = 6
READ_BYTES: Final = 64 * 1024**2
"""No more is read at once, and no more is thrown away before the part that was asked for."""

_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_WHOLE: Final = re.compile(r"bytes \*/(\d{1,18})", re.ASCII)


class Part(Struct, frozen=True, kw_only=True):
    """Bytes of a file from the offset that was asked for; fewer than asked for at its end alone.

    `total` is the file's size, None when nobody said.
    """

    read: bytes
    total: int | None = None


class Ranges:
    """One HTTP client for parts of files. `close` it, or use it as a context manager."""

    def __init__(self, token: Token | None, timeout_s: float) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._made: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._made is not None:
            await self._made.aclose()

    @property
    def _client(self) -> httpx.AsyncClient:
        # Made when it is first needed: it reads every certificate there is, which takes a tenth of a second.
        if self._made is None:
            self._made = httpx.AsyncClient(
                follow_redirects=False,
                timeout=httpx.Timeout(self._timeout_s),
                headers={"User-Agent": "modelyard", "Accept-Encoding": "identity"},
            )
        return self._made

    async def read(self, asked: Asked, start: int, length: int) -> Part:
        """`length` bytes of `asked.path` at `asked.revision` (a commit) from `start` on.

        Raises RegistryFault; connecting, and each wait for more bytes, take at most the client's timeout.
        """
        if not 0 < length <= READ_BYTES or start < 0:
            raise ValueError(f"{length} bytes from {start} are no part that is read at once")
        host = urlsplit(asked.endpoint).netloc
        try:
            async with self._answer(
                asked, {"Range": f"bytes={start}-{start + length - 1}"}
            ) as answer:
                host = answer.url.netloc.decode("ascii", "replace")
                return await _part(asked, answer, start, length)
        except httpx.TimeoutException:
            raise self._failed(asked, host, f"no byte within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            why = str(error) or type(error).__name__
            if self._token is not None:
                why = self._token.hide(why)
        raise self._failed(asked, host, why)

    @asynccontextmanager
    async def _answer(
        self, asked: Asked, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """The first answer that is no redirect; of one that refuses, the fault."""
        url = (
            f"{asked.endpoint}/{quote(asked.repo)}/resolve/{quote(asked.revision or 'main', safe='')}"
            f"/{quote(asked.path)}"
        )
        home = _origin(url)
        at_home = True
        for _ in range(REDIRECTS):
            at_home = at_home and _origin(url) == home
            given = dict(headers)
            if at_home and self._token is not None:
                given["Authorization"] = f"Bearer {self._token.reveal()}"
            async with self._client.stream("GET", url, headers=given) as answer:
                _check_commit(asked, answer)
                location = answer.headers.get("Location")
                if answer.is_redirect and location:
                    url = _next(asked, url, location)
                    continue
                if answer.status_code in (200, 206, 416):
                    yield answer
                    return
                if at_home:
                    raise faults.of_answer(
                        asked, answer.status_code, answer.headers, datetime.now(UTC)
                    )
                raise faults.stored_elsewhere(
                    asked, urlsplit(url).netloc.rpartition("@")[2], f"status {answer.status_code}"
                )
        raise faults.garbage(asked, "it sends us round in circles")

    @staticmethod
    def _failed(asked: Asked, host: str, why: str) -> RegistryFault:
        if host == urlsplit(asked.endpoint).netloc:
            return faults.unreachable(asked, why)
        return faults.stored_elsewhere(asked, host.rpartition("@")[2], why)


def _next(asked: Asked, url: str, location: str) -> str:
    """The address that `location`, told by `url`, means."""
    try:
        joined = urljoin(url, location)
        scheme, host, _ = _origin(joined)
    except ValueError:
        scheme = host = joined = ""
    if scheme not in ("http", "https") or not host:
        raise faults.garbage(asked, "it sends us to an address that is not of the web")
    return joined


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def _check_commit(asked: Asked, answer: httpx.Response) -> None:
    """The commit is pinned: bytes of another one are not what was chosen."""
    told = answer.headers.get("X-Repo-Commit")
    if told is not None and asked.revision is not None and told != asked.revision:
        raise faults.garbage(asked, "it offers the file of another commit")


async def _part(asked: Asked, answer: httpx.Response, start: int, length: int) -> Part:
    """The bytes that were asked for.

    1. 416: there are none so far into the file.
    2. 206: what it says it sends must begin where we asked.
    3. 200: the whole file; what comes before the part is thrown away, and what comes after is not read.
    """
    if answer.status_code == 416:  # 1
        found = _WHOLE.fullmatch(answer.headers.get("Content-Range", "").strip())
        if found is None or start < int(found[1]):
            raise faults.garbage(asked, "it has no bytes where the file has some")
        return Part(read=b"", total=int(found[1]))
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise faults.garbage(asked, "the bytes came packed")
    if answer.headers.get("Content-Type", "").lower().startswith("text/html"):
        raise faults.garbage(asked, "a page of HTML came instead of the file")
    if answer.status_code == 206:  # 2
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != start:
            raise faults.garbage(asked, "another part of the file came than was asked for")
        total = None if found[3] == "*" else int(found[3])
        return Part(read=await _bytes(answer, 0, length), total=total)
    if start > READ_BYTES:  # 3
        raise faults.garbage(asked, "it sends whole files only")
    told = answer.headers.get("Content-Length", "")
    total = int(told) if told.isascii() and told.isdigit() else None
    return Part(read=await _bytes(answer, start, length), total=total)


async def _bytes(answer: httpx.Response, skip: int, length: int) -> bytes:
    held = bytearray()
    async for piece in answer.aiter_raw():
        held += piece
        if skip:
            gone = min(skip, len(held))
            del held[:gone]
            skip -= gone
        if len(held) >= length:
            break
    return bytes(held[:length])
