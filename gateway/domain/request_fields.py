"""Reads from a JSON request the few fields the gateway acts on; everything else is skipped, not copied.

It never judges what the engine will say about the rest: only what routing needs must be right here.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

MAX_MODEL_NAME: Final = 512


class RequestFields(Struct, frozen=True, kw_only=True):
    """What routing and accounting need. `model` is the name as the client wrote it."""

    model: str
    stream: bool = False
    include_usage: bool = False


class FieldsProblem(Struct, frozen=True, kw_only=True):
    """Why a body cannot be routed: 400 `invalid_request` with this sentence and parameter."""

    message: str
    param: str | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Fields(Struct):
    model: str | UnsetType | None = UNSET
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_TOO_DEEP: Final = FieldsProblem(message="The request body is nested too deeply to be read.")
_decoder: Final = msgspec.json.Decoder(_Fields)


def read_fields(body: bytes) -> RequestFields | FieldsProblem:
    """The fields of a request body, or the sentence for the client.

    1. not JSON, or no object. 2. `model` missing, null, empty, too long or no string: never a
    default, a request without a model must not reach a random one. 3. a wrong type of the others.
    """
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as problem:
        return _describe(body, problem)  # 2, 3
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        if not body.strip():
            return FieldsProblem(message="The request body is empty; expected a JSON object.")
        return _not_json(problem)  # 1
    except RecursionError:
        return _TOO_DEEP
    model = fields.model
    if model is UNSET or model is None or not model:
        return FieldsProblem(
            message="You must provide a model: the field `model` is missing or empty.",
            param="model",
        )
    if len(model) > MAX_MODEL_NAME:
        return FieldsProblem(
            message=f"The model name is longer than {MAX_MODEL_NAME} characters.", param="model"
        )
    options = fields.stream_options
    return RequestFields(
        model=model,
        stream=bool(fields.stream),
        include_usage=options is not None and bool(options.include_usage),
    )


def _not_json(problem: Exception) -> FieldsProblem:
    return FieldsProblem(message=f"The request body is not valid JSON: {problem}.")


def _describe(body: bytes, problem: msgspec.ValidationError) -> FieldsProblem:
    """A sentence from msgspec's `Expected `str`, got `int` - at `$.model``."""
    text = str(problem)
    _, _, path = text.rpartition(" - at `$.")
    param = path.rstrip("`") or None if path else None
    try:
        parsed: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as worse:
        return _not_json(worse)  # the wrong type stood before what is no JSON
    except RecursionError:
        return _TOO_DEEP
    if not isinstance(parsed, dict):
        return FieldsProblem(message="The request body must be a JSON object.")
    return FieldsProblem(message=f"The request body does not fit: {text}.", param=param)
