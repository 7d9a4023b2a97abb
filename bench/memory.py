"""Measures how near the memory estimate comes to what llama.cpp says it allocates, and writes the table of docs/memory.md.

For every kind of model a small complete GGUF is written and loaded by the engine our driver starts; its own
log tells the sizes of its buffers. SmolLM2 is loaded too, and compared in total with the memory of its process.

    python bench/memory.py [--print]

Not a test: it asserts nothing (tests/integration/test_estimate_against_engine.py does). `--print` writes
nothing.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from schemas.job import MemoryEstimate
from tests.hub import ggufs
from tests.support import engine_memory
from tests.support.engine_memory import CASES, LOUD, PLAIN, QUICK, SIZES, SMOLLM2, Loaded

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BEGIN: Final = "<!-- measured: written by bench/memory.py -->"
END: Final = "<!-- end of measured -->"
MIB: Final = 1024**2

HEAD: Final = (
    "| model | arguments | weights | repacked | KV cache | state | compute |",
    "|---|---|---|---|---|---|---|",
)
TOTAL: Final = (
    "| SmolLM2 135M Q4_1 | estimated | process, PSS | apart |",
    "|---|---|---|---|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="show the tables, write nothing")
    only_print = parser.parse_args().print
    with tempfile.TemporaryDirectory() as folder:
        rows = [*HEAD, *parts(Path(folder)), "", *TOTAL, *totals(Path(folder))]
    table = "\n".join(rows)
    if only_print:
        print(table)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    print(f"{PAGE} written")


def parts(folder: Path) -> list[str]:
    """A row for each case: ours and the engine's figure of each part."""
    rows: list[str] = []
    cases = [(kind, args, ggufs.Quant.F16) for kind, args in CASES]
    cases += [(kind, PLAIN, ggufs.Quant.Q4_0) for kind in ("llama", "qwen3moe")]
    for kind, args, quant in cases:
        path = ggufs.write(folder / "model.gguf", kind, sizes=SIZES, quant=quant)
        loaded = engine_memory.load(path, (*args, *QUICK))
        made = engine_memory.estimated(path, args)
        name = kind if quant is ggufs.Quant.F16 else f"{kind} {quant.name}"
        cells = " | ".join(cell(*pair) for pair in pairs(made, loaded))
        rows.append(f"| {name} | `{' '.join(args) or 'none'}` | {cells} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def totals(folder: Path) -> list[str]:
    """SmolLM2 in total, from a copy of its own: shared pages of a file count in parts."""
    path = folder / "smollm2.gguf"
    path.write_bytes(SMOLLM2.read_bytes())
    rows: list[str] = []
    for ctx_pool in (2048, 4096, 16384):
        args = ("--ctx-size", str(ctx_pool))
        loaded = engine_memory.load(path, (*args, *LOUD))
        made = engine_memory.estimated(path, args)
        apart = (made.total_bytes - loaded.pss_bytes) / loaded.pss_bytes
        rows.append(
            f"| {ctx_pool} tokens | {made.total_bytes / MIB:.0f} MiB "
            f"| {loaded.pss_bytes / MIB:.0f} MiB | {apart:+.0%} |"
        )
    return rows


def pairs(made: MemoryEstimate, loaded: Loaded) -> list[tuple[int, int]]:
    return [
        (made.weights_bytes, loaded.model_bytes),
        (made.repacked_bytes, loaded.repacked_bytes),
        (made.kv_bytes, loaded.kv_bytes),
        (made.state_bytes, loaded.state_bytes),
        (made.compute_bytes, loaded.compute_bytes),
    ]


def cell(ours: int, engine: int) -> str:
    """`estimated / engine` in MiB, empty where neither has any."""
    return f"{ours / MIB:.2f} / {engine / MIB:.2f}" if ours or engine else ""


if __name__ == "__main__":
    main()
