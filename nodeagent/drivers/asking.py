"""Asks an engine one small question over HTTP, with a deadline, and takes no answer for an answer.

For health, counters, parking and adapters only; requests of clients never come this way. It keeps no connection:
who asks the same engine often and must not wait for one has `lines.py`.
"""

import asyncio
from typing import Final, Protocol

from nodeagent.drivers import line
from nodeagent.drivers.line import Answer, Method, NoAnswer

__all__ = ["ANSWER_LIMIT_BYTES", "ASK_S", "Answer", "Ask", "NoAnswer", "ask", "get", "post"]

ANSWER_LIMIT_BYTES: Final = 4 * 1024 * 1024
ASK_S: Final = 2.0
"""Bound of one question, from connecting to the last byte."""


class Ask(Protocol):
    """What asks one question: `ask`, or `Lines.ask`."""

    async def __call__(
        self,
        endpoint: str,
        method: Method,
        path: str,
        key: str = "",
        *,
        content: bytes | None = None,
        timeout_s: float = ASK_S,
        limit_bytes: int = ANSWER_LIMIT_BYTES,
        cut: bool = False,
    ) -> Answer | NoAnswer: ...


async def get(
    endpoint: str, path: str, key: str = "", *, timeout_s: float = ASK_S
) -> Answer | None:
    """GET `path` at `endpoint` (a base URL); None when no whole answer came within `timeout_s`."""
    answer = await ask(endpoint, "GET", path, key, timeout_s=timeout_s)
    return answer if isinstance(answer, Answer) else None


async def post(
    endpoint: str,
    path: str,
    key: str = "",
    *,
    content: bytes = b"",
    timeout_s: float = ASK_S,
) -> Answer | None:
    """POST `content` (JSON, or nothing) to `path`; None when no whole answer came within `timeout_s`."""
    answer = await ask(endpoint, "POST", path, key, content=content, timeout_s=timeout_s)
    return answer if isinstance(answer, Answer) else None


async def ask(
    endpoint: str,
    method: Method,
    path: str,
    key: str = "",
    *,
    content: bytes | None = None,
    timeout_s: float = ASK_S,
    limit_bytes: int = ANSWER_LIMIT_BYTES,
    cut: bool = False,
) -> Answer | NoAnswer:
    """One question for those who must know why there is no answer; never raises for what an engine does.

    A body above `limit_bytes` is no answer, unless `cut`: then its beginning is enough, and the rest is not read.
    """
    asked = line.question(endpoint, method, path, key, content, keep=False)
    try:
        async with asyncio.timeout(timeout_s):
            made = await line.connect(endpoint)
            if made is None:
                return NoAnswer(why="unreachable")
            try:
                return await made.ask(asked, limit_bytes=limit_bytes, cut=cut)
            finally:
                made.abort()
    except TimeoutError:
        return NoAnswer(why="late")
