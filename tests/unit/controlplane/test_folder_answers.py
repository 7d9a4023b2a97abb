"""A file of a folder as an answer: the whole, the rest of it, and what is not given."""

import os
from pathlib import Path

import pytest

from controlplane.mirror.connecting import Line, Stopped
from controlplane.mirror.folder import FolderAnswer, names_in, opened

CONTENT = bytes(range(200))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "w").write_bytes(CONTENT)
    return tmp_path


def asked(folder: Path, name: str = "w", **headers: str) -> tuple[FolderAnswer, bytes]:
    """The answer, closed, and its body."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    answer = FolderAnswer(str(folder), name, named, Line())
    body = bytearray()
    view = memoryview(bytearray(64))
    while count := answer.read_into(view):
        body += view[:count]
    answer.close()
    return answer, bytes(body)


def test_the_whole_file_comes_with_its_length_and_a_tag(folder: Path) -> None:
    answer, body = asked(folder)
    assert (answer.status, body) == (200, CONTENT)
    assert answer.headers["content-length"] == "200"
    assert answer.headers["etag"].startswith('"')
    assert answer.end_is_told
    assert not answer.redirected
    assert asked(folder)[0].headers == answer.headers


def test_the_rest_comes_from_the_byte_that_was_asked_for(folder: Path) -> None:
    answer, body = asked(folder, range="bytes=150-")
    assert (answer.status, body) == (206, CONTENT[150:])
    assert answer.headers["content-range"] == "bytes 150-199/200"
    assert answer.headers["content-length"] == "50"
    behind, nothing = asked(folder, range="bytes=200-")
    assert (behind.status, nothing) == (416, b"")
    assert behind.headers["content-range"] == "bytes */200"


def test_of_another_version_the_whole_comes(folder: Path) -> None:
    tag = asked(folder)[0].headers["etag"]
    assert asked(folder, range="bytes=150-", if_range=tag)[0].status == 206
    (folder / "new").write_bytes(bytes(200))
    (folder / "new").replace(folder / "w")
    answer, body = asked(folder, range="bytes=150-", if_range=tag)
    assert (answer.status, body) == (200, bytes(200))


def test_a_file_cut_while_it_is_read_ends_early(folder: Path) -> None:
    answer = FolderAnswer(str(folder), "w", {}, Line())
    os.truncate(folder / "w", 10)
    view = memoryview(bytearray(64))
    assert answer.read_into(view) == 10
    assert answer.read_into(view) == 0, "who reads it compares its size"
    answer.close()


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("none", 404, "none is not there"),
        ("link", 403, "link is a link"),
        ("dangling", 403, "dangling is a link"),
        ("pipe", 403, "pipe is no regular file"),
        ("sub", 403, "sub is no regular file"),
    ],
)
def test_what_is_no_plain_file_is_not_given_and_why_is_told(
    folder: Path, name: str, status: int, why: str
) -> None:
    (folder / "link").symlink_to(folder / "w")
    (folder / "dangling").symlink_to(folder / "none")
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    answer, body = asked(folder, name)
    assert (answer.status, body) == (status, b"")
    assert why in answer.why
    assert asked(folder / "w")[0].why.endswith("is no folder")
    assert asked(folder / "none")[0].status == 404


def test_a_fetch_that_was_told_to_end_reads_no_further(folder: Path) -> None:
    line = Line()
    answer = FolderAnswer(str(folder), "w", {}, line)
    line.stop()
    with pytest.raises(Stopped):
        answer.read_into(memoryview(bytearray(8)))
    answer.close()
    with pytest.raises(Stopped):
        FolderAnswer(str(folder), "w", {}, line)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    (folder / "sub").mkdir()
    for name in ("w", "none", "sub"):
        asked(folder, name)
    links = Path("/proc/self/fd")
    held = [os.path.realpath(link) for link in links.iterdir()]
    assert not [path for path in held if path.startswith(str(folder))]


def test_of_an_endless_folder_only_so_many_names_are_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        (folder / str(n)).write_bytes(b"")
    with opened(str(folder)) as handle:
        assert len(names_in(handle)) == 6
        monkeypatch.setattr("controlplane.mirror.folder.NAMES_MOST", 2)
        assert len(names_in(handle)) == 2
