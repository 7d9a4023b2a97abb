"""What the agent does for a plan, by value."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from nodeagent.domain.assignments import (
    Drain,
    Forget,
    Halt,
    Held,
    LeaveLine,
    Observed,
    Refuse,
    Resume,
    Start,
    StayParked,
    Unpark,
    Wait,
    Withdraw,
    due_endings,
    plan,
    stop_all,
)
from nodeagent.domain.line import queue
from schemas.card import Card, Claim, Lease, Stowaway, Vm, Waiter
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


def test_one_that_is_being_parked_ends_at_once_when_that_is_wanted_and_is_told_so_once():
    forced = a_stop("leave", force=True)
    parks = held(phase="draining", stop=a_stop("d-1", park="may"), ending=True)
    halt = (Halt(replica="r-1", stop=forced),)
    assert stop_all(seen(parks), forced) == halt
    assert actions(an_item("r-1", stop=forced), observed=seen(parks)) == halt
    assert actions(an_item("r-1", stop=a_stop("d-2")), observed=seen(parks)) == ()
    told = held(phase="draining", stop=forced, ending=True)
    assert stop_all(seen(told), forced) == ()


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


# Cards that others have, wait for or keep.

GPU = Card(node="n1", id="gpu0", kind="gpu", memory_bytes=8 * GIB, rev=3)


def a_lease(holder: str, memory_gib: float, **fields) -> Lease:
    given = {"fence": 1, "since": NOW, "kind": "named", **fields}
    return Lease(holder=holder, memory_bytes=int(memory_gib * GIB), **given)


def on_gpu(*held: Lease, **fields) -> dict[str, Card]:
    return {"cpu": CPU, "gpu0": replace(GPU, leases=held, **fields)}


def gpu_item(name: str = "r-1", memory_gib: float = 4, **fields):
    return an_item(name, cards=("gpu0",), memory_bytes=int(memory_gib * GIB), **fields)


def test_req_d7_nothing_starts_on_a_card_that_is_kept():
    claim = Claim(id="c-1", name="doom", kind="game", since=NOW)
    pinned = a_lease("l-1", 8, name="train", exclusive=True, pinned=True)
    for cards, keeper in (
        (on_gpu(claims=(claim,)), "claim doom"),
        (on_gpu(vm=Vm(name="win", since=NOW)), "vm win"),
        (on_gpu(pinned), "lease train"),
    ):
        # Not even with room made by the plan: nobody who keeps a card leaves.
        (refuse,) = actions(gpu_item(evict=("l-1",)), observed=seen(cards=cards))
        assert isinstance(refuse, Refuse)
        assert refuse.reason == f"gpu0: kept by {keeper}"
        assert refuse.card_revs == {"gpu0": 3}


def test_req_d19_the_second_of_two_starts_on_one_free_card_is_refused_with_the_revision():
    whole = a_launch(exclusive=True)
    items = [gpu_item(f"r-{n}", 1, launch=whole) for n in (1, 2)]
    start, refuse = actions(*items, observed=seen(cards=on_gpu()))
    assert isinstance(start, Start)
    assert start.cards[0].leases[0].exclusive
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "gpu0: wanted whole, and r-1 has a lease there"
    assert refuse.card_revs == {"gpu0": 4}
    # And nobody may share with the first.
    start, refuse = actions(items[0], gpu_item("r-3", 1), observed=seen(cards=on_gpu()))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "gpu0: r-1 has the whole card"


def test_a_start_that_wants_the_card_whole_has_nobody_beside_it():
    stowaway = Stowaway(pid=9, name="x", memory_bytes=1, since=NOW)
    item = gpu_item(memory_gib=1, launch=a_launch(exclusive=True))
    (refuse,) = actions(item, observed=seen(cards=on_gpu(stowaways=(stowaway,))))
    assert isinstance(refuse, Refuse)
    assert "processes without a lease are there (9)" in refuse.reason
    # What a parked engine keeps is no hold on the card.
    parked = a_lease("r-9", 2, kind="parked")
    (start,) = actions(item, observed=seen(cards=on_gpu(parked)))
    assert isinstance(start, Start)


def test_room_that_others_wait_for_is_not_given_away():
    line = Waiter(id="l-2", since=NOW, memory_bytes=6 * GIB, cards=("gpu0",))
    cards = on_gpu(a_lease("l-1", 1), waiters=(line,))
    (refuse,) = actions(gpu_item(memory_gib=2), observed=seen(cards=cards))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "gpu0: needs 2.0 GiB, 7.0 GiB free, 6.0 GiB of it waited for"
    (start,) = actions(gpu_item(memory_gib=1), observed=seen(cards=cards))
    assert isinstance(start, Start)
    whole = replace(line, exclusive=True, name="train")
    cards = on_gpu(waiters=(whole,))
    (refuse,) = actions(gpu_item(memory_gib=1), observed=seen(cards=cards))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "gpu0: train waits for the card"


def in_line(item, cards: dict[str, Card], names: tuple[str, ...]) -> dict[str, Card]:
    waiter = Waiter(
        id=item.replica,
        since=NOW,
        kind="replica",
        memory_bytes=item.memory_bytes,
        cards=item.cards,
        waiting_for=names,
    )
    return cards | {change.card.id: change.card for change in queue(cards, waiter)}


def test_a_start_waits_for_the_named_leases_its_plan_evicts():
    cards = on_gpu(a_lease("l-1", 6))
    item = gpu_item(evict=("l-1",))
    (wait,) = actions(item, observed=seen(cards=cards))
    assert wait == Wait(item=item, waiting_for=("l-1",), place=1, new=True)
    waiting = held("r-1", "waiting", launch=item.launch, waiting_for=("l-1",), cards=("gpu0",))
    lined = in_line(item, cards, ("l-1",))
    assert actions(item, observed=seen(waiting, cards=lined)) == ()
    # Somebody else came before it: said again, and it stays in line.
    lined = in_line(item, cards, ("l-1", "l-7"))
    (again,) = actions(item, observed=seen(waiting, cards=lined))
    assert again == Wait(item=item, waiting_for=("l-1", "l-7"), place=1, new=False)
    # It has its lease: it starts by itself.
    own = a_lease("r-1", 4, kind="replica")
    (start,) = actions(item, observed=seen(waiting, cards=on_gpu(own)))
    assert isinstance(start, Start)
    assert start.cards[0].leases == (own,)
    # Out of line without one: refused with what stands against it.
    (refuse,) = actions(item, observed=seen(waiting, cards=on_gpu(a_lease("l-9", 6))))
    assert isinstance(refuse, Refuse)


def test_a_start_does_not_wait_for_who_may_stay_nor_when_that_would_not_do():
    for lease, memory in (
        (a_lease("l-1", 6, pinned=True), 4),
        (a_lease("l-1", 6, priority="foreground"), 4),
        (a_lease("l-1", 1), 9),
    ):
        item = gpu_item(memory_gib=memory, evict=("l-1",))
        (refuse,) = actions(item, observed=seen(cards=on_gpu(lease)))
        assert isinstance(refuse, Refuse), lease


def test_a_start_on_cpu_waits_for_as_many_parked_copies_as_needed():
    copies = tuple(
        a_lease(f"r-{n}", 0.25, kind="parked", since=NOW + timedelta(seconds=-n)) for n in (7, 8, 9)
    )
    cards = {"cpu": replace(CPU, leases=copies)}
    parked = [held(f"r-{n}", "parked") for n in (7, 8, 9)]
    planned = [an_item(f"r-{n}", stop=a_stop(park="may")) for n in (7, 8, 9)]
    item = an_item("r-1", memory_bytes=GIB // 2)
    (wait,) = actions(*planned, item, observed=seen(*parked, cards=cards))
    assert isinstance(wait, Wait)
    assert wait.waiting_for == ("r-9",)
    item = an_item("r-1", memory_bytes=2 * GIB)
    (refuse,) = actions(*planned, item, observed=seen(*parked, cards=cards))
    assert isinstance(refuse, Refuse)


def test_a_waiting_start_that_is_not_wanted_any_more_is_withdrawn():
    item = gpu_item(stop=a_stop())
    waiting = held("r-1", "waiting", launch=item.launch)
    assert actions(item, observed=seen(waiting)) == (Withdraw(item=item, replica="r-1"),)
    assert actions(observed=seen(waiting)) == (Withdraw(item=None, replica="r-1"),)


def test_the_agents_own_stop_holds_without_one_in_the_plan_and_before_another():
    own = a_stop("c-1", reason="claim", drain_timeout_s=30.0)
    wishes = {"r-1": own}
    (drain,) = actions(an_item("r-1"), observed=seen(held(), wishes=wishes))
    assert drain == Drain(replica="r-1", stop=own)
    draining = held(phase="draining", stop=own)
    for item in (an_item("r-1"), an_item("r-1", stop=a_stop("d-1", take_back=True))):
        assert actions(item, observed=seen(draining, wishes=wishes)) == ()
    # A drain under the plan's stop goes on under the agent's: it may not be taken back.
    idle = held(phase="draining", stop=a_stop("d-1", take_back=True))
    item = an_item("r-1", stop=a_stop("d-1", take_back=True))
    assert actions(item, observed=seen(idle, wishes=wishes)) == (Drain(replica="r-1", stop=own),)
    # The cause is gone: it serves on, or the plan's stop is carried out.
    assert actions(an_item("r-1"), observed=seen(draining)) == (
        Resume(replica="r-1", decision="c-1"),
    )
    (drain,) = actions(item, observed=seen(draining))
    assert drain == Drain(replica="r-1", stop=item.stop)
    # The cause stands again, under the same name.
    called_off = held(taken_back="c-1")
    assert actions(an_item("r-1"), observed=seen(called_off, wishes=wishes)) == (
        Drain(replica="r-1", stop=own),
    )
    # A loading one is halted.
    (halt,) = actions(an_item("r-1"), observed=seen(held(phase="starting"), wishes=wishes))
    assert halt == Halt(replica="r-1", stop=own)


def parked_on_gpu(**fields) -> Held:
    return held("r-1", "parked", launch=a_launch(), cards=("gpu0",), memory_bytes=4 * GIB, **fields)


OWN = a_lease("r-1", 1, kind="parked")


def test_a_parked_replica_without_a_stop_gets_its_cards_again():
    item = gpu_item()
    (unpark,) = actions(item, observed=seen(parked_on_gpu(), cards=on_gpu(OWN)))
    assert isinstance(unpark, Unpark)
    (lease,) = unpark.cards[0].leases
    assert (lease.kind, lease.memory_bytes, lease.fence) == ("replica", 4 * GIB, 4)
    # What it kept there is part of what it gets.
    (unpark,) = actions(gpu_item(memory_gib=8), observed=seen(parked_on_gpu(), cards=on_gpu(OWN)))
    assert isinstance(unpark, Unpark)


def test_a_parked_replica_without_room_says_so_once_for_each_state_of_its_cards():
    item = gpu_item()
    cards = on_gpu(OWN, a_lease("l-1", 5, pinned=True))
    (stay,) = actions(item, observed=seen(parked_on_gpu(), cards=cards))
    assert stay == StayParked(
        replica="r-1",
        reason="gpu0: needs 4.0 GiB, 3.0 GiB free of 8.0 GiB",
        card_revs={"gpu0": 3},
    )
    told = parked_on_gpu(card_revs={"gpu0": 3})
    assert actions(item, observed=seen(told, cards=cards)) == ()
    later = {"gpu0": replace(cards["gpu0"], rev=4)}
    (stay,) = actions(item, observed=seen(told, cards=later))
    assert isinstance(stay, StayParked)


def test_a_parked_replica_comes_back_behind_a_named_lease_that_leaves_for_it():
    item = gpu_item(evict=("l-1",))
    cards = on_gpu(OWN, a_lease("l-1", 5))
    (wait,) = actions(item, observed=seen(parked_on_gpu(), cards=cards))
    assert isinstance(wait, Wait)
    assert (wait.waiting_for, wait.new) == (("l-1",), True)
    lined = in_line(item, cards, ("l-1",))
    assert actions(item, observed=seen(parked_on_gpu(), cards=lined)) == ()
    # The wish to resume was withdrawn meanwhile.
    stopped = gpu_item(stop=a_stop(park="may"))
    assert actions(stopped, observed=seen(parked_on_gpu(), cards=lined)) == (
        LeaveLine(replica="r-1"),
    )


def test_a_parked_replica_that_had_its_cards_given_gives_them_back_when_it_is_to_stay():
    """It was granted what it was in line for, and the wish went in the same moment."""
    given = on_gpu(a_lease("r-1", 4))
    item = gpu_item(stop=a_stop(park="may"))
    assert actions(item, observed=seen(parked_on_gpu(), cards=given)) == (LeaveLine(replica="r-1"),)
    (unpark,) = actions(gpu_item(), observed=seen(parked_on_gpu(), cards=given))
    assert isinstance(unpark, Unpark)


def test_a_new_place_in_line_is_behind_who_came_before_whenever_it_was_planned():
    cards = on_gpu(a_lease("l-1", 7, process=None))
    first = in_line(gpu_item("r-1", memory_gib=1, evict=("l-1",)), cards, ("l-1",))
    planned_before = gpu_item("r-2", evict=("l-1",), decided_at=NOW - timedelta(hours=1))
    (wait,) = actions(planned_before, observed=seen(held("r-1", "waiting"), cards=first))[-1:]
    assert isinstance(wait, Wait)
    assert (wait.new, wait.place) == (True, 2)


def test_a_stop_that_lets_it_be_parked_leaves_a_parked_one_alone_and_another_ends_it():
    for park in ("may", "must"):
        item = gpu_item(stop=a_stop(park=park))
        assert actions(item, observed=seen(parked_on_gpu(), cards=on_gpu(OWN))) == ()
    item = gpu_item(stop=a_stop(park="never"))
    (halt,) = actions(item, observed=seen(parked_on_gpu(), cards=on_gpu(OWN)))
    assert halt == Halt(replica="r-1", stop=item.stop)
    # In no plan any more.
    (halt,) = actions(observed=seen(parked_on_gpu(stop=a_stop()), cards=on_gpu(OWN)))
    assert isinstance(halt, Halt)
    assert halt.stop.reason == "lost"
