"""A fake of NVIDIA's cuda-checkpoint: keeps the state of each pid in a folder and fails as it is told."""

import sys
from pathlib import Path

_PROGRAM = """#!{python} -I
import pathlib, sys, time

folder = pathlib.Path({folder!r})
words = sys.argv[1:]
asked = dict(zip(words[::2], words[1::2])) if words[0] != "--get-state" else {{"--pid": words[2]}}
action, pid = asked.get("--action", "get-state"), asked["--pid"]
with open(folder / "calls", "a") as calls:
    calls.write(" ".join([action, pid, *([asked["--timeout"]] if "--timeout" in asked else [])]) + "\\n")
fault = folder / f"fault-{{action}}"
if fault.exists():
    text = fault.read_text()
    if text == "hang":
        time.sleep(600)
    print(text, file=sys.stderr)
    sys.exit(1)
file = folder / f"state-{{pid}}"
if not file.exists():
    print("Could not get state of the process: it uses no CUDA", file=sys.stderr)
    sys.exit(1)
state = file.read_text()
steps = {{
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}}
if action == "get-state":
    print(state)
    sys.exit(0)
before, after = steps[action]
if state != before:
    print(f"invalid state for {{action}}: {{state}}", file=sys.stderr)
    sys.exit(1)
file.write_text(after)
"""


class FakeCheckpoint:
    """The program and what it did. Every pid given to `uses_cuda` counts as a CUDA process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.program = folder / "cuda-checkpoint"
        self.program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        self.program.chmod(0o755)

    def uses_cuda(self, *pids: int, state: str = "running") -> None:
        for pid in pids:
            (self.folder / f"state-{pid}").write_text(state)

    def state(self, pid: int) -> str:
        return (self.folder / f"state-{pid}").read_text()

    def fails(self, action: str, text: str) -> None:
        """`action` ends with 1 and prints `text`; `hang`: it does not end."""
        (self.folder / f"fault-{action}").write_text(text)

    def calls(self, *, but: str = "get-state") -> list[str]:
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.split()[0] != but]
