"""Where requests go among several replicas, as their clients see it in the headers of the answers."""

from pathlib import Path

from tests.support.aio import run, until
from tests.support.gateway_yard import chat, memory_yard

CHAT = "/v1/chat/completions"


def test_answers_say_which_replica_it_was_and_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model("größe/m", aliases=("tiny",))
            engines = [await yard.engine(), await yard.engine()]
            for n, engine in enumerate(engines):
                await yard.replica(engine, f"r-{n}", model="größe/m")
            gateway = await yard.gateway(body_memory_bytes=4096)
            async with yard.client(gateway) as client:
                plain = await client.post(CHAT, json=chat("tiny"))
                assert plain.headers["x-yard-why"] == "least-loaded"
                assert plain.headers["x-yard-model"] == "gr%C3%B6%C3%9Fe/m"
                assert plain.headers["x-yard-waited-ms"] == "0"
                homes = set()
                for n in range(12):
                    header = "x-yard-session" if n % 2 else "x-session-id"
                    told = await client.post(CHAT, json=chat("tiny"), headers={header: "s-1"})
                    assert told.headers["x-yard-why"] == "session"
                    homes.add(told.headers["x-yard-replica"])
                assert len(homes) == 1
                # The header is between client and gateway alone.
                assert not any("x-yard-session" in s.headers for e in engines for s in e.seen)
                homes = set()
                long = {"role": "system", "content": "Be brief. " * 100}
                # The last of them is kept on the disk.
                for text in ("one", "two", "three " * 2000):
                    messages = [long, {"role": "user", "content": text}]
                    told = await client.post(CHAT, json=chat("tiny", messages=messages))
                    assert told.headers["x-yard-why"] == "prefix"
                    homes.add(told.headers["x-yard-replica"])
                assert len(homes) == 1

    run(story())


def test_an_engine_that_fails_in_a_row_gets_no_more_until_it_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with memory_yard(tmp_path) as yard:
            await yard.model()
            bad = await yard.engine(status=500)
            good = await yard.engine()
            await yard.replica(bad, "r-bad")
            await yard.replica(good, "r-good")
            gateway = await yard.gateway()
            async with yard.client(gateway) as client:
                for n in range(64):
                    tied = {"x-yard-session": f"s-{n}"}
                    told = await client.post(CHAT, json=chat(), headers=tied)
                    if told.headers["x-yard-replica"] == "r-bad":
                        break
                else:
                    raise AssertionError("no session is tied to that replica")
                while told.headers["x-yard-replica"] == "r-bad":
                    assert told.status_code == 500
                    assert len(bad.seen) <= 5
                    told = await client.post(CHAT, json=chat(), headers=tied)
                assert len(bad.seen) == 5
                assert len(gateway.gateway.ejections) == 1
                for _ in range(10):
                    told = await client.post(CHAT, json=chat(), headers=tied)
                    assert told.status_code == 200
                    assert told.headers["x-yard-why"] == "only"
                assert len(bad.seen) == 5
                # The other one is gone: what answers badly is better than nothing, and may be well again.
                bad.status = 200
                await yard.replica(good, "r-good", "stopped")
                await until(lambda: len(gateway.gateway.ejections) == 0, "it to be back")
                told = await client.post(CHAT, json=chat(), headers=tied)
                assert (told.status_code, told.headers["x-yard-replica"]) == (200, "r-bad")

    run(story())
