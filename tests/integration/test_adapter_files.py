"""Adapters' files on one node: the catalog in a log in memory, mirrors over real HTTP, real files, no agent around."""

import asyncio
import logging
import random
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from events.log import Misconfigured
from nodeagent.domain.adapterfiles import set_of
from nodeagent.files.fetches import FetchFailed
from tests.support.adapter_files import (
    NAMES,
    a_base,
    adapter_set,
    an_adapter,
    gpu_node,
)
from tests.support.adapter_scene import came, scene, served
from tests.support.agent_yard import a_held, beside
from tests.support.aio import run, until
from tests.support.scripted_mirror import a_manifest, serving_mirror, some_bytes


def test_req_b3_every_adapter_is_on_the_node_before_anybody_asks_linked_under_its_names(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            adapters = served(mirror, "a", "b", "c")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(*adapters)
                await s.here(*adapters)
            for adapter in adapters:
                path = s.files.path(adapter)
                assert path is not None
                assert path == tmp_path / "sets" / set_of(adapter) == s.files.folder(adapter)
                assert path.parent == s.files.root
                assert sorted(p.name for p in path.iterdir()) == sorted(NAMES)
                assert [(path / n).read_bytes() for n in NAMES] == list(
                    adapter_set(adapter.name)[1:]
                )
                # Links, not copies: one of each content.
                assert (path / NAMES[0]).stat().st_nlink == 2

    run(story())


def test_they_come_one_at_a_time_most_wanted_first(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.005) as mirror:
            late, early = served(mirror, "late", "early", weights=200_000)
            pinned = replace(served(mirror, "pin", weights=200_000)[0], order=9, pinned=True)
            late = replace(late, order=5)
            async with scene(tmp_path, mirror, begin=False) as s:
                await s.editor.write(late, early, pinned)
                await s.known(late, early, pinned)
                s.files.begin()
                await s.here(late, early, pinned)
            order = [path.rsplit("/", 1)[-1] for kind, path, _ in mirror.asked if kind == "sets"]
            assert order == [set_of(a) for a in (pinned, early, late)]

    run(story())


def test_a_model_that_begins_to_run_here_comes_first_from_then_on(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.02) as mirror:
            others = served(mirror, "m-0", "m-1", "m-2", "m-3", weights=300_000)
            (mine,) = served(mirror, "mine", weights=300_000, base="runs")
            async with scene(tmp_path, mirror, begin=False) as s:
                await s.editor.write(a_base("runs", order=9), *others, mine)
                await s.known(*others, mine)
                s.files.begin()
                await until(lambda: mirror.sent_bytes > 0, "the first one to come")
                s.held["r-1"] = a_held("r-1", "starting", model="runs")
                await s.here(*others, mine)
            order = [path.rsplit("/", 1)[-1] for kind, path, _ in mirror.asked if kind == "sets"]
            assert order[:2] == [set_of(others[0]), set_of(mine)]

    run(story())


def test_what_is_on_the_node_needs_no_mirror_and_no_byte(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            (adapter,) = served(mirror, "a")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(adapter)
                await s.here(adapter)
            sent = mirror.sent_bytes
        async with scene(tmp_path) as s:
            await s.editor.write(adapter)
            await s.known(adapter)
            assert await s.files.obtain(adapter) == s.files.folder(adapter)
        assert sent == adapter.bytes

    run(story())


def test_inv_4_ten_who_wait_for_one_adapter_share_one_download(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.01) as mirror:
            (adapter,) = served(mirror, "a", weights=300_000)
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(adapter)
                paths = await asyncio.gather(*(s.files.obtain(adapter) for _ in range(10)))
            assert set(paths) == {s.files.folder(adapter)}
            assert mirror.sent_bytes == adapter.bytes

    run(story())


def test_who_waits_comes_first_and_what_was_fetched_ahead_goes_on_behind(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.02) as mirror:
            ahead, asked = served(mirror, "ahead", "asked", weights=2_000_000)
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(ahead)
                await until(lambda: mirror.sent_bytes > 300_000, "some of the first one")
                await s.files.obtain(asked)
                assert s.present(ahead, asked) == ["asked"]
                mirror.pause_s = 0
                await s.here(ahead)
            # What had come of it was kept.
            spans = [span for key, span in mirror.files_asked() if key == set_of(ahead)]
            assert spans[0] == ""
            assert all(span.startswith("bytes=") for span in spans[1:])
            assert mirror.sent_bytes < ahead.bytes + asked.bytes + 500_000

    run(story())


def test_a_replicas_fetch_comes_first_too(tmp_path):
    async def story():
        body = some_bytes(2_000_000, 5)
        model = a_manifest("model", body)
        with serving_mirror(pause_s=0.02) as mirror:
            mirror.add(model, body)
            (ahead,) = served(mirror, "ahead", weights=2_000_000)
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(ahead)
                await until(lambda: mirror.sent_bytes > 300_000, "some of the adapter")
                fetching = asyncio.create_task(s.node_files.obtain(model))
                await until(
                    lambda: any(key == model.key for key, _ in mirror.files_asked()), "the model"
                )
                here = s.node_files.partial(ahead_manifest()).stat().st_size
                await fetching
                assert s.node_files.partial(ahead_manifest()).stat().st_size == here
                mirror.pause_s = 0
                await s.here(ahead)

    def ahead_manifest():
        return adapter_set("ahead", 2_000_000)[0]

    run(story())


def test_somebody_who_waits_for_the_very_adapter_that_is_on_its_way_gets_what_came(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.02) as mirror:
            (adapter,) = served(mirror, "a", weights=2_000_000)
            # No room ahead of time would be no reason to refuse who waits: the two share no limits.
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(adapter)
                await until(lambda: mirror.sent_bytes > 300_000, "some of it")
                mirror.pause_s = 0
                assert await s.files.obtain(adapter) == s.files.path(adapter)
            assert mirror.sent_bytes < adapter.bytes + 200_000

    run(story())


def test_a_fetch_ahead_that_hangs_lets_go_at_once(tmp_path):
    async def story():
        with serving_mirror(stall_at=[500_000] * 2) as mirror:
            hangs, asked = served(mirror, "hangs", "asked", weights=1_000_000)
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(hangs)
                content = tmp_path / "partial" / hangs.files[0].sha256
                await until(lambda: came(content) == 500_000, "it to hang")
                began = time.monotonic()
                await s.files.obtain(asked)
                # A silence is given up after half a minute: whoever waited for that is far from this.
                assert time.monotonic() - began < 15.0
                await s.here(hangs)
            (again,) = [span for key, span in mirror.files_asked() if key == set_of(hangs)][1:]
            assert again == "bytes=500000-"

    run(story())


def test_who_stops_waiting_takes_nothing_from_the_others(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.01) as mirror:
            (adapter,) = served(mirror, "a", weights=500_000)
            async with scene(tmp_path, mirror, begin=False) as s:
                await s.editor.write(adapter)
                leaving, staying = (asyncio.create_task(s.files.obtain(adapter)) for _ in range(2))
                await until(lambda: mirror.sent_bytes > 100_000, "some of it")
                leaving.cancel()
                assert await staying == s.files.path(adapter)
            assert mirror.sent_bytes == adapter.bytes

    run(story())


def test_whoever_asks_in_whatever_order_gets_the_right_files(tmp_path):
    """Asks and leavings at random while everything is fetched ahead: no ask fails, no content is wrong."""

    async def story():
        order = random.Random(7)
        with serving_mirror(pause_s=0.001) as mirror:
            adapters = served(mirror, *(f"a{n}" for n in range(12)), weights=200_000)
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(*adapters)
                asks: list[asyncio.Task[Path]] = []
                for _ in range(60):
                    asks.append(asyncio.create_task(s.files.obtain(order.choice(adapters))))
                    for _ in range(order.randrange(6)):
                        await asyncio.sleep(0.001)
                    if order.random() < 0.3:
                        order.choice(asks).cancel()
                results = await asyncio.gather(*asks, return_exceptions=True)
                failed = [r for r in results if isinstance(r, Exception)]
                assert failed == []
                await s.here(*adapters)
            for adapter in adapters:
                path = s.files.folder(adapter)
                found = [(path / n).read_bytes() for n in NAMES]
                assert found == list(adapter_set(adapter.name, 200_000)[1:])
            # One download each, whatever was cut short; a piece or two may come twice.
            assert mirror.sent_bytes < 12 * 200_000 * 1.7

    run(story())


def test_another_version_comes_beside_the_old_one_and_is_told(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            (old,) = served(mirror, "a")
            manifest, *contents = adapter_set("a-2")
            mirror.add(manifest, *contents)
            new = replace(an_adapter("a", manifest), version="fedcba987654")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(old)
                await s.here(old)
                s.told.clear()
                await s.editor.write(new)
                await s.here(new)
                assert s.told == [frozenset({"a"})]
                assert s.files.adapter("a") == new
                assert s.present(old) == ["a"]
                await s.editor.end("adapter", "a")
                await until(lambda: s.files.adapter("a") is None, "its end")
                assert s.told == [frozenset({"a"})] * 2

    run(story())


def test_the_catalog_is_told_of_once_when_it_was_read_although_it_is_empty(tmp_path):
    async def story():
        async with scene(tmp_path) as s:
            await until(lambda: s.files.synced, "the catalog")
            assert s.told == [frozenset()]
            assert s.files.adapter("a") is None

    run(story())


def test_it_is_followed_through_an_outage(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            first, second = served(mirror, "first", "second")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(first)
                await s.here(first)
                s.log.connection.disconnect()
                await s.editor.write(second, replace(first, pinned=True))
                # What is known stands, and its files are given without the log.
                assert s.files.adapter("first") == first
                assert await s.files.obtain(first) == s.files.path(first)
                s.log.connection.reconnect()
                await s.here(second)
                assert s.files.adapter("first") == replace(first, pinned=True)

    run(story())


def test_other_contents_than_the_catalog_says_are_not_taken(tmp_path):
    async def story():
        with serving_mirror() as mirror, serving_mirror() as right:
            manifest, weights, config = adapter_set("a")
            adapter = an_adapter("a", manifest)
            wrong = some_bytes(1000, 99)
            other = a_manifest("a", wrong, config, names=NAMES)
            assert other.key == manifest.key
            mirror.add(other, wrong, config)
            async with scene(tmp_path, mirror, begin=False, fetch_no_progress_s=0.5) as s:
                with pytest.raises(FetchFailed) as failed:
                    await s.files.obtain(adapter)
                assert failed.value.code == "fetch_failed"
                assert "not what the catalog says of adapter_model.safetensors" in (
                    failed.value.sentence
                )
                # What an earlier life took is not believed either.
                await s.node_files.obtain(other)
                assert s.files.path(adapter) is None
                right.add(manifest, weights, config)
                s.node_files.hear(right)
                path = await s.files.obtain(adapter)
                assert (path / NAMES[0]).read_bytes() == weights

    run(story())


def test_one_that_no_mirror_has_holds_up_no_other_and_is_told_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("nodeagent.files.fetches.AHEAD_S", 0.3)
    monkeypatch.setattr("nodeagent.domain.adapterfiles._FIRST_AGAIN_S", 0.1)

    async def story():
        with serving_mirror() as mirror:
            missing = an_adapter("missing", adapter_set("missing")[0], order=0, pinned=True)
            (there,) = served(mirror, "there")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(missing, there)
                await s.here(there)
                await until(
                    lambda: (
                        sum(k == "sets" and set_of(missing) in p for k, p, _ in mirror.asked) >= 4
                    ),
                    "several tries",
                )
                manifest, *contents = adapter_set("missing")
                mirror.add(manifest, *contents)
                await s.here(missing)

    caplog.set_level(logging.INFO)
    run(story())
    lines = [r for r in caplog.records if r.msg == "adapter not fetched yet"]
    assert [(r.adapter, r.code) for r in lines] == [("missing", "fetch_failed")]


def test_without_files_in_the_catalog_there_is_nothing_to_obtain(tmp_path):
    async def story():
        async with scene(tmp_path) as s:
            adapter = an_adapter("a", files=(), phase="reading", version="")
            assert s.files.path(adapter) is None
            with pytest.raises(FetchFailed, match="the files of a are not known yet"):
                await s.files.obtain(adapter)

    run(story())


def test_files_of_models_that_never_run_here_do_not_come(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            (adapter,) = served(mirror, "a")
            (other,) = served(mirror, "x", base="elsewhere")
            async with scene(tmp_path, mirror) as s:
                await s.editor.write(a_base("elsewhere", max_loaded_adapters=0))
                await s.editor.write(other, adapter)
                await s.here(adapter)
                assert s.present(other) == []
            assert mirror.sent_bytes == adapter.bytes

    run(story())


def test_a_user_who_may_not_read_the_catalog_has_no_adapters_and_lives(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("nodeagent.adapterfiles.READ_AGAIN_S", 0.01)

    async def story():
        async with scene(tmp_path, runs=False) as s:
            follow, refusals, log = s.log.follow, [], vars(s.log)

            class Refused:
                async def next(self):
                    raise Misconfigured("permissions violation")

                async def close(self):
                    return None

            def refuse(filters, **fields):
                if len(refusals) < 6:
                    refusals.append(filters)
                    return Refused()
                return follow(filters, **fields)

            log["follow"] = refuse
            async with beside(s.files.run()):
                await until(lambda: s.files.synced, "the catalog, once it may be read")
            assert all(len(filters) == 1 for filters in refusals)

    run(story())
    said = [r for r in caplog.records if r.msg.startswith("the catalog cannot be read")]
    assert sorted(r.noun for r in said) == ["adapter", "model"]


def test_the_folder_engines_may_read_is_there_before_the_first_set(tmp_path):
    async def story():
        async with scene(tmp_path / "a") as s:
            await until(s.files.root.is_dir, "the folder")
        async with scene(tmp_path / "b", node=gpu_node(engines=())) as s:
            await until(lambda: s.files.synced, "it to work")
            assert not s.files.root.exists()

    run(story())
