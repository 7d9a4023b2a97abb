"""The cards of a node by value."""

import pytest

from nodeagent.domain.inventory import BadInventory, cards_of
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
