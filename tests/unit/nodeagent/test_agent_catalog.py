"""What an agent knows of models and adapters, by the batches it reads: outages, new histories, broken events."""

from msgspec.structs import replace

from events.log import Broken
from nodeagent.domain.catalog import Catalog, Shelf
from schemas.adapter import Adapter
from tests.support.adapter_files import a_base, a_batch, an_adapter, told

A, B = an_adapter("a"), an_adapter("b")


def a_shelf(*adapters: Adapter) -> Shelf[Adapter]:
    shelf: Shelf[Adapter] = Shelf(Adapter)
    shelf.take(a_batch(*(told("adapter", a.name, a) for a in adapters)))
    return shelf


def test_nothing_is_known_before_the_first_pass_is_whole():
    shelf: Shelf[Adapter] = Shelf(Adapter)
    assert shelf.take(a_batch(told("adapter", "a", A), synced=False)) == frozenset()
    assert (shelf.synced, shelf.states) == (False, {})
    assert shelf.take(a_batch(told("adapter", "b", B))) == {"a", "b"}
    assert (shelf.synced, shelf.states) == (True, {"a": A, "b": B})


def test_a_log_without_any_is_read_too():
    shelf: Shelf[Adapter] = Shelf(Adapter)
    assert shelf.take(a_batch()) == frozenset()
    assert shelf.synced


def test_changes_are_named_and_repetitions_are_not():
    shelf = a_shelf(A, B)
    pinned = replace(A, pinned=True)
    changed = shelf.take(a_batch(told("adapter", "a", pinned), told("adapter", "b", B)))
    assert changed == {"a"}
    assert shelf.take(a_batch(told("adapter", "b", None))) == {"b"}
    assert shelf.states == {"a": pinned}
    # Ended twice, and one that was never known: nothing new.
    again = a_batch(told("adapter", "b", None), told("adapter", "c", None))
    assert shelf.take(again) == frozenset()


def test_one_added_and_ended_in_a_batch_was_never_there():
    shelf = a_shelf(A)
    batch = a_batch(told("adapter", "b", B), told("adapter", "b", None))
    assert shelf.take(batch) == frozenset()


def test_a_lost_connection_changes_nothing():
    shelf = a_shelf(A)
    assert shelf.take(a_batch(synced=False, connected=False)) == frozenset()
    assert (shelf.synced, shelf.states) == (True, {"a": A})


def test_a_replaced_history_takes_over_only_when_it_was_read_wholly():
    shelf = a_shelf(A, B)
    begun = a_batch(told("adapter", "c", an_adapter("c")), synced=False, reset=True)
    assert shelf.take(begun) == frozenset()
    # Until then everything stands: an adapter that was not read yet is not one that was removed.
    assert set(shelf.states) == {"a", "b"}
    assert shelf.take(a_batch(told("adapter", "a", A))) == {"b", "c"}
    assert set(shelf.states) == {"a", "c"}


def test_read_anew_forgets_what_ended_meanwhile_and_nothing_before():
    shelf = a_shelf(A, B)
    shelf.read_anew()
    assert set(shelf.states) == {"a", "b"}
    assert shelf.synced
    assert shelf.take(a_batch(told("adapter", "a", A))) == {"b"}


def test_what_nobody_can_read_leaves_what_was_said_before():
    shelf = a_shelf(A, B)
    junk = Broken(seq=7, subject="yard.evt.adapter.a", why="no JSON")
    newer = told("adapter", "b", None, problem="newer version", event=None)
    assert shelf.take(a_batch(junk, newer)) == frozenset()
    assert shelf.states == {"a": A, "b": B}
    # In a first pass the last valid event of a broken subject is handed along.
    fresh: Shelf[Adapter] = Shelf(Adapter)
    fresh.take(a_batch(replace(junk, previous=told("adapter", "a", A)), junk))
    assert fresh.states == {"a": A}


def test_the_catalog_is_read_once_both_of_its_nouns_are():
    catalog = Catalog()
    assert not catalog.synced
    catalog.model_shelf.take(a_batch(told("model", "m", a_base("m"))))
    assert not catalog.synced
    catalog.adapter_shelf.take(a_batch(told("adapter", "a", A)))
    assert catalog.synced
    assert (list(catalog.models), dict(catalog.adapters)) == (["m"], {"a": A})
