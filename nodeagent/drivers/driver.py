"""Says what an engine driver is: how one launch becomes a process, and how a running one is asked.

A driver knows one kind of engine and nothing else. It must not spawn, signal or wait: processes are
`nodeagent.launching`'s affair, and what should run is decided by the control plane.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from schemas.beacons import EngineCounters
from schemas.model import EngineName, SecretRef
from schemas.node import EngineInfo
from schemas.plan import Launch
from schemas.slots import Whose

SecretReader = Callable[[str], str]
"""The value of a secret by name; raises `SecretMissing`."""

RefusedCode = Literal["source_missing", "source_invalid", "secret_missing", "invalid"]

GGUF_MAGIC = b"GGUF"


class SecretMissing(LookupError):
    """A profile names a secret this node does not have. The text is a sentence for the operator."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a kind of engine can do beyond start, answer and stop.

    A driver whose flag is true also implements the matching protocol (parking: `park` and `resume`;
    adapters: `AdapterDriver`).
    """

    parking: bool = False
    adapters: bool = False


class ListedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter as an engine lists it: its engine-side name and `root`, the path it was loaded from."""

    name: str
    root: str = ""


class AdapterDone(Struct, frozen=True, kw_only=True):
    """The engine did it. `already`: it said that this was so before it was asked."""

    already: bool = False


class AdapterFault(Struct, frozen=True, kw_only=True):
    """The engine did not do it: `whose` fault by its status, type and text, a code of `schemas.codes`, its words.

    `known` False: nobody knows this answer; it counts as the replica's until another replica says the same.
    """

    whose: Whose
    code: str
    text: str
    known: bool = True


class AdapterDriver(Protocol):
    """What a driver with `capabilities.adapters` can do besides. None of these raises for anything an engine answers."""

    async def load_adapter(
        self, endpoint: str, key: str, *, name: str, path: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        """Loads the adapter in the folder `path` under `name`; returns when the engine has read it.

        `already` is no success by itself: the caller compares the list's `root` with `path`.
        """
        ...

    async def unload_adapter(
        self, endpoint: str, key: str, *, name: str, timeout_s: float
    ) -> AdapterDone | AdapterFault:
        """Unloads it; one that is not there is done already. An engine without these routes is a fault."""
        ...

    async def list_adapters(
        self, endpoint: str, key: str
    ) -> tuple[ListedAdapter, ...] | AdapterFault:
        """Every adapter it lists, without base models. Bounded by 5 s and 4 MiB."""
        ...

    async def running_adapters(self, endpoint: str, key: str) -> frozenset[str] | None:
        """Engine-side names of adapters with requests running or waiting; None where it does not tell."""
        ...

    async def loads_adapters(self, endpoint: str, key: str) -> bool | None:
        """Whether its routes to load adapters are there; None: it did not answer. Changes nothing."""
        ...


class EngineStart(Struct, frozen=True, kw_only=True):
    """Everything the launcher needs to run one engine process.

    `environment` is the whole environment of the process, not an addition to ours.
    `secret_names` are the variables in it whose values must not show up in a log or an event.
    `ready` says how readiness becomes known: `pipe`: the engine writes to the inherited descriptor
    named by YARD_READY_FD, and `launching` tells; `probe`: the agent asks `Driver.probe`.
    `telling` are pieces of text, best first, that mark the line an engine which failed to start
    gives its reason in; without one the last line counts.
    `has_key`: whether the engine refuses whoever does not present the launch's key.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    endpoint: str
    port: int
    ready: Literal["pipe", "probe"]
    paths: tuple[str, ...]
    has_key: bool
    secret_names: tuple[str, ...] = ()
    telling: tuple[str, ...] = ()


class StartRefused(Struct, frozen=True, kw_only=True):
    """The launch cannot be started on this node: a code for programs and a sentence for people."""

    code: RefusedCode
    sentence: str


class Driver(Protocol):
    """One kind of engine. Holds no state of a replica: whatever it needs is handed in."""

    engine: EngineName
    capabilities: Capabilities

    def info(self) -> EngineInfo:
        """Name, version and architectures for the inventory. Blocks up to a second: use a thread."""
        ...

    def prepare(
        self,
        launch: Launch,
        *,
        replica: str,
        host: str,
        port: int,
        key: str,
        secrets: SecretReader,
    ) -> EngineStart | StartRefused:
        """Turns a launch into a process description, or says why this node cannot run it.

        `key` is what the engine shall ask of its clients. It reaches the engine by environment,
        never by argv. Looks at files (is the source there, is it a GGUF): use a thread when the
        source may be on a network file system. Never raises for anything a catalog can contain.
        """
        ...

    async def probe(self, endpoint: str, key: str, *, health: str = "/health") -> bool:
        """Whether the engine answers now. Bounded by 2 s; a failure of any kind is False."""
        ...

    async def routes(self, endpoint: str, key: str, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Which of its start's `paths` a running engine has; asked once, when it is ready and told by a probe.

        Bounded by a few seconds; an engine that does not say keeps those that every engine of its kind has.
        """
        ...

    async def counters(self, endpoint: str, key: str) -> EngineCounters:
        """What the engine says of its own work; fields are None where it does not tell.

        Bounded by 2 s; an engine that does not answer tells nothing.
        """
        ...


_OURS = ("YARD_NATS", "YARD_API", "YARD_DATA", "YARD_LAUNCH_ID", "YARD_LAUNCH_DIR", "YARD_READY_FD")
_SECTIONS = ("YARD_YARD_", "YARD_NATS_", "YARD_CONTROLPLANE_", "YARD_GATEWAY_", "YARD_NODEAGENT_")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What an engine inherits of our own environment: all but the yard's own settings."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OURS and not name.startswith(_SECTIONS)
    }


def resolve(
    env: Mapping[str, str | SecretRef], secrets: SecretReader
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A profile's `env` with its secrets looked up, and the names of those variables.

    Raises `SecretMissing`.
    """
    values = {
        name: secrets(value.secret) if isinstance(value, SecretRef) else value
        for name, value in env.items()
    }
    return values, tuple(name for name, value in env.items() if isinstance(value, SecretRef))


_SECRET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_OWN = (".key", ".password", ".token")


def secrets_in(folder: Path) -> SecretReader:
    """Reads secrets from files of `folder`, one secret a file, surrounding white space removed.

    The yard's own credentials lie in the same folder. They are refused, or whoever may write a
    profile could have an engine print the key of the node.
    """

    def read(name: str) -> str:
        if not _SECRET_NAME.fullmatch(name):
            raise SecretMissing(f"{name!r} cannot be the name of a secret")
        if name.endswith(_OWN):
            raise SecretMissing(f"the secret {name!r} is the yard's own and is given to no engine")
        try:
            return (folder / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise SecretMissing(
                f"the secret {name!r} cannot be read on this node ({folder / name}: {reason})"
            ) from None

    return read
