"""Finds the NVIDIA cards of this machine and reads them through the driver's own library.

It only looks: no setting, no mode and no process is touched. What the driver will not tell is no fault of
the agent: a machine without a driver has no cards, and a card that cannot be read has no reading.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from nodeagent.cards.provider import Reading, Seen
from schemas.card import Provider as ProviderName
from schemas.node import CardInfo
from schemas.settings import GIB

LOG = logging.getLogger(__name__)

DISPLAY_BYTES: Final = GIB
"""A process that draws and uses less than this belongs to the desktop and is no stranger: else no card
with a screen would ever be free. A game that did not announce itself uses more."""


PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
NVIDIA: Final = "0x10de"


class DriverFault(Exception):
    """The driver does not tell. The text is its own word for why."""


class _Shown(Struct, frozen=True, kw_only=True):
    """A process as the driver lists it: what it uses, and whether it draws."""

    pid: int
    memory_bytes: int
    draws: bool


class Nvml:
    """The cards of one machine. Not to be used from two threads at once."""

    name: ProviderName = "nvml"

    def __init__(self, load: Callable[[], Any] | None = None, devices: Path = PCI_DEVICES) -> None:
        """`load` gives the library; by default the module of nvidia-ml-py, loaded when first needed.
        `devices` is where the kernel shows the devices of the machine."""
        self._load = load or _pynvml
        self._devices = devices
        self._library: Any = None
        self._open = False
        self._infos: dict[str, CardInfo] = {}
        self._handles: dict[str, Any] = {}
        self._away: frozenset[str] = frozenset()
        self._silent: set[str] = set()

    def cards(self) -> tuple[CardInfo, ...]:
        """The cards in order of their PCI addresses. The first call looks for them, for good: a card keeps
        its number as long as the agent lives."""
        if not self._infos:
            try:
                self._infos = {info.id: info for info in self._find()}
            except DriverFault as fault:
                LOG.info("no NVIDIA cards are used", extra={"reason": str(fault)})
        return tuple(self._infos.values())

    def read(self, holders: Mapping[str, frozenset[int]]) -> dict[str, Reading]:
        """A reading of each card the driver tells of now."""
        readings: dict[str, Reading] = {}
        owners = {pid: holder for holder, pids in holders.items() for pid in pids}
        wanted = [info for info in self._infos.values() if info.id not in self._away]
        for info in wanted:
            try:
                readings[info.id] = self._read(info, owners)
            except DriverFault as fault:
                # The card may come back under another handle.
                self._handles.pop(info.id, None)
                if info.id not in self._silent:
                    self._silent.add(info.id)
                    LOG.warning(
                        "a card cannot be read",
                        extra={"card": info.id, "device": info.device, "reason": str(fault)},
                    )
            else:
                if info.id in self._silent:
                    self._silent.discard(info.id)
                    LOG.info("a card can be read again", extra={"card": info.id})
        if wanted and not readings:
            # Not one card but the driver is gone: another may be loaded by the next reading.
            self._shut()
        return readings

    def let_go(self, cards: frozenset[str]) -> None:
        """Closes the library when a card is to be given away: whoever has a card open keeps it."""
        if cards - self._away:
            self._shut()
        self._away = cards

    def environment(self, cards: tuple[str, ...]) -> dict[str, str]:
        """By UUID: numbers differ between the driver and CUDA, and change with what is visible."""
        devices = [self._infos[card].device for card in cards if card in self._infos]
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}

    def close(self) -> None:
        self._shut()

    # Finding

    def _find(self) -> list[CardInfo]:
        self._begin()
        library = self._library
        found: list[tuple[tuple[int, int, int], Any, str]] = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            try:
                handle = self._ask("nvmlDeviceGetHandleByIndex", index)
                pci = self._ask("nvmlDeviceGetPciInfo", handle)
            except DriverFault as fault:
                LOG.warning(
                    "an NVIDIA card is left out", extra={"index": index, "reason": str(fault)}
                )
                continue
            address = (pci.domain, pci.bus, pci.device)
            found.append((address, handle, _text(pci.busId)))
        infos: list[CardInfo] = []
        # A card that a VM has keeps its number: the driver does not see it, and it comes back.
        places = sorted({*(address for address, _, _ in found), *_in_vms(self._devices)})
        for address, handle, bus in sorted(found, key=lambda one: one[0]):
            number = places.index(address)
            try:
                memory_bytes = self._given_bytes(handle)
                info = CardInfo(
                    id=f"gpu{number}",
                    kind="gpu",
                    memory_bytes=memory_bytes,
                    provider="nvml",
                    device=_text(self._ask("nvmlDeviceGetUUID", handle)),
                    pci=bus or "{:08X}:{:02X}:{:02X}.0".format(*address),
                    name=_text(self._ask("nvmlDeviceGetName", handle)),
                    mig=self._is_divided(handle),
                )
            except DriverFault as fault:
                # It keeps its number: the next card must not take its place while it is ill.
                LOG.warning(
                    "an NVIDIA card is left out",
                    extra={"card": f"gpu{number}", "pci": bus, "reason": str(fault)},
                )
                continue
            infos.append(info)
            self._handles[info.id] = handle
        LOG.info(
            "NVIDIA cards found",
            extra={"cards": [f"{i.id} {i.name} {i.pci}" for i in infos], "library": str(library)},
        )
        return infos

    def _given_bytes(self, handle: Any) -> int:
        """The memory of a card less what the driver keeps for itself."""
        memory = self._memory(handle)
        return memory.total - getattr(memory, "reserved", 0)

    def _is_divided(self, handle: Any) -> bool:
        try:
            current, _ = self._ask("nvmlDeviceGetMigMode", handle)
        except DriverFault:  # a card that cannot be divided
            return False
        return current == getattr(self._library, "NVML_DEVICE_MIG_ENABLE", 1)

    # Reading

    def _read(self, info: CardInfo, owners: Mapping[int, str]) -> Reading:
        self._begin()
        handle = self._handle(info)
        used = self._memory(handle).used
        if info.mig:
            # Its processes are those of its parts; it is shown and left alone.
            return Reading(card=info.id, used_bytes=used, other_bytes=used, unexplained_bytes=used)
        of: dict[str, int] = {}
        strangers: list[Seen] = []
        listed = 0
        for shown in self._processes(handle):
            listed += shown.memory_bytes
            holder = owners.get(shown.pid)
            if holder is not None:
                of[holder] = of.get(holder, 0) + shown.memory_bytes
            elif not shown.draws or shown.memory_bytes >= DISPLAY_BYTES:
                strangers.append(self._seen(shown))
        # What processes share is told for each of them, so their sum may be above the card's use.
        used = max(used, sum(of.values()))
        return Reading(
            card=info.id,
            used_bytes=used,
            of=of,
            other_bytes=used - sum(of.values()),
            strangers=tuple(strangers),
            unexplained_bytes=max(used - listed, 0),
        )

    def _handle(self, info: CardInfo) -> Any:
        handle = self._handles.get(info.id)
        if handle is None:
            # By address: a search by UUID opens every card on its way, also one that is a VM's.
            handle = self._ask("nvmlDeviceGetHandleByPciBusId", info.pci.encode())
            device = _text(self._ask("nvmlDeviceGetUUID", handle))
            if device != info.device:
                raise DriverFault(f"another card, {device}, is in its place")
            self._handles[info.id] = handle
        return handle

    def _memory(self, handle: Any) -> Any:
        version = getattr(self._library, "nvmlMemory_v2", None)
        if version is not None:
            try:
                return self._ask("nvmlDeviceGetMemoryInfo", handle, version)
            except DriverFault:  # a driver before 510 has the old call only
                pass
        return self._ask("nvmlDeviceGetMemoryInfo", handle)

    def _processes(self, handle: Any) -> list[_Shown]:
        """Each process once. One that computes and draws is listed twice, with the same figure."""
        drawing = {one.pid: one for one in self._listed("Graphics", handle)}
        computing = {one.pid: one for one in self._listed("Compute", handle)}
        computing.update({one.pid: one for one in self._listed("MPSCompute", handle)})
        shown: list[_Shown] = []
        for pid in sorted({*drawing, *computing}):
            told = [both[pid].usedGpuMemory or 0 for both in (drawing, computing) if pid in both]
            shown.append(_Shown(pid=pid, memory_bytes=max(told), draws=pid in drawing))
        return shown

    def _listed(self, kind: str, handle: Any) -> Iterable[Any]:
        """The processes of one kind; none where the driver does not list them, from then on their memory
        is used by nobody who is shown."""
        for version in ("", "_v2"):  # drivers before 510 have the second only
            try:
                return self._ask(f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
            except DriverFault:
                continue
        return ()

    def _seen(self, shown: _Shown) -> Seen:
        name = _name_here(shown.pid)
        if name is not None:
            return Seen(pid=shown.pid, name=name, memory_bytes=shown.memory_bytes)
        try:
            told = _text(self._ask("nvmlSystemGetProcessName", shown.pid))
        except DriverFault:
            told = ""
        return Seen(
            pid=shown.pid, name=told.rpartition("/")[2], memory_bytes=shown.memory_bytes, here=False
        )

    # The library

    def _begin(self) -> None:
        if self._library is None:
            try:
                self._library = self._load()
            except (ImportError, OSError) as error:
                raise DriverFault(f"nvidia-ml-py cannot be loaded: {error}") from error
        if not self._open:
            self._ask("nvmlInit")
            self._open = True

    def _shut(self) -> None:
        self._handles.clear()
        if self._open:
            self._open = False
            try:
                self._ask("nvmlShutdown")
            except DriverFault as fault:
                LOG.info("the driver was left without a word", extra={"reason": str(fault)})

    def _ask(self, call: str, *arguments: Any) -> Any:
        """One call of the library. Raises DriverFault for everything it can say no with."""
        try:
            return getattr(self._library, call)(*arguments)
        except Exception as error:
            # Not its own errors alone: it has others for a driver that is older or newer than itself,
            # and what comes of a driver must never end an agent.
            raise DriverFault(f"{error} ({call})") from error


def _in_vms(devices: Path) -> Iterator[tuple[int, int, int]]:
    """The PCI addresses of NVIDIA cards that are handed to virtual machines now."""
    for device in sorted(devices.glob("*:*:*.0")):
        try:
            is_card = (device / "class").read_text().startswith("0x03")
            vendor = (device / "vendor").read_text().strip()
            driver = (device / "driver").readlink().name
        except OSError:
            continue
        if is_card and vendor == NVIDIA and driver == "vfio-pci":
            domain, bus, rest = device.name.split(":")
            yield int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


def _pynvml() -> Any:
    return importlib.import_module("pynvml")


def _text(value: Any) -> str:
    """The library gives bytes or text, by its version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _name_here(pid: int) -> str | None:
    """The program of a process of this machine; None when /proc does not show it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program = os.fsdecode(file.read().partition(b"\0")[0]).rpartition("/")[2]
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return program or file.read().strip()
    except OSError:
        return None
