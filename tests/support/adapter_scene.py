"""The adapters of one node in a test: a catalog in a log in memory, real files, no agent around."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.adapterfiles import AdapterFiles
from schemas.adapter import Adapter
from schemas.node import Node
from tests.support.adapter_files import (
    Editor,
    a_base,
    adapter_set,
    an_adapter,
    gpu_node,
)
from tests.support.agent_yard import beside
from tests.support.aio import until
from tests.support.node_files import NodeFiles, node_files
from tests.support.scripted_mirror import Mirror


@dataclass
class Scene:
    """One node's adapters; `held` are its replicas, `told` what `on_change` said."""

    files: AdapterFiles
    node_files: NodeFiles
    log: MemoryLog
    editor: Editor
    held: dict[str, Any]
    told: list[frozenset[str]] = field(default_factory=list)

    async def here(self, *adapters: Adapter) -> None:
        for adapter in adapters:
            await until(lambda a=adapter: self.files.path(a) is not None, f"{adapter.name} here")

    async def known(self, *adapters: Adapter) -> None:
        for adapter in adapters:
            await until(
                lambda a=adapter: self.files.adapter(a.name) == a, f"{a_name(adapter)} known"
            )

    def present(self, *adapters: Adapter) -> list[str]:
        return [a.name for a in adapters if self.files.path(a) is not None]


def a_name(adapter: Adapter) -> str:
    return f"{adapter.name}@{adapter.version}"


@asynccontextmanager
async def scene(
    folder: Path,
    *mirrors: Mirror,
    node: Node | None = None,
    begin: bool = True,
    runs: bool = True,
    held: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A node that follows a log with model `m`; `begin` False: nothing is fetched ahead."""
    broker = MemoryBroker()
    log = MemoryLog(broker, source="/agent/n1")
    held = {} if held is None else held
    around: list[AdapterFiles] = []
    on_disk = node_files(
        folder, *mirrors, spares_adapters=lambda: not around[0].settled(), **settings
    )
    needed = on_disk.needed
    files = AdapterFiles(
        log=log, files=on_disk.files, node=node or gpu_node(), prefix="yard", held=lambda: held
    )
    around.append(files)
    # As the agent wires it: what loaded adapters need is needed like what replicas need.
    on_disk.also_needed = files.kept
    assert needed == set()
    editor = Editor(MemoryLog(broker))
    made = Scene(files=files, node_files=on_disk, log=log, editor=editor, held=held)
    files.on_change = made.told.append
    await editor.write(a_base())
    if begin:
        files.begin()
    async with beside(*([files.run()] if runs else [])):
        yield made


def served(mirror: Mirror, *names: str, weights: int = 1000, **fields: Any) -> list[Adapter]:
    """Ready adapters whose files the mirror has."""
    adapters: list[Adapter] = []
    for order, name in enumerate(names):
        manifest, *contents = adapter_set(name, weights)
        mirror.add(manifest, *contents)
        adapters.append(an_adapter(name, manifest, order=order, **fields))
    return adapters


def came(content: Path) -> int:
    """How much of a content is here."""
    return content.stat().st_size if content.exists() else 0
