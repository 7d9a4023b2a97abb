"""Loads a GGUF with the engine our driver starts, and reads off its own log what it allocated."""

import re
import subprocess
import threading
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent import processes
from nodeagent.drivers.driver import EngineStart, StartRefused
from nodeagent.drivers.llamacpp import LlamacppDriver
from schemas.plan import Launch
from tests.support.launches import REPLICA, no_secrets
from tests.support.scripted import free_port

LOUD: Final = ("--verbosity", "4")
"""llama.cpp tells sizes of buffers from this level on."""

QUICK: Final = (*LOUD, "--fit", "off", "--no-warmup")
"""Leaves out what costs time and allocates nothing."""

TRACING: Final = ("--verbosity", "5", "--fit", "off")
"""From this level on it tells which layers slide."""

_MIB: Final = 1024**2
_BUFFER: Final = re.compile(r"(\S+)\s+(model|output|KV|RS|compute) buffer size =\s+([\d.]+) MiB")
_SLIDING: Final = re.compile(r"layer\s+\d+ assigned to device \S+ is_swa = ([01])")


class Loaded(NamedTuple):
    """What was allocated, in bytes as far as two digits of a MiB tell; `buffers` counts what was added up.

    `pss_bytes` is 0 when the engine did not come to listen.
    """

    log: str
    model_bytes: int
    repacked_bytes: int
    kv_bytes: int
    state_bytes: int
    compute_bytes: int
    buffers: int
    pss_bytes: int


def load(path: Path, args: tuple[str, ...], *, deadline_s: float = 45.0) -> Loaded:
    """Runs the engine until it listens or ends, and ends it."""
    start = _prepare(path, args)
    with subprocess.Popen(
        start.argv,
        env=dict(start.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as engine:
        alarm = threading.Timer(deadline_s, engine.kill)
        alarm.start()
        try:
            lines: list[str] = []
            pss = 0
            assert engine.stdout is not None
            for line in engine.stdout:
                lines.append(line)
                if "listening on" in line:
                    found = processes.look(engine.pid)
                    pss = 0 if found is None else processes.memory_bytes([found])
                    break
            return _loaded("".join(lines), pss)
        finally:
            alarm.cancel()
            engine.kill()


def sliding_layers(log: str) -> tuple[bool, ...]:
    """Which layers the engine says slide. The last line it prints is that of the output."""
    return tuple(found == "1" for found in _SLIDING.findall(log))[:-1]


def _prepare(path: Path, args: tuple[str, ...]) -> EngineStart:
    launch = Launch(
        model="measured",
        incarnation="i",
        profile="cpu",
        revision="1",
        engine="llamacpp",
        source=str(path),
        args=args,
    )
    start = LlamacppDriver().prepare(
        launch,
        replica=REPLICA,
        host="127.0.0.1",
        port=free_port(),
        key="key-of-a-measurement",
        secrets=no_secrets,
    )
    assert not isinstance(start, StartRefused), start
    return start


def _loaded(log: str, pss_bytes: int) -> Loaded:
    sums: dict[str, int] = {}
    count = 0
    for place, part, size in _BUFFER.findall(log):
        part = "repacked" if place == "CPU_REPACK" else part
        sums[part] = sums.get(part, 0) + round(float(size) * _MIB)
        count += 1
    return Loaded(
        log=log,
        model_bytes=sums.get("model", 0),
        repacked_bytes=sums.get("repacked", 0),
        kv_bytes=sums.get("KV", 0),
        state_bytes=sums.get("RS", 0),
        compute_bytes=sums.get("compute", 0) + sums.get("output", 0),
        buffers=count,
        pss_bytes=pss_bytes,
    )
