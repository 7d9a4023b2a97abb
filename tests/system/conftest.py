"""What the whole tier shares: the server that runs yardctl for every test, ended with the last one."""

from collections.abc import Iterator

import pytest

from tests.system.yard import CTL


@pytest.fixture(scope="session", autouse=True)
def _ctl_ends_with_the_tests() -> Iterator[None]:
    yield
    CTL.close()
