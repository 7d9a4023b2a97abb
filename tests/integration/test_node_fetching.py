"""One node's files from mirrors that behave and misbehave: real HTTP, real files, no agent around."""

import asyncio
import itertools
import time

import pytest

from nodeagent.files.fetches import FetchFailed
from nodeagent.files.source import Failed, Stopper, ask_manifest
from tests.support.aio import run, until
from tests.support.fileserver import Asked, file_server
from tests.support.node_files import failing, node_files
from tests.support.scripted_mirror import a_key, a_manifest, a_sha256, serving_mirror, some_bytes

BODY = some_bytes(3_000_017)
ONE = a_manifest("one", BODY)


def test_a_set_is_fetched_once_and_afterwards_needs_nobody(tmp_path):
    shards = [some_bytes(200_000, 1), some_bytes(100_000, 2), b"", some_bytes(100_000, 2)]
    manifest = a_manifest("m", *shards)
    with serving_mirror() as mirror:
        mirror.add(manifest, *shards)
        node = node_files(tmp_path, mirror)
        first = run(node.obtain(manifest))
    names = [file.name for file in manifest.files]
    assert [(first.parent / name).read_bytes() for name in names] == shards
    assert first.name == names[0]
    # The same content under two names is fetched and kept once.
    assert mirror.sent_bytes == 300_000
    assert len(node.contents()) == 3
    assert run(node_files(tmp_path).obtain(manifest)) == first
    # Two are fetched at a time: which of them asks first is nobody's promise.
    assert (manifest.files[0].key, "") in mirror.files_asked()


def test_scn_c6_a_cut_fetch_goes_on_at_the_byte_it_reached_and_the_whole_is_hashed(tmp_path):
    with serving_mirror(cut_at=[1_000_000, 500_000]) as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert [span for _, span in mirror.files_asked()] == [
            "",
            "bytes=1000000-",
            "bytes=1500000-",
        ]
        assert mirror.sent_bytes == len(BODY)
    assert not node.partial(ONE).exists()


def test_scn_c6_what_an_earlier_life_left_is_hashed_and_only_the_rest_is_fetched(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        node.partial(ONE).parent.mkdir(parents=True)
        node.partial(ONE).write_bytes(BODY[:2_000_000])
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == len(BODY) - 2_000_000


def test_all_of_it_was_there_already_but_for_its_name_and_no_mirror_lives(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        node.partial(ONE).parent.mkdir(parents=True)
        node.partial(ONE).write_bytes(BODY)
        mirror.statuses = [503] * 50
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == 0


@pytest.mark.parametrize("left", [b"x" * 1000, b"y" * (len(BODY) + 5), b"z" * len(BODY)])
def test_a_beginning_that_is_not_of_this_content_is_thrown_away_and_fetched_anew(tmp_path, left):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        node.partial(ONE).parent.mkdir(parents=True)
        node.partial(ONE).write_bytes(left)
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes <= 2 * len(BODY)


def test_bytes_other_than_announced_are_fetched_once_more(tmp_path):
    with serving_mirror(garble=1) as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == 2 * len(BODY)


def test_bytes_other_than_announced_twice_fail_with_both_sums_and_leave_nothing(tmp_path):
    with serving_mirror(garble=9) as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        failed = failing(node, ONE)
        assert failed.code == "fetch_failed"
        assert ONE.files[0].sha256[:12] in failed.sentence
        assert mirror.url in failed.sentence
        assert mirror.sent_bytes == 2 * len(BODY)
    assert node.partial(ONE).read_bytes() == b""
    assert node.contents() == {}


def test_more_bytes_than_announced_are_not_taken(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        mirror.contents[ONE.key] = BODY + b"more"
        failed = failing(node_files(tmp_path, mirror), ONE)
        assert "more than 3000017 bytes" in failed.sentence


def test_a_mirror_that_fails_is_left_for_the_next_one(tmp_path):
    with serving_mirror(always=503) as a, serving_mirror(cut_at=[700_000]) as b:
        b.add(ONE, BODY)
        node = node_files(tmp_path, a, b)
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert b.sent_bytes == len(BODY)


def test_a_silent_mirror_is_left_for_the_next_one_and_what_came_is_kept(tmp_path):
    with serving_mirror(stall_at=[1_000_000] * 9) as a, serving_mirror(stall_at=[900_000]) as b:
        a.add(ONE, BODY)
        b.add(ONE, BODY)
        node = node_files(tmp_path, a, b, fetch_no_progress_s=2.0)
        # Both stop in the middle; between them the file is had, each byte once.
        assert run(node.obtain(ONE)).read_bytes() == BODY
        assert a.sent_bytes + b.sent_bytes == len(BODY)


def test_no_new_byte_for_the_bound_is_a_failure_that_says_what_the_mirror_did(tmp_path):
    with serving_mirror(stall_at=[100_000, *[0] * 20]) as mirror:
        mirror.add(ONE, BODY)
        began = time.monotonic()
        failed = failing(node_files(tmp_path, mirror, fetch_no_progress_s=0.6), ONE)
        assert time.monotonic() - began < 5
        assert failed.code == "fetch_failed"
        assert failed.sentence == (
            f"no new byte for 0.6 s: the mirror at {mirror.url} stopped sending (no byte in time)"
        )


def test_bytes_that_come_slowly_are_no_failure(tmp_path):
    body = some_bytes(64 * 1024 * 12)
    manifest = a_manifest("slow", body)
    with serving_mirror(pause_s=0.1) as mirror:
        mirror.add(manifest, body)
        node = node_files(tmp_path, mirror, fetch_no_progress_s=0.5)
        assert run(node.obtain(manifest)).read_bytes() == body


def test_a_node_every_mirror_refuses_hears_so_at_once(tmp_path):
    with serving_mirror(always=401) as mirror:
        mirror.add(ONE, BODY)
        began = time.monotonic()
        failed = failing(node_files(tmp_path, mirror), ONE)
        assert time.monotonic() - began < 3
        assert failed.sentence == (
            f"the mirror at {mirror.url} refuses this node (401):"
            " is the node's secret of this yard?: as told"
        )


def test_a_set_no_mirror_has_yet_is_waited_for(tmp_path):
    with serving_mirror() as mirror:
        node = node_files(tmp_path, mirror)

        async def story():
            fetching = asyncio.create_task(node.obtain(ONE))
            await until(lambda: len(mirror.asked) >= 2, "it to ask again")
            mirror.add(ONE, BODY)
            return await fetching

        assert run(story()).read_bytes() == BODY
        other = a_manifest("other", b"x")
        failed = failing(node_files(tmp_path, mirror, fetch_no_progress_s=0.3), other)
        assert failed.sentence.endswith(f"the mirror at {mirror.url} does not have it: as told")


def test_a_mirror_heard_of_later_is_asked_at_once(tmp_path):
    with serving_mirror() as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path)

        async def story():
            fetching = asyncio.create_task(node.obtain(ONE))
            await asyncio.wait({fetching}, timeout=1.2)
            assert not fetching.done()
            began = time.monotonic()
            node.hear(mirror)
            await fetching
            assert time.monotonic() - began < 0.8

        run(story())
    failed = failing(node_files(tmp_path / "other", fetch_no_progress_s=0.2), ONE)
    assert failed.sentence.startswith("no new byte for 0.2 s: no mirror was heard of;")


@pytest.mark.parametrize("status", [404, 416, 500])
def test_an_answer_without_bytes_costs_a_moment_and_no_more(tmp_path, status):
    with serving_mirror(statuses=[status]) as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)
        node.partial(ONE).parent.mkdir(parents=True)
        node.partial(ONE).write_bytes(BODY[:1000])
        assert run(node.obtain(ONE)).read_bytes() == BODY


def test_a_mirror_that_knows_no_ranges_sends_all_of_it_again(tmp_path):
    with serving_mirror(cut_at=[1_000_000], ignore_range=True, close_each=True) as mirror:
        mirror.add(ONE, BODY)
        assert run(node_files(tmp_path, mirror).obtain(ONE)).read_bytes() == BODY
        assert mirror.sent_bytes == len(BODY) + 1_000_000


def test_other_content_under_the_key_is_not_taken(tmp_path):
    with serving_mirror() as a, serving_mirror() as b:
        for mirror in (a, b):
            mirror.add(ONE, BODY)
        a.etags[ONE.key] = f'"{a_sha256(b"other")}"'
        node = node_files(tmp_path, a, b)
        assert run(node.obtain(ONE)).read_bytes() == BODY
        # What `a` sent may have gone into the connection's buffers; nobody read it.
        assert b.sent_bytes == len(BODY)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"key":"x","files":[]}', b"\xff"])
def test_a_manifest_that_is_none_is_a_fault_of_that_mirror(tmp_path, body):
    with serving_mirror() as mirror:
        mirror.manifests[ONE.key] = body
        failed = failing(node_files(tmp_path, mirror, fetch_no_progress_s=0.2), ONE)
        assert "cannot be believed" in failed.sentence


def test_an_address_that_is_none_is_a_fault_and_no_more(tmp_path):
    node = node_files(tmp_path, fetch_no_progress_s=0.2)
    for url in ("ftp://x", "nothing", "http://[::1", "http://:80", "http://127.0.0.1:99999"):
        node.hear(type("Mirror", (), {"url": url})())
    assert failing(node, ONE).code == "fetch_failed"


@pytest.mark.parametrize("key", ["", "x", "../../etc/passwd", "A" * 64])
def test_a_source_that_names_no_content_is_refused(tmp_path, key):
    node = node_files(tmp_path)
    with pytest.raises(FetchFailed, match="names no file of a mirror"):
        run(node.files.obtain(f"mirror:{key}", "r-1"))
    assert node.files.local(f"mirror:{key}") is None
    node.files.used(f"mirror:{key}")
    assert node.files.local("/models/x.gguf") == "/models/x.gguf"


def test_scn_c9_a_file_wanted_by_ten_is_fetched_once_and_all_go_on(tmp_path):
    other = a_manifest("other", BODY)  # another repository, the same bytes
    with serving_mirror(pause_s=0.01) as mirror:
        mirror.add(ONE, BODY)
        mirror.add(other, BODY)
        node = node_files(tmp_path, mirror)

        async def story():
            return await asyncio.gather(
                *(node.obtain(ONE, f"r-{n}") for n in range(5)),
                *(node.obtain(other, f"s-{n}") for n in range(5)),
            )

        paths = run(story())
        assert len(set(paths)) == 2
        assert all(path.read_bytes() == BODY for path in set(paths))
        assert mirror.sent_bytes == len(BODY)
        assert sum(kind == "sets" for kind, _, _ in mirror.asked) == 2


def test_who_leaves_takes_the_fetch_with_him_only_when_he_is_the_last(tmp_path):
    with serving_mirror(pause_s=0.03) as mirror:
        mirror.add(ONE, BODY)
        node = node_files(tmp_path, mirror)

        async def story():
            first = asyncio.create_task(node.obtain(ONE, "r-1"))
            second = asyncio.create_task(node.obtain(ONE, "r-2"))
            await until(lambda: mirror.sent_bytes > 300_000, "some bytes")
            first.cancel()
            await asyncio.wait({first})
            sent = mirror.sent_bytes
            await until(lambda: mirror.sent_bytes > sent + 300_000, "more bytes for the other")
            began = time.monotonic()
            second.cancel()
            await asyncio.wait({second})
            assert time.monotonic() - began < 0.5
            kept = node.partial(ONE).stat().st_size
            assert 0 < kept < len(BODY)
            assert node.partial(ONE).read_bytes() == BODY[:kept]
            # Nobody goes on with it behind our back.
            await asyncio.sleep(0.2)
            assert node.partial(ONE).stat().st_size == kept
            mirror.pause_s = 0
            assert (await node.obtain(ONE, "r-3")).read_bytes() == BODY
            assert mirror.files_asked()[-1] == (ONE.key, f"bytes={kept}-")

        run(story())


@pytest.mark.parametrize("when", ["silent", "manifest", "unheard"])
def test_leaving_is_prompt_whatever_it_waits_for(tmp_path, when):
    with serving_mirror(stall_at=[0, 1000] if when == "silent" else []) as mirror:
        if when == "silent":
            mirror.add(ONE, BODY)
        node = node_files(tmp_path, *([] if when == "unheard" else [mirror]))

        async def story():
            fetching = asyncio.create_task(node.obtain(ONE))
            if when == "unheard":
                await asyncio.sleep(0.05)
            else:
                await until(lambda: len(mirror.asked) >= (2 if when == "silent" else 1), "asked")
            await asyncio.sleep(0.05)
            began = time.monotonic()
            fetching.cancel()
            await asyncio.wait({fetching})
            assert fetching.cancelled()
            assert time.monotonic() - began < 0.5

        run(story())


def test_no_more_files_than_the_setting_says_are_fetched_at_once(tmp_path):
    shards = [some_bytes(400_000, n) for n in range(5)]
    manifest = a_manifest("m", *shards)
    with serving_mirror(pause_s=0.02) as mirror:
        mirror.add(manifest, *shards)
        run(node_files(tmp_path, mirror, fetches=2).obtain(manifest))
        assert mirror.most_running == 2


def test_progress_is_told_to_each_replica_at_most_once_a_second_and_grows(tmp_path):
    shards = [some_bytes(1_000_000, 1), some_bytes(500_000, 2)]
    manifest = a_manifest("m", *shards)
    with serving_mirror(pause_s=0.2) as mirror:
        mirror.add(manifest, *shards)
        node = node_files(tmp_path, mirror)

        async def story():
            await asyncio.gather(node.obtain(manifest, "r-1"), node.obtain(manifest, "r-2"))

        run(story())
    told = [(at, p) for at, p in node.told.progress_told if p.replica == "r-1"]
    assert len(told) >= 2
    assert len(told) == len([1 for _, p in node.told.progress_told if p.replica == "r-2"])
    times = [at for at, _ in told]
    assert all(b - a > 0.9 for a, b in itertools.pairwise(times))
    counts = [p.bytes for _, p in told]
    assert counts == sorted(counts)
    assert all(0 < p.bytes <= 1_500_000 == p.total_bytes for _, p in told[1:])
    assert {p.what for _, p in told} == {"fetching"}
    assert told[-1][1].rate_bytes_s > 50_000
    assert {p.key for _, p in told} == {manifest.key}


@pytest.mark.parametrize(
    ("beginning", "drip", "said"),
    [
        (b"HTTP/1.1 200 X\r\nx-long: ", b"x", "does not answer"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "does not answer"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 9999\r\n\r\n", b"x", "did not tell of a set within"),
    ],
)
def test_a_mirror_that_drips_without_end_is_left(beginning, drip, said):
    def script(asked: Asked) -> None:
        asked.connection.sendall(beginning)
        while not asked.server.ending.wait(0.02):
            asked.connection.sendall(drip)

    began = time.monotonic()
    with file_server(script) as server, pytest.raises(Failed) as failed:
        ask_manifest(server.url, a_key("m"), "token", 0.3, Stopper())
    assert time.monotonic() - began < 5
    assert failed.value.fault.kind == "away"
    assert said in str(failed.value)
