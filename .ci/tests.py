"""`make test`: runs every tier in two parts, each the way that suits it, and ends with pytest's summary lines.

Tests that only count (no server, no process, no clock of the machine) share the processors; those that
wait for real processes run one at a time, because another load beside them would be part of what they
measure. A part that fails does not keep the other from running. It chooses no tests: a tier that is not
named here runs in the second part.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
COUNTING: Final = ("tests/unit", "tests/properties", "tests/golden")
STARTS_A_YARD: Final = ("tests/integration", "tests/system")
SHARED: Final = ("-n", "logical", "--maxprocesses", "8", "--dist", "worksteal")


def parts(words: list[str]) -> list[list[str]]:
    """The arguments of each run of pytest; `fast` leaves out what starts a yard, the rest is passed on."""
    others = COUNTING + (STARTS_A_YARD if "fast" in words else ())
    rest = [word for word in words if word != "fast"]
    return [
        [*COUNTING, *SHARED, *rest],
        [*(part for tier in others for part in ("--ignore", tier)), *rest],
    ]


def summary(line: str) -> bool:
    """Whether it is the line with which pytest ends: `=== 9 passed in 1.23s ===`."""
    return line.startswith("=") and line.rstrip().endswith("=") and " in " in line


def run(arguments: list[str]) -> tuple[int, str]:
    """Runs pytest, its output shown as it comes; its status and its last summary line."""
    last = ""
    command = [sys.executable, "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if summary(line) else last
    return process.returncode, last.rstrip() or f"pytest ended with {process.returncode}"


def main() -> int:
    ends = [run(arguments) for arguments in parts(sys.argv[1:])]
    print()
    for _, line in ends:
        print(line)
    return next((status for status, _ in ends if status), 0)


if __name__ == "__main__":
    raise SystemExit(main())
