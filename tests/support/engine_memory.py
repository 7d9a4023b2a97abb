"""Loads a GGUF with the engine our driver starts, and reads off its own log what it allocated."""

import re
import subprocess
import threading
from pathlib import Path
from typing import Final, NamedTuple

from controlplane.domain.estimate import estimate_for_args
from controlplane.domain.ggufheader import Header, parse
from controlplane.domain.ggufshape import shape_of
from controlplane.domain.shape import ModelShape
from nodeagent import processes
from nodeagent.drivers.driver import EngineStart, StartRefused
from nodeagent.drivers.llamacpp import LlamacppDriver
from schemas.job import MemoryEstimate
from schemas.plan import Launch
from tests.hub import ggufs
from tests.support.launches import REPLICA, no_secrets
from tests.support.ports import free_port

LOUD: Final = ("--verbosity", "4")
"""llama.cpp tells sizes of buffers from this level on."""

QUICK: Final = (*LOUD, "--fit", "off", "--no-warmup")
"""Leaves out what costs time and allocates nothing."""

TRACING: Final = ("--verbosity", "5", "--fit", "off")
"""From this level on it tells which layers slide."""

SMOLLM2: Final = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

PLAIN: Final = ("--ctx-size", "4096")
CASES: Final[list[tuple[str, tuple[str, ...]]]] = [
    *((kind, PLAIN) for kind in ggufs.KINDS),
    ("llama", ("--ctx-size", "5000", "--parallel", "3")),
    ("llama", ("--ctx-size", "4096", "--parallel", "4", "--kv-unified")),
    ("llama", (*PLAIN, "--cache-type-k", "q8_0", "--cache-type-v", "q4_0")),
    ("llama", (*PLAIN, "--flash-attn", "off")),
    ("llama", (*PLAIN, "--ubatch-size", "256")),
    ("llama", ()),
    ("gemma3", (*PLAIN, "--parallel", "4")),
    ("gemma3", (*PLAIN, "--parallel", "4", "--kv-unified")),
    ("gemma3", (*PLAIN, "--swa-full")),
    ("gpt-oss", (*PLAIN, "--flash-attn", "off")),
    ("deepseek2", (*PLAIN, "--flash-attn", "off", "--parallel", "2")),
    ("granitehybrid", (*PLAIN, "--parallel", "4")),
    ("qwen3-embedding", (*PLAIN, "--embedding")),
    ("bert", ("--ctx-size", "512", "--embedding", "--ubatch-size", "1024")),
]
"""Every kind, and the arguments that change what is allocated."""

SIZES: Final = ggufs.Sizes(
    layers=8, embedding=256, heads=8, feed_forward=768, inner=512, context=4096
)


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


def estimated(
    path: Path, args: tuple[str, ...], *, weights_bytes: int | None = None
) -> MemoryEstimate:
    """Our estimate for this file with these arguments; its own weights unless those of a set are given."""
    header = parse(path.read_bytes())
    assert isinstance(header, Header), header
    shape = shape_of(header)
    assert isinstance(shape, ModelShape), shape
    weights = header.weights_bytes if weights_bytes is None else weights_bytes
    assert weights is not None
    return estimate_for_args(shape, weights, args)


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
