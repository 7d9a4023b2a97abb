"""What a user of the `openai` package does: every resource of it that a gateway relays, and every error it knows."""

from typing import Any, Final, TypeAlias

import openai
from openai import OpenAI

from tests.clients.calls import FRAIL, LLAMACPP, PICTURE, SCRIPTED, SOUND
from tests.clients.steps import Clients, Step, Taken, take_all
from tests.clients.yard import ClientYard

NAME: Final = f"openai {openai.__version__}"
HELLO: Final[Any] = [{"role": "user", "content": "Say hello."}]


Api: TypeAlias = Clients[OpenAI]


# The steps: their bodies stand in the transcript as they stand here.


def chat(api: Api, model: str) -> object:
    return api.all.chat.completions.create(model=model, messages=HELLO, max_tokens=8)


def chat_stream(api: Api, model: str) -> object:
    stream = api.all.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    return [c.choices[0].delta.content if c.choices else c.usage for c in stream]


def completion(api: Api, model: str) -> object:
    return api.all.completions.create(model=model, prompt="Once upon a time", max_tokens=8)


def completion_stream(api: Api, model: str) -> object:
    stream = api.all.completions.create(
        model=model, prompt="Once upon a time", max_tokens=8, stream=True
    )
    return [c.choices[0].text for c in stream if c.choices]


def embeddings(api: Api, model: str) -> object:
    answer = api.all.embeddings.create(
        model=model, input=["hello", "world"], encoding_format="float"
    )
    return f"{len(answer.data)} embeddings of {answer.model}"


def response(api: Api, model: str) -> object:
    return api.all.responses.create(model=model, input="Say hello.", max_output_tokens=8)


def response_stream(api: Api, model: str) -> object:
    stream = api.all.responses.create(model=model, input="Say hello.", stream=True)
    return [event.type for event in stream]


def response_input_tokens(api: Api, model: str) -> object:
    return api.all.responses.input_tokens.count(model=model, input="Say hello.")


def response_by_id(api: Api, model: str) -> object:
    made = api.all.responses.create(model=model, input="Say hello.")
    kept = api.all.responses.retrieve(made.id)
    items = api.all.responses.input_items.list(made.id)
    cancelled = api.all.responses.cancel(made.id)
    api.all.responses.delete(made.id)
    return kept.id == made.id, items.data, cancelled.status


def response_deleted(api: Api, model: str) -> object:
    made = api.all.responses.create(model=model, input="Say hello.")
    api.all.responses.delete(made.id)
    return api.all.responses.retrieve(made.id)


def transcription(api: Api, model: str) -> object:
    sound = ("größe.wav", SOUND.content, "audio/wav")
    return api.all.audio.transcriptions.create(model=model, file=sound)


def transcription_stream(api: Api, model: str) -> object:
    sound = ("größe.wav", SOUND.content, "audio/wav")
    stream = api.all.audio.transcriptions.create(model=model, file=sound, stream=True)
    return [event.type for event in stream]


def translation(api: Api, model: str) -> object:
    return api.all.audio.translations.create(model=model, file=("a.wav", SOUND.content))


def speech(api: Api, model: str) -> object:
    answer = api.all.audio.speech.create(model=model, input="hello", voice="alloy")
    return f"{len(answer.read())} bytes"


def picture(api: Api, model: str) -> object:
    return api.all.images.generate(model=model, prompt="a cat")


def picture_edit(api: Api, model: str) -> object:
    image = ("picture.png", PICTURE.content, "image/png")
    return api.all.images.edit(model=model, image=image, prompt="a hat")


def models(api: Api) -> object:
    return [model.id for model in api.all.models.list()]


def model_by_name(api: Api) -> object:
    return api.all.models.retrieve("scripted")


def unknown_key(api: Api, model: str) -> object:
    return api.wrong.chat.completions.create(model=model, messages=HELLO)


def revoked_key(api: Api, model: str) -> object:
    return api.revoked.chat.completions.create(model=model, messages=HELLO)


def narrow_key(api: Api, model: str) -> object:
    return api.narrow.chat.completions.create(model=model, messages=HELLO)


def passive_key(api: Api, model: str) -> object:
    return api.passive.chat.completions.create(model=model, messages=HELLO)


def spent_key(api: Api, model: str) -> object:
    return api.spent.chat.completions.create(model=model, messages=HELLO)


def moderation(api: Api, model: str) -> object:
    return api.all.moderations.create(model=model, input="hello")


def too_large(api: Api, model: str) -> object:
    return api.all.completions.create(model=model, prompt="x" * 70_000)


def engine_hangs_up(api: Api, model: str) -> object:
    script = {"script": {"cut_after_tokens": 1}}
    return api.all.chat.completions.create(model=model, messages=HELLO, extra_body=script)


def engine_says_500(api: Api, model: str) -> object:
    script = {"script": {"status": 500}}
    return api.all.chat.completions.create(model=model, messages=HELLO, extra_body=script)


def stream_breaks(api: Api, model: str) -> object:
    script = {"script": {"cut_after_tokens": 2}}
    stream = api.all.chat.completions.create(
        model=model, messages=HELLO, stream=True, extra_body=script
    )
    return list(stream)


def told_of_the_load(api: Api, model: str) -> object:
    stream = api.all.chat.completions.create(
        model=model, messages=HELLO, stream=True, extra_query={"loading": "stream"}
    )
    return list(stream)


def _generating(model: str) -> tuple[Step, ...]:
    return (
        Step(title="chat", take=chat, model=model, gives="ChatCompletion(id="),
        Step(title="chat, as a stream", take=chat_stream, model=model, gives="CompletionUsage("),
        Step(title="a completion", take=completion, model=model, gives="Completion(id="),
        Step(title="a completion, as a stream", take=completion_stream, model=model, gives="['"),
        Step(title="embeddings", take=embeddings, model=model, gives=f"2 embeddings of {model}"),
        Step(title="a response", take=response, model=model, gives="ResponseOutputText("),
        Step(
            title="a response, as a stream",
            take=response_stream,
            model=model,
            gives="'response.completed'",
        ),
        Step(
            title="how long an input is",
            take=response_input_tokens,
            model=model,
            gives="input_tokens=",
        ),
    )


def refused(title: str, take: Any, model: str, raises: str, status: int | None, code: str) -> Step:
    return Step(title=title, take=take, model=model, raises=raises, status=status, code=code)


STEPS: Final = (
    *_generating(LLAMACPP),
    *_generating(SCRIPTED),
    Step(
        title="a response by its id",
        take=response_by_id,
        model=SCRIPTED,
        gives="(True, [], 'cancelled')",
    ),
    Step(title="a transcription", take=transcription, model=SCRIPTED, gives="größe.wav 2048"),
    Step(
        title="a transcription, as a stream",
        take=transcription_stream,
        model=SCRIPTED,
        gives="'transcript.text.done'",
    ),
    Step(title="a translation", take=translation, model=SCRIPTED, gives="a.wav 2048"),
    Step(title="speech", take=speech, model=SCRIPTED, gives=" bytes"),
    Step(title="a picture", take=picture, model=SCRIPTED, gives="b64_json="),
    Step(title="a picture changed", take=picture_edit, model=SCRIPTED, gives="b64_json="),
    Step(title="the models", take=models, gives="'smollm2'"),
    Step(title="a model", take=model_by_name, gives="Model(id='scripted'"),
    refused("a wrong key", unknown_key, SCRIPTED, "AuthenticationError", 401, "invalid_api_key"),
    refused("a revoked key", revoked_key, SCRIPTED, "AuthenticationError", 401, "invalid_api_key"),
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
    refused("no such model", chat, "nobody", "NotFoundError", 404, "model_not_found"),
    refused("a response that was deleted", response_deleted, SCRIPTED, "NotFoundError", 404, "404"),
    refused("no model is named", chat, "", "BadRequestError", 400, "invalid_request"),
    refused(
        "a place that is none here",
        moderation,
        SCRIPTED,
        "PermissionDeniedError",
        403,
        "route_not_forwarded",
    ),
    refused("a body over the cap", too_large, SCRIPTED, "APIStatusError", 413, "request_too_large"),
    refused(
        "what the engine has not",
        speech,
        LLAMACPP,
        "InternalServerError",
        501,
        "endpoint_not_supported",
    ),
    refused("a model that is off", chat, "off", "InternalServerError", 503, "model_off"),
    refused(
        "a model larger than every card", chat, "vast", "InternalServerError", 503, "no_capacity"
    ),
    refused(
        "a model that loads for longer than one waits",
        chat,
        "cold",
        "InternalServerError",
        503,
        "model_loading",
    ),
    refused(
        "an engine that hangs up",
        engine_hangs_up,
        FRAIL["openai"],
        "InternalServerError",
        502,
        "engine_error",
    ),
    refused(
        "an engine that says 500",
        engine_says_500,
        FRAIL["openai"],
        "InternalServerError",
        500,
        "500",
    ),
    refused(
        "an engine that hangs up in a stream",
        stream_breaks,
        FRAIL["openai"],
        "APIError",
        None,
        "engine_error",
    ),
    refused(
        "told of the load, and refused in the end",
        told_of_the_load,
        "cold",
        "APIError",
        None,
        "model_loading",
    ),
)


def run(yard: ClientYard) -> list[Taken]:
    """Every step, in order; it blocks."""

    def made(key: str) -> OpenAI:
        return OpenAI(base_url=f"{yard.base}/v1", api_key=key, max_retries=0, timeout=30.0)

    with Clients(yard.keys, made) as api:
        return take_all(STEPS, api, openai)
