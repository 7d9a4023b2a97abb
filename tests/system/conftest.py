"""What the whole tier shares: the server that runs yardctl for every test, and the order of the tests.

Tests that are allowed longest begin first: of two processes that share the tier, neither ends with a long one
while the other has nothing left.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.system.yard import CTL

HERE: Final = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("yard")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After pytest-randomly; among those allowed equally long its order stays."""

    def allowed_s(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark is not None else 0.0

    of_tier = [n for n, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[n] for n in of_tier), key=allowed_s, reverse=True)
    for n, item in zip(of_tier, ordered, strict=True):
        items[n] = item


@pytest.fixture(scope="session", autouse=True)
def _ctl_ends_with_the_tests() -> Iterator[None]:
    yield
    CTL.close()
