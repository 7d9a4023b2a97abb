"""`make test`: runs every tier in its part, each the way that suits it, and ends with pytest's summary lines.

Tests that only count (no server, no process, no clock of the machine) share the processors. Those beside a real
server mostly wait, so some run side by side: of parts of the system two files, of whole yards two tests. What
another load would be part of, or what needs the whole machine, is marked `alone`. A part that fails does not
keep the others from running. It chooses no tests: a tier that is not named here runs in the last part.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
COUNTING: Final = ("tests/unit", "tests/properties", "tests/golden")
CONTRACT: Final = ("tests/contract",)
WAITING: Final = ("tests/integration",)
YARDS: Final = ("tests/system",)
SHARED: Final = ("-n", "logical", "--maxprocesses", "8", "--dist", "worksteal")
BY_FILE: Final = ("-n", "2", "--dist", "loadfile")
# One at a time to whoever is ready: a test takes seconds, and the longest come first.
IN_PAIRS: Final = ("-n", "2", "--dist", "load", "--maxschedchunk", "1", "-m", "not alone")
NO_TESTS: Final = 5
"""The status of pytest that found none, as in a part that is empty here."""


def parts(words: list[str]) -> list[list[str]]:
    """The arguments of each run of pytest; `fast` leaves out what starts a yard, the rest is passed on."""
    rest = [word for word in words if word != "fast"]
    left_out = (*COUNTING, *CONTRACT, *WAITING)
    last = ["-m", "alone or not yard", *(p for tier in left_out for p in ("--ignore", tier)), *rest]
    if "fast" in words:
        return [
            [*COUNTING, *SHARED, *rest],
            [*CONTRACT, *BY_FILE, *rest],
            ["--ignore", *YARDS, *last],
        ]
    waiting = [*CONTRACT, *WAITING, *BY_FILE, *rest]
    return [[*COUNTING, *SHARED, *rest], waiting, [*YARDS, *IN_PAIRS, *rest], last]


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
    status, line = ends[-1]
    # Only the last part may be empty: every tier has a part of its own.
    ends[-1] = (0 if status == NO_TESTS else status, line)
    print()
    for _, line in ends:
        print(line)
    return next((status for status, _ in ends if status), 0)


if __name__ == "__main__":
    raise SystemExit(main())
