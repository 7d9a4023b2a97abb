"""Finds an adapter behind a URL: asks for its configuration, and for the first bytes of its weights.

No credentials are sent, redirects are bounded and never lead from https to http, and nothing is read without
an end in sight. The server's word for the weights' version (ETag or date) goes into the commit.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from controlplane.adapterplaces.found import Found, Unreadable, check_config
from controlplane.domain.adapterconfig import CONFIG_BYTES
from controlplane.domain.adaptersources import (
    PICKLES,
    SHARD_INDEX,
    WebSource,
    choose,
    stamp_of,
    sum_of_web,
)
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from controlplane.mirror.connecting import CutOff, Line, Misdirected, ask
from controlplane.mirror.domain import contents
from controlplane.mirror.domain.answers import content_length, is_packed
from controlplane.mirror.domain.ranges import content_range
from controlplane.registry.faults import RegistryFault, wait_s
from controlplane.registry.retrying import retried
from controlplane.registry.threads import beside
from schemas.codes import NOT_AN_ADAPTER, RATE_LIMITED, SOURCE_UNREACHABLE

SILENCE_S: Final = 10.0
WHOLE_S: Final = 60.0
"""All of one answer, however it drips in."""
RETRY_FOR_S: Final = 30.0
_GONE: Final = (404, 410)

Read = Callable[[memoryview], int | None]
"""See connecting.Answer.read_into."""


class _Got(Struct, frozen=True):
    """An answer and as much of its body as was wanted."""

    status: int
    headers: dict[str, str]
    body: bytes
    ended: bool


async def find(source: WebSource, *, retry_for_s: float) -> Found:
    """The adapter in the folder `source`. Raises RegistryFault (transient ones were tried again), Unreadable."""
    line = Line()
    try:
        return await retried(
            lambda: beside(lambda: _find(source.url, line), "adapter url"), retry_for_s
        )
    except asyncio.CancelledError:
        line.stop()
        raise


def _find(url: str, line: Line) -> Found:
    """1 its configuration   2 the beginning of its weights   3 none: what there is instead."""
    config = _get(url, ADAPTER_CONFIG, {}, CONFIG_BYTES + 1, line)  # 1
    asked = {"range": f"bytes=0-{contents.SNIFFED - 1}"}
    weights = _get(url, ADAPTER_WEIGHTS, asked, contents.SNIFFED, line)  # 2
    there = {
        name
        for name, got in ((ADAPTER_CONFIG, config), (ADAPTER_WEIGHTS, weights))
        if got is not None
    }
    if weights is None:  # 3
        there |= {
            name
            for name in (SHARD_INDEX, *PICKLES)
            if _get(url, name, {"range": "bytes=0-0"}, 1, line) is not None
        }
    refusal = choose(url, there)
    if refusal is not None:
        raise Unreadable(refusal.code, refusal.sentence)
    assert config is not None
    assert weights is not None
    check_config(config.body, url)
    size = _size(weights)
    if size is None:
        raise Unreadable(SOURCE_UNREACHABLE, f"{_host(url)} does not say how long the weights are")
    if not contents.begins_right(ADAPTER_WEIGHTS, weights.body, size):
        kind = weights.headers.get("content-type", "")
        told = contents.not_that(ADAPTER_WEIGHTS, weights.body, kind)
        raise Unreadable(NOT_AN_ADAPTER, f"{url}: {told}")
    stamp = stamp_of(
        weights.headers.get("etag", ""), weights.headers.get("last-modified", ""), size
    )
    return Found(
        repo=url,
        commit=sum_of_web(hashlib.sha256(config.body).hexdigest(), stamp),
        config=config.body,
        weights_bytes=size,
    )


def _size(got: _Got) -> int | None:
    """The file's whole size, as far as its server tells it; what came whole tells it by itself."""
    if got.status == 206:
        told = content_range(got.headers.get("content-range"))
        return told.total if told is not None and told.part.first == 0 else None
    length = content_length(got.headers)
    if length is not None:
        return length
    return len(got.body) if got.ended else None


def _get(url: str, name: str, headers: dict[str, str], most: int, line: Line) -> _Got | None:
    """At most `most` bytes of `name`; None when it is not there. Raises RegistryFault, Unreadable, Stopped."""
    host = _host(url)
    try:
        answer = ask(
            f"{url}/{name}", headers=headers, token="", line=line, silence_s=SILENCE_S, proxies=True
        )
    except CutOff as error:
        raise _away(f"{host} could not be reached: {error}") from None
    except Misdirected as error:
        raise Unreadable(SOURCE_UNREACHABLE, f"{host} for {name}: {error}") from None
    try:
        if answer.status in (200, 206):
            body, ended = _body(answer.read_into, most, host)
            _check_plain(answer.headers, host, name)
            return _Got(answer.status, answer.headers, body, ended)
        if answer.status in _GONE:
            return None
        if answer.status == 416:  # of an empty file no byte can be given
            return _Got(200, {"content-length": "0"}, b"", True)
        pause_s = wait_s(answer.headers, datetime.now(UTC))
        if answer.status == 429:
            raise RegistryFault(
                RATE_LIMITED,
                f"{host} limits how often we may ask",
                transient=True,
                wait_s=pause_s,
            )
        if answer.status >= 500 or answer.status in (408, 425):
            raise _away(f"{host} answers {answer.status} for {name}", pause_s)
        raise Unreadable(
            SOURCE_UNREACHABLE,
            f"{host} answers {answer.status} for {name}; the yard sends no credentials to a URL",
        )
    finally:
        answer.close()


def _body(read: Read, most: int, host: str) -> tuple[bytes, bool]:
    body = bytearray(most)
    count = 0
    until = time.monotonic() + WHOLE_S
    heard_at = time.monotonic()
    try:
        while count < most:
            got = read(memoryview(body)[count:])
            now = time.monotonic()
            if got == 0:
                return bytes(body[:count]), True
            if got is not None:
                count += got
                heard_at = now
            if now > until or now - heard_at > SILENCE_S:
                raise _away(f"{host} stopped sending")
    except CutOff as error:
        raise _away(f"{host}: {error}") from None
    return bytes(body), False


def _check_plain(headers: dict[str, str], host: str, name: str) -> None:
    if is_packed(headers):
        coding = headers["content-encoding"].strip().lower()
        raise Unreadable(SOURCE_UNREACHABLE, f"{host} sends {name} packed ({coding[:40]!r})")


def _away(sentence: str, pause_s: float | None = None) -> RegistryFault:
    return RegistryFault(SOURCE_UNREACHABLE, sentence, transient=True, wait_s=pause_s)


def _host(url: str) -> str:
    return urlsplit(url).netloc
