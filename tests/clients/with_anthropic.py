"""What a user of the `anthropic` package does: messages, their streams and counts, and every error it knows."""

from typing import Any, Final, TypeAlias

import anthropic
from anthropic import Anthropic

from tests.clients.calls import FRAIL, LLAMACPP, SCRIPTED
from tests.clients.steps import Clients, Step, Taken, take_all
from tests.clients.yard import ClientYard

NAME: Final = f"anthropic {anthropic.__version__}"
HELLO: Final[Any] = [{"role": "user", "content": "Say hello."}]


Api: TypeAlias = Clients[Anthropic]


# The steps: their bodies stand in the transcript as they stand here.


def message(api: Api, model: str) -> object:
    return api.all.messages.create(model=model, messages=HELLO, max_tokens=8)


def message_stream(api: Api, model: str) -> object:
    with api.all.messages.stream(model=model, messages=HELLO, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        return text, stream.get_final_message().stop_reason


def count(api: Api, model: str) -> object:
    return api.all.messages.count_tokens(model=model, messages=HELLO)


def models(api: Api) -> object:
    return [model.id for model in api.all.models.list()]


def wrong_key(api: Api, model: str) -> object:
    return api.wrong.messages.create(model=model, messages=HELLO, max_tokens=8)


def narrow_key(api: Api, model: str) -> object:
    return api.narrow.messages.create(model=model, messages=HELLO, max_tokens=8)


def passive_key(api: Api, model: str) -> object:
    return api.passive.messages.create(model=model, messages=HELLO, max_tokens=8)


def spent_key(api: Api, model: str) -> object:
    return api.spent.messages.create(model=model, messages=HELLO, max_tokens=8)


def too_large(api: Api, model: str) -> object:
    long: Any = [{"role": "user", "content": "x" * 70_000}]
    return api.all.messages.create(model=model, messages=long, max_tokens=8)


def engine_hangs_up(api: Api, model: str) -> object:
    script = {"script": {"cut_after_tokens": 1}}
    return api.all.messages.create(model=model, messages=HELLO, max_tokens=8, extra_body=script)


def engine_says_500(api: Api, model: str) -> object:
    script = {"script": {"status": 500}}
    return api.all.messages.create(model=model, messages=HELLO, max_tokens=8, extra_body=script)


def stream_breaks(api: Api, model: str) -> object:
    script = {"script": {"cut_after_tokens": 2}}
    stream = api.all.messages.create(
        model=model, messages=HELLO, max_tokens=8, stream=True, extra_body=script
    )
    return list(stream)


def refused(title: str, take: Any, model: str, raises: str, status: int | None, code: str) -> Step:
    return Step(title=title, take=take, model=model, raises=raises, status=status, code=code)


def _generating(model: str, ends: str) -> tuple[Step, ...]:
    return (
        Step(title="a message", take=message, model=model, gives="Message(id="),
        Step(title="a message, as a stream", take=message_stream, model=model, gives=f"'{ends}'"),
        Step(title="how long a message is", take=count, model=model, gives="input_tokens="),
    )


STEPS: Final = (
    *_generating(LLAMACPP, "max_tokens"),
    *_generating(SCRIPTED, "end_turn"),
    Step(title="the models", take=models, gives="'smollm2'"),
    refused("a wrong key", wrong_key, SCRIPTED, "AuthenticationError", 401, "invalid_api_key"),
    refused(
        "a key for another model",
        narrow_key,
        SCRIPTED,
        "PermissionDeniedError",
        403,
        "key_not_allowed",
    ),
    refused(
        "a key that may start nothing",
        passive_key,
        "asleep",
        "PermissionDeniedError",
        403,
        "key_may_not_activate",
    ),
    refused(
        "a limit that is used up", spent_key, SCRIPTED, "RateLimitError", 429, "rate_limit_exceeded"
    ),
    refused("no such model", message, "nobody", "NotFoundError", 404, "model_not_found"),
    refused(
        "a body over the cap", too_large, SCRIPTED, "ContentTooLargeError", 413, "request_too_large"
    ),
    refused("a model that is off", message, "off", "ServiceUnavailableError", 503, "model_off"),
    refused(
        "a model that loads for longer than one waits",
        message,
        "cold",
        "ServiceUnavailableError",
        503,
        "model_loading",
    ),
    refused(
        "an engine that hangs up",
        engine_hangs_up,
        FRAIL["anthropic"],
        "InternalServerError",
        502,
        "engine_error",
    ),
    refused(
        "an engine that says 500",
        engine_says_500,
        FRAIL["anthropic"],
        "InternalServerError",
        500,
        "engine_error",
    ),
    refused(
        "an engine that hangs up in a stream",
        stream_breaks,
        FRAIL["anthropic"],
        "APIStatusError",
        200,
        "engine_error",
    ),
)


def run(yard: ClientYard) -> list[Taken]:
    """Every step, in order; it blocks."""

    def made(key: str) -> Anthropic:
        return Anthropic(base_url=yard.base, api_key=key, max_retries=0, timeout=30.0)

    with Clients(yard.keys, made) as api:
        return take_all(STEPS, api, anthropic)
