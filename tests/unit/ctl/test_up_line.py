"""Which model, and which key, the line that `yardctl up` prints is about: it should work when it is pasted."""

from typing import Any

import pytest

from controlplane.ctl.up import KEY_HINT, model_to_ask


def model(name: str, most: int = 1) -> dict[str, Any]:
    return {"name": name, "scaling": {"min": 0, "max": most}}


def refused(name: str) -> dict[str, Any]:
    return {"model": name, "phase": "refused"}


@pytest.mark.parametrize(
    ("models", "demands", "named"),
    [
        ([], [], None),
        ([model("off", 0)], [], None),
        ([model("off", 0), model("b")], [], "b"),
        ([model("broken"), model("fine")], [refused("broken")], "fine"),
        ([model("a"), model("b")], [{"model": "a", "phase": "loading"}], "a"),
        ([model("broken")], [refused("broken")], "broken"),
        ([model("a"), {"name": "no scaling"}], [{}], "a"),
    ],
)
def test_a_model_that_was_refused_is_named_only_when_there_is_no_other(
    models: list[dict[str, Any]], demands: list[dict[str, Any]], named: str | None
) -> None:
    assert model_to_ask(models, demands) == named


def test_the_key_that_is_proposed_may_start_the_model() -> None:
    assert "yardctl key create" in KEY_HINT
    assert "--may-activate" in KEY_HINT
