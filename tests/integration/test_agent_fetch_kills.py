"""A fetching agent as a process, killed at any byte and told to leave: the file is right, few bytes come twice."""

import logging
import random
import signal
import time

from events.secrets import mirror_token, node_secret_path, read_secret
from schemas.settings import MIB
from tests.support.agent_process import NODE, server_yard
from tests.support.agent_yard import a_stop
from tests.support.aio import run, until
from tests.support.fetch_items import an_item_of, announced, started
from tests.support.scripted_mirror import a_manifest, serving_mirror, some_bytes

BODY = some_bytes(48 * MIB + 17)
BIG = a_manifest("big", BODY)
RESENT_PER_KILL = 8 * MIB


def its_token(data) -> str:
    return mirror_token(read_secret(node_secret_path(data, NODE)), NODE)


def test_scn_c6_kill_9_of_a_fetching_agent_at_any_byte_goes_on_where_it_was(tmp_path):
    seed = 20
    marks = sorted(random.Random(seed).sample(range(2 * MIB, 45 * MIB), 4))
    logging.getLogger(__name__).warning("seed %d: killed at bytes %s", seed, marks)

    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            with serving_mirror(token=its_token(tmp_path), pause_s=0.002) as mirror:
                mirror.add(BIG, BODY)
                partial = tmp_path / "files" / "partial" / BIG.files[0].sha256

                def here() -> int:
                    return partial.stat().st_size if partial.exists() else 0

                async with announced(yard.control, mirror):
                    agent = yard.start_agent()
                    await hand.plan(an_item_of("r-1", BIG))
                    for mark in marks:
                        await until(lambda mark=mark: here() >= mark, f"byte {mark}", 30.0)
                        agent.send(signal.SIGKILL)
                        await agent.ended()
                        left = here()
                        assert left >= mark
                        agent = yard.start_agent()
                    mirror.pause_s = 0
                    path = await started(hand, "r-1", 30.0)
                    assert path.read_bytes() == BODY
                    assert mirror.sent_bytes <= len(BODY) + len(marks) * RESENT_PER_KILL
                    assert hand.types("r-1").count("replica.starting") == 1
                    assert "replica.failed" not in hand.types("r-1")
                    assert hand.types().count("card.leased") == 1
                    await hand.plan(an_item_of("r-1", BIG, stop=a_stop()))
                    await hand.phase("r-1", "stopped", 20.0)

    run(story(), 100.0)


def test_sigterm_ends_a_fetching_agent_at_once_and_the_next_one_goes_on(tmp_path):
    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            with serving_mirror(token=its_token(tmp_path), stall_at=[10 * MIB]) as mirror:
                mirror.add(BIG, BODY)
                async with announced(yard.control, mirror):
                    agent = yard.start_agent()
                    await hand.plan(an_item_of("r-1", BIG))
                    await hand.phase("r-1", "fetching", 20.0)
                    partial = tmp_path / "files" / "partial" / BIG.files[0].sha256
                    await until(
                        lambda: partial.exists() and partial.stat().st_size >= 10 * MIB, "10 MiB"
                    )
                    began = time.monotonic()
                    agent.send(signal.SIGTERM)
                    assert await agent.ended() == 0
                    assert time.monotonic() - began < 3.0
                    yard.start_agent()
                    path = await started(hand, "r-1", 30.0)
                    assert path.read_bytes() == BODY
                    assert mirror.files_asked()[-1] == (BIG.key, f"bytes={10 * MIB}-")
                    assert mirror.sent_bytes == len(BODY)

    run(story(), 60.0)
