"""A serve job under kill -9 at ten byte marks and four step events: it completes, and little is fetched twice."""

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from controlplane.ctl import supervisor
from tests.hub.server import Hub
from tests.support.aio import run
from tests.system.hubs import (
    FILE,
    MIB,
    REPO,
    SMALL,
    Toll,
    begin,
    hub_of,
    key_of,
    kill,
    model_of,
    over,
    seed,
    sent,
    sha256_of,
    step_of,
    tell,
    toll,
)
from tests.system.yard import SystemYard, system_yard

# Large enough that every mark lies in a chunk of its own; 1024 is what a person tries before a release.
SIZE = int(os.environ.get("YARD_SERVE_MIB", "256")) * MIB
ROUNDS = int(os.environ.get("YARD_SERVE_ROUNDS", "1"))
"""In three rounds with one seed each part dies at each point; one round takes a minute or two."""
PER_KILL = 8 * MIB
PARTS = ("controlplane", "nodeagent", "nats")
# Of the file: where a kill happens on its way from the registry to the mirror, and from there to the node.
TO_MIRROR = (0.0, 0.02, 0.25, 0.5, 0.75, 0.98)
TO_NODE = (0.02, 0.4, 0.75, 0.98)
# Of the job: step and state, in order, with the place among the steps.
AT_STEPS = (
    ("registry", "running", 0),
    ("catalog", "done", 4),
    ("placement", "running", 5),
    ("smoke test", "running", 6),
)
POINTS = len(TO_MIRROR) + len(TO_NODE) + len(AT_STEPS)


class Kills:
    """Which part dies at which point, by the seed: over three rounds each part at each point."""

    def __init__(self, yard: SystemYard, chance: random.Random, round_: int) -> None:
        order = list(PARTS)
        chance.shuffle(order)
        # In turns: on each way of the file each part dies at one mark at least, in every round.
        self._parts = [order[(point + round_) % 3] for point in range(POINTS)]
        self._yard = yard
        self._began = time.monotonic()
        self.count = 0
        self.ways = {"mirror": 0, "node": 0}

    async def next(self, where: str, way: str) -> None:
        """The next kill; `way` is the way of the file that it may make longer."""
        part = self._parts[self.count]
        tell(f"{time.monotonic() - self._began:6.1f} s  kill -9 {part} at {where}")
        self.count += 1
        self.ways[way] += 1
        await kill(self._yard, part)


async def through_the_kills(yard: SystemYard, hub: Hub, way: Toll, kills: Kills, job: str) -> None:
    """Kills at every point, in the order in which a job comes by them."""
    await step_of(yard, job, "registry", "running", index=0)
    await kills.next("registry running", "mirror")
    await step_of(yard, job, "mirror", "running", index=2, timeout_s=60)
    path = f"{REPO}/{FILE}"
    before = hub.counters.bytes_of(path)
    for mark in TO_MIRROR:
        await sent(hub, path, before + int(mark * SIZE), 120)
        await kills.next(f"{mark:.0%} to the mirror", "mirror")
    await step_of(yard, job, "catalog", "done", index=4, timeout_s=120)
    await kills.next("catalog done", "mirror")
    await step_of(yard, job, "placement", "running", index=5)
    await kills.next("placement running", "node")
    for mark in TO_NODE:
        await way.counted(int(mark * SIZE), 120)
        await kills.next(f"{mark:.0%} to the node", "node")
    await step_of(yard, job, "smoke test", "running", index=6, timeout_s=120)
    await kills.next("smoke test running", "node")
    assert kills.count == POINTS


@pytest.mark.timeout(400)
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_req_c3_a_job_completes_whatever_is_killed_wherever_it_stands(
    round_: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.2,))
    tell(f"YARD_SEED={seed()}")
    chance = random.Random(seed())

    async def story(hub: Hub) -> None:
        content = model_of(SIZE, seed=5)
        commit = hub.repo(REPO).commit({FILE: content})
        published = await asyncio.to_thread(lambda: content.sha256)
        async with toll(bytes_per_s=200 * MIB) as way:
            settings = {"controlplane": {"mirror_url": way.url}, "nodeagent": {"mirror_folder": ""}}
            async with system_yard(tmp_path, settings=settings) as yard:
                way.lead_to(yard.running.yard.api_port)
                kills = Kills(yard, chance, round_)
                job = await begin(yard, REPO, "--file", FILE, "--name", "big", *SMALL)
                # Somebody watches from the beginning to the end, whatever goes away under it.
                watching = asyncio.create_task(yard.ctl("job", "watch", job))
                await through_the_kills(yard, hub, way, kills, job)
                done = await over(yard, job, timeout_s=120)
                assert (done.state, done.attempt) == ("done", 1), done
                told = await asyncio.wait_for(watching, 60)
                for said in (
                    "registry    done",
                    "mirror      done",
                    "catalog     done",
                    done.reply,
                ):
                    assert said in told, told
                # Told by progress, not by events: the log has room for few of one subject.
                assert len([e for e in yard.events if e.key == (job,)]) < 48
                asked = hub.counters.bytes_of(f"{REPO}/{FILE}")
                tell(
                    f"from the registry {asked / MIB:.1f} MiB, to the node {way.passed / MIB:.1f} MiB"
                )
                assert asked <= SIZE + PER_KILL * kills.ways["mirror"]
                assert way.passed <= SIZE + PER_KILL * kills.ways["node"]
                mirrored = tmp_path / "mirror" / "blobs" / published
                assert await asyncio.to_thread(sha256_of, mirrored) == published
                (fetched,) = (tmp_path / "files" / "blobs").iterdir()
                assert await asyncio.to_thread(sha256_of, fetched) == published
                assert key_of(commit) in await yard.ctl("mirror", "list", "-o", "json")

    with hub_of(monkeypatch, bytes_per_s=150 * MIB) as hub:
        run(story(hub), 390)
