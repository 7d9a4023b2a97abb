"""A form as sentences: how it is cut changes nothing, and where it is accepted every other reader finds the same model."""

import itertools
from email.parser import BytesParser
from email.policy import HTTP
from io import BytesIO

from hypothesis import example, given, settings
from hypothesis import strategies as st
from multipart import MultipartError, MultipartParser

from gateway.domain.multipart import Form, FormReader
from gateway.domain.request_fields import FieldsProblem

B = b"b0"
PIECES = st.sampled_from(
    [
        b"--b0\r\n",
        b"\r\n--b0\r\n",
        b"\r\n--b0--",
        b"\r\n--b0--\r\n",
        b"\n--b0\r\n",
        b"--b0--\r\n",
        b"--b0",
        b"b0",
        b"--",
        b"-",
        b"\r\n",
        b"\r",
        b"\n",
        b" ",
        b"\0",
        b"Content-Disposition: form-data; name=model\r\n\r\n",
        b'Content-Disposition: form-data; name="model"\r\n\r\n',
        b'content-disposition:form-data;name="file"; filename="a;b\\".wav"\r\n\r\n',
        b"Content-Disposition: form-data; name=model; filename=x\r\n\r\n",
        b"Content-Disposition: form-data; name=",
        b"Content-Disposition: form-data; name=file; name=model\r\n\r\n",
        b"Content-Disposition: attachment; name=model\r\n\r\n",
        b"Content-Type: text/plain\r\n",
        b"Content-Transfer-Encoding: base64\r\n",
        b"X: y\r\n z: w\r\n",
        b"model",
        b"m1",
        b"m2",
        b"\xc3\xbc",
        b"\xff",
    ]
)
PLAIN = st.tuples(st.sampled_from([b"model", b"model", b"file"]), st.sampled_from([b"m1", b"m2"]))
NASTY = st.tuples(
    st.sampled_from([b"model", b"file", b"stream", b"Model", b"model "]),
    st.lists(PIECES, max_size=4).map(b"".join),
)
PARTS = st.tuples(
    st.one_of(PLAIN, PLAIN, NASTY), st.sampled_from([b"", b"", b"", b'; filename="f"', b"; a=b"])
).map(lambda p: b'Content-Disposition: form-data; name="%b"%b\r\n\r\n%b' % (p[0][0], p[1], p[0][1]))
FORMS = st.lists(PARTS, min_size=1, max_size=4).map(
    lambda parts: b"".join(b"--b0\r\n%b\r\n" % part for part in parts) + b"--b0--\r\n"
)
BODIES = st.one_of(FORMS, FORMS, st.lists(PIECES, max_size=12).map(b"".join))


def read(pieces: list[bytes], named: str | None = None) -> Form | FieldsProblem:
    reader = FormReader(B, named=named)
    for piece in pieces:
        reader.feed(piece)
    return reader.finish()


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(body), *(c % (len(body) + 1) for c in cuts)})
    return [body[a:b] for a, b in itertools.pairwise(marks)]


@settings(deadline=None, max_examples=300)
@given(body=BODIES, cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_how_a_form_is_cut_changes_nothing(body: bytes, cuts: list[int]) -> None:
    whole = read([body])
    assert read(cut(body, cuts)) == whole
    assert read([bytes([b]) for b in body]) == whole


@settings(deadline=None, max_examples=500)
@given(body=BODIES)
@example(body=b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nm1\r\n--b0--\r\n')
def test_scn_b10_where_a_form_is_accepted_other_readers_find_the_same_model_or_refuse(
    body: bytes,
) -> None:
    found = read([body])
    if isinstance(found, FieldsProblem):
        return
    assert found.span is not None
    value = body[slice(*found.span)]
    assert value.decode() == found.fields.model
    # As a web framework reads it.
    try:
        parts = list(MultipartParser(BytesIO(body), B, strict=False))
        assert [p.raw for p in parts if p.name == "model"] == [value]
    except MultipartError:
        pass
    # As the standard library reads mail: by lines, whatever their ends.
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: multipart/form-data; boundary=%b\r\n\r\n%b" % (B, body)
    )
    names = [p.get_param("name", header="content-disposition") for p in message.iter_parts()]
    assert names.count("model") <= 1


@settings(deadline=None, max_examples=200)
@given(body=FORMS, name=st.sampled_from(["m1", "a-much-longer-name", "ü"]))
def test_scn_b2_a_form_with_its_model_replaced_is_the_same_form(body: bytes, name: str) -> None:
    found = read([body])
    if isinstance(found, FieldsProblem):
        return
    assert found.span is not None
    start, stop = found.span
    changed = read([body[:start] + name.encode() + body[stop:]])
    assert isinstance(changed, Form)
    assert changed.fields.model == name
    assert changed.fields.stream == found.fields.stream
