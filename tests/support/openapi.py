"""Holds answers against an OpenAPI document, and sends schemathesis at what serves one.

It knows neither of our two documents; what is not described in a document is a problem, said as a sentence.
"""

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema_rs

Json = dict[str, Any]

METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
PROGRAM: Final = Path(sys.executable).with_name("st")


class Undescribed(AssertionError):
    """An answer that the document does not allow."""


class Described:
    """One document. `errors` are the components that the error body of an unknown path is one of; what is below
    `beside` is served there too, and is not its affair."""

    def __init__(
        self, document: Json, *, errors: tuple[str, ...], beside: tuple[str, ...] = ()
    ) -> None:
        self.document = document
        self._errors = errors
        self._beside = beside
        self._validators: dict[str, Any] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        """Templates by how many of their characters are given, so that `/v1/models/{id}` loses to a plain path."""

        paths = sorted(self.document["paths"], key=lambda path: len(re.sub(r"{.*?}", "", path)))
        return [(_pattern(path, ".+"), path) for path in reversed(paths)]

    @cached_property
    def _bases(self) -> list[re.Pattern[str]]:
        """What may stand before a path, by the document's servers."""
        urls = [server["url"] for server in self.document.get("servers", ())]
        return [_pattern(url, "[^/]+") for url in urls if url != "/"]

    def operation(self, method: str, path: str) -> Json | None:
        """The operation that answers there. HEAD is answered as GET, and a slash at the end is no other path."""
        below_base = False
        for base in self._bases:
            found = base.match(path)
            below_base = below_base or found is not None
            path = path if found is None else path[found.end() :]
        path = path[:-1] if len(path) > 1 and path.endswith("/") else path
        method = "get" if method == "HEAD" else method.lower()
        for pattern, template in self._paths:
            if pattern.fullmatch(path):
                item = self.document["paths"][template]
                # One with servers of its own is nowhere else.
                return None if below_base and "servers" in item else item.get(method)
        return None

    @cached_property
    def _codes(self) -> set[str]:
        """Every code that an example has: those that are ours."""
        return {where.rpartition("/")[2] for where, _, _ in examples(self.document)}

    def validate(self, schema: Json, value: Any, what: str) -> None:
        """Raises Undescribed."""
        named = json.dumps(schema, sort_keys=True)
        if named not in self._validators:
            whole = {**schema, "components": {"schemas": self.document["components"]["schemas"]}}
            self._validators[named] = jsonschema_rs.Draft202012Validator(
                whole, validate_formats=True
            )
        for error in self._validators[named].iter_errors(value):
            raise Undescribed(f"{what}: {error.message} at {error.instance_path}")

    def check(
        self,
        method: str,
        path: str,
        status: int,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> None:
        """Whether an answer is one of those of its operation; `body` None: a stream. Raises Undescribed."""
        what = f"{method} {path} -> {status}"
        kind = headers.get("content-type", "").partition(";")[0].strip()
        operation = self.operation(method, path)
        if operation is None:
            self._check_unknown(what, status, kind, body)
            return
        found = operation["responses"]
        described = self.resolved(found.get(str(status)) or found.get(f"{status // 100}XX"))
        if described is None:
            raise Undescribed(f"{what}: only {sorted(found)} are described")
        self._check_headers(what, described.get("headers", {}), headers)
        content = described.get("content")
        if not content or not kind:
            return
        media = next(
            (m for key, m in content.items() if fnmatch(kind, key.partition(";")[0])), None
        )
        if media is None:
            raise Undescribed(f"{what}: {kind}, and only {sorted(content)} are described")
        if kind != "application/json" or not body:
            return
        answered = json.loads(body)
        self.validate(media.get("schema", {}), answered, what)
        if status >= 400 and media.get("examples"):
            error = answered.get("error")
            code = error.get("code") if isinstance(error, dict) else None
            ours = code in self._codes or "EngineError" not in json.dumps(media["schema"])
            told = {*media["examples"], *self._codes_of(found.get(f"{status // 100}XX"))}
            if ours and code not in told:
                raise Undescribed(f"{what}: {code}, and only {sorted(told)} have an example")

    def _codes_of(self, response: Json | None) -> set[str]:
        content = (self.resolved(response) or {}).get("content", {})
        return {code for media in content.values() for code in media.get("examples", {})}

    def _check_unknown(self, what: str, status: int, kind: str, body: bytes | None) -> None:
        if kind != "application/json" or body is None:
            raise Undescribed(f"{what}: {kind}, and there is no such operation")
        if status >= 400 and body:
            forms = [{"$ref": f"#/components/schemas/{name}"} for name in self._errors]
            self.validate({"anyOf": forms}, json.loads(body), what)

    def _check_headers(self, what: str, described: Json, found: Mapping[str, str]) -> None:
        """Of the headers that the document has a word for each must be described where it comes."""
        for name, value in found.items():
            if name not in self.document.get("components", {}).get("headers", {}):
                continue
            header = self.resolved(described.get(name))
            if header is None:
                raise Undescribed(f"{what}: the header {name}: {value} is not described here")
            schema = header["schema"]
            read = int(value) if schema.get("type") == "integer" else value
            self.validate(schema, read, f"{what}, {name}")

    def resolved(self, found: Json | None) -> Json | None:
        """What a reference points at; anything else as it is."""
        while found is not None and "$ref" in found:
            target: Any = self.document
            for part in found["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            found = target
        return found

    async def hook(self, response: httpx.Response) -> None:
        """For `event_hooks` of a client: every answer it gets is checked."""
        request = response.request
        path = request.url.raw_path.partition(b"?")[0].decode("ascii")
        if path.startswith(self._beside) or request.method == "OPTIONS":
            return
        whole = response.headers.get("content-type", "").startswith("application/json")
        body = await response.aread() if whole else None
        self.check(request.method, path, response.status_code, response.headers, body)


def _pattern(path: str, part: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{[^}]*\\\}", part, re.escape(path)))


def examples(document: Json) -> list[tuple[str, Json, Any]]:
    """Every example of the document: where it stands, its schema, and itself."""
    found: list[tuple[str, Json, Any]] = []

    def walk(value: Any, where: str) -> None:
        if isinstance(value, Mapping):
            if "schema" in value and isinstance(value.get("examples"), Mapping):
                found.extend(
                    (f"{where}/examples/{name}", value["schema"], example["value"])
                    for name, example in value["examples"].items()
                )
            if "schema" in value and "example" in value:
                found.append((f"{where}/example", value["schema"], value["example"]))
            for key, part in value.items():
                walk(part, f"{where}/{key}")
        elif isinstance(value, list):
            for at, part in enumerate(value):
                walk(part, f"{where}/{at}")

    walk(document, "")
    return found


async def attack(url: str, *options: str, config: Path | None = None) -> tuple[int, str]:
    """`st run` of the document at `url`: its status, and what it printed."""
    words: Sequence[str] = () if config is None else ("--config-file", str(config))
    process = await asyncio.create_subprocess_exec(
        *(str(PROGRAM), *words, "run", url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode("utf-8", "replace")
