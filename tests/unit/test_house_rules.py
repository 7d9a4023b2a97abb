"""The rules of the test run itself can fail: what conftest.py forbids is forbidden."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from events import server
from tests import conftest


def test_a_unit_test_opens_no_network_socket() -> None:
    with pytest.raises(AssertionError, match="may open no network socket"):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with pytest.raises(AssertionError, match="may open no network socket"):
        socket.create_connection(("127.0.0.1", 9))


def test_an_event_loop_and_unix_sockets_still_work() -> None:
    asyncio.run(asyncio.sleep(0))
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")
        assert other.recv(1) == b"x"


def test_every_process_of_a_run_carries_its_mark() -> None:
    assert os.environ[conftest.MARK]


def test_an_old_or_missing_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "binary", lambda: Path("/nowhere/nats-server"))
    assert "make setup" in (conftest.server_problem() or "")
    monkeypatch.setattr(server, "binary", lambda: Path("/bin/echo"))
    assert "instead of its version" in (conftest.server_problem() or "")
