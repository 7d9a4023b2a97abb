"""What an answer used, read from its two ends: every form engines tell it in, framed or not."""

import json
from typing import Any

import pytest

from gateway.domain.tokens import KEPT_BYTES, Tail, Tokens, read_tokens

CHAT = "/v1/chat/completions"


def whole(body: Any) -> Tail:
    """An answer that came in one piece."""
    tail = Tail()
    tail.last.append(body if isinstance(body, bytes) else json.dumps(body).encode())
    return tail


def passed(*blocks: bytes) -> Tail:
    """What a relay keeps of these blocks."""
    tail = Tail()
    for block in blocks:
        if not tail.first:
            tail.first = block[:KEPT_BYTES]
        tail.last.append(block[-KEPT_BYTES:])
        tail.events += block.count(b"data:")
    return tail


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(body: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return chunk(f"{head}data: {json.dumps(body)}\n\n".encode())


DONE = chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"
WORDS = tuple(event({"choices": [{"delta": {"content": w}}], "usage": None}) for w in "abcde")


def test_openais_usage_with_its_cache() -> None:
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 7,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    answer = whole(
        {"choices": [{"message": {"content": 'a "usage": {"prompt_tokens": 1}'}}], "usage": usage}
    )
    told = read_tokens(answer, path=CHAT, sse=False)
    assert told == Tokens(prompt=20, cached=16, completion=7)
    assert told.total == 27


def test_the_last_usage_of_a_stream_counts_whatever_follows_it() -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    for last in ((usage, DONE, END), (usage + DONE + END,), (usage + DONE, END)):
        told = read_tokens(passed(*WORDS, *last), path=CHAT, sse=True)
        assert told == Tokens(prompt=3, completion=5)


def test_a_chunk_that_ends_within_the_usage_does_not_matter() -> None:
    text = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":51}}\n\n'
    for cut in range(1, len(text)):
        blocks = (chunk(text[:cut]), chunk(text[cut:]), DONE, END)
        told = read_tokens(passed(*WORDS, *blocks), path=CHAT, sse=True)
        assert told == Tokens(prompt=3, completion=51)


def test_of_running_sums_the_last_counts() -> None:
    words = [
        event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": n}})
        for n in range(1, 7)
    ]
    assert read_tokens(passed(*words, DONE, END), path=CHAT, sse=True) == Tokens(
        prompt=9, completion=6
    )


def test_a_stream_that_tells_none_is_counted_by_its_events() -> None:
    told = read_tokens(passed(*WORDS, DONE, END), path=CHAT, sse=True)
    assert told == Tokens(completion=5, estimated=True)
    broken_off = read_tokens(passed(*WORDS[:2]), path=CHAT, sse=True)
    assert broken_off == Tokens(completion=2, estimated=True)


def test_what_makes_no_tokens_is_not_counted_by_events() -> None:
    assert read_tokens(passed(*WORDS, END), path="/v1/audio/speech", sse=True) is None
    assert read_tokens(whole({"tokens": [1, 2]}), path="/tokenize", sse=False) is None
    seconds = whole({"text": "a", "usage": {"type": "duration", "seconds": 3}})
    assert read_tokens(seconds, path="/v1/audio/transcriptions", sse=False) is None


def test_anthropics_answer_counts_what_came_from_its_cache_as_asked() -> None:
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 30,
        "output_tokens": 4,
    }
    told = read_tokens(whole({"type": "message", "usage": usage}), path="/v1/messages", sse=False)
    assert told == Tokens(prompt=42, cached=30, completion=4)


def test_anthropics_stream_tells_the_prompt_first_and_the_rest_last() -> None:
    start = event(
        {
            "type": "message_start",
            "message": {"id": "m", "usage": {"input_tokens": 25, "output_tokens": 1}},
        },
        "message_start",
    )
    words = [
        event({"type": "content_block_delta", "delta": {"text": w}}, "content_block_delta")
        for w in "abcdefgh"
    ]
    delta = event(
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 15}}, "message_delta"
    )
    stop = event({"type": "message_stop"}, "message_stop")
    told = read_tokens(passed(start, *words, delta, stop, END), path="/v1/messages", sse=True)
    assert told == Tokens(prompt=25, completion=15)
    # Broken off: the prompt is known, the rest is counted.
    told = read_tokens(passed(start, *words[:5]), path="/v1/messages", sse=True)
    assert told == Tokens(prompt=25, completion=6, estimated=True)


def test_responses_tell_it_in_their_last_event() -> None:
    usage = {
        "input_tokens": 36,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 87,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 123,
    }
    response = {"output": [{"text": "x" * 20_000}], "usage": usage, "user": None, "metadata": {}}
    completed = event({"type": "response.completed", "response": response}, "response.completed")
    for path, sse, tail in (
        ("/v1/responses", True, passed(*WORDS, completed, END)),
        ("/v1/responses", False, whole(response)),
    ):
        assert read_tokens(tail, path=path, sse=sse) == Tokens(prompt=36, cached=8, completion=87)


@pytest.mark.parametrize("before", [True, False])
def test_embeddings_tell_it_before_or_behind_a_body_of_any_size(before: bool) -> None:
    data = [{"embedding": [0.1] * 3000}] * 4
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    body = {"usage": usage, "data": data} if before else {"data": data, "usage": usage}
    text = json.dumps(body).encode()
    blocks = [text[at : at + 8192] for at in range(0, len(text), 8192)]
    assert len(blocks) > 4
    for tail in (passed(*blocks), passed(*map(chunk, blocks), END), whole(text)):
        assert read_tokens(tail, path="/v1/embeddings", sse=False) == Tokens(prompt=8)


def test_ranks_may_tell_a_total_only() -> None:
    body = {"id": "r", "model": "m", "usage": {"total_tokens": 56}, "results": []}
    assert read_tokens(whole(body), path="/v1/rerank", sse=False) == Tokens(prompt=56)


def test_llamacpps_timings_where_there_is_no_usage() -> None:
    last = event(
        {
            "choices": [],
            "timings": {"cache_n": 10, "prompt_n": 2, "prompt_ms": 3.25, "predicted_n": 6},
        }
    )
    told = read_tokens(passed(*WORDS, last, DONE, END), path=CHAT, sse=True)
    assert told == Tokens(prompt=12, cached=10, completion=6)


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens": -5, "completion_tokens": 99999999999999}',
        b'{"prompt_tokens": 1.5}',
        b'{"prompt_tokens": "many"}',
        b'{"prompt_tokens": {"a": {"b": {"c": 1}}}}',
        b'"none"',
        b"{",
        b"\xff",
    ],
)
def test_nonsense_counts_nothing_and_breaks_nothing(usage: bytes) -> None:
    told = read_tokens(whole(b'{"usage": ' + usage + b"}"), path=CHAT, sse=False)
    assert told is None or told.total == 0


def test_many_places_named_usage_cost_a_bounded_search() -> None:
    tail = passed(*[b'data: {"usage": null}\n\n' * 200] * 9)
    told = read_tokens(tail, path=CHAT, sse=True)
    assert told is not None
    assert told.estimated
