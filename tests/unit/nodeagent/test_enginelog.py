"""The bounded log and its reader: offsets hold over a turn, secrets do not get through."""

import itertools
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.enginelog import HIDDEN, LogWriter, Redactor, last_line, read_part

PIECES = st.lists(st.binary(max_size=700), max_size=40)


@given(pieces=PIECES, asked=st.integers(0, 30_000), size=st.integers(1, 5000))
@settings(deadline=None)
def test_what_is_read_is_what_was_written_there(
    tmp_path_factory, pieces: list[bytes], asked: int, size: int
) -> None:
    folder = str(tmp_path_factory.mktemp("log"))
    writer = LogWriter(folder, 1024)
    for piece in pieces:
        writer.write(piece)
    whole = b"".join(pieces)
    part = read_part(folder, asked, size)
    assert part.end == len(whole)
    assert part.content == whole[part.offset : part.offset + size]
    assert part.offset >= min(asked, len(whole))
    # Never less than the last full file is kept, never more than two.
    kept = read_part(folder, 0, 1 << 20)
    assert min(len(whole), 1024) <= len(kept.content) <= 2048
    tail = read_part(folder, None, size).content
    assert kept.content.endswith(tail)
    assert len(tail) == min(size, len(kept.content))


SECRET = b"abcabd-0123"


@given(
    parts=st.lists(
        st.sampled_from([SECRET, b"abc", b"a", b"abcabd-012", b"\n", b"x"]), max_size=12
    ),
    cuts=st.lists(st.integers(0, 140), max_size=12),
)
def test_a_secret_is_hidden_wherever_the_stream_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(parts)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    redactor = Redactor([SECRET, b"short"])
    shown = b"".join(redactor.clean(stream[begin:end]) for begin, end in itertools.pairwise(edges))
    assert shown + redactor.rest() == stream.replace(SECRET, HIDDEN)


def test_without_secrets_nothing_is_held_back() -> None:
    assert Redactor([b"", b"abc"]).clean(b"ab abc") == b"ab abc"


def test_a_secret_held_by_another_is_hidden_as_a_whole() -> None:
    redactor = Redactor([b"secret", b"secret-longer"])
    assert redactor.clean(b"x secret-longer y\n") == b"x [hidden] y\n"


def test_a_disk_that_fails_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path / "nowhere"), 1024)
    writer.write(b"lost\n" * 1000)
    writer.write(b"said\n")
    assert writer.last_line() == "said"


def test_last_line_prefers_the_line_that_tells() -> None:
    log = b"I loading\nE load: unknown architecture 'x'\nE init: exiting\nI cleaning up\n\n  \n"
    assert last_line(log) == "I cleaning up"
    assert last_line(log, ("E ",)) == "E init: exiting"
    assert last_line(log, ("unknown", "E ")) == "E load: unknown architecture 'x'"
    assert last_line(log, ("absent",)) == "I cleaning up"
    assert last_line(b"\n\n") == ""
    assert last_line(b"progress 1\rprogress 2\r") == "progress 2"
    assert len(last_line(b"x" * 5000)) == 500
