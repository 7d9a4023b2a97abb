"""Whether bytes are a whole safetensors file: told by its beginning, and by its header once it is there."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.mirror.domain import safetensors
from tests.support.lora import weights_of

WHOLE = weights_of("polite", rank=4, padding=100)


def problem_of(whole: bytes) -> str | None:
    count = min(safetensors.header_bytes(whole), max(len(whole) - 8, 0))
    return safetensors.problem_of(whole[8 : 8 + count], len(whole))


def built(head: Any, tail: int = 0) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(tail)


def tensor(dtype: str, shape: list[int], first: int, behind: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, behind]}


def test_a_whole_file_has_no_problem() -> None:
    assert safetensors.may_begin(WHOLE[:64], len(WHOLE))
    assert problem_of(WHOLE) is None


@given(st.integers(min_value=0, max_value=len(WHOLE) - 1))
def test_no_beginning_of_a_file_passes_for_the_whole(count: int) -> None:
    part = WHOLE[:count]
    assert not safetensors.may_begin(part[:64], len(part)) or problem_of(part) is not None


def test_a_file_that_goes_on_behind_its_tensors_is_refused() -> None:
    assert problem_of(WHOLE + b"x") == "goes on behind its tensors"
    assert problem_of(WHOLE[:-3]) == "lacks its last 3 bytes"


@pytest.mark.parametrize(
    "first",
    [
        b"GGUF" + bytes(60),
        b"PK\x03\x04" + bytes(60),
        b"<!DOCTYPE html>" + bytes(49),
        b"version https://git-lfs.github.com/spec/v1\n" + bytes(20),
        bytes(64),
        struct.pack("<Q", 10) + b"[" + bytes(55),
        struct.pack("<Q", 2**63) + b"{" + bytes(55),
        struct.pack("<Q", safetensors.HEADER_MOST + 1) + b"{" + bytes(55),
        struct.pack("<Q", 1) + b"{" + bytes(55),
    ],
)
def test_what_came_instead_of_tensors_is_known_by_its_first_bytes(first: bytes) -> None:
    assert not safetensors.may_begin(first, 2**40)


def test_fewer_bytes_than_tell_are_no_verdict() -> None:
    assert safetensors.may_begin(WHOLE[:8], len(WHOLE))
    assert not safetensors.may_begin(WHOLE[:8], 8), "it can never hold a header"


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (built(b"{"), "no list of tensors"),
        (built(b"\xff" * 9), "no list of tensors"),
        (built(b"[" * 5000), "no list of tensors"),
        (built({"a": 7}), "no list of tensors"),
        (built({"a": {"dtype": "F32", "shape": [1]}}), "no list of tensors"),
        (built({"a": tensor("F32", ["x"], 0, 4)}, 4), "no list of tensors"),  # type: ignore[list-item]
        (built({}), "no tensor"),
        (built({"__metadata__": {"format": "pt"}}), "no tensor"),
        (built({"a": tensor("F32", [1], 4, 8)}, 8), "not where or as long"),
        (built({"a": tensor("F32", [2], 0, 4)}, 4), "not where or as long"),
        (built({"a": tensor("F32", [-1, -1], 0, 4)}, 4), "not where or as long"),
        (built({"a": tensor("F16", [2], 4, 0)}, 4), "not where or as long"),
        (
            built({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, 4),
            "not where or as long",
        ),
    ],
)
def test_a_header_that_does_not_hold_together_is_refused(whole: bytes, said: str) -> None:
    found = problem_of(whole)
    assert found is not None
    assert said in found


def test_tensors_may_be_empty_packed_and_of_types_to_come() -> None:
    whole = built(
        {
            "none": tensor("F32", [0, 4], 0, 0),
            "half": tensor("F4", [4], 0, 2),
            "new": tensor("Q5_X", [3], 2, 9),
            "one": tensor("BF16", [], 9, 11),
        },
        11,
    )
    assert problem_of(whole) is None


def test_a_tensor_s_name_is_told_on_one_short_line() -> None:
    found = problem_of(built({"a\n" + "x" * 5000: tensor("F32", [2], 0, 4)}, 4))
    assert found is not None
    assert found.isprintable()
    assert len(found) < 200


@given(st.binary(max_size=300))
def test_no_bytes_are_more_than_a_sentence(raw: bytes) -> None:
    assert isinstance(problem_of(raw), str)
