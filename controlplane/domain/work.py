"""Says which work the leader's instance should be doing now, from the log alone: the tasks of its workers.

Level-triggered: a task is due as long as the log says so and no report of it was decided on. The shell
(controlplane/workers.py) starts what is due and not running, and cancels what is no longer due.
"""

from msgspec import Struct

from controlplane.domain.world import World


class ReadRepo(Struct, frozen=True, kw_only=True):
    job: str
    attempt: int
    index: int
    repo: str
    revision: str | None


class ReadHeader(Struct, frozen=True, kw_only=True):
    """`key` is the file's; `mirrored`: read the mirror's copy, else the registry's by ranges."""

    job: str
    attempt: int
    index: int
    key: str
    repo: str
    commit: str
    path: str
    mirrored: bool


class Smoke(Struct, frozen=True, kw_only=True):
    """One short request straight to the replica."""

    job: str
    attempt: int
    index: int
    model: str
    node: str
    replica: str
    endpoint: str
    has_key: bool


class Fetch(Struct, frozen=True, kw_only=True):
    """Bring `key` into this mirror. `others` are mirrors whose copy is present, by name: asked first."""

    key: str
    repo: str
    commit: str
    path: str
    bytes: int
    sha256: str | None
    others: tuple[str, ...] = ()


class Verify(Struct, frozen=True, kw_only=True):
    key: str
    sha256: str
    bytes: int


class Remove(Struct, frozen=True, kw_only=True):
    key: str


Task = ReadRepo | ReadHeader | Smoke | Fetch | Verify | Remove


def due(world: World, mirror: str) -> tuple[Task, ...]:
    """Every task of the instance `mirror` while it leads: jobs in order of id, then files in order of key."""
    del world, mirror
    return ()
