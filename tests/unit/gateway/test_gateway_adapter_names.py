"""How a name finds an adapter, and what the table knows of its places."""

from datetime import timedelta

from gateway.domain.snapshot import decode, encode, restore, take
from gateway.domain.table import AdapterTouched, SlotsChanged, Table
from schemas.adapternames import pin_name
from tests.support.gateway_world import (
    NOW,
    Story,
    a_failure,
    a_slot,
    an_adapter,
    changes,
    folded,
)


def found(table: Table, name: str) -> str | None:
    entry = table.adapter(name)
    return None if entry is None else entry.adapter.name


def test_an_adapter_is_found_by_name_alias_and_behind_its_base() -> None:
    story = Story()
    table = folded(
        story.model("m", aliases=("em",)),
        story.model("other"),
        story.adapter("poet", aliases=("rhymer",)),
    )
    for name in ("poet", "rhymer", "m:poet", "m:rhymer", "em:poet", "em:rhymer"):
        assert found(table, name) == "poet", name
    for name in ("other:poet", "m:nobody", "nobody:poet", ":poet", "poet:", "m", "poet:m", ""):
        assert found(table, name) is None, name


def test_names_with_colons_are_read_at_every_colon_and_as_they_stand_first() -> None:
    story = Story()
    table = folded(
        story.model("a:b"),
        story.model("a"),
        story.adapter("c", base="a:b"),
        story.adapter("x:y", base="a"),
        story.adapter("a:z", base="a:b"),
        story.adapter("z", base="a"),
    )
    assert found(table, "a:b:c") == "c"
    assert found(table, "a:x:y") == "x:y"
    # A name of its own wins over what else it could be read as.
    assert found(table, "a:z") == "a:z"
    assert found(table, "a:b:a:z") == "a:z"


def test_a_model_of_that_name_wins() -> None:
    story = Story()
    table = folded(story.model("m"), story.adapter("poet"), story.model("m:poet"))
    model = table.model("m:poet")
    assert model is not None


def test_an_alias_that_moves_to_another_adapter_stays_there_and_ends_with_it() -> None:
    story = Story()
    table = folded(
        story.model(), story.adapter("a", aliases=("x",)), story.adapter("b", aliases=("x",))
    )
    table.apply(story.adapter("a"))
    assert found(table, "x") == "b"
    table.apply(story.adapter_gone("b"))
    assert found(table, "x") is None
    assert found(table, "b") is None


def test_a_base_that_was_added_anew_has_none_of_its_predecessors_adapters() -> None:
    story = Story()
    table = folded(story.model(), story.adapter())
    entry = table.adapter("poet")
    assert entry is not None
    assert table.base_of(entry) is not None
    table.apply(story.model_gone())
    assert table.base_of(entry) is None
    table.apply(story.model("m", incarnation="inc-second"))
    assert table.base_of(entry) is None


def test_when_an_adapter_was_added_outlives_its_changes_and_not_its_name() -> None:
    story = Story()
    table = folded(story.model(), story.adapter(phase="reading"), story.adapter())
    first = table.adapters.entries["poet"]
    assert first.created == NOW + timedelta(milliseconds=2)
    assert first.seq == 3
    table.apply(story.adapter("poet", incarnation="inc-again"))
    assert table.adapters.entries["poet"].created == NOW + timedelta(milliseconds=4)


def test_changes_say_whose_adapter_and_what_a_replica_had() -> None:
    story = Story()
    table = folded(story.model())
    assert changes(table, story.adapter(), story.adapter_gone()) == [
        AdapterTouched(seq=2, adapter="poet", base="m"),
        AdapterTouched(seq=3, adapter="poet", base="m"),
    ]
    (first, second, third) = changes(
        table, story.slots("r-1", "poet"), story.slots("r-1"), story.slots_gone("r-1")
    )
    pin = pin_name("poet", an_adapter().version)
    assert isinstance(first, SlotsChanged)
    assert isinstance(second, SlotsChanged)
    assert isinstance(third, SlotsChanged)
    assert first.before is None
    assert first.after is not None
    assert second.before == first.after
    assert list(first.after.loaded) == [pin]
    assert second.after is not None
    assert second.after.loaded == {}
    assert (third.before, third.after) == (second.after, None)


def test_places_are_by_version_and_a_later_failure_counts() -> None:
    story = Story()
    later = a_failure("two", reason="later")
    table = folded(
        story.slots(
            "r-1",
            a_slot("poet", leaving=True),
            "one",
            bad=(a_failure("two", reason="sooner"), later),
        )
    )
    places = table.adapters.places["r-1"]
    poet, one = (pin_name(n, an_adapter(n).version) for n in ("poet", "one"))
    assert not places.serves(poet)
    assert places.serves(one)
    assert not places.serves("one@ffffffff")
    assert list(places.bad.values()) == [later]


def test_log_22_a_broken_last_event_of_an_adapter_keeps_the_state_before() -> None:
    story = Story()
    before = story.adapter("poet", phase="reading")
    table = folded(story.model(), story.broken("adapter", "poet", previous=before))
    assert found(table, "poet") == "poet"
    table.apply(story.adapter())
    told = story.slots("r-1", "poet")
    table.apply(told)
    table.apply(story.broken("adapter", "poet", previous=before))
    assert table.adapters.entries["poet"].adapter.phase == "ready"
    table.apply(story.broken("slots", "n1", "r-1", previous=story.slots("r-1")))
    assert table.adapters.places["r-1"].loaded
    assert set(table.broken) == {"yard.evt.adapter.poet", "yard.evt.slots.n1.r-1"}


def test_a_snapshot_gives_adapters_and_places_back() -> None:
    story = Story()
    table = folded(
        story.model(),
        story.adapter("b", aliases=("x",)),
        story.adapter("a", aliases=("x",)),
        story.slots("r-1", "a", bad=(a_failure("b"),)),
    )
    again = restore(decode(encode(take(table, stream_id="s", stream_created="c"))))
    assert again.adapters == table.adapters
    assert found(again, "x") == "a"
    assert again.adapters.pin(again.adapters.entries["a"]) == pin_name("a", an_adapter("a").version)


def test_a_snapshot_from_before_there_were_adapters_is_read() -> None:
    story = Story()
    raw = encode(take(folded(story.model()), stream_id="s", stream_created="c"))
    older = raw.replace(b',"adapters":[],"slots":[]', b"")
    assert older != raw
    table = restore(decode(older))
    assert table.model("m") is not None
    assert table.adapters.entries == {}
