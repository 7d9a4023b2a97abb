"""An agent on cards a driver tells of: what engines see, what is measured, who is told of, and when a lease ends."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

from nodeagent.cards.nvml import Nvml
from nodeagent.domain.inventory import given_out
from schemas.card import Card, Lease
from schemas.node import CardInfo
from schemas.settings import GIB, MIB
from tests.support import fake_nvml
from tests.support.agent_yard import MemoryYard, a_node, a_stop, alive, an_item, memory_yard
from tests.support.aio import run, until

FIRST, SECOND = fake_nvml.a_card(0)["uuid"], fake_nvml.a_card(1)["uuid"]
CPU = CardInfo(id="cpu", kind="cpu", memory_bytes=4 * GIB, provider="cpu")


class Gpus:
    """Two cards of a made-up driver, and the node that has them."""

    def __init__(self, folder: Path, **first: object) -> None:
        self.path = folder / "nvml.json"
        fake_nvml.write(self.path, fake_nvml.a_card(0, **first), fake_nvml.a_card(1))
        self.provider = Nvml(lambda: fake_nvml.FakeNvml(self.path))
        self.node = a_node(cards=(CPU, *self.provider.cards()))

    def use(self, pid: int | None, memory_bytes: int, device: str = FIRST) -> None:
        assert pid is not None
        # It stays listed when the process is gone: only the test gives the memory back.
        fake_nvml.use(self.path, device, pid, memory_bytes, stays=True)


@asynccontextmanager
async def on_gpus(folder: Path, **first: object):
    gpus = Gpus(folder, **first)
    async with (
        memory_yard(folder) as yard,
        yard.agent(node=gpus.node, gpus=gpus.provider, card_look_s=0.2) as running,
    ):
        yield gpus, yard, running


def on_card(yard: MemoryYard, card: str = "gpu0") -> Card:
    found = yard.hand.card(card)
    assert found is not None
    return found


def lease(yard: MemoryYard, holder: str, card: str = "gpu0") -> Lease | None:
    found = yard.hand.card(card)
    leases = found.leases if found is not None else ()
    return next((one for one in leases if one.holder == holder), None)


def visible(pid: int | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES is in a running process."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    prefix = b"CUDA_VISIBLE_DEVICES="
    return next((e.removeprefix(prefix).decode() for e in environ if e.startswith(prefix)), None)


def item(replica: str, *cards: str, **fields: object):
    return an_item(replica, cards=cards or ("gpu0",), **{"memory_bytes": 8 * GIB, **fields})


def test_an_engine_sees_its_cards_and_one_on_cpu_sees_none(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (_, yard, _):
            await yard.hand.plan(
                item("r-1", "gpu1"),
                item("r-2", "gpu1", "gpu0"),
                an_item("r-3", cards=("cpu",)),
            )
            seen = [
                visible((await yard.hand.phase(name, "ready")).pid)
                for name in ("r-1", "r-2", "r-3")
            ]
            assert seen == [SECOND, f"{SECOND},{FIRST}", ""]

    run(story(), 40.0)


def test_what_an_engine_uses_is_what_the_driver_ties_to_it(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path, untied=400 * MIB) as (gpus, yard, _):
            await yard.hand.plan(item("r-1"))
            gpus.use((await yard.hand.phase("r-1", "ready")).pid, 5 * GIB)
            await yard.hand.expect(
                lambda: yard.hand.replica("r-1").measured_memory_bytes == 5 * GIB,
                "its use is measured",
            )
            await yard.hand.expect(
                lambda: (
                    on_card(yard).used_bytes == 5 * GIB + 400 * MIB
                    and on_card(yard).other_bytes == 400 * MIB
                ),
                "the card tells of it, and of what is nobody's",
            )
            assert on_card(yard).stowaways == ()
            gpus.use(yard.hand.replica("r-1").pid, 0)

    run(story(), 40.0)


def test_a_lease_is_stuck_until_a_reading_shows_the_memory_back(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (gpus, yard, _):
            await yard.hand.plan(item("r-1"))
            pid = (await yard.hand.phase("r-1", "ready")).pid
            gpus.use(pid, 5 * GIB)
            await yard.hand.plan(item("r-1", stop=a_stop(force=True)))
            await yard.hand.phase("r-1", "stopped")
            await yard.hand.expect(
                lambda: (held := lease(yard, "r-1")) is not None and held.stuck,
                "the lease says what is left",
            )
            held = lease(yard, "r-1")
            assert held is not None
            assert held.returning
            assert str(pid) in held.stuck
            assert "5120 MiB of gpu0" in held.stuck
            # Somebody who wants what is stuck there does not get it.
            await yard.hand.plan(item("r-2", memory_bytes=20 * GIB))
            await yard.hand.phase("r-2", "refused")
            gpus.use(pid, 0)
            await yard.hand.expect(lambda: lease(yard, "r-1") is None, "the lease has ended")
            await yard.hand.plan(item("r-3", memory_bytes=20 * GIB))
            await yard.hand.phase("r-3", "ready")

    run(story(), 40.0)


def test_memory_of_an_engine_that_crashed_has_to_come_back_too(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (gpus, yard, _):
            await yard.hand.plan(item("r-1"))
            pid = (await yard.hand.phase("r-1", "ready")).pid
            assert pid is not None
            gpus.use(pid, 5 * GIB)
            os.kill(pid, signal.SIGKILL)
            await yard.hand.phase("r-1", "failed")
            await yard.hand.expect(
                lambda: (held := lease(yard, "r-1")) is not None and held.stuck,
                "the lease says what is left",
            )
            gpus.use(pid, 0)
            await yard.hand.expect(lambda: lease(yard, "r-1") is None, "the lease has ended")

    run(story(), 40.0)


def test_req_d15_a_stowaway_is_reported_when_it_comes_and_goes_and_left_alone(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (_, yard, _):
            stranger = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                fake_nvml.use(tmp_path / "nvml.json", FIRST, stranger.pid, 3 * GIB)
                await yard.hand.expect(
                    lambda: yard.hand.card("gpu0") is not None and on_card(yard).stowaways,
                    "the stowaway is seen",
                )
                (seen,) = on_card(yard).stowaways
                assert (seen.pid, seen.name, seen.memory_bytes) == (stranger.pid, "sleep", 3 * GIB)
                # An engine still fits beside it, and what it takes is not given twice.
                await yard.hand.plan(item("r-1"), item("r-2", memory_bytes=16 * GIB))
                await yard.hand.phase("r-1", "ready")
                assert "free of 23.5 GiB" in (await yard.hand.phase("r-2", "refused")).reason
                assert alive(stranger.pid)
            finally:
                stranger.kill()
                await stranger.wait()
            await yard.hand.expect(lambda: not on_card(yard).stowaways, "the stowaway is gone")
            assert yard.hand.types(noun="card").count("card.stowaway_seen") == 1
            assert yard.hand.types(noun="card").count("card.stowaway_gone") == 1

    run(story(), 40.0)


def test_a_card_that_is_lost_at_run_time_ends_nothing_but_its_figures(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (gpus, yard, running):
            await yard.hand.plan(item("r-1"))
            pid = (await yard.hand.phase("r-1", "ready")).pid
            fake_nvml.change(gpus.path, 0, fault="GPU_IS_LOST")
            await yard.hand.plan(item("r-1"), item("r-2", "gpu1"))
            await yard.hand.phase("r-2", "ready")
            await yard.hand.plan(item("r-1", stop=a_stop(force=True)), item("r-2", "gpu1"))
            await yard.hand.phase("r-1", "stopped")
            await yard.hand.expect(
                lambda: (held := lease(yard, "r-1")) is not None and held.stuck,
                "the lease of a card that cannot be read stays",
            )
            assert not alive(pid)
            assert not running.task.done()
            fake_nvml.change(gpus.path, 0, fault="")
            await yard.hand.expect(lambda: lease(yard, "r-1") is None, "the lease has ended")

    run(story(), 40.0)


def test_nothing_is_given_of_a_card_that_is_divided(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path, mig=True) as (gpus, yard, _):
            assert gpus.node.cards[1].mig
            assert given_out(gpus.node.cards)[1].memory_bytes == 0
            await yard.hand.plan(item("r-1"))
            refused = await yard.hand.phase("r-1", "refused")
            assert refused.reason == "gpu0: divided by MIG and left alone"

    run(story(), 40.0)


async def ask(folder: Path, **fields: object) -> dict:
    """One ask at the agent's door and its first answer."""
    reader, writer = await asyncio.open_unix_connection(folder / "nodeagent" / "cards.sock")
    try:
        writer.write(json.dumps(fields).encode() + b"\n")
        return json.loads(await reader.readline())
    finally:
        writer.close()
        await writer.wait_closed()


def test_req_d15_a_named_lease_explains_its_process_and_ends_when_its_memory_is_back(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (gpus, yard, running):
            await until(running.agent.registered.is_set, "the agent is there")
            granted = await ask(
                tmp_path, ask="acquire", id="l-abcdefgh23", name="ann", cards=["gpu0"]
            )
            assert granted["status"] == "granted", granted
            assert granted["environment"]["CUDA_VISIBLE_DEVICES"] == FIRST
            worker = await asyncio.create_subprocess_exec(
                "sleep", "60", env={**os.environ, "YARD_LEASE": "l-abcdefgh23"}
            )
            try:
                gpus.use(worker.pid, 4 * GIB)
                await yard.hand.expect(
                    lambda: (
                        (card := yard.hand.card("gpu0")) is not None and card.used_bytes == 4 * GIB
                    ),
                    "its use is told",
                )
                assert on_card(yard).other_bytes == 0
                done = await ask(tmp_path, ask="release", what="ann")
                assert done["status"] == "done", done
                await yard.hand.expect(
                    lambda: (held := lease(yard, "l-abcdefgh23")) is not None and held.stuck,
                    "what it still holds is told",
                )
            finally:
                worker.kill()
                await worker.wait()
            gpus.use(worker.pid, 0)
            await yard.hand.expect(
                lambda: lease(yard, "l-abcdefgh23") is None, "the lease has ended"
            )
            assert "card.stowaway_seen" not in yard.hand.types(noun="card")

    run(story(), 40.0)


def test_a_lease_whose_memory_is_not_back_is_still_there_for_the_next_agent(tmp_path):
    async def story() -> None:
        gpus = Gpus(tmp_path)
        async with memory_yard(tmp_path) as yard:

            def agent():
                return yard.agent(node=gpus.node, gpus=gpus.provider, card_look_s=0.2)

            async with agent() as first:
                await yard.hand.plan(item("r-1"))
                pid = (await yard.hand.phase("r-1", "ready")).pid
                gpus.use(pid, 5 * GIB)
                await yard.hand.plan(item("r-1", stop=a_stop(force=True)))
                await yard.hand.phase("r-1", "stopped")
                await yard.hand.plan()
                await first.die()
            async with agent() as second:
                await until(second.agent.registered.is_set, "the next agent is there")
                await yard.hand.plan(item("r-2", memory_bytes=20 * GIB))
                await yard.hand.phase("r-2", "refused")
                await yard.hand.expect(
                    lambda: (held := lease(yard, "r-1")) is not None and held.stuck,
                    "the lease says what is left",
                )
                gpus.use(pid, 0)
                await yard.hand.expect(lambda: lease(yard, "r-1") is None, "the lease has ended")

    run(story(), 40.0)


def test_req_d17_what_does_not_fit_beside_a_stranger_is_refused_with_its_numbers(tmp_path):
    async def story() -> None:
        async with on_gpus(tmp_path) as (gpus, yard, _):
            gpus.use(os.getpid(), 20 * GIB)
            await yard.hand.expect(
                lambda: (card := yard.hand.card("gpu0")) is not None and card.other_bytes > 0,
                "what is nobody's is told",
            )
            await yard.hand.plan(item("r-1"))
            refused = await yard.hand.phase("r-1", "refused")
            assert refused.reason == "gpu0: needs 8.0 GiB, 3.5 GiB free of 23.5 GiB"

    run(story(), 40.0)
