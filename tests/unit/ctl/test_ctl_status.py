"""What `yardctl status` says at a glance, also of a yard that is not well."""

from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.ctl import reads
from controlplane.ctl.connect import Listed
from tests.support.aio import run


class Told:
    """An API of an empty yard."""

    def __init__(self, log_seq: int | None) -> None:
        self._doctor = {"log_seq": log_seq, "leader": None, "findings": []}

    async def get(self, path: str, **_: str) -> Any:
        return self._doctor if path == "/v1/doctor" else {"data": []}

    async def listed(self, path: str) -> Listed:
        return Listed(rows=[])


@pytest.mark.parametrize(("log_seq", "says"), [(None, "unknown"), (0, "0"), (459, "459")])
def test_the_end_of_a_log_that_nobody_can_read_is_unknown(
    log_seq: int | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(reads.show_status(Told(log_seq), "table", datetime.now(UTC)))  # pyright: ignore[reportArgumentType]
    assert f"log      sequence {says}\n" in capsys.readouterr().out
