"""Runs the hub as a program until SIGTERM, SIGINT, or the end of the process that reads its standard output.

Prints its address, once it listens, as the only line. Faults, rate and counts: see `/-/…` in answers.py.
"""

import argparse
import os
import re
import select
import signal
import sys
from pathlib import Path

from tests.hub.adapters import adapter
from tests.hub.contents import Content, Held, MadeUp, OnDisk
from tests.hub.repos import Entry
from tests.hub.server import Hub

DEFAULT_REPO = "yard/SmolLM2-135M-Instruct-GGUF"
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def size(text: str) -> int:
    """Bytes of `20MiB`, `1G` or a number; units of 1024."""
    found = re.fullmatch(r"(\d+) ?(?:([KMG])(?:iB)?)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 20MiB")
    return int(found[1]) * _UNITS[(found[2] or "").lower()]


def on_disk(text: str) -> tuple[str, Content]:
    """`FILE` or `NAME=FILE`."""
    name, given, file = text.partition("=")
    path = Path(file if given else text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is no file")
    return (name if given else path.name), OnDisk(path)


def made_up(text: str) -> tuple[str, Content]:
    """`NAME:SIZE` or `NAME:SIZE:SEED`."""
    name, _, rest = text.partition(":")
    length, _, seed = rest.partition(":")
    return name, MadeUp(size(length), int(seed or 0))


def an_adapter(text: str) -> tuple[str, int]:
    """`OWNER/NAME` or `OWNER/NAME:RANK`."""
    name, given, rank = text.partition(":")
    if name.count("/") != 1 or (given and not rank.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not OWNER/NAME[:RANK]")
    return name, int(rank or 8)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="of the hub; 0: any free one")
    parser.add_argument("--repo", default=DEFAULT_REPO, help="the repository that has the files")
    parser.add_argument("--file", type=on_disk, action="append", default=[], metavar="[NAME=]FILE")
    parser.add_argument(
        "--made-up", type=made_up, action="append", default=[], metavar="NAME:SIZE[:SEED]"
    )
    parser.add_argument(
        "--adapter",
        type=an_adapter,
        action="append",
        default=[],
        metavar="OWNER/NAME[:RANK]",
        help="a repository of its own that holds a LoRA adapter",
    )
    parser.add_argument("--base", default=DEFAULT_REPO, help="what adapters say they were made for")
    parser.add_argument("--rate", type=size, default=0, help="bytes a second, such as 20MiB")
    parser.add_argument("--gated", choices=("auto", "manual"), default=None)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--token", action="append", default=[], help="may read the repository")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with Hub(port=options.port, bytes_per_s=options.rate) as hub:
        repo = hub.repo(options.repo, gated=options.gated, private=options.private)
        files: dict[str, Content | Entry] = dict([*options.file, *options.made_up])
        files["README.md"] = Entry(content=Held(b"# A repository for trying out\n"), lfs=False)
        repo.commit(files)
        for name, rank in options.adapter:
            hub.repo(name).commit(adapter(name.partition("/")[2], rank=rank, base=options.base))
        for token in options.token:
            hub.reader(token, options.repo)
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        # POLLERR on our own output: whoever read it is gone, and nobody would end this process.
        waiting = select.poll()
        waiting.register(ended, select.POLLIN)
        waiting.register(sys.stdout.fileno(), 0)
        waiting.poll()


if __name__ == "__main__":
    main()
