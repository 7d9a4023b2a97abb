"""A decision as a batch: what each draft expects, and what must never be written."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.domain.decision import Change, Decision
from controlplane.domain.world import Head
from controlplane.drafts import OUTCOME_TTL_S, Line, NotWritable, drafts_of, expired, recorded_batch
from events.log import Appended
from schemas.commands import CommandAccepted, Outcome
from schemas.leader import LeaderDecided, LeaderLine
from schemas.model import Model, ModelAdded, ModelDeleted

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LINE = Line(instance="cp-1", term=9, decision="d-1", commands_position=44)
ADDED = Change(
    noun="model",
    key=("qwen2.5",),
    event=ModelAdded(by="anna"),
    state=Model(name="qwen2.5", incarnation="i"),
    reason="asked for",
)
OUTCOME = Outcome(id="c-1", actor="anna", name="model.add", status="accepted", at=NOW)


def test_every_draft_expects_the_world_it_was_decided_on_and_the_line_comes_last() -> None:
    decision = Decision(changes=(ADDED,), what="added", cause="c-1", actor="anna", outcome=OUTCOME)
    heads = {
        "yard.evt.model.qwen2%2E5": Head(seq=5, rev=3),
        "yard.evt.leader.log": Head(seq=6, rev=8),
    }
    model, outcome, line = drafts_of(decision, LINE, heads, "yard")
    assert (model.subject, model.expected_seq, model.rev) == ("yard.evt.model.qwen2%2E5", 5, 4)
    assert (model.actor, model.causationid, model.correlationid) == ("anna", "c-1", "c-1")
    assert (outcome.subject, outcome.expected_seq) == ("yard.evt.command.c-1", 0)
    assert (outcome.event, outcome.ttl_s) == (CommandAccepted(), OUTCOME_TTL_S)
    assert line.event == LeaderDecided(subjects=(model.subject, outcome.subject))
    assert line.state == LeaderLine(
        instance="cp-1", term=9, decision="d-1", what="added", cause="c-1", commands_position=44
    )
    assert line.rev == 9


@pytest.mark.parametrize("subject", ["yard.evt.model.qwen2%2E5", "yard.evt.leader.log"])
def test_an_event_that_was_not_fully_read_is_not_written_over(subject: str) -> None:
    heads = {subject: Head(seq=5, writable=False, problem="version 9 of model")}
    with pytest.raises(NotWritable, match="version 9 of model"):
        drafts_of(Decision(changes=(ADDED,), what="x"), LINE, heads, "yard")


def test_a_decision_may_not_change_one_subject_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        drafts_of(Decision(changes=(ADDED, ADDED), what="x"), LINE, {}, "yard")


def test_own_events_look_like_the_followers() -> None:
    drafts = drafts_of(Decision(changes=(ADDED,), what="x"), LINE, {}, "yard")
    model, line = recorded_batch(
        drafts, Appended(seqs=(11, 12), ids=("a", "b")), epoch=9, now=NOW, prefix="yard"
    )
    assert (model.seq, model.id, model.type, model.epoch) == (11, "a", "model.added", 9)
    assert (model.noun, model.key) == ("model", ("qwen2.5",))
    assert (line.noun, line.key) == ("leader.log", ())


def test_only_what_the_server_lets_go_is_forgotten() -> None:
    later = NOW + timedelta(seconds=OUTCOME_TTL_S + 61)
    assert expired(Head(seq=1, type="model.deleted", stored_at=NOW), later)
    assert expired(Head(seq=1, type="command.accepted", stored_at=NOW), later)
    assert not expired(Head(seq=1, type="command.accepted", stored_at=NOW), NOW)
    assert not expired(Head(seq=1, type="model.added", stored_at=NOW), later)
    assert ModelDeleted.__struct_config__.tag == "model.deleted"
