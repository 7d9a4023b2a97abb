"""Room on a node's disk for adapters: what goes for them, what they never take, and what stays while it is used."""

import asyncio
import logging
import os
import threading

import pytest
from msgspec.structs import replace

from nodeagent.domain.adapterfiles import set_of
from nodeagent.files.fetches import FetchFailed
from nodeagent.files.store import Store
from tests.support.adapter_files import a_base, adapter_set
from tests.support.adapter_scene import scene, served
from tests.support.agent_yard import a_held, a_launch
from tests.support.aio import run, until
from tests.support.node_files import node_files
from tests.support.scripted_mirror import a_manifest, serving_mirror, some_bytes


def test_looking_at_the_disk_holds_nobody_up_who_has_it_all_and_making_room_does(
    tmp_path, monkeypatch
):
    async def story():
        with serving_mirror() as mirror:
            here, other = served(mirror, "here", "other")
            async with scene(tmp_path, mirror, begin=False) as s:
                await s.files.obtain(here)
                files = s.node_files.files
                going, looks = threading.Event(), []
                look = Store.look

                def slow_look(self, promised):
                    looks.append(promised)
                    assert going.wait(10)
                    return look(self, promised)

                monkeypatch.setattr(Store, "look", slow_look)
                surveying = asyncio.create_task(files.survey({}, {}))
                await until(lambda: len(looks) == 1, "the survey")
                assert files.take(set_of(here)) is not None
                fetching = asyncio.create_task(s.files.obtain(other))
                going.set()
                await surveying
                going.clear()
                await until(lambda: len(looks) == 2, "the fetch to make room")
                # What is whole now may be going: it is not given out before that is over.
                assert files.take(set_of(here)) is None
                going.set()
                await fetching
                assert files.take(set_of(here)) is not None

    run(story())


def test_what_was_given_back_goes_after_what_was_not_used_for_longer(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            first, second, third = served(mirror, *"abc", weights=100_000)
            held = {"r-1": a_held("r-1", launch=a_launch(adapters=4))}
            async with scene(
                tmp_path, mirror, begin=False, held=held, files_budget_bytes=250_000
            ) as s:
                s.files.keep("r-1", frozenset({set_of(first)}))
                for n, adapter in enumerate((first, second)):
                    await s.files.obtain(adapter)
                    os.utime(tmp_path / "sets" / f"{set_of(adapter)}.json", (n, n))
                # Used until now, however long ago it was fetched.
                s.files.keep("r-1", frozenset())
                await s.files.obtain(third)
                assert s.present(first, second, third) == ["a", "c"]

    run(story())


def test_a_budget_is_kept_and_nothing_needed_goes_for_it(tmp_path, caplog):
    async def story():
        with serving_mirror() as mirror:
            adapters = served(mirror, *"abcdef", weights=100_000)
            model = a_manifest("model", some_bytes(200_000, 5))
            mirror.add(model, some_bytes(200_000, 5))
            async with scene(tmp_path, mirror, begin=False, files_budget_bytes=450_000) as s:
                await s.node_files.obtain(model)
                s.node_files.needed.add(model.key)
                await s.editor.write(*adapters)
                await s.known(*adapters)
                s.files.begin()
                await s.here(*adapters[:2])
                await until(lambda: "no room to have all adapters here" in caplog.text, "a word")
                # Nothing that was fetched goes for the next one: it would go on for ever.
                sent = mirror.sent_bytes
                await s.editor.write(replace(adapters[5], pinned=True))
                await s.here(adapters[5])
                assert s.present(*adapters) == ["a", "f"] or s.present(*adapters) == ["b", "f"]
                assert s.files.path(adapters[0]) is not None
                assert mirror.sent_bytes == sent + adapters[5].bytes
                assert s.node_files.files.whole(model.key) is not None
                held = sum(map(len, s.node_files.contents().values()))
                assert held <= 450_000

    caplog.set_level(logging.INFO)
    run(story())
    (line,) = [r for r in caplog.records if r.msg == "no room to have all adapters here"][:1]
    assert (line.left, line.of) == (4, 6)


def test_models_of_the_catalog_keep_their_files_although_nothing_runs(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            (adapter,) = served(mirror, "a", weights=100_000)
            body = some_bytes(300_000, 5)
            model = mirror.add(a_manifest("model", body), body)
            async with scene(tmp_path, mirror, begin=False, files_budget_bytes=350_000) as s:
                await s.editor.write(a_base("llama", source=f"mirror:{model.key}", profiles=()))
                await s.node_files.obtain(model)
                await s.editor.write(adapter)
                await s.known(adapter)
                s.files.begin()
                await until(lambda: bool(s.files.left), "it to be left")
                assert s.files.path(adapter) is None
                # One who asks is another matter: what nothing needs goes.
                await s.files.obtain(adapter)
                assert s.node_files.files.whole(model.key) is None

    run(story())


def test_inv_3_the_files_of_a_loaded_adapter_stay_whatever_comes(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            loaded, other = served(mirror, "loaded", "other", weights=100_000)
            held = {"r-1": a_held("r-1", launch=a_launch(adapters=4))}
            async with scene(
                tmp_path, mirror, begin=False, held=held, files_budget_bytes=150_000
            ) as s:
                s.files.keep("r-1", frozenset({set_of(loaded)}))
                await s.files.obtain(loaded)
                with pytest.raises(FetchFailed) as failed:
                    await s.files.obtain(other)
                assert failed.value.code == "disk_full"
                s.files.keep("r-1", frozenset({set_of(other)}))
                await s.files.obtain(other)
                assert s.present(loaded, other) == ["other"]
                # Back again; and what nobody gave back ends with the replica.
                held["r-1"] = a_held("r-1", "stopped", launch=a_launch(adapters=4))
                await s.files.obtain(loaded)
                assert s.present(loaded, other) == ["loaded"]
                s.files.give_back("r-1")
                assert s.files.kept() == frozenset()

    run(story())


def test_after_a_restart_no_adapter_goes_before_it_is_known_what_engines_have_loaded(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            loaded, other = served(mirror, "loaded", "other", weights=100_000)
            async with scene(tmp_path, mirror) as s:
                await s.files.obtain(loaded)
            held = {"r-1": a_held("r-1", adapter_slots=4)}
            async with scene(
                tmp_path, mirror, begin=False, held=held, files_budget_bytes=150_000
            ) as s:
                await s.node_files.files.keep_within()
                with pytest.raises(FetchFailed):
                    await s.files.obtain(other)
                assert s.present(loaded) == ["loaded"]
                # It has none loaded, as its agent reads from it.
                s.files.keep("r-1", frozenset())
                await s.files.obtain(other)
                assert s.present(loaded) == []

    run(story())


def test_contents_two_sets_share_are_not_fetched_again_when_one_goes(tmp_path):
    shared, first, second = (some_bytes(100_000, n) for n in range(3))
    one = a_manifest("one", first, shared)
    two = a_manifest("two", shared, second)

    async def story():
        with serving_mirror() as mirror:
            mirror.add(one, first, shared)
            mirror.add(two, shared, second)
            node = node_files(tmp_path, mirror, files_budget_bytes=200_000)
            await node.obtain(one)
            await node.obtain(two)
            assert mirror.sent_bytes == 300_000
            assert sum(map(len, node.contents().values())) == 200_000

    run(story())


def test_a_mirrors_folder_on_this_machine_is_linked_and_costs_nothing(tmp_path):
    async def story():
        theirs = tmp_path / "mirror"
        (theirs / "blobs").mkdir(parents=True)
        with serving_mirror() as mirror:
            adapters = served(mirror, "a", "b")
            for adapter in adapters:
                for file, content in zip(adapter.files, adapter_set(adapter.name)[1:], strict=True):
                    (theirs / "blobs" / file.sha256).write_bytes(content)
            async with scene(
                tmp_path / "files", mirror, mirror_folder=str(theirs), files_budget_bytes=1
            ) as s:
                await s.editor.write(*adapters)
                await s.here(*adapters)
            assert mirror.sent_bytes == 0

    run(story())
