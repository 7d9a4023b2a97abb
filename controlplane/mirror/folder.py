"""Opens the files of a folder of this machine as a server would answer them, so that a fetch takes either alike.

Only regular files that lie in the folder itself: a link is not followed, wherever it leads, and nothing that
could hold up its reader (a pipe, a device) is opened. The folder's files are read, never linked or changed.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Final

from controlplane.mirror.connecting import CutOff, Line, reason

_REGULAR: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-", re.ASCII)

NAMES_MOST: Final = 10_000
"""So many names of a folder are looked at: one with more is nobody's adapter."""


class NotThere(Exception):
    """The folder, or the file in it, does not exist; says which."""


class NotPlain(Exception):
    """It exists and is not what is read: a link, a folder, a device; or it may not be read. Says so."""


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """The descriptor of `folder`. Raises NotThere, NotPlain, OSError of the disk."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _told(error, f"the folder {folder}") from None
    try:
        yield handle
    finally:
        os.close(handle)


def names_in(folder: int) -> list[str]:
    """The names in an opened folder, of anything; at most NAMES_MOST. Raises OSError."""
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            found.append(entry.name)
            if len(found) == NAMES_MOST:
                break
    return found


def open_plain(folder: int, name: str) -> tuple[int, os.stat_result]:
    """The descriptor of the regular file `name` of an opened folder, to be closed, and its status.

    Raises NotThere, NotPlain, OSError of the disk.
    """
    try:
        handle = os.open(name, _REGULAR, dir_fd=folder)
    except OSError as error:
        raise _told(error, name) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise NotPlain(f"{name} is no regular file")
    except (OSError, NotPlain):
        os.close(handle)
        raise
    return handle, status


def _told(error: OSError, what: str) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return NotThere(f"{what} is not there")
        case errno.ELOOP:
            return NotPlain(f"{what} is a link; copy the file itself there")
        case errno.ENOTDIR:
            return NotPlain(f"{what} is no folder")
        case errno.ENXIO | errno.ENODEV:
            return NotPlain(f"{what} is no regular file")
        case errno.EACCES | errno.EPERM:
            return NotPlain(f"{what} may not be read by the control plane's user")
        case _:
            return error


@contextlib.contextmanager
def _waited_for(line: Line) -> Iterator[None]:
    """Around calls that wait for the folder's disk. It is not the mirror's, which may be far away and stand still:
    its failures are those of a connection. Raises CutOff."""
    line.waits_since = time.monotonic()
    try:
        yield
    except OSError as error:
        raise CutOff(f"it could not be read ({reason(error)})") from None
    finally:
        line.waits_since = None


class FolderAnswer:
    """A file of a folder, or the rest of one, in the form of an HTTP answer. Close it.

    Not there is 404, not to be read 403, with the reason in `why`; a range behind the end is 416.
    """

    redirected = False
    end_is_told = True

    def __init__(self, folder: str, name: str, headers: Mapping[str, str], line: Line) -> None:
        """Raises CutOff when the disk fails, Stopped."""
        line.check()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.why = ""
        self._line = line
        self._handle = -1
        self._left = 0
        try:
            with _waited_for(line), opened(folder) as place:
                self._handle, status = open_plain(place, name)
        except NotThere as problem:
            self.status, self.why = 404, str(problem)
            return
        except NotPlain as problem:
            self.status, self.why = 403, str(problem)
            return
        size = status.st_size
        etag = f'"{status.st_ino:x}-{size:x}-{status.st_mtime_ns:x}"'
        asked = _RANGE.fullmatch(headers.get("range", ""))
        offset = int(asked[1]) if asked is not None else 0
        if headers.get("if-range", etag) != etag:
            offset = 0
        self.headers["etag"] = etag
        if offset and offset >= size:
            self.status = 416
            self.headers["content-range"] = f"bytes */{size}"
            return
        self.status = 206 if offset else 200
        if offset:
            self.headers["content-range"] = f"bytes {offset}-{size - 1}/{size}"
        self.headers["content-length"] = str(size - offset)
        self._left = size - offset
        os.lseek(self._handle, offset, os.SEEK_SET)

    def read_into(self, view: memoryview) -> int | None:
        """The next bytes; 0 at the end, also of a file that was cut meanwhile. Raises CutOff, Stopped."""
        self._line.check()
        if self._left == 0:
            return 0
        with _waited_for(self._line):
            count = os.readv(self._handle, [view[: self._left]])
        # It may have taken so long that the fetch was given up meanwhile.
        self._line.check()
        self._left -= count
        return count

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
