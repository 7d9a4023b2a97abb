"""Describes what the questions of the read API may get instead of an answer, for its OpenAPI document.

It refuses nothing itself: who does is named at each row. A code that is not here is one the document does not know.
"""

from collections.abc import Mapping
from typing import Any, Final

from litestar.openapi import ResponseSpec
from litestar.openapi.spec import Example, SecurityRequirement
from msgspec import Struct

from schemas import codes
from schemas.api import ErrorBody, ErrorDetail

REGISTRY_STATUS: Final = {
    codes.REPO_NOT_FOUND: 404,
    codes.REVISION_NOT_FOUND: 404,
    codes.NEEDS_TOKEN: 403,
    codes.LICENCE_NOT_ACCEPTED: 403,
    codes.TOKEN_REFUSED: 403,
    codes.REPO_DISABLED: 403,
    codes.RATE_LIMITED: 429,
    codes.REGISTRY_UNREACHABLE: 502,
    codes.REGISTRY_ANSWER: 502,
}
"""The status of what the registry said instead of an answer; what is not here is 502 too."""

OPEN: Final[list[SecurityRequirement]] = [{}, {"token": []}]
"""Of what this machine asks without a token (controlplane/api_guard.py)."""


class _Named(Example):
    """An example whose name is the key it stands under, and no part of itself."""

    def to_schema(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_schema().items() if key != "id"}


class Case(Struct, frozen=True, kw_only=True):
    """One code that a question may get; `sentence` is such a one as a person reads."""

    status: int
    code: str
    sentence: str
    has_position: bool = False

    def example(self) -> Example:
        error: dict[str, object] = {"code": self.code, "sentence": self.sentence}
        position = 41 if self.has_position else None
        return _Named(
            id=self.code, summary=self.sentence, value={"error": error, "applied_seq": position}
        )


def _row(status: int, code: str, sentence: str, *, has_position: bool = False) -> Case:
    return Case(status=status, code=code, sentence=sentence, has_position=has_position)


EVERYWHERE: Final = (
    # controlplane/api_guard.py
    _row(400, "bad_request", "the header host is given twice"),
    _row(401, "unauthorized", "this API wants `Authorization: Bearer <token>`"),
    _row(403, "host_not_allowed", "this API is not known as 'example.org'"),
    _row(403, "origin_not_allowed", "pages of that origin may not use this API"),
    _row(415, "unsupported_media_type", "bodies must be application/json"),
    # controlplane/api.py
    _row(500, "internal", "the control plane failed to answer; its log has the reason"),
)
"""What any question may get."""

STATE: Final = (
    _row(503, "not_synced", "the log has not been read yet; try again soon"),
    _row(
        504,
        "not_applied_yet",
        "sequence 42 was not applied within 5 s; this control plane is at 41",
        has_position=True,
    ),
)
"""Of questions for states, with `min_seq` too."""

ONE: Final = (
    *STATE,
    _row(404, "not_found", "there is no model 'my-model'", has_position=True),
    _row(
        409,
        codes.UPGRADE_REQUIRED,
        "model 'my-model' was written by a newer version of Modelyard (version 9 of model, sequence 40) than this "
        "control plane: bring it up to date",
        has_position=True,
    ),
)

USAGE: Final = (_row(503, "not_synced", "what was used has not been read yet; try again soon"),)

EVENTS: Final = (
    _row(503, "too_many_streams", "too many clients follow the events already"),
    _row(503, "nats_unavailable", "there is no connection to NATS"),
)

ASKED_WITH_BODY: Final = (_row(413, "request_too_large", "Request Entity Too Large"),)

PLACE: Final = (
    *ASKED_WITH_BODY,
    _row(404, codes.NOT_FOUND, "there is no model 'my-model'"),
    _row(503, "not_synced", "this control plane is not up to date with the log; try again soon"),
)

_SAID: Final[Mapping[str, str]] = {
    codes.REPO_NOT_FOUND: "the registry has no repository owner/repo, or it is private",
    codes.REVISION_NOT_FOUND: "owner/repo has no revision 'v9'",
    codes.NEEDS_TOKEN: "owner/repo is gated; set HF_TOKEN",
    codes.LICENCE_NOT_ACCEPTED: "the account of HF_TOKEN has no access to owner/repo",
    codes.TOKEN_REFUSED: "the registry refuses HF_TOKEN",
    codes.REPO_DISABLED: "the registry has taken owner/repo offline",
    codes.RATE_LIMITED: "the registry is asked too often",
    codes.REGISTRY_UNREACHABLE: "the registry does not answer",
    codes.REGISTRY_ANSWER: "the registry answered with something that makes no sense",
}

REGISTRY: Final = (
    _row(400, codes.INVALID, "repo is OWNER/NAME"),
    *(_row(status, code, _SAID[code]) for code, status in REGISTRY_STATUS.items()),
)

PLAN: Final = (*ASKED_WITH_BODY, *REGISTRY)

_STATUSES: Final[Mapping[int, str]] = {
    400: "The request makes no sense; the sentence says where.",
    401: "The bearer token is missing or wrong.",
    403: "It may not be asked so: by that name of this machine, from that page, or of that repository.",
    404: "There is no such thing.",
    409: "It is there, but its state cannot be read.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "The registry is asked too often.",
    500: "The control plane failed; its log has the reason.",
    502: "The registry gave no usable answer.",
    503: "It cannot be told now; try again soon.",
    504: "The position asked for was not reached in time.",
}


def responses(
    refusals: tuple[Case, ...] = (), *, ok: ResponseSpec | None = None
) -> dict[int, ResponseSpec]:
    """The `responses` of a route: `ok`, and each status of `refusals` and of EVERYWHERE with its codes."""
    found: dict[int, ResponseSpec] = {} if ok is None else {200: ok}
    rows = (*EVERYWHERE, *refusals)
    for status in sorted({row.status for row in rows}):
        found[status] = ResponseSpec(
            data_container=ErrorBody,
            generate_examples=False,
            description=_STATUSES[status],
            examples=[row.example() for row in rows if row.status == status],
        )
    return found


def told(
    body: type[Struct], description: str, *, media_type: str = "application/json"
) -> ResponseSpec:
    """The answer itself."""
    return ResponseSpec(
        data_container=body,
        generate_examples=False,
        description=description,
        media_type=media_type,
    )


def registry_status(code: str) -> int:
    """The status of what the registry said instead of an answer."""
    return REGISTRY_STATUS.get(code, 502)


def error_body(code: str, sentence: str, applied_seq: int | None = None) -> ErrorBody:
    """The body of every refusal."""
    return ErrorBody(error=ErrorDetail(code=code, sentence=sentence), applied_seq=applied_seq)
