"""Fetching adapters ahead of time: sentences that hold for every disk, catalog and limit."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nodeagent.domain.adapterfiles import plan, set_of
from nodeagent.domain.files import Disk, Limits, Room, StoredSet, make_room
from schemas.adapter import Adapter, AdapterFile

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
CONTENTS = {f"c{i}": (i * 7) % 13 + 1 for i in range(12)}
"""Every content there is, and its size."""


def an_adapter(n: int, contents: list[str]) -> Adapter:
    return Adapter(
        name=f"a{n}",
        incarnation="i",
        base="m",
        base_incarnation="i-m",
        phase="ready",
        since=BEGAN,
        files=tuple(
            AdapterFile(
                key=f"k-a{n}" if at == 0 else f"k-a{n}-{at}",
                name=f"f{at}",
                bytes=CONTENTS[content],
                sha256=content,
            )
            for at, content in enumerate(contents)
        ),
    )


some_contents = st.lists(st.sampled_from(sorted(CONTENTS)), unique=True, min_size=1, max_size=3)


@st.composite
def cases(draw):
    """Wishes, a disk that holds some of them and other sets, what is needed, a link away, and the limits."""
    wishes = [
        an_adapter(n, draw(some_contents)) for n in draw(st.lists(st.integers(0, 5), unique=True))
    ]
    here = [a for a in wishes if draw(st.booleans())]
    others = [(f"k{n}", draw(some_contents)) for n in range(draw(st.integers(0, 4)))]
    known = [*((set_of(a), [f.sha256 for f in a.files]) for a in here), *others]
    sets = tuple(
        StoredSet(
            key=key,
            used_at=BEGAN + timedelta(hours=draw(st.integers(0, 3))),
            contents=tuple(contents),
        )
        for key, contents in known
    )
    held = {c: CONTENTS[c] for stored in sets for c in stored.contents}
    for stray in draw(st.lists(st.sampled_from(sorted(CONTENTS)), max_size=2)):
        held.setdefault(stray, draw(st.integers(0, CONTENTS[stray])))
    beside = frozenset(draw(st.lists(st.sampled_from(sorted(CONTENTS)), unique=True, max_size=4)))
    for content in beside & held.keys():
        held[content] = 0  # a link to the mirror's
    promised = {"elsewhere": draw(st.integers(0, 10))} if draw(st.booleans()) else {}
    disk = Disk(
        sets=sets,
        held_bytes=held,
        promised_bytes=promised,
        free_bytes=draw(st.integers(0, 60)),
    )
    limits = Limits(
        budget_bytes=draw(st.sampled_from([0, 5, 20, 60])),
        keep_free_bytes=draw(st.integers(0, 20)),
    )
    needed = frozenset(draw(st.lists(st.sampled_from([s.key for s in sets] or ["x"]), max_size=3)))
    return wishes, disk, frozenset(set_of(a) for a in here), beside, needed, limits


def fetched(wish: Adapter, disk: Disk, room: Room, beside: frozenset[str]) -> Disk:
    """The disk after the room was made and the set was fetched."""
    sets = [s for s in disk.sets if s.key not in room.sets]
    named = {c for s in sets for c in s.contents} | {f.sha256 for f in wish.files}
    gone = {c for s in disk.sets if s.key in room.sets for c in s.contents} - named
    gone |= set(room.contents)
    held = {c: size for c, size in disk.held_bytes.items() if c not in gone}
    freed = sum(disk.held_bytes[c] for c in gone & disk.held_bytes.keys())
    taken = 0
    for file in wish.files:
        size = 0 if file.sha256 in beside else file.bytes
        taken += max(size - held.get(file.sha256, 0), 0)
        held[file.sha256] = max(size, held.get(file.sha256, 0))
    new = StoredSet(key=set_of(wish), used_at=BEGAN, contents=tuple(f.sha256 for f in wish.files))
    return replace(
        disk,
        sets=(*sets, new),
        held_bytes=held,
        free_bytes=disk.free_bytes + freed - taken,
    )


def carried_out(case):
    """The plan, and the disk after each of its fetches; fails where one has no room or takes what it must not."""
    wishes, disk, here, beside, needed, limits = case
    ahead = plan(wishes, disk, here=here, beside=beside, spared=needed, limits=limits)
    disks = [disk]
    for wish in ahead.fetch:
        missing = {
            f.sha256: f.bytes
            for f in wish.files
            if f.sha256 not in beside and disk.held_bytes.get(f.sha256, -1) != f.bytes
        }
        contents = {f.sha256 for f in wish.files}
        spare = ahead.spare | {set_of(wish)}
        room = make_room(missing, disk, spare, limits, beside=contents)
        assert isinstance(room, Room), f"{wish.name} was planned and has no room: {room}"
        assert not ahead.spare & set(room.sets), "what is spared went"
        disk = fetched(wish, disk, room, beside)
        disks.append(disk)
    return ahead, disks


@given(cases())
def test_what_is_planned_has_room_and_takes_nothing_that_is_needed(case):
    _, _, _, _, needed, _ = case
    _, disks = carried_out(case)
    before = {s.key for s in disks[0].sets}
    assert needed & before <= {s.key for s in disks[-1].sets}


@given(cases())
def test_fetching_ahead_ends_and_never_begins_again_by_itself(case):
    wishes, _, here, beside, needed, limits = case
    ahead, disks = carried_out(case)
    now_here = frozenset(
        set_of(a)
        for a in wishes
        if (set_of(a) in here or a in ahead.fetch) and set_of(a) in {s.key for s in disks[-1].sets}
    )
    again = plan(wishes, disks[-1], here=now_here, beside=beside, spared=needed, limits=limits)
    assert again.fetch == ()
    assert {a.name for a in again.left} <= {a.name for a in ahead.left}


@given(cases())
def test_it_never_goes_beyond_a_limit(case):
    *_, limits = case
    _, disks = carried_out(case)
    for before, after in pairwise(disks):
        grew = sum(after.held_bytes.values()) > sum(before.held_bytes.values())
        taken = sum(after.held_bytes.values()) + sum(after.promised_bytes.values())
        if grew and limits.budget_bytes:
            assert taken <= limits.budget_bytes
        if after.free_bytes < before.free_bytes:
            left = after.free_bytes - sum(after.promised_bytes.values())
            assert left >= limits.keep_free_bytes


@given(cases())
def test_every_wish_is_here_fetched_or_left_and_the_most_wanted_one_is_not_left_for_another(case):
    wishes, disk, here, beside, needed, limits = case
    ahead = plan(wishes, disk, here=here, beside=beside, spared=needed, limits=limits)
    names = {a.name for a in wishes}
    kept = {a.name for a in wishes if set_of(a) in ahead.spare and a not in ahead.left}
    assert kept | {a.name for a in ahead.left} == names
    assert {a.name for a in ahead.fetch} <= kept
    # Less wanted ones make no difference to what a more wanted one gets.
    for end in range(len(wishes)):
        first = plan(wishes[:end], disk, here=here, beside=beside, spared=needed, limits=limits)
        assert first.fetch == tuple(a for a in ahead.fetch if a in wishes[:end])
