"""An agent that fetches a model's files from a mirror before it starts the engine; the log in memory."""

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from schemas.beacons import MirrorBeacon
from tests.support.agent_yard import SCRIPTED, an_item, beside, memory_yard
from tests.support.aio import run
from tests.support.scripted_mirror import TOKEN, a_manifest, serving_mirror, some_bytes

RUN = (sys.executable, "-I", "-S", str(SCRIPTED), "--port", "${PORT}", "--model", "${SOURCE}")


def an_item_of(replica, manifest, **fields):
    """A replica of a scripted engine whose source is this set."""
    item = an_item(replica, **{k: fields.pop(k) for k in ("stop", "memory_bytes") if k in fields})
    launch = item.launch
    given = {"source": f"mirror:{manifest.key}", "command": RUN, **fields}
    from msgspec.structs import replace

    return replace(item, launch=replace(launch, **given))


@asynccontextmanager
async def announced(hand, *mirrors):
    """These mirrors announce themselves, as real ones do."""

    async def beat():
        while True:
            for n, mirror in enumerate(mirrors):
                name = f"cp{n}"
                await hand.wire.beacon("mirror", name, MirrorBeacon(mirror=name, url=mirror.url))
            await asyncio.sleep(0.05)

    async with beside(beat()):
        yield


def sources_of(pid: int) -> list[str]:
    return [part for part in psutil.Process(pid).cmdline() if part.endswith(".gguf")]


def an_agent(yard, **fields):
    return yard.agent(mirror_token=TOKEN, **fields)


async def started(hand, replica: str) -> Path:
    """The path its ready engine was given."""
    await hand.phase(replica, "ready")
    await hand.expect(lambda: hand.replica(replica).pid, "its pid")
    (path,) = sources_of(hand.replica(replica).pid)
    return Path(path)


def test_files_are_fetched_before_the_engine_starts_on_the_first_of_them(tmp_path):
    shards = (some_bytes(700_001, 1), some_bytes(300_000, 2), some_bytes(5, 3))
    manifest = a_manifest("m", *shards)

    async def story():
        with serving_mirror() as mirror:
            mirror.add(manifest, *shards)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand, mirror):
                    await hand.plan(an_item_of("r-1", manifest))
                    path = await started(hand, "r-1")
                    ready = hand.replica("r-1")
                assert hand.types("r-1")[:3] == [
                    "replica.fetching",
                    "replica.starting",
                    "replica.ready",
                ]
                assert path.name == manifest.files[0].name
                for file, shard in zip(manifest.files, shards, strict=True):
                    assert (path.parent / file.name).read_bytes() == shard
                assert ready.load_s < 5
                assert mirror.sent_bytes == sum(map(len, shards))
                fetching = next(i for i in hand.seen if i.type == "replica.fetching")
                assert fetching.event.source == f"mirror:{manifest.key}"
                assert hand.card().leases[0].holder == "r-1"

    run(story())
