"""How each model stands, as `GET /v1/models` tells it."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from gateway.domain.status import ModelCard, ModelStatus, list_body, model_card, model_list
from gateway.domain.table import Table
from schemas.activation import ActivationPhase
from schemas.model import Scaling
from tests.support.gateway_world import NOW, Story, folded


def card(table: Table, **fields: Any) -> ModelCard:
    return model_card(table, table.models["m"], NOW, **fields)


def test_a_model_nobody_asked_for_is_idle() -> None:
    story = Story()
    found = card(folded(story.model(context_length=2048, aliases=("x",))))
    assert (found.id, found.object, found.owned_by) == ("m", "model", "modelyard")
    assert (found.status, found.replicas_ready, found.aliases) == ("idle", 0, ("x",))
    assert found.context_length == 2048
    assert card(folded(story.model(), story.activation("idle"))).status == "idle"


@pytest.mark.parametrize("phase", ["wanted", "placing", "waiting", "loading"])
def test_a_model_on_its_way_says_where_it_is(phase: ActivationPhase) -> None:
    story = Story()
    expected = NOW + timedelta(seconds=12)
    table = folded(story.model(), story.activation(phase, expected_ready_at=expected))
    found = card(table)
    assert (found.status, found.retry_after_s) == (phase, 12)


@pytest.mark.parametrize(
    ("status", "code"),
    [("refused", "no_capacity"), ("refused", "start_failed"), ("quarantined", "model_quarantined")],
)
def test_a_refused_model_says_why(status: ModelStatus, code: Any) -> None:
    story = Story()
    retry_at = NOW + timedelta(seconds=30)
    table = folded(
        story.model(), story.activation("refused", code=code, reason="because", retry_at=retry_at)
    )
    found = card(table)
    assert (found.status, found.code) == (status, code)
    assert found.reason is not None
    assert "because" in found.reason


def test_ready_off_draining_and_kept_up() -> None:
    story = Story()
    assert card(folded(story.model(), story.replica())).status == "ready"
    assert card(folded(story.model(), story.replica()), ejected=frozenset({"r-1"})).status == "idle"
    assert card(folded(story.model(), story.replica("r-1", "draining"))).status == "draining"
    # Started for `min`, without anybody's demand.
    assert card(folded(story.model(), story.replica("r-1", "starting"))).status == "loading"
    off = card(folded(story.model(scaling=Scaling()), story.replica()))
    assert off.status == "off"


def test_the_list_is_by_name_and_counts_who_waits() -> None:
    story = Story()
    table = folded(story.model("b"), story.model("a", aliases=("z",)))
    listed = model_list(table, NOW, waiting={"b": 3})
    assert [(c.id, c.waiting) for c in listed.data] == [("a", 0), ("b", 3)]
    assert listed.object == "list"


def test_a_card_names_what_was_asked_for() -> None:
    story = Story()
    found = card(folded(story.model(aliases=("x",))), asked_as="x")
    assert (found.id, found.model) == ("x", "m")


def test_a_list_is_read_by_clients_of_openai_of_ollama_and_of_open_webui() -> None:
    story = Story()
    table = folded(story.model("m", description="small"), story.model("org/n"))
    body = json.loads(list_body(model_list(table, NOW, waiting={})))
    assert (body["object"], body["stale"]) == ("list", False)
    # OpenAI's: what its client's type of a model asks for; Open WebUI shows `name`.
    for card, name in zip(body["data"], ("m", "org/n"), strict=True):
        assert (card["id"], card["object"], card["owned_by"]) == (name, "model", "modelyard")
        assert isinstance(card["created"], int)
        assert card["name"] == name
    # Ollama's and llama.cpp's.
    for model, name in zip(body["models"], ("m", "org/n"), strict=True):
        assert (model["name"], model["model"]) == (name, name)
        assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
        assert model["details"].keys() >= {"family", "parameter_size", "quantization_level"}
        assert isinstance(model["size"], int)
    assert body["models"][0]["description"] == "small"
