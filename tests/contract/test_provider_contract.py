"""The providers of cards that need no driver keep the contract: declared cards, and a driver made up of a file."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.cards.nvml import Nvml
from nodeagent.cards.static import Static
from schemas.node import CardInfo
from tests.support import fake_nvml
from tests.support.provider_contract import CHECKS, Rig

MIB = 1 << 20

HOLDS = """
import signal, sys
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("holds", flush=True)
signal.pause()
"""


@contextmanager
def holding(memory_bytes: int) -> Iterator[int]:
    """A process with so much RAM of its own."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDS, str(memory_bytes)],
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        try:
            yield process.pid
        finally:
            process.kill()


class StaticRig:
    """Two declared cards; everybody's use counts on the first."""

    card = "gpu0"
    ties = True
    slack_bytes = 24 * MIB  # the interpreter

    def __init__(self, _: Path) -> None:
        infos = [CardInfo(id=f"gpu{n}", kind="gpu", memory_bytes=1 << 30) for n in range(2)]
        self._on: dict[str, tuple[str, ...]] = {}
        self.provider = Static(infos, lambda: self._on)

    def holds(self, holder: str) -> None:
        self._on[holder] = (self.card,)

    def using(self, memory_bytes: int):
        return holding(memory_bytes)


class FakeDriverRig:
    """Two cards of a made-up driver, the first with a screen on it."""

    card = "gpu0"
    ties = True
    slack_bytes = 0

    def __init__(self, folder: Path) -> None:
        self._path = folder / "nvml.json"
        fake_nvml.write(
            self._path,
            fake_nvml.a_card(1),
            fake_nvml.a_card(0, untied=300 * MIB),
        )
        library = fake_nvml.FakeNvml(self._path)
        self.provider = Nvml(lambda: library)
        self.provider.cards()

    def holds(self, holder: str) -> None:
        pass

    @contextmanager
    def using(self, memory_bytes: int) -> Iterator[int]:
        with holding(1) as pid:
            fake_nvml.use(self._path, fake_nvml.a_card(0)["uuid"], pid, memory_bytes)
            yield pid


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("rig", [StaticRig, FakeDriverRig], ids=["static", "nvml"])
def test_a_provider(
    rig: Callable[[Path], Rig], check: Callable[[Rig], None], tmp_path: Path
) -> None:
    check(rig(tmp_path))
