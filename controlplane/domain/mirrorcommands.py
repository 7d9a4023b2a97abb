"""Decides what a person's wish about the mirrors' files does: remove some, read some again, clear up.

Nothing that an entry, a job or a node that is fetching needs is ever removed.
"""

import re
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from controlplane.domain import files, jobtexts
from controlplane.domain.adaptersources import place_of
from controlplane.domain.decision import Accepted, Change, Rejected
from controlplane.domain.needs import key_of_source, keys_of_set
from controlplane.domain.quantities import show_bytes
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.commands import MirrorGc, MirrorRemove, MirrorVerify
from schemas.file import File, FileRemoving, FileVerifying

SHORTEST_KEY: Final = 8
NAMED: Final = 3
"""Files a refusal names."""

_KEY: Final = re.compile(r"[0-9a-f]{8,64}")
_NAMED: Final = re.compile(r"(?P<repo>[^/@\s]+/[^/@\s]+)(@(?P<commit>[^/@\s]+))?(/(?P<path>.+))?")
_READING: Final = frozenset({"waiting", "fetching"})


def decide(scene: Scene, body: MirrorRemove | MirrorVerify | MirrorGc) -> Accepted | Rejected:
    match body:
        case MirrorRemove():
            return _remove(scene, body)
        case MirrorVerify():
            return _verify(scene, body)
        case MirrorGc():
            return _gc(scene, body)


def readers(scene: Scene) -> dict[str, tuple[str, ...]]:
    """Who on a node is reading each file, or is about to: replicas that have not started yet."""
    found: dict[str, set[str]] = {}

    def note(keys: Iterable[str], who: str) -> None:
        for key in keys:
            found.setdefault(key, set()).add(who)

    for id_, planned in scene.index.items.items():
        first = key_of_source(planned.item.launch.source)
        replica = scene.world.replicas.get(id_)
        if first is not None and (replica is None or replica.phase in _READING):
            note(keys_of_set(scene.world, first), f"replica {id_} on {planned.node}")
    for replica in scene.world.replicas.values():
        # One that left its plan is still reading until its agent says otherwise.
        if replica.phase == "fetching" and replica.id not in scene.index.items:
            keys = scene.index.needs.of_model.get(replica.model, ())
            note(keys, f"replica {replica.id} on {replica.node}")
    return {key: tuple(sorted(who)) for key, who in found.items()}


def _matching(scene: Scene, what: str) -> list[File] | Rejected:
    """The files `what` names, in order of key."""
    wanted = what.strip()
    known = scene.world.files
    if _KEY.fullmatch(wanted.lower()):
        found = [known[key] for key in sorted(known) if key.startswith(wanted.lower())]
    elif place_of(wanted) != "registry":
        place = wanted.rstrip("/")
        found = [
            known[key]
            for key in sorted(known)
            if place in (known[key].repo, files.named(known[key]))
        ]
    else:
        named = _NAMED.fullmatch(wanted)
        if named is None:
            return Rejected(
                code=codes.INVALID,
                sentence=f'"{jobtexts.clipped(what, 200)}" names no file; give a key, '
                f"{SHORTEST_KEY} characters of one or more, OWNER/REPO[@COMMIT][/PATH], or the URL or "
                "folder an adapter came from",
            )
        repo, commit, path = named["repo"].casefold(), named["commit"], named["path"]
        found = [
            known[key]
            for key in sorted(known)
            if known[key].repo.casefold() == repo
            and (commit is None or known[key].commit.startswith(commit.lower()))
            and (path is None or known[key].path == path)
        ]
    if not found:
        return Rejected(
            code=codes.NOT_FOUND,
            sentence=f'no file of the mirrors is "{jobtexts.clipped(what, 200)}"; '
            "`yardctl mirror list` shows those there are",
        )
    return found


def line(file: File) -> str:
    """One file in a list: the beginning of its key, where it is from, its size."""
    size = show_bytes(file.bytes or file.published_bytes)
    return f"{file.key[: files.HEX_SHOWN]}  {files.named(file)}  {size}"


def _total(found: list[File]) -> str:
    size = show_bytes(sum(file.bytes or file.published_bytes for file in found))
    return f"{jobtexts.files(len(found))}, {size}"


def _users(scene: Scene, key: str, reading: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (*scene.index.needs.who(key), *reading.get(key, ()))


def _removing(scene: Scene, file: File, why: str) -> Change | None:
    """`file.removing`: each mirror that has something of it removes it, when it can."""
    copies = tuple(
        copy
        if copy.phase == "removing"
        else replace(copy, phase="removing", since=scene.now, code="", reason="", retry_at=None)
        for copy in file.copies
    )
    if copies == file.copies:
        return None
    mirrors = ", ".join(copy.mirror for copy in copies)
    return files.written(replace(file, copies=copies), FileRemoving(mirror=mirrors), why)


def _remove(scene: Scene, body: MirrorRemove) -> Accepted | Rejected:
    found = _matching(scene, body.what)
    if isinstance(found, Rejected):
        return found
    reading = readers(scene)
    used = [(file, who) for file in found if (who := _users(scene, file.key, reading))]
    if used:
        said = "; ".join(
            f"{files.named(file)} is needed by {', '.join(who)}" for file, who in used[:NAMED]
        )
        more = f" (and {len(used) - NAMED} more)" if len(used) > NAMED else ""
        return Rejected(code=codes.IN_USE, sentence=f"nothing was removed: {said}{more}")
    return _removal(scene, found, "nothing of it is on a mirror")


def _removal(scene: Scene, found: list[File], nothing: str) -> Accepted:
    pairs = [(f, c) for f in found if (c := _removing(scene, f, "removed")) is not None]
    left = len(pairs) - files.AT_ONCE
    pairs = pairs[: files.AT_ONCE]
    if not pairs:
        return Accepted(sentence=nothing)
    more = f"; {left} more are left, ask again" if left > 0 else ""
    gone = [file for file, _ in pairs]
    others = {copy.mirror for file in gone for copy in file.copies} - {scene.live.mirror}
    where = f"; {', '.join(sorted(others))} removes its own when it leads" if others else ""
    return Accepted(
        changes=tuple(change for _, change in pairs),
        sentence=f"{_total(gone)} to be removed{more}{where}",
        lines=tuple(line(file) for file in gone),
    )


def _verify(scene: Scene, body: MirrorVerify) -> Accepted | Rejected:
    mirror = scene.live.mirror
    if not mirror:
        return Rejected(code=codes.CONFLICT, sentence="this control plane has no mirror")
    found = _matching(scene, body.what) if body.what.strip() else list(_all(scene))
    if isinstance(found, Rejected):
        return found
    here = [file for file in found if files.is_here(file, mirror)]
    left = len(here) - files.AT_ONCE
    here = here[: files.AT_ONCE]
    if not here:
        return Accepted(sentence=f"none of it is on {mirror}: nothing to verify")
    changes: list[Change] = []
    for file in here:
        mine = files.copy_on(file, mirror)
        assert mine is not None
        copy = replace(mine, phase="verifying", since=scene.now)
        after = files.with_copy(file, mirror, copy)
        changes.append(files.written(after, FileVerifying(mirror=mirror), "to be read again"))
    more = f"; {left} more are left, ask again" if left > 0 else ""
    return Accepted(
        changes=tuple(changes),
        sentence=f"{_total(here)} to be read again on {mirror}{more}",
        lines=tuple(line(file) for file in here),
    )


def _all(scene: Scene) -> Iterable[File]:
    return (scene.world.files[key] for key in sorted(scene.world.files))


def _gc(scene: Scene, body: MirrorGc) -> Accepted:
    reading = readers(scene)
    idle = [file for file in _all(scene) if file.copies and not _users(scene, file.key, reading)]
    if not body.dry_run:
        return _removal(scene, idle, "nothing to remove: all of it is needed")
    lines = tuple(line(file) for file in idle)
    said = f"{_total(idle)} would be removed" if idle else "nothing to remove: all of it is needed"
    return Accepted(sentence=said, lines=(*lines, f"total: {_total(idle)}"))
