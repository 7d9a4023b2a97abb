"""Says in words and examples what each endpoint is asked for, for the gateway's OpenAPI document.

For readers alone: nothing is checked against it. What engines take is theirs to say, and most of it is not here.
"""

from typing import Any, Final, Literal

from msgspec import Struct

from gateway.domain.places import RESPONSE, RESPONSE_CANCEL, RESPONSE_INPUTS

Json = dict[str, Any]

Answered = Literal["json", "stream", "text", "sound"]
"""What an answer may be: JSON; that or events, as asked; JSON, text or events; sound or whatever its engine makes."""


class Shape(Struct, frozen=True, kw_only=True):
    """One endpoint: its title, a body that asks for it, and what is answered. `tag` is the group it is shown in."""

    title: str
    example: Json | None = None
    answered: Answered = "json"
    tag: str = "Inference"


_HELLO: Final = [{"role": "user", "content": "Hello"}]
_RERANK: Final = {"model": "my-model", "query": "cats", "documents": ["A cat.", "A dog."]}
_SCORE: Final = {"model": "my-model", "text_1": "a cat", "text_2": ["A cat.", "A dog."]}

SHAPES: Final[dict[str, Shape]] = {
    "/v1/chat/completions": Shape(
        title="A chat goes on",
        example={"model": "my-model", "messages": _HELLO, "max_tokens": 16},
        answered="stream",
    ),
    "/v1/completions": Shape(
        title="A text goes on",
        example={"model": "my-model", "prompt": "Once", "max_tokens": 16},
        answered="stream",
    ),
    "/v1/embeddings": Shape(
        title="Texts as vectors", example={"model": "my-model", "input": ["a", "b"]}
    ),
    "/v1/responses": Shape(
        title="A response",
        example={"model": "my-model", "input": "Hello"},
        answered="stream",
        tag="Responses",
    ),
    "/v1/responses/input_tokens": Shape(
        title="How many tokens a response's input is",
        example={"model": "my-model", "input": "Hello"},
        tag="Responses",
    ),
    RESPONSE: Shape(title="A response by its id", answered="stream", tag="Responses"),
    RESPONSE_CANCEL: Shape(title="A response is ended", tag="Responses"),
    RESPONSE_INPUTS: Shape(title="What a response was asked with", tag="Responses"),
    "/v1/messages": Shape(
        title="A chat goes on, as Anthropic's clients ask",
        example={"model": "my-model", "messages": _HELLO, "max_tokens": 16},
        answered="stream",
    ),
    "/v1/messages/count_tokens": Shape(
        title="How many tokens messages are", example={"model": "my-model", "messages": _HELLO}
    ),
    "/v1/rerank": Shape(title="Documents by how well they fit a query", example=_RERANK),
    "/rerank": Shape(title="The same as `/v1/rerank`", example=_RERANK),
    "/v2/rerank": Shape(title="The same as `/v1/rerank`", example=_RERANK),
    "/v1/score": Shape(title="How well pairs of texts fit", example=_SCORE),
    "/score": Shape(title="The same as `/v1/score`", example=_SCORE),
    "/v1/audio/transcriptions": Shape(
        title="Speech as text", example={"model": "my-model", "file": "…"}, answered="text"
    ),
    "/v1/audio/translations": Shape(
        title="Speech as English text", example={"model": "my-model", "file": "…"}, answered="text"
    ),
    "/v1/audio/speech": Shape(
        title="Text as speech",
        example={"model": "my-model", "input": "Hello", "voice": "alloy"},
        answered="sound",
    ),
    "/v1/images/generations": Shape(
        title="A picture of a text",
        example={"model": "my-model", "prompt": "a cat"},
        answered="stream",
    ),
    "/v1/images/edits": Shape(
        title="A picture is changed",
        example={"model": "my-model", "prompt": "a hat", "image": "…"},
        answered="stream",
    ),
    "/tokenize": Shape(
        title="A text as tokens", example={"model": "my-model", "content": "Hi", "prompt": "Hi"}
    ),
    "/detokenize": Shape(title="Tokens as text", example={"model": "my-model", "tokens": [1, 2]}),
    "/completion": Shape(
        title="A text goes on, as llama.cpp has it",
        example={"prompt": "Once", "n_predict": 16},
        answered="stream",
    ),
    "/embedding": Shape(title="Texts as vectors, as llama.cpp has it", example={"content": "a"}),
    "/infill": Shape(
        title="What stands between two pieces of a text",
        example={"input_prefix": "def f(", "input_suffix": "return 1"},
        answered="stream",
    ),
    "/apply-template": Shape(title="Messages as one prompt", example={"messages": _HELLO}),
    "/v1/chat/completions/input_tokens": Shape(
        title="How many tokens a chat is", example={"messages": _HELLO}
    ),
    "/pooling": Shape(title="What a pooling model makes of texts", example={"input": "a"}),
    "/classify": Shape(title="The class of a text", example={"input": "a"}),
}
