"""The meter over all cards: what it tells, how often, what a holder still has, and what a hanging driver costs."""

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from nodeagent.cards.meter import CardMeter, counted_on
from nodeagent.cards.nvml import Nvml
from nodeagent.cards.provider import Reading
from nodeagent.cards.static import Static
from nodeagent.census import Census
from nodeagent.processes import Process
from schemas.card import Card, Lease, ProcessRef, Vm
from schemas.node import CardInfo
from schemas.settings import GIB, MIB
from tests.support import aio, fake_nvml

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HERE = os.getpid()
FIRST = fake_nvml.a_card(0)["uuid"]
SECOND = fake_nvml.a_card(1)["uuid"]


class Node:
    """Two cards of a made-up driver, one declared card, `cpu`; processes and leases as a test says."""

    def __init__(self, folder: Path, look_s: float = 60.0, timeout_s: float = 5.0) -> None:
        self.path = folder / "nvml.json"
        fake_nvml.write(self.path, fake_nvml.a_card(0, untied=200 * MIB), fake_nvml.a_card(1))
        self.library = fake_nvml.FakeNvml(self.path)
        nvml = Nvml(lambda: self.library)
        infos = (
            CardInfo(id="cpu", kind="cpu", memory_bytes=8 * GIB, provider="cpu"),
            *nvml.cards(),
            CardInfo(id="old", kind="gpu", memory_bytes=4 * GIB),
        )
        self.cards = {
            info.id: Card(
                node="n",
                id=info.id,
                kind=info.kind,
                memory_bytes=info.memory_bytes,
                rev=1,
                provider=info.provider,
                device=info.device,
            )
            for info in infos
        }
        self.pids: dict[str, frozenset[int]] = {}
        self.alive: dict[int, int] = {}
        self.told: list[Reading] = []
        self.looks = 0
        self.meter = CardMeter(
            infos=infos,
            providers=(Static(infos, lambda: counted_on(self.cards)), nvml),
            census=self.census,
            cards=lambda: self.cards,
            tell=self.told.append,
            look_s=look_s,
            timeout_s=timeout_s,
        )

    async def census(self, _: object, leases: Mapping[str, ProcessRef | None]) -> Census:
        self.looks += 1
        live = {pid: Process(pid, "S", 1, pid, pid, start) for pid, start in self.alive.items()}
        return Census(
            live,
            {holder: pids for holder, pids in self.pids.items() if holder.startswith("r-")},
            {lease: self.pids.get(lease, frozenset()) for lease in leases},
        )

    def lease(self, card: str, holder: str = "r-1", **fields) -> None:
        given = {"memory_bytes": 8 * GIB, "fence": 1, "since": NOW, **fields}
        rest = tuple(x for x in self.cards[card].leases if x.holder != holder)
        lease = Lease(holder=holder, **given)
        self.cards[card] = replace(self.cards[card], leases=(*rest, lease))

    def runs(self, holder: str, *pids: int, started: int = 1) -> None:
        self.pids[holder] = frozenset(pids)
        self.alive.update(dict.fromkeys(pids, started))

    def dies(self, *pids: int) -> None:
        for pid in pids:
            self.alive.pop(pid, None)

    def use(self, pid: int, memory_bytes: int, device: str = FIRST) -> None:
        fake_nvml.use(self.path, device, pid, memory_bytes, stays=True)


def of(readings: tuple[Reading, ...], card: str) -> Reading:
    return next(reading for reading in readings if reading.card == card)


@asynccontextmanager
async def running(meter: CardMeter):
    task = asyncio.create_task(meter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_one_look_reads_every_card_of_every_provider(tmp_path):
    node = Node(tmp_path)
    readings = aio.run(node.meter.look())
    assert {reading.card for reading in readings} == {"cpu", "gpu0", "gpu1", "old"}
    assert of(readings, "gpu0").used_bytes == 200 * MIB
    assert node.looks == 0, "nobody holds anything, so nobody has to be found"


def test_a_replica_has_what_the_driver_ties_to_it_on_each_of_its_cards(tmp_path):
    node = Node(tmp_path)
    for card in ("gpu0", "gpu1"):
        node.lease(card)
    node.runs("r-1", 501, 502)
    node.use(501, 3 * GIB)
    node.use(502, GIB, SECOND)

    async def asked() -> tuple[int, int, int, int]:
        meter = node.meter
        held = [await meter.held_by("r-1", card) for card in ("gpu0", "gpu1", "cpu")]
        return held[0], held[1], held[2], await meter.use("r-1")

    assert aio.run(asked()) == (3 * GIB, GIB, 0, 4 * GIB)


def test_what_an_engine_has_in_ram_counts_on_cpu_and_on_declared_cards(tmp_path):
    node = Node(tmp_path)
    node.lease("cpu", "r-1")
    node.lease("old", "r-2")
    node.runs("r-1", HERE)
    node.runs("r-2", HERE)
    readings = aio.run(node.meter.look())
    assert of(readings, "cpu").of["r-1"] > MIB
    assert of(readings, "old").of["r-2"] > MIB
    assert "r-2" not in of(readings, "cpu").of


def test_a_parked_engine_counts_on_cpu_only_and_not_on_a_card_without_a_meter(tmp_path):
    node = Node(tmp_path)
    node.lease("old")
    node.lease("cpu", kind="parked")
    node.runs("r-1", HERE)

    async def asked() -> tuple[int, int, int]:
        meter = node.meter
        held = [await meter.held_by("r-1", card) for card in ("old", "cpu")]
        return held[0], held[1], await meter.use("r-1")

    on_card, in_ram, use = aio.run(asked())
    assert on_card == 0
    assert in_ram > MIB
    assert use == 0, "what it has where it is parked is not what it uses when it runs"


def test_req_d15_a_stowaway_is_told_after_two_readings_and_never_twice_unsaid(tmp_path):
    node = Node(tmp_path)
    node.use(HERE, 2 * GIB)

    async def looks() -> None:
        await node.meter.look()
        assert [seen for told in node.told for seen in told.strangers] == []
        node.told.clear()
        async with running(node.meter):
            await aio.until(
                lambda: any(told.strangers for told in node.told), "the stowaway is told", 5.0
            )
        stranger = next(told.strangers[0] for told in node.told if told.strangers)
        assert (stranger.pid, stranger.memory_bytes) == (HERE, 2 * GIB)

    aio.run(looks())


def test_a_card_is_told_of_once_a_second_however_often_it_is_looked_at(tmp_path):
    node = Node(tmp_path)

    async def looks() -> list[str]:
        for _ in range(5):
            await node.meter.look()
        early = [told.card for told in node.told]
        # The rest is told later, by itself: nothing that was read is lost.
        node.told.clear()
        async with running(node.meter):
            await aio.until(
                lambda: {told.card for told in node.told} >= {"gpu0", "old"}, "the rest is told"
            )
        return early

    assert sorted(aio.run(looks())) == ["cpu", "gpu0", "gpu1", "old"]


def test_a_node_without_gpus_where_nothing_is_held_is_not_looked_at(tmp_path):
    info = CardInfo(id="cpu", kind="cpu", memory_bytes=GIB, provider="cpu")
    cards = {"cpu": Card(node="n", id="cpu", kind="cpu", memory_bytes=GIB, rev=1, provider="cpu")}
    told: list[Reading] = []

    async def nobody(*_: object) -> Census:
        raise AssertionError("nothing is held")

    meter = CardMeter(
        infos=(info,),
        providers=(Static((info,), dict),),
        census=nobody,
        cards=lambda: cards,
        tell=told.append,
        look_s=0.01,
    )

    async def idle() -> None:
        async with running(meter):
            woken = asyncio.Event()
            asyncio.get_running_loop().call_later(0.1, woken.set)
            await woken.wait()

    aio.run(idle())
    assert told == []


def test_a_lease_is_not_back_while_the_driver_still_lists_a_dead_process(tmp_path):
    node = Node(tmp_path)
    node.lease("gpu0")
    node.runs("r-1", 501)
    node.use(501, 3 * GIB)

    async def story() -> None:
        await node.meter.look()
        node.dies(501)
        node.pids["r-1"] = frozenset()
        node.lease("gpu0", returning=True)
        left = await node.meter.left("r-1", "gpu0")
        assert left.memory_bytes == 3 * GIB
        assert left.told == "its processes (501) still hold 3072 MiB of gpu0"
        node.use(501, 0)
        assert (await node.meter.left("r-1", "gpu0")).memory_bytes == 0

    aio.run(story())


def test_a_number_that_another_process_got_is_not_the_holders_any_more(tmp_path):
    node = Node(tmp_path)
    node.lease("gpu0")
    node.runs("r-1", 501)
    node.use(501, 3 * GIB)

    async def story() -> int:
        await node.meter.look()
        node.pids["r-1"] = frozenset()
        node.alive[501] = 9
        node.lease("gpu0", returning=True)
        return await node.meter.held_by("r-1", "gpu0")

    assert aio.run(story()) == 0


def test_a_lease_is_not_back_while_memory_it_had_is_used_by_nobody(tmp_path):
    """A process that is being taken down leaves the list before its memory is back."""
    node = Node(tmp_path)
    node.lease("gpu0")
    node.runs("r-1", 501)

    async def story() -> None:
        await node.meter.look()
        node.use(501, 3 * GIB)
        await node.meter.look()
        node.dies(501)
        node.lease("gpu0", returning=True)
        node.use(501, 0)
        fake_nvml.change(node.path, 0, untied=200 * MIB + 2 * GIB)
        left = await node.meter.left("r-1", "gpu0")
        assert left.memory_bytes == 2 * GIB
        assert "2048 MiB of gpu0 are not back" in left.told
        # Looks in between must not make that the usual state of the card.
        for _ in range(3):
            await node.meter.look()
        assert (await node.meter.left("r-1", "gpu0")).memory_bytes == 2 * GIB
        fake_nvml.change(node.path, 0, untied=230 * MIB)
        assert (await node.meter.left("r-1", "gpu0")).memory_bytes == 0

    aio.run(story())


def test_a_card_that_cannot_be_read_gives_nothing_back(tmp_path):
    node = Node(tmp_path)
    node.lease("gpu0")
    node.runs("r-1", 501)
    node.use(501, GIB)

    async def story() -> None:
        await node.meter.look()
        node.lease("gpu0", returning=True)
        fake_nvml.change(node.path, 0, fault="GPU_IS_LOST")
        left = await node.meter.left("r-1", "gpu0")
        assert left.memory_bytes == GIB
        assert left.told == "gpu0 cannot be read, so nothing is known to be back"

    aio.run(story())


def test_a_card_this_machine_has_no_more_has_nothing_left(tmp_path):
    assert aio.run(Node(tmp_path).meter.held_by("r-1", "gone")) == 0


def test_a_driver_that_hangs_costs_its_cards_their_readings_and_nobody_anything_else(tmp_path):
    node = Node(tmp_path, timeout_s=0.05)
    held = threading.Event()
    real = node.library.nvmlDeviceGetMemoryInfo

    def hang(*args):
        held.wait(20)
        return real(*args)

    node.library.nvmlDeviceGetMemoryInfo = hang  # type: ignore[method-assign]

    async def story() -> None:
        try:
            first = await node.meter.look()
            second = await node.meter.look()
            assert [reading.card for reading in first] == ["cpu", "old"]
            assert [reading.card for reading in second] == ["cpu", "old"]
        finally:
            held.set()

        async def is_back() -> bool:
            return any(reading.card == "gpu0" for reading in await node.meter.look())

        await aio.until(is_back, "the driver answers again")

    aio.run(story())


def test_a_vms_card_is_let_go_once_no_engine_is_on_it(tmp_path):
    node = Node(tmp_path)
    node.lease("gpu0")
    vm = Vm(name="win", since=NOW)

    async def story() -> None:
        node.cards["gpu0"] = replace(node.cards["gpu0"], vm=vm)
        assert of(await node.meter.look(), "gpu0").used_bytes > 0
        node.cards["gpu0"] = replace(node.cards["gpu0"], leases=())
        assert "gpu0" not in {reading.card for reading in await node.meter.look()}
        assert node.library.handles == {SECOND}

    aio.run(story())


def test_an_engine_sees_its_gpus_on_cpu_none_and_on_an_unknown_device_what_there_is(tmp_path):
    shown = Node(tmp_path).meter.environment
    assert shown(("gpu1",)) == {"CUDA_VISIBLE_DEVICES": SECOND}
    assert shown(("gpu1", "gpu0")) == {"CUDA_VISIBLE_DEVICES": f"{SECOND},{FIRST}"}
    assert shown(("cpu",)) == {"CUDA_VISIBLE_DEVICES": ""}
    assert shown(("old",)) == {}


def test_a_declared_card_in_the_place_of_a_found_one_is_measured_in_ram_and_seen_by_uuid(
    tmp_path,
):
    path = tmp_path / "nvml.json"
    fake_nvml.write(path, fake_nvml.a_card(0, untied=GIB))
    nvml = Nvml(lambda: fake_nvml.FakeNvml(path))
    info = replace(nvml.cards()[0], provider="static")
    meter = CardMeter(
        infos=(info,),
        providers=(Static((info,), dict), nvml),
        census=Node(tmp_path).census,
        cards=dict,
        tell=lambda _: None,
        look_s=1.0,
    )
    (reading,) = aio.run(meter.look())
    assert reading.used_bytes == 0
    assert meter.environment(("gpu0",)) == {"CUDA_VISIBLE_DEVICES": FIRST}


def test_where_ram_counts_follows_from_the_leases():
    def card(id: str, provider: str, *leases: Lease) -> Card:
        return Card(
            node="n", id=id, kind="gpu", memory_bytes=GIB, rev=1, provider=provider, leases=leases
        )

    def lease(holder: str, kind: str = "replica") -> Lease:
        return Lease(holder=holder, memory_bytes=1, fence=1, since=NOW, kind=kind)

    cards = {
        "cpu": card("cpu", "cpu", lease("r-1"), lease("r-2", "parked")),
        "old": card("old", "static", lease("r-2"), lease("r-3")),
        "new": card("new", "static", lease("r-3")),
        "gpu0": card("gpu0", "nvml", lease("r-4")),
    }
    assert counted_on(cards) == {"r-1": ("cpu",), "r-2": ("cpu",), "r-3": ("new", "old")}


def test_nothing_is_missing_of_who_stayed_beside_a_vm_though_its_card_cannot_be_read(tmp_path):
    """Only who does not hold the device any more stays there, so a parked copy that ends has left it."""
    node = Node(tmp_path)
    node.runs("r-1", 70)
    node.use(70, GIB)

    async def story():
        node.lease("gpu0")
        assert (await node.meter.left("r-1", "gpu0")).memory_bytes == GIB
        node.lease("gpu0", kind="parked", memory_bytes=0, returning=True)
        node.dies(70)
        vm = Vm(name="win", since=NOW)
        node.cards["gpu0"] = replace(node.cards["gpu0"], vm=vm)
        node.use(70, 0)
        node.cards["gpu0"] = replace(node.cards["gpu0"], vm=replace(vm, attached=True))
        assert await node.meter.held_by("r-1", "gpu0") == 0

    aio.run(story())
