"""How a command of yardctl ends without success: an exit code and a sentence, never a traceback."""

from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_REJECTED: Final = 2
EXIT_NOT_KNOWN: Final = 3
EXIT_USAGE: Final = 64
EXIT_UNREACHABLE: Final = 69
EXIT_INTERRUPTED: Final = 130


class CtlError(Exception):
    """`lines` are printed to stderr, the first after the program's name."""

    code = EXIT_FAILED

    def __init__(self, *lines: str) -> None:
        super().__init__(lines[0])
        self.lines = lines


class RejectedByYard(CtlError):
    """The control plane said no."""

    code = EXIT_REJECTED


class NotKnownYet(CtlError):
    """The command may or may not be carried out; the sentence holds its id."""

    code = EXIT_NOT_KNOWN


class UsageMistake(CtlError):
    """What was typed, or a file that was named, cannot be meant."""

    code = EXIT_USAGE


class Unreachable(CtlError):
    """Neither the API nor NATS answers where it should."""

    code = EXIT_UNREACHABLE


class SentPerhaps(Unreachable):
    """NATS went away while a command was being sent: it may have been stored, and be carried out."""
