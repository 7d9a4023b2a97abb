"""Tells on stderr what a place in line waits for: a line that changes on a terminal, one per change on a pipe.

stdout stays for what a command answers, or for the program that `yardctl run` becomes.
"""

from types import TracebackType

from rich.console import Console
from rich.status import Status

from controlplane.ctl.show import console
from schemas.cardasks import CardAnswer


class InLine:
    """`what` is what is waited for. Leaves nothing on a terminal when it is over."""

    def __init__(self, what: str, out: Console | None = None) -> None:
        self._what = what
        self._out = out or console(stderr=True)
        self._told = ""
        self._status: Status | None = None

    def tell(self, answer: CardAnswer) -> None:
        """Shows what an answer that is not final says."""
        text = f"{self._what}: {_why(answer)}"
        if text == self._told:
            return
        self._told = text
        if not self._out.is_terminal:
            self._out.print(text, soft_wrap=True)
            return
        if self._status is None:
            self._status = self._out.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def __enter__(self) -> "InLine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _why(answer: CardAnswer) -> str:
    ahead = ", ".join(answer.waiting_for)
    if answer.sentence:
        return answer.sentence
    return f"waiting for {ahead} to leave" if ahead else "waiting in line"
