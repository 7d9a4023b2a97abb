"""What the agent does for a plan, by value."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from nodeagent.domain.assignments import (
    Drain,
    Forget,
    Halt,
    Held,
    Observed,
    Refuse,
    Resume,
    Start,
    Withdraw,
    due_endings,
    plan,
    stop_all,
)
from schemas.card import Card
from schemas.plan import Plan
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_held as held
from tests.support.agent_yard import a_launch, a_stop, an_item

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CPU = Card(node="n1", id="cpu", kind="cpu", memory_bytes=GIB, rev=7)


def seen(*helds: Held, **fields) -> Observed:
    given = {
        "held": {h.replica.id: h for h in helds},
        "cards": {"cpu": CPU},
        "used": frozenset(),
        "unreported": frozenset(),
        "engines": frozenset({"command", "llamacpp"}),
        "allow_commands": True,
        **fields,
    }
    return Observed(**given)


def actions(*items, observed: Observed):
    return plan(Plan(node="n1", items=items), observed, NOW)


def test_a_new_item_starts_with_its_lease_in_the_same_step():
    item = an_item("r-1")
    (start,) = actions(item, observed=seen())
    assert isinstance(start, Start)
    assert [lease.holder for lease in start.cards[0].leases] == ["r-1"]
    assert start.cards[0].rev == 8


def test_inv_9_two_items_that_do_not_fit_together_the_second_is_refused_with_numbers():
    items = [an_item(f"r-{n}", memory_bytes=600 * MIB) for n in (1, 2)]
    start, refuse = actions(*items, observed=seen())
    assert isinstance(start, Start)
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "cpu: needs 600 MiB, 424 MiB free of 1.0 GiB"
    assert refuse.card_revs == {"cpu": 8}


def test_memory_measured_above_its_lease_counts():
    big = held("r-0", measured_memory_bytes=900 * MIB)
    card = replace(CPU, leases=())
    (start,) = actions(an_item("r-1"), observed=seen(cards={"cpu": card}))
    assert isinstance(start, Start)
    (with_lease,) = start.cards
    leased = replace(with_lease, leases=(replace(with_lease.leases[0], holder="r-0"),))
    (refuse,) = actions(an_item("r-0"), an_item("r-1"), observed=seen(big, cards={"cpu": leased}))
    assert isinstance(refuse, Refuse)


def test_a_satisfied_plan_needs_nothing():
    for phase in ("starting", "ready", "stopped", "failed", "refused", "withdrawn"):
        assert actions(an_item("r-1"), observed=seen(held(phase=phase))) == ()


def test_inv_4_an_id_is_started_once_even_when_its_replica_was_forgotten():
    assert actions(an_item("r-1"), observed=seen(used=frozenset({"r-1"}))) == ()


def test_a_plan_that_names_an_id_twice_means_one_replica():
    assert len(actions(an_item("r-1"), an_item("r-1"), observed=seen())) == 1


def test_inv_2_a_command_runs_only_where_the_node_allows_it():
    (refuse,) = actions(an_item("r-1"), observed=seen(allow_commands=False))
    assert isinstance(refuse, Refuse)
    assert "allow_commands" in refuse.reason
    assert refuse.card_revs == {"cpu": 7}


def test_an_engine_the_node_does_not_have_is_refused():
    item = an_item("r-1", launch=a_launch(engine="llamacpp"))
    (refuse,) = actions(item, observed=seen(engines=frozenset({"command"})))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "this node has no engine llamacpp"


def test_an_item_that_is_to_stop_before_it_started_is_withdrawn():
    item = an_item("r-1", stop=a_stop())
    assert actions(item, observed=seen()) == (Withdraw(item=item, replica="r-1"),)


def test_one_that_fetches_is_withdrawn_once_and_not_resumed():
    item = an_item("r-1", stop=a_stop())
    fetching = held("r-1", "fetching", launch=item.launch)
    assert actions(item, observed=seen(fetching)) == (Withdraw(item=item, replica="r-1"),)
    ending = held("r-1", "fetching", launch=item.launch, ending=True)
    assert actions(item, observed=seen(ending)) == ()
    assert actions(an_item("r-1"), observed=seen(ending)) == ()
    # In no plan any more.
    assert actions(observed=seen(fetching)) == (Withdraw(item=None, replica="r-1"),)
    assert actions(observed=seen(ending)) == ()


def test_a_loading_replica_is_halted_and_a_ready_one_drained():
    stop = a_stop()
    item = an_item("r-1", stop=stop)
    assert actions(item, observed=seen(held(phase="starting"))) == (Halt(replica="r-1", stop=stop),)
    assert actions(item, observed=seen(held())) == (Drain(replica="r-1", stop=stop),)


def test_a_stop_under_way_is_not_begun_again():
    stop = a_stop()
    item = an_item("r-1", stop=stop)
    assert actions(item, observed=seen(held(phase="draining", stop=stop))) == ()
    assert actions(item, observed=seen(held(phase="draining", stop=stop, ending=True))) == ()
    assert actions(item, observed=seen(held(phase="starting", stop=stop, ending=True))) == ()
    assert actions(item, observed=seen(held(phase="stop_failed", stop=stop, ending=True))) == ()


def test_force_or_another_decision_renews_a_drain():
    draining = held(phase="draining", stop=a_stop("d-1"))
    forced = a_stop("d-1", force=True)
    other = a_stop("d-2")
    for stop in (forced, other):
        item = an_item("r-1", stop=stop)
        assert actions(item, observed=seen(draining)) == (Drain(replica="r-1", stop=stop),)


def test_a_stop_that_was_taken_back_is_not_begun_again_but_the_next_one_is():
    ready = held(taken_back="d-1")
    assert actions(an_item("r-1", stop=a_stop("d-1")), observed=seen(ready)) == ()
    forced = a_stop("d-1", force=True)
    for stop in (forced, a_stop("d-2")):
        assert actions(an_item("r-1", stop=stop), observed=seen(ready)) == (
            Drain(replica="r-1", stop=stop),
        )


def test_demand_that_came_back_resumes_a_drain_until_the_process_was_told_to_end():
    stop = a_stop("d-1")
    item = an_item("r-1")
    assert actions(item, observed=seen(held(phase="draining", stop=stop))) == (
        Resume(replica="r-1", decision="d-1"),
    )
    assert actions(item, observed=seen(held(phase="draining", stop=stop, ending=True))) == ()


def test_an_ended_replica_is_forgotten_once_planned_no_more_and_reported():
    over = held(phase="stopped")
    assert actions(observed=seen(over, unreported=frozenset({"r-1"}))) == ()
    assert actions(observed=seen(over)) == (Forget(replica="r-1"),)


def test_a_replica_nobody_plans_is_stopped_as_lost_once():
    (drain,) = actions(observed=seen(held()))
    assert isinstance(drain, Drain)
    assert (drain.stop.reason, drain.stop.decision) == ("lost", "lost-r-1")
    (halt,) = actions(observed=seen(held(phase="starting")))
    assert isinstance(halt, Halt)
    assert actions(observed=seen(held(phase="draining", stop=drain.stop))) == ()


def test_stops_come_before_starts():
    stop = a_stop()
    got = actions(an_item("r-2"), an_item("r-1", stop=stop), observed=seen(held()))
    assert [type(action) for action in got] == [Drain, Start]


def test_leaving_with_the_engines_ends_each_as_its_phase_asks():
    stop = a_stop("leave", force=True)
    observed = seen(held("a"), held("b", "starting"), held("c", "stopped"), held("d", "draining"))
    assert stop_all(observed, stop) == (
        Drain(replica="a", stop=stop),
        Halt(replica="b", stop=stop),
        Drain(replica="d", stop=stop),
    )


def test_subjects_end_a_day_after_their_replica():
    day = timedelta(days=1)
    ended = {"r-2": NOW - day, "r-1": NOW - day, "r-3": NOW - day + timedelta(seconds=1)}
    assert due_endings(ended, 86400, NOW) == ("r-1", "r-2")
