"""Adapters' files on one node: the catalog in a log in memory, mirrors over real HTTP, real files, no agent around."""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from events.log import Misconfigured
from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from nodeagent.adapterfiles import AdapterFiles
from nodeagent.domain.adapterfiles import set_of
from nodeagent.files.fetches import FetchFailed
from nodeagent.files.store import Store
from schemas.adapter import Adapter
from schemas.node import Node
from tests.support.adapter_files import (
    NAMES,
    Editor,
    a_base,
    adapter_set,
    an_adapter,
    gpu_node,
)
from tests.support.agent_yard import a_held, a_launch, beside
from tests.support.aio import run, until
from tests.support.node_files import NodeFiles, node_files
from tests.support.scripted_mirror import Mirror, a_manifest, serving_mirror, some_bytes


@dataclass
class Scene:
    """One node's adapters; `held` are its replicas, `told` what `on_change` said."""

    files: AdapterFiles
    node_files: NodeFiles
    log: MemoryLog
    editor: Editor
    held: dict[str, Any]
    told: list[frozenset[str]] = field(default_factory=list)

    async def here(self, *adapters: Adapter) -> None:
        for adapter in adapters:
            await until(lambda a=adapter: self.files.path(a) is not None, f"{adapter.name} here")

    async def known(self, *adapters: Adapter) -> None:
        for adapter in adapters:
            await until(
                lambda a=adapter: self.files.adapter(a.name) == a, f"{a_name(adapter)} known"
            )

    def present(self, *adapters: Adapter) -> list[str]:
        return [a.name for a in adapters if self.files.path(a) is not None]


def a_name(adapter: Adapter) -> str:
    return f"{adapter.name}@{adapter.version}"


@asynccontextmanager
async def scene(
    folder: Path,
    *mirrors: Mirror,
    node: Node | None = None,
    begin: bool = True,
    runs: bool = True,
    held: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A node that follows a log with model `m`; `begin` False: nothing is fetched ahead."""
    broker = MemoryBroker()
    log = MemoryLog(broker, source="/agent/n1")
    held = {} if held is None else held
    around: list[AdapterFiles] = []
    on_disk = node_files(
        folder, *mirrors, spares_adapters=lambda: not around[0].settled(), **settings
    )
    needed = on_disk.needed
    files = AdapterFiles(
        log=log, files=on_disk.files, node=node or gpu_node(), prefix="yard", held=lambda: held
    )
    around.append(files)
    # As the agent wires it: what loaded adapters need is needed like what replicas need.
    on_disk.also_needed = files.kept
    assert needed == set()
    editor = Editor(MemoryLog(broker))
    made = Scene(files=files, node_files=on_disk, log=log, editor=editor, held=held)
    files.on_change = made.told.append
    await editor.write(a_base())
    if begin:
        files.begin()
    async with beside(*([files.run()] if runs else [])):
        yield made


def served(mirror: Mirror, *names: str, weights: int = 1000, **fields: Any) -> list[Adapter]:
    """Ready adapters whose files the mirror has."""
    adapters: list[Adapter] = []
    for order, name in enumerate(names):
        manifest, *contents = adapter_set(name, weights)
        mirror.add(manifest, *contents)
        adapters.append(an_adapter(name, manifest, order=order, **fields))
    return adapters


def came(content: Path) -> int:
    """How much of a content is here."""
    return content.stat().st_size if content.exists() else 0


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
                assert time.monotonic() - began < 2.0
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
