"""Writes docs/transcript.md of what was asked and what came; it asks nothing and leaves nothing out."""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tests.clients import with_curl
from tests.clients.asking import Asked
from tests.clients.calls import ELSEWHERE, Call
from tests.clients.judging import told
from tests.clients.steps import Taken

INTRODUCTION: Final = """\
# What clients get

<!-- Written by `make transcript`; edits are lost. -->

The endpoints and refusals of one gateway, each asked for by four clients as their users do: {clients}. `smollm2` is a real llama.cpp with
SmolLM2-135M, `scripted` an engine that answers every endpoint and fails when told (`tests/engines/scripted.py`). The gateway asks for keys, waits one
second for a model and takes bodies of 64 KiB, so that its refusals are soon had. What differs from run to run is a `…` or a name in
`<>`; long answers are cut in their middle.

`make transcript` runs all of it anew and fails where an answer is another than the tables in `tests/clients/` say; those clients that need
no browser run so with every `make test`. Not here, because a client cannot bring them about in a yard that is well:
{elsewhere}.
"""


def written(
    curl: list[Asked],
    page: list[Asked],
    packages: list[tuple[str, list[Taken]]],
    browser: str,
    closed: str,
) -> str:
    """The document. `closed`: what a page of an origin that is not allowed was told."""
    names = ", ".join(["curl", *(name for name, _ in packages), f"`fetch` in {browser}"])
    elsewhere = "; ".join(f"`{code}`, {why}" for code, why in ELSEWHERE.items())
    return "\n".join(
        (
            INTRODUCTION.format(clients=names, elsewhere=elsewhere),
            "## curl\n",
            "`$YARD` is `http://127.0.0.1:8080`, `$ALL_KEY` a key that may all; the names of other keys say what they are.\n",
            *_of_curl(curl),
            *itertools.chain.from_iterable(_of_package(name, taken) for name, taken in packages),
            *_of_page(page, browser, closed),
        )
    )


def _of_curl(asked: list[Asked]) -> Iterator[str]:
    for section, calls in itertools.groupby(asked, lambda a: a.section):
        yield f"### {section}\n"
        for a in calls:
            yield f"{_sentence(a.call)}\n\n```\n$ {with_curl.typed(a.call)}\n{told(a.reply)}\n```\n"


def _sentence(call: Call) -> str:
    more = ""
    if call.busy:
        more = ", while one request runs" + (f" and {call.busy - 1} wait" if call.busy > 1 else "")
    return f"{call.title[0].upper()}{call.title[1:]}{more}:"


def _of_package(name: str, taken: list[Taken]) -> Iterator[str]:
    yield f"## {name}\n"
    yield "`api.all` is a client with the key that may all, and so on; `HELLO` is one message of a user.\n"
    for t in taken:
        title = t.step.title
        came = "\n".join(f"# {line}" for line in t.came.splitlines())
        yield f"{title[0].upper()}{title[1:]}:\n\n```python\n{t.step.source}\n{came}\n```\n"


def _of_page(asked: list[Asked], browser: str, closed: str) -> Iterator[str]:
    yield f"## fetch, in {browser}\n"
    yield (
        "From a page of another origin than the gateway's, which `gateway.cors_origins` allows; the same requests as by curl. The browser asks for leave "
        "(`OPTIONS`) without a key before each that has a header of its own. What the page sees of each:\n"
    )
    yield "| asked | status | code | headers that are shown to it |"
    yield "|---|---|---|---|"
    for a in asked:
        seen = ", ".join(_families(a.reply.headers))
        yield f"| `{a.call.method} {a.call.path}`, {a.call.title} | {a.reply.status} | {_code(a)} | {seen} |"
    yield f"\nA page of an origin that is not allowed asks for `/v1/models`, and its `fetch` fails: `{closed}`.\n"


def _families(names: Iterable[str]) -> list[str]:
    """The gateway's own headers, those of limits as one."""
    own = [n for n in sorted(names) if n.startswith(("x-", "retry-", "request-"))]
    return [n for n in own if not n.startswith("x-ratelimit")] + [
        "x-ratelimit-*" for _ in own[:1] if any(n.startswith("x-ratelimit") for n in own)
    ]


def _code(asked: Asked) -> str:
    try:
        error: Any = json.loads(asked.reply.text)["error"]
        return f"`{error['code']}`"
    except (ValueError, KeyError, TypeError):
        return ""
