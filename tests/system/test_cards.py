"""Two cards and real llama.cpp engines: which card a plain request gets, and what people's claims and leases do."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.ctl.cardasking import new_id
from controlplane.ctl.supervisor import python_argv
from schemas.card import CardLeased, CardReleased, ClaimKind
from schemas.cardasks import ClaimStart
from schemas.cardstate import is_free
from tests.support.aio import run, until
from tests.system.cards import (
    CARDS,
    agent_again,
    answered_on,
    ask,
    asked,
    assert_nothing_double,
    card_is,
    card_now,
    fake_vllm,
    last_replica,
    names,
    on_scripted,
    sleeper,
    smol,
    starts_of,
    two_cards,
)
from tests.system.yard import SystemYard, chat, client, system_yard

BY_SIGNAL: dict[str, Any] = {
    "way": "command",
    "park": ["kill", "-STOP", "{pid}"],
    "resume": ["kill", "-CONT", "{pid}"],
}
"""A way to park that any process bears: it stands still and keeps its memory, which on these cards is RAM."""


# D13: which card ----------------------------------------------------------------------------------


async def claimed(yard: SystemYard, card: str) -> None:
    before = yard.position
    await yard.ctl("claim", "start", f"local/{card}", "--as", "game")
    await card_is(yard, card, lambda c: bool(c.claims), "the game's", after=before)


async def leased(yard: SystemYard, card: str) -> None:
    before = yard.position
    await yard.ctl("lease", "acquire", f"local/{card}", "--as", "job")
    await card_is(yard, card, lambda c: names(c) == {"job"}, "the job's", after=before)


async def started_on(yard: SystemYard, http: httpx.AsyncClient) -> str:
    """Asks for the cold model `first`; the card it was started on, at once and without a detour."""
    before = yard.position
    card = await answered_on(yard, http, "first")
    (start,) = [e for e in starts_of(yard, "first") if e.seq > before]
    assert start.state.cards == (card,)
    return card


async def emptied(yard: SystemYard) -> None:
    """The model, the game and the job are gone from both cards."""
    await yard.ctl("model", "unload", "first")
    for card in CARDS:
        if card_now(yard, card).claims:
            await yard.ctl("claim", "end", "game")
        if names(card_now(yard, card)):
            await yard.ctl("lease", "release", "job")
    for card in CARDS:
        await until(lambda card=card: is_free(card_now(yard, card)), f"{card} to be free", 20)


@pytest.mark.timeout(120)
def test_req_d13_a_plain_request_gets_the_card_it_can_reach_most_cheaply(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            system_yard(tmp_path, settings=two_cards()) as yard,
            client(yard.gateway()) as http,
        ):
            await yard.add(smol("first"))
            # a: both are free.
            assert await started_on(yard, http) == "gpu0"
            await emptied(yard)
            # b: a game has gpu0.
            await claimed(yard, "gpu0")
            assert await started_on(yard, http) == "gpu1"
            await emptied(yard)
            # c: somebody's lease has it.
            await leased(yard, "gpu0")
            assert await started_on(yard, http) == "gpu1"
            assert not yard.of("card.draining"), "nobody had to leave so far"
            await emptied(yard)
            # d: a game has gpu0 and a lease gpu1: the lease is drained, nobody queues behind a game.
            await claimed(yard, "gpu0")
            await leased(yard, "gpu1")
            before = yard.position
            assert await started_on(yard, http) == "gpu1"
            left = await yard.event("card.released", after=before)
            assert isinstance(left.event, CardReleased)
            assert left.event.why == "drained"
            assert left.seq < starts_of(yard, "first")[-1].seq
            assert_nothing_double(yard)

    run(story(), 110)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_req_d13_a_model_parked_on_gpu1_comes_back_there_though_the_agent_is_a_new_one(
    engine: str, tmp_path: Path
) -> None:
    async def story() -> None:
        settings = two_cards(vllm=str(fake_vllm(tmp_path)))
        async with system_yard(tmp_path, settings=settings) as yard, client(yard.gateway()) as http:
            if engine == "llamacpp":
                await yard.add(smol("first", profile={"parking": BY_SIGNAL}))
            else:
                await yard.add(sleeper("first"))
            await claimed(yard, "gpu0")
            assert await answered_on(yard, http, "first") == "gpu1"
            replica = last_replica(yard, "first").key[1]
            await yard.ctl("claim", "end", "game")
            await card_is(yard, "gpu0", lambda c: not c.claims, "free again")
            await yard.ctl("replica", "park", replica)
            parked = await yard.event("replica.parked")
            assert parked.state.pid is not None
            ram = [n for n in card_now(yard, "cpu").leases if n.holder == replica]
            assert [n.kind for n in ram] == ["parked"], "its RAM is leased"
            assert ram[0].memory_bytes > 0

            started = await agent_again(yard, signal.SIGKILL)
            assert replica in started.event.adopted
            os.kill(parked.state.pid, 0)  # it lives

            assert await answered_on(yard, http, "first") == "gpu1"
            again = await yard.event("replica.ready", after=parked.seq)
            assert (again.key[1], again.state.pid) == (replica, parked.state.pid), "not a new start"
            assert again.state.resume_s is not None
            resumed = await yard.event("replica.starting", after=parked.seq)
            assert resumed.event.resumed
            await card_is(
                yard,
                "cpu",
                lambda c: all(n.holder != replica for n in c.leases),
                "without the parked copy's RAM",
                after=parked.seq,
            )
            assert_nothing_double(yard)

    run(story(), 110)


@pytest.mark.timeout(120)
def test_req_d19_two_requests_at_once_take_different_free_cards(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            system_yard(tmp_path, settings=two_cards()) as yard,
            client(yard.gateway()) as http,
        ):
            await yard.add(smol("first"), smol("second"))
            answers = await asyncio.gather(ask(http, "first"), ask(http, "second"))
            assert [a.status_code for a in answers] == [200, 200], [a.text for a in answers]
            cards = [
                card
                for name in ("first", "second")
                for card in last_replica(yard, name).state.cards
            ]
            assert sorted(cards) == ["gpu0", "gpu1"]
            assert not yard.of("card.draining"), "a free card is not passed over for a drain"
            assert not yard.of("replica.draining")
            assert_nothing_double(yard)

    run(story(), 110)


# Claims -------------------------------------------------------------------------------------------


async def stream_while_claimed(yard: SystemYard, kind: ClaimKind, tokens: int) -> str:
    """Streams from `first` on gpu0, claims that card after the first token; all that came."""
    body = chat("first", stream=True, max_tokens=tokens, ignore_eos=True)
    async with (
        client(yard.gateway()) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        assert stream.status_code == 200
        lines = stream.aiter_lines()
        text = [await anext(lines)]
        # Over the socket, as yardctl does it, but without the start of a program meanwhile.
        claim = ClaimStart(id=new_id("c"), name="desk", card="gpu0", kind=kind)
        assert (await asked(yard, claim)).status == "granted"
        text += [line async for line in lines]
    return "\n".join(text)


@pytest.mark.timeout(120)
def test_req_d5_a_claim_lets_a_stream_finish_or_ends_it_as_its_kind_says(tmp_path: Path) -> None:
    async def story() -> None:
        settings = two_cards(app_drain="90s")
        async with system_yard(tmp_path, settings=settings) as yard, client(yard.gateway()) as http:
            await yard.add(smol("first"))
            kinds: tuple[tuple[ClaimKind, int], ...] = (("app", 100), ("game", 1900))
            for kind, tokens in kinds:
                assert await answered_on(yard, http, "first") == "gpu0"
                before = yard.position
                text = await stream_while_claimed(yard, kind, tokens)
                done = text.rstrip().endswith("data: [DONE]")
                done = done and '"finish_reason":"length"' in text
                assert done == (kind == "app"), text[-600:]
                assert ('"error"' in text) == (kind == "game"), text[-600:]
                claim = await yard.event("card.claimed", after=before)
                ended = await yard.event("replica.stopped", after=claim.seq)
                assert ended.state.cards == ("gpu0",)
                await card_is(
                    yard,
                    "gpu0",
                    lambda c: bool(c.claims) and not c.leases,
                    "the claim's alone",
                    after=claim.seq,
                )
                assert await answered_on(yard, http, "first") == "gpu1"
                await yard.ctl("claim", "end", "desk")
                await yard.ctl("model", "unload", "first")
                for card in CARDS:
                    await until(
                        lambda card=card: is_free(card_now(yard, card)), f"{card} to be free", 20
                    )
            assert_nothing_double(yard)

    run(story(), 110)


# One base URL per card ----------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_req_d2_a_cards_own_url_never_leaves_that_card(tmp_path: Path) -> None:
    async def story() -> None:
        settings = two_cards()
        settings["gateway"] = {"wait": "5s"}
        async with system_yard(tmp_path, settings=settings) as yard, client(yard.gateway()) as http:
            scaling = {"min": 0, "max": 2, "idle_timeout": "15m"}
            await yard.add(
                on_scripted("first", scaling=scaling),
                on_scripted("second", scaling={"min": 0, "max": 1, "idle_timeout": "15m"}),
            )
            on_gpu1 = "/cards/local/gpu1"
            assert (await ask(http, "second", on_gpu1)).status_code == 200
            assert last_replica(yard, "second").state.cards == ("gpu1",), "though gpu0 is free"
            # Named again on the other card: above `max` nothing runs, so it moves.
            assert (await ask(http, "second", "/cards/local/gpu0")).status_code == 200
            assert last_replica(yard, "second").state.cards == ("gpu0",)
            await yard.ctl("model", "unload", "second")
            await card_is(yard, "gpu0", lambda c: not c.leases, "empty")

            # A kept card makes its own URL wait and say so; the plain one is answered elsewhere.
            await yard.ctl("claim", "start", "local/gpu1", "--as", "game")
            told, plain = await asyncio.gather(ask(http, "first", on_gpu1), ask(http, "first"))
            assert plain.status_code == 200, plain.text
            assert (told.status_code, told.json()["error"]["code"]) == (503, "card_kept"), told.text
            assert "game" in told.json()["error"]["message"]
            assert int(told.headers["retry-after"]) >= 1
            assert {e.state.cards for e in starts_of(yard, "first")} == {("gpu0",)}
            unknown = await ask(http, "first", "/cards/local/gpu7")
            assert unknown.status_code == 404, unknown.text
            assert_nothing_double(yard)

    run(story(), 110)


# A command under a lease --------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_command_has_its_card_as_long_as_it_runs_and_its_exit_code_is_passed_on(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=two_cards()) as yard:
            began = tmp_path / "began"
            begin = (
                "import os, pathlib, signal\n"
                f"path = pathlib.Path({str(began)!r})\n"
                "path.with_suffix('.new').write_text(str(os.getpid()))\n"
                "path.with_suffix('.new').rename(path)\n"
            )
            options = ("--card", "local/gpu0", "--as", "train", "--pinned", "--")
            command = (sys.executable, "-c", f"{begin}raise SystemExit(7)")
            await yard.ctl("run", *options, *command, expect=7)
            assert began.exists()
            got = await yard.event("card.leased")
            assert isinstance(got.event, CardLeased)
            (lease,) = got.state.leases
            assert (lease.name, lease.exclusive, lease.pinned) == ("train", True, True)
            released = await yard.event("card.released", after=got.seq)
            assert released.state.leases == ()

            began.unlink()
            asker = await asyncio.create_subprocess_exec(
                *python_argv("controlplane.ctl", "run", *options),
                *(sys.executable, "-c", f"{begin}signal.pause()"),
                env={**os.environ, "YARD_DATA": str(yard.data)},
            )
            await until(began.exists, "the command to run", 20)
            assert int(began.read_text()) == asker.pid, "signals for one are signals for the other"
            await card_is(yard, "gpu0", lambda c: names(c) == {"train"}, "the command's")
            asker.kill()
            await asker.wait()
            released = await yard.event("card.released", after=released.seq)
            assert released.state.leases == ()
            assert isinstance(released.event, CardReleased)
            assert released.event.why == "process ended"
            assert_nothing_double(yard)

    run(story(), 110)


# Without NATS -------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_req_d6_leases_and_claims_are_given_without_nats_and_told_later_in_order(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with system_yard(tmp_path, settings=two_cards()) as yard:
            before = yard.position
            nats = yard.kill("nats", signal.SIGSTOP)
            try:
                await yard.ctl("lease", "acquire", "local/gpu0", "--as", "job")
                await yard.ctl("claim", "start", "local/gpu1", "--as", "game")
                refused = await yard.told("vm", "attach", "local/gpu1", "--as", "vm", expect=2)
                assert "game" in "".join(refused), refused
                await yard.ctl("lease", "release", "job")
                away_until = yard.events[-1].stored_at
                assert yard.position == before, "NATS was away"
            finally:
                os.kill(nats, signal.SIGCONT)
            await yard.event("card.released", after=before)
            await yard.event("card.claimed", after=before)
            told = [
                e
                for e in yard.events
                if e.seq > before and e.type in ("card.leased", "card.claimed", "card.released")
            ]
            assert [(e.type, e.key[1]) for e in told] == [
                ("card.leased", "gpu0"),
                ("card.claimed", "gpu1"),
                ("card.released", "gpu0"),
            ]
            assert [e.time for e in told] == sorted(e.time for e in told)
            assert all(e.time >= away_until for e in told)
            assert (told[0].stored_at - told[0].time).total_seconds() > 0.2, "told afterwards"
            assert (told[-1].time - told[0].time).total_seconds() > 0.2, "each with its own time"
            assert_nothing_double(yard)

    run(story(), 110)
