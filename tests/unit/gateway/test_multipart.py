"""What a form says, however its bytes are cut, and what is refused because two readers could differ."""

import pytest

from gateway.domain.multipart import MAX_PARTS, Form, FormReader, boundary_of
from gateway.domain.request_fields import FieldsProblem, RequestFields

B = b"----b0undary"


def part(name: str, value: bytes, more: str = "", filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'Content-Disposition: form-data; name="{name}"{file}\r\n{more}'
    return b"--%b\r\n%b\r\n%b\r\n" % (B, head.encode(), value)


END = b"--%b--\r\n" % B
FILE = part("file", b"RIFF\r\n--\r\n\x00\xff" * 50, "Content-Type: audio/wav\r\n", "模型 1.wav")


def read(body: bytes, size: int = 1 << 20, named: str | None = None) -> Form | FieldsProblem:
    reader = FormReader(B, named=named)
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    return reader.finish()


def told(found: Form | FieldsProblem) -> str:
    assert isinstance(found, FieldsProblem), found
    return found.message


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 64, 1 << 20])
def test_scn_b10_the_model_is_found_wherever_its_part_stands_and_however_it_is_cut(
    size: int,
) -> None:
    model = part("model", "whisper-ü".encode())
    for body in (FILE + model + END, model + FILE + END, part("a", b"") + model + FILE + END):
        found = read(body, size)
        assert isinstance(found, Form), found
        assert found.fields == RequestFields(model="whisper-ü")
        assert found.span is not None
        assert body[slice(*found.span)] == "whisper-ü".encode()


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_a_form_says_whether_its_answer_shall_be_a_stream(size: int) -> None:
    found = read(part("stream", b"true") + part("model", b"m") + END, size)
    assert isinstance(found, Form)
    assert found.fields.stream


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (FILE + END, "no part `model`"),
        (part("model", b"") + END, "part `model` is empty"),
        (part("model", b"m") + part("model", b"n") + END, "more than one part `model`"),
        (part("model", b"\xff") + END, "not UTF-8"),
        (part("model", b"m" * 600) + END, "longer than 512 characters"),
        (part("model", b"m" * 9000) + END, "longer than 512 characters"),
        (part("stream", b"m" * 9000) + END, "`stream` is too long"),
        (part("model", b"m", filename="f") + END, "is a file"),
        (part("model", b"bQ==", "Content-Transfer-Encoding: base64\r\n") + END, "is encoded"),
        (part("model", b"m"), "before its last boundary"),
        (b"", "before its last boundary"),
        (b"--" + B, "before its last boundary"),
        (part("model", b"m") + END[:-4], "before its last boundary"),
        (b"preamble\r\n" + part("model", b"m") + END, "begin with its boundary"),
        (b'{"model": "m", "input": "x"}', "begin with its boundary"),
        (part("model", b"m") + END + b"--more", "behind its last boundary"),
        (part("model", b"m") + END + END, "behind its last boundary"),
        (part("model", b"m") + b"--" + B + b" \r\n", "on the line of a boundary"),
        (part("file", b"x\n--" + B + b"\r\n") + END, "does not begin a line"),
        (part("file", b"--" + B + b"\r\nx") + END, "does not begin a line"),
        (b"--" + B + b"\r\n\r\nm\r\n" + END, "its last boundary"),
        (b"--" + B + b"\r\nContent-Type: a\r\n\r\nm\r\n" + END, "does not say"),
        (b"--" + B + b"\r\nContent-Disposition: form-data\r\n\r\nm\r\n" + END, "has no name"),
        (
            b"--"
            + B
            + b"\r\nContent-Disposition: form-data; name=a; name=model\r\n\r\nm\r\n"
            + END,
            "more than one",
        ),
        (
            b"--"
            + B
            + b"\r\nContent-Disposition: form-data; name*=utf-8''model\r\n\r\nm\r\n"
            + END,
            "has no name",
        ),
        (
            b"--" + B + b"\r\nContent-Disposition: form-data;\r\n name=model\r\n\r\nm\r\n" + END,
            "header of a part",
        ),
        (
            b"--" + B + b"\r\nContent-Disposition: form-data; name=a\nb: c\r\n\r\nm\r\n" + END,
            "line end",
        ),
        (b"--" + B + b"\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\nm\r\n" + END, "too long"),
        (part("a", b"") * (MAX_PARTS + 1) + END, "more than 1000 parts"),
    ],
)
def test_what_two_readers_could_take_for_two_forms_is_refused(
    body: bytes, said: str, size: int
) -> None:
    assert said in told(read(body, size))


def test_a_name_may_come_without_quotes_and_with_escapes() -> None:
    for name in (b"model", b'"model"', b'"m\\odel"'):
        head = b"Content-Disposition: form-data; name=%b\r\n\r\n" % name
        found = read(b"--%b\r\n%bm\r\n%b" % (B, head, END))
        assert isinstance(found, Form), found
        assert found.fields.model == "m"


def test_where_the_address_names_the_model_the_form_may_be_silent_and_not_differ() -> None:
    silent = read(FILE + END, named="m")
    assert isinstance(silent, Form)
    assert (silent.fields.model, silent.span) == ("m", None)
    same = read(part("model", b"m") + END, named="m")
    assert isinstance(same, Form)
    assert same.span is not None
    assert "two different models" in told(read(part("model", b"n") + END, named="m"))


def test_a_large_file_is_passed_over_without_being_kept() -> None:
    reader = FormReader(B)
    reader.feed(FILE[:200])
    for _ in range(100):
        reader.feed(b"\r\n" * 128 * 1024)
        assert len(reader._held) < 100  # pyright: ignore[reportPrivateUsage]
    reader.feed(b"\r\n" + part("model", b"m") + END)
    found = reader.finish()
    assert isinstance(found, Form), found
    assert found.fields.model == "m"


@pytest.mark.parametrize(
    ("given", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; Boundary="a b=c"', b"a b=c"),
        (b"multipart/form-data;boundary=----WebKitFormBoundary7MA4", b"----WebKitFormBoundary7MA4"),
        (b"multipart/form-data; boundary=abc;", b"abc"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
        (b"multipart/form-data; boundary=a; boundary=b", None),
        (b'multipart/form-data; boundary="a\r\nb"', None),
        (b"multipart/form-data; boundary=" + b"a" * 71, None),
        (b"multipart/mixed; boundary=abc", None),
        (b"multipart/form-data; boundary", None),
    ],
)
def test_the_boundary_is_named_once_in_the_content_type(
    given: bytes, boundary: bytes | None
) -> None:
    found = boundary_of(given)
    if boundary is None:
        assert isinstance(found, FieldsProblem)
    else:
        assert found == boundary
