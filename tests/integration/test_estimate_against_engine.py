"""The estimate, part by part, against what llama.cpp itself says it allocated for models of every kind."""

from pathlib import Path

import pytest

from tests.hub import ggufs
from tests.support import engine_memory
from tests.support.engine_memory import CASES, PLAIN, SIZES, SMOLLM2, estimated

MIB = 1024**2


def case_id(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "defaults"


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
    made = estimated(path, args)
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
        made = estimated(path, args)
        assert bool(made.repacked_bytes) == twice
        assert_near("repacked", made.repacked_bytes, loaded.repacked_bytes, 0.02, 0.011)
    made = estimated(path, (*PLAIN, "--load-mode", "none"))
    assert made.repacked_bytes == 0


@pytest.mark.parametrize("ctx_pool", [2048, 16384])
def test_scn_c11_smollm2_in_total(ctx_pool: int, tmp_path: Path) -> None:
    # A file of its own: pages of one that other processes have mapped too are counted in parts.
    path = tmp_path / "smollm2.gguf"
    path.write_bytes(SMOLLM2.read_bytes())
    args = ("--ctx-size", str(ctx_pool))
    loaded = engine_memory.load(path, (*args, *engine_memory.LOUD))
    made = estimated(path, args)
    assert_near("total", made.total_bytes, loaded.pss_bytes, 0.15, 0.0)
    assert_near("weights", made.weights_bytes, loaded.model_bytes, 0.01, 0.0)
    assert_near("KV cache", made.kv_bytes, loaded.kv_bytes, 0.0, 0.011)
    assert_near("compute", made.compute_bytes, loaded.compute_bytes, 0.15, 0.0)


def test_req_c42_a_set_of_shards_is_estimated_by_its_first_and_loads(tmp_path: Path) -> None:
    whole = ggufs.write(tmp_path / "model.gguf", "llama", sizes=SIZES, quant=ggufs.Quant.Q4_0)
    first, *others = ggufs.shards(whole, tmp_path, 3)
    loaded = engine_memory.load(first, (*PLAIN, *engine_memory.QUICK))
    assert loaded.pss_bytes, loaded.log[-2000:]
    weights = sum(path.stat().st_size for path in (first, *others))
    made = estimated(first, PLAIN, weights_bytes=weights)
    assert_near("KV cache", made.kv_bytes, loaded.kv_bytes, 0.0, 0.011)
    both = made.weights_bytes + made.repacked_bytes
    assert_near("weights", both, loaded.model_bytes + loaded.repacked_bytes, 0.15, 0.0)
