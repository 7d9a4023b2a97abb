"""What happens to a request for a model in each state the yard can be in."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.admission import (
    Keep,
    Refuse,
    Release,
    Route,
    Standing,
    Wait,
    admit,
    ends_the_wait,
    failed_start,
    queue_full,
    settle,
    timed_out,
)
from gateway.domain.answers import Answer
from gateway.domain.table import Table
from schemas.activation import ActivationPhase
from schemas.model import Scaling
from schemas.record import Measured
from tests.support.gateway_world import CHAT, NOW, Story, a_replica, folded

UP = Standing(synced=True, connected=True)


def ask(table: Table | None, name: str = "m", path: str = CHAT, **standing: Any) -> Any:
    fields: dict[str, Any] = {"synced": True, "connected": True}
    return admit(table, name, path, Standing(**(fields | standing)), NOW)


def code_of(found: object) -> str:
    assert isinstance(found, Answer), found
    return found.code


def test_a_ready_model_is_routed_by_name_and_by_alias() -> None:
    story = Story()
    table = folded(story.model(aliases=("x",)), story.replica())
    for name in ("m", "x"):
        found = ask(table, name)
        assert isinstance(found, Route)
        assert [r.id for r in found.candidates] == ["r-1"]
        assert found.model.name == "m"


def test_a_path_that_only_a_silent_replica_has_is_no_path_that_the_model_lacks() -> None:
    """A probe may bring it back at any moment: the client shall come again."""
    story = Story()
    table = folded(
        story.model(), story.replica(), story.replica("r-2", paths=(CHAT, "/v1/embeddings"))
    )
    assert isinstance(ask(table, path="/v1/embeddings"), Route)
    found = ask(table, path="/v1/embeddings", ejected=frozenset({"r-2"}))
    assert code_of(found) == "yard_unavailable"
    assert found.should_retry
    assert code_of(ask(table, path="/v1/score", ejected=frozenset({"r-2"}))) == (
        "endpoint_not_supported"
    )


def test_req_a14_an_unknown_model_is_never_loading() -> None:
    story = Story()
    table = folded(story.model(), story.activation("loading"))
    assert code_of(ask(table, "M")) == "model_not_found"
    # Only a table that holds the whole log can say so.
    assert code_of(ask(table, "M", synced=False)) == "yard_unavailable"


def test_req_a4_a_model_of_0_0_is_off_at_once() -> None:
    story = Story()
    table = folded(story.model(scaling=Scaling(min=0, max=0)))
    assert code_of(ask(table)) == "model_off"


def test_req_a15_an_off_model_answers_without_a_wait_even_with_a_replica_left() -> None:
    story = Story()
    table = folded(story.model(scaling=Scaling(min=0, max=0)), story.replica())
    assert code_of(ask(table)) == "model_off"


def test_req_a2_a_model_on_demand_is_waited_for() -> None:
    story = Story()
    found = ask(folded(story.model(scaling=Scaling(min=0, max=1))))
    assert isinstance(found, Wait)


@pytest.mark.parametrize("phase", ["wanted", "placing", "waiting", "loading"])
def test_a_model_on_its_way_is_waited_for_even_while_nats_is_away(phase: ActivationPhase) -> None:
    story = Story()
    table = folded(story.model(), story.activation(phase))
    assert isinstance(ask(table, connected=False), Wait)


def test_a_cold_model_while_nats_is_away_is_unavailable_at_once() -> None:
    story = Story()
    assert code_of(ask(folded(story.model()), connected=False)) == "yard_unavailable"


def test_a_replica_out_of_reach_may_come_back_even_while_nats_is_away() -> None:
    story = Story()
    table = folded(story.model(), story.replica())
    assert isinstance(ask(table, connected=False, ejected=frozenset({"r-1"})), Wait)


def test_without_a_table_nothing_is_known() -> None:
    assert code_of(ask(None)) == "yard_unavailable"


def test_a_gateway_that_ends_takes_nothing_new() -> None:
    story = Story()
    assert code_of(ask(folded(story.model(), story.replica()), draining=True)) == "draining"


def test_a_replica_that_does_not_answer_this_gateway_is_not_chosen() -> None:
    story = Story()
    table = folded(story.model(), story.replica("r-1"), story.replica("r-2"))
    found = ask(table, ejected=frozenset({"r-1"}))
    assert isinstance(found, Route)
    assert [r.id for r in found.candidates] == ["r-2"]
    assert isinstance(ask(table, ejected=frozenset({"r-1", "r-2"})), Wait)


def test_inv_2_a_path_the_replica_does_not_publish_is_not_forwarded() -> None:
    story = Story()
    table = folded(story.model(), story.replica())
    found = ask(table, path="/v1/embeddings")
    assert code_of(found) == "endpoint_not_supported"
    assert (found.status, found.should_retry, found.retry_after_s) == (501, False, None)
    assert code_of(ask(table, path="/pooling")) == "route_not_forwarded"


REFUSED = NOW + timedelta(seconds=30)


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("no_capacity", 503, 60),
        ("start_failed", 503, 30),
        ("model_quarantined", 503, 60),
        ("model_off", 503, None),
        ("model_not_found", 404, None),
        ("card_kept", 503, 60),
    ],
)
def test_a_standing_refusal_is_answered_at_once_with_its_reason(
    code: Any, status: int, retry: int | None
) -> None:
    story = Story()
    table = folded(
        story.model(),
        story.activation("refused", code=code, reason="gpu0: needs 9.2 GiB", retry_at=REFUSED),
    )
    found = ask(table)
    assert code_of(found) == code
    assert (found.status, found.retry_after_s) == (status, retry)
    if code != "model_not_found":
        assert "gpu0: needs 9.2 GiB" in found.message


def test_a_refusal_ends_with_its_time_a_changed_entry_or_a_cleared_record() -> None:
    story = Story()
    table = folded(story.model(), story.activation("refused", code="start_failed", retry_at=NOW))
    assert isinstance(ask(table), Wait)
    for renewal in (story.model(scaling=Scaling(max=2)), story.cleared()):
        table = folded(
            story.model(), story.activation("refused", code="start_failed", retry_at=REFUSED)
        )
        assert isinstance(ask(table), Answer)
        newer = story.event(renewal.noun, renewal.key, renewal.event, renewal.state)  # type: ignore[arg-type]
        table.apply(newer)
        assert isinstance(ask(table), Wait)


def test_req_x1_a_quarantined_model_says_why_and_until_when() -> None:
    story = Story()
    table = folded(story.model(), story.quarantined(REFUSED, "5 starts failed: out of memory"))
    found = ask(table)
    assert code_of(found) == "model_quarantined"
    assert "out of memory" in found.message
    assert "2026-03-01T12:00:30" in found.message
    # It is over with its time.
    table = folded(story.model(), story.quarantined(NOW - timedelta(seconds=1)))
    assert isinstance(ask(table), Wait)


# -- who waits ---------------------------------------------------------------------------------------


def test_those_who_wait_go_on_when_a_replica_is_ready() -> None:
    story = Story()
    table = folded(story.model(), story.replica("r-1", "starting"))
    assert settle(table, "m", UP, NOW) == Keep()
    table.apply(story.replica("r-1", "ready"))
    assert settle(table, "m", UP, NOW) == Release()
    ejected = Standing(synced=True, connected=True, ejected=frozenset({"r-1"}))
    assert settle(table, "m", ejected, NOW) == Keep()


def test_those_who_wait_for_a_model_that_goes_away_are_told() -> None:
    story = Story()
    table = folded(story.model(), story.model_gone())
    gone = settle(table, "m", UP, NOW)
    assert isinstance(gone, Refuse)
    assert (gone.answer.code, gone.decided_at) == ("model_not_found", None)
    off = settle(folded(story.model(scaling=Scaling())), "m", UP, NOW)
    assert isinstance(off, Refuse)
    assert (off.answer.code, off.decided_at) == ("model_off", None)


def test_req_a28_a_refusal_tells_who_joined_before_it() -> None:
    story = Story()
    table = folded(
        story.model(),
        story.activation("refused", code="start_failed", reason="no such file", retry_at=REFUSED),
    )
    told = settle(table, "m", UP, NOW)
    assert isinstance(told, Refuse)
    assert told.decided_at == 2
    assert told.answer.code == "start_failed"
    assert "no such file" in told.answer.message
    assert told.answer.retry_after_s == 30


def test_only_a_start_that_failed_ends_the_wait_for_it() -> None:
    story = Story()
    table = folded(story.model())
    failed = a_replica("r-1", "failed", last_line="CUDA out of memory")
    assert ends_the_wait(table, failed)
    assert "CUDA out of memory" in failed_start(table, failed, NOW).message
    # One that had served did not fail to start; and another may be on its way.
    assert not ends_the_wait(table, a_replica("r-1", "failed", was_ready=True))
    table.apply(story.replica("r-2", "starting"))
    assert not ends_the_wait(table, failed)


# -- the end of a wait -------------------------------------------------------------------------------


def test_req_a12_a_wait_that_ends_says_that_the_model_is_loading_and_when_to_come_back() -> None:
    story = Story()
    table = folded(
        story.model(),
        story.activation("loading", node="n1", expected_ready_at=NOW + timedelta(seconds=12)),
    )
    told = timed_out(table, "m", 45.0, NOW)
    assert (told.status, told.code, told.retry_after_s) == (503, "model_loading", 12)
    assert "loading on n1" in told.message


def test_a_wait_that_ends_in_the_queue_for_room_says_so() -> None:
    story = Story()
    measured = (Measured(profile="cpu", card_kind="cpu", memory_bytes=1, load_s=(9.0,)),)
    table = folded(
        story.model(),
        story.model("other"),
        story.replica("r-9", model="other"),
        story.record("other", measured=measured),
        story.activation("waiting", waiting_for=("r-9",)),
    )
    told = timed_out(table, "m", 45.0, NOW)
    assert (told.code, told.retry_after_s) == ("no_capacity", 9)
    assert "r-9" in told.message
    # Nothing measured of whoever is in the way.
    later = timed_out(folded(story.model(), story.activation("waiting")), "m", 45.0, NOW)
    assert later.retry_after_s == 1


def test_a_wait_that_ends_behind_a_kept_card_says_so() -> None:
    story = Story()
    table = folded(
        story.model(), story.activation("waiting", code="card_kept", waiting_for=("a VM",))
    )
    assert timed_out(table, "m", 45.0, NOW).code == "card_kept"


def test_a_full_room_names_its_limit() -> None:
    story = Story()
    told = queue_full(folded(story.model()), "m", "requests", 1000, NOW)
    assert (told.code, told.retry_after_s) == ("queue_full", 1)
    assert "1000 requests" in told.message
