"""Coverage-guided fuzzing of what reads bytes from the network: request heads, chunked bodies, heads known from before.

    make fuzz        (python -m tests.fuzz.heads tests/fuzz/corpus -max_total_time=60)

The first byte of an input chooses the target. An input may be refused; what may not happen is any other error, a head
that httptools takes but that no second reader takes in the same way, or a shortcut that reads other than the long way.
Inputs that found something new stay in the corpus.
"""

import importlib
import sys
from typing import Any, Final

# Not installed where the tests run: `make fuzz` has an environment of its own.
atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["gateway.domain", "gateway.http"]):
    from tests.fuzz import targets

TARGETS: Final = (targets.request_head, targets.chunked_body, targets.known_heads)


def one_input(data: bytes) -> None:
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
