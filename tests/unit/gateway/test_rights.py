"""What the holder of a key may name, see and start."""

from datetime import timedelta

import pytest

from gateway.domain.answers import Answer
from gateway.domain.keytable import ANYBODY
from gateway.domain.rights import allowed, forbidden, may_not_wait, visible
from gateway.domain.status import model_list
from gateway.domain.table import Table
from schemas.activation import ActivationPhase
from schemas.replica import ReplicaPhase
from tests.support.gateway_keys import a_caller
from tests.support.gateway_world import NOW, Story, folded


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("m", "m", True),
        ("m", "mm", False),
        ("*", "", True),
        ("*", "anything: at/all", True),
        ("m*", "m", True),
        ("m*", "m:poet", True),
        ("m:*", "m", False),
        ("*:poet", "m:poet", True),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("a*b*c", "a-b-c", True),
        ("a*b*c", "a-c", False),
        ("a*bb*b", "abb", False),
        ("a**c", "abc", True),
        # Nothing but the star is special.
        ("m.[ab]?", "m.[ab]?", True),
        ("m.*", "mx1", False),
        ("M*", "m1", False),
    ],
)
def test_a_star_stands_for_any_text_and_nothing_else_is_special(
    pattern: str, name: str, fits: bool
) -> None:
    assert (name in allowed((pattern,))) is fits


def test_a_name_made_to_be_slow_is_not() -> None:
    """With a regular expression this would not end in a lifetime."""
    assert "a" * 512 not in allowed(("*a*a*a*a*a*a*a*a*b",))


def a_table() -> Table:
    story = Story()
    return folded(
        story.model("m", aliases=("gpt", "big"), max_loaded_adapters=4),
        story.model("other"),
        story.adapter("poet", base="m", aliases=("bard",)),
    )


@pytest.mark.parametrize(
    ("models", "may", "may_not"),
    [
        ((), ("m", "gpt", "poet", "no-such"), ()),
        # The name of a model is the model, under all its names; its adapters are others.
        (("m",), ("m", "gpt", "big"), ("poet", "m:poet", "other", "no-such")),
        # An alias alone is that alias.
        (("gpt",), ("gpt",), ("m", "big", "gpt:poet")),
        (("poet",), ("poet", "bard", "m:poet", "gpt:bard"), ("m",)),
        (("m:*",), ("poet", "bard", "m:poet", "gpt:poet"), ("m", "gpt")),
        (("m:poet",), ("poet", "bard", "gpt:bard"), ("m", "other")),
        (("no-such",), ("no-such",), ("m", "nor-this")),
    ],
)
def test_a_key_is_for_the_names_it_says(
    models: tuple[str, ...], may: tuple[str, ...], may_not: tuple[str, ...]
) -> None:
    table, caller = a_table(), a_caller(models=models)
    assert [n for n in may if forbidden(caller, n, table) is not None] == []
    assert [n for n in may_not if forbidden(caller, n, table) is None] == []


def test_whether_there_is_such_a_model_is_not_told_to_who_may_not_use_it() -> None:
    table, caller = a_table(), a_caller(models=("other",))
    real, made_up = forbidden(caller, "m", table), forbidden(caller, "x", table)
    assert isinstance(real, Answer)
    assert isinstance(made_up, Answer)
    assert (real.status, real.code) == (403, "key_not_allowed")
    assert real.message.replace("'m'", "'x'") == made_up.message
    assert isinstance(forbidden(caller, "m", None), Answer)


def test_a_list_shows_what_may_be_asked_for_by_the_names_it_may_be_asked_by() -> None:
    table = a_table()
    cards = model_list(table, NOW, waiting={}).data

    def seen(*models: str) -> list[str]:
        return [card.id for card in visible(a_caller(models=models), cards)]

    assert [card.id for card in visible(ANYBODY, cards)] == ["m", "other", "poet"]
    assert seen() == ["m", "other", "poet"]
    assert seen("other") == ["other"]
    assert seen("m:*") == ["poet"]
    assert seen("none") == []
    (card,) = visible(a_caller(models=("big",)), cards)
    assert (card.id, card.model, card.aliases) == ("big", "m", ("big",))


# Starting ----------------------------------------------------------------------------------------------


def test_who_may_not_start_models_waits_for_none_that_nobody_starts() -> None:
    story = Story()
    table = folded(story.model("m"))
    refused = may_not_wait(a_caller(), table, ("m", "any"))
    assert isinstance(refused, Answer)
    assert (refused.status, refused.code) == (403, "key_may_not_activate")
    assert may_not_wait(a_caller(may_activate=True), table, ("m", "any")) is None
    assert may_not_wait(ANYBODY, table, ("m", "any")) is None


@pytest.mark.parametrize("phase", ["wanted", "placing", "waiting", "loading"])
def test_who_may_not_start_models_may_wait_for_one_that_is_started(
    phase: ActivationPhase,
) -> None:
    story = Story()
    table = folded(story.model("m"), story.activation(phase))
    assert may_not_wait(a_caller(), table, ("m", "any")) is None


@pytest.mark.parametrize(
    ("phase", "waits"),
    [
        ("starting", True),
        ("waiting", True),
        ("ready", True),
        ("draining", False),
        ("parked", False),
    ],
)
def test_a_replica_on_its_way_may_be_waited_for_and_a_parked_one_is_started(
    phase: ReplicaPhase, waits: bool
) -> None:
    story = Story()
    table = folded(story.model("m"), story.replica(phase=phase))
    assert (may_not_wait(a_caller(), table, ("m", "any")) is None) is waits


def test_a_model_that_runs_elsewhere_is_started_on_the_card_that_is_asked() -> None:
    story = Story()
    table = folded(
        story.model("m"), story.cards("n1", "gpu0"), story.replica(cards=("cpu",), node="n1")
    )
    assert may_not_wait(a_caller(), table, ("m", "any")) is None
    assert may_not_wait(a_caller(), table, ("m", "n1~cpu")) is None
    assert isinstance(may_not_wait(a_caller(), table, ("m", "n1~gpu0")), Answer)


def test_a_refusal_that_is_over_is_no_start() -> None:
    story = Story()
    table = folded(
        story.model("m"),
        story.activation("refused", code="start_failed", retry_at=NOW - timedelta(seconds=1)),
    )
    assert isinstance(may_not_wait(a_caller(), table, ("m", "any")), Answer)
