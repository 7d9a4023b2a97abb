"""Proves that an engine answers: one request for one token, as a client would send it, with the engine's own key.

Health proves nothing for an engine that was parked: a sleeping vLLM says it is well. It asks once per path it
tries, judges status alone, and must never be sent to an engine that is not to be used.
"""

import json
from typing import Final

from nodeagent.drivers import asking

_QUESTIONS: Final[dict[str, dict[str, object]]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "1"}],
        "max_tokens": 1,
        "temperature": 0,
    },
    "/v1/embeddings": {"input": "1"},
}
"""In this order: a plain completion needs no chat template, and what embeds refuses both others."""


async def ask_one_token(
    endpoint: str, key: str, model: str, paths: tuple[str, ...], timeout_s: float
) -> str:
    """Why the engine does not serve `model`, in a sentence; empty when it answered.

    A path it refuses (4xx) may be one this kind of model has not, so the next one is tried; no answer and a
    failure (5xx) are final. `timeout_s` bounds each question.
    """
    told = "it has no path that a token can be asked of"
    for path, question in _QUESTIONS.items():
        if path not in paths:
            continue
        content = json.dumps({"model": model, **question}).encode()
        answer = await asking.post(endpoint, path, key, content=content, timeout_s=timeout_s)
        if answer is None:
            return f"no answer to a request for one token within {timeout_s:g} s"
        if answer.status == 200:
            return ""
        told = f"a request for one token was answered {answer.status}"
        if answer.status >= 500:
            return told
    return told
