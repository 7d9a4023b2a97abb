"""A LoRA adapter: a name of its own for a model with small weights on top, as the catalog holds it, and its events.

phase      meaning
reading    its configuration and file list are being read where it comes from
fetching   it fits its base; the leader's mirror is fetching its files
ready      its files are on the mirrors; replicas load it when somebody asks for it
refused    it cannot be served: `code` and `reason` say why, with numbers; no engine is ever asked
"""

from datetime import datetime
from typing import Literal

from msgspec import Struct

AdapterPhase = Literal["reading", "fetching", "ready", "refused"]


class AdapterFile(Struct, frozen=True, kw_only=True):
    """One of its files: `key` in the mirrors, `name` on disk. `sha256` empty: not known before it is fetched."""

    key: str
    name: str
    bytes: int
    sha256: str = ""


class Adapter(Struct, frozen=True, kw_only=True):
    """The state of `yard.evt.adapter.<adapter>`.

    `incarnation` is minted when the name is added, so a re-added name is never confused with its predecessor.
    `base` is the name of its model, `base_incarnation` that model's. `source` is what was asked for, `commit`
    what of it was pinned (the registry's commit, or a sum over the files of a path or a URL). The first of
    `files` names the set: `mirror:<key>` is what agents obtain. `version` is 12 hex digits of the files'
    contents, known once it is ready; engines serve it under a name that holds it. `rank` is the largest of
    `r` and `rank_pattern`.
    """

    name: str
    incarnation: str
    base: str
    base_incarnation: str
    phase: AdapterPhase
    since: datetime
    by: str = ""
    source: str = ""
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    trust_base: bool = False
    """The base that its configuration names was not compared: a person said it fits."""
    commit: str = ""
    rank: int = 0
    trained_on: str = ""
    """`base_model_name_or_path` of its configuration."""
    target_modules: tuple[str, ...] = ()
    """Each kind once; or, `targets_by_pattern`, the one expression that stands there instead."""
    targets_by_pattern: bool = False
    files: tuple[AdapterFile, ...] = ()
    bytes: int = 0
    version: str = ""
    code: str = ""
    reason: str = ""
    order: int = 0


class AdapterAdded(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.added"):
    by: str


class AdapterChecked(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.checked"):
    """Its configuration was read and fits every profile of its base that loads adapters."""

    rank: int


class AdapterReady(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.ready"):
    version: str


class AdapterRefused(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.refused"):
    code: str


class AdapterChanged(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.changed"):
    by: str
    fields: tuple[str, ...]


class AdapterDeleted(Struct, frozen=True, kw_only=True, tag_field="type", tag="adapter.deleted"):
    """A tombstone: the aggregate ends with this event and its subject empties when it expires."""


AdapterEvent = (
    AdapterAdded | AdapterChecked | AdapterReady | AdapterRefused | AdapterChanged | AdapterDeleted
)
