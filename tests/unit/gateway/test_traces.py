"""Which trace a request belongs to: its client's where that says one, else a new one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.traces import MAX_STATE, Trace, engine_lines, trace_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()
OWN = Trace(trace=f"{7:032x}", span=f"{9:016x}")


def read(parent: bytes | None, state: bytes | None = None) -> Trace:
    return trace_of(parent, state, trace=7, span=9)


def test_a_clients_trace_is_followed_under_a_span_of_ours() -> None:
    found = read(PARENT, b"vendor=1")
    assert found == Trace(trace=TRACE, span=OWN.span, parent=SPAN, state=b"vendor=1")
    assert found.traceparent == f"00-{TRACE}-{OWN.span}-01".encode()


def test_one_that_is_not_sampled_stays_so() -> None:
    found = read(PARENT[:-2] + b"00")
    assert not found.sampled
    assert found.traceparent.endswith(b"-00")


def test_of_a_later_version_what_all_have_is_read() -> None:
    assert read(b"cc" + PARENT[2:] + b"-what-will-be").trace == TRACE
    assert read(b"cc" + PARENT[2:-2] + b"09").sampled


@pytest.mark.parametrize(
    "given_",
    [
        None,
        b"",
        PARENT.upper(),
        b"ff" + PARENT[2:],
        PARENT + b"-more",
        PARENT[:-1],
        b"00-" + b"0" * 32 + b"-" + SPAN.encode() + b"-01",
        b"00-" + TRACE.encode() + b"-" + b"0" * 16 + b"-01",
        b" " + PARENT,
        PARENT + b"\n",
    ],
)
def test_what_is_none_is_ignored_with_what_stood_beside_it(given_: bytes | None) -> None:
    assert read(given_, b"vendor=1") == OWN


def test_a_state_that_is_too_long_is_left_out() -> None:
    assert read(PARENT, b"x" * (MAX_STATE + 1)) == read(PARENT)


def test_ids_that_happen_to_be_zero_are_none() -> None:
    found = trace_of(None, None, trace=0, span=0)
    assert int(found.trace, 16)
    assert int(found.span, 16)


def test_an_engine_gets_an_id_that_is_like_the_requests_and_its_own() -> None:
    lines = engine_lines("a.b:c", read(PARENT, b"vendor=1")).decode().splitlines()
    assert lines == [
        f"x-request-id: a-b-c-{OWN.span}",
        f"traceparent: 00-{TRACE}-{OWN.span}-01",
        "tracestate: vendor=1",
    ]
    assert b"tracestate" not in engine_lines("a", OWN)
    # Two requests of the same id are two to an engine.
    other = trace_of(None, None, trace=7, span=10)
    first_lines = {engine_lines("same", one).splitlines()[0] for one in (OWN, other)}
    assert len(first_lines) == 2
    assert len(engine_lines("x" * 128, OWN).splitlines()[0]) < 128


@given(st.binary(max_size=80), st.binary(max_size=20))
def test_whatever_a_client_sends_what_goes_on_is_well_formed(parent: bytes, state: bytes) -> None:
    found = read(parent, state)
    again = trace_of(found.traceparent, None, trace=1, span=2)
    assert (again.trace, again.parent) == (found.trace, found.span)
    lines = engine_lines("id", found)
    assert lines.endswith(b"\r\n")
    assert lines.count(b"\n") == lines.count(b"\r") == 2 + bool(found.state)
