"""Catalog files: what is no catalog is refused with file and line; a problem's path leads to its line."""

from pathlib import Path

import pytest

from controlplane.ctl.entryfile import parse_entries, read_entries
from controlplane.ctl.failures import EXIT_USAGE, UsageMistake
from schemas.commands import Problem

CATALOG = """\
# two models
- name: a
  scaling: {min: 0,
            max: 1}
  profiles:
    - name: cpu
      engine: llamacpp
      memory: lots
      args: ["-c",
             "x"]
- name: b
  aliases:
    - one
    - two
  profiles: [{name: p, engine: command}]
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("[0]", 2),
        ("[0].name", 2),
        ("[0].scaling", 3),
        ("[0].scaling.max", 4),
        ("[0].profiles", 5),
        ("[0].profiles[0]", 6),
        ("[0].profiles[0].memory", 8),
        ("[0].profiles[0].args[0]", 9),
        ("[0].profiles[0].args[1]", 10),
        ("[1].aliases[1]", 14),
        ("[1].profiles[0].engine", 15),
        # What is missing is reported where it should have been.
        ("[1].source", 11),
        ("[0].profiles[0].nothing.of.it", 6),
        ("[0].profiles[7].name", 5),
        ("[9]", 2),
        ("", 2),
    ],
)
def test_a_path_leads_to_its_line(path: str, line: int) -> None:
    assert parse_entries(CATALOG, "c.yaml").place_of(path) == f"c.yaml:{line}"


def test_a_file_of_one_entry_is_read_without_a_list() -> None:
    found = parse_entries("name: a\nprofiles:\n  - name: p\n    memory: x\n", "one.yaml")
    assert found.entries == [{"name": "a", "profiles": [{"name": "p", "memory": "x"}]}]
    assert found.place_of("[0].profiles[0].memory") == "one.yaml:4"


def test_a_problem_is_explained_for_a_person_and_an_editor() -> None:
    problem = Problem(path="[0].profiles[0].memory", sentence="expected a size")
    assert parse_entries(CATALOG, "c.yaml").explain(problem) == (
        "c.yaml:8: [0].profiles[0].memory: expected a size"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- name: a\n  source: /x\n  name: b\n", "f.yaml:3: the key 'name' is given twice"),
        (
            "- name: a\n  scaling:\n    min: 0\n    min: 1\n",
            "f.yaml:4: the key 'min' is given twice",
        ),
        ("- name: [a\n", "f.yaml:2: "),
        ("- name: a\n\tx: 1\n", "f.yaml:2: "),
        ("", "f.yaml: the file is empty"),
        ("# nothing\n", "f.yaml: the file is empty"),
        ("- a\n", "f.yaml:1: [0]: expected an entry"),
        ("- name: a\n- 7\n", "f.yaml:2: [1]: expected an entry"),
        ("just text\n", "f.yaml:1: [0]: expected an entry"),
        ("- name: a\n  description: 2026-01-01\n", "f.yaml:2: [0].description: expected a text"),
        ("- name: a\n  env: {1: x}\n", "f.yaml:2: [0].env.1: expected a field name as text"),
        ("- name: !!python/object:os.system x\n", "f.yaml:1: "),
    ],
)
def test_what_is_no_catalog_is_refused_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(UsageMistake) as caught:
        parse_entries(text, "f.yaml")
    assert str(caught.value).startswith(expected)
    assert caught.value.code == EXIT_USAGE


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "name: &n [*n]\n", "- " * 100 + "x\n"])
def test_a_few_lines_that_stand_for_too_much_are_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match=r"f\.yaml:"):
        parse_entries(text, "f.yaml")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageMistake, match="No such file"):
        read_entries(tmp_path / "none.yaml")
    (tmp_path / "latin").write_bytes(b"- name: \xff\n")
    with pytest.raises(UsageMistake, match="not UTF-8"):
        read_entries(tmp_path / "latin")
    (tmp_path / "huge").write_bytes(b"#" * (5 * 1024 * 1024))
    with pytest.raises(UsageMistake, match="larger than 4 MiB"):
        read_entries(tmp_path / "huge")
