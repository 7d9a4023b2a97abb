"""The store of a mirror: entries beside whole blobs, at any moment a process may stop."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from controlplane.mirror.partials import Note, PartialBusy
from controlplane.mirror.store import Entry, Store, StoreError
from tests.support.mirrors import COMMIT, REPO, key_of, model_bytes, open_store, sha256

ONE = model_bytes(5000, seed=1)
TWO = model_bytes(7000, seed=2)


def entry_of(content: bytes, path: str = "model.gguf") -> Entry:
    return Entry(
        key=key_of(path),
        sha256=sha256(content),
        bytes=len(content),
        repo=REPO,
        commit=COMMIT,
        path=path,
    )


def put(store: Store, content: bytes, path: str = "model.gguf", *, settle: bool = True) -> Entry:
    entry = entry_of(content, path)
    with store.partial(entry.key) as partial:
        partial.append(memoryview(content))
        store.finish(partial, entry)
    if settle:
        store.settle(entry.sha256)
    return entry


def read_all(store: Store, key: str) -> bytes:
    reading = store.read(key)
    assert reading is not None
    with reading:
        return os.pread(reading.handle, reading.entry.bytes + 1, 0)


def test_a_finished_file_is_read_by_its_key_and_cannot_be_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = put(store, ONE)
    assert read_all(store, entry.key) == ONE
    assert store.has(entry.key)
    assert store.path_of(entry).stat().st_mode & 0o777 == 0o444
    assert store.partials() == {}
    (found,) = store.entries()
    assert found == msgspec.structs.replace(entry, settled=True)


@pytest.mark.parametrize("key", ["", "../lock", "a" * 63, "A" * 64, "a" * 64, f"{'a' * 64}/x"])
def test_what_is_no_key_has_no_file(tmp_path: Path, key: str) -> None:
    store = open_store(tmp_path)
    assert store.entry(key) is None
    assert store.read(key) is None
    assert not store.remove(key)


def test_two_keys_of_one_content_share_the_bytes_without_a_download(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = put(store, ONE, "a.gguf")
    second = store.adopt(entry_of(ONE, "b.gguf"))
    assert second is not None
    assert read_all(store, second.key) == ONE
    assert len(list((store.folder / "blobs").iterdir())) == 1
    assert store.remove(first.key)
    assert read_all(store, second.key) == ONE
    assert store.remove(second.key)
    assert list((store.folder / "blobs").iterdir()) == []


def test_an_adopted_file_is_vouched_for_until_it_is_settled_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = put(store, ONE, "a.gguf")
    second = store.adopt(entry_of(ONE, "b.gguf"))
    assert second is not None
    reopened = open_store(tmp_path)
    assert [entry.settled for entry in reopened.entries()] == [True, True]
    third = store.adopt(entry_of(ONE, "c.gguf"))
    assert third is not None
    store.settle(first.sha256)
    found = store.entry(third.key)
    assert found is not None
    assert found.settled


def test_what_is_remembered_of_an_entry_is_not_believed_of_another(tmp_path: Path) -> None:
    """Two processes share the folder: each sees what the other writes and removes, at once."""
    one, other = open_store(tmp_path), open_store(tmp_path)
    kept = put(one, ONE, "a.gguf")
    assert [entry.key for entry in other.entries()] == [kept.key]
    other.settle(kept.sha256)
    gone = put(other, TWO, "b.gguf")
    assert sorted(entry.key for entry in one.entries()) == sorted([kept.key, gone.key])
    assert one.remove(gone.key)
    assert [entry.key for entry in other.entries()] == [kept.key]
    (other.folder / "files" / f"{kept.key}.json").write_text("{")
    assert one.entries() == ()
    assert other.adopt(entry_of(ONE, "c.gguf")) is None, "nobody names the bytes any more"


def test_settling_does_not_bring_back_what_was_removed_meanwhile(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = put(store, ONE, settle=False)
    drafted = store._drafted

    @contextlib.contextmanager
    def slow(made: Entry) -> Iterator[Path]:
        with drafted(made) as draft:
            assert store.remove(entry.key)
            yield draft

    store._drafted = slow  # type: ignore[method-assign]
    store.settle(entry.sha256)
    assert store.entries() == ()
    assert list((store.folder / "files").iterdir()) == []


def test_an_opening_beside_it_does_not_keep_a_file_from_settling(tmp_path: Path) -> None:
    """It clears away drafts, as if a process that is gone had left them."""
    store = open_store(tmp_path)
    entry = put(store, ONE, settle=False)
    drafted = store._drafted
    opened: list[object] = []

    @contextlib.contextmanager
    def slow(made: Entry) -> Iterator[Path]:
        with drafted(made) as draft:
            if not opened:
                opened.append(1)
                draft.unlink()
            yield draft

    store._drafted = slow  # type: ignore[method-assign]
    store.settle(entry.sha256)
    found = store.entry(entry.key)
    assert found is not None
    assert found.settled


def test_only_the_same_size_is_adopted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, ONE, "a.gguf")
    assert store.adopt(entry_of(TWO, "b.gguf")) is None
    wrong = msgspec.structs.replace(entry_of(ONE, "b.gguf"), bytes=1)
    assert store.adopt(wrong) is None


def test_a_second_file_of_the_same_content_ends_as_one_blob(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, ONE, "a.gguf")
    put(store, ONE, "b.gguf")
    assert len(store.entries()) == 2
    assert len(list((store.folder / "blobs").iterdir())) == 1
    assert store.partials() == {}


def test_a_partial_has_one_writer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = key_of("model.gguf")
    with store.partial(key) as partial:
        partial.append(memoryview(b"GGUF"))
        with pytest.raises(PartialBusy):
            store.partial(key)
        assert not store.remove(key)
        assert store.partials() == {key: 4}
    with store.partial(key) as partial:
        assert partial.size == 4
    store.remove(key)
    assert store.partials() == {}


def test_scn_c7_what_a_file_on_its_way_holds_of_the_disk_is_known(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = key_of("model.gguf")
    assert store.reserved() == {}
    with store.partial(key) as partial:
        partial.reserve(1024**2)
        assert store.reserved()[key] >= 1024**2, "though nothing is written yet"


def test_a_file_an_engine_may_have_mapped_is_never_cut_short(tmp_path: Path) -> None:
    """A node of this machine links a blob; later it is a partial again, and its bytes are found spoilt."""
    store = open_store(tmp_path)
    theirs = tmp_path / "theirs"
    with store.partial(key_of("a")) as partial:
        partial.append(memoryview(b"GGUF spoilt"))
        theirs.hardlink_to(partial.path)
        partial.begin_anew()
        assert partial.size == 0
        partial.append(memoryview(b"new"))
        with pytest.raises(PartialBusy):
            store.partial(key_of("a"))
        assert theirs.read_bytes() == b"GGUF spoilt"
        assert theirs.stat().st_mode & 0o777 == 0o444
        assert partial.path.read_bytes() == b"new"
    with store.partial(key_of("a")) as again:
        assert again.size == 3


def test_a_link_is_no_partial(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody's")
    (store.folder / "partial" / key_of("a")).symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        store.partial(key_of("a"))


def test_space_is_reserved_without_making_the_file_longer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = key_of("model.gguf")
    with store.partial(key) as partial:
        partial.append(memoryview(b"GGUF"))
        partial.reserve(1 << 20)
        assert partial.size == 4
        assert partial.allocated >= 1 << 20
        partial.release_space()
        assert partial.allocated < 1 << 20


def test_a_reservation_that_outlived_its_process_is_given_back_at_the_opening(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    with store.partial(key_of("model.gguf")) as partial:
        partial.append(memoryview(b"GGUF"))
        partial.reserve(1 << 20)
    store.open()
    with store.partial(key_of("model.gguf")) as partial:
        assert partial.size == 4
        assert partial.allocated < 1 << 20


def test_a_partial_remembers_what_it_is_made_of(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store.partial(key_of("model.gguf")) as partial:
        assert partial.note() == Note()
        partial.write_note(Note(origin="registry", etag='"v"'))
        assert partial.note() == Note(origin="registry", etag='"v"')
        partial.begin_anew()
        assert partial.note() == Note()
    (store.folder / "partial" / f"{key_of('model.gguf')}.json").write_bytes(b'{"etag"')
    with store.partial(key_of("model.gguf")) as partial:
        assert partial.note() == Note()


# -- what an opening finds -----------------------------------------------------------------------


def test_scn_c6_what_never_settled_is_a_partial_again(tmp_path: Path) -> None:
    """The machine may have lost bytes that were only in its memory: they are hashed once more."""
    entry = put(open_store(tmp_path), ONE, settle=False)
    store = open_store(tmp_path)
    assert not store.has(entry.key)
    assert store.partials() == {entry.key: len(ONE)}


def test_what_is_being_settled_by_another_process_is_left_alone(tmp_path: Path) -> None:
    entry = put(open_store(tmp_path), ONE, settle=False)
    blob = tmp_path / "mirror" / "blobs" / entry.sha256
    handle = os.open(blob, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        assert open_store(tmp_path).has(entry.key)
    finally:
        os.close(handle)
    assert not open_store(tmp_path).has(entry.key)


def test_content_that_settled_under_another_key_stays(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    put(first, ONE, "a.gguf")
    late = entry_of(ONE, "b.gguf")
    path = first.folder / "files" / f"{late.key}.json"
    path.write_bytes(msgspec.json.encode(late))
    store = open_store(tmp_path)
    assert [entry.settled for entry in store.entries()] == [True, True]


def test_stopped_between_entry_and_blob_the_partial_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = entry_of(ONE)
    with store.partial(entry.key) as partial:
        partial.append(memoryview(ONE))
    (store.folder / "files" / f"{entry.key}.json").write_bytes(msgspec.json.encode(entry))
    assert not store.has(entry.key)
    again = open_store(tmp_path)
    assert not again.has(entry.key)
    assert again.partials() == {entry.key: len(ONE)}
    assert list((again.folder / "files").iterdir()) == []


def test_half_written_notes_are_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, ONE)
    (store.folder / "files" / ".x.json.1.2").write_bytes(b'{"key')
    (store.folder / "partial" / f".{'a' * 64}.json").write_bytes(b"{")
    store.open()
    assert [path.name for path in (store.folder / "files").glob(".*")] == []
    assert list((store.folder / "partial").iterdir()) == []
    assert len(store.entries()) == 1


@pytest.mark.parametrize("left", [None, 0, 4999, 5001])
def test_an_entry_whose_blob_is_gone_or_of_another_size_is_dropped_and_told(
    tmp_path: Path, left: int | None
) -> None:
    entry = put(open_store(tmp_path), ONE)
    blob = tmp_path / "mirror" / "blobs" / entry.sha256
    if left is None:
        blob.unlink()
    else:
        blob.chmod(0o600)
        os.truncate(blob, left)
    store = Store(tmp_path / "mirror", keep_free_bytes=0)
    assert store.entry(entry.key) is None
    (sentence,) = store.open()
    assert "owner/repo/model.gguf is lost" in sentence
    assert store.entries() == ()
    assert list((store.folder / "blobs").iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"key": 1}', b"\xff\xfe"])
def test_an_unreadable_entry_is_dropped_but_its_blob_kept(tmp_path: Path, text: bytes) -> None:
    entry = put(open_store(tmp_path), ONE)
    (tmp_path / "mirror" / "files" / f"{entry.key}.json").write_bytes(text)
    store = Store(tmp_path / "mirror", keep_free_bytes=0)
    assert len(store.open()) == 1
    assert store.path_of(entry).exists()


def test_a_blob_that_lost_its_entry_is_hashed_again_not_fetched(tmp_path: Path) -> None:
    entry = put(open_store(tmp_path), ONE)
    (tmp_path / "mirror" / "files" / f"{entry.key}.json").write_bytes(b"{")
    store = Store(tmp_path / "mirror", keep_free_bytes=0)
    store.open()
    assert not store.reclaim(msgspec.structs.replace(entry, bytes=1))
    assert store.reclaim(entry)
    assert store.partials() == {entry.key: len(ONE)}
    assert not store.reclaim(entry)
    put(store, TWO, "c.gguf")
    assert not store.reclaim(entry_of(TWO, "d.gguf"))  # it has a name


def test_an_entry_under_a_wrong_name_is_none(tmp_path: Path) -> None:
    entry = put(open_store(tmp_path), ONE)
    path = tmp_path / "mirror" / "files" / f"{entry.key}.json"
    path.rename(path.with_name(f"{'b' * 64}.json"))
    store = Store(tmp_path / "mirror", keep_free_bytes=0)
    assert len(store.open()) == 1
    assert store.entries() == ()


def test_a_blob_nobody_names_is_removed(tmp_path: Path) -> None:
    """A removal was interrupted behind its entry."""
    store = open_store(tmp_path)
    keep = put(store, ONE)
    (store.folder / "blobs" / sha256(TWO)).write_bytes(TWO)
    (store.folder / "blobs" / "notes.txt").write_text("of a person")
    open_store(tmp_path)
    names = {path.name for path in (store.folder / "blobs").iterdir()}
    assert names == {keep.sha256, "notes.txt"}


def test_a_folder_that_cannot_be_one_is_said(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file")
    with pytest.raises(StoreError, match="cannot use"):
        Store(tmp_path / "mirror", keep_free_bytes=0).open()


# -- removing --------------------------------------------------------------------------------------


def test_a_file_that_is_read_is_not_unlinked_before_its_reader_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = put(store, ONE)
    reading = store.read(entry.key)
    assert reading is not None
    removing = threading.Thread(target=store.remove, args=(entry.key,))
    removing.start()
    while store.has(entry.key):
        pass  # the entry ends at once: nobody begins to read any more
    assert store.read(entry.key) is None
    assert store.path_of(entry).exists()
    assert removing.is_alive()
    assert os.pread(reading.handle, 10_000, 0) == ONE
    reading.close()
    reading.close()
    removing.join(5)
    assert not removing.is_alive()
    assert not store.path_of(entry).exists()


def test_a_reader_holds_a_removal_up_for_a_bounded_time_and_keeps_its_bytes(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    entry = put(store, ONE)
    reading = store.read(entry.key)
    assert reading is not None
    with reading:
        assert store.remove(entry.key, readers_wait_s=0.01)
        assert not store.path_of(entry).exists()
        assert os.pread(reading.handle, 10_000, 0) == ONE
    assert store.readers(entry.sha256) == 0


def test_content_that_came_back_while_a_removal_waited_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = put(store, ONE, "a.gguf")
    reading = store.read(first.key)
    assert reading is not None
    removing = threading.Thread(target=store.remove, args=(first.key,))
    removing.start()
    while store.has(first.key):
        pass
    second = put(store, ONE, "b.gguf")
    reading.close()
    removing.join(5)
    assert read_all(store, second.key) == ONE


def test_condemned_bytes_go_with_every_key(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = put(store, ONE, "a.gguf")
    store.adopt(entry_of(ONE, "b.gguf"))
    other = put(store, TWO, "c.gguf")
    assert set(store.condemn(first.sha256)) == {key_of("a.gguf"), key_of("b.gguf")}
    assert [entry.key for entry in store.entries()] == [other.key]


def test_the_free_space_leaves_out_what_is_kept_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, keep_free_bytes=300)
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[1], fields[4] = 100, 10  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert store.free_bytes() == 700
