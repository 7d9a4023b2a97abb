"""Judges the head of a server's answer to a request for a file, or for the rest of one: take, retry, refuse.

It never follows an answer it cannot place: bytes that are not surely the ones asked for are not appended.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from msgspec import Struct

from controlplane.domain.adaptersources import stamp_in, stamp_of
from controlplane.mirror.domain.contents import unreachable, wrong_size
from controlplane.mirror.domain.ranges import content_range, unsatisfied_total
from controlplane.registry import faults
from schemas import codes

Origin = Literal["registry", "mirror", "web", "folder"]
"""`web` and `folder` are where an adapter comes from that no registry publishes."""


class Asked(Struct, frozen=True, kw_only=True):
    """The request behind an answer: which file, of how many bytes, from which byte on, of whom.

    `place` names the server for people. `with_token`: a token was configured for it. `etag` is that of the
    bytes before `offset`, `checked` that a published sha256 will prove the whole. `redirected`: another
    host answered than the one asked, so it speaks only for itself. `why`: what a folder of this machine says in
    place of a status.
    """

    path: str
    repo: str
    total: int
    offset: int
    origin: Origin
    place: str
    with_token: bool = False
    etag: str = ""
    checked: bool = False
    redirected: bool = False
    endpoint: str = ""
    commit: str = ""
    why: str = ""


class Take(Struct, frozen=True, kw_only=True):
    """The body is the file from `offset` on; `length` None: as long as it comes. `etag` is a strong one or empty."""

    offset: int
    length: int | None
    etag: str


class Anew(Struct, frozen=True, kw_only=True):
    """Nothing that is here can be continued: ask for the whole file."""

    why: str


class Later(Struct, frozen=True, kw_only=True):
    """It may go better next time. `code` and `sentence` are told when there is no next time."""

    code: str
    sentence: str
    retry_after_s: float | None = None


class Refused(Struct, frozen=True, kw_only=True):
    """This source will not give the file, however often it is asked."""

    code: str
    sentence: str


Verdict = Take | Anew | Later | Refused


def judge(status: int, headers: Mapping[str, str], asked: Asked, now: datetime) -> Verdict:
    """`headers` have lower-case names.

    1 200: the whole file, from its first byte, whatever was asked   2 206: only the part that was asked
    3 416: what is here is longer than the file there   4 try again: 408, 425, 429, 5xx
    5 refused, with the server's own reason where it gives one
    """
    if is_packed(headers):
        return Refused(
            code=unreachable(asked.repo),
            sentence=f"{asked.place} sent {asked.path} encoded as {headers['content-encoding']!r}",
        )
    match status:
        case 200:  # 1
            return _changed(headers, asked) or _whole(headers, asked)
        case 206:  # 2
            return _changed(headers, asked) or _part(headers, asked)
        case 416:  # 3
            size = unsatisfied_total(headers.get("content-range"))
            if asked.offset == 0 or (size is not None and size != asked.total):
                return Refused(
                    code=codes.SIZE_MISMATCH,
                    sentence=f"{asked.place} has no byte {asked.offset} of {asked.path}"
                    if size is None
                    else wrong_size(asked.path, size, asked.total, asked.repo),
                )
            return Anew(why=f"{asked.place} has no byte {asked.offset}")
        case _ if status in (408, 425, 429) or status >= 500:  # 4
            return _later(status, headers, asked, now)
        case _:  # 5
            return _refused(status, headers, asked, now)


def _changed(headers: Mapping[str, str], asked: Asked) -> Refused | None:
    """A file without a sum that is not the one its URL had when the adapter was added: it would be served under
    the wrong name. A server that says nothing of its version is believed."""
    etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
    if asked.origin != "web" or asked.checked or not (etag or modified):
        return None
    if stamp_of(etag, modified, asked.total) == stamp_in(asked.commit):
        return None
    return Refused(
        code=codes.CHECKSUM_MISMATCH,
        sentence=f"{asked.path} at {asked.place} has changed since the adapter was added; add it again",
    )


def is_packed(headers: Mapping[str, str]) -> bool:
    """Whether the body is not the file's own bytes."""
    return headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")


def content_length(headers: Mapping[str, str]) -> int | None:
    """How long the body is to be, None when the server does not tell or what it tells is no length."""
    text = headers.get("content-length", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _strong_etag(headers: Mapping[str, str]) -> str:
    etag = headers.get("etag", "").strip()
    return etag if etag.startswith('"') else ""


def _whole(headers: Mapping[str, str], asked: Asked) -> Verdict:
    """The size is compared by the reader, after the first bytes: an error page is one, not a wrong size."""
    return Take(offset=0, length=content_length(headers), etag=_strong_etag(headers))


def _part(headers: Mapping[str, str], asked: Asked) -> Verdict:
    """1 not what was asked (no Content-Range, several parts, another begin)  2 of a file of another size
    3 of another version, when no sha256 would find that out   4 taken"""
    told = content_range(headers.get("content-range"))
    if told is None or told.part.first != asked.offset:  # 1
        return Anew(why=f"{asked.place} answered another range than was asked")
    if told.total is not None and told.total != asked.total:  # 2
        return Refused(
            code=codes.SIZE_MISMATCH,
            sentence=wrong_size(asked.path, told.total, asked.total, asked.repo),
        )
    if told.part.end > asked.total:
        return Anew(why=f"{asked.place} answered another range than was asked")
    etag = _strong_etag(headers)
    if not asked.checked and asked.etag and etag != asked.etag:  # 3
        return Anew(why=f"{asked.place} has another version of {asked.path}")
    length = content_length(headers)
    if length is not None and length != told.part.length:  # 1
        return Anew(why=f"{asked.place} contradicts itself about the length of its answer")
    return Take(offset=asked.offset, length=told.part.length, etag=etag)  # 4


def _later(status: int, headers: Mapping[str, str], asked: Asked, now: datetime) -> Later:
    if asked.origin == "registry" and not asked.redirected:
        fault = _fault(status, headers, asked, now)
        return Later(code=fault.code, sentence=fault.sentence, retry_after_s=fault.wait_s)
    return Later(
        code=codes.RATE_LIMITED if status == 429 else unreachable(asked.repo),
        sentence=f"{asked.place} answers {status}",
        retry_after_s=faults.wait_s(headers, now),
    )


def _refused(status: int, headers: Mapping[str, str], asked: Asked, now: datetime) -> Verdict:
    """1 another mirror: whatever it says, ask elsewhere   2 a host we were sent to (an address that expired)
    3 the registry: what its answers mean to a listing they mean here   4 a URL or a folder: it is not there,
    or it is not for us"""
    answers = f"{asked.place} answers {status} for {asked.path}"
    if asked.origin == "mirror":  # 1
        return Refused(
            code=codes.NO_SUCH_FILE if status == 404 else unreachable(asked.repo),
            sentence=answers,
        )
    if asked.redirected:  # 2
        if status in (400, 401, 403, 404, 410):
            return Later(code=unreachable(asked.repo), sentence=answers)
        return Refused(code=unreachable(asked.repo), sentence=answers)
    if asked.origin != "registry":  # 4
        is_gone = status in (404, 410)
        return Refused(
            code=codes.NO_SUCH_FILE if is_gone else unreachable(asked.repo),
            sentence=f"{asked.place} does not give {asked.path}: {asked.why}"
            if asked.why
            else answers,
        )
    fault = _fault(status, headers, asked, now)  # 3
    return Refused(code=fault.code, sentence=fault.sentence)


def _fault(
    status: int, headers: Mapping[str, str], asked: Asked, now: datetime
) -> faults.RegistryFault:
    question = faults.Asked(
        endpoint=asked.endpoint or f"https://{asked.place}",
        repo=asked.repo,
        revision=asked.commit or None,
        path=asked.path,
        with_token=asked.with_token,
    )
    return faults.of_answer(question, status, headers, now)
