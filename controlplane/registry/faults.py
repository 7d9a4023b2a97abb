"""Says what went wrong at the registry: every case its code and its own sentence.

`of_answer` is the one place that reads a refusal's status and headers; the listing, the ranges and the
mirror's fetches use it. Nothing here repeats a text that the registry sent: it might hold anything, our own token included.
"""

import email.utils
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from schemas.codes import (
    LICENCE_NOT_ACCEPTED,
    NEEDS_TOKEN,
    NO_SUCH_FILE,
    RATE_LIMITED,
    REGISTRY_ANSWER,
    REGISTRY_UNREACHABLE,
    REPO_DISABLED,
    REPO_NOT_FOUND,
    REVISION_NOT_FOUND,
    TOKEN_REFUSED,
)

DISABLED: Final = "Access to this resource is disabled."
"""The Hub's words, by which its own client library tells this case, too."""

_RESET: Final = re.compile(r"\br=0;t=(\d+)", re.ASCII)
_SHOWN: Final = 200


class RegistryFault(Exception):
    """A question to the registry that came to nothing. `code` is of schemas/codes.py.

    `transient`: the same question may be answered another time. `wait_s`: how long the registry asked to
    wait before that, None when it said nothing.
    """

    def __init__(
        self, code: str, sentence: str, *, transient: bool = False, wait_s: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.transient = transient
        self.wait_s = wait_s

    def after(self, tries: int) -> "RegistryFault":
        """The same fault once `tries` tries in a row came to it."""
        if tries < 2:
            return self
        return RegistryFault(self.code, f"{self.sentence} ({tries} tries)", wait_s=self.wait_s)


class Asked(Struct, frozen=True, kw_only=True):
    """What was asked of the registry: its address, and a repository, maybe at a revision, maybe a file of it.

    `with_token`: the request carried one.
    """

    endpoint: str
    repo: str
    revision: str | None = None
    path: str = ""
    with_token: bool = False

    @property
    def registry(self) -> str:
        """The registry as a person knows it: without the name and password its address may hold."""
        return urlsplit(self.endpoint).netloc.rpartition("@")[2] or "the registry"

    @property
    def page(self) -> str:
        """Where a person reads about the repository and accepts its licence."""
        return f"{urlsplit(self.endpoint).scheme}://{self.registry}/{self.repo}"


def of_answer(
    asked: Asked, status: int, headers: Mapping[str, str], now: datetime
) -> RegistryFault:
    """The fault that an answer other than 2xx means.

    1. The registry's own error codes, where it gives one; of a file, that it is not there needs none.
    2. 401 to a token: it is not accepted, whatever was asked for.
    3. 401 or 404: not there, or not for us to see.
    4. 403: the token does not reach that far; without one: it takes one.
    5. 429, and what is wrong at the registry's end: transient.
    6. Anything else is no answer to our question.
    """
    told = {name.lower(): value for name, value in headers.items()}
    code = told.get("x-error-code", "")
    message = told.get("x-error-message", "")
    if code == "GatedRepo":  # 1
        return _gated(asked, "awaiting" in message.lower())
    if code == "RevisionNotFound":
        return RegistryFault(
            REVISION_NOT_FOUND, f'{asked.repo} has no revision "{_shown(asked.revision)}"'
        )
    if code == "EntryNotFound" or (asked.path and not code and status in (404, 410)):
        return RegistryFault(
            NO_SUCH_FILE, f"{asked.repo} has no file {_shown(asked.path)} at {_at(asked)}"
        )
    if message == DISABLED:
        return RegistryFault(REPO_DISABLED, f"{asked.registry} has disabled {asked.repo}")
    if status == 401 and asked.with_token:  # 2
        return RegistryFault(
            TOKEN_REFUSED,
            f"{asked.registry} does not accept the token in HF_TOKEN: it is wrong, expired or revoked",
        )
    if code == "RepoNotFound" or status in (401, 404, 410):  # 3
        return _absent(asked)
    if status == 403:  # 4
        if asked.with_token:
            return RegistryFault(
                TOKEN_REFUSED,
                f"the token in HF_TOKEN may not read {asked.repo}: it lacks that permission",
            )
        return needs_token(asked)
    if status == 429:  # 5
        return _limited(asked, wait_s(told, now))
    if status >= 500 or status in (408, 425):
        return RegistryFault(
            REGISTRY_UNREACHABLE,
            f"{asked.registry} answered {status}: something is wrong at its end",
            transient=True,
            wait_s=wait_s(told, now),
        )
    return garbage(asked, f"status {status}")  # 6


def needs_token(asked: Asked) -> RegistryFault:
    return RegistryFault(
        NEEDS_TOKEN,
        f"{asked.repo} is gated: it needs a token; accept its licence at {asked.page}, then set "
        "HF_TOKEN for the control plane",
    )


def disabled(asked: Asked) -> RegistryFault:
    return RegistryFault(REPO_DISABLED, f"{asked.registry} has disabled {asked.repo}")


def bad_token() -> RegistryFault:
    return RegistryFault(
        TOKEN_REFUSED, "what is set as HF_TOKEN is no token: it has spaces or foreign characters"
    )


def no_name(repo: str) -> RegistryFault:
    return RegistryFault(
        REPO_NOT_FOUND,
        f'"{_shown(repo)}" is not a name a repository can have; it looks like owner/name',
    )


def unreachable(asked: Asked, why: str) -> RegistryFault:
    """`why` is ours, or short and of the operating system: `connection refused`."""
    return RegistryFault(
        REGISTRY_UNREACHABLE,
        f"{asked.registry} could not be reached: {_shown(why)}",
        transient=True,
    )


def offline() -> RegistryFault:
    return RegistryFault(
        REGISTRY_UNREACHABLE, "HF_HUB_OFFLINE is set: the control plane may not ask the registry"
    )


def no_endpoint(endpoint: str) -> RegistryFault:
    return RegistryFault(
        REGISTRY_UNREACHABLE,
        f'HF_ENDPOINT is "{_shown(endpoint.rpartition("@")[2])}", which is no http address',
    )


def garbage(asked: Asked, what: str) -> RegistryFault:
    """An answer that makes no sense; `what` says what came, in our words."""
    subject = f"{asked.repo}/{asked.path}" if asked.path else asked.repo
    return RegistryFault(
        REGISTRY_ANSWER, f"{asked.registry} did not answer properly about {_shown(subject)}: {what}"
    )


def stored_elsewhere(asked: Asked, host: str, why: str) -> RegistryFault:
    """The host that the registry sent us to for the bytes fails; a new address may help."""
    return RegistryFault(
        REGISTRY_UNREACHABLE,
        f"{_shown(host)}, where {asked.registry} keeps the file, failed: {_shown(why)}",
        transient=True,
    )


def _gated(asked: Asked, waiting: bool) -> RegistryFault:
    if not asked.with_token:
        return needs_token(asked)
    if waiting:
        return RegistryFault(
            LICENCE_NOT_ACCEPTED,
            f"licence not accepted: access to {asked.repo} was asked for, and its owners have not "
            "granted it yet",
        )
    return RegistryFault(
        LICENCE_NOT_ACCEPTED,
        f"licence not accepted: the account of HF_TOKEN has no access to {asked.repo}; ask for it at "
        f"{asked.page}",
    )


def _absent(asked: Asked) -> RegistryFault:
    if asked.with_token:
        return RegistryFault(
            REPO_NOT_FOUND,
            f"{asked.registry} has no repository {asked.repo} that the account of HF_TOKEN may see",
        )
    return RegistryFault(
        REPO_NOT_FOUND,
        f"{asked.registry} has no repository {asked.repo}, or it is private: without a token "
        "(HF_TOKEN) the registry does not tell these apart",
    )


def _limited(asked: Asked, wait_s: float | None) -> RegistryFault:
    when = "" if wait_s is None else f"; it asks to wait {wait_s:.0f} s"
    who = "" if asked.with_token else "; it allows more to those with a token (HF_TOKEN)"
    return RegistryFault(
        RATE_LIMITED,
        f"{asked.registry} limits how often we may ask{when}{who}",
        transient=True,
        wait_s=wait_s,
    )


def wait_s(told: Mapping[str, str], now: datetime) -> float | None:
    """Seconds to wait, from Retry-After as a number or a date, else from RateLimit; never negative."""
    said = told.get("retry-after", "").strip()
    if said.isascii() and said.isdigit() and len(said) < 10:
        return float(said)
    if said:
        try:
            when = email.utils.parsedate_to_datetime(said)
        except ValueError:
            when = None
        if when is not None:
            when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
            return max(0.0, (when - now).total_seconds())
    found = _RESET.search(told.get("ratelimit", "").replace(" ", "")[:_SHOWN])
    return float(found[1]) if found is not None and len(found[1]) < 10 else None


def _shown(text: str | None) -> str:
    """On one line and of a length a person reads, whatever it held."""
    flat = "".join(mark if mark.isprintable() else "?" for mark in text or "")
    return flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}…"


def _at(asked: Asked) -> str:
    return _shown(asked.revision or "main")[:12]
