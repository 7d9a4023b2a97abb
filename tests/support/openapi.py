"""Holds answers against an OpenAPI document, and sends schemathesis at what serves one.

It knows neither of our two documents; what is not described in a document is a problem, said as a sentence.
"""

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
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
    """One document. `error` is the component every error body of an unknown path has; what is below `beside` is
    served there too, and is not its affair."""

    def __init__(self, document: Json, *, error: str, beside: tuple[str, ...] = ()) -> None:
        self.document = document
        self._error = error
        self._beside = beside
        self._validators: dict[str, Any] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        """Templates by how many of their characters are given, so that `/v1/models/{id}` loses to a plain path."""

        def pattern(path: str) -> re.Pattern[str]:
            return re.compile(re.sub(r"\\\{[^}]*\\\}", ".+", re.escape(path)))

        paths = sorted(self.document["paths"], key=lambda path: len(re.sub(r"{.*?}", "", path)))
        return [(pattern(path), path) for path in reversed(paths)]

    def operation(self, method: str, path: str) -> Json | None:
        for pattern, template in self._paths:
            if pattern.fullmatch(path):
                return self.document["paths"][template].get(method.lower())
        return None

    def validate(self, schema: Json, value: Any, what: str) -> None:
        """Raises Undescribed."""
        named = json.dumps(schema, sort_keys=True)
        if named not in self._validators:
            whole = {**schema, "components": self.document.get("components", {})}
            self._validators[named] = jsonschema_rs.Draft202012Validator(
                whole, validate_formats=True
            )
        for error in self._validators[named].iter_errors(value):
            raise Undescribed(f"{what}: {error.message} at {error.instance_path}")

    def check(
        self, method: str, path: str, status: int, content_type: str, body: bytes | None
    ) -> None:
        """Whether an answer is one of those of its operation; `body` None: a stream. Raises Undescribed."""
        what = f"{method} {path} -> {status}"
        operation = self.operation(method, path)
        kind = content_type.partition(";")[0].strip()
        if operation is None:
            if kind != "application/json" or body is None:
                raise Undescribed(f"{what}: {kind}, and there is no such operation")
            if status >= 400:
                self.validate(
                    {"$ref": f"#/components/schemas/{self._error}"}, json.loads(body), what
                )
            return
        described = self.resolved(operation["responses"].get(str(status)))
        if described is None:
            raise Undescribed(f"{what}: only {sorted(operation['responses'])} are described")
        content = described.get("content")
        if not content:
            return
        media = next((m for key, m in content.items() if key.partition(";")[0] == kind), None)
        if media is None:
            raise Undescribed(f"{what}: {kind}, and only {sorted(content)} are described")
        if kind != "application/json" or body is None:
            return
        found = json.loads(body)
        self.validate(media.get("schema", {}), found, what)
        if status >= 400 and media.get("examples"):
            code = found.get("error", {}).get("code")
            if code not in media["examples"]:
                raise Undescribed(
                    f"{what}: {code}, and only {sorted(media['examples'])} have an example"
                )

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
        kind = response.headers.get("content-type", "")
        body = await response.aread() if kind.startswith("application/json") else None
        request = response.request
        path = request.url.raw_path.partition(b"?")[0].decode("ascii")
        if path.startswith(self._beside):
            return
        self.check(request.method, path, response.status_code, kind, body)


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
