"""Judges the head of a server's answer to a request for a file, or for the rest of one: take, retry, refuse.

It never follows an answer it cannot place: bytes that are not surely the ones asked for are not appended.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

from controlplane.mirror.domain.contents import wrong_size
from controlplane.mirror.domain.ranges import content_range, unsatisfied_total
from controlplane.mirror.domain.retries import retry_after_s
from schemas import codes

Origin = Literal["registry", "mirror"]

_MESSAGE: Final = 200


class Asked(Struct, frozen=True, kw_only=True):
    """The request behind an answer: which file, of how many bytes, from which byte on, of whom.

    `place` names the server for people. `with_token`: a token was configured for it. `etag` is that of the
    bytes before `offset`, `checked` that a published sha256 will prove the whole. `redirected`: another
    host answered than the one asked, so it speaks only for itself.
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
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return Refused(
            code=codes.REGISTRY_UNREACHABLE,
            sentence=f"{asked.place} sent {asked.path} encoded as {headers['content-encoding']!r}",
        )
    match status:
        case 200:  # 1
            return _whole(headers, asked)
        case 206:  # 2
            return _part(headers, asked)
        case 416:  # 3
            size = unsatisfied_total(headers.get("content-range"))
            if asked.offset == 0 or (size is not None and size != asked.total):
                return Refused(
                    code=codes.SIZE_MISMATCH,
                    sentence=f"{asked.place} has no byte {asked.offset} of {asked.path}"
                    if size is None
                    else wrong_size(asked.path, size, asked.total),
                )
            return Anew(why=f"{asked.place} has no byte {asked.offset}")
        case 429:  # 4
            return Later(
                code=codes.RATE_LIMITED,
                sentence=f"{asked.place} answers 429, too many requests",
                retry_after_s=retry_after_s(headers.get("retry-after"), now),
            )
        case _ if status in (408, 425) or status >= 500:  # 4
            return Later(
                code=codes.REGISTRY_UNREACHABLE,
                sentence=f"{asked.place} answers {status}",
                retry_after_s=retry_after_s(headers.get("retry-after"), now),
            )
        case _:  # 5
            return _refused(status, headers, asked)


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _strong_etag(headers: Mapping[str, str]) -> str:
    etag = headers.get("etag", "").strip()
    return etag if etag.startswith('"') else ""


def _whole(headers: Mapping[str, str], asked: Asked) -> Verdict:
    """The size is compared by the reader, after the first bytes: an error page is one, not a wrong size."""
    return Take(offset=0, length=_length(headers), etag=_strong_etag(headers))


def _part(headers: Mapping[str, str], asked: Asked) -> Verdict:
    """1 not what was asked (no Content-Range, several parts, another begin)  2 of a file of another size
    3 of another version, when no sha256 would find that out   4 taken"""
    told = content_range(headers.get("content-range"))
    if told is None or told.part.first != asked.offset:  # 1
        return Anew(why=f"{asked.place} answered another range than was asked")
    if told.total is not None and told.total != asked.total:  # 2
        return Refused(
            code=codes.SIZE_MISMATCH, sentence=wrong_size(asked.path, told.total, asked.total)
        )
    if told.part.end > asked.total:
        return Anew(why=f"{asked.place} answered another range than was asked")
    etag = _strong_etag(headers)
    if not asked.checked and asked.etag and etag != asked.etag:  # 3
        return Anew(why=f"{asked.place} has another version of {asked.path}")
    length = _length(headers)
    if length is not None and length != told.part.length:  # 1
        return Anew(why=f"{asked.place} contradicts itself about the length of its answer")
    return Take(offset=asked.offset, length=told.part.length, etag=etag)  # 4


def _refused(status: int, headers: Mapping[str, str], asked: Asked) -> Verdict:
    """1 another mirror: whatever it says, ask elsewhere   2 a host we were sent to (an address that expired)
    3 gated, token or licence   4 nothing of that name   5 anything else"""
    if asked.origin == "mirror":  # 1
        return Refused(
            code=codes.NO_SUCH_FILE if status == 404 else codes.REGISTRY_UNREACHABLE,
            sentence=f"{asked.place} answers {status} for {asked.path}",
        )
    if asked.redirected and status in (400, 401, 403, 404, 410):  # 2
        return Later(
            code=codes.REGISTRY_UNREACHABLE,
            sentence=f"{asked.place} answers {status} for {asked.path}",
        )
    kind = headers.get("x-error-code", "").strip()
    said = headers.get("x-error-message", "").strip()[:_MESSAGE]
    tail = f": {said}" if said else ""
    if kind == "GatedRepo" or (status in (401, 403) and kind != "RepoNotFound"):  # 3
        if not asked.with_token:
            return Refused(
                code=codes.NEEDS_TOKEN,
                sentence=f"{asked.repo} needs a token: set HF_TOKEN for the control plane{tail}",
            )
        if status == 401 and kind != "GatedRepo":
            return Refused(
                code=codes.NEEDS_TOKEN,
                sentence=f"{asked.place} does not accept the token in HF_TOKEN{tail}",
            )
        return Refused(
            code=codes.LICENCE_NOT_ACCEPTED,
            sentence=f"the account of HF_TOKEN has no access to {asked.repo}; "
            f"its licence is accepted on its page{tail}",
        )
    if kind == "RepoNotFound":  # 4
        hint = "" if asked.with_token else ", or it is private and HF_TOKEN is not set"
        return Refused(
            code=codes.REPO_NOT_FOUND, sentence=f"{asked.place} has no {asked.repo}{hint}{tail}"
        )
    if kind == "RevisionNotFound":
        return Refused(
            code=codes.REVISION_NOT_FOUND, sentence=f"{asked.repo} lost its revision{tail}"
        )
    if status in (404, 410):
        return Refused(
            code=codes.NO_SUCH_FILE, sentence=f"{asked.repo} has no file {asked.path}{tail}"
        )
    return Refused(  # 5
        code=codes.REGISTRY_UNREACHABLE,
        sentence=f"{asked.place} answers {status} for {asked.path}{tail}",
    )
