"""A process that opens a store and fetches one file into it, to be killed: `mirror_fetcher FOLDER URL BYTES SHA256`.

It prints `stored` and the origin when the file is there and settled.
"""

import asyncio
import sys
from pathlib import Path

from controlplane.domain.reports import FileStored
from controlplane.mirror.domain.sources import sources_of
from controlplane.mirror.fetching import Fetcher
from controlplane.mirror.store import Store
from schemas.settings import ControlplaneSettings
from tests.support.mirrors import task_for


async def main(folder: str, url: str, size: str, sha256: str) -> None:
    store = Store(Path(folder), keep_free_bytes=0)
    store.open()
    task = task_for(b"", bytes=int(size), sha256=sha256 or None)
    fetcher = Fetcher(store, mirror="killed", settings=ControlplaneSettings())
    sources = sources_of(task, mirrors={}, mirror_token="", endpoint=url, registry_token=None)
    result = await fetcher.fetch(task, sources=sources)
    await fetcher.settled()
    said = result.origin if isinstance(result, FileStored) else result.sentence
    sys.stdout.write(f"stored {said}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
