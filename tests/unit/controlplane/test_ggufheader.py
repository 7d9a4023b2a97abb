"""Headers as files have them, and as broken or hostile ones do: a header, more bytes, or a sentence."""

import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.ggufheader import (
    BLOCKS,
    HEADER_BYTES_MAX,
    Header,
    More,
    NotGguf,
    parse,
)
from tests.hub import ggufs

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return U64.pack(len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + U32.pack(kind) + value


def array(key: str, kind: int, count: int, values: bytes = b"") -> bytes:
    return pair(key, 9, U32.pack(kind) + U64.pack(count) + values)


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    lengths = b"".join(U64.pack(length) for length in shape)
    return text(name) + U32.pack(len(shape)) + lengths + U32.pack(kind) + U64.pack(offset)


def file(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: bytes = U32.pack(3),
    claimed: tuple[int, int] | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    counts = claimed or (len(tensors), len(pairs))
    head = magic + version + U64.pack(counts[0]) + U64.pack(counts[1])
    return head + b"".join(pairs) + b"".join(tensors)


def header(data: bytes) -> Header:
    found = parse(data)
    assert isinstance(found, Header), found
    return found


def sentence(data: bytes) -> str:
    found = parse(data)
    assert isinstance(found, NotGguf), found
    return found.sentence


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return ggufs.write(path, "llama").read_bytes()


def test_a_whole_header_is_read_with_what_describes_the_model(written: bytes) -> None:
    found = header(written)
    assert found.version == 3
    assert found.values["general.architecture"] == "llama"
    assert found.values["llama.block_count"] == 4
    assert found.lengths["tokenizer.ggml.tokens"] == ggufs.VOCABULARY
    assert "tokenizer.ggml.tokens" not in found.arrays
    assert found.vocabulary_rows == ggufs.VOCABULARY
    assert found.weights_bytes is not None
    begin = -(-found.header_bytes // 32) * 32
    assert begin + found.weights_bytes == len(written)


def test_the_same_bytes_are_written_each_time(tmp_path: Path, written: bytes) -> None:
    assert ggufs.write(tmp_path / "again.gguf", "llama").read_bytes() == written
    other = ggufs.write(tmp_path / "other.gguf", "llama", seed=1).read_bytes()
    assert other != written
    assert len(other) == len(written)


def test_a_prefix_asks_for_more_and_never_for_too_much(written: bytes) -> None:
    whole = header(written).header_bytes
    for length in range(0, whole, 7):
        found = parse(written[:length])
        assert isinstance(found, More), (length, found)
        assert length < found.at_least_bytes <= whole
    assert header(written[:whole]) == header(written)


def test_it_is_read_in_a_few_steps(written: bytes) -> None:
    length = steps = 0
    while isinstance(found := parse(written[:length]), More):
        length, steps = max(found.at_least_bytes, 2 * length), steps + 1
    assert steps < 16


def test_any_kind_of_bytes_is_taken(written: bytes) -> None:
    assert parse(bytearray(written)) == parse(memoryview(written)) == parse(written)


def test_a_large_vocabulary_is_walked_over_fast() -> None:
    words = b"".join(text(f"word{index}") for index in range(300_000))
    data = file([array("tokenizer.ggml.tokens", 8, 300_000, words)])
    begin = time.process_time()
    assert header(data).lengths == {"tokenizer.ggml.tokens": 300_000}
    assert time.process_time() - begin < 2.0


def test_every_number_keeps_its_value() -> None:
    numbers = [(0, "B", 255), (1, "b", -1), (2, "H", 9), (3, "h", -9), (4, "I", 2**32 - 1)]
    numbers += [(5, "i", -5), (10, "Q", 2**64 - 1), (11, "q", -(2**63))]
    pairs = [
        pair(f"k{kind}", kind, struct.pack(f"<{letter}", value)) for kind, letter, value in numbers
    ]
    pairs += [
        pair("yes", 7, b"\x01"),
        pair("no", 7, b"\x00"),
        pair("f", 12, struct.pack("<d", 0.5)),
    ]
    pairs += [array("list", 5, 3, struct.pack("<3i", 1, -2, 3)), pair("s", 8, text("é"))]
    found = header(file(pairs))
    assert [found.values[f"k{kind}"] for kind, _, _ in numbers] == [
        value for _, _, value in numbers
    ]
    assert (found.values["yes"], found.values["no"], found.values["f"]) == (True, False, 0.5)
    assert found.arrays["list"] == (1, -2, 3)
    assert found.values["s"] == "é"


def test_a_long_text_is_known_to_be_there_and_not_kept() -> None:
    found = header(file([pair("tokenizer.chat_template", 8, text("x" * 100_000))]))
    assert found.values["tokenizer.chat_template"] == ""


def test_sizes_of_blocks_are_those_of_the_format() -> None:
    assert {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()} == BLOCKS


def test_a_tensor_of_an_unknown_type_leaves_the_weights_unknown() -> None:
    tensors = [tensor("a", (32, 2)), tensor("b", (32,), kind=999, offset=256), tensor("c", (8,))]
    found = header(file([], tensors))
    assert (found.tensors, found.weights_bytes) == (3, None)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<!DOCTYPE html>", "it begins with b'<!DO'"),
        (b"PK\x03\x04", "it begins with b'PK"),
        (b"<", "it begins with b'<'"),
        (file(version=U32.pack(1)), "version 1"),
        (file(version=struct.pack(">I", 3)), "big endian"),
        (file(version=struct.pack(">I", 1)), "big endian"),
        (file(version=U32.pack(4)), "version 4 of the format"),
        (file(claimed=(0, 2**40)), "claims 1099511627776 pairs"),
        (file(claimed=(2**40, 0)), "claims 1099511627776 tensors"),
        (file([pair("a", 4, U32.pack(1)), pair("a", 4, U32.pack(1))]), "'a' is there twice"),
        (file([pair("a", 4, U32.pack(1)), array("a", 4, 0)]), "'a' is there twice"),
        (file([pair("a", 13, b"")]), "unknown type 13"),
        (file([array("a", 13, 1)]), "unknown type 13"),
        (file([array("a", 9, 1)]), "'a' is a list of lists"),
        (file([array("a", 8, 2**60)]), "claims 1152921504606846976 entries"),
        (file([pair("a", 7, b"\x02")]), "neither true nor false"),
        (file([pair(b"\xff", 4, U32.pack(1))]), "a key is not UTF-8"),
        (file([U64.pack(2**50)], claimed=(0, 1)), "a key has 1125899906842624 bytes"),
        (file([pair("a", 8, U64.pack(2**50))]), "'a' has 1125899906842624 bytes"),
        (file([array("a", 8, 2, U64.pack(2**50) + U64.pack(0))]), "beyond 256 MiB|more than 256"),
        (file([pair("general.alignment", 4, U32.pack(0))]), "general.alignment is 0"),
        (file([pair("general.alignment", 4, U32.pack(33))]), "general.alignment is 33"),
        (file([pair("general.alignment", 8, text("x"))]), "general.alignment is x"),
        (file([], [tensor("t" * 64, (1,))]), "the name of a tensor has 64 bytes"),
        (file([], [tensor("t", (1,) * 5)]), "has 5 dimensions"),
        (file([], [tensor("t", (8,)), tensor("t", (8,), offset=32)]), "tensor 't' is there twice"),
        (file([], [tensor("t", (8,), offset=32)]), "lies at 32 and not"),
        (file([], [tensor("t", (2**62, 2**62))]), "claims more than"),
        (file([], [tensor("t", (33,), kind=2)]), "not whole blocks of 32"),
    ],
)
def test_a_broken_file_is_told_with_a_sentence(data: bytes, says: str) -> None:
    told = sentence(data)
    assert any(part in told for part in says.split("|")), told


def test_a_header_without_an_end_is_given_up() -> None:
    data = file([array("a", 0, HEADER_BYTES_MAX)])
    assert "more than 256 MiB" in sentence(data)


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(parse(data), Header | More | NotGguf)
    assert isinstance(parse(file([data])), Header | More | NotGguf)


@given(st.data())
def test_no_flipped_byte_raises(data: st.DataObject) -> None:
    good = file(
        [
            pair("general.architecture", 8, text("llama")),
            pair("llama.block_count", 4, U32.pack(2)),
            array("list", 5, 2, struct.pack("<2i", 1, 2)),
            array("tokenizer.ggml.tokens", 8, 3, text("a") + text("b") + text("c")),
        ],
        [tensor("token_embd.weight", (32, 4)), tensor("b", (32, 2), kind=8, offset=512)],
    )
    assert isinstance(parse(good), Header)
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    found = parse(broken)
    assert isinstance(found, Header | More | NotGguf)
    if isinstance(found, More):
        assert found.at_least_bytes > len(broken)
    cut = data.draw(st.integers(0, len(good)))
    assert isinstance(parse(broken[:cut]), Header | More | NotGguf)
