"""`make test`: runs every tier in three parts, each the way that suits it, and ends with pytest's summary lines.

Tests that only count (no server, no process, no clock of the machine) share the processors. Those of one
part of the system beside a real server mostly wait, so two run side by side, a file in one process.
Whole yards run one at a time, because another load beside them would be part of what they show. A part that
fails does not keep the others from running. It chooses no tests: a tier that is not named here runs in the last part.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
COUNTING: Final = ("tests/unit", "tests/properties", "tests/golden")
WAITING: Final = ("tests/integration",)
STARTS_A_YARD: Final = ("tests/system",)
SHARED: Final = ("-n", "logical", "--maxprocesses", "8", "--dist", "worksteal")
PAIRED: Final = ("-n", "2", "--dist", "loadfile")


def parts(words: list[str]) -> list[list[str]]:
    """The arguments of each run of pytest; `fast` leaves out what starts a yard, the rest is passed on."""
    rest = [word for word in words if word != "fast"]
    left_out = COUNTING + WAITING + (STARTS_A_YARD if "fast" in words else ())
    last = [*(part for tier in left_out for part in ("--ignore", tier)), *rest]
    waiting = [] if "fast" in words else [[*WAITING, *PAIRED, *rest]]
    return [[*COUNTING, *SHARED, *rest], *waiting, last]


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
