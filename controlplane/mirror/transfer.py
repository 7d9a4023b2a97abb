"""Brings one file into the store, in a thread: its sources in order, one pass that writes and hashes, checks.

It blocks. What an answer means, how long to wait and when to give up is decided in domain/; here bytes move.
Whatever goes wrong, what is on the disk stays the beginning of this file, to be gone on with.
"""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Literal

from controlplane.domain.adaptersources import told_by
from controlplane.domain.reports import FileFault, FileStored
from controlplane.domain.work import Fetch
from controlplane.mirror.connecting import CutOff, Line, Misdirected, Reply, Stopped, ask
from controlplane.mirror.digesting import BUFFER_BYTES, Digest
from controlplane.mirror.domain import contents, pace, safetensors
from controlplane.mirror.domain.answers import Anew, Asked, Later, Origin, Refused, Take, judge
from controlplane.mirror.domain.retries import (
    Again,
    Enough,
    after_failure,
    longest_silence_s,
)
from controlplane.mirror.domain.sources import Source
from controlplane.mirror.folder import FolderAnswer
from controlplane.mirror.limiting import Limiter
from controlplane.mirror.partials import Note, Partial, PartialBusy
from controlplane.mirror.receiving import append
from controlplane.mirror.store import Entry, Store
from controlplane.mirror.telling import Teller
from schemas import codes
from schemas.progress import FileProgress

log = logging.getLogger(__name__)

RESTARTS: Final = 8
"""How often one fetch may throw away what it has; a server without ranges that always breaks ends there."""
WORTHLESS: Final = frozenset({codes.NOT_GGUF, codes.NOT_AN_ADAPTER, codes.SIZE_MISMATCH})
ORIGINS: Final[dict[Origin, Literal["registry", "mirror", "source"]]] = {
    "registry": "registry",
    "mirror": "mirror",
    "web": "source",
    "folder": "source",
}
BUSY_WAIT_S: Final = 0.5
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Fault(Exception):
    """Ends this source; `final` ends the fetch: no other source would do better."""

    def __init__(self, code: str, sentence: str, *, final: bool = False) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.final = final


class _Again(Exception):
    """This attempt came to nothing; another may do better."""

    def __init__(self, code: str, sentence: str, retry_after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.retry_after_s = retry_after_s


class Transfer:
    """One fetch. `run` is called once, in any thread; `line.stop()` ends it from another."""

    def __init__(
        self,
        task: Fetch,
        sources: Sequence[Source],
        *,
        store: Store,
        mirror: str,
        limiter: Limiter,
        no_progress_s: float,
        say: Callable[[FileProgress], None],
        now: Callable[[], datetime],
        chance: Callable[[], float],
    ) -> None:
        self.task = task
        self.line = Line()
        self.fetched = 0
        """Bytes that came over the network, thrown away ones too."""
        self._sources = sources
        self._store = store
        self._mirror = mirror
        self._limiter = limiter
        self._bound_s = no_progress_s
        self._teller = Teller(task.key, task.bytes, say)
        self._now = now
        self._chance = chance
        self._published = contents.plain_sha256(task.sha256)
        self._unreachable = contents.unreachable(task.repo)
        self._furthest = 0
        self._progress_at = time.monotonic()
        self._pieces = 0
        self._restarts = 0
        self._given_another_chance = False

    def run(self) -> FileStored | FileFault:
        """Raises Stopped. Any other error is a fault of the disk and becomes one."""
        try:
            return self._here_already() or self._bring()
        except _Fault as fault:
            return self._fault(fault.code, fault.sentence)
        except OSError as error:
            if error.errno in DISK_FULL:
                return self._fault(codes.DISK_FULL, self._filled_up())
            log.exception("a fetch failed on the disk", extra={"file": self.task.key})
            return self._fault(
                codes.DISK_FAILED,
                f"the mirror's folder {self._store.folder} failed: {error.strerror}",
            )
        except Stopped:
            raise
        except Exception:
            # A fault of this program must not take the control plane with it.
            log.exception("a fetch failed", extra={"file": self.task.key})
            return self._fault(
                codes.DISK_FAILED,
                f"fetching {self.task.path} failed inside the mirror; the log of the control plane "
                "has the reason",
            )

    def stuck(self) -> FileFault | None:
        """Why it is given up although its thread does not end: a folder's disk answers nothing any more.

        To be called from another thread. What the thread still holds it lets go of when the disk is back.
        """
        since = self.line.waits_since
        if since is None or time.monotonic() - since < self._bound_s:
            return None
        return self._fault(
            self._unreachable,
            f"the folder {self.task.repo} did not answer for {self._bound_s:.0f} s",
        )

    # -- around the bytes ---------------------------------------------------------------------------

    def _here_already(self) -> FileStored | None:
        """1 this key is here   2 its published content is here under another key   3 or under none: then only
        hashing is left to do   4 nothing is here"""
        task, published = self.task, self._published
        if published is not None and not contents.is_sha256(published):
            raise _Fault(codes.CHECKSUM_MISMATCH, contents.malformed(task.path, published))
        entry = self._store.entry(task.key)
        if entry is not None and published is not None and entry.sha256 != published:
            self._store.remove(task.key, readers_wait_s=0.0)  # of a publication that was corrected
            entry = None
        if entry is None and published is not None:
            entry = self._store.adopt(self._entry(published))
            if entry is None:
                self._store.reclaim(self._entry(published))
        return None if entry is None else self._stored(entry.sha256, "store")

    def _bring(self) -> FileStored:
        if self.task.bytes <= 0:
            raise _Fault(
                contents.wrong_kind(self.task.path),
                f"{told_by(self.task.repo)} {self.task.path} as empty",
            )
        with self._locked_partial() as partial:
            # Whoever had it before may have finished it.
            if (already := self._here_already()) is not None:
                partial.discard()
                return already
            if partial.size > self.task.bytes:
                partial.begin_anew()
            digest = Digest()
            try:
                return self._fill(partial, digest)
            finally:
                digest.close()
                with suppress(OSError):
                    # Also of a file that is whole by now: then there is nothing to give back.
                    partial.release_space()

    def _locked_partial(self) -> Partial:
        """The old leader's instance, if it shares this folder, lets go as soon as it is told."""
        until = time.monotonic() + self._bound_s
        while True:
            try:
                return self._store.partial(self.task.key)
            except PartialBusy:
                if time.monotonic() >= until:
                    raise _Fault(
                        codes.NO_PROGRESS,
                        f"another control plane of this folder is fetching {self.task.path}",
                        final=True,
                    ) from None
                self.line.pause(BUSY_WAIT_S)

    def _fill(self, partial: Partial, digest: Digest) -> FileStored:
        """Bytes from here, then from each source in order until one made it whole and right.

        What does not check out is thrown away. If it was put together from several answers, the same source
        is asked once more for the whole: it may have been the parts that did not fit.
        """
        self._reserve(partial)
        if partial.size:
            self._hash_here(partial, digest)
        sources = list(self._sources)
        while sources:
            source = sources.pop(0)
            begun_at = partial.size
            try:
                self._from(source, partial, digest, last=not sources)
                return self._checked(partial, digest, source)
            except _Fault as fault:
                if fault.code == codes.CHECKSUM_MISMATCH:
                    patched = begun_at > 0 or self._pieces > 1
                    self._begin_anew(partial, digest)
                    if patched and not self._given_another_chance:
                        self._given_another_chance = True
                        sources.insert(0, source)
                elif fault.code in WORTHLESS and source.origin != "mirror":
                    partial.begin_anew()
                elif fault.code == codes.NOT_AN_ADAPTER:
                    self._begin_anew(
                        partial, digest
                    )  # whole, and worth nothing: asked for once more
                if fault.final or not sources:
                    raise
                log.warning(
                    "a source of a file failed",
                    extra={"file": self.task.key, "source": source.place, "why": fault.sentence},
                )
        raise _Fault(self._unreachable, f"nobody has {self.task.path}")

    def _reserve(self, partial: Partial) -> None:
        missing = self.task.bytes - partial.allocated
        free = self._store.free_bytes()
        if missing > free:
            raise _Fault(codes.DISK_FULL, self._no_room(missing, free), final=True)
        try:
            partial.reserve(self.task.bytes)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            partial.release_space()
            raise _Fault(
                codes.DISK_FULL, self._no_room(missing, self._store.free_bytes()), final=True
            ) from None

    def _no_room(self, missing: int, free: int) -> str:
        return contents.no_room(
            self.task.path,
            missing=missing,
            free=free,
            kept=self._store.keep_free_bytes,
            folder=str(self._store.folder),
        )

    def _hash_here(self, partial: Partial, digest: Digest) -> None:
        """Hashes what an earlier fetch left, once; what is no model or adapter is not gone on with."""
        size, offset = partial.size, 0
        while offset < size:
            self.line.check()
            buffer = digest.buffer()
            count = partial.read_at(buffer, offset)
            digest.add(buffer, count)
            if offset == 0 and not self._begins_right(bytes(buffer[: contents.SNIFFED])[:count]):
                self._begin_anew(partial, digest)
                return
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than its size")
            offset += count
            self._teller.tell("hashing", offset)
        self._furthest = offset
        self._progress_at = time.monotonic()

    def _begins_right(self, first: bytes) -> bool:
        return contents.begins_right(self.task.path, first, self.task.bytes)

    def _checked(self, partial: Partial, digest: Digest, source: Source) -> FileStored:
        """The whole is here: its sha256 against the published one, its header, then it is a file of the store."""
        self._teller.tell("hashing", self.task.bytes)
        sha256 = digest.value()
        if self._published is not None and sha256 != self._published:
            raise _Fault(
                codes.CHECKSUM_MISMATCH,
                contents.mismatch(self.task.path, sha256, self._published, told_by(self.task.repo)),
            )
        if contents.is_safetensors(self.task.path):
            self._check_tensors(partial)
        self._store.finish(partial, self._entry(sha256))
        return self._stored(sha256, ORIGINS[source.origin])

    def _check_tensors(self, partial: Partial) -> None:
        """Of what nobody published a sum of, only this tells that it is whole. Raises _Fault."""
        first = bytearray(safetensors.COUNT_BYTES)
        partial.read_at(first, 0)
        header = bytearray(
            min(safetensors.header_bytes(bytes(first)), self.task.bytes - safetensors.COUNT_BYTES)
        )
        partial.read_at(header, safetensors.COUNT_BYTES)
        problem = safetensors.problem_of(bytes(header), self.task.bytes)
        if problem is not None:
            raise _Fault(codes.NOT_AN_ADAPTER, f"{self.task.path} {problem}")

    def _begin_anew(self, partial: Partial, digest: Digest) -> None:
        """Raises _Fault when that was done so often that it leads nowhere."""
        digest.start_over()
        partial.begin_anew()
        partial.reserve(self.task.bytes)
        self._pieces = 0
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise _Fault(
                codes.NO_PROGRESS,
                f"{self.task.path} had to be begun anew {RESTARTS} times; at best "
                f"{contents.in_units(self._furthest)} of {contents.in_units(self.task.bytes)} came",
            )

    # -- one source ---------------------------------------------------------------------------------

    def _from(self, source: Source, partial: Partial, digest: Digest, *, last: bool) -> None:
        """Asks `source` until the file is whole. Raises _Fault when it will not give it."""
        self._progress_at = time.monotonic()
        failures = 0
        while partial.size < self.task.bytes:
            before = self._furthest
            try:
                self._attempt(source, partial, digest)
                continue
            except CutOff as error:
                problem = _Again(self._unreachable, f"{source.place}: {error}")
            except Misdirected as error:
                raise _Fault(
                    self._unreachable, f"{source.place} for {self.task.path}: {error}"
                ) from None
            except _Again as error:
                problem = error
            failures = 1 if self._furthest > before else failures + 1
            outcome = after_failure(
                silent_s=time.monotonic() - self._progress_at,
                bound_s=self._bound_s,
                failures=failures,
                chance=self._chance(),
                retry_after_s=problem.retry_after_s,
                last_source=last,
            )
            match outcome:
                case Enough():
                    raise self._given_up(problem)
                case Again(wait_s=wait_s):
                    log.info(
                        "a fetch is tried again",
                        extra={
                            "file": self.task.key,
                            "why": problem.sentence,
                            "wait_s": round(wait_s, 2),
                            "at_byte": partial.size,
                        },
                    )
                    self.line.pause(wait_s)

    def _given_up(self, problem: _Again) -> _Fault:
        """Bytes had come and then none: no progress; otherwise what the last answer said."""
        silent_s = time.monotonic() - self._progress_at
        if problem.code == self._unreachable and self.fetched and silent_s >= self._bound_s:
            return _Fault(
                codes.NO_PROGRESS,
                f"no byte of {self.task.path} came for {self._bound_s:.0f} s "
                f"(at {contents.in_units(self._furthest)} of {contents.in_units(self.task.bytes)}); "
                f"last: {problem.sentence}",
            )
        # Of a rate limit the sentence says it itself.
        pause = problem.retry_after_s if problem.code != codes.RATE_LIMITED else None
        tail = f", and asks to wait {pause:.0f} s" if pause is not None else ""
        return _Fault(problem.code, f"{self.task.path}: {problem.sentence}{tail}")

    def _attempt(self, source: Source, partial: Partial, digest: Digest) -> None:
        """One request and its body, as far as it goes. Returns normally only with new bytes."""
        offset, note = partial.size, partial.note()
        headers: dict[str, str] = {}
        if 0 < offset < contents.telling_bytes(self.task.path) or (
            # Nothing would find out that two servers hold different bytes.
            offset and self._published is None and note.origin != source.origin
        ):
            self._begin_anew(partial, digest)
            offset, note = 0, Note()
        if offset:
            headers["range"] = f"bytes={offset}-"
            if note.etag and note.origin == source.origin:
                headers["if-range"] = note.etag
        answer = self._ask(source, headers)
        try:
            verdict = judge(
                answer.status,
                answer.headers,
                Asked(
                    path=self.task.path,
                    repo=self.task.repo,
                    total=self.task.bytes,
                    offset=offset,
                    origin=source.origin,
                    place=source.place,
                    with_token=bool(source.token),
                    etag=note.etag if note.origin == source.origin else "",
                    checked=self._published is not None,
                    redirected=answer.redirected,
                    endpoint=source.endpoint,
                    commit=self.task.commit,
                    why=answer.why if isinstance(answer, FolderAnswer) else "",
                ),
                self._now(),
            )
            match verdict:
                case Refused(code=code, sentence=sentence):
                    raise _Fault(code, sentence)
                case Later(code=code, sentence=sentence, retry_after_s=pause):
                    raise _Again(code, sentence, pause)
                case Anew(why=why):
                    self._begin_anew(partial, digest)
                    raise _Again(self._unreachable, why)
                case Take():
                    self._take(verdict, answer, source, partial, digest)
        finally:
            answer.close()

    def _ask(self, source: Source, headers: dict[str, str]) -> Reply:
        if source.origin == "folder":
            return FolderAnswer(source.url, self.task.path, headers, self.line)
        return ask(
            source.url,
            headers=headers,
            token=source.token,
            line=self.line,
            silence_s=longest_silence_s(self._bound_s),
            proxies=source.origin != "mirror",
        )

    def _take(
        self, take: Take, answer: Reply, source: Source, partial: Partial, digest: Digest
    ) -> None:
        """Appends the body. Raises CutOff, Stopped, _Fault, with what came before safely appended."""
        if take.offset != partial.size:
            self._begin_anew(partial, digest)
        whole = take.offset == 0
        if whole:
            partial.write_note(Note(origin=source.origin, etag=take.etag))
        self._pieces += 1

        def check_first(first: bytes) -> None:
            self._check_first(first, answer, take)

        while partial.size < self.task.bytes:
            filled = append(
                answer,
                partial,
                digest,
                room=min(
                    pace.largest_read(self._limiter.rate_bytes_s, BUFFER_BYTES),
                    self.task.bytes - partial.size,
                ),
                silence_s=longest_silence_s(self._bound_s),
                check_first=check_first,
            )
            if filled.count:
                self.fetched += filled.count
                self._furthest = max(self._furthest, partial.size)
                self._limiter.spend(filled.count, self.line)
                self._progress_at = time.monotonic()
            self._teller.tell(
                "copying" if source.origin in ("mirror", "folder") else "fetching", partial.size
            )
            if filled.problem is not None:
                raise filled.problem
            if filled.ended:
                break
        self._check_end(whole, answer, take, partial.size)

    def _check_end(self, whole: bool, answer: Reply, take: Take, size: int) -> None:
        """An end that is not that of the file. Raises CutOff, Stopped, _Fault.

        1 all of it came; without a length, nothing may come behind it   2 a server that gives a part of the
        part that was asked: the rest is asked next   3 a shorter file   4 a connection that ended early
        """
        if size == self.task.bytes:  # 1
            if take.length is None and answer.read_into(memoryview(bytearray(1))):
                raise _Fault(codes.SIZE_MISMATCH, f"{self.task.path} goes on behind its size")
        elif not whole and answer.end_is_told:  # 2
            return
        elif answer.end_is_told:  # 3
            raise _Fault(
                codes.SIZE_MISMATCH,
                contents.wrong_size(self.task.path, size, self.task.bytes, self.task.repo),
            )
        else:  # 4
            raise CutOff("the connection ended before the file did")

    def _check_first(self, first: bytes, answer: Reply, take: Take) -> None:
        """What is no model or adapter is not begun, nor what is of another size. Raises _Fault."""
        if not self._begins_right(first):
            raise _Fault(
                contents.wrong_kind(self.task.path),
                contents.not_that(self.task.path, first, answer.headers.get("content-type", "")),
            )
        if take.length is not None and take.length != self.task.bytes:
            raise _Fault(
                codes.SIZE_MISMATCH,
                contents.wrong_size(self.task.path, take.length, self.task.bytes, self.task.repo),
            )

    # -- telling ------------------------------------------------------------------------------------

    def _entry(self, sha256: str) -> Entry:
        task = self.task
        return Entry(
            key=task.key,
            sha256=sha256,
            bytes=task.bytes,
            repo=task.repo,
            commit=task.commit,
            path=task.path,
        )

    def _stored(
        self, sha256: str, origin: Literal["registry", "mirror", "store", "source"]
    ) -> FileStored:
        return FileStored(
            key=self.task.key,
            mirror=self._mirror,
            sha256=sha256,
            bytes=self.task.bytes,
            compared=self._published is not None,
            origin=origin,
        )

    def _filled_up(self) -> str:
        return contents.filled_up(
            self.task.path,
            stored=self._furthest,
            total=self.task.bytes,
            folder=str(self._store.folder),
        )

    def _fault(self, code: str, sentence: str) -> FileFault:
        return FileFault(key=self.task.key, mirror=self._mirror, code=code, sentence=sentence)
