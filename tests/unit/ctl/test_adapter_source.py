"""What `--source` means: a folder, a repository or a URL, and never one for another."""

from pathlib import Path

import pytest

from controlplane.ctl.adaptersource import source_of
from controlplane.ctl.failures import UsageMistake


@pytest.mark.parametrize(
    "text",
    [
        "https://files.example/loras/sql/",
        "HTTP://files.example/loras/sql",
        "acme/sql-lora",
        "acme/sql-lora@v1.2",
        "acme/sql-lora@refs/pr/1",
        "/srv/loras/sql",
    ],
)
def test_a_url_a_repository_and_a_whole_path_stay_as_they_are(text: str, tmp_path: Path) -> None:
    assert source_of(text, tmp_path) == text


@pytest.mark.parametrize("text", ["./sql", "../here/sql", "sql", "sql/"])
def test_a_relative_path_is_made_whole(text: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "sql").mkdir(parents=True)
    assert source_of(text, here) == str(here / "sql")


def test_the_folder_of_a_person_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source_of("~/sql", Path("/")) == str(tmp_path / "sql")


def test_a_link_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "latest").symlink_to("v1")
    assert source_of("./latest", tmp_path) == str(tmp_path / "latest")


def test_a_folder_that_may_be_a_repository_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "acme" / "sql").mkdir(parents=True)
    with pytest.raises(UsageMistake, match=r"write \./acme/sql for the folder, acme/sql@main"):
        source_of("acme/sql", tmp_path)
    assert source_of("./acme/sql", tmp_path) == str(tmp_path / "acme" / "sql")
    assert source_of("acme/sql@main", tmp_path) == "acme/sql@main"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got nothing"),
        ("ftp://files.example/sql", "ftp is no scheme"),
        ("hf://acme/sql", "OWNER/REPO"),
        ("sql", "no such folder here"),
        ("./sql", "by its whole path"),
        ("a/b/c", "OWNER/REPO"),
        ("./weights", "name the folder that holds it"),
        ("https://anna:secret@files.example/sql", "no name and password"),
        ("https://[files.example/sql", "no address of the web"),
    ],
)
def test_what_can_be_nothing_is_refused_here(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(UsageMistake, match=says):
        source_of(text, tmp_path)
