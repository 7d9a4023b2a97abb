"""An agent that fetches a model's files from a mirror before it starts the engine; the log in memory."""

import json
import time

from msgspec.structs import replace

from nodeagent.journal import Journal, PutHeld
from schemas.progress import FileProgress
from schemas.settings import GIB, MIB
from tests.support.agent_yard import a_node, a_stop, alive, an_item, memory_yard
from tests.support.aio import run, until
from tests.support.fetch_items import an_item_of, announced, started
from tests.support.scripted_mirror import TOKEN, a_manifest, serving_mirror, some_bytes

BODY = some_bytes(3_000_017)
ONE = a_manifest("one", BODY)


def an_agent(yard, **fields):
    return yard.agent(mirror_token=TOKEN, **fields)


def folder(tmp_path):
    return tmp_path / "nodeagent" / "files"


def partial(tmp_path):
    return folder(tmp_path) / "partial" / ONE.files[0].sha256


def test_files_are_fetched_before_the_engine_starts_on_the_first_of_them(tmp_path):
    shards = (some_bytes(700_001, 1), some_bytes(300_000, 2), some_bytes(5, 3))
    manifest = a_manifest("m", *shards)

    async def story():
        with serving_mirror() as mirror:
            mirror.add(manifest, *shards)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", manifest))
                    path = await started(hand, "r-1")
                    ready = hand.replica("r-1")
                assert hand.types("r-1")[:3] == [
                    "replica.fetching",
                    "replica.starting",
                    "replica.ready",
                ]
                assert path.name == manifest.files[0].name
                for file, shard in zip(manifest.files, shards, strict=True):
                    assert (path.parent / file.name).read_bytes() == shard
                assert mirror.sent_bytes == sum(map(len, shards))
                fetching, starting = (
                    next(i for i in hand.seen if i.type == f"replica.{phase}")
                    for phase in ("fetching", "starting")
                )
                assert fetching.event.source == f"mirror:{manifest.key}"
                assert (fetching.state.started_at, fetching.state.pid) == (None, None)
                assert starting.state.started_at >= fetching.time
                assert starting.event.port > 0
                assert ready.endpoint.endswith(f":{starting.event.port}")
                # The lease was there before the first byte.
                assert hand.types().index("card.leased") < hand.types().index("replica.fetching")
                assert hand.types().count("card.leased") == 1

    run(story())


def test_what_is_on_the_node_needs_neither_mirror_nor_fetching(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with an_agent(yard):
                with serving_mirror() as mirror:
                    mirror.add(ONE, BODY)
                    async with announced(hand.wire, mirror):
                        await hand.plan(an_item_of("r-1", ONE))
                        first = await started(hand, "r-1")
                await hand.plan(an_item_of("r-1", ONE, stop=a_stop()))
                await hand.phase("r-1", "stopped")
            # Another agent, and no mirror anywhere.
            async with an_agent(yard):
                await hand.plan(an_item_of("r-2", ONE))
                assert await started(hand, "r-2") == first
            assert "replica.fetching" not in hand.types("r-2")

    run(story())


def test_inv_4_two_replicas_of_one_model_share_one_fetch_and_one_file(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.01) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE), an_item_of("r-2", ONE))
                    paths = {await started(hand, name) for name in ("r-1", "r-2")}
                assert len(paths) == 1
                assert mirror.sent_bytes == len(BODY)
                # Stopping one leaves the other its file, and the room it needs is not given away.
                await hand.plan(an_item_of("r-1", ONE, stop=a_stop()), an_item_of("r-2", ONE))
                await hand.phase("r-1", "stopped")
                assert paths.pop().read_bytes() == BODY

    run(story())


def test_stopping_one_that_fetches_is_prompt_and_leaves_what_came(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    await hand.phase("r-1", "fetching")
                    await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                    began = time.monotonic()
                    await hand.plan(an_item_of("r-1", ONE, stop=a_stop()))
                    withdrawn = await hand.phase("r-1", "withdrawn")
                    assert time.monotonic() - began < 1.0
                    assert withdrawn.pid is None
                    assert withdrawn.reason.startswith("withdrawn while its files were fetched")
                    await hand.expect(lambda: hand.card().leases == (), "the lease to end")
                    kept = partial(tmp_path).stat().st_size
                    assert kept > 0
                    await hand.plan()
                    mirror.pause_s = 0
                    await hand.plan(an_item_of("r-2", ONE))
                    assert (await started(hand, "r-2")).read_bytes() == BODY
                    assert mirror.files_asked()[-1] == (ONE.key, f"bytes={kept}-")
                assert hand.types("r-1") == ["replica.fetching", "replica.withdrawn"]

    run(story())


def test_one_that_fetches_and_is_in_no_plan_any_more_is_withdrawn(tmp_path):
    async def story():
        with serving_mirror(stall_at=[1000] * 9) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    await until(lambda: mirror.sent_bytes > 0, "the first bytes")
                    await hand.plan()
                    await hand.phase("r-1", "withdrawn")
                    await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_a_fetch_that_fails_is_a_failed_start_with_a_sentence_and_gives_its_room_back(tmp_path):
    async def story():
        with serving_mirror(always=401) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    failed = await hand.phase("r-1", "failed")
                    assert (failed.code, failed.was_ready) == ("fetch_failed", False)
                    assert failed.reason == (
                        f"not fetched: the mirror at {mirror.url} refuses this node (401):"
                        " is the node's secret of this yard?: as told"
                    )
                    await hand.expect(lambda: hand.card().leases == (), "the lease to end")
                assert hand.types("r-1") == ["replica.fetching", "replica.failed"]

    run(story())


def test_req_c56_without_any_mirror_a_start_ends_within_its_bound_and_says_so(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, an_agent(yard, fetch_no_progress_s=0.5):
            await yard.hand.plan(an_item_of("r-1", ONE))
            failed = await yard.hand.phase("r-1", "failed")
            assert failed.code == "fetch_failed"
            assert "no mirror was heard of" in failed.reason

    run(story())


def test_scn_c7_a_node_whose_disk_is_too_small_says_so_with_numbers(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard, files_budget_bytes=2 * MIB):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    failed = await hand.phase("r-1", "failed")
                assert failed.code == "disk_full"
                assert "need 3 MiB more, and this node keeps at most 2 MiB" in failed.reason
                assert mirror.files_asked() == []

    run(story())


def test_what_a_running_replica_needs_is_not_evicted_for_another(tmp_path):
    other_body = some_bytes(3_000_000, 5)
    other = a_manifest("other", other_body)

    async def story():
        with serving_mirror() as mirror:
            mirror.add(ONE, BODY)
            mirror.add(other, other_body)
            async with memory_yard(tmp_path) as yard, an_agent(yard, files_budget_bytes=5 * MIB):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    first = await started(hand, "r-1")
                    await hand.plan(an_item_of("r-1", ONE), an_item_of("r-2", other))
                    assert (await hand.phase("r-2", "failed")).code == "disk_full"
                    assert first.read_bytes() == BODY
                    await hand.plan(an_item_of("r-1", ONE, stop=a_stop()))
                    await hand.phase("r-1", "stopped")
                    await hand.plan(an_item_of("r-3", other))
                    assert (await started(hand, "r-3")).read_bytes() == other_body
                    assert not first.exists()

    run(story())


def test_progress_of_a_fetch_is_told_by_its_node_and_replica(tmp_path):
    heard: list[tuple[str, str, FileProgress]] = []

    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                listening = await hand.wire.on_progress(
                    "fetch", FileProgress, lambda node, name, body: heard.append((node, name, body))
                )
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    await started(hand, "r-1")
                await listening.close()

    run(story())
    assert heard
    for node, name, body in heard:
        assert (node, name, body.replica, body.model) == ("n1", "r-1", "r-1", "m")
        assert (body.key, body.total_bytes) == (ONE.key, len(BODY))


def test_sigterm_leaves_what_came_and_the_next_agent_goes_on_with_the_same_replica(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    async with an_agent(yard) as first:
                        await hand.plan(an_item_of("r-1", ONE))
                        await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                        began = time.monotonic()
                        await first.leave()
                        assert time.monotonic() - began < 2.0
                    kept = partial(tmp_path).stat().st_size
                    assert 0 < kept < len(BODY)
                    mirror.pause_s = 0
                    async with an_agent(yard):
                        assert (await started(hand, "r-1")).read_bytes() == BODY
                    assert mirror.files_asked()[-1] == (ONE.key, f"bytes={kept}-")
                assert hand.types("r-1").count("replica.starting") == 1
                assert "replica.failed" not in hand.types("r-1")
                assert hand.types().count("card.leased") == 1

    run(story())


def test_sigint_withdraws_what_fetches(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror), an_agent(yard) as first:
                    await hand.plan(an_item_of("r-1", ONE))
                    await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                    await first.leave(stop_engines=True)
                await hand.phase("r-1", "withdrawn")
                await hand.expect(lambda: hand.card().leases == (), "the lease to end")
                assert partial(tmp_path).exists()

    run(story())


def test_a_stop_that_came_while_no_agent_lived_ends_the_fetch(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    async with an_agent(yard) as first:
                        await hand.plan(an_item_of("r-1", ONE))
                        await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                        await first.die()
                    await hand.plan(an_item_of("r-1", ONE, stop=a_stop()))
                    async with an_agent(yard):
                        await hand.phase("r-1", "withdrawn")
                        await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_inv_7_without_its_journal_it_goes_on_with_the_fetch_the_log_tells_of(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    async with an_agent(yard) as first:
                        await hand.plan(an_item_of("r-1", ONE))
                        await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                        await hand.phase("r-1", "fetching")
                        await first.die()
                    yard.lose_journal()
                    mirror.pause_s = 0
                    async with an_agent(yard):
                        assert (await started(hand, "r-1")).read_bytes() == BODY
                        assert [lease.holder for lease in hand.card().leases] == ["r-1"]
                assert "replica.failed" not in hand.types("r-1")

    run(story())


def test_one_told_to_end_whose_agent_died_before_it_said_so_is_withdrawn_by_the_next(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.05) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    item = an_item_of("r-1", ONE)
                    async with an_agent(yard) as first:
                        await hand.plan(item)
                        await until(lambda: mirror.sent_bytes > 500_000, "some bytes")
                        await hand.phase("r-1", "fetching")
                        await first.die()
                    journal, memory = await Journal.open(tmp_path / "nodeagent" / "journal.sqlite")
                    journal.write(PutHeld(held=replace(memory.held["r-1"], ending=True)))
                    await journal.close()
                    await hand.plan(replace(item, stop=a_stop()))
                    async with an_agent(yard):
                        await hand.phase("r-1", "withdrawn")
                        await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_an_engine_whose_start_neither_journal_nor_log_remembers_is_ended(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.02) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    async with an_agent(yard) as first:
                        await hand.plan(an_item_of("r-1", ONE))
                        await until(lambda: mirror.sent_bytes > 200_000, "some bytes")
                        await hand.phase("r-1", "fetching")
                        # The log hears nothing of the start any more.
                        yard.cut()
                        launch = tmp_path / "nodeagent" / "replicas" / "r-1" / "running.json"
                        await until(launch.exists, "its process")
                        pid = json.loads(launch.read_bytes())["pid"]
                        await first.die()
                    assert alive(pid)
                    yard.lose_journal()
                    async with an_agent(yard):
                        assert (await hand.phase("r-1", "failed")).code == "lost"
                        await until(lambda: not alive(pid), "its end")
                        await hand.expect(lambda: hand.card().leases == (), "the lease to end")

    run(story())


def test_log_18_a_fetch_goes_on_while_the_log_is_away(tmp_path):
    async def story():
        with serving_mirror(pause_s=0.02) as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard, an_agent(yard):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    await hand.plan(an_item_of("r-1", ONE))
                    await until(lambda: mirror.sent_bytes > 200_000, "some bytes")
                    await hand.phase("r-1", "fetching")
                    yard.cut()
                    blob = folder(tmp_path) / "blobs" / ONE.files[0].sha256
                    await until(blob.exists, "the whole file")
                    yard.mend()
                    assert (await started(hand, "r-1")).read_bytes() == BODY

    run(story())


def test_an_adopted_engine_that_loads_is_asked_though_its_source_is_a_mirrors(tmp_path):
    async def story():
        with serving_mirror() as mirror:
            mirror.add(ONE, BODY)
            async with memory_yard(tmp_path) as yard:
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    async with an_agent(yard) as first:
                        item = an_item_of("r-1", ONE)
                        command = (*item.launch.command, "--load-s", "1.5")
                        await hand.plan(replace(item, launch=replace(item.launch, command=command)))
                        await hand.phase("r-1", "starting")
                        launch = tmp_path / "nodeagent" / "replicas" / "r-1"
                        await until((launch / "running.json").exists, "its process")
                        await first.die()
                    async with an_agent(yard):
                        path = await started(hand, "r-1")
                        assert path.read_bytes() == BODY
                        assert alive(hand.replica("r-1").pid)
                assert hand.types("r-1").count("replica.fetching") == 1

    run(story())


def test_other_replicas_start_and_stop_while_one_fetches(tmp_path):
    async def story():
        with serving_mirror(stall_at=[1000] * 50) as mirror:
            mirror.add(ONE, BODY)
            node = a_node()
            async with memory_yard(tmp_path) as yard, an_agent(yard, node=node):
                hand = yard.hand
                async with announced(hand.wire, mirror):
                    slow = an_item_of("r-1", ONE, memory_bytes=GIB)
                    await hand.plan(slow)
                    await until(lambda: mirror.sent_bytes > 0, "the first bytes")
                    await hand.plan(slow, an_item("r-2"))
                    await hand.phase("r-2", "ready")
                    await hand.plan(slow, an_item("r-2", stop=a_stop()))
                    await hand.phase("r-2", "stopped")
                    assert hand.replica("r-1").phase == "fetching"
                    await hand.expect(
                        lambda: [lease.holder for lease in hand.card().leases] == ["r-1"],
                        "the lease of r-2 to end",
                    )

    run(story())
