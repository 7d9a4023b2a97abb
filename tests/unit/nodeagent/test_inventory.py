"""The cards of a node by value."""

import pytest

from nodeagent.domain.inventory import BadInventory, cards_of, given_out
from schemas.node import CardInfo
from schemas.settings import GIB, NodeagentSettings, StaticCard


def test_the_cpu_card_is_the_smaller_of_limit_and_memory_less_a_tenth():
    (cpu,) = cards_of(NodeagentSettings(), ram_bytes=100, cgroup_limit_bytes=None)
    assert (cpu.id, cpu.kind, cpu.memory_bytes) == ("cpu", "cpu", 90)
    (cpu,) = cards_of(NodeagentSettings(), ram_bytes=100, cgroup_limit_bytes=50)
    assert cpu.memory_bytes == 45
    (cpu,) = cards_of(NodeagentSettings(), ram_bytes=100, cgroup_limit_bytes=500)
    assert cpu.memory_bytes == 90


def test_a_configured_size_of_the_cpu_card_holds_as_it_is():
    settings = NodeagentSettings(cpu_memory_bytes=7)
    assert cards_of(settings, ram_bytes=100, cgroup_limit_bytes=5)[0].memory_bytes == 7


def test_declared_cards_follow_in_their_order():
    settings = NodeagentSettings(
        cards=(StaticCard(id="gpu1", memory_bytes=GIB), StaticCard(id="gpu0", memory_bytes=GIB))
    )
    cards = cards_of(settings, ram_bytes=100, cgroup_limit_bytes=None)
    assert [(c.id, c.kind) for c in cards] == [("cpu", "cpu"), ("gpu1", "gpu"), ("gpu0", "gpu")]


@pytest.mark.parametrize(
    ("cards", "told"),
    [
        ((StaticCard(id="cpu", memory_bytes=1),), "'cpu' is declared twice"),
        (
            (StaticCard(id="a", memory_bytes=1), StaticCard(id="a", memory_bytes=1)),
            "'a' is declared twice",
        ),
        ((StaticCard(id="a", memory_bytes=0),), "'a' needs a memory above 0"),
    ],
)
def test_cards_that_contradict_each_other_are_refused(cards, told):
    with pytest.raises(BadInventory, match=told):
        cards_of(NodeagentSettings(cards=cards), ram_bytes=1, cgroup_limit_bytes=None)


def found(number: int, **fields) -> CardInfo:
    given = {
        "kind": "gpu",
        "memory_bytes": 23 * GIB,
        "provider": "nvml",
        "device": f"GPU-{number}",
        "pci": f"00000000:0{number}:00.0",
        "name": "NVIDIA Test Card",
        **fields,
    }
    return CardInfo(id=f"gpu{number}", **given)


def cards(*declared: StaticCard, found: tuple[CardInfo, ...] = ()) -> tuple[CardInfo, ...]:
    settings = NodeagentSettings(cards=declared)
    return cards_of(settings, ram_bytes=100, cgroup_limit_bytes=None, found=found)


def test_found_cards_come_before_declared_ones_and_keep_their_order():
    given = cards(StaticCard(id="old", memory_bytes=GIB), found=(found(0), found(1)))
    assert [card.id for card in given] == ["cpu", "gpu0", "gpu1", "old"]
    assert [card.provider for card in given] == ["cpu", "nvml", "nvml", "static"]


def test_a_declared_card_takes_the_place_of_a_found_one_and_is_the_same_device():
    given = cards(StaticCard(id="gpu0", memory_bytes=8 * GIB), found=(found(0), found(1)))
    assert [card.id for card in given] == ["cpu", "gpu0", "gpu1"]
    first = given[1]
    assert (first.memory_bytes, first.provider, first.device) == (8 * GIB, "static", "GPU-0")


def test_a_declared_card_of_another_kind_has_nothing_of_the_found_one():
    given = cards(StaticCard(id="gpu0", memory_bytes=GIB, kind="cpu"), found=(found(0),))
    assert (given[1].kind, given[1].device) == ("cpu", "")


def test_of_a_card_divided_by_mig_everything_is_shown_and_nothing_is_given():
    shown = cards(found=(found(0, mig=True), found(1)))
    assert shown[1].memory_bytes == 23 * GIB
    assert [card.memory_bytes for card in given_out(shown)] == [90, 0, 23 * GIB]


def test_no_declaration_makes_a_divided_card_whole():
    declared = StaticCard(id="gpu0", memory_bytes=GIB)
    assert given_out(cards(declared, found=(found(0, mig=True),)))[1].memory_bytes == 0
