"""Writes numbers as Prometheus reads them, in pieces: a page of thousands of models must not halt whoever streams.

The text is that of the client library's `generate_latest`, which writes all at once and takes several times as long.
Families of our own are written while they are read (families.py). It counts nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway.families import Family, escaped, number

AT_ONCE: Final = 500
"""So many lines are written before others get their turn: about a millisecond."""

_PLAIN: Final = frozenset(("counter", "gauge", "histogram"))
_APART: Final = ("_created", "_gsum", "_gcount")
"""Samples that the format wants in a family of their own; only the library's own counters have such."""


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


async def pieces(families: Iterable[Metric]) -> AsyncIterator[bytes]:
    """All families, each read the moment its turn comes; others of this loop run between two pieces."""
    for family in families:
        for piece in text_of(family):
            yield piece.encode("utf-8")
            await asyncio.sleep(0)


def text_of(family: Metric) -> Iterator[str]:
    """One family, in pieces of about AT_ONCE lines."""
    samples = () if isinstance(family, Family) else family.samples
    if family.type not in _PLAIN or any(s.name.endswith(_APART) for s in samples[:4]):
        yield generate_latest(_One(family)).decode("utf-8")
        return
    name = f"{family.name}_total" if family.type == "counter" else family.name
    about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {about}\n# TYPE {name} {family.type}\n"
    if not isinstance(family, Family):
        for begin in range(0, len(samples), AT_ONCE):
            yield "".join([_line(s) for s in samples[begin : begin + AT_ONCE]])
        return
    texts: list[str] = []
    lines = 0
    for count, text in family.blocks():
        texts.append(text)
        lines += count
        if lines >= AT_ONCE:
            yield "".join(texts)
            texts, lines = [], 0
    if texts:
        yield "".join(texts)


def _line(sample: Sample) -> str:
    labels = ",".join(
        f'{label}="{escaped(value)}"' for label, value in sorted(sample.labels.items())
    )
    told = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{told} {number(sample.value)}\n"
