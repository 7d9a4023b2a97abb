"""Answers in place of a handler: what never became a request, what failed, what the end of its gateway cuts.

Each is one small whole answer in the envelope of its responder; what becomes of the connection is not decided here.
"""

import contextlib
from typing import Final

from gateway.http.errors import ClientGone, RequestError
from gateway.http.messages import JSON_TYPE, Responder

Unhandled = tuple[int, str, str]
"""Status, code and sentence."""

DRAINING: Final[Unhandled] = (503, "draining", "This gateway is shutting down; try again.")
FAILED: Final[Unhandled] = (500, "internal_error", "The gateway failed; the log says why.")
NOTHING: Final[Unhandled] = (500, "internal_error", "Nothing was answered.")


def answer_at_once(responder: Responder, status: int, code: str, message: str) -> None:
    """Without waiting for a slow client."""
    responder.send_now(status, [JSON_TYPE], responder.envelope.body(status, code, message))


async def answer_problem(responder: Responder, problem: RequestError) -> None:
    """With when to come back, where `problem` says so."""
    headers: list[tuple[bytes, bytes]] = []
    if problem.retry_after_s is not None:
        headers = [
            (b"retry-after", b"%d" % problem.retry_after_s),
            (b"x-should-retry", b"true"),
        ]
    with contextlib.suppress(ClientGone):
        await responder.send_error(
            problem.status,
            problem.code,
            problem.message,
            param=problem.param,
            headers=headers,
        )
