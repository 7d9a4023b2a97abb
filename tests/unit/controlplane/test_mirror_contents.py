"""What bytes are, whether they are the published ones, and how a person is told that they are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain import contents

GOOD = "ab" * 32


@pytest.mark.parametrize(
    ("first", "kind", "expected"),
    [
        (b"<!DOCTYPE html><html>", "", "an HTML page"),
        (b"\xef\xbb\xbf\n <HTML>", "", "an HTML page"),
        (b"<div>Please log in</div>", "text/html; charset=utf-8", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1", "", "a Git LFS pointer"),
        (b'{"error": "x"}', "application/json", "JSON"),
        (b"<?xml version='1.0'?><Error>", "application/xml", "an XML document"),
        (b"", "", "empty"),
        (bytes(64), "", "zeros"),
        (b"PK\x03\x04....", "", "something that begins with 50 4b 03 04"),
    ],
)
def test_scn_c8_what_came_instead_of_a_model_is_named(
    first: bytes, kind: str, expected: str
) -> None:
    assert contents.what_it_is(first, kind) == expected
    assert expected in contents.not_that("m.gguf", first, kind)


def test_how_a_file_has_to_begin_follows_from_its_name() -> None:
    assert contents.begins_right("a/M.GGUF", b"GGUF", 100)
    assert not contents.begins_right("a/M.GGUF", b"PK\x03\x04", 100)
    assert contents.begins_right("adapter_model.safetensors", b"\x20\0\0\0\0\0\0\0{", 100)
    assert not contents.begins_right("adapter_model.safetensors", b"GGUF\0\0\0\0{", 100)
    assert contents.begins_right("adapter_config.json", b"anything", 100)


def test_a_safetensors_file_that_ends_within_its_header_is_told_as_one() -> None:
    first = b"\x20\0\0\0\0\0\0\0{"
    assert not contents.begins_right("adapter_model.safetensors", first, 39)
    assert contents.not_that("adapter_model.safetensors", first).endswith(
        "is cut short: it ends within its header, which has 32 bytes"
    )
    assert "what came is" in contents.not_that("adapter_model.safetensors", b"\xff" * 8 + b"{")


def test_req_c37_a_mismatch_names_the_file_and_twelve_digits_of_both() -> None:
    sentence = contents.mismatch("q/m.gguf", "0123456789abcdef" * 4, "fedcba9876543210" * 4)
    assert "q/m.gguf" in sentence
    assert "0123456789ab," in sentence
    assert sentence.endswith("fedcba987654")


@pytest.mark.parametrize("published", ["abc", "z" * 64, "ab" * 33, "sha256:" + GOOD, "ü" * 64])
def test_req_c37_a_published_hash_that_is_none_is_said_and_never_sliced(published: str) -> None:
    plain = contents.plain_sha256(published)
    assert plain is not None
    assert not contents.is_sha256(plain)
    sentence = contents.malformed("m.gguf", published)
    assert "m.gguf" in sentence
    assert "64 hexadecimal digits" in sentence


@given(st.text(max_size=200), st.text(max_size=200))
def test_req_c37_no_text_in_place_of_a_hash_breaks_the_sentences(actual: str, other: str) -> None:
    assert contents.mismatch("m", actual, other)
    assert len(contents.malformed("m", other)) < 1200


@pytest.mark.parametrize(("given_", "plain"), [(None, None), ("", None), ("  ", None)])
def test_nothing_published_is_nothing_to_compare(given_: str | None, plain: str | None) -> None:
    assert contents.plain_sha256(given_) == plain


def test_req_c37_hashes_are_compared_without_regard_to_case() -> None:
    assert contents.plain_sha256(" " + GOOD.upper() + "\n") == GOOD
    assert contents.is_sha256(GOOD)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 * 1024**2, "5.0 MiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert contents.in_units(count) == text


def test_scn_c7_no_room_is_said_with_numbers() -> None:
    sentence = contents.no_room(
        "m.gguf", missing=41 * 1024**3, free=2 * 1024**3, kept=1024**3, folder="/data/mirror"
    )
    assert "41.0 GiB more are needed and 2.0 GiB may be used in /data/mirror" in sentence
    assert "1.0 GiB are kept free" in sentence
