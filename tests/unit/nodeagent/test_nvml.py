"""What the NVIDIA provider makes of a driver's answers, its errors among them."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeagent.cards.nvml import DISPLAY_BYTES, Nvml
from schemas.settings import GIB, MIB
from tests.support import fake_nvml
from tests.support.fake_nvml import FakeNvml, a_card, change, use, write

HERE = os.getpid()
NOBODY = 2**22 + 7
"""A number no process of this machine has."""


class Machine:
    """A made-up driver and the provider on it."""

    def __init__(self, folder: Path, *cards: dict, fault: str = "") -> None:
        self.path = folder / "nvml.json"
        write(self.path, *cards, fault=fault)
        self.library = FakeNvml(self.path)
        self.provider = Nvml(lambda: self.library)
        self.cards = self.provider.cards()

    def use(self, number: int, pid: int, memory_bytes: int, kind: str = "compute") -> None:
        use(self.path, a_card(number)["uuid"], pid, memory_bytes, kind=kind, stays=True)

    def fault(self, name: str) -> None:
        with fake_nvml.changing(self.path) as state:
            state["fault"] = name


def test_cards_are_numbered_by_their_pci_addresses_and_known_by_uuid(tmp_path):
    machine = Machine(tmp_path, a_card(2), a_card(0, name="NVIDIA First"), a_card(1))
    assert [card.id for card in machine.cards] == ["gpu0", "gpu1", "gpu2"]
    first = machine.cards[0]
    assert first.pci == "00000000:01:00.0"
    assert first.device == a_card(0)["uuid"]
    assert (first.name, first.kind, first.provider) == ("NVIDIA First", "gpu", "nvml")


def test_what_the_driver_keeps_for_itself_is_not_given(tmp_path):
    (card,) = Machine(tmp_path, a_card(0, total=24 * GIB, reserved=700 * MIB)).cards
    assert card.memory_bytes == 24 * GIB - 700 * MIB


def test_an_old_driver_that_tells_no_reserve_is_read_all_the_same(tmp_path):
    machine = Machine(tmp_path, a_card(0, old=True))
    assert machine.cards[0].memory_bytes == 24 * GIB
    machine.use(0, HERE, GIB)
    assert machine.provider.read({})["gpu0"].used_bytes == GIB + 512 * MIB


@pytest.mark.parametrize(
    "fault", ["DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "NO_PERMISSION", "UNKNOWN"]
)
def test_no_driver_is_no_error_and_no_card(tmp_path, caplog, fault):
    with caplog.at_level(logging.INFO):
        machine = Machine(tmp_path, a_card(0), fault=fault)
    assert machine.cards == ()
    assert machine.provider.read({}) == {}
    assert [record.message for record in caplog.records] == ["no NVIDIA cards are used"]


def test_a_missing_library_is_no_error(caplog):
    def load():
        raise ImportError("No module named 'pynvml'")

    with caplog.at_level(logging.INFO):
        assert Nvml(load).cards() == ()
    assert "cannot be loaded" in caplog.records[0].reason


def test_the_real_library_without_a_driver_is_no_error():
    """Whatever this machine has, the module of the package itself answers and nothing is raised."""
    provider = Nvml()
    assert isinstance(provider.cards(), tuple)
    provider.close()
    assert "pynvml" in sys.modules


def test_a_driver_that_does_not_fit_the_library_is_a_fault_like_any_other(tmp_path):
    class Mismatch(Exception):
        pass

    Mismatch.__module__ = "fake_nvml"
    machine = Machine(tmp_path, a_card(0))

    def refuse(_handle: str) -> list:
        raise Mismatch("the library is older than the driver")

    machine.library.nvmlDeviceGetComputeRunningProcesses = refuse  # type: ignore[method-assign]
    assert machine.provider.read({})["gpu0"].strangers == ()


def test_a_card_that_cannot_be_read_at_the_start_keeps_its_number(tmp_path):
    machine = Machine(tmp_path, a_card(0), a_card(1))
    library = FakeNvml(machine.path)
    real = library.nvmlDeviceGetMemoryInfo

    def ill(handle: str, version: int | None = None) -> SimpleNamespace:
        if handle == a_card(0)["uuid"]:
            raise fake_nvml.NVMLError("UNKNOWN")
        return real(handle, version)

    library.nvmlDeviceGetMemoryInfo = ill  # type: ignore[method-assign]
    assert [card.id for card in Nvml(lambda: library).cards()] == ["gpu1"]


def test_a_card_divided_by_mig_is_shown_and_nobody_there_is_a_stranger(tmp_path):
    machine = Machine(tmp_path, a_card(0, mig=True), a_card(1, mig=None))
    assert [card.mig for card in machine.cards] == [True, False]
    machine.use(0, HERE, GIB)
    reading = machine.provider.read({})["gpu0"]
    assert (reading.used_bytes, reading.strangers) == (GIB, ())


def test_uses_are_told_apart_by_holder_and_what_is_nobodys_is_other(tmp_path):
    machine = Machine(tmp_path, a_card(0, untied=100 * MIB))
    machine.use(0, 1001, 2 * GIB)
    machine.use(0, 1002, GIB)
    machine.use(0, 1003, 3 * GIB)
    reading = machine.provider.read({"r-1": frozenset((1001, 1002)), "r-2": frozenset((5,))})[
        "gpu0"
    ]
    assert reading.of == {"r-1": 3 * GIB}
    assert reading.used_bytes == 6 * GIB + 100 * MIB
    assert reading.other_bytes == 3 * GIB + 100 * MIB
    assert reading.unexplained_bytes == 100 * MIB


def test_req_d15_a_process_without_a_lease_is_a_stranger_with_its_name(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.use(0, HERE, GIB)
    machine.use(0, NOBODY, GIB)
    here, away = machine.provider.read({})["gpu0"].strangers
    assert (here.pid, here.memory_bytes, here.here) == (HERE, GIB, True)
    assert here.name
    # One of another container: only the driver knows it.
    assert (away.pid, away.here, away.name) == (NOBODY, False, f"elsewhere-{NOBODY}")


def test_the_desktop_is_no_stranger_and_a_game_is(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.use(0, 1001, DISPLAY_BYTES - 1, kind="graphics")
    machine.use(0, 1002, DISPLAY_BYTES, kind="graphics")
    reading = machine.provider.read({})["gpu0"]
    assert [seen.pid for seen in reading.strangers] == [1002]
    assert reading.other_bytes == 2 * DISPLAY_BYTES - 1


def test_a_process_that_computes_and_draws_counts_once(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.use(0, 1001, 2 * GIB, kind="graphics")
    with fake_nvml.changing(machine.path) as state:
        both = {**state["cards"][0]["processes"][0], "kind": "compute", "bytes": 0}
        state["cards"][0]["processes"].append(both)
    (seen,) = machine.provider.read({})["gpu0"].strangers
    assert seen.memory_bytes == 2 * GIB


def test_clients_of_mps_are_seen(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.use(0, 1001, GIB, kind="mps")
    assert machine.provider.read({"r-1": frozenset((1001,))})["gpu0"].of == {"r-1": GIB}


def test_a_driver_that_lists_no_processes_leaves_the_use_unexplained(tmp_path):
    machine = Machine(tmp_path, a_card(0, lists=False))
    machine.use(0, HERE, GIB)
    reading = machine.provider.read({"r-1": frozenset((HERE,))})["gpu0"]
    assert (reading.of, reading.strangers, reading.unexplained_bytes) == ({}, (), GIB)


def test_a_card_that_falls_off_the_bus_has_no_reading_and_the_other_has(tmp_path, caplog):
    machine = Machine(tmp_path, a_card(0), a_card(1))
    change(machine.path, 0, fault="GPU_IS_LOST")
    assert set(machine.provider.read({})) == {"gpu1"}
    assert set(machine.provider.read({})) == {"gpu1"}
    told = [record.message for record in caplog.records]
    assert told == ["a card cannot be read"], "said once, not at every look"
    change(machine.path, 0, fault="")
    assert set(machine.provider.read({})) == {"gpu0", "gpu1"}


def test_a_driver_that_is_replaced_at_run_time_is_opened_anew(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.fault("LIB_RM_VERSION_MISMATCH")
    assert machine.provider.read({}) == {}
    assert machine.provider.cards() == machine.cards
    machine.fault("")
    # What a new driver does not know is a handle of the one before.
    machine.library.handles.clear()
    assert "gpu0" in machine.provider.read({})
    assert machine.library.open == 1


def test_another_card_in_the_same_place_is_not_taken_for_it(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    machine.provider.close()
    change(machine.path, 0, uuid="GPU-another")
    assert machine.provider.read({}) == {}


def test_a_card_that_is_let_go_is_not_open_and_not_read(tmp_path):
    machine = Machine(tmp_path, a_card(0), a_card(1))
    machine.provider.read({})
    machine.provider.let_go(frozenset(("gpu0",)))
    assert set(machine.provider.read({})) == {"gpu1"}
    assert machine.library.handles == {a_card(1)["uuid"]}
    machine.provider.let_go(frozenset())
    assert set(machine.provider.read({})) == {"gpu0", "gpu1"}


def test_an_engine_is_shown_its_cards_by_uuid_in_their_order(tmp_path):
    machine = Machine(tmp_path, a_card(0), a_card(1), a_card(2))
    shown = machine.provider.environment(("gpu2", "gpu0"))
    uuids = [a_card(2)["uuid"], a_card(0)["uuid"]]
    assert shown == {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}


def test_the_memory_of_a_dead_process_is_free_in_the_made_up_driver_too(tmp_path):
    machine = Machine(tmp_path, a_card(0))
    use(machine.path, a_card(0)["uuid"], NOBODY, GIB)
    assert machine.provider.read({})["gpu0"].used_bytes == 0


def test_a_card_in_a_vm_keeps_its_number_for_when_it_comes_back(tmp_path):
    """The driver sees one card of two; the other's place is known from the kernel."""

    def device(bus: int, vendor: str, kind: str, driver: str) -> None:
        folder = tmp_path / "devices" / f"0000:{bus:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        (folder / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")

    device(1, "0x10de", "0x030000", "vfio-pci")
    device(2, "0x10de", "0x030000", "nvidia")
    device(0, "0x8086", "0x030000", "vfio-pci")  # not one of these cards
    path = tmp_path / "nvml.json"
    write(path, a_card(1))
    library = FakeNvml(path)
    assert [c.id for c in Nvml(lambda: library, tmp_path / "devices").cards()] == ["gpu1"]


def test_any_process_can_be_given_the_made_up_driver(tmp_path):
    """How tests of whole processes have cards: the fake in the place of the library, by PYTHONPATH."""
    path = tmp_path / "nvml.json"
    write(path, a_card(0))
    code = "from nodeagent.cards.nvml import Nvml; print([card.id for card in Nvml().cards()])"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, fake_nvml.STATE: str(path), "PYTHONPATH": f"{fake_nvml.SHADOW}:."},
    )
    assert shown.stdout == "['gpu0']\n", shown.stderr
