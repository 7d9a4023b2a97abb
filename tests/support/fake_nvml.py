"""A driver with as many cards as a test wants, kept in one JSON file that any process may write its use into.

It offers the calls of nvidia-ml-py that are used here, with their errors, and behaves like a driver: the
memory of a process is free when the process is gone. Standard library only: engines of tests use it too.

    {"fault": "", "cards": [{"uuid", "pci", "name", "total", "reserved", "mig", "fault", "untied",
                             "processes": [{"pid", "bytes", "kind", "stays"}]}]}

`fault` is the name of an error of the library (`DRIVER_NOT_LOADED`, `GPU_IS_LOST`, ...); `untied` are bytes
no process is shown for; a process that `stays` is listed though it is dead or never lived.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STATE = "FAKE_NVML"
"""The variable that names the state file, for processes that are told nothing else."""

SHADOW = Path(__file__).parent / "nvml_shadow"
"""On PYTHONPATH, `import pynvml` takes the fake instead of the library."""

CODES = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "DRIVER_NOT_LOADED": 9,
    "LIBRARY_NOT_FOUND": 12,
    "FUNCTION_NOT_FOUND": 13,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "LIB_RM_VERSION_MISMATCH": 18,
    "UNKNOWN": 999,
}


class NVMLError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name.replace("_", " ").capitalize())
        self.value = CODES[name]


def a_card(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A card of 24 GiB of which the driver keeps half a GiB, at the PCI bus `number + 1`."""
    return {
        "uuid": f"GPU-{number:08x}-0000-0000-0000-000000000000",
        "pci": f"00000000:{number + 1:02X}:00.0",
        "name": "NVIDIA Test Card",
        "total": 24 << 30,
        "reserved": 512 << 20,
        "mig": False,
        "fault": "",
        "untied": 0,
        "processes": [],
        **fields,
    }


def write(path: Path | str, *cards: dict[str, Any], fault: str = "") -> None:
    """Makes the machine have exactly these cards."""
    with changing(path) as state:
        state.clear()
        state.update(fault=fault, cards=list(cards))


@contextlib.contextmanager
def changing(path: Path | str) -> Iterator[dict[str, Any]]:
    """The state, to be changed in place by one process at a time; read by others whole."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read(path) if os.path.exists(path) else {"fault": "", "cards": []}
        yield state
        new = f"{path}.{os.getpid()}"
        with open(new, "w") as file:
            json.dump(state, file)
        os.replace(new, path)


def read(path: Path | str) -> dict[str, Any]:
    with open(path) as file:
        return json.load(file)


def use(
    path: Path | str,
    device: str,
    pid: int,
    bytes_: int,
    *,
    kind: str = "compute",
    stays: bool = False,
) -> None:
    """From now on `pid` uses so much of the card (0: nothing). `device` is a UUID, as an engine finds it in
    CUDA_VISIBLE_DEVICES."""
    with changing(path) as state:
        for card in state["cards"]:
            if card["uuid"] != device:
                continue
            others = [one for one in card["processes"] if one["pid"] != pid or one["kind"] != kind]
            mine = {"pid": pid, "bytes": bytes_, "kind": kind, "stays": stays}
            card["processes"] = [*others, mine] if bytes_ else others


def change(path: Path | str, number: int, **fields: Any) -> None:
    """Changes fields of one card."""
    with changing(path) as state:
        state["cards"][number].update(fields)


class FakeNvml:
    """The library on one state file. A real one is a module; whoever uses it cannot tell."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028
    __name__ = "fake_nvml"

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self.open = 0
        self.handles: set[str] = set()
        """The cards this process has open."""

    def nvmlInit(self) -> None:
        self._check(opened=False)
        self.open += 1

    def nvmlShutdown(self) -> None:
        if not self.open:
            raise NVMLError("UNINITIALIZED")
        self.open -= 1
        self.handles.clear()

    def nvmlDeviceGetCount(self) -> int:
        return len(self._check()["cards"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        card = self._check()["cards"][index]
        return self._opened(card)

    def nvmlDeviceGetHandleByPciBusId(self, pci: bytes) -> str:
        for card in self._check()["cards"]:
            if card["pci"] == pci.decode():
                return self._opened(card)
        raise NVMLError("NOT_FOUND")

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return self._card(handle)["uuid"]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self._card(handle)["name"]

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        domain, bus, rest = self._card(handle)["pci"].split(":")
        return SimpleNamespace(
            domain=int(domain, 16),
            bus=int(bus, 16),
            device=int(rest.partition(".")[0], 16),
            busId=self._card(handle)["pci"].encode(),
        )

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        card = self._card(handle)
        if card["mig"] is None:
            raise NVMLError("NOT_SUPPORTED")
        return [int(card["mig"]), int(card["mig"])]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        card = self._card(handle)
        used = card["untied"] + sum(one["bytes"] for one in _living(card))
        if version is None:
            return SimpleNamespace(total=card["total"], used=used + card["reserved"])
        if card.get("old"):
            raise NVMLError("FUNCTION_NOT_FOUND")
        return SimpleNamespace(total=card["total"], reserved=card["reserved"], used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(handle, "mps")

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._check()
        return f"/usr/bin/elsewhere-{pid}"

    def _listed(self, handle: str, kind: str) -> list[Any]:
        card = self._card(handle)
        if card.get("lists", True) is False:
            raise NVMLError("NOT_SUPPORTED")
        return [
            SimpleNamespace(pid=one["pid"], usedGpuMemory=one["bytes"])
            for one in _living(card)
            if one["kind"] == kind
        ]

    def _check(self, *, opened: bool = True) -> dict[str, Any]:
        state = read(self._path)
        if state["fault"]:
            raise NVMLError(state["fault"])
        if opened and not self.open:
            raise NVMLError("UNINITIALIZED")
        return state

    def _opened(self, card: dict[str, Any]) -> str:
        if card["fault"]:
            raise NVMLError(card["fault"])
        self.handles.add(card["uuid"])
        return card["uuid"]

    def _card(self, handle: str) -> dict[str, Any]:
        state = self._check()
        if handle not in self.handles:
            raise NVMLError("INVALID_ARGUMENT")
        card = next(one for one in state["cards"] if one["uuid"] == handle)
        if card["fault"]:
            raise NVMLError(card["fault"])
        return card


def _living(card: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in card["processes"] if one["stays"] or _lives(one["pid"])]


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return line[line.rfind(b")") + 2 :][:1] not in (b"Z", b"X")
