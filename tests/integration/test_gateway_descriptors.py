"""A gateway that has no descriptor left says so itself: its engines are not to blame, and none is left out for it."""

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from gateway.probe import Prober
from tests.support.aio import run
from tests.support.gateway_yard import chat, memory_yard

PATH = "/v1/chat/completions"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No connection can be made meanwhile for want of one; those that stand stay."""
    none_left = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with patch.object(asyncio.get_running_loop(), "create_connection", side_effect=none_left):
        yield


def test_a_request_that_finds_no_descriptor_is_turned_away_and_its_engine_stays(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine(), "r-1")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                assert (await client.get("/healthz")).status_code == 200
                with no_descriptors():
                    refused = await client.post(PATH, json=chat())
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "queue_full"
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["x-should-retry"] == "true", "said once"
                assert not gateway.gateway.ejected
                assert gateway.gateway.usage.by_replica == {}
                assert (await client.post(PATH, json=chat())).status_code == 200

    run(story())


def test_a_probe_that_finds_no_descriptor_fails_and_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            await yard.replica(await yard.engine(), "r-1")
            gateway = await yard.gateway()
            core = gateway.gateway
            assert core.table is not None
            replica = core.table.replicas["r-1"]
            async with asyncio.TaskGroup() as group:
                prober = Prober(
                    core, gateway.client, engine_key=lambda _: None, spawn=group.create_task
                )
                with no_descriptors():
                    assert not await prober.passes(replica)
                assert await prober.passes(replica)

    run(story())
