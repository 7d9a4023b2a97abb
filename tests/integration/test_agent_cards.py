"""One agent and its cards, asked over its socket: leases, lines, claims and VMs beside real engines, with the log there and
away."""

import asyncio
from datetime import timedelta

import msgspec
import msgspec.structs

from schemas import codes
from schemas.card import CardLeased, CardReleased
from schemas.cardasks import CardAnswer, CardRequest, ClaimEnd, LeaseRelease, VmAttach, VmDetach
from schemas.settings import GIB
from tests.support.agent_cards import (
    a_claim_ask,
    a_holder,
    a_lease_ask,
    a_socket,
    agent,
    ask,
    gpu_item,
    lease_on,
    on,
)
from tests.support.agent_yard import a_launch, a_stop, alive, an_item, beside, memory_yard
from tests.support.aio import run


def test_req_d15_a_lease_over_two_cards_is_one_change_in_the_log_with_its_cause(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            wanted = a_lease_ask(0, "gpu0", "gpu1", memory_bytes=GIB, pinned=True)
            answer = await ask(tmp_path, wanted)
            assert answer.status == "granted"
            await hand.expect(lambda: lease_on(hand, "gpu1"), "the lease in the log")
            told = [x for x in hand.seen if isinstance(x.event, CardLeased)]
            assert [x.key[1] for x in told] == ["gpu0", "gpu1"]
            assert told[1].seq == told[0].seq + 1
            assert {x.causationid for x in told} == {wanted.id}
            assert answer.fences == {x.key[1]: x.event.fence for x in told}
            lease = lease_on(hand)
            assert lease is not None
            assert (lease.name, lease.pinned, bool(lease.by)) == ("train0", True, True)
            # By request and answer it is the same agent, and the same ledger.
            request = CardRequest(ask=LeaseRelease(what="train0"))
            done = await hand.wire.request("cards", "n1", request, CardAnswer, timeout_s=5.0)
            assert done.status == "done"
            await hand.expect(lambda: not lease_on(hand) and not lease_on(hand, "gpu1"), "its end")
            ends = [x for x in hand.seen if isinstance(x.event, CardReleased)]
            assert [(x.key[1], x.event.why) for x in ends] == [
                ("gpu0", "released"),
                ("gpu1", "released"),
            ]
            assert ends[1].seq == ends[0].seq + 1

    run(story())


def test_inv_6_it_grants_with_the_log_away_and_reports_later_in_order_with_its_own_times(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            await hand.expect(lambda: hand.card("gpu1"), "the cards")
            yard.cut()
            first = await ask(tmp_path, a_lease_ask(0, "gpu0", "gpu1"))
            assert first.status == "granted"
            assert (await ask(tmp_path, a_claim_ask("cpu"))).status == "granted"
            async with a_socket(tmp_path) as socket:
                waiting = await socket.ask(a_lease_ask(1, wait_s=20.0, priority="batch"))
                assert waiting.status == "waiting"
                assert (await ask(tmp_path, LeaseRelease(what="train0"))).status == "done"
                assert (await socket.last()).status == "granted"
            before = len(hand.seen)
            yard.mend()
            await hand.expect(
                lambda: (x := lease_on(hand)) is not None and x.name == "train1", "all of it"
            )
            told = [
                (x.type, x.key[1])
                for x in hand.seen[before:]
                if x.noun == "card" and x.type != "card.measured"
            ]
            assert told == [
                ("card.leased", "gpu0"),
                ("card.leased", "gpu1"),
                ("card.claimed", "cpu"),
                ("card.queued", "gpu0"),
                ("card.queued", "gpu0"),
                ("card.released", "gpu0"),
                ("card.released", "gpu1"),
                ("card.leased", "gpu0"),
            ]
            times = [x.time for x in hand.seen[before:] if x.noun == "card"]
            assert times == sorted(times)
            assert times[0] < times[-1]

    run(story())


def test_req_d5_a_game_ends_what_runs_on_its_card_at_once_and_keeps_it(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            item = gpu_item("r-1")
            await hand.plan(item)
            ready = await hand.phase("r-1", "ready")
            answer = await ask(tmp_path, a_claim_ask())
            assert answer.status == "granted"
            stopped = await hand.phase("r-1", "stopped", 5.0)
            assert stopped.stop_decision == "c-aaaaaaaaaa"
            assert not alive(ready.pid)
            draining = next(x for x in hand.seen if x.type == "replica.draining")
            assert draining.reason == "makes way for claim c-aaaaaaaaaa"
            # Whoever starts there now is refused, with who keeps the card.
            await hand.plan(gpu_item("r-2"), gpu_item("r-3", card="gpu1"))
            refused = await hand.phase("r-2", "refused")
            assert refused.reason == "gpu0: kept by claim doom"
            assert refused.card_revs == {"gpu0": on(hand).rev}
            await hand.phase("r-3", "ready")
            assert (await ask(tmp_path, ClaimEnd(what="doom"))).status == "done"
            await hand.plan(gpu_item("r-4"), gpu_item("r-3", card="gpu1"))
            await hand.phase("r-4", "ready")

    run(story())


def test_an_app_lets_requests_finish_and_a_claim_that_ends_first_calls_the_drain_off(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard, agent(yard, app_drain_s=30.0):
            hand = yard.hand
            async with beside(hand.beacons(inflight={"r-1": 1})):
                await hand.plan(gpu_item("r-1"))
                await hand.phase("r-1", "ready")
                await ask(tmp_path, a_claim_ask(kind="app"))
                await hand.phase("r-1", "draining")
                # A plan that says nothing of a stop does not call it off.
                await hand.plan(gpu_item("r-1"), an_item("r-2"))
                await hand.phase("r-2", "ready")
                assert hand.replica("r-1").phase == "draining"
                await ask(tmp_path, ClaimEnd(what="doom"))
                back = await hand.phase("r-1", "ready")
                assert back.taken_back == "c-aaaaaaaaaa"

    run(story())


def test_a_lease_has_an_engine_leave_within_its_bound_and_is_granted_when_that_is_gone(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard, agent(yard):
            hand = yard.hand
            async with beside(hand.beacons(inflight={"r-1": 1})):
                await hand.plan(gpu_item("r-1", gib=3))
                ready = await hand.phase("r-1", "ready")
                async with a_socket(tmp_path) as socket:
                    waiting = await socket.ask(
                        a_lease_ask(0, wait_s=20.0, priority="foreground", ttl_s=0.6)
                    )
                    assert (waiting.status, waiting.waiting_for) == ("waiting", ("r-1",))
                    assert (await socket.last()).status == "granted"
                assert not alive(ready.pid)
                stopped = await hand.phase("r-1", "stopped")
                assert stopped.reason == "bound, 1 requests were running"
                assert stopped.stop_decision == "l-aaaaaaaaaa"
                types = [x.type for x in hand.seen if x.noun == "card" and x.key[1] == "gpu0"]
                assert types.index("card.draining") < types.index("card.released")
                # And it ends by its time.
                await hand.expect(lambda: on(hand).leases == (), "the end of the lease")
                last = [x.event for x in hand.seen if isinstance(x.event, CardReleased)][-1]
                assert last.why == "expired"

    run(story())


def test_a_start_waits_for_the_lease_its_plan_evicts_whose_process_is_told_to_go(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            await hand.expect(lambda: hand.card("gpu0"), "the card")
            with a_holder(tmp_path) as program:
                await hand.expect(lambda: lease_on(hand), "the lease")
                lease = lease_on(hand)
                assert lease is not None
                assert lease.process is not None
                assert lease.process.pid == program.pid
                await hand.plan(gpu_item("r-1", evict=("l-aaaaaaaaaa",)))
                waiting = await hand.phase("r-1", "waiting")
                assert waiting.waiting_for == ("l-aaaaaaaaaa",)
                event = next(x.event for x in hand.seen if x.type == "replica.waiting")
                assert (event.waiting_for, event.place) == ("train (l-aaaaaaaaaa)", 1)
                await hand.phase("r-1", "ready")
                assert await asyncio.to_thread(program.wait) == -15
            released = next(x.event for x in hand.seen if isinstance(x.event, CardReleased))
            assert released.why == "process ended"
            assert [x.holder for x in on(hand).leases] == ["r-1"]

    run(story())


def test_a_waiting_start_that_is_wanted_no_more_leaves_the_line(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard, lease_grace_s=60.0):
            hand = yard.hand
            await hand.expect(lambda: hand.card("gpu0"), "the card")
            with a_holder(tmp_path, "stubborn") as program:
                await hand.expect(lambda: lease_on(hand), "the lease")
                item = gpu_item("r-1", evict=("l-aaaaaaaaaa",))
                await hand.plan(item)
                await hand.phase("r-1", "waiting")
                await hand.plan(msgspec.structs.replace(item, stop=a_stop()))
                await hand.phase("r-1", "withdrawn")
                await hand.expect(lambda: on(hand).waiters == (), "the line to be empty")
                # What was asked to leave is not asked back: a signal cannot be.
                assert on(hand).leases[0].leaving == "r-1"
                assert program.poll() is None

    run(story())


def test_req_d19_two_that_come_at_the_same_time_do_not_get_the_same_card(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            await hand.expect(lambda: hand.card("gpu0"), "the card")
            whole = a_launch(exclusive=True)
            both = await asyncio.gather(
                ask(tmp_path, a_lease_ask(0)),
                ask(tmp_path, a_lease_ask(1)),
                hand.plan(gpu_item("r-1", launch=whole), gpu_item("r-2", launch=whole)),
            )
            await hand.expect(
                lambda: hand.replica("r-1") and hand.replica("r-2"), "an answer to both items"
            )
            answers = [x.status for x in both[:2]]
            phases = [hand.replica(x).phase for x in ("r-1", "r-2")]
            got = answers.count("granted") + sum(x != "refused" for x in phases)
            assert got == 1
            for name, phase in zip(("r-1", "r-2"), phases, strict=True):
                if phase == "refused":
                    assert hand.replica(name).card_revs

    run(story())


def test_a_vm_gets_a_card_when_its_engines_have_left_and_nothing_starts_there_meanwhile(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            await hand.plan(gpu_item("r-1"))
            ready = await hand.phase("r-1", "ready")
            async with a_socket(tmp_path) as socket:
                answer = await socket.ask(VmAttach(name="win", card="gpu0", wait_s=20.0))
                assert (answer.status, answer.waiting_for) == ("waiting", ("r-1",))
                assert (await socket.last()).status == "granted"
            assert not alive(ready.pid)
            await hand.expect(lambda: on(hand).vm and on(hand).vm.attached, "the VM on its card")
            assert on(hand).leases == ()
            await hand.plan(gpu_item("r-2"))
            assert (await hand.phase("r-2", "refused")).reason == "gpu0: kept by vm win"
            refused = await ask(tmp_path, a_claim_ask())
            assert (refused.code, refused.sentence) == (codes.CARD_KEPT, "gpu0: kept by vm win")
            assert (await ask(tmp_path, VmDetach(card="gpu0"))).status == "done"
            await hand.expect(lambda: on(hand).vm is None, "the card without it")

    run(story())


def test_req_x6_a_wait_that_ends_without_a_card_says_so(tmp_path):
    async def story():
        async with memory_yard(tmp_path) as yard, agent(yard):
            hand = yard.hand
            await ask(tmp_path, a_lease_ask(0, pinned=True))
            async with a_socket(tmp_path) as socket:
                assert (await socket.ask(a_lease_ask(1, wait_s=0.3))).status == "waiting"
                last = await socket.last()
                assert (last.status, last.code) == ("refused", codes.TIMED_OUT)
            async with a_socket(tmp_path) as socket:
                assert (await socket.ask(a_lease_ask(2, wait_s=60.0))).status == "waiting"
            # It hung up.
            await hand.expect(
                lambda: (
                    [x.event.why for x in hand.seen if x.type == "card.dequeued"]
                    == ["expired", "withdrawn"]
                ),
                "both out of line",
            )
            assert on(hand).waiters == ()
            assert hand.seen[-1].time - hand.seen[0].time < timedelta(seconds=30)

    run(story())


def test_an_idle_stop_under_way_is_hurried_by_a_game_and_not_taken_back(tmp_path):
    async def story():
        async with memory_yard(tmp_path, gateway=False) as yard, agent(yard):
            hand = yard.hand
            async with beside(hand.beacons(inflight={"r-1": 1})):
                await hand.plan(gpu_item("r-1"))
                await hand.phase("r-1", "ready")
                stop = a_stop(take_back=True, drain_timeout_s=60.0)
                await hand.plan(gpu_item("r-1", stop=stop))
                await hand.phase("r-1", "draining")
                await ask(tmp_path, a_claim_ask())
                stopped = await hand.phase("r-1", "stopped", 5.0)
                assert stopped.stop_decision == "c-aaaaaaaaaa"

    run(story())
