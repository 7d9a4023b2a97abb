"""What becomes of the aliases of an entry that leaves: the gateway's models and adapters follow one rule."""

from dataclasses import dataclass

from gateway.domain.aliases import take_out


@dataclass(frozen=True)
class Entry:
    name: str
    aliases: tuple[str, ...]
    seq: int


def test_what_leaves_takes_its_aliases_with_it_and_no_others() -> None:
    entries = {"a": Entry("a", ("x", "y"), 1), "b": Entry("b", ("z",), 2)}
    aliases = {"x": "a", "y": "a", "z": "b"}
    take_out(entries, aliases, "a")
    assert (list(entries), aliases) == (["b"], {"z": "b"})
    take_out(entries, aliases, "nobody")
    assert (list(entries), aliases) == (["b"], {"z": "b"})


def test_an_alias_that_moved_already_stays_where_it_is() -> None:
    entries = {"a": Entry("a", ("x",), 1), "b": Entry("b", ("x",), 2)}
    aliases = {"x": "b"}
    take_out(entries, aliases, "a")
    assert aliases == {"x": "b"}


def test_an_alias_of_several_goes_to_the_one_that_changed_last() -> None:
    entries = {name: Entry(name, ("x",), seq) for name, seq in (("a", 9), ("b", 3), ("c", 5))}
    aliases = {"x": "a"}
    take_out(entries, aliases, "a")
    assert aliases == {"x": "c"}
