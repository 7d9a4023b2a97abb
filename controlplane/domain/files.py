"""Decides what the leader's own mirror does with each file: fetch it, leave it, forget it.

It acts on this leader's copies alone: what other mirrors have is taken as told, and nothing of theirs is
removed for them.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from controlplane.domain import filesets
from controlplane.domain.adaptersources import place_of, told_by
from controlplane.domain.catalog import TOMBSTONE_TTL_S
from controlplane.domain.decision import Change, Decision
from controlplane.domain.jobtexts import ERROR_BYTES, clipped
from controlplane.domain.needs import MIRROR_STEP
from controlplane.domain.quantities import show_bytes
from controlplane.domain.repo import Repo
from controlplane.domain.reports import AdapterRead, FileFault, FileGone, FileStored
from controlplane.domain.scene import Scene
from schemas import codes
from schemas.file import (
    Copy,
    CopyPhase,
    File,
    FileAbsent,
    FileDeleted,
    FileEvent,
    FileFailed,
    FileFetching,
    FilePresent,
    FileRemoving,
)
from schemas.job import FileSet

RETRY_S: Final = 60.0
RETRY_MOST_S: Final = 3600.0
"""A fetch only a catalog entry waits for is tried again after a minute, doubling to an hour."""

AT_ONCE: Final = 800
"""Files written in one batch at most: it holds 1,000 events, a job's or a command's own among them."""

FINAL: Final[frozenset[str]] = frozenset(
    {
        codes.NOT_AN_ADAPTER,
        codes.NOT_GGUF,
        codes.CHECKSUM_MISMATCH,
        codes.SIZE_MISMATCH,
        codes.NO_SUCH_FILE,
        codes.REPO_NOT_FOUND,
        codes.REVISION_NOT_FOUND,
    }
)
"""Another fetch of the same commit would meet these again."""

HEX_SHOWN: Final = 12
"""Digits of a checksum a sentence shows."""


TRANSITIONS: Final[dict[tuple[CopyPhase | None, str], CopyPhase | None]] = {
    (None, "file.absent"): None,
    (None, "file.fetching"): "fetching",
    # A copy that was finished when nobody needed it any more, or that another part told of late.
    (None, "file.present"): "present",
    (None, "file.failed"): "failed",
    ("fetching", "file.present"): "present",
    ("fetching", "file.failed"): "failed",
    ("fetching", "file.absent"): None,
    ("fetching", "file.removing"): "removing",
    ("failed", "file.fetching"): "fetching",
    ("failed", "file.present"): "present",
    ("failed", "file.removing"): "removing",
    ("present", "file.present"): "present",
    ("present", "file.failed"): "failed",
    ("present", "file.verifying"): "verifying",
    ("present", "file.removing"): "removing",
    ("present", "file.absent"): None,
    ("verifying", "file.present"): "present",
    ("verifying", "file.failed"): "failed",
    ("verifying", "file.removing"): "removing",
    ("verifying", "file.absent"): None,
    ("removing", "file.absent"): None,
    # It could not be removed: why is told, and it is tried again.
    ("removing", "file.removing"): "removing",
}
"""(phase of one mirror's copy before, event) -> phase after; None is no copy."""


def copy_on(file: File, mirror: str) -> Copy | None:
    return next((copy for copy in file.copies if copy.mirror == mirror), None)


def is_here(file: File | None, mirror: str) -> bool:
    """Whether the mirror has the whole file, checked."""
    mine = copy_on(file, mirror) if file is not None else None
    return mine is not None and mine.phase == "present"


def with_copy(file: File, mirror: str, copy: Copy | None) -> File:
    """The file with this copy in place of the mirror's former one; copies stay in order of mirrors."""
    others = [other for other in file.copies if other.mirror != mirror]
    copies = [*others, copy] if copy is not None else others
    return replace(file, copies=tuple(sorted(copies, key=lambda c: c.mirror)))


def of_set(repo: Repo, file_set: FileSet) -> tuple[File, ...]:
    """The files of a set as they are before anything was fetched, in order of shards."""
    return tuple(
        File(
            key=filesets.file_key(repo.id, repo.commit, file.path),
            repo=repo.id,
            commit=repo.commit,
            path=file.path,
            published_bytes=file.bytes,
            published_sha256=file.sha256.lower() if file.sha256 else None,
        )
        for file in filesets.files_of(repo, file_set)
    )


def of_adapter(read: AdapterRead) -> tuple[File, ...]:
    """The files of an adapter as they are before anything was fetched: its weights, then its configuration."""
    return tuple(
        File(
            key=file.key,
            repo=read.repo,
            commit=read.commit,
            path=file.name,
            published_bytes=file.bytes,
            published_sha256=file.sha256.lower() or None,
        )
        for file in read.files
    )


def failed_for_good(file: File, mirror: str) -> Copy | None:
    """The mirror's copy when it failed of what another fetch would meet again, and nobody else has the file."""
    mine = copy_on(file, mirror)
    if mine is None or mine.phase != "failed" or mine.code not in FINAL:
        return None
    elsewhere = any(copy.phase == "present" for copy in file.copies if copy.mirror != mirror)
    return None if elsewhere else mine


def named(file: File) -> str:
    return f"{file.repo}/{file.path}"


def written(file: File, event: FileEvent, reason: str) -> Change:
    return Change(noun="file", key=(file.key,), event=event, state=file, reason=reason)


def absent(file: File, mirror: str, reason: str) -> Change:
    """`file.absent`: known, and not on `mirror` any more."""
    return written(with_copy(file, mirror, None), FileAbsent(mirror=mirror), reason)


def mismatch(file: File, sha256: str, size: int) -> tuple[str, str] | None:
    """Code and sentence when these are not the bytes that were published, or that another mirror counted."""
    told = told_by(file.repo)
    if size != file.published_bytes:
        return codes.SIZE_MISMATCH, (f"{file.path} has {size} bytes, {told} {file.published_bytes}")
    for known, by in ((file.published_sha256, told), (file.sha256, "known is")):
        if known and known.lower() != sha256.lower():
            return codes.CHECKSUM_MISMATCH, (
                f"{file.path} has the sha256 {sha256[:HEX_SHOWN]}, {by} {known[:HEX_SHOWN]}"
            )
    return None


def look_after(scene: Scene, key: str) -> Decision | None:
    """The first of these that applies to the file:

    1. nobody has it and nobody needs it: it ends, when the audit has its past;
    2. it is needed and not here: it is to be fetched; so is one that failed, when its time has come;
    3. it is being fetched and nobody needs it any more: the fetch ends. What came so far stays, as a copy
       that failed: a retry goes on with it, and whoever collects what is idle finds it;
    4. what was left of such a fetch goes when no job is there any more that could be tried again.
    """
    file = scene.world.files.get(key)
    if file is None:
        return None
    needs, mirror = scene.index.needs, scene.live.mirror
    if not file.copies and key not in needs.by_key:  # 1
        if scene.live.audit_behind:
            return None
        change = Change(
            noun="file",
            key=(key,),
            event=FileDeleted(),
            state=None,
            reason="nobody has it and nobody needs it",
            ttl_s=TOMBSTONE_TTL_S,
        )
        return _decision(scene, file, change)
    if not mirror:
        return None
    mine = copy_on(file, mirror)
    if needs.is_wanted(key):
        if mine is None or (mine.phase == "failed" and _is_due(scene, key, mine)):  # 2
            return _decision(scene, file, _fetching(scene, file, mine))
        return None
    if mine is not None and mine.phase == "fetching":  # 3
        return _decision(scene, file, _interrupted(scene, file, mine))
    if mine is not None and mine.code == codes.INTERRUPTED and key not in needs.by_key:  # 4
        removing = replace(mine, phase="removing", since=scene.now, code="", reason="")
        after = with_copy(file, mirror, removing)
        event = FileRemoving(mirror=mirror)
        return _decision(scene, file, written(after, event, "no job will go on with it"))
    return None


def due_at(scene: Scene, key: str) -> datetime | None:
    """When time alone may give `look_after` something to do."""
    file = scene.world.files.get(key)
    if file is None or not scene.index.needs.is_wanted(key):
        return None
    mine = copy_on(file, scene.live.mirror)
    if mine is None or mine.phase != "failed":
        return None
    return mine.retry_at


def fold(scene: Scene, report: FileStored | FileFault | FileGone) -> Decision | None:
    """What a worker's report changes; None when the log has moved on, or says the same."""
    file = scene.world.files.get(report.key)
    if file is None:
        return None
    mine = copy_on(file, report.mirror)
    match report:
        case FileStored():
            if mine is not None and mine.phase == "removing":
                return None
            return _stored(scene, file, mine, report)
        case FileFault():
            if report.removal:
                return _not_removed(scene, file, mine, report)
            if mine is None or mine.phase not in ("fetching", "verifying"):
                return None
            return _decision(scene, file, _failed(scene, file, mine, report.code, report.sentence))
        case FileGone():
            if mine is None or mine.phase in ("fetching", "failed"):
                return None
            return _decision(scene, file, absent(file, report.mirror, "removed"))


def _is_due(scene: Scene, key: str, mine: Copy) -> bool:
    """A job that began to wait after the failure does not wait for it; an entry alone does."""
    for kind, name in scene.index.needs.by_key.get(key, ()):
        if kind != "job":
            continue
        steps = scene.world.jobs[name].steps
        step = steps[MIRROR_STEP]
        waits = len(steps) <= MIRROR_STEP + 2 and steps[-1].state == "running"
        if waits and (step.since or step.at) > mine.since:
            return True
    return mine.retry_at is None or mine.retry_at <= scene.now


def fetched_again(scene: Scene, keys: Iterable[str], why: str) -> list[Change]:
    """`file.fetching` for those that failed here: to be stored with the step that is to wait for them."""
    changes: list[Change] = []
    for key in keys:
        file = scene.world.files.get(key)
        mine = copy_on(file, scene.live.mirror) if file is not None else None
        if file is not None and mine is not None and mine.phase == "failed":
            changes.append(_fetching(scene, file, mine, why))
    return changes


def _fetching(scene: Scene, file: File, mine: Copy | None, why: str = "") -> Change:
    """`file.fetching`. Whoever led before fetches no more: one download of a file at a time."""
    mirror = scene.live.mirror
    left = tuple(c for c in file.copies if c.mirror == mirror or c.phase != "fetching")
    copy = Copy(
        mirror=mirror,
        phase="fetching",
        since=scene.now,
        tries=mine.tries if mine is not None else 0,
    )
    after = with_copy(replace(file, copies=left), mirror, copy)
    who = ", ".join(scene.index.needs.who(file.key))
    return written(after, FileFetching(mirror=mirror), why or f"{who} needs it")


def _failed(scene: Scene, file: File, mine: Copy, code: str, sentence: str) -> Change:
    tries = mine.tries + 1
    wait_s = min(RETRY_S * 2.0 ** min(tries - 1, 16), RETRY_MOST_S)
    reason = clipped(sentence, ERROR_BYTES) or code
    copy = replace(
        mine,
        phase="failed",
        since=scene.now,
        code=code,
        reason=reason,
        tries=tries,
        retry_at=scene.now + timedelta(seconds=wait_s),
    )
    after = with_copy(file, mine.mirror, copy)
    return written(after, FileFailed(mirror=mine.mirror, code=code), reason)


def _interrupted(scene: Scene, file: File, mine: Copy) -> Change:
    reason = "the fetch was stopped, nobody needs it any more; what came is kept"
    copy = replace(
        mine,
        phase="failed",
        since=scene.now,
        code=codes.INTERRUPTED,
        reason=reason,
        retry_at=None,
    )
    event = FileFailed(mirror=mine.mirror, code=codes.INTERRUPTED)
    return written(with_copy(file, mine.mirror, copy), event, reason)


def _not_removed(scene: Scene, file: File, mine: Copy | None, report: FileFault) -> Decision | None:
    """The copy stays `removing` and says why it is still there; told once, however often it is tried."""
    reason = clipped(report.sentence, ERROR_BYTES) or report.code
    if (
        mine is None
        or mine.phase != "removing"
        or (mine.code, mine.reason) == (report.code, reason)
    ):
        return None
    after = with_copy(file, mine.mirror, replace(mine, code=report.code, reason=reason))
    change = written(after, FileRemoving(mirror=mine.mirror), f"not removed yet: {reason}")
    return _decision(scene, file, change)


def _stored(scene: Scene, file: File, mine: Copy | None, report: FileStored) -> Decision | None:
    wrong = mismatch(file, report.sha256, report.bytes)
    if wrong is not None:
        before = mine or Copy(mirror=report.mirror, phase="fetching", since=scene.now)
        if before.phase == "failed":
            return None
        return _decision(scene, file, _failed(scene, file, before, *wrong))
    after = replace(file, sha256=report.sha256.lower(), bytes=report.bytes)
    if mine is not None and mine.phase == "present" and after == file:
        return None
    copy = Copy(mirror=report.mirror, phase="present", since=scene.now)
    compared = file.published_sha256 is not None
    event = FilePresent(mirror=report.mirror, compared=compared, origin=report.origin)
    checked = "nothing to compare it with"
    if compared:
        is_published = place_of(file.repo) == "registry"
        checked = f"its checksum {'matches the registry' if is_published else 'is what was read'}"
    reason = f"{show_bytes(report.bytes)} from the {report.origin}, {checked}"
    return _decision(scene, file, written(with_copy(after, report.mirror, copy), event, reason))


def _decision(scene: Scene, file: File, change: Change) -> Decision:
    return Decision(
        changes=(change,),
        what=f"file {named(file)}: {change.event.__struct_config__.tag}, {change.reason}",
        cause=scene.world.head("file", file.key).id,
    )


def go_together(a: Decision, b: Decision) -> bool:
    """Whether the same thing happens to both files for the same reason."""
    (one,), (other,) = a.changes, b.changes
    return (type(one.event), one.reason) == (type(other.event), other.reason)


def together(decisions: Sequence[Decision]) -> Decision:
    """One decision of several that go together, each about a file of its own."""
    first = decisions[0]
    if len(decisions) == 1:
        return first
    return replace(
        first,
        changes=tuple(change for decision in decisions for change in decision.changes),
        what=f"{first.what} (and {len(decisions) - 1} more files)",
    )
