"""What tests of fetches into a mirror's store share: a file that is fetched, and what came of it."""

import os
import threading

from controlplane.domain.reports import FileFault, FileStored
from controlplane.mirror.store import Store
from tests.support.fileserver import Asked, Script, whole_or_rest
from tests.support.mirrors import key_of, model_bytes

MIB = 1024 * 1024
CONTENT = model_bytes(3 * MIB + 17)
PAGE = b"<!doctype html><html><body>Log in to go on</body></html>"


def content_of(store: Store, key: str) -> bytes:
    reading = store.read(key)
    assert reading is not None
    with reading:
        return os.pread(reading.handle, reading.entry.bytes + 1, 0)


def begin_partial(store: Store, content: bytes, path: str = "model.gguf") -> None:
    with store.partial(key_of(path)) as partial:
        partial.append(memoryview(content))


def stored(result: FileStored | FileFault) -> FileStored:
    assert isinstance(result, FileStored), result.sentence
    return result


def fault(result: FileStored | FileFault) -> FileFault:
    assert isinstance(result, FileFault)
    return result


def fetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch ")]


def first_then(first: Script, then: Script) -> Script:
    def script(asked: Asked) -> None:
        (first if asked is asked.server.requests[0] else then)(asked)

    return script


def first_range(wrong: Script, content: bytes) -> Script:
    """`wrong` to the first request for a range, then as it should be."""

    def script(asked: Asked) -> None:
        ranged = [other for other in asked.server.requests if other.offset is not None]
        (wrong if ranged and asked is ranged[0] else whole_or_rest(content))(asked)

    return script
