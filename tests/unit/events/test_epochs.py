"""Which events come from somebody who had been replaced."""

from datetime import UTC, datetime

import pytest

from events.epochs import Epochs
from events.log import Recorded

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(
    seq: int, noun: str, *key: str, epoch: int, type_: str = "x.changed", source: str = "/agent/n"
) -> Recorded:
    return Recorded(
        seq=seq,
        subject=".".join(("yard.evt", noun, *key)),
        noun=noun,
        key=key,
        id=str(seq),
        type=type_,
        time=NOW,
        stored_at=NOW,
        rev=1,
        epoch=epoch,
        actor="a",
        reason="",
        event=None,
        state=None,
        source=source,
    )


def stale(*items: Recorded) -> list[int]:
    """Sequences judged stale when shown in this order."""
    epochs = Epochs()
    found: list[int] = []
    for item in items:
        if epochs.is_stale(item):
            found.append(item.seq)
        else:
            epochs.show(item)
    return found


def started(seq: int, node: str = "n") -> Recorded:
    return event(seq, "node", node, epoch=0, type_="node.started")


def test_an_event_of_an_earlier_run_written_late_is_stale() -> None:
    assert stale(
        started(1),
        event(2, "replica", "n", "r", epoch=1),
        started(5),
        event(6, "replica", "n", "r", epoch=1),
        event(7, "card", "n", "cpu", epoch=1),
        event(8, "replica", "n", "r", epoch=5),
        event(9, "node", "n", epoch=1, type_="node.stopped"),
        event(10, "replica", "other", "r", epoch=1),
    ) == [6, 7, 9]


def test_the_state_an_earlier_run_left_is_not_stale() -> None:
    # A first pass hands over the last event of each subject, in order of their sequences.
    assert (
        stale(
            event(2, "replica", "n", "r", epoch=1),
            event(7, "node", "n", epoch=5, type_="node.changed"),
            event(9, "card", "n", "cpu", epoch=5),
        )
        == []
    )


def test_without_following_the_node_its_events_tell_the_epoch() -> None:
    assert stale(
        event(6, "replica", "n", "a", epoch=5),
        event(7, "replica", "n", "b", epoch=1),
        event(8, "replica", "n", "c", epoch=5),
    ) == [7]


def test_a_control_event_of_an_older_term_on_the_same_subject_is_stale() -> None:
    cp = "/cp/a"
    assert stale(
        event(11, "model", "m", epoch=10, source=cp),
        event(12, "model", "m", epoch=4, source=cp),
        event(13, "model", "other", epoch=4, source=cp),
        event(14, "model", "m", epoch=10, source=cp),
    ) == [12]


def test_an_election_begins_a_term_whatever_it_carries() -> None:
    cp = "/cp/a"
    first = event(10, "leader.current", epoch=7, type_="leader.elected", source=cp)
    second = event(20, "leader.current", epoch=0, type_="leader.elected", source=cp)
    assert stale(first, second) == []


def test_what_the_control_plane_ended_for_a_removed_node_is_not_measured_against_it() -> None:
    assert stale(
        started(20),
        event(30, "replica", "n", "r", epoch=3, type_="replica.deleted", source="/cp/a"),
        event(31, "replica", "n", "s", epoch=3, type_="replica.deleted"),
        event(32, "replica", "n", "t", epoch=20),
    ) == [31]


def test_nouns_of_newer_programs_are_left_alone() -> None:
    assert stale(event(1, "dream", "a", epoch=9), event(2, "dream", "a", epoch=1)) == []


@pytest.mark.parametrize("forget", [True, False])
def test_a_replaced_history_begins_without_epochs(forget: bool) -> None:
    epochs = Epochs()
    epochs.show(started(50))
    if forget:
        epochs.forget()
    assert epochs.is_stale(event(51, "card", "n", "cpu", epoch=2)) is not forget
