"""A service's log tells what it decided, and no address another library was sent to."""

import subprocess
import sys

import pytest

SAID = """
import logging
from events.service import start_log
start_log("INFO")
logging.getLogger("controlplane").info("ours")
logging.getLogger({name!r}).info("GET https://anna:secret@registry/api")
"""


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_addresses_with_their_passwords_are_not_logged(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAID.format(name=name)], capture_output=True, text=True, timeout=30
    )
    assert "ours" in done.stderr
    assert "secret" not in done.stderr
