"""docs/requirements.md names every number once and exactly the tests that carry it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = load_generate()
TEXT = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
ROWS = {label: (sentence, proof) for label, sentence, proof in generate.ROW.findall(TEXT)}
LABELS = [label for label in ROWS if generate.RANGE.fullmatch(label)]

EXPECTED = [
    *(f"A{n}" for n in range(33)),
    *(f"X{n}" for n in range(1, 9)),
    *(f"B{n}" for n in range(1, 60)),
    *(f"BUG-B{n}" for n in range(1, 9)),
    *(f"C{n}" for n in range(1, 69)),
    *(f"D{n}" for n in range(1, 20)),
    *(f"S-A{n}" for n in range(1, 17)),
    *(f"S-B{n}" for n in range(1, 15)),
    *(f"S-C{n}" for n in range(1, 13)),
    *(f"S-D{n}" for n in range(1, 10)),
    *(f"S-E{n}" for n in range(1, 7)),
    *(f"L{n}" for n in range(1, 33)),
    *(f"I{n}" for n in range(1, 12)),
]


@pytest.mark.parametrize("number", EXPECTED)
def test_every_number_has_exactly_one_row(number: str) -> None:
    assert len([label for label in LABELS if generate.covers(label, number)]) == 1


def test_every_row_is_a_sentence_of_its_own() -> None:
    sentences = [ROWS[label][0] for label in LABELS]
    assert len(set(sentences)) == len(sentences)
    assert all(sentence.endswith(".") for sentence in sentences)


def test_every_numbered_test_stands_in_the_row_of_its_number() -> None:
    for number, names in generate.numbered_tests(ROOT / "tests").items():
        (label,) = [label for label in LABELS if generate.covers(label, number)]
        for name in names:
            assert f"`{name}`" in ROWS[label][1], f"{name} is not in row {label}: run `make docs`"


def test_every_test_in_the_table_exists(request: pytest.FixtureRequest) -> None:
    known = {n for names in generate.numbered_tests(ROOT / "tests").values() for n in names}
    known |= {getattr(item, "originalname", item.name) for item in request.session.items}
    named = {
        part.strip("`, ")
        for label in LABELS
        for part in ROWS[label][1].split()
        if part.startswith("`test_")
    }
    assert named <= known


@pytest.mark.parametrize("label", LABELS)
def test_every_row_has_a_test_or_says_why_not(label: str) -> None:
    proof = ROWS[label][1].strip()
    assert proof, f"{label} has no proof"
    assert proof != generate.MISSING, f"{label} has no test yet"


def test_the_scan_reads_names_as_the_rules_spell_them(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_req_a12_waits():\n def test_scn_b03_x(self):\nasync def test_log_05_y(\n"
        "def test_inv_3_z(a: int) -> None:\ndef test_other():\ndef test_req_x2_q():\n"
        "def test_req_bugb4_w():\n"
    )
    assert generate.numbered_tests(tmp_path) == {
        "A12": ["test_req_a12_waits"],
        "S-B3": ["test_scn_b03_x"],
        "L5": ["test_log_05_y"],
        "I3": ["test_inv_3_z"],
        "X2": ["test_req_x2_q"],
        "BUG-B4": ["test_req_bugb4_w"],
    }


def test_a_row_loses_a_test_that_is_gone_and_keeps_a_reason(tmp_path: Path) -> None:
    text = "| A1 | One. | `test_req_a01_gone` |\n| A2 | Two. | no need |\n| B1…9 | Later. |  |\n"
    assert generate.requirements(text, tmp_path) == (
        "| A1 | One. | **no test yet** |\n| A2 | Two. | no need |\n"
        "| B1…9 | Later. | a later version |\n"
    )
