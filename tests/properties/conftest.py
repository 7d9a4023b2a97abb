"""Gives properties more time than a test has: they count examples, and a busy machine only makes them slow."""

import pytest

TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            "tests/properties/" in item.path.as_posix()
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
