"""The ports of engines: round robin, and none again before it rested."""

from datetime import UTC, datetime, timedelta

import pytest

from nodeagent.domain.ports import NoPort, PortBook, give, keep_resting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOOK = PortBook(first=20000, last=20003, rest_s=600.0)


def test_ports_are_given_in_turn():
    book, ports = BOOK, []
    for _ in range(4):
        port, book = give(book, NOW, lambda _: True)
        ports.append(port)
    assert ports == [20000, 20001, 20002, 20003]


def test_scn_a11_no_port_is_given_again_within_its_rest():
    book = BOOK
    for _ in range(4):
        _, book = give(book, NOW, lambda _: True)
    with pytest.raises(NoPort, match="20000-20003"):
        give(book, NOW + timedelta(seconds=599), lambda _: True)
    port, _ = give(book, NOW + timedelta(seconds=600), lambda _: True)
    assert port == 20000


def test_scn_a11_the_rest_begins_when_the_engine_ends_not_when_it_started():
    port, book = give(BOOK, NOW, lambda _: True)
    ended = NOW + timedelta(hours=5)
    book = keep_resting(book, port, ended)
    for _ in range(3):
        other, book = give(book, ended, lambda _: True)
        assert other != port
    with pytest.raises(NoPort):
        give(book, ended + timedelta(seconds=599), lambda p: p == port)


def test_a_port_somebody_else_uses_is_passed_over():
    port, book = give(BOOK, NOW, lambda p: p != 20000)
    assert port == 20001
    assert 20000 not in book.given


def test_a_changed_range_begins_at_its_start():
    port, _ = give(PortBook(first=30000, last=30009, rest_s=1, cursor=20002), NOW, lambda _: True)
    assert port == 30000
