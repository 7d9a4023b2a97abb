"""Puts the numbers of several workers into one page for Prometheus, each under a label `worker`.

Nothing is added up: a counter of a worker that was replaced would go backwards in a sum. Pure.
"""

from collections.abc import Mapping


def merge(pages: Mapping[int, bytes]) -> bytes:
    """One page of the text format from one page of each worker; families keep the order of the first that has them."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, page in sorted(pages.items()):
        family = ""
        # One that was cut, because its worker ended meanwhile, has said its whole lines.
        for line in page[: page.rfind(b"\n") + 1].decode("utf-8").split("\n"):
            if not line:
                continue
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
                continue
            samples.setdefault(family, []).append(_labelled(line, worker))
    out: list[str] = []
    for family, lines in heads.items():
        out += [*lines, *samples.get(family, ())]
    return ("\n".join(out) + "\n").encode("utf-8")


def _labelled(line: str, worker: int) -> str:
    """A sample with one label more. A name holds no brace and no space, so the first of them ends it."""
    brace, space = line.find("{"), line.find(" ")
    label = f'worker="{worker}"'
    if 0 <= brace < space:
        return f"{line[: brace + 1]}{label},{line[brace + 1 :]}"
    return f"{line[:space]}{{{label}}}{line[space:]}"
