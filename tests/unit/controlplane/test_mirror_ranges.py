"""What is read out of Range, If-Range, If-None-Match and Content-Range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain.ranges import (
    Part,
    Unsatisfiable,
    asked_part,
    content_range,
    if_range_holds,
    tags_match,
    unsatisfied_total,
)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-", Part(first=0, end=100)),
        ("bytes=10-19", Part(first=10, end=20)),
        ("bytes=99-", Part(first=99, end=100)),
        ("bytes=10-1000", Part(first=10, end=100)),
        ("BYTES = 10 - 19", Part(first=10, end=20)),
        ("bytes=-30", Part(first=70, end=100)),
        ("bytes=-1000", Part(first=0, end=100)),
        ("bytes=100-", Unsatisfiable()),
        ("bytes=-0", Unsatisfiable()),
        ("bytes=0-1,5-6", None),
        ("bytes=20-10", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=٣-٤", None),
        ("items=0-1", None),
        ("bytes=" + "9" * 5000 + "-", None),
    ],
)
def test_a_range_of_a_hundred_bytes(header: str | None, expected: object) -> None:
    assert asked_part(header, 100) == expected


def test_an_empty_file_has_no_part() -> None:
    assert asked_part("bytes=0-", 0) == Unsatisfiable()
    assert asked_part("bytes=-5", 0) == Unsatisfiable()


@given(st.text(max_size=40), st.integers(0, 1000))
def test_whatever_is_asked_a_part_lies_within_the_file(text: str, size: int) -> None:
    part = asked_part(f"bytes={text}", size)
    if isinstance(part, Part):
        assert 0 <= part.first < part.end <= size


@pytest.mark.parametrize(
    ("header", "holds"),
    [(None, True), ('"a"', True), (' "a" ', True), ('"b"', False), ('W/"a"', False), ("a", False)],
)
def test_a_part_is_sent_only_of_the_very_same_bytes(header: str | None, holds: bool) -> None:
    assert if_range_holds(header, '"a"') is holds


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (None, False),
        ('"a"', True),
        ('"b", "a"', True),
        ('W/"a"', True),
        ("*", True),
        ('"b"', False),
    ],
)
def test_what_a_reader_has_already(header: str | None, match: bool) -> None:
    assert tags_match(header, '"a"') is match


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes 5-4/10",
        "bytes 0-10/10",
        "bytes */10",
        "bytes 0-9/x",
        "items 0-9/10",
    ],
)
def test_a_content_range_that_cannot_be_true_is_none(header: str | None) -> None:
    assert content_range(header) is None


def test_a_content_range_is_read() -> None:
    told = content_range(" bytes 5-9/10 ")
    assert told is not None
    assert told.part == Part(first=5, end=10)
    assert told.total == 10
    unknown = content_range("bytes 5-9/*")
    assert unknown is not None
    assert unknown.total is None


def test_a_416_tells_the_size() -> None:
    assert unsatisfied_total("bytes */10") == 10
    assert unsatisfied_total("bytes 0-1/10") is None
    assert unsatisfied_total(None) is None
