"""The estimate, part by part, against what llama.cpp itself says it allocated for models of every kind."""

from pathlib import Path

import pytest

from controlplane.domain import estimate
from controlplane.domain.ggufheader import Header, parse
from controlplane.domain.ggufshape import shape_of
from controlplane.domain.shape import ModelShape
from schemas.job import MemoryEstimate
from tests.hub import ggufs
from tests.support import engine_memory

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1024**2

PLAIN = ("--ctx-size", "4096")
CASES = [
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
SIZES = ggufs.Sizes(layers=8, embedding=256, heads=8, feed_forward=768, inner=512, context=4096)


def case_id(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "defaults"


def estimated(path: Path, args: tuple[str, ...]) -> tuple[Header, MemoryEstimate]:
    header = parse(path.read_bytes())
    assert isinstance(header, Header)
    shape = shape_of(header)
    assert isinstance(shape, ModelShape)
    assert header.weights_bytes is not None
    return header, estimate.estimate_for_args(shape, header.weights_bytes, args)


def assert_near(part: str, said: int, engine: int, share: float, slack: float) -> None:
    """Within a share of the engine's figure, or within what its two digits of a MiB leave open."""
    assert abs(said - engine) <= max(share * engine, slack * MIB), (
        f"{part}: estimated {said / MIB:.3f} MiB, the engine says {engine / MIB:.3f} MiB"
    )


@pytest.mark.parametrize(("kind", "args"), CASES, ids=case_id)
def test_scn_c11_each_part_is_what_the_engine_allocates(
    kind: str, args: tuple[str, ...], tmp_path: Path
) -> None:
    path = ggufs.write(tmp_path / "model.gguf", kind, sizes=SIZES)
    loaded = engine_memory.load(path, (*args, *engine_memory.QUICK))
    assert loaded.pss_bytes, loaded.log[-2000:]
    _, made = estimated(path, args)
    assert_near("weights", made.weights_bytes, loaded.model_bytes, 0.01, 0.0)
    assert_near("KV cache", made.kv_bytes, loaded.kv_bytes, 0.02, 0.011)
    assert_near("state", made.state_bytes, loaded.state_bytes, 0.02, 0.006)
    assert_near("compute", made.compute_bytes, loaded.compute_bytes, 0.15, 0.5)


@pytest.mark.parametrize("kind", ["llama", "qwen3moe", "qwen3-embedding"])
def test_scn_c11_weights_repacked_for_the_processor_are_counted_twice(
    kind: str, tmp_path: Path
) -> None:
    path = ggufs.write(tmp_path / "model.gguf", kind, sizes=SIZES, quant=ggufs.Quant.Q4_0)
    for args, twice in ((PLAIN, True), ((*PLAIN, "--no-repack"), False)):
        loaded = engine_memory.load(path, (*args, *engine_memory.QUICK))
        _, made = estimated(path, args)
        assert bool(made.repacked_bytes) == twice
        assert_near("repacked", made.repacked_bytes, loaded.repacked_bytes, 0.02, 0.011)
    _, made = estimated(path, (*PLAIN, "--load-mode", "none"))
    assert made.repacked_bytes == 0


@pytest.mark.parametrize("ctx_pool", [2048, 16384])
def test_scn_c11_smollm2_in_total(ctx_pool: int, tmp_path: Path) -> None:
    # A file of its own: pages of one that other processes have mapped too are counted in parts.
    path = tmp_path / "smollm2.gguf"
    path.write_bytes(SMOLLM2.read_bytes())
    args = ("--ctx-size", str(ctx_pool))
    loaded = engine_memory.load(path, (*args, *engine_memory.LOUD))
    _, made = estimated(path, args)
    assert_near("total", made.total_bytes, loaded.pss_bytes, 0.15, 0.0)
    assert_near("weights", made.weights_bytes, loaded.model_bytes, 0.01, 0.0)
    assert_near("KV cache", made.kv_bytes, loaded.kv_bytes, 0.0, 0.011)
    assert_near("compute", made.compute_bytes, loaded.compute_bytes, 0.15, 0.0)
