"""The architectures of a llama.cpp are read off the table of names in its library."""

from pathlib import Path

from nodeagent.drivers.architectures import architectures_in, architectures_of

NAMES = [f"arch{n}" for n in range(60)]


def library(
    *texts: str, before: bytes = b"\x00\x01\xff", after: bytes = b"Not-a-name\x00"
) -> bytes:
    return before + b"\0" + b"".join(text.encode() + b"\0" for text in texts) + after


def test_every_text_of_the_table_is_a_name() -> None:
    data = library(*NAMES[:30], "granitehybrid", *NAMES[30:])
    assert architectures_in(data, ()) == tuple(sorted([*NAMES, "granitehybrid"]))


def test_names_the_linker_merged_are_known_by_their_end() -> None:
    data = library("nomic-bert", "granitehybrid", *NAMES) + b"PROJECTOR gemma3\0"
    found = architectures_in(data, {"bert", "gemma3", "qwen2"})
    assert {"bert", "nomic-bert", "gemma3"} <= set(found)
    assert "qwen2" not in found


def test_a_lone_mention_of_a_name_is_no_table() -> None:
    assert architectures_in(library("granitehybrid", "other"), {"other"}) == ()
    both = library("granitehybrid") + library(*NAMES, "granitehybrid")
    assert set(architectures_in(both, ())) == {*NAMES, "granitehybrid"}


def test_another_anchor_leads_to_the_table_too() -> None:
    assert "starcoder2" in architectures_in(library(*NAMES, "starcoder2"), ())


def test_a_projector_is_no_model() -> None:
    assert "clip" not in architectures_in(library("clip", *NAMES, "command-r"), {"clip"})


def test_files_without_a_table_tell_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_bytes(b"nothing here")
    files = [tmp_path / "absent", tmp_path / "empty", tmp_path / "text", tmp_path]
    assert architectures_of(files, {"llama"}) == ()
    (tmp_path / "lib").write_bytes(library(*NAMES, "minicpm3"))
    assert "minicpm3" in architectures_of([*files, tmp_path / "lib"], ())
