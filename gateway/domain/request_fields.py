"""Reads from a JSON request the few fields the gateway acts on; everything else is skipped, not copied.

It never judges what the engine will say about the rest: only what routing needs must be right here.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

MAX_MODEL_NAME: Final = 512
_DIGITS: Final = 10
"""A number with so many digits limits nothing."""


class RequestFields(Struct, frozen=True, kw_only=True):
    """What routing and accounting need. `model` is the name as the client wrote it.

    `max_tokens`: how many the answer may have, None where the request leaves that open.
    """

    model: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None


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
    # Whatever stands there is for the engine to judge; here it only counts if it is a number.
    max_tokens: msgspec.Raw | UnsetType = UNSET
    max_completion_tokens: msgspec.Raw | UnsetType = UNSET
    max_output_tokens: msgspec.Raw | UnsetType = UNSET


class _Plain(_Fields):
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET


_plain: Final = msgspec.json.Decoder(_Plain)

Plain = tuple[RequestFields, "msgspec.Raw | None"]


def read_plain(body: bytes) -> Plain | None:
    """The fields of a request body that names its model, and the JSON of its conversation, in one look; None: it is no
    good one, and `read_fields` says more."""
    try:
        fields = _plain.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    model = fields.model
    if not model or model is UNSET or len(model) > MAX_MODEL_NAME:
        return None
    for beginning in (fields.messages, fields.prompt, fields.input):
        if beginning is not UNSET:
            return _of(fields, model), beginning
    return _of(fields, model), None


_TOO_DEEP: Final = FieldsProblem(message="The request body is nested too deeply to be read.")
_decoder: Final = msgspec.json.Decoder(_Fields)


def read_fields(body: bytes, *, named: str | None = None) -> RequestFields | FieldsProblem:
    """The fields of a request body, or the sentence for the client. `named`: the model the path names.

    1. not JSON, or no object. 2. `model` missing, null, empty, too long or no string: never a
    default, a request without a model must not reach a random one. 3. a wrong type of the others. 4. where the path
    names the model the body may leave it out, and may not name another, nor none by `null`.
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
    if model is None and named is not None:  # 4
        return model_missing("the field `model` is no name")
    if model is UNSET or model is None or not model:
        if named is None:
            return model_missing("the field `model` is missing or empty")
        model = named
    elif named is not None and model != named:  # 4
        return FieldsProblem(
            message="The address and the body name two different models.", param="model"
        )
    if len(model) > MAX_MODEL_NAME:
        return FieldsProblem(
            message=f"The model name is longer than {MAX_MODEL_NAME} characters.", param="model"
        )
    return _of(fields, model)


def _of(fields: _Fields, model: str) -> RequestFields:
    options = fields.stream_options
    return RequestFields(
        model=model,
        stream=bool(fields.stream),
        include_usage=options is not None and bool(options.include_usage),
        max_tokens=_most_tokens(fields),
    )


def model_missing(why: str) -> FieldsProblem:
    """A request that names no model, whatever it is made of."""
    return FieldsProblem(message=f"You must provide a model: {why}.", param="model")


def _most_tokens(fields: _Fields) -> int | None:
    """The most tokens asked for, by whichever name; what is no plain number asks for none."""
    if fields.max_completion_tokens is UNSET and fields.max_output_tokens is UNSET:
        return _number(fields.max_tokens)
    given = (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens)
    return max((n for n in map(_number, given) if n is not None), default=None)


def _number(given: msgspec.Raw | UnsetType) -> int | None:
    """A plain number, not too long; None for anything else."""
    if given is UNSET:
        return None
    text = bytes(given)
    return int(text) if text.isdigit() and len(text) < _DIGITS else None


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
    if param == "model":
        return FieldsProblem(message="The field `model` must be a text.", param=param)
    return FieldsProblem(message=f"The request body does not fit: {text}.", param=param)
