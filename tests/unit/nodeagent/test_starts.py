"""How a loading engine is asked and when it took too long."""

from nodeagent.domain.starts import overdue, probe_delay_s


def test_quick_engines_are_asked_every_20_ms_and_slow_ones_every_250():
    assert probe_delay_s(0) == 0.02
    assert probe_delay_s(1.9) == 0.02
    assert probe_delay_s(2.0) == 0.25


def test_a_load_without_a_sign_of_life_ends_at_its_bound():
    assert not overdue(599.9, 600)
    assert overdue(600, 600)
    assert not overdue(1e9, 0)
