"""Holds the OpenAPI document that this program answers with, made once it is first asked for."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import msgspec

from gateway.domain.openapi import document


@cache
def page() -> bytes:
    """The document, as JSON."""
    return msgspec.json.encode(document(program_version()))


def program_version() -> str:
    """The installed distribution's version; `0` when it runs from a plain checkout."""
    try:
        return version("modelyard")
    except PackageNotFoundError:
        return "0"
