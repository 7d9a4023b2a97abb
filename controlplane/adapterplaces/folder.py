"""Finds an adapter in a folder of this machine: reads its configuration, hashes its weights, changes nothing."""

import asyncio
import hashlib
import os
import threading
from typing import Final

from controlplane.adapterplaces.found import Found, Unreadable, check_config
from controlplane.domain.adapterconfig import CONFIG_BYTES
from controlplane.domain.adaptersources import FolderSource, choose, sum_of_contents
from controlplane.domain.filesets import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from controlplane.mirror.folder import NotPlain, NotThere, names_in, open_plain, opened
from controlplane.registry.threads import beside
from schemas.codes import DISK_FAILED, NO_SUCH_FILE, NOT_AN_ADAPTER

CHUNK: Final = 1024 * 1024


class _Stopped(Exception):
    """Nobody wants to know any more."""


async def find(source: FolderSource, *, here: str) -> Found:
    """The adapter in `source`; `here` is what a person calls this machine. Raises Unreadable."""
    stop = threading.Event()
    try:
        return await beside(lambda: _find(source.path, here, stop), "adapter folder")
    except asyncio.CancelledError:
        stop.set()
        raise


def _find(path: str, here: str, stop: threading.Event) -> Found:
    try:
        with opened(path) as folder:
            refusal = choose(path, names_in(folder))
            if refusal is not None:
                raise Unreadable(refusal.code, refusal.sentence)
            config = _config(folder, path)
            size, sha256 = _hashed(folder, path, stop)
    except NotThere as problem:
        raise Unreadable(NO_SUCH_FILE, f"on the machine of {here}, {problem}") from None
    except NotPlain as problem:
        raise Unreadable(NOT_AN_ADAPTER, f"{path} on the machine of {here}: {problem}") from None
    except OSError as error:
        raise Unreadable(DISK_FAILED, f"{path} cannot be read: {error.strerror}") from None
    return Found(
        repo=path,
        commit=sum_of_contents(hashlib.sha256(config).hexdigest(), sha256),
        config=config,
        weights_bytes=size,
        weights_sha256=sha256,
    )


def _config(folder: int, path: str) -> bytes:
    handle, _ = open_plain(folder, ADAPTER_CONFIG)
    with os.fdopen(handle, "rb") as file:
        raw = file.read(CONFIG_BYTES + 1)
    check_config(raw, path)
    return raw


def _hashed(folder: int, path: str, stop: threading.Event) -> tuple[int, str]:
    """Size and sha256 of the weights, as they are read now. Raises OSError, Unreadable, NotThere, NotPlain."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    count = 0
    handle, _ = open_plain(folder, ADAPTER_WEIGHTS)
    with os.fdopen(handle, "rb", buffering=0) as file:
        while read := file.readinto(buffer):
            if stop.is_set():
                raise _Stopped
            digest.update(view[:read])
            count += read
    if count == 0:
        raise Unreadable(NOT_AN_ADAPTER, f"{path}/{ADAPTER_WEIGHTS} is empty")
    return count, digest.hexdigest()
