"""What may be evicted from a node's files, and what may be admitted: sentences that hold for every disk."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.domain.files import Disk, Limits, NoRoom, Room, StoredSet, excess, make_room

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
CONTENTS = [f"c{i}" for i in range(8)]
KEYS = [f"k{i}" for i in range(6)]


@st.composite
def disks(draw):
    """A disk, what is wanted, what is needed, and the limits."""
    held = draw(st.dictionaries(st.sampled_from(CONTENTS), st.integers(0, 50), max_size=8))
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=6))
    sets = tuple(
        StoredSet(
            key=key,
            used_at=BEGAN + timedelta(hours=draw(st.integers(0, 3))),
            contents=tuple(draw(st.lists(st.sampled_from(CONTENTS), unique=True, max_size=3))),
        )
        for key in keys
    )
    promised = draw(st.dictionaries(st.sampled_from(CONTENTS), st.integers(0, 30), max_size=2))
    wanted = draw(
        st.dictionaries(st.sampled_from([*CONTENTS, "n1", "n2"]), st.integers(0, 80), max_size=3)
    )
    disk = Disk(
        sets=sets,
        held_bytes=held,
        promised_bytes=promised,
        free_bytes=draw(st.integers(0, 200)),
    )
    limits = Limits(
        budget_bytes=draw(st.sampled_from([0, 40, 100, 200])),
        keep_free_bytes=draw(st.integers(0, 40)),
    )
    needed = frozenset(draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4)))
    return wanted, disk, needed, limits


def remaining(disk, room, wanted):
    """Bytes by content after the eviction, by the rule that a content goes with its last set."""
    staying = {c for s in disk.sets if s.key not in room.sets for c in s.contents}
    going = {c for s in disk.sets if s.key in room.sets for c in s.contents} - staying
    going |= set(room.contents)
    return {
        content: size
        for content, size in disk.held_bytes.items()
        if content not in going or content in wanted or content in disk.promised_bytes
    }


def to_come(wanted, disk):
    return sum(
        max(size - disk.held_bytes.get(content, 0), 0)
        for content, size in wanted.items()
        if content not in disk.promised_bytes
    )


@given(disks())
def test_nothing_a_replica_needs_is_ever_evicted(case):
    wanted, disk, needed, limits = case
    room = make_room(wanted, disk, needed, limits)
    if isinstance(room, Room):
        assert not needed & set(room.sets)
        left = remaining(disk, room, wanted)
        for stored in disk.sets:
            if stored.key in needed:
                assert all(c in left for c in stored.contents if c in disk.held_bytes)
        assert not set(room.contents) & (set(wanted) | set(disk.promised_bytes))
        assert not {c for s in disk.sets for c in s.contents} & set(room.contents)


@given(disks())
def test_what_is_admitted_stays_within_the_budget_and_leaves_what_is_kept_free(case):
    wanted, disk, needed, limits = case
    room = make_room(wanted, disk, needed, limits)
    coming = to_come(wanted, disk)
    if isinstance(room, Room) and coming:
        left = sum(remaining(disk, room, wanted).values())
        promised = sum(disk.promised_bytes.values())
        if limits.budget_bytes:
            assert left + promised + coming <= limits.budget_bytes
        freed = sum(disk.held_bytes.values()) - left
        assert disk.free_bytes + freed - promised - coming >= limits.keep_free_bytes


@given(disks())
def test_it_is_refused_only_when_emptying_all_that_nobody_needs_would_not_do(case):
    wanted, disk, needed, limits = case
    room = make_room(wanted, disk, needed, limits)
    if isinstance(room, NoRoom):
        everything = Room(
            sets=tuple(s.key for s in disk.sets if s.key not in needed),
            contents=tuple(
                set(disk.held_bytes)
                - {c for s in disk.sets for c in s.contents}
                - set(wanted)
                - set(disk.promised_bytes)
            ),
        )
        left = sum(remaining(disk, everything, wanted).values())
        freed = sum(disk.held_bytes.values()) - left
        more = sum(disk.promised_bytes.values()) + to_come(wanted, disk)
        over = limits.budget_bytes and left + more > limits.budget_bytes
        assert over or disk.free_bytes + freed - more < limits.keep_free_bytes


@given(disks())
def test_no_set_goes_whose_going_gives_nothing_and_the_order_of_sets_does_not_matter(case):
    wanted, disk, needed, limits = case
    room = make_room(wanted, disk, needed, limits)
    turned = Disk(
        sets=tuple(reversed(disk.sets)),
        held_bytes=dict(reversed(disk.held_bytes.items())),
        promised_bytes=disk.promised_bytes,
        free_bytes=disk.free_bytes,
    )
    assert make_room(wanted, turned, needed, limits) == room
    if isinstance(room, Room) and room.sets:
        all_gone = sum(remaining(disk, room, wanted).values())
        for key in room.sets:
            fewer = Room(sets=tuple(k for k in room.sets if k != key), contents=room.contents)
            assert sum(remaining(disk, fewer, wanted).values()) > all_gone


@given(disks())
def test_what_is_held_beyond_the_budget_goes_as_far_as_nothing_needs_it(case):
    _, disk, needed, limits = case
    room = excess(disk, needed, limits)
    assert not needed & set(room.sets)
    left = remaining(disk, room, {})
    promised = sum(disk.promised_bytes.values())
    if not limits.budget_bytes or sum(disk.held_bytes.values()) + promised <= limits.budget_bytes:
        assert room == Room()
    elif sum(left.values()) + promised > limits.budget_bytes:
        # Then nothing is left that could go and would give anything.
        named = {c for s in disk.sets if s.key in needed for c in s.contents}
        assert all(c in named or c in disk.promised_bytes for c, size in left.items() if size)
