"""When keys are needed, and where a gateway listens."""

import pytest

from gateway.domain.doors import KeysNeeded, is_loopback, needs_key, why_not_listen


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"],
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "::",
        "[::]",
        "10.0.0.1",
        "gateway.example",
        "localhost.example",
        "127.1",
        "fe80::1%lo",
    ],
)
def test_what_others_reach_or_may_reach_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("setting", "any_key", "beyond", "needed"),
    [
        ("auto", False, False, False),
        ("auto", True, False, True),
        # Also when the log that held the keys was replaced while others reach the port.
        ("auto", False, True, True),
        ("auto", True, True, True),
        ("required", False, False, True),
        ("required", True, True, True),
        ("off", True, True, False),
        ("off", False, False, False),
    ],
)
def test_when_a_key_is_needed(
    setting: KeysNeeded, any_key: bool, beyond: bool, needed: bool
) -> None:
    assert needs_key(setting, any_key=any_key, beyond_loopback=beyond) is needed


@pytest.mark.parametrize("setting", ["auto", "required"])
def test_without_a_key_nothing_listens_where_others_reach_it(setting: KeysNeeded) -> None:
    problem = why_not_listen(["127.0.0.1", "0.0.0.0"], setting, any_key=False)
    assert problem is not None
    assert "0.0.0.0" in problem
    assert "yardctl key create" in problem
    assert "gateway.keys: off" in problem
    assert why_not_listen(["0.0.0.0"], setting, any_key=True) is None
    assert why_not_listen(["127.0.0.1", "::1"], setting, any_key=False) is None
    assert why_not_listen([""], setting, any_key=False) is not None


def test_who_says_so_listens_anywhere_without_keys() -> None:
    assert why_not_listen(["0.0.0.0"], "off", any_key=False) is None
