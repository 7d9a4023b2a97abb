"""What every log does with accounts of usage, run on the memory twin and on a real nats-server alike."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from events.log import Unavailable, UsageFollower, UsagePage
from schemas.usage import UsageBatch, UsageRow
from tests.support.logstages import Play, Stage, player

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(params=["memory", "jetstream"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Runs a scene on a fresh stage."""
    return player(request.param, tmp_path)


def batch(n: int, gateway: str = "gw.1", requests: int = 1) -> UsageBatch:
    rows = (UsageRow(model="m", key="k", requests=requests),)
    return UsageBatch(gateway=gateway, incarnation="i", n=n, began=AT, ended=AT, rows=rows)


async def until_synced(follower: UsageFollower) -> list[UsagePage]:
    pages = [await follower.next()]
    while not pages[-1].synced:
        pages.append(await follower.next())
    return pages


def numbers(pages: list[UsagePage]) -> list[int]:
    return [i.batch.n for page in pages for i in page.items if i.batch is not None]


def test_what_was_accounted_is_read_in_order_and_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n in (1, 2, 2, 3):
            await stage.log.account(batch(n))
        await stage.log.account(batch(1, "gw-2"))
        follower = stage.other.follow_usage(after=0)
        try:
            pages = await until_synced(follower)
            assert numbers(pages) == [1, 2, 3, 1]
            assert pages[-1].position == 4
            await stage.log.account(batch(4))
            page = await follower.next()
            assert (numbers([page]), page.position, page.synced) == ([4], 5, True)
        finally:
            await follower.close()

    play(scene)


def test_a_lost_acknowledgement_stores_it_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.lose_next_ack()
        await stage.log.account(batch(1))
        follower = stage.other.follow_usage(after=0)
        try:
            assert numbers(await until_synced(follower)) == [1]
        finally:
            await follower.close()

    play(scene)


def test_without_a_connection_it_says_so(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.cut()
        with pytest.raises(Unavailable):
            await stage.log.account(batch(1))

    play(scene)


def test_a_reader_goes_on_behind_its_position_on_the_same_stream_alone(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.log.account(batch(1))
        first = stage.other.follow_usage(after=0)
        page = (await until_synced(first))[-1]
        await first.close()
        await stage.log.account(batch(2))
        again = stage.other.follow_usage(after=page.position, identity=page.identity)
        try:
            pages = await until_synced(again)
            assert (numbers(pages), any(p.reset for p in pages)) == ([2], False)
        finally:
            await again.close()
        unknown = stage.other.follow_usage(after=page.position)
        try:
            pages = await until_synced(unknown)
            assert (numbers(pages), pages[0].reset) == ([1, 2], True)
        finally:
            await unknown.close()

    play(scene)


def test_a_stream_that_was_replaced_is_read_from_its_beginning(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for n in (1, 2):
            await stage.log.account(batch(n))
        first = stage.other.follow_usage(after=0)
        page = (await until_synced(first))[-1]
        await first.close()
        await stage.replace_usage()
        await stage.log.account(batch(3, "gw-3"))
        again = stage.other.follow_usage(after=page.position, identity=page.identity)
        try:
            pages = await until_synced(again)
            assert (numbers(pages), pages[0].reset) == ([3], True)
        finally:
            await again.close()

    play(scene)


def test_what_cannot_be_read_is_told_and_stops_nobody(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.junk_usage("yard.use.gateway.gw", b"not JSON")
        await stage.log.account(batch(1))
        follower = stage.other.follow_usage(after=0)
        try:
            items = [i for page in await until_synced(follower) for i in page.items]
            assert [i.batch is None for i in items] == [True, False]
            assert items[0].problem
        finally:
            await follower.close()

    play(scene)
