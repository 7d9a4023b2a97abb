"""Adapters in system tests: a zipf trace, the cache that knows everything, a catalog of adapters, and their clients.

`Diary` reads what the fake engines wrote down, so it knows of requests and loads of engines that were killed.
It starts no yard; engines are tests/engines/vllm.py, whose answers begin with who gave them.
"""

import asyncio
import json
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from events.ids import new_id
from events.log import Recorded
from schemas.commands import AdapterAdd, Command
from tests.support.fake_vllm import fake_env, vllm_program
from tests.support.lora import write_adapter
from tests.system.yard import SystemYard, client

BASE: Final = "tiny"
SEED: Final = 5

# The yard of the long trace: the one that counts its loads and the one that is killed at are the same.
ADAPTERS: Final = tuple(f"a{number:03}" for number in range(200))
REQUESTS: Final = 2000
REPLICAS: Final = 4
GATEWAYS: Final = 3
PACED: Final = {"tokens": 4, "pace_s": 0.003, "lora_load_s": 0.01}


def zipf_trace(requests: int, adapters: Sequence[str], seed: int = SEED) -> list[str]:
    """Which adapter each request asks for: the k-th most wanted one is asked for 1/k as often as the first."""
    draw = random.Random(seed)
    ranked = list(adapters)
    draw.shuffle(ranked)
    return draw.choices(ranked, [1 / (k + 1) for k in range(len(ranked))], k=requests)


def lru_misses(trace: Sequence[str], places: int) -> int:
    """How often one cache of so many places that sees every request must load."""
    cache: OrderedDict[str, None] = OrderedDict()
    misses = 0
    for name in trace:
        misses += name not in cache
        cache[name] = None
        cache.move_to_end(name)
        if len(cache) > places:
            cache.popitem(last=False)
    return misses


def settings_for(folder: Path, cards: int = 4, **more: Any) -> dict[str, Any]:
    """A yard whose node has `cards` declared gpus and the fake vLLM."""
    declared = [{"id": f"gpu{number}", "kind": "gpu", "memory": "2GiB"} for number in range(cards)]
    nodeagent = {
        "cards": declared,
        "gpus": False,
        "vllm": vllm_program(folder / "programs"),
    }
    return {"nodeagent": nodeagent, "gateway": {"wait": "30s"}, **more}


def base_entry(
    folder: Path,
    *args: str,
    replicas: int = 4,
    limit: int = 8,
    script: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A model on the fake vLLM that keeps `limit` adapters in each of `replicas` engines, always running."""
    weights = folder / "tiny-base"
    weights.mkdir(exist_ok=True)
    profile = {
        "name": "fake",
        "engine": "vllm",
        "memory": "1500MiB",
        "card": "gpu",
        "args": list(args),
        "env": fake_env(**{"lora_log": folder / "diary", **(script or {})}),
    }
    scaling = {"min": replicas, "max": replicas, "idle_timeout": "15m"}
    return {
        "name": BASE,
        "source": str(weights),
        "scaling": scaling,
        "profiles": [profile],
        "max_loaded_adapters": limit,
        **more,
    }


async def add_adapters(
    yard: SystemYard, folder: Path, names: Sequence[str], *, timeout_s: float = 180.0
) -> None:
    """Makes an adapter of each name that answers with it, adds all to the catalog, returns when all are ready."""
    for name in names:
        source = write_adapter(folder / name, name)
        body = AdapterAdd(name=name, base=BASE, source=str(source))
        await yard.log.send("admin", Command(id=new_id(), body=body))
    missing = set(names)

    def last_ready(event: Recorded) -> bool:
        if event.noun == "adapter" and event.key[0] in missing:
            assert event.type != "adapter.refused", event.state
            if event.type == "adapter.ready":
                missing.discard(event.key[0])
        return not missing

    await yard.when(last_ready, f"{len(names)} adapters to be ready", timeout_s=timeout_s)


async def replicas_ready(yard: SystemYard, count: int, *, timeout_s: float = 30.0) -> None:
    """Waits until so many replicas of the base are ready."""
    await yard.when(
        lambda _: len(running_replicas(yard)) == count,
        f"{count} replicas of {BASE}",
        timeout_s=timeout_s,
    )


def running_replicas(yard: SystemYard) -> dict[str, int]:
    """The ready replicas of the base as far as the log was read: id -> process of the engine."""
    last = {e.key[1]: e for e in yard.events if e.noun == "replica"}
    return {
        id: event.state.pid
        for id, event in last.items()
        if event.state is not None
        and event.state.model == BASE
        and event.state.phase == "ready"
        and event.state.pid is not None
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of the trace and what came of it. `said` is what the answer begins with: `[who]`."""

    adapter: str
    gateway: int
    status: int | None
    said: str = ""
    how: str = ""
    code: str = ""
    finished: bool = True
    took_s: float = 0.0
    model: str = ""

    @property
    def good(self) -> bool:
        return self.status == 200 and self.finished

    @property
    def wrong(self) -> bool:
        """Answered by something else than what was asked for, under its name."""
        return bool(self.said) and self.said != self.adapter


@dataclass
class Traffic:
    """Asks a trace of all gateways in turn, `clients` requests at a time, in the order of the trace.

    With `tries` a request that failed is asked again, of the next gateway, as a client does that knows several.
    """

    bases: Sequence[str]
    trace: Sequence[str]
    clients: int = 12
    tries: int = 1
    answers: list[Asked] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    _next: int = 0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Returns when every request of the trace was answered, or failed."""
        async with asyncio.TaskGroup() as group:
            https = [client(base) for base in self.bases]
            try:
                workers = [group.create_task(self._work(https)) for _ in range(self.clients)]
                await asyncio.wait(workers)
            finally:
                for http in https:
                    await http.aclose()

    async def answered(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until `count` requests are over."""
        async with asyncio.timeout(timeout_s):
            while len(self.answers) < count:
                self._arrived.clear()
                await self._arrived.wait()

    async def _work(self, https: Sequence[httpx.AsyncClient]) -> None:
        while self._next < len(self.trace):
            number = self._next
            self._next += 1
            for turn in range(self.tries):
                gateway = (number + turn) % len(https)
                answer = await ask(
                    https[gateway], self.trace[number], gateway, stream=number % 2 == 1
                )
                self.answers.append(answer)
                self._arrived.set()
                if answer.good:
                    break
            else:
                self.unanswered.append(self.trace[number])

    def how(self) -> Counter[str]:
        """The good answers by what the gateway says about its adapter: hit, joined, loaded, unpinned."""
        return Counter(answer.how for answer in self.answers if answer.good)

    def bad(self) -> list[Asked]:
        return [answer for answer in self.answers if not answer.good]

    def wrong(self) -> list[Asked]:
        return [answer for answer in self.answers if answer.wrong]


async def ask(
    http: httpx.AsyncClient, adapter: str, gateway: int = 0, *, stream: bool = False, **more: Any
) -> Asked:
    """One short chat with an adapter; nothing a server does is raised."""
    body = {
        "model": adapter,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": stream,
        "max_tokens": 4,
        **more,
    }
    begun = time.monotonic()

    def told(status: int | None, **fields: Any) -> Asked:
        took = time.monotonic() - begun
        return Asked(adapter=adapter, gateway=gateway, status=status, took_s=took, **fields)

    try:
        answer = await http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as problem:
        return told(None, code=problem.__class__.__name__, finished=False)
    how = answer.headers.get("x-yard-adapter", "")
    if answer.status_code != 200:
        error = answer.json().get("error", {})
        code = f"{error.get('code')}: {error.get('message')}"
        return told(answer.status_code, code=code, how=how)
    if not stream:
        whole = answer.json()
        text = whole["choices"][0]["message"]["content"]
        return told(200, said=marker_of(text), how=how, model=whole["model"])
    frames = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    whole_frames = [json.loads(frame) for frame in frames if frame.startswith("{")]
    texts = [
        frame["choices"][0]["delta"].get("content", "")
        for frame in whole_frames
        if frame.get("choices")
    ]
    return told(
        200,
        said=marker_of("".join(texts)),
        how=how,
        model=next((frame["model"] for frame in whole_frames if "model" in frame), ""),
        finished="[DONE]" in frames and not any("error" in frame for frame in whole_frames),
    )


def marker_of(text: str) -> str:
    """Who gave the answer: what stands in brackets before its first word."""
    return text[1:].partition("]")[0] if text.startswith("[") else ""


class Diary:
    """What the fake engines of a test wrote down, line by line as it happened, whoever was killed since."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self, do: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        for line in text.splitlines():
            told = json.loads(line)
            if told["do"] == do or not do:
                found.append(told)
        return found

    def loads(self) -> list[dict[str, Any]]:
        """Loads an engine said yes to."""
        return [line for line in self.lines("load") if line["status"] == 200]

    def refused_loads(self) -> list[dict[str, Any]]:
        return [line for line in self.lines("load") if line["status"] != 200]

    def evicted_in_use(self) -> list[dict[str, Any]]:
        """Unloads of a name that had requests running or waiting in the engine."""
        return [line for line in self.lines("unload") if line.get("running")]

    def gone(self) -> list[dict[str, Any]]:
        """Requests for a name that the engine had once and has no more."""
        return self.lines("gone")

    def wrong(self) -> list[dict[str, Any]]:
        """Requests that were answered by other weights than their name stands for."""
        return [
            line for line in self.lines("begin") if line["name"].partition("@")[0] != line["marker"]
        ]

    def most_loaded(self) -> int:
        """The largest number of names any engine had at one time."""
        loaded: dict[str, set[str]] = {}
        most = 0
        for line in self.lines():
            names = loaded.setdefault(line["replica"], set())
            if line["do"] == "load" and line["status"] == 200:
                names.add(line["name"])
            elif line["do"] == "unload" and line["status"] == 200:
                names.discard(line["name"])
            most = max(most, len(names))
        return most
