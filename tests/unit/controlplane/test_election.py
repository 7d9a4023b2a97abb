"""Who leads: every rule of the election, one by one, on values."""

from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from controlplane.candidate import process_alive
from controlplane.election import Seen, judge
from schemas.leader import Leader

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
OTHER = Leader(instance="cp-2", host="b", pid=7, since=SINCE)
MINE = Leader(instance="cp-1", host="a", pid=3, since=SINCE)


def seen(**given: Any) -> Seen:
    facts: dict[str, Any] = {
        "synced": True,
        "connected": True,
        "writable": True,
        "host": "a",
        "leader": OTHER,
        "term": 10,
        "candidacy": None,
        "elected_seq": None,
        "holder_alive": True,
        "leaving": False,
        "silent_s": 0.0,
        "silence_s": 3.0,
    }
    return Seen(**{**facts, **given})


@pytest.mark.parametrize(
    ("given", "act"),
    [
        ({"synced": False, "silent_s": 99.0}, "follow"),
        ({"connected": False, "silent_s": 99.0}, "follow"),
        ({"writable": False, "silent_s": 99.0}, "follow"),
        ({"leader": MINE, "candidacy": MINE}, "lead"),
        ({"leader": MINE, "candidacy": None, "silent_s": 1.0}, "follow"),
        ({"candidacy": MINE, "elected_seq": 11, "silent_s": 99.0}, "follow"),
        ({"candidacy": MINE, "elected_seq": 9, "silent_s": 3.0}, "stand"),
        ({"leader": None, "term": 0}, "stand"),
        ({"leader": OTHER, "host": "b", "holder_alive": False}, "stand"),
        ({"leader": OTHER, "host": "a", "holder_alive": False}, "follow"),
        ({"leaving": True}, "stand"),
        ({"silent_s": 2.99}, "follow"),
        ({"silent_s": 3.0}, "stand"),
    ],
)
def test_each_rule_of_the_election(given: dict[str, Any], act: str) -> None:
    assert judge(seen(**given)).act == act


def test_who_follows_looks_again_exactly_when_the_silence_would_be_long_enough() -> None:
    assert judge(seen(silent_s=1.0)).again_in_s == pytest.approx(2.0)


def test_a_process_counts_as_the_leader_only_if_it_is_older_than_the_record() -> None:
    me = psutil.Process()
    assert process_alive(me.pid, datetime.now(UTC))
    assert not process_alive(me.pid, datetime.fromtimestamp(me.create_time() - 60, UTC))
    assert not process_alive(2**22 + 1, datetime.now(UTC))
