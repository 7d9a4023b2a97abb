"""Ports of tests: no two workers have one in common, and none is given that somebody listens on."""

import socket

import pytest

from tests.support.ports import ENGINES, SERVERS, Ports, engine_ports, free_port, share


@pytest.mark.parametrize("all_of_them", [SERVERS, ENGINES])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_no_two_workers_have_a_port_in_common(all_of_them: range, count: int) -> None:
    parts = [share(all_of_them, number, count) for number in range(count)]
    together = [port for part in parts for port in part]
    assert len(together) == len(set(together))
    assert set(together) <= set(all_of_them)
    assert len(together) > len(all_of_them) - count


def test_each_is_given_once_before_one_comes_again() -> None:
    ports = Ports(range(9000, 9020))
    first = ports.take(7, not_these=(9003,))
    second = ports.take(7, not_these=(9003,))
    assert set(first) & set(second) == set()
    assert 9003 not in (*first, *second)
    with pytest.raises(AssertionError, match="no 21 free ports"):
        ports.take(21)


def test_one_that_is_listened_on_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        few = Ports(range(taken, taken + 2))
        assert few.take(1) == few.take(1) == [taken + 1]


def test_two_agents_in_turn_have_no_engine_port_in_common() -> None:
    assert set(engine_ports()) & set(engine_ports()) == set()
