"""What commands do, and what they answer."""

from datetime import timedelta

import msgspec
import pytest

from events.log import Broken, StoredCommand
from events.subjects import event_subject
from schemas.commands import (
    CatalogApply,
    Command,
    ModelActivate,
    ModelAdd,
    ModelLoad,
    ModelRemove,
    ModelScale,
    ModelUnload,
)
from schemas.model import ModelChanged
from tests.support.worlds import Yard, model, yard

ENTRY = {
    "name": "a",
    "source": "/models/a.gguf",
    "scaling": {"min": 0, "max": 1},
    "profiles": [{"name": "p", "engine": "llamacpp", "memory": "1GiB", "card": "gpu"}],
}


def test_model_add_is_in_the_catalog_and_loads_nothing() -> None:
    y = yard()
    outcome = y.do(ModelAdd(entry=ENTRY))
    assert outcome.status == "accepted"
    assert outcome.refs == (event_subject("model", "a"),)
    assert y.items() == []
    assert y.request("a") == "waits"
    y.until(lambda: y.ready("a"), 10)


def test_a_repeated_command_has_one_effect_and_its_first_outcome() -> None:
    y = yard()
    first = y.do(ModelAdd(entry=ENTRY), id_="same")
    before = len(y.log)
    assert y.do(ModelAdd(entry=ENTRY), id_="same") == first
    assert len(y.log) == before


def test_the_same_entry_again_is_refused_by_add() -> None:
    y = yard()
    y.do(ModelAdd(entry=ENTRY))
    outcome = y.do(ModelAdd(entry=ENTRY))
    assert (outcome.status, outcome.code) == ("rejected", "exists")


def test_an_old_command_is_rejected_as_expired() -> None:
    y = yard()
    id_ = y.send(ModelAdd(entry=ENTRY), ttl_s=60)
    y.now += timedelta(seconds=61)
    y.settle()
    assert y.world.outcomes[id_].code == "expired"
    assert y.world.models == {}


def test_an_old_activate_is_dropped_without_a_trace() -> None:
    y = yard().add(model("a"))
    y.settle()
    y.send_activate("a")
    before = len(y.log)
    y.now += timedelta(seconds=61)
    y.settle()
    assert len(y.log) == before


def test_an_unreadable_command_is_rejected_when_its_id_is_known() -> None:
    y = yard()
    broken = StoredCommand(
        seq=1,
        subject="yard.cmd.admin.model.add",
        actor="admin",
        name="model.add",
        stored_at=y.now,
        command=None,
        problem="unknown field `modle` at $.body",
        id="c-77",
    )
    y.pending.append(broken)
    y.pending.append(msgspec.structs.replace(broken, seq=2, id=None))
    y.settle()
    outcome = y.world.outcomes["c-77"]
    assert (outcome.code, outcome.sentence) == ("invalid", "unknown field `modle` at $.body")
    assert len(y.world.outcomes) == 1
    assert y.pending == []


def test_req_a15_an_off_model_is_never_started_and_nothing_is_written() -> None:
    y = yard().add(model("a", maximum=0))
    y.settle()
    before = len(y.log)
    y.send_activate("a")
    y.advance(10)
    assert len(y.log) == before
    assert y.items() == []


def test_req_a14_an_unknown_model_leaves_no_trace() -> None:
    y = yard()
    before = len(y.log)
    y.send_activate("nobody")
    y.settle()
    assert len(y.log) == before


def test_req_a26_parallel_first_requests_are_one_demand() -> None:
    y = yard().add(model("a"))
    for _ in range(20):
        y.send_activate("a")
    y.settle()
    assert y.events("activation") == ["activation.placing"]
    assert len(y.items("a")) == 1


def test_load_starts_one_more_up_to_max_and_says_so() -> None:
    y = yard(gpu0=8, gpu1=8, gpu2=8).add(model("a", maximum=2, idle_s=600))
    for expected in (1, 2, 2):
        y.do(ModelLoad(model="a"))
        y.advance(5)
        assert len(y.ready("a")) == expected
    assert y.do(ModelLoad(model="a")).sentence == "a runs 2 of at most 2 already"


def test_load_while_the_first_one_loads_starts_the_second_after_it() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", maximum=2))
    y.request("a")
    y.turn()
    y.do(ModelLoad(model="a"))
    assert y.activation("a").replicas == 2
    assert len(y.items("a")) == 1, "one load at a time"
    y.until(lambda: len(y.ready("a")) == 2, 10)


def test_load_and_unload_of_an_off_or_unknown_model_are_refused() -> None:
    y = yard().add(model("a", maximum=0))
    for body in (ModelLoad(model="a"), ModelUnload(model="a")):
        outcome = y.do(body)
        assert (outcome.status, outcome.code) == ("rejected", "conflict")
        assert "is off (max 0)" in outcome.sentence
    for body in (ModelLoad(model="b"), ModelUnload(model="b")):
        assert y.do(body).code == "not_found"


def test_unload_drains_and_is_refused_while_min_keeps_it() -> None:
    y = yard().add(model("a"), model("b", minimum=1))
    y.request("a")
    y.until(lambda: y.answered and y.ready("b"), 10)
    assert y.do(ModelUnload(model="b")).code == "conflict"
    y.request("a", stream_s=20)
    outcome = y.do(ModelUnload(model="a"))
    assert outcome.sentence == f"a: {y.items('a')[0][1].replica} to stop"
    assert y.phase("a") == "idle"
    y.advance(15)
    assert y.streams, "requests finish"
    y.until(lambda: not y.items("a"), 10)
    assert y.do(ModelUnload(model="a")).sentence == "a is not loaded"


def test_unload_by_force_ends_what_runs() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.request("a", stream_s=900)
    y.do(ModelUnload(model="a"))
    y.advance(5)
    assert y.items("a")[0][1].stop is not None
    y.do(ModelUnload(model="a", force=True))
    y.until(lambda: not y.items("a"), 2)


@pytest.mark.parametrize("for_s", [0.0, -1.0, 1e12, 1e300])
def test_a_hold_of_no_sensible_length_is_refused(for_s: float) -> None:
    y = yard().add(model("a"))
    outcome = y.do(ModelLoad(model="a", for_s=for_s))
    assert (outcome.status, outcome.code) == ("rejected", "invalid")
    assert "--for" in outcome.sentence
    assert y.items() == []


def test_unload_ends_a_hold() -> None:
    y = yard().add(model("a"))
    y.do(ModelLoad(model="a", for_s=3600))
    y.until(lambda: y.ready("a"), 10)
    y.do(ModelUnload(model="a"))
    y.until(lambda: not y.items(), 5)
    assert y.activation("a").hold_until is None


def test_scale_starts_and_stops() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", maximum=2))
    y.do(ModelScale(model="a", min=2, max=2))
    y.until(lambda: len(y.ready("a")) == 2, 20)
    y.do(ModelScale(model="a", min=1, max=1))
    y.until(lambda: len(y.items("a")) == 1, 10)
    y.do(ModelScale(model="a", min=0, max=0))
    y.until(lambda: not y.items("a"), 10)


def test_demand_of_a_model_that_is_switched_off_is_refused() -> None:
    y = yard().add(model("a"))
    y.engine("a").load_s = 100
    y.request("a")
    y.advance(1)
    y.do(ModelScale(model="a", min=0, max=0))
    assert y.phase("a") == "refused"
    assert y.activation("a").code == "model_off"
    y.until(lambda: not y.items(), 5)
    y.do(ModelScale(model="a", min=0, max=1))
    y.engine("a").load_s = 1
    y.send_activate("a")
    y.until(lambda: y.ready("a"), 10)


def test_remove_ends_everything_of_the_model_and_drains_its_replicas() -> None:
    y = yard().add(model("a"))
    y.request("a")
    y.until(lambda: y.answered, 10)
    outcome = y.do(ModelRemove(model="a"))
    assert outcome.status == "accepted"
    assert y.world.models == y.world.activations == y.world.records == {}
    assert [item.stop.reason for _, item in y.items() if item.stop] == ["removed"]
    y.until(lambda: not y.items(), 10)
    before = len(y.log)
    y.advance(30)
    assert len(y.log) == before


def test_a_readded_name_is_another_model_and_starts_its_own_replica() -> None:
    y = yard()
    y.do(ModelAdd(entry=ENTRY))
    y.request("a")
    y.until(lambda: y.answered, 10)
    [old] = y.ready("a")
    y.do(ModelRemove(model="a"))
    y.do(ModelAdd(entry=ENTRY))
    y.send_activate("a")
    y.until(lambda: y.ready("a") not in ([], [old]), 20)
    assert len(y.items("a")) == 1
    assert y.world.replicas[old].phase == "stopped"


def test_apply_dry_run_tells_what_would_happen_and_changes_nothing() -> None:
    y = yard()
    y.do(ModelAdd(entry=ENTRY))
    y.request("a")
    y.until(lambda: y.answered, 10)
    y.advance(1)
    before = len(y.log)
    changed = {**ENTRY, "profiles": [{**ENTRY["profiles"][0], "memory": "2GiB"}]}  # type: ignore[dict-item]
    other = {**ENTRY, "name": "b", "scaling": {"min": 1, "max": 1}}
    outcome = y.do(CatalogApply(entries=[changed, other], dry_run=True))
    assert outcome.status == "accepted"
    assert outcome.refs == ()
    assert any("drains and stops" in line for line in outcome.lines)
    assert any("1 to start" in line for line in outcome.lines)
    assert len(y.log) == before + 1, "the outcome alone"


def _break(y: Yard, noun: str, *key: str) -> None:
    y._seq += 1
    y.world.apply(Broken(seq=y._seq, subject=event_subject(noun, *key), why="not JSON"))


def test_a_command_over_a_broken_aggregate_is_refused_and_names_it() -> None:
    y = yard().add(model("a"), model("b"))
    y.settle()
    _break(y, "model", "a")
    outcome = y.do(ModelScale(model="a", min=1, max=1))
    assert (outcome.status, outcome.code) == ("rejected", "broken")
    assert "yard.evt.model.a" in outcome.sentence
    assert "not JSON" in outcome.sentence


def test_a_newer_aggregate_needs_an_upgrade() -> None:
    y = yard().add(model("a"))
    y.settle()
    subject = event_subject("model", "a")
    y.world.heads[subject] = msgspec.structs.replace(
        y.world.heads[subject], writable=False, problem="version 2"
    )
    assert y.do(ModelScale(model="a", min=1, max=1)).code == "upgrade_required"


def test_a_broken_activation_stops_only_its_own_model() -> None:
    y = yard().add(model("a"), model("b"))
    y.request("a")
    y.turn()
    _break(y, "activation", "a", "any")
    y.request("b")
    y.until(lambda: y.ready("b"), 10, "others go on")
    assert y.step().stuck == ("a (any)",)


def test_a_broken_plan_takes_its_node_out_of_placement() -> None:
    y = Yard().node("n1", {"gpu0": 8}).node("n2", {"gpu0": 8})
    y.settle()
    _break(y, "plan", "n1")
    y.add(model("a"))
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    assert y.activation("a").node == "n2"


def test_commands_are_settled_in_stream_order_one_a_step() -> None:
    y = yard().add(model("a"))
    y.settle()
    y.send(ModelScale(model="a", min=0, max=3))
    y.send(ModelScale(model="a", min=0, max=2))
    first = y.step()
    assert first.consumed is y.pending[0]
    y.settle()
    assert y.world.models["a"].scaling.max == 2


def test_the_cause_and_the_actor_go_with_the_decision() -> None:
    y = yard().add(model("a"))
    y.settle()
    command = Command(id="c-9", body=ModelActivate(model="a"), correlationid="req-1")
    y.pending.append(
        StoredCommand(
            seq=1,
            subject="yard.cmd.gateway.model.activate",
            actor="gateway",
            name="model.activate",
            stored_at=y.now,
            command=command,
        )
    )
    decision = y.step().decision
    assert decision is not None
    assert (decision.cause, decision.actor, decision.correlationid) == ("c-9", "gateway", "req-1")
    assert decision.outcome is None


def test_req_a5_a_changed_limit_keeps_an_off_model_off() -> None:
    y = yard().add(model("a", maximum=0))
    changed = model("a", maximum=0, idle_s=5)
    y.append("model", ("a",), ModelChanged(by="t", fields=("scaling",)), changed)
    y.advance(5)
    assert y.items() == []


def test_inv_11_asking_again_for_what_fits_nowhere_writes_nothing_before_its_time() -> None:
    y = yard(gpu0=8).add(model("a", 20))
    y.send_activate("a")
    y.settle()
    before = len(y.log)
    for _ in range(50):
        y.now += timedelta(seconds=1)
        y.send_activate("a")
        y.settle()
    assert len(y.log) == before
    y.now += timedelta(seconds=11)
    y.send_activate("a")
    y.settle()
    assert len(y.log) == before + 1, "and one answer when its time has come"


def test_a_demand_in_the_queue_that_cannot_be_written_is_named() -> None:
    y = Yard().add(model("a"))
    y.request("a")
    y.turn()
    assert y.phase("a") == "wanted", "there is no node yet"
    _break(y, "activation", "a", "any")
    y.node("n1", {"gpu0": 8})
    y.advance(5)
    assert y.step().stuck == ("a (any)",)


@pytest.mark.parametrize("id_", ["", "x" * 129])
def test_an_id_that_names_no_subject_is_settled_and_others_go_on(id_: str) -> None:
    y = yard().add(model("a"))
    y.send(ModelScale(model="a", min=0, max=2), id_=id_)
    y.pending[-1] = msgspec.structs.replace(
        y.pending[-1],
        command=Command(id=id_, body=ModelScale(model="a", min=0, max=2)),
        id=id_,
    )
    assert y.do(ModelScale(model="a", min=0, max=3)).status == "accepted"
    assert len(y.world.outcomes) == 1


@pytest.mark.parametrize("scope", ["", "gpu0", "n1~" + "x" * 400])
def test_a_scope_that_names_no_card_writes_nothing(scope: str) -> None:
    y = yard().add(model("a"))
    y.settle()
    before = len(y.log)
    y.send(ModelActivate(model="a", scope=scope), actor="gateway")
    y.settle()
    assert len(y.log) == before
    assert y.pending == []


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ("n1~gpu7", "n1 has no card gpu7; it has gpu0"),
        ("n9~gpu0", "there is no node n9; known: n1"),
    ],
)
def test_req_x1_a_card_that_no_node_has_is_refused_with_what_there_is(
    scope: str, said: str
) -> None:
    y = yard().add(model("a"))
    y.send(ModelActivate(model="a", scope=scope), actor="gateway")
    y.settle()
    refused = y.world.activations[("a", scope)]
    assert (refused.phase, refused.code, refused.reason) == ("refused", "no_capacity", said)
    assert refused.retry_at == y.now + timedelta(seconds=60)
    assert y.items() == []


def test_inv_11_cards_that_are_not_there_are_refused_once_a_few_at_a_time_and_forgotten() -> None:
    y = yard().add(model("a"))
    y.settle()
    before = len(y.log)
    for turn in range(3):
        for n in range(100):
            y.send(ModelActivate(model="a", scope=f"n1~x{n}", rev=turn), actor="gateway")
    y.settle(bound=400)
    assert len(y.log) - before == 16
    y.now += timedelta(seconds=61)
    y.settle()
    assert len(y.log) - before == 32, "each ends with a tombstone"
    assert [scope for _, scope in y.world.activations] == []
    y.send(ModelActivate(model="a", scope="n1~x0"), actor="gateway")
    y.settle()
    assert y.phase("a", "n1~x0") == "refused"


def test_a_refusal_for_a_card_that_appeared_meanwhile_is_kept_and_not_in_the_way() -> None:
    y = yard().add(model("a"))
    y.send(ModelActivate(model="a", scope="n2~gpu0"), actor="gateway")
    y.settle()
    y.node("n2")
    y.now += timedelta(seconds=61)
    y.settle()
    y.send(ModelActivate(model="a", scope="n2~gpu0"), actor="gateway")
    y.until(lambda: y.phase("a", "n2~gpu0") == "ready", 10)


def test_a_demand_for_one_card_follows_only_what_runs_on_that_card() -> None:
    y = yard(gpu0=8, gpu1=8).add(model("a", 6, maximum=2))
    y.request("a")
    y.until(lambda: y.ready("a"), 10)
    [first] = y.ready("a")
    [card] = y.world.replicas[first].cards
    other = "gpu1" if card == "gpu0" else "gpu0"
    y.send(ModelActivate(model="a", scope=f"n1~{card}"), actor="gateway")
    y.send(ModelActivate(model="a", scope=f"n1~{other}"), actor="gateway")
    y.settle()
    here, there = (y.world.activations[("a", f"n1~{name}")] for name in (card, other))
    assert (here.phase, here.replica) == ("ready", first)
    assert there.phase == "placing", "what runs elsewhere is no answer"
    y.until(lambda: y.phase("a", f"n1~{other}") == "ready", 10)
    second = y.world.activations[("a", f"n1~{other}")].replica
    assert second is not None
    assert y.world.replicas[second].cards == (other,)


def test_a_command_that_fits_no_batch_is_refused() -> None:
    y = yard().add(*(model(f"m{n:04}") for n in range(901)))
    y.settle()
    outcome = y.do(CatalogApply(entries=[], prune=True))
    assert (outcome.status, outcome.code) == ("rejected", "invalid")
    assert "901 events at once" in outcome.sentence
    assert len(y.world.models) == 901


def test_an_outcome_stays_small_however_much_is_wrong() -> None:
    y = yard()
    wrong: list[dict[str, object]] = [{"name": "x" * 20_000}, *({} for _ in range(9_000))]
    outcome = y.do(CatalogApply(entries=wrong))
    assert outcome.status == "rejected"
    assert len(msgspec.json.encode(outcome)) < 100_000
