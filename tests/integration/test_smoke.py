"""A smoke test tells the replica's reply and speed, or in one sentence why there is none."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from controlplane.domain.reports import SmokeAnswered, StepFailed
from controlplane.domain.work import Smoke
from controlplane.smoke import smoke
from tests.support.aio import run

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def completion(**over: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": " Hello there! \n"}}],
        "usage": {"completion_tokens": 30, "prompt_tokens": 9},
        **over,
    }


def http(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def ask(
    answer: bytes | None, *, key: str | None = "ek", timeout_s: float = 20.0
) -> tuple[SmokeAnswered | StepFailed, bytes]:
    """What a replica that answers `answer` (None: never) leads to, and what it was sent."""
    seen = bytearray()

    async def story() -> SmokeAnswered | StepFailed:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            seen.extend(head + await reader.readexactly(length))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            task = Smoke(
                job="j-1",
                attempt=1,
                index=6,
                model="smol",
                node="local",
                replica="r-1",
                endpoint=f"http://127.0.0.1:{port}/",
                has_key=True,
            )
            return await smoke(task, key, timeout_s=timeout_s)

    return run(story()), bytes(seen)


def test_req_c58_the_replica_is_asked_itself_with_its_engines_key() -> None:
    report, sent = ask(http(200, msgspec.json.encode(completion())))
    assert isinstance(report, SmokeAnswered)
    assert sent.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"authorization: bearer ek\r\n" in sent.lower()


def test_req_c59_one_short_fixed_request() -> None:
    _, sent = ask(http(200, msgspec.json.encode(completion())), key=None)
    assert b"authorization" not in sent.lower()
    assert msgspec.json.decode(sent.split(b"\r\n\r\n", 1)[1]) == {
        "model": "smol",
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
    }


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (http(500, b"<b>broken</b>"), "the replica answered 500: <b>broken</b>"),
        (http(200, b"[]"), "the replica's answer was not a completion: []"),
        (http(200, b'{"choices":[]}'), "the replica's answer was not a completion: "),
        (http(200, b"\xff\xfe"), "the replica's answer was not a completion: "),
        (http(200, b"x" * 2_000_000), "the replica's answer was over "),
        (b"", "the replica could not be asked: "),
        (None, "the replica did not answer within 0.2 s"),
    ],
)
def test_req_c60_what_is_no_completion_is_told(answer: bytes | None, sentence: str) -> None:
    report, _ = ask(answer, timeout_s=0.2 if answer is None else 20.0)
    assert isinstance(report, StepFailed)
    assert report.code == "smoke_failed"
    assert report.sentence.startswith(sentence)
    # A broken connection may mean that the replica just ended: then another one is asked.
    assert report.unanswered == sentence.startswith("the replica could not be asked")
    assert len(report.sentence) < 500


def test_req_c61_the_reply_is_trimmed_and_prompt_time_is_kept_apart() -> None:
    timed = completion(timings={"prompt_ms": 500.0, "predicted_ms": 250.0})
    report, _ = ask(http(200, msgspec.json.encode(timed)))
    assert isinstance(report, SmokeAnswered)
    assert report.reply == "Hello there!"
    assert (report.completion_tokens, report.generation_s, report.prompt_s) == (30, 0.25, 0.5)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_model_that_only_thought_so_far_is_quoted_with_that(content: str | None) -> None:
    message = {"role": "assistant", "content": content, "reasoning_content": "They greet me. "}
    report, _ = ask(http(200, msgspec.json.encode(completion(choices=[{"message": message}]))))
    assert isinstance(report, SmokeAnswered)
    assert report.reply == "They greet me."


def test_an_engine_without_times_of_its_own_is_timed_from_outside() -> None:
    report, _ = ask(http(200, msgspec.json.encode(completion(usage={}))))
    assert isinstance(report, SmokeAnswered)
    assert report.completion_tokens == 0
    assert report.generation_s > 0
