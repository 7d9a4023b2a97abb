"""Finds out which inference paths a running engine has, by asking each for nothing at all.

An empty body is no request that any engine could work on: it is refused in the time of a look-up, or the path is not
there. What is asked is a fixed list; nothing else of an engine is touched.
"""

import asyncio
from typing import Final

from nodeagent.drivers import asking

ALWAYS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Published of an engine that says nothing of any path."""

OPENAI: Final = (
    *ALWAYS,
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/tokenize",
    "/detokenize",
)
"""What servers of OpenAI's and Anthropic's forms may have; `{id}` stands for one of theirs."""

_NOT_THERE: Final = (404, 405, 501)
_OTHER_METHOD: Final = 405
_AN_ID: Final = "resp_none"
_AT_ONCE: Final = 8


async def answered(endpoint: str, key: str, candidates: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `candidates` that the engine has, in their order. Bounded by a few seconds; it never raises.

    1. A path with an id in it is asked by a method it has not: an unknown id and an unknown path look alike, but
    only a known path says that the method is wrong. 2. An engine that hangs is not waited for twenty times; one that
    ends the connection costs nobody time. 3. One that answers nothing, or has none of them, cannot be asked like
    this: it keeps ALWAYS.
    """
    turns = asyncio.Semaphore(_AT_ONCE)
    silent = False

    async def has(path: str) -> bool | None:
        nonlocal silent
        async with turns:
            if silent:  # 2
                return None
            if "{id}" in path:  # 1
                # Only the cancelling of one is posted, so that alone is asked by GET.
                ask = asking.get if path.endswith("/cancel") else asking.post
                answer = await ask(endpoint, path.replace("{id}", _AN_ID), key)
                return answer is not None and answer.status == _OTHER_METHOD
            answer = await asking.ask(endpoint, "POST", path, key, content=b"")
            if isinstance(answer, asking.NoAnswer):
                silent = silent or answer.why == "late"
                return None
            return answer.status not in _NOT_THERE

    there = await asyncio.gather(*(has(path) for path in candidates))
    if not any(there):  # 3
        return tuple(path for path in candidates if path in ALWAYS)
    return tuple(
        path
        for path, told in zip(candidates, there, strict=True)
        if told or (told is None and path in ALWAYS)
    )
