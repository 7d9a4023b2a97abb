"""What an agent knows of its cards' leases, lines and engines after a kill, with its journal and without."""

import contextlib
import signal

import pytest

from schemas import codes
from schemas.cardasks import ClaimStart, LeaseRelease
from schemas.settings import GIB, MIB
from tests.support.agent_cards import (
    a_holder,
    a_lease_ask,
    a_program,
    a_socket,
    agent,
    ask,
    gpu_item,
    lease_on,
    on,
)
from tests.support.agent_process import server_yard
from tests.support.agent_yard import an_item, memory_yard
from tests.support.aio import run


def test_inv_6_a_kill_of_the_agent_loses_no_lease_and_no_waiter_and_grants_nothing_twice(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            with a_program() as gone, a_program() as stays:
                async with agent(yard) as first:
                    await hand.plan(an_item("r-1"))
                    await hand.phase("r-1", "ready")
                    kept = a_lease_ask(0, pinned=True)
                    granted = await ask(tmp_path, kept)
                    assert granted.status == "granted"
                    for program, card, id in ((gone, "gpu1", "c-b"), (stays, "cpu", "c-d")):
                        claim = ClaimStart(
                            id=id.ljust(12, "a"), name=id, card=card, process=program.pid
                        )
                        assert (await ask(tmp_path, claim)).status == "granted"
                    async with a_socket(tmp_path) as socket:
                        waits = a_lease_ask(1, wait_s=60.0)
                        assert (await socket.ask(waits)).status == "waiting"
                        await first.die()
                gone.kill()
                gone.wait()
                async with agent(yard):
                    assert await ask(tmp_path, kept) == granted
                    other = await ask(tmp_path, a_lease_ask(2, memory_bytes=MIB))
                    assert (other.status, other.code) == ("refused", codes.CARD_KEPT)
                    await hand.expect(
                        lambda: not on(hand, "gpu1").claims and on(hand, "cpu").claims,
                        "the claim of the dead to end, and no other",
                    )
                    ended = next(x for x in hand.seen if x.type == "card.claim_ended")
                    assert ended.event.why == "process ended"
                    async with a_socket(tmp_path) as socket:
                        assert (await socket.ask(waits)).status == "waiting"
                        await ask(tmp_path, LeaseRelease(what=kept.id))
                        assert (await socket.last()).status == "granted"
                    # The engine on a card that was claimed meanwhile is not there any more.
                    await hand.phase("r-1", "stopped")

    run(story(), 40)


def test_a_start_in_line_goes_on_after_a_kill_of_the_agent(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            with a_program() as program:
                async with agent(yard) as first:
                    await ask(tmp_path, a_lease_ask(0, memory_bytes=3 * GIB))
                    await ask(tmp_path, a_lease_ask(1, "gpu0", memory_bytes=GIB, wait_s=60.0))
                    await hand.expect(lambda: on(hand).leases[1:], "both leases")
                    yard.cut()
                    await first.die()
                    yard.mend()
                assert program.poll() is None
                item = gpu_item("r-1", gib=2, evict=("l-aaaaaaaaaa",))
                await hand.plan(item)
                async with agent(yard) as second:
                    await hand.phase("r-1", "ready")
                    assert hand.types("r-1")[0] == "replica.waiting"
                    await second.die()
                async with agent(yard):
                    await hand.expect(
                        lambda: hand.types(noun="node").count("node.started") == 3, "the third"
                    )
                    assert {x.holder for x in on(hand).leases} == {"r-1", "l-aaaaaaaaab"}

    run(story(), 40)


def test_inv_7_without_its_journal_an_agent_knows_named_leases_from_the_log(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            async with agent(yard) as first:
                assert (await ask(tmp_path, a_lease_ask(0, pinned=True))).status == "granted"
                await hand.expect(lambda: lease_on(hand), "the lease in the log")
                await first.die()
            yard.lose_journal()
            async with agent(yard):
                refused = await ask(tmp_path, a_lease_ask(1))
                assert (refused.status, refused.code) == ("refused", codes.CARD_KEPT)
                assert "lease train0" in refused.sentence

    run(story())


@pytest.mark.parametrize("wanted", [True, False])
def test_inv_7_without_its_journal_an_agent_knows_who_stood_in_line_for_an_engine(tmp_path, wanted):
    async def story():
        async with memory_yard(tmp_path) as yard:
            hand = yard.hand
            item = gpu_item("r-1", evict=("l-aaaaaaaaaa",))
            with contextlib.ExitStack() as programs:
                async with agent(yard, lease_grace_s=60.0) as first:
                    await hand.expect(lambda: hand.card("gpu0"), "the card")
                    programs.enter_context(a_holder(tmp_path, "stubborn"))
                    await hand.expect(lambda: lease_on(hand), "the lease")
                    await hand.plan(item)
                    await hand.phase("r-1", "waiting")
                    await first.die()
                yard.lose_journal()
                await hand.plan(*((item,) if wanted else ()))
                async with agent(yard, lease_grace_s=0.2):
                    await hand.phase("r-1", "ready" if wanted else "withdrawn")
                    await hand.expect(lambda: on(hand).waiters == (), "the line to be empty")

    run(story())


def test_inv_6_kill_9_of_agent_and_server_with_leases_held_loses_and_doubles_nothing(tmp_path):
    """A real server, its role's rights, and batches over two cards on both sides of two kills."""
    static = (
        '[{"id": "gpu0", "memory_bytes": 4294967296}, {"id": "gpu1", "memory_bytes": 4294967296}]'
    )

    async def story():
        async with server_yard(tmp_path) as yard:
            hand = yard.hand
            first = yard.start_agent(YARD_NODEAGENT_CARDS=static, YARD_NODEAGENT_GPUS="false")
            both = a_lease_ask(0, "gpu0", "gpu1", pinned=True)
            granted = await ask(tmp_path, both)
            assert granted.status == "granted"
            await hand.expect(lambda: lease_on(hand, "gpu1"), "the lease in the log", 20.0)
            await yard.kill_server()
            assert (await ask(tmp_path, LeaseRelease(what=both.id))).status == "done"
            again = a_lease_ask(1, "gpu0", "gpu1", pinned=True, wait_s=20.0)
            async with a_socket(tmp_path) as socket:
                answer = await socket.ask(again)
                if answer.status == "waiting":
                    answer = await socket.last()
                assert answer.status == "granted"
            first.send(signal.SIGKILL)
            await first.ended()
            yard.start_agent(YARD_NODEAGENT_CARDS=static, YARD_NODEAGENT_GPUS="false")
            assert await ask(tmp_path, again) == answer
            refused = await ask(tmp_path, a_lease_ask(2))
            assert (refused.status, refused.code) == ("refused", codes.CARD_KEPT)
            await yard.serve()
            await hand.expect(
                lambda: (x := lease_on(hand, "gpu1")) is not None and x.name == "train1",
                "the second lease in the log",
                30.0,
            )
            told = [(x.type, x.key[1]) for x in hand.seen if x.type in TOLD]
            assert told == [(tag, card) for tag in TOLD_ORDER for card in ("gpu0", "gpu1")]
            seqs = [x.seq for x in hand.seen if x.type in TOLD]
            assert [b - a for a, b in zip(seqs[::2], seqs[1::2], strict=True)] == [1, 1, 1]

    run(story(), 58.0)


TOLD = {"card.leased", "card.released"}
TOLD_ORDER = ("card.leased", "card.released", "card.leased")
