"""What the catalog means for the adapters of a replica: which asks are wrong, what stays, and what has to leave."""

import pytest

from nodeagent.domain import slotasks
from schemas import codes
from tests.support.adapter_files import an_adapter
from tests.support.agent_yard import a_held
from tests.support.slotting import VERSION, a_place, pin

REPLICA = a_held("r-1", incarnation="i-m").replica
GOOD = an_adapter("a", version=VERSION)


def wrong(adapter, version=VERSION) -> str:
    """The sentence of what is wrong; empty when nothing is."""
    refuse = slotasks.wrong_with("a", version, adapter, REPLICA)
    if refuse is None:
        return ""
    assert (refuse.code, refuse.whose) == (codes.NOT_FOUND, "replica")
    return refuse.sentence


def test_an_ask_for_what_the_catalog_has_is_right_in_any_of_its_spellings():
    assert wrong(GOOD) == wrong(GOOD, "") == wrong(GOOD, VERSION[:8]) == ""


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (None, "knows no adapter"),
        (an_adapter("a", version=VERSION, base="other"), "adapter of other"),
        (an_adapter("a", version=VERSION, base_incarnation="i-old"), "serves another"),
        (an_adapter("a", version="", phase="fetching"), "not there yet"),
        (an_adapter("a", version="", phase="refused", reason="rank 64"), "rank 64"),
        (an_adapter("a", version="f" * 12), "f" * 12),
    ],
)
def test_an_ask_for_anything_else_is_told_what_is_wrong(adapter, told):
    assert told in wrong(adapter)


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (GOOD, None),
        (None, "removed"),
        (an_adapter("a", version=VERSION, phase="refused"), "removed"),
        (an_adapter("a", version=VERSION, base="other"), "removed"),
        (an_adapter("a", version=VERSION, base_incarnation="i-old"), "removed"),
        (an_adapter("a", version="f" * 12), "version"),
        (an_adapter("a", version="", phase="reading"), None),
        (an_adapter("a", version="", phase="fetching"), None),
    ],
)
def test_what_the_catalog_has_no_more_has_to_leave(adapter, why):
    places = {pin("a"): a_place("a")}
    _, found = slotasks.standing(places, lambda _: adapter, REPLICA)
    assert found == ({} if why is None else {pin("a"): why})


def test_only_what_is_current_is_kept_by_a_persons_pin():
    def kept(adapter, version=VERSION):
        name = pin("a", version)
        places = {name: a_place("a", version=version)}
        return name in slotasks.standing(places, lambda _: adapter, REPLICA)[0]

    pinned = an_adapter("a", version=VERSION, pinned=True)
    assert kept(pinned)
    assert not kept(GOOD)
    assert not kept(None)
    assert not kept(pinned, "f" * 12)
