"""The model's name: read from requests, replaced in requests and answers, all other bytes untouched."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.model_rewrite import (
    JsonModelRewriter,
    Renaming,
    SseModelRewriter,
    inner_model_spans,
    model_spans,
    named_model_spans,
    patch,
    replace_model,
    replace_named_model,
)
from gateway.domain.request_fields import FieldsProblem, RequestFields, read_fields

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["model", "a", 'q"{', "\\", 'x"model', '"model"']), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["model", "x", 'x"model', "messages", "[{"]), JSON),
    st.text(max_size=9),
)
@settings(max_examples=200, deadline=None)
def test_scn_b2_only_the_top_level_name_changes(document: dict[str, object], name: str) -> None:
    raw = json.dumps(document, indent=1).encode()
    changed = json.loads(replace_model(raw, name))
    for spaced in (
        raw,
        json.dumps(document).encode(),
        json.dumps(document, separators=(",", ":")).encode(),
    ):
        for own in ("m", str(document.get("model"))):
            assert Renaming(name, own).back(spaced) == replace_model(spaced, name)
    expected = dict(document)
    if isinstance(document.get("model"), str):
        expected["model"] = name
    else:
        assert replace_model(raw, name) == raw
    assert changed == expected


@given(
    st.dictionaries(st.sampled_from(["model", "x", "y", "[{"]), JSON),
    st.lists(st.integers(0, 500), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_an_answer_in_pieces_is_rewritten_like_a_whole_one(
    document: dict[str, object], cuts: list[int]
) -> None:
    raw = json.dumps(document, ensure_ascii=False).encode()
    marks = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    rewriter = JsonModelRewriter("new")
    pieces = [rewriter.feed(raw[a:b]) for a, b in itertools.pairwise(marks)]
    assert b"".join([*pieces, rewriter.finish()]) == replace_model(raw, "new")


def test_every_repetition_and_spelling_of_the_key_is_replaced() -> None:
    raw = rb'{"model" : "a", "mod\u0065l":"b\"c", "n":{"model":"d"}, "model":5}'
    assert replace_model(raw, 'x"') == (
        rb'{"model" : "x\"", "mod\u0065l":"x\"", "n":{"model":"d"}, "model":5}'
    )
    assert [raw[a:b] for a, b in model_spans(raw)] == [b'"a"', rb'"b\"c"']


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"x\"model":"a"}',
        b'{"n":{"model":"a"}}',
        b'[{"model":"a"}]',
        b'{"n":[{"model":"a"}]}',
        b'{"x":"model","y":"a"}',
        b'{"model":{"x":"a"}}',
    ],
)
def test_what_only_looks_like_the_name_stays(raw: bytes) -> None:
    assert replace_model(raw, "new") == raw
    assert model_spans(b"data: " + raw, 6) == []


def test_a_long_answer_is_not_held_back() -> None:
    rewriter = JsonModelRewriter("new")
    assert rewriter.feed(b'{"model":"old","data":"').startswith(b'{"model":"new","data":')
    total = sum(len(rewriter.feed(b"x" * 10_000)) for _ in range(100))
    assert total > 900_000


def test_a_stream_is_rewritten_line_by_line() -> None:
    rewriter = SseModelRewriter("new")
    stream = (
        b': ping\n\ndata: {"model":"old"}\n\ndata:{"a":{"model":"old"}}\r\n\r\ndata: [DONE]\n\n'
    )
    out = b"".join(rewriter.feed(stream[i : i + 5]) for i in range(0, len(stream), 5))
    assert out + rewriter.finish() == stream.replace(b'{"model":"old"}\n', b'{"model":"new"}\n')


def test_what_routing_needs_is_read() -> None:
    body = b'{"messages":[{"content":"x"}],"stream":true,"model":"a/b:\xc3\xa9 c",\
"stream_options":{"include_usage":true,"x":1},"temperature":0.1}'
    assert read_fields(body) == RequestFields(model="a/b:é c", stream=True, include_usage=True)
    assert read_fields(b'{"model":"m","stream":null}') == RequestFields(model="m")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{}", "model", "provide a model"),
        (b'{"model":null}', "model", "provide a model"),
        (b'{"model":""}', "model", "provide a model"),
        (b'{"model":5}', "model", "must be a text"),
        (b'{"model":"m","stream":"yes"}', "stream", "bool"),
        (b"[]", None, "object"),
        (b"", None, "empty"),
        (b"  ", None, "empty"),
        (b"{", None, "not valid JSON"),
        (b'{"model":"m"} x', None, "not valid JSON"),
        (b'\xff\xfe{"model":"m"}', None, "not valid JSON"),
        (b'{"model":"\xff"}', None, ""),
        (b'{"model":5', None, "not valid JSON"),
        (b'{"model":{},"x" 1}', None, "not valid JSON"),
        (b'{"model":5,"x":"\xff"}', None, "not valid JSON"),
        (b'{"stream":"yes","model":"m"} x', None, "not valid JSON"),
        (b'{"model":"%b"}' % (b"x" * 600), "model", "longer"),
        (b'{"model":"m","x":%b}' % (b"[" * 9000 + b"]" * 9000), None, "nested"),
        (b"[" * 9000 + b"]" * 9000, None, "nested"),
    ],
)
def test_scn_b13_a_request_without_a_model_gets_a_sentence(
    body: bytes, param: str | None, words: str
) -> None:
    problem = read_fields(body)
    assert isinstance(problem, FieldsProblem)
    assert problem.param == param
    assert words in problem.message


@given(
    st.dictionaries(st.sampled_from(["x", "messages", "[{", "\\", 'q"model"']), JSON),
    st.dictionaries(st.sampled_from(["y", "z"]), JSON),
    st.text(max_size=9),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_where_a_request_names_its_model_is_found_without_reading_all_of_it(
    before: dict[str, object], after: dict[str, object], name: str, ascii_only: bool
) -> None:
    document = {**before, "model": name, **after}
    raw = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert named_model_spans(raw) == model_spans(raw)
    assert patch(raw, named_model_spans(raw), b'"new"') == replace_model(raw, "new")
    assert replace_named_model(raw, b'"new"') == replace_model(raw, "new")
    assert Renaming(name, "new").onward(raw) == replace_model(raw, "new")


PIECES = [
    b'{"id":"x","model":"m"',
    b'"model"',
    b'"model":',
    b'"mod\\u0065l":',
    b'"n"',
    b'"a\\"b"',
    b'":',
]
PIECES += [
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b": ",
    b" : ",
    b",",
    b'"',
    b"\\",
    b" ",
    b"\t",
    b"7",
    b"model",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join))
@settings(max_examples=300, deadline=None)
def test_the_short_way_to_a_name_is_what_the_long_way_finds_in_anything(raw: bytes) -> None:
    assert Renaming("new", "m").back(raw) == replace_model(raw, "new")


@given(
    st.lists(
        st.one_of(
            # As engines write them: one head for all events, and what differs behind it.
            JSON.map(
                lambda delta: b'data: {"id":"a","model":"m","x":%b}' % json.dumps(delta).encode()
            ),
            JSON.map(lambda delta: b'data:{"x":%b,"model":"m"}' % json.dumps(delta).encode()),
            st.lists(st.sampled_from(PIECES), max_size=6).map(
                lambda found: b'data: {"id":"a","model":"m"' + b"".join(found)
            ),
            st.sampled_from([b"data: [DONE]", b": ping", b"event: x", b"", b'data: {"model":"m"}']),
        ),
        max_size=8,
    ),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n", b"\r"]),
    st.lists(st.integers(0, 600), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_an_event_that_begins_like_the_one_before_is_rewritten_like_any(
    events: list[bytes], end: bytes, cuts: list[int]
) -> None:
    stream = b"".join(event + end for event in events)
    expected = b"".join(
        patch(line, model_spans(line, 5), b'"new"') if line.startswith(b"data:") else line
        for line in stream.splitlines(keepends=True)
    )
    whole_events = list(itertools.accumulate(len(event + end) for event in events))
    for marks in (
        sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)}),
        [0, *whole_events],
    ):
        rewriter = SseModelRewriter("new")
        pieces = [rewriter.feed(stream[a:b]) for a, b in itertools.pairwise(marks)]
        assert b"".join([*pieces, rewriter.finish()]) == expected


def test_an_event_is_read_again_when_something_else_in_it_may_name_a_model() -> None:
    rewriter = SseModelRewriter("new")
    head = b'data: {"id":"a","model":"'
    for rest, told in (
        (b',"x":1}', b',"x":1}'),
        (b',"model":"m"}', b',"model":"new"}'),
        (rb',"mod\u0065l":"m"}', rb',"mod\u0065l":"new"}'),
        (b',"x":1}\n\n' + head + b'm","y":2}', b',"x":1}\n\n' + head + b'new","y":2}'),
        (b',"z":3}', b',"z":3}'),
    ):
        assert rewriter.feed(head + b'm"' + rest + b"\n\n") == head + b'new"' + told + b"\n\n"
    # A longer name that begins alike is another name.
    assert rewriter.feed(head + b'mm","x":1}\n\n') == head + b'new","x":1}\n\n'


def test_a_name_that_looks_like_the_key_is_not_mistaken_for_it() -> None:
    for raw, expected in (
        (b'{"model":"model"}', b'{"model":"n"}'),
        (b'{"a":"model","model":"b"}', b'{"a":"model","model":"n"}'),
        (rb'{"a":"\"model\":\"c\"","model":"b"}', rb'{"a":"\"model\":\"c\"","model":"n"}'),
        (b'{"n":{"model":"c"},"model":"b"}', b'{"n":{"model":"c"},"model":"n"}'),
        (rb'{"mod\u0065l":"b","a":{"model":"c"}}', rb'{"mod\u0065l":"n","a":{"model":"c"}}'),
        (b'{"model":"a","model":"b"}', b'{"model":"n","model":"n"}'),
        (b'{"model" :"a","model":"b"}', b'{"model" :"n","model":"n"}'),
        (b'{"a":["x"],"model":"b"}', b'{"a":["x"],"model":"n"}'),
        (rb'{"model":"a\"b"}', b'{"model":"n"}'),
    ):
        assert patch(raw, named_model_spans(raw), b'"n"') == expected
        assert replace_named_model(raw, b'"n"') == expected
        assert replace_model(raw, "n") == expected
        for own in ("b", "a", "model", 'a"b'):
            assert Renaming("n", own).back(raw) == expected


@given(st.dictionaries(st.sampled_from(["response", "message", "x", "model"]), JSON), st.booleans())
@settings(max_examples=300, deadline=None)
def test_scn_b2_a_whole_answer_in_an_event_is_renamed_and_nothing_else(
    document: dict[str, object], spaced: bool
) -> None:
    raw = json.dumps(document, indent=1 if spaced else None).encode()
    changed = json.loads(patch(raw, inner_model_spans(raw), b'"new"'))
    expected: dict[str, object] = {}
    for key, value in document.items():
        inner = value if key in ("response", "message") and isinstance(value, dict) else {}
        named = isinstance(inner.get("model"), str)
        expected[key] = {**inner, "model": "new"} if named else value
    assert changed == expected


def test_scn_b2_events_of_responses_and_messages_name_what_was_asked_for() -> None:
    rewriter = SseModelRewriter("alias")
    given_ = [
        'event: response.created\ndata: {"response":{"id":"resp_1","model":"m"},"type":"a"}\n\n',
        'event: message_start\ndata: {"type":"b","message":{"model": "m","content":[]}}\n\n',
        'event: response.output_text.delta\ndata: {"type":"c","delta":"\\"model\\":\\"m\\""}\n\n',
    ]
    out = "".join(rewriter.feed(x.encode()).decode() for x in given_) + rewriter.finish().decode()
    assert out == "".join(given_).replace('"model":"m"', '"model":"alias"').replace(
        '"model": "m"', '"model": "alias"'
    )
