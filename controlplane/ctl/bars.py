"""Shows how far bytes have come: a bar below the lines on a terminal, a line now and then on a pipe.

It counts nothing; whoever watches hands it each amount.
"""

from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from controlplane.ctl.jobview import Amount
from controlplane.ctl.show import size

PLAIN_EVERY_S: Final = 5.0
"""On a pipe progress is told at most this often."""


def bar_for(out: Console, indent: int) -> "Bar | Lines":
    """`indent` is where the text of the lines above begins, in columns."""
    return Bar(out) if out.is_terminal else Lines(out, indent)


class Lines:
    """Progress as lines of text, now and then."""

    def __init__(self, out: Console, indent: int) -> None:
        self._out = out
        self._indent = indent
        self._told_at: float | None = None
        self._told = ""

    def print(self, text: Text) -> None:
        self._out.print(text, soft_wrap=True)

    def show(self, amount: Amount, now_s: float) -> None:
        text = amount.text()
        if text == self._told:
            return
        if self._told_at is None or now_s - self._told_at >= PLAIN_EVERY_S:
            self._told_at, self._told = now_s, text
            self._out.print(" " * self._indent + text, soft_wrap=True)

    def hide(self) -> None:
        self._told_at = None

    def close(self) -> None:
        pass


class Bar:
    """Progress as a bar that lives below the lines and leaves nothing behind."""

    def __init__(self, out: Console) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._out = out

    def print(self, text: Text) -> None:
        target: Callable[..., None] = (
            self._progress.console.print if self._progress is not None else self._out.print
        )
        target(text, soft_wrap=True)

    def show(self, amount: Amount, now_s: float) -> None:
        del now_s
        if self._progress is None:
            self._progress = Progress(
                TextColumn(f"{'':<10} {{task.description}}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._out,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", rate="")
        assert self._task is not None
        self._progress.update(
            self._task,
            description=amount.what,
            completed=amount.bytes,
            total=amount.total or None,
            rate=f"{size(amount.rate_bytes_s)}/s" if amount.rate_bytes_s else "",
        )

    def hide(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def close(self) -> None:
        self.hide()
