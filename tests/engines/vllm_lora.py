"""The LoRA adapters of the fake vLLM: what its routes answer, word for word in three dialects, and what they do.

    python   vLLM 0.32's own front end, as measured: nested envelope, a refused adapter is a 500
    old      an older one: flat envelope, a refused adapter is a 400, an adapter may shadow its base
    rust     the Rust front end: local paths want an allow-list, unload frees the copy

Standard library only, and nothing of HTTP: it is given the JSON of a request and returns an answer. Where
neither measurements nor sources say it (types in the Rust dialect, an engine without --enable-lora, what vLLM
0.32 puts around refusals other than a rank) the words are a guess, so no test may hang on them.
"""

import json
import os
import struct
import threading
import time
from collections import Counter, OrderedDict
from contextlib import nullcontext

# pyright: reportMissingImports=false
from vllm_folder import allow_path, marker_of, wrong_config
from vllm_words import Faults, Refused, envelope, unknown_model

HANGS = object()
"""Instead of an answer: there is none."""

OFF = (404, {"detail": "Not Found"})
"""What FastAPI says of a route that was never registered."""


class Weights:
    """An adapter as read from its folder: what answers under it (`marker`; None: only the base does)."""

    def __init__(self, marker: str | None) -> None:
        self.marker = marker


class Named:
    """A name in the registry: its number in the engine, its path, and what the list tells of it."""

    def __init__(self, name: str, id: int, path: str, root: str) -> None:
        self.name, self.id, self.path, self.root = name, id, path, root


class Adapters:
    """The adapters of one engine, behind `processes` front ends that each have a registry of their own.

    `change` is the engine's condition; everything here is read and written under it.
    """

    def __init__(self, change, script, args: dict, faults: Faults, names) -> None:
        self.change, self.script, self.faults, self.names = change, script, faults, names
        self.dialect = script.dialect
        self.on = "enable-lora" in args
        allowed = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower()
        self.routes = allowed in ("1", "true")
        self.max_loras = int(args.get("max-loras", 1))
        self.max_cpu_loras = int(args.get("max-cpu-loras", self.max_loras))
        self.max_rank = int(args.get("max-lora-rank", 16))
        self.only = args.get("lora-target-modules")
        self.registries: list[dict[str, Named]] = [{} for _ in range(script.processes)]
        self.cache: OrderedDict[int, Weights] = OrderedDict()
        self.last_id = 0
        self.locks: dict[str, threading.Lock] = {}
        self.running: Counter[int] = Counter()
        self.waiting: Counter[int] = Counter()
        self.of_id: dict[int, str] = {}
        self.info: dict[tuple[str, str], float] = {}
        self.loading = 0
        self.counters = dict.fromkeys(
            ("loads", "failed_loads", "unloads", "reloads", "asked_gone", "most_loading"), 0
        )
        self.evicted_in_use: list[str] = []
        self.answered: Counter[str] = Counter()
        self.log = (
            os.open(script.lora_log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
            if script.lora_log
            else None
        )

    # Requests

    def find(self, process: int, model: object) -> Named | None:
        """The adapter a request names, or None for the base model; raises `Refused`."""
        with self.change:
            named = self.registries[process].get(str(model))
            if named is not None or model in self.names:
                return named
            if model in self.of_id.values():
                self.counters["asked_gone"] += 1
                self.note("gone", str(model))
        raise unknown_model(self.dialect, str(model), self.names)

    def begin(self, named: Named) -> str:
        """Waits for a place on the card, brings its weights back where they fell out; what will answer."""
        with self.change:
            self.waiting[named.id] += 1
            self._inform()
            while named.id not in +self.running and len(+self.running) >= self.max_loras:
                self.change.wait()
            self.waiting[named.id] -= 1
            self.running[named.id] += 1
            self._inform()
            weights = self.cache.get(named.id)
            if weights is not None:
                self.cache.move_to_end(named.id)
            else:
                self.counters["reloads"] += 1
        if weights is None:
            time.sleep(self.script.lora_load_s)
            try:
                weights = self._keep(named.id, self._read(named.path, named.name))
            except Refused:
                self.end(named, "")
                raise
        with self.change:
            marker = weights.marker or "base"
            self.answered[marker] += 1
            self.note("begin", named.name, marker=marker)
        return marker

    def end(self, named: Named, marker: str) -> None:
        with self.change:
            self.running[named.id] -= 1
            self._inform()
            if marker:
                self.note("end", named.name, marker=marker)
            self.change.notify_all()

    # Routes

    def load(self, process: int, body: dict):
        """The answer to POST /v1/load_lora_adapter."""
        name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
        if not self.routes or "lora-route-off" in self.faults:
            return OFF
        if self.faults.hit("lora-hangs", name):
            self.note("load", name, status=0)
            return HANGS
        if told := self.faults.hit("lora-answer", name):
            self.note("load", name, status=told["status"])
            return told["status"], told.get("body", "")
        status = 200
        try:
            with self._lock(name):
                self._may_load(process, name, path, bool(body.get("load_inplace")))
                self._load(process, name, path)
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        except Refused as refused:
            status = refused.status
            return status, envelope(self.dialect, refused)
        finally:
            with self.change:
                self.counters["loads" if status == 200 else "failed_loads"] += 1
                self.note("load", name, status=status)

    def unload(self, process: int, body: dict):
        """The answer to POST /v1/unload_lora_adapter."""
        name = str(body.get("lora_name") or "")
        if not self.routes or "lora-route-off" in self.faults:
            return OFF
        if self.faults.hit("unload-hangs", name):
            return HANGS
        if told := self.faults.hit("unload-answer", name):
            return told["status"], told.get("body", "")
        time.sleep(self.script.unload_s)
        try:
            self._unload(process, name, body.get("lora_int_id"))
        except Refused as refused:
            self.note("unload", name, status=refused.status)
            return refused.status, envelope(self.dialect, refused)
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def cards(self, process: int) -> list[dict]:
        """Its part of GET /v1/models: the names this front end knows, whatever is in the engine."""
        with self.change:
            return [
                {
                    "id": named.name,
                    "object": "model",
                    "created": int(time.time()),
                    "owned_by": "vllm",
                    "root": named.root,
                    "parent": self.names[0],
                    "max_model_len": None,
                    "permission": [],
                }
                for named in self.registries[process].values()
            ]

    def metrics(self) -> str:
        """As a gauge of prometheus_client's: every combination of labels there ever was, by its last time."""
        if not self.on:
            return ""
        with self.change:
            lines = [
                f'vllm:lora_requests_info{{max_lora="{self.max_loras}",'
                f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}} {at!r}'
                for (running, waiting), at in self.info.items()
            ]
        head = "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
        return head + "# TYPE vllm:lora_requests_info gauge\n" + "\n".join([*lines, ""])

    def told(self) -> dict:
        """What GET /fake/lora tells."""
        with self.change:
            return {
                **self.counters,
                "evicted_in_use": list(self.evicted_in_use),
                "answered": dict(self.answered),
                "registered": [sorted(registry) for registry in self.registries],
                "resident": [self.of_id[id] for id in self.cache],
            }

    def forget(self, name: str | None) -> None:
        """As after a restart in place: no names, no weights."""
        with self.change:
            for registry in self.registries:
                for known in [name] if name else list(registry):
                    named = registry.pop(known, None)
                    if named is not None:
                        self.cache.pop(named.id, None)

    def register(self, name: str, path: str) -> None:
        """A name nobody asked for by the routes, as from a resolver; its folder is read when it is used."""
        with self.change:
            for registry in self.registries:
                registry[name] = self._named(name, path)

    # What the routes do

    def _may_load(self, process: int, name: str, path: str, inplace: bool) -> None:
        rust = self.dialect == "rust"
        if rust and not (name and path):
            missing = "lora_path" if name else "lora_name"
            raise Refused(400, "BadRequestError", f"{missing} must not be empty", missing)
        if not (name and path):
            text = "Both 'lora_name' and 'lora_path' must be provided."
            raise Refused(400, "InvalidUserInput", text)
        with self.change:
            loaded = name in self.registries[process]
        if loaded and not (inplace and self.dialect != "old"):
            text = f"The lora adapter '{name}' has already been loaded."
            if self.dialect != "old":
                true = "true" if rust else "True"
                text += f" If you want to load the adapter in place, set 'load_inplace' to {true}."
            kind = "BadRequestError" if rust else "InvalidUserInput"
            raise Refused(400, kind, text, "lora_name" if rust else None)
        if name in self.names and self.dialect != "old":
            word = "adapter name" if rust else "adapter"
            text = f"The lora {word} '{name}' conflicts with a served base model."
            raise Refused(400, "BadRequestError" if rust else "InvalidUserInput", text)
        if rust:
            allow_path(path)

    def _load(self, process: int, name: str, path: str) -> None:
        if self.faults.hit("lora-500", name):
            raise self._engine_refuses(name, "EngineCore encountered an issue.")
        if not self.on:
            raise self._engine_refuses(name, "LoRA is not enabled. Use --enable-lora to enable it.")
        dies = self.faults.hit("lora-dies", name)
        early = self.faults.hit("lora-early", name)
        with self.change:
            named = self._named(name, path)
            self.loading += 1
            self.counters["most_loading"] = max(self.counters["most_loading"], self.loading)
            if early:
                self.registries[process][name] = named
        try:
            time.sleep(self.script.lora_load_s)
            if dies:
                self.note("load", name, status=0)
                os._exit(1)
            weights = self._read(path, name)
        except Refused:
            with self.change:
                if early:
                    self.registries[process].pop(name, None)
            raise
        finally:
            with self.change:
                self.loading -= 1
        if self.faults.hit("lora-as-base", name):
            weights.marker = None
        if self.faults.hit("lora-lost", name):
            return
        if self.faults.hit("lora-wrong-root", name):
            named.root = os.path.join("/elsewhere", os.path.basename(path))
        with self.change:
            self._keep(named.id, weights)
            self.registries[process][name] = named

    def _unload(self, process: int, name: str, id: object) -> None:
        if not name:
            text = "'lora_name' needs to be provided to unload a LoRA adapter."
            if self.dialect == "old":
                text = "either 'lora_name' and 'lora_int_id' needs to be provided."
            raise Refused(400, "InvalidUserInput", text)
        if self.faults.hit("unload-500", name):
            raise Refused(500, "InternalServerError", "EngineCore encountered an issue.")
        with self.change:
            named = self.registries[process].get(name)
            if named is None:
                if self.dialect == "rust":
                    raise unknown_model(self.dialect, name, self.names)
                text = f"The lora adapter '{name}' cannot be found."
                raise Refused(404, "NotFoundError", text)
            if self.dialect == "rust" and id is not None and id != named.id:
                text = f"The requested lora_int_id {id} does not match loaded adapter '{name}'"
                raise Refused(400, "BadRequestError", f"{text} with id {named.id}.")
            used = self.running[named.id] + self.waiting[named.id]
            if used:
                self.evicted_in_use.append(name)
            if not self.faults.hit("unload-keeps", name):
                del self.registries[process][name]
                if self.dialect == "rust":
                    self.cache.pop(named.id, None)
            self.counters["unloads"] += 1
            self.note("unload", name, status=200, running=used)

    def _named(self, name: str, path: str) -> Named:
        """A new number each time: loading a name again after its unload makes a second copy."""
        self.last_id += 1
        self.of_id[self.last_id] = name
        return Named(name, self.last_id, path, path)

    def _keep(self, id: int, weights: Weights) -> Weights:
        """Into the cache in RAM; the least recently used falls out, whoever still has its name."""
        with self.change:
            self.cache[id] = weights
            self.cache.move_to_end(id)
            while len(self.cache) > self.max_cpu_loras:
                self.cache.popitem(last=False)
        return weights

    def _read(self, path: str, name: str) -> Weights:
        """Reads the folder as the engine does; raises `Refused` in this dialect's words."""
        try:
            with open(os.path.join(path, "adapter_config.json"), encoding="utf-8") as file:
                config = json.load(file)
            marker = marker_of(os.path.join(path, "adapter_model.safetensors"))
        except (OSError, ValueError, struct.error):
            text = f"Loading lora {name} failed: No adapter found for {path}"
            if self.dialect == "rust":
                raise Refused(
                    500, "InternalServerError", f"failed to load LoRA adapter '{name}': {text}"
                ) from None
            raise Refused(404, "NotFoundError", text) from None
        wrong = wrong_config(config, self.max_rank)
        if wrong:
            raise self._engine_refuses(name, wrong)
        targets = config["target_modules"]
        if isinstance(targets, list) and self.only and not set(self.only) & set(targets):
            return Weights(None)
        return Weights(marker or os.path.basename(path))

    def _engine_refuses(self, name: str, why: str) -> Refused:
        match self.dialect:
            case "rust":
                text = f"failed to load LoRA adapter '{name}': engine rejected the adapter"
                return Refused(500, "InternalServerError", text)
            case "old":
                return Refused(400, "BadRequestError", why)
            case _:
                text = (
                    f"Call to add_lora method failed: Worker failed with error '{why}',"
                    " please check the stack trace above for the root cause"
                )
                return Refused(500, "InternalServerError", text)

    def _lock(self, name: str):
        """One for each name, one for all, or none at all: two loads of a name may then both begin."""
        if self.dialect == "old":
            return nullcontext()
        with self.change:
            return self.locks.setdefault("" if self.dialect == "rust" else name, threading.Lock())

    def _inform(self) -> None:
        of = self.of_id
        running = ",".join(dict.fromkeys(of[id] for id, n in self.running.items() if n > 0))
        waiting = ",".join(dict.fromkeys(of[id] for id, n in self.waiting.items() if n > 0))
        self.info[running, waiting] = time.time()

    def note(self, do: str, name: str, **more: object) -> None:
        """Into the file FAKE_VLLM_LORA_LOG names: that outlives a kill -9."""
        if self.log is not None:
            line = {
                "at": time.monotonic(),
                "replica": os.environ.get("YARD_LAUNCH_ID", ""),
                "do": do,
                "name": name,
                **more,
            }
            os.write(self.log, json.dumps(line).encode() + b"\n")
