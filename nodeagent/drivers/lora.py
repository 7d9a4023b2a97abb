"""Asks vLLM to load, unload and list LoRA adapters, and which of them it works for now.

Each call has the time it is given and no other's. What an answer means `lora_answers.py` says; which adapter is
loaded where and when is the agent's affair. It must not raise for anything an engine answers, nor try again.
"""

import asyncio
import os
from typing import Final

import msgspec
from msgspec import Struct

from nodeagent.drivers import asking, lora_answers, metrics
from nodeagent.drivers.asking import Ask
from nodeagent.drivers.driver import AdapterDone, AdapterFault, ListedAdapter
from nodeagent.drivers.lora_answers import LOAD_ROUTE, UNLOAD_ROUTE, Call
from schemas import codes

LIST_S: Final = 5.0
LIST_LIMIT_BYTES: Final = 4 * 1024 * 1024
METRICS_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""An engine tells of every set of adapters that ever ran together: its page gets long where many are in use."""

ANSWER_LIMIT_BYTES: Final = 4 * 1024
"""Of an answer to load or unload so much is read; the rest of a longer one is an engine's stack trace."""

NOBODY: Final = "is there a route? (no adapter is called this)"
"""The name the routes are probed with. No engine-side name of the yard's has its form."""


async def load(
    ask: Ask, endpoint: str, key: str, *, name: str, path: str, timeout_s: float
) -> AdapterDone | AdapterFault:
    """See `AdapterDriver.load_adapter`. It never loads in place: a name means one version as long as it is there."""
    body = {"lora_name": name, "lora_path": path}
    return await _told(ask, endpoint, key, "load", body, timeout_s)


async def unload(
    ask: Ask, endpoint: str, key: str, *, name: str, timeout_s: float
) -> AdapterDone | AdapterFault:
    """See `AdapterDriver.unload_adapter`."""
    return await _told(ask, endpoint, key, "unload", {"lora_name": name}, timeout_s)


async def listed(ask: Ask, endpoint: str, key: str) -> tuple[ListedAdapter, ...] | AdapterFault:
    """Every adapter of GET /v1/models: what has a parent. Base models have none."""
    answer = await ask(
        endpoint, "GET", "/v1/models", key, timeout_s=LIST_S, limit_bytes=LIST_LIMIT_BYTES
    )
    if isinstance(answer, asking.NoAnswer):
        return _unanswered(answer, "list", LIST_S)
    if answer.status != 200:
        text = lora_answers.told(lora_answers.read(answer.status, answer.body))
        return _fault(f"its list of models was answered {answer.status}: {text}")
    try:
        models = msgspec.json.decode(answer.body, type=_Models)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _fault("its list of models makes no sense")
    return tuple(
        ListedAdapter(name=card.id, root=card.root or "") for card in models.data if card.parent
    )


async def running(ask: Ask, endpoint: str, key: str) -> frozenset[str] | None:
    """Names with requests running or waiting, by its metrics; None where they do not tell."""
    answer = await ask(
        endpoint, "GET", "/metrics", key, timeout_s=LIST_S, limit_bytes=METRICS_LIMIT_BYTES
    )
    if isinstance(answer, asking.NoAnswer) or answer.status != 200:
        return None
    # A long page takes a good part of a second, which nobody else should wait for.
    return await asyncio.to_thread(_in_use, answer.body)


def _in_use(page: bytes) -> frozenset[str] | None:
    return metrics.adapters_in_use(page.decode(errors="replace"))


async def has_routes(ask: Ask, endpoint: str, key: str) -> bool | None:
    """Whether its adapter routes are there: an engine that has them knows no adapter called `NOBODY`."""
    done = await _told(ask, endpoint, key, "unload", {"lora_name": NOBODY}, asking.ASK_S)
    if isinstance(done, AdapterDone):
        return True
    return False if done.code == codes.ROUTE_OFF else None


class _Card(Struct, frozen=True, kw_only=True):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(Struct, frozen=True, kw_only=True):
    data: tuple[_Card, ...]


async def _told(
    ask: Ask, endpoint: str, key: str, call: Call, body: dict[str, str], timeout_s: float
) -> AdapterDone | AdapterFault:
    answer = await ask(
        endpoint,
        "POST",
        LOAD_ROUTE if call == "load" else UNLOAD_ROUTE,
        key,
        content=msgspec.json.encode(body),
        timeout_s=timeout_s,
        limit_bytes=ANSWER_LIMIT_BYTES,
        cut=True,
    )
    if isinstance(answer, asking.NoAnswer):
        return _unanswered(answer, call, timeout_s)
    paths: tuple[str, ...] = ()
    path = body.get("lora_path")
    if path and answer.status != 200:
        # Some front ends resolve links before they use it.
        paths = (path, await asyncio.to_thread(os.path.realpath, path))
    return lora_answers.judged(
        answer.status, answer.body, call=call, name=body["lora_name"], paths=paths
    )


def _unanswered(answer: asking.NoAnswer, what: str, timeout_s: float) -> AdapterFault:
    match answer.why:
        case "unreachable":
            return _fault("nobody answers at its port")
        case "late":
            code = codes.LOAD_TIMEOUT if what == "load" else codes.LOAD_FAILED
            return _fault(f"no answer to the {what} within {timeout_s:g} s", code)
        case "too_long":
            return _fault(f"its answer to the {what} is longer than {LIST_LIMIT_BYTES} bytes")
        case "broken":
            # An engine that dies of an adapter looks like this. It is the replica's fault until a second one does.
            text = f"its connection ended without a whole answer to the {what}"
            return _fault(text, known=what != "load")


def _fault(text: str, code: str = codes.LOAD_FAILED, *, known: bool = True) -> AdapterFault:
    return AdapterFault(whose="replica", code=code, text=text, known=known)
