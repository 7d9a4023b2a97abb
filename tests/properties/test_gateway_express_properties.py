"""What is made for speed says the same as what it stands for: fields, tokens, limits, lines, ids and heads."""

import asyncio
import itertools
import json
import re
from datetime import UTC, datetime
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from events.memory import MemoryLog
from events.memory_broker import MemoryBroker
from gateway.accesslog import AccessLog
from gateway.accounting import Accounting
from gateway.domain.affinity import by_beginning, by_prefix
from gateway.domain.http_rules import Headers
from gateway.domain.keytable import Caller
from gateway.domain.names import place_of
from gateway.domain.ratelimits import Reading, limit_headers, limit_lines
from gateway.domain.request_fields import RequestFields, read_fields, read_plain
from gateway.domain.tokens import Tail, Tokens, read_tokens, tokens_of_whole
from gateway.domain.traces import Trace, engine_lines, new_trace, own_lines, trace_of
from gateway.endings import Endings
from gateway.http.bodies import BodyBudget
from gateway.http.due import DueBodies
from gateway.http.engine_connection import EngineConnection
from gateway.http.engine_response import EngineResponse
from gateway.http.exchange import Exchange
from gateway.http.limits import ClientLimits, ServerLimits
from gateway.http.messages import Request, Responder
from gateway.http.outgoing import rendered
from gateway.http.request_head import RequestHead, read_request_head
from gateway.http.server_protocol import ServerProtocol
from gateway.metrics import Metrics
from gateway.served import Served
from gateway.timeline import Timeline
from tests.support.express_yard import ask, whole
from tests.support.gateway_keys import a_key

CHAT = "/v1/chat/completions"

# -- fields --------------------------------------------------------------------------------------

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(allow_nan=False),
    st.sampled_from(["", "m", "größe/m", "m" * 513, "\u0000", '"', "\ud83d\ude00"]),
    st.just([{"role": "user", "content": "hello " * 100}]),
    st.just({"include_usage": True}),
    st.just({"model": "inner"}),
)
_names = st.sampled_from(
    [
        *("model", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("max_output_tokens", "messages", "prompt", "input", "other", "Model"),
    ]
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    """JSON objects in which keys may come twice, and what is left of them when some bytes are others."""
    pairs = draw(st.lists(st.tuples(_names, _values), max_size=7))
    if draw(st.booleans()):
        pairs.append(("model", draw(st.sampled_from(["m", "größe/m"]))))
    ascii_ = draw(st.booleans())
    gap = draw(st.sampled_from(["", " ", "\r\n\t"]))
    members = [f"{json.dumps(k)}:{gap}{json.dumps(v, ensure_ascii=ascii_)}" for k, v in pairs]
    body = (gap + "{" + f",{gap}".join(members) + "}" + gap).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 2)) if draw(st.integers(0, 3)) == 0 else 0):
        at = draw(st.integers(0, len(body) - 1))
        body = (
            body[:at]
            + draw(st.sampled_from([b"", b"\xff", b"\x00", b"}", b"\\", b"e"]))
            + body[at + 1 :]
        )
    return body


@example(b'{"model":"m","stream":true}')
@given(_bodies())
def test_a_plain_look_at_a_body_finds_what_a_whole_one_does(body: bytes) -> None:
    plain, fields = read_plain(body), read_fields(body)
    if plain is None:
        # What it leaves to the other is no good.
        assert not isinstance(fields, RequestFields)
        return
    found, beginning = plain
    assert found == fields
    tie = None if beginning is None else by_beginning(beginning)
    assert tie == by_prefix(body)


# -- tokens --------------------------------------------------------------------------------------

_counts = st.one_of(st.none(), st.integers(-1, 2**33))
_usages = st.one_of(
    st.none(),
    st.just({"seconds": 3}),
    st.just("usage"),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_tokens": _counts,
            "completion_tokens": _counts,
            "total_tokens": _counts,
            "input_tokens": _counts,
            "output_tokens": _counts,
            "cache_read_input_tokens": _counts,
            "cache_creation_input_tokens": _counts,
            "prompt_tokens_details": st.one_of(
                st.none(), st.fixed_dictionaries({"cached_tokens": _counts})
            ),
            "input_tokens_details": st.fixed_dictionaries({"cached_tokens": _counts}),
            "note": st.sampled_from(["", "a}b", '{"usage":1}', {"a": {"b": 1}}, [1]]),
        },
    ),
)
_timings = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {}, optional={"prompt_n": _counts, "cache_n": _counts, "predicted_n": _counts}
    ),
)
_gaps = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", " : "), (",", ":\n\t")])


@st.composite
def _answers(draw: st.DrawFn) -> bytes:
    members = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("usage"), _usages),
                st.tuples(st.just("timings"), _timings),
                st.tuples(st.just("choices"), st.just([{"text": '"usage": {"prompt_tokens": 9}'}])),
                st.tuples(st.just("message"), st.fixed_dictionaries({"usage": _usages})),
            ),
            max_size=4,
        )
    )
    comma, colon = draw(_gaps)
    texts = [
        f"{json.dumps(k)}{colon}{json.dumps(v, separators=(comma, colon))}" for k, v in members
    ]
    return ("{" + comma.join(texts) + "}").encode()


@given(_answers())
def test_the_tokens_of_an_answer_in_one_piece_are_those_of_one_that_passes(body: bytes) -> None:
    tail = Tail()
    tail.first = body
    tail.last.append(body)
    assert tokens_of_whole(body) == read_tokens(tail, path=CHAT, sse=False)


_small = st.integers(0, 2**30)


@given(_small, _small, st.one_of(st.none(), _small), _gaps, st.text(max_size=5))
def test_they_are_what_the_answer_says(
    prompt: int, completion: int, cached: int | None, gaps: tuple[str, str], text: str
) -> None:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage = {"prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": None}, **usage}
    document = {"choices": [{"text": text}], "usage": usage, "system_fingerprint": "b{1}"}
    expected = Tokens(prompt=prompt, completion=completion, cached=cached or 0)
    assert tokens_of_whole(json.dumps(document, separators=gaps).encode()) == expected


# -- limits --------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.integers(0, 61),
    st.integers(0, 61),
)
def test_the_lines_of_a_limit_are_its_headers(
    rpm: int, tpm: int, requests: int, tokens: int, first: int, second: int
) -> None:
    key = a_key(rpm=rpm, tpm=tpm)
    if not (rpm or tpm):
        return
    reading = Reading(
        requests=requests, requests_reset_s=first, tokens=tokens, tokens_reset_s=second
    )
    assert limit_lines(key, reading) == rendered(limit_headers(key, reading))


# -- what is told of an end ----------------------------------------------------------------------


class _Clock:
    """Stands where it is put."""

    def __init__(self, now: datetime, now_s: float) -> None:
        self._now, self._now_s = now, now_s

    def now(self) -> datetime:
        return self._now

    def now_s(self) -> float:
        return self._now_s

    def wall_ms(self, at_s: float) -> float:
        return at_s * 1000


_text = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(max_examples=30)
@given(
    now=st.datetimes(timezones=st.just(UTC)).filter(lambda moment: moment.year > 1999),
    names=st.tuples(_text.filter(bool), _text, _text, st.sampled_from(["", "hit"])),
    peer=st.sampled_from(["127.0.0.1", "::1", "fe80::1%eth0", "%s%d%b"]),
    priority=st.sampled_from([None, b"low", b"high", b"%b"]),
    keyed=st.booleans(),
    took=st.lists(
        st.tuples(st.floats(0.0, 400.0), st.floats(0.0, 1.0), st.integers(0, 10**6)),
        min_size=1,
        max_size=4,
    ),
    used=st.builds(Tokens, prompt=_small, cached=_small, completion=_small),
    bits=st.integers(0, 2**192 - 1),
)
def test_what_is_told_of_a_plain_request_is_what_is_told_of_any(
    now: datetime,
    names: tuple[str, str, str, str],
    peer: str,
    priority: bytes | None,
    keyed: bool,
    took: list[tuple[float, float, int]],
    used: Tokens,
    bits: int,
) -> None:
    model, replica, adapter, how = names
    place = place_of("POST", CHAT)
    caller = Caller(key=a_key(priority="normal")) if keyed else Caller()

    def served() -> Served:
        return Served(
            caller=caller, model=model, replica=replica, adapter=adapter, how=how, path=CHAT
        )

    async def told(plainly: bool) -> tuple[list[dict[str, Any]], str, Any]:
        written: list[bytes] = []
        metrics = Metrics()
        access = AccessLog(written.append)
        log = MemoryLog(MemoryBroker(), source="/gateway/gw")
        accounting = Accounting("gw", "an incarnation", log, metrics)
        clock = _Clock(now, 0.0)
        endings = Endings(clock, metrics, access, accounting)
        plain = endings.plain(served(), CHAT, peer, priority)
        for number, (duration_s, share, size) in enumerate(took):
            received_s = 1000.0
            answered_s = received_s + duration_s
            written_s = received_s + duration_s * share
            timeline = Timeline(f"0f-{number:x}", received_s, new_trace(bits))
            clock._now_s = answered_s
            if plainly:
                endings.answered(
                    plain,
                    timeline,
                    received_s=received_s,
                    written_s=written_s,
                    answered_s=answered_s,
                    used=used,
                    sent_bytes=size,
                )
                continue
            timeline.mark("first_byte", answered_s)
            one = served()
            one.status, one.sent_bytes, one.used, one.whole = 200, size, used, True
            metrics.answered_first(model, answered_s - written_s)
            endings.ended(
                one,
                timeline,
                place,
                method="POST",
                path=CHAT,
                peer=peer,
                received_s=received_s,
                priority=priority,
            )
        access.flush()
        lines = [json.loads(line) for block in written for line in block.split(b"\n") if line]
        page = re.sub(r".*_created.*\n", "", metrics.render().decode())
        accounting.before_telling()
        batch = accounting._tally.take()  # pyright: ignore[reportPrivateUsage]
        assert batch is not None
        return lines, page, batch.rows

    plain, page, rows = asyncio.run(told(plainly=True))
    any_, its_page, its_rows = asyncio.run(told(plainly=False))
    assert plain == any_
    assert rows == its_rows
    assert [list(line) for line in plain] == [list(line) for line in any_]
    assert _rounded(page) == _rounded(its_page)


def _rounded(page: str) -> list[tuple[str, float]]:
    """Samples, in which sums may be of another order."""
    samples = [line.rpartition(" ") for line in page.split("\n") if line and line[0] != "#"]
    return [(name, round(float(value), 6)) for name, _, value in samples]


# -- traces --------------------------------------------------------------------------------------


@given(st.integers(0, 2**192 - 1), st.from_regex(r"[0-9a-f]{16}-[0-9a-f]{1,12}", fullmatch=True))
def test_a_trace_of_our_own_is_one_that_anybody_follows(bits: int, request_id: str) -> None:
    trace = new_trace(bits)
    assert trace == Trace(trace=trace.trace, span=trace.span)
    assert own_lines(request_id, trace) == engine_lines(request_id, trace)
    followed = trace_of(trace.traceparent, None, trace=1, span=2)
    assert (followed.trace, followed.parent, followed.sampled) == (trace.trace, trace.span, True)


# -- heads ---------------------------------------------------------------------------------------


class _Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.is_aborted = False

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _Errand:
    def left(self) -> None:
        pass

    def hand_over(self) -> bool:
        return False

    dismiss = hand_over


Taken = tuple[str, str, list[tuple[bytes, bytes]], bytes]


class _Home:
    """A server that keeps what it takes, and answers at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = ServerLimits()
        self.budget = BodyBudget(1 << 20)
        self.draining = False
        self.due = DueBodies(loop)
        self.date = b"a date"
        self.taken: list[Taken] = []

    def take(
        self, wire: ServerProtocol, head: RequestHead, body: bytes, received_at: float
    ) -> bool:
        self.taken.append((head.method, head.path, list(head.headers.items), body))
        wire.run(_Errand())
        wire.errand_done()
        return True

    async def handler(self, request: Request, respond: Responder) -> None:
        raise AssertionError("everything is taken")

    def opened(self, connection: ServerProtocol) -> None:
        pass

    closed = opened

    def begun(self) -> None:
        pass

    done = begun


_requests = st.builds(
    lambda path, fields, size: ask(b"x" * size, path, *fields),
    st.sampled_from([CHAT, "/v1/embeddings"]),
    st.lists(
        st.sampled_from(["authorization: Bearer a", "authorization: Bearer b", "user-agent: a"]),
        max_size=1,
    ),
    st.sampled_from([1, 2, 9, 10]),
)


@given(st.lists(st.tuples(_requests, st.lists(st.integers(0, 200), max_size=3)), max_size=8))
def test_each_request_of_a_connection_is_read_as_if_it_were_the_first(
    requests: list[tuple[bytes, list[int]]],
) -> None:
    """In however many pieces it comes."""
    loop = asyncio.new_event_loop()
    home = _Home(loop)
    try:
        wire = ServerProtocol(cast(Any, home), loop)
        wire.connection_made(cast(Any, _Transport()))
        expected: list[Taken] = []
        for request, cuts in requests:
            marks = sorted({0, len(request), *(cut % len(request) for cut in cuts)})
            for start, end in itertools.pairwise(marks):
                wire.data_received(request[start:end])
            head, _, body = request.partition(b"\r\n\r\n")
            read = read_request_head(head + b"\r\n\r\n", home.limits)
            expected.append((read.method, read.path, list(read.headers.items), body))
    finally:
        loop.close()
    # A head that differs by its length alone is the one before: what it says of the length is looked at nowhere.
    assert [_lengthless(t) for t in home.taken] == [_lengthless(t) for t in expected]


def _lengthless(taken: Taken) -> Taken:
    method, path, items, body = taken
    return method, path, [i for i in items if i[0] != b"content-length"], body


Told = tuple[int, list[tuple[bytes, bytes]], bytes]


class _Asker:
    def __init__(self) -> None:
        self.told: Told | None = None
        self.answer: asyncio.Future[EngineResponse] | None = None

    def answered(self, headers: Headers, body: bytes) -> None:
        self.told = 200, list(headers.items), body

    def streams(self, response: EngineResponse) -> None:
        raise AssertionError("nothing of it is chunked")

    def otherwise(self, answer: "asyncio.Future[EngineResponse]") -> Exchange:
        self.answer = answer
        return Exchange()


def _ask(connection: EngineConnection, pieces: list[bytes]) -> Told:
    """What comes of a request that is answered with these pieces."""
    asker = _Asker()
    connection.ask(asker, "POST", b"a request")
    for piece in pieces:
        connection.data_received(piece)
    if asker.answer is not None:
        response = asker.answer.result()
        body = response.take_whole()
        assert body is not None, "it came in one piece"
        asker.told = response.status, list(response.headers.items), body
    assert asker.told is not None
    status, items, body = asker.told
    return status, [i for i in items if i[0] not in (b"content-length", b"date")], body


def _connection(loop: asyncio.AbstractEventLoop) -> EngineConnection:
    connection = EngineConnection(loop, ClientLimits(), lambda _: None, lambda _: None)
    connection.connection_made(cast(Any, _Transport()))
    return connection


@st.composite
def _told_answers(draw: st.DrawFn) -> list[bytes]:
    status = draw(st.sampled_from(["200 OK", "200 No", "201 OK", "500 OK"]))
    kind = draw(st.sampled_from(["application/json", "application/yaml", "text/event-stream"]))
    answer = whole(b"x" * draw(st.sampled_from([1, 2, 9, 10])), status, f"content-type: {kind}\r\n")
    answer = answer.replace(b"30 Nov", draw(st.sampled_from([b"30 Nov", b"29 Nov"])))
    if draw(st.booleans()):
        answer = answer.replace(b"server: engine\r\n", b"")
    if status.startswith("200") and kind.startswith("application") and draw(st.booleans()):
        at = draw(st.integers(1, len(answer) - 1))
        return [answer[:at], answer[at:]]
    return [answer]


@given(st.lists(_told_answers(), min_size=1, max_size=8))
def test_each_answer_of_a_connection_is_read_as_if_it_were_the_first(
    answers: list[list[bytes]],
) -> None:
    loop = asyncio.new_event_loop()
    try:
        connection = _connection(loop)
        for pieces in answers:
            assert _ask(connection, pieces) == _ask(_connection(loop), pieces)
    finally:
        loop.close()
