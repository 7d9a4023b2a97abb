"""Asks one replica to say hello, straight and with its engine's key, and tells its reply and its speed.

One request, no retry: whether the step goes on or fails is decided from the report.
"""

import asyncio
import time
from typing import Any, Final

import httpx
import msgspec
from msgspec import Struct

from controlplane.domain.reports import SmokeAnswered, StepFailed
from controlplane.domain.work import Smoke
from schemas import codes

PROMPT: Final = "Say hello in one short sentence."
MAX_TOKENS: Final = 32
ANSWER_BYTES: Final = 1024 * 1024
QUOTED: Final = 300
"""Characters of a wrong answer that are told."""


class _Message(Struct):
    """A model that thinks first may have come no further within MAX_TOKENS: then its thoughts are its reply."""

    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    message: _Message


class _Usage(Struct):
    completion_tokens: int = 0


class _Timings(Struct):
    """llama.cpp's own times in milliseconds; other engines tell none."""

    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class _Completion(Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)
    timings: _Timings | None = None


async def smoke(task: Smoke, key: str | None, *, timeout_s: float) -> SmokeAnswered | StepFailed:
    """The reply of `task.replica`, or why it was none (codes.SMOKE_FAILED)."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body: dict[str, Any] = {
        "model": task.model,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    url = f"{task.endpoint.rstrip('/')}/v1/chat/completions"
    began = time.monotonic()
    try:
        # Straight to the engine: a proxy of this machine's environment is not meant for it.
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=None, trust_env=False) as client,  # noqa: S113 - the line above
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            raw = bytearray()
            async for chunk in answer.aiter_bytes():
                raw += chunk
                if len(raw) > ANSWER_BYTES:
                    return _failed(task, f"the replica's answer was over {ANSWER_BYTES} bytes")
    except TimeoutError:
        return _failed(task, f"the replica did not answer within {timeout_s:g} s")
    except httpx.HTTPError as error:
        why = f"the replica could not be asked: {str(error) or type(error).__name__}"
        return _failed(task, why, unanswered=True)
    wall_s = time.monotonic() - began
    if answer.status_code != 200:
        return _failed(task, f"the replica answered {answer.status_code}: {_quoted(bytes(raw))}")
    try:
        completion = msgspec.json.decode(bytes(raw), type=_Completion)
        message = completion.choices[0].message
        reply = ((message.content or "").strip() or message.reasoning_content or "").strip()
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError):
        return _failed(task, f"the replica's answer was not a completion: {_quoted(bytes(raw))}")
    timings = completion.timings
    generation_s = timings.predicted_ms / 1000 if timings is not None else wall_s
    return SmokeAnswered(
        job=task.job,
        attempt=task.attempt,
        replica=task.replica,
        reply=reply,
        completion_tokens=completion.usage.completion_tokens,
        generation_s=generation_s,
        prompt_s=timings.prompt_ms / 1000 if timings is not None else 0.0,
    )


def _failed(task: Smoke, sentence: str, *, unanswered: bool = False) -> StepFailed:
    return StepFailed(
        job=task.job,
        attempt=task.attempt,
        index=task.index,
        code=codes.SMOKE_FAILED,
        sentence=sentence,
        unanswered=unanswered,
    )


def _quoted(raw: bytes) -> str:
    text = " ".join(raw.decode(errors="replace").split())
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}…"
