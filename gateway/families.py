"""Families of numbers whose lines are written while they are read, a few at a time: nothing is made for all of them first.

Thousands of models have a hundred thousand lines, and the client library's objects for them take a second to make. The
library can read these families too and writes the same text. They count nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class Buckets(Protocol):
    """One histogram: `buckets` are its bounds, each with how many are not above it."""

    @property
    def total(self) -> float: ...

    def buckets(self) -> list[tuple[str, float]]: ...


Plain = Callable[[], Iterable[tuple[Sequence[str], float]]]
Spreads = Callable[[], Iterable[tuple[Sequence[str], Buckets]]]
"""The numbers by the values of their labels. What is iterated must be the reader's own: others run between two."""

_LE: Final = "le"


class Family(Metric):
    """A family as the library knows them, but for its samples: they are made each time somebody reads them."""

    def __init__(self, name: str, documentation: str, kind: str, labels: Sequence[str]) -> None:
        self._labelnames = tuple(labels)
        # The library's own order, by name.
        self._order = sorted(range(len(self._labelnames)), key=self._labelnames.__getitem__)
        super().__init__(name, documentation, kind)

    @property
    def samples(self) -> list[Sample]:
        """All of them, for the library; who must not halt others takes `blocks`."""
        return list(self._samples())

    @samples.setter
    def samples(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, _: list[Sample]
    ) -> None:
        """The library begins with an empty list."""

    def _samples(self) -> Iterator[Sample]:
        raise NotImplementedError

    def blocks(self) -> Iterator[tuple[int, str]]:
        """The text of all numbers with the same labels, one after the other: how many lines, and the lines."""
        raise NotImplementedError

    def _pairs(self, values: Sequence[str], *, first: int = 0, last: int | None = None) -> str:
        """`a="x",b="y"`, of the labels from the `first` on in the library's order."""
        return ",".join(
            f'{self._labelnames[i]}="{escaped(values[i])}"' for i in self._order[first:last]
        )


class PlainFamily(Family):
    """Counters or gauges."""

    def __init__(
        self, name: str, documentation: str, kind: str, labels: Sequence[str], rows: Plain
    ) -> None:
        super().__init__(name, documentation, kind, labels)
        self._rows = rows
        self._sample = f"{self.name}_total" if kind == "counter" else self.name

    def _samples(self) -> Iterator[Sample]:
        for values, value in self._rows():
            yield Sample(self._sample, dict(zip(self._labelnames, values, strict=True)), value)

    def blocks(self) -> Iterator[tuple[int, str]]:
        name = self._sample
        for values, value in self._rows():
            told = f"{{{self._pairs(values)}}}" if values else ""
            yield 1, f"{name}{told} {number(value)}\n"


class HistogramFamily(Family):
    """Histograms."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], rows: Spreads) -> None:
        super().__init__(name, documentation, "histogram", labels)
        self._rows = rows
        self._le_at = sum(label < _LE for label in self._labelnames)

    def _samples(self) -> Iterator[Sample]:
        for values, spread in self._rows():
            labels = dict(zip(self._labelnames, values, strict=True))
            buckets = spread.buckets()
            for bound, count in buckets:
                yield Sample(f"{self.name}_bucket", {**labels, _LE: bound}, count)
            yield Sample(f"{self.name}_count", labels, buckets[-1][1])
            yield Sample(f"{self.name}_sum", labels, spread.total)

    def blocks(self) -> Iterator[tuple[int, str]]:
        name, le_at = self.name, self._le_at
        for values, spread in self._rows():
            before = self._pairs(values, last=le_at)
            after = self._pairs(values, first=le_at)
            begin = f'{name}_bucket{{{before}{"," if before else ""}{_LE}="'
            end = f'"{"," if after else ""}{after}}} '
            told = f"{{{self._pairs(values)}}}" if values else ""
            buckets = spread.buckets()
            lines = [f"{begin}{bound}{end}{number(count)}\n" for bound, count in buckets]
            lines.append(f"{name}_count{told} {number(buckets[-1][1])}\n")
            lines.append(f"{name}_sum{told} {number(spread.total)}\n")
            yield len(lines), "".join(lines)


def escaped(value: str) -> str:
    """A label's value as it stands in the text."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    value = float(value)
    # Above a million the format has an exponent.
    return repr(value) if 0 <= value < 1e6 else floatToGoString(value)
