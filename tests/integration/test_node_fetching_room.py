"""Where a node's files come to lie: linked from a mirror's folder on its machine, within a budget, on a full disk."""

import asyncio
import errno
import os

from nodeagent.files import moving
from nodeagent.files.fetches import FetchFailed
from tests.support.aio import run
from tests.support.node_files import failing, node_files
from tests.support.scripted_mirror import a_key, a_manifest, a_sha256, serving_mirror, some_bytes

BODY = some_bytes(3_000_017)
ONE = a_manifest("one", BODY)


# A mirror's folder on this machine.


def a_folder(tmp_path, *contents: bytes):
    folder = tmp_path / "mirror"
    (folder / "blobs").mkdir(parents=True)
    for content in contents:
        (folder / "blobs" / a_sha256(content)).write_bytes(content)
    return folder


def test_files_of_a_mirror_on_this_machine_are_linked_not_fetched(tmp_path):
    folder = a_folder(tmp_path, BODY)
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        # Not even a budget stands in the way: it takes no byte more.
        node = node_files(
            tmp_path / "files", mirror, mirror_folder=str(folder), files_budget_bytes=1000
        )
        path = run(node.obtain(ONE))
        assert path.samefile(folder / "blobs" / ONE.files[0].sha256)
        assert mirror.files_asked() == []
        # The mirror may forget it; it stays here, and counts from then on.
        (folder / "blobs" / ONE.files[0].sha256).unlink()
        assert run(node_files(tmp_path / "files").obtain(ONE)).read_bytes() == BODY


def test_a_link_to_a_file_the_mirror_has_replaced_is_made_anew(tmp_path):
    folder = a_folder(tmp_path, BODY)
    blob = folder / "blobs" / ONE.files[0].sha256
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path / "files", mirror, mirror_folder=str(folder))
        # The mirror finds the file spoilt, removes it and fetches it again.
        path = run(node.obtain(ONE))
        with path.open("r+b") as spoilt:
            spoilt.write(b"!!!!")
        fetched = folder / "fetched"
        fetched.write_bytes(BODY)
        fetched.chmod(blob.stat().st_mode)
        fetched.replace(blob)
        assert node.files.local(f"mirror:{ONE.key}") is None
        again = run(node.obtain(ONE))
        assert again.samefile(blob)
        assert again.read_bytes() == BODY
        assert mirror.files_asked() == []


def test_a_file_of_another_size_in_the_mirrors_folder_is_not_taken(tmp_path):
    folder = a_folder(tmp_path)
    (folder / "blobs" / ONE.files[0].sha256).write_bytes(b"short")
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path / "files", mirror, mirror_folder=str(folder))
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == len(BODY)


def test_a_mirrors_folder_on_another_file_system_is_copied_and_compared(tmp_path, monkeypatch):
    link = os.link

    def other_device(source, target):
        if folder in source.parents:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    folder = a_folder(tmp_path, BODY)
    monkeypatch.setattr(os, "link", other_device)
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path / "files", mirror, mirror_folder=str(folder))
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.files_asked() == []
        # A damaged copy is noticed, and the mirror asked.
        other = some_bytes(1_000_000, 9)
        manifest = mirror.add(a_manifest("o", other), other)
        (folder / "blobs" / a_sha256(other)).write_bytes(other[:-1] + b"!")
        assert run(node.obtain(manifest)).read_bytes() == other
        assert mirror.sent_bytes == len(other)


# Room.


def test_what_nothing_needs_goes_when_a_budget_is_full_least_recently_used_first(tmp_path):
    bodies = [some_bytes(400_000, n) for n in range(4)]
    sets = [a_manifest(f"m{n}", body) for n, body in enumerate(bodies)]
    with serving_mirror() as mirror:
        for manifest, body in zip(sets, bodies, strict=True):
            mirror.add(manifest, body)
        node = node_files(tmp_path, mirror, files_budget_bytes=1_000_000)
        for n in (0, 1):
            run(node.obtain(sets[n]))
            os.utime(tmp_path / "sets" / f"{sets[n].key}.json", (n, n))
        # The older one was used since.
        node.files.used(f"mirror:{sets[0].key}")
        run(node.obtain(sets[2]))
        assert set(node.contents()) == {a_sha256(bodies[0]), a_sha256(bodies[2])}
        assert node.files.local(f"mirror:{sets[1].key}") is None
        assert not (tmp_path / "sets" / sets[1].key).exists()
        node.needed.update({sets[0].key, sets[2].key})
        failed = failing(node, sets[3])
        assert failed.code == "disk_full"
        assert "0 MiB that nothing here needs could go" in failed.sentence
        node.needed.discard(sets[0].key)
        run(node.obtain(sets[3]))
        assert set(node.contents()) == {a_sha256(bodies[2]), a_sha256(bodies[3])}
        assert sum(map(len, node.contents().values())) <= 1_000_000


def test_a_budget_made_smaller_takes_what_nothing_needs(tmp_path):
    bodies = [some_bytes(400_000, n) for n in range(3)]
    sets = [a_manifest(f"m{n}", body) for n, body in enumerate(bodies)]
    with serving_mirror() as mirror:
        node = node_files(tmp_path, mirror)
        for manifest, body in zip(sets, bodies, strict=True):
            mirror.add(manifest, body)
            run(node.obtain(manifest))
    run(node.files.keep_within())
    assert len(node.contents()) == 3
    smaller = node_files(tmp_path, files_budget_bytes=500_000)
    smaller.needed.add(sets[0].key)
    run(smaller.files.keep_within())
    assert set(node.contents()) == {a_sha256(bodies[0])}
    # What is needed stays, however small the budget.
    tiny = node_files(tmp_path, files_budget_bytes=1)
    tiny.needed.add(sets[0].key)
    run(tiny.files.keep_within())
    assert set(node.contents()) == {a_sha256(bodies[0])}


def test_scn_c7_a_disk_smaller_than_the_files_is_said_before_the_first_byte(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror, files_keep_free_bytes=1 << 60)
        failed = failing(node, ONE)
        assert failed.code == "disk_full"
        assert "its files need 3 MiB more" in failed.sentence
        assert mirror.files_asked() == []


def test_two_fetches_are_not_promised_the_same_bytes(tmp_path):
    bodies = [some_bytes(600_000, n) for n in range(2)]
    sets = [a_manifest(f"m{n}", body) for n, body in enumerate(bodies)]
    with serving_mirror(pause_s=0.02) as mirror:
        for manifest, body in zip(sets, bodies, strict=True):
            mirror.add(manifest, body)
        node = node_files(tmp_path, mirror, files_budget_bytes=1_000_000)

        async def story():
            return await asyncio.gather(
                *(node.obtain(manifest) for manifest in sets), return_exceptions=True
            )

        results = run(story())
        assert sorted(isinstance(result, FetchFailed) for result in results) == [False, True]


def test_a_disk_that_fills_up_meanwhile_ends_the_fetch_with_a_sentence(tmp_path, monkeypatch):
    write, written = os.pwrite, []

    def pwrite(handle, piece, at):
        if at > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(at)
        return write(handle, piece, at)

    monkeypatch.setattr(moving.os, "pwrite", pwrite)
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        failed = failing(node_files(tmp_path, mirror), ONE)
        assert failed.code == "disk_full"
        assert failed.sentence.endswith("partial: the disk is full")
        assert written


def test_what_a_killed_agent_left_half_named_is_put_right(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        path = run(node.obtain(ONE))
        os.link(path, path.parent / ".draft")
        os.link(path, tmp_path / "blobs" / ".draft")
        (tmp_path / "sets" / ".draft").write_bytes(b"{")
        path.unlink()
        path.write_bytes(b"something else")
        again = node_files(tmp_path)
        assert again.files.local(f"mirror:{ONE.key}") is None
        assert run(again.obtain(ONE)).read_bytes() == BODY
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        other = a_manifest("o", b"x")
        mirror.add(other, b"x")
        again.hear(mirror)
        run(again.obtain(other))
        drafts = list(tmp_path.rglob(".draft"))
        assert drafts == []


def test_a_broken_manifest_on_disk_is_asked_for_again(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        run(node.obtain(ONE))
        (tmp_path / "sets" / f"{ONE.key}.json").write_bytes(b"\x00")
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == len(BODY)
    assert a_key("one-0") == ONE.key
