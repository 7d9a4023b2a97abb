"""Files on a node, decided: which set goes first, what a person is told, when a fetch is given up."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from nodeagent.domain.assignments import needed_keys
from nodeagent.domain.files import (
    Disk,
    Fault,
    GiveUp,
    Limits,
    NoRoom,
    Room,
    StoredSet,
    Tried,
    after,
    flaw,
    key_of,
    make_room,
    next_pause_s,
    rate_bytes_s,
)
from schemas.settings import GIB
from tests.support.agent_yard import a_held, a_launch
from tests.support.scripted_mirror import a_key, a_manifest

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ROOMY = Limits(budget_bytes=0, keep_free_bytes=GIB)


def a_set(key: str, hours: int, *contents: str) -> StoredSet:
    return StoredSet(key=key, used_at=BEGAN + timedelta(hours=hours), contents=contents)


def a_disk(*sets: StoredSet, free_gib: int = 100, **held_gib: int) -> Disk:
    return Disk(
        sets=sets,
        held_bytes={name: count * GIB for name, count in held_gib.items()},
        promised_bytes={},
        free_bytes=free_gib * GIB,
    )


def test_nothing_goes_while_there_is_room():
    disk = a_disk(a_set("k1", 1, "a"), a=5, stray=3)
    assert make_room({"n": 10 * GIB}, disk, frozenset(), ROOMY) == Room()


def test_least_recently_used_goes_first_and_ties_go_by_key():
    disk = a_disk(
        a_set("k3", 2, "c"), a_set("k2", 1, "b"), a_set("k1", 1, "a"), free_gib=1, a=5, b=5, c=5
    )
    assert make_room({"n": 4 * GIB}, disk, frozenset(), ROOMY) == Room(sets=("k1",))
    assert make_room({"n": 9 * GIB}, disk, frozenset(), ROOMY) == Room(sets=("k1", "k2"))
    assert make_room({"n": 9 * GIB}, disk, frozenset({"k1"}), ROOMY) == Room(sets=("k2", "k3"))


def test_contents_of_no_set_go_before_any_set():
    disk = a_disk(a_set("k1", 1, "a"), free_gib=1, a=5, stray=5)
    assert make_room({"n": 4 * GIB}, disk, frozenset(), ROOMY) == Room(contents=("stray",))


def test_a_content_two_sets_share_goes_with_the_second():
    disk = a_disk(a_set("k1", 1, "a"), a_set("k2", 2, "a"), free_gib=1, a=5)
    assert make_room({"n": 4 * GIB}, disk, frozenset(), ROOMY) == Room(sets=("k1", "k2"))
    assert isinstance(make_room({"n": 4 * GIB}, disk, frozenset({"k2"}), ROOMY), NoRoom)


def test_what_came_of_a_content_counts_and_what_others_were_promised_is_not_free():
    disk = a_disk(free_gib=10, begun=6)
    assert make_room({"begun": 15 * GIB}, disk, frozenset(), ROOMY) == Room()
    assert isinstance(make_room({"begun": 16 * GIB}, disk, frozenset(), ROOMY), NoRoom)
    busy = replace(disk, promised_bytes={"other": 5 * GIB})
    assert isinstance(make_room({"begun": 15 * GIB}, busy, frozenset(), ROOMY), NoRoom)
    # Somebody fetches this very content already: it needs no room twice.
    mine = replace(disk, promised_bytes={"begun": 9 * GIB})
    assert make_room({"begun": 15 * GIB}, mine, frozenset(), ROOMY) == Room()


def test_inv_9_a_full_disk_is_told_with_every_number_of_the_limit_in_the_way():
    disk = a_disk(a_set("k1", 1, "a"), a_set("k2", 2, "b"), free_gib=3, a=5, b=4)
    refused = make_room({"n": 12 * GIB}, disk, frozenset({"k1"}), ROOMY)
    assert refused == NoRoom(
        sentence="its files need 12.0 GiB more, and this node's disk has 3.0 GiB free, of which"
        " 1.0 GiB are never used; 4.0 GiB that nothing here needs could go; make room there"
    )
    tight = Limits(budget_bytes=10 * GIB, keep_free_bytes=0)
    refused = make_room({"n": 6 * GIB}, replace(disk, free_bytes=99 * GIB), {"k1"}, tight)
    assert refused == NoRoom(
        sentence="its files need 6.0 GiB more, and this node keeps at most 10.0 GiB of files:"
        " 9.0 GiB are taken, of which 4.0 GiB that nothing here needs could go;"
        " raise files_budget_bytes or stop a model here"
    )


def test_only_what_is_over_needs_no_files():
    launch = a_launch(source="mirror:k1")
    held = [
        a_held("r-1", "fetching", launch=launch),
        a_held("r-2", "failed", launch=a_launch(source="mirror:k2")),
        a_held("r-3", "ready", launch=a_launch(source="/models/x.gguf")),
        a_held("r-4", "stop_failed", launch=a_launch(source="mirror:k4")),
        a_held("r-5", "ready"),
    ]
    assert needed_keys(held) == {"k1", "k4"}
    assert key_of("/models/mirror:x") is None


AWAY = Fault(kind="away", source="m1", sentence="the mirror at m1 does not answer")


def test_wrong_bytes_are_fetched_once_more_and_then_given_up():
    wrong = Fault(kind="wrong", source="m1", sentence="other bytes")
    once = after(Tried(), wrong)
    assert isinstance(once, Tried)
    between = after(once, AWAY)
    assert isinstance(between, Tried)
    assert after(between, wrong) == GiveUp(code="fetch_failed", sentence="other bytes")


def test_this_nodes_own_disk_ends_a_fetch_at_once():
    full = after(Tried(), Fault(kind="disk", sentence="full", full=True))
    broken = after(Tried(), Fault(kind="disk", sentence="read-only"))
    assert [full, broken] == [
        GiveUp(code="disk_full", sentence="full"),
        GiveUp(code="fetch_failed", sentence="read-only"),
    ]


def test_a_node_that_every_mirror_refuses_is_not_kept_waiting():
    refused = after(Tried(), Fault(kind="refused", source="m1", sentence="no (401)"))
    assert isinstance(refused, Tried)
    assert next_pause_s(refused, ("m1",), 0.0, 300.0) == GiveUp(
        code="fetch_failed", sentence="no (401)"
    )
    assert next_pause_s(refused, ("m1", "m2"), 0.0, 300.0) == 0.5


def test_pauses_grow_and_end_when_nothing_came_for_the_bound():
    pauses = [next_pause_s(Tried(last="x", rounds=n), ("m1",), 0.0, 300.0) for n in range(7)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert next_pause_s(Tried(rounds=9), ("m1",), 298.0, 300.0) == 2.0
    told = after(Tried(), AWAY)
    assert isinstance(told, Tried)
    assert next_pause_s(told, ("m1",), 300.0, 300.0) == GiveUp(
        code="fetch_failed",
        sentence="no new byte for 300 s: the mirror at m1 does not answer",
    )
    alone = next_pause_s(Tried(), (), 300.0, 300.0)
    assert isinstance(alone, GiveUp)
    assert "no mirror was heard of" in alone.sentence


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "ä" * 128])
def test_a_manifest_names_nothing_that_cannot_lie_in_its_folder(name):
    manifest = a_manifest("m", b"x", b"y")
    assert flaw(manifest, manifest.key) is None
    bad = replace(manifest, files=(manifest.files[0], replace(manifest.files[1], name=name)))
    assert flaw(bad, manifest.key) is not None


def test_a_manifest_of_another_set_or_of_nothing_is_not_believed():
    manifest = a_manifest("m", b"x", b"y")
    first, second = manifest.files
    for bad in (
        replace(manifest, key=a_key("other")),
        replace(manifest, files=()),
        replace(manifest, files=(first, replace(second, name=first.name))),
        replace(manifest, files=(replace(first, sha256="../x"), second)),
        replace(manifest, files=(replace(first, bytes=-1), second)),
    ):
        assert flaw(bad, manifest.key) is not None


def test_a_rate_is_over_the_samples_it_is_given():
    assert rate_bytes_s([]) == rate_bytes_s([(1.0, 5)]) == rate_bytes_s([(1.0, 0), (1.0, 9)]) == 0
    assert rate_bytes_s([(1.0, 0), (2.0, 50), (3.0, 300)]) == 150.0
    assert rate_bytes_s([(1.0, 300), (2.0, 0)]) == 0  # began anew
