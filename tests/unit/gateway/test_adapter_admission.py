"""What happens to a request for an adapter before any agent is asked, and how adapters are listed."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.domain.adapteranswers import at_fault, no_place, not_loaded
from gateway.domain.admission import Route, Standing, Wait, admit
from gateway.domain.answers import Answer
from gateway.domain.cards import CardRef
from gateway.domain.status import adapter_card, model_list
from gateway.domain.table import Table
from schemas.model import Scaling
from tests.support.gateway_world import CHAT, NOW, Story, a_profile, folded

HERE = Standing(synced=True, connected=True)


def asked(table: Table, name: str = "poet", **fields: Any) -> Route | Wait | Answer:
    fields.setdefault("standing", HERE)
    return admit(table, name, CHAT, now=NOW, **fields)


def code(found: Route | Wait | Answer) -> str:
    assert isinstance(found, Answer)
    return found.code


def test_an_adapter_is_a_use_of_its_base_and_goes_to_replicas_that_load_some() -> None:
    story = Story()
    table = folded(
        story.model(max_loaded_adapters=4, scaling=Scaling(max=3)),
        story.adapter(),
        story.replica("r-1", adapter_slots=4),
        story.replica("r-2"),
        story.replica("r-3", adapter_slots=4, paths=("/v1/embeddings",)),
    )
    found = asked(table, "m:poet")
    assert isinstance(found, Route)
    assert (found.model.name, [r.id for r in found.candidates]) == ("m", ["r-1"])
    assert found.adapter is table.adapters.entries["poet"]
    # A request for the base goes anywhere, and is none for an adapter.
    base = asked(table, "m")
    assert isinstance(base, Route)
    assert ([r.id for r in base.candidates], base.adapter) == (["r-1", "r-2"], None)
    ejected = Standing(synced=True, connected=True, ejected=frozenset({"r-1"}))
    assert code(asked(table, standing=ejected)) == "yard_unavailable"


def test_a_cold_base_is_waited_for_by_its_own_name() -> None:
    story = Story()
    table = folded(story.model(max_loaded_adapters=4), story.adapter())
    found = asked(table)
    assert isinstance(found, Wait)
    assert (found.model.name, found.scope) == ("m", "any")
    assert found.adapter is not None
    assert code(asked(table, standing=Standing(synced=True, connected=False))) == "yard_unavailable"


@pytest.mark.parametrize(("phase", "doing"), [("reading", "read"), ("fetching", "fetched")])
def test_an_adapter_on_its_way_says_so_at_once_and_when_to_come_back(
    phase: Any, doing: str
) -> None:
    story = Story()
    since = NOW - timedelta(seconds=36)
    table = folded(
        story.model(max_loaded_adapters=4),
        story.adapter(phase=phase, since=since, version=""),
        story.replica(adapter_slots=4),
    )
    found = asked(table)
    assert isinstance(found, Answer)
    assert (found.code, found.status, found.retry_after_s) == ("model_loading", 503, 9)
    assert f"is being {doing}" in found.message
    assert found.should_retry


def test_scn_d9_a_refused_adapter_is_a_name_nobody_serves_with_the_reason() -> None:
    story = Story()
    reason = "it was trained with DoRA (use_dora), which engines do not serve"
    table = folded(
        story.model(max_loaded_adapters=4),
        story.adapter(phase="refused", code="unsupported_adapter", reason=reason),
        story.replica(adapter_slots=4),
    )
    found = asked(table)
    assert isinstance(found, Answer)
    assert (found.code, found.status, found.param) == ("model_not_found", 404, "model")
    assert reason in found.message
    assert "'m:poet'" in asked(table, "m:poet").message  # type: ignore[union-attr]


def test_a_refusal_tells_clients_no_folder_of_the_control_planes_machine() -> None:
    story = Story()
    table = folded(
        story.model(max_loaded_adapters=2),
        story.adapter(
            phase="refused",
            code="not_an_adapter",
            source="/srv/loras/poet/",
            reason="/srv/loras/poet has no adapter_config.json",
        ),
    )
    told = asked(table)
    assert isinstance(told, Answer)
    assert told.message.endswith("cannot be served: its folder has no adapter_config.json")


def test_a_base_that_is_off_or_loads_none_or_is_gone_starts_nothing() -> None:
    story = Story()
    table = folded(story.model(max_loaded_adapters=4, scaling=Scaling()), story.adapter())
    assert code(asked(table)) == "model_off"
    table.apply(story.adapter(phase="reading"))
    assert code(asked(table)) == "model_off"
    table.apply(story.model(scaling=Scaling(max=1)))
    assert code(asked(table)) == "model_not_found"
    table.apply(story.model_gone())
    assert code(asked(table)) == "model_not_found"


def test_an_unknown_adapter_is_unknown_only_to_who_has_read_everything() -> None:
    table = folded(Story().model(max_loaded_adapters=4))
    assert code(asked(table, "m:nobody")) == "model_not_found"
    stale = Standing(synced=False, connected=False)
    assert code(asked(table, "m:nobody", standing=stale)) == "yard_unavailable"


def test_under_the_base_url_of_a_card_only_replicas_there() -> None:
    story = Story()
    table = folded(
        story.model(max_loaded_adapters=4, scaling=Scaling(max=2), profiles=(a_profile("gpu"),)),
        story.adapter(),
        story.cards("n1", "gpu0", "gpu1"),
        story.replica("r-1", adapter_slots=4, cards=("gpu0",)),
        story.replica("r-2", adapter_slots=4, cards=("gpu1",)),
    )
    found = asked(table, on=CardRef(node="n1", card="gpu1"))
    assert isinstance(found, Route)
    assert [r.id for r in found.candidates] == ["r-2"]
    there = [c.id for c in model_list(table, NOW, waiting={}, scope="n1~gpu1").data]
    assert there == ["m", "poet"]
    assert [c.id for c in model_list(table, NOW, waiting={}, scope="n1~cpu").data] == []


def test_an_adapters_card_is_its_bases_standing_with_what_is_loaded() -> None:
    story = Story()
    table = folded(
        story.model(max_loaded_adapters=4, context_length=2048),
        story.adapter(aliases=("x",)),
    )
    entry = table.adapters.entries["poet"]
    found = adapter_card(table, entry, NOW)
    assert (found.id, found.model, found.parent, found.root) == ("poet", "poet", "m", "poet")
    assert (found.status, found.context_length, found.aliases) == ("idle", 2048, ("x",))
    table.apply(story.activation("loading", expected_ready_at=NOW + timedelta(seconds=7)))
    found = adapter_card(table, entry, NOW)
    assert (found.status, found.retry_after_s) == ("loading", 7)
    for id in ("r-1", "r-2"):
        table.apply(story.replica(id, adapter_slots=4))
    table.apply(story.slots("r-1", "poet"))
    found = adapter_card(table, entry, NOW, asked_as="m:x")
    assert (found.id, found.status) == ("m:x", "ready")
    assert (found.replicas_ready, found.replicas_loaded) == (2, 1)
    assert adapter_card(table, entry, NOW, ejected=frozenset({"r-1"})).replicas_loaded == 0


def test_answers_say_when_to_come_back_within_a_minute() -> None:
    told = not_loaded("poet", "no", until=NOW + timedelta(seconds=300), now=NOW)
    assert (told.status, told.code, told.retry_after_s) == (503, "start_failed", 60)
    assert not_loaded("poet", "no", until=None, now=NOW).retry_after_s == 1
    assert no_place("poet", 45.0).retry_after_s == 12
    assert at_fault("poet", "no").retry_after_s is None
