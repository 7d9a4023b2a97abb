"""Where an adapter may come from, which files make one, and what its commit says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.adaptersources import (
    COMMIT_DIGITS,
    SOURCE_BYTES,
    FolderSource,
    RepoSource,
    WebSource,
    choose,
    place_of,
    read_source,
    stamp_in,
    stamp_of,
    sum_of_contents,
    sum_of_web,
    told_by,
)
from controlplane.domain.filesets import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Refusal,
    file_key,
    paths_from,
)
from schemas import codes

BOTH = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("owner/repo", RepoSource(repo="owner/repo")),
        (" owner/repo@v1 ", RepoSource(repo="owner/repo", revision="v1")),
        ("o/r@refs/pr/1", RepoSource(repo="o/r", revision="refs/pr/1")),
        ("/srv/adapters/polite/", FolderSource(path="/srv/adapters/polite")),
        ("//srv//polite", FolderSource(path="/srv/polite")),
        ("/srv/with space", FolderSource(path="/srv/with space")),
        ("https://h.test/a/", WebSource(url="https://h.test/a")),
        ("http://h.test:8000/a/b", WebSource(url="http://h.test:8000/a/b")),
        ("http://[::1]:8000/a", WebSource(url="http://[::1]:8000/a")),
    ],
)
def test_a_source_is_a_folder_a_repository_or_a_url(text: str, source: object) -> None:
    assert read_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "polite",
        "./polite",
        "a/b/c",
        "owner/repo@",
        "owner/repo@a@b",
        "/",
        "/srv/../etc",
        "/srv/./x",
        "/srv/line\nbreak",
        "ftp://h.test/a",
        "file:///srv/a",
        "https://",
        "https://h.test:0/a",
        "https://h.test:x/a",
        "https://h.test/a?revision=1",
        "https://h.test/a#b",
        "https://h.test/a b",
        "https://h.test/ä",
        "/" + "x" * SOURCE_BYTES,
    ],
)
def test_what_is_no_source_is_refused_with_a_sentence(text: str) -> None:
    refusal = read_source(text)
    assert isinstance(refusal, Refusal)
    assert refusal.code == codes.INVALID
    assert refusal.sentence


@pytest.mark.parametrize("text", ["https://h.test/a b", "https://h.test/ä"])
def test_a_url_that_is_to_be_written_with_percent_says_so(text: str) -> None:
    refusal = read_source(text)
    assert isinstance(refusal, Refusal)
    assert "%20" in refusal.sentence


def test_a_query_is_refused_and_not_repeated() -> None:
    for text in ("https://h.test/a?secret", "https://h.test/a b?secret", "https://h.test/ä?secret"):
        refusal = read_source(text)
        assert isinstance(refusal, Refusal)
        assert "secret" not in refusal.sentence


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for text in ("https://me:secret@h.test/a", "https://secret@h.test:bad/a"):
        refusal = read_source(text)
        assert isinstance(refusal, Refusal)
        assert "secret" not in refusal.sentence


@given(st.text(max_size=80))
def test_any_text_is_a_source_or_a_refusal(text: str) -> None:
    found = read_source(text)
    if isinstance(found, Refusal):
        assert found.sentence.isprintable()


@pytest.mark.parametrize(
    ("repo", "place"),
    [("owner/repo", "registry"), ("/srv/a", "folder"), ("https://h.test/a", "web")],
)
def test_where_a_file_comes_from_follows_from_its_repo(repo: str, place: str) -> None:
    assert place_of(repo) == place
    assert ("registry" in told_by(repo)) is (place == "registry")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "has no adapter_config.json and no adapter_model.safetensors"),
        ((ADAPTER_CONFIG,), "has no adapter_model.safetensors"),
        ((ADAPTER_WEIGHTS,), "has no adapter_config.json"),
        ((ADAPTER_CONFIG, "adapter_model.bin"), "may run code"),
        ((ADAPTER_CONFIG, "adapter_model.pt"), "adapter_model.pt"),
        ((ADAPTER_CONFIG, "adapter_model-00001-of-00002.safetensors"), "in several parts"),
        ((ADAPTER_CONFIG, "adapter_model.safetensors.index.json"), "in several parts"),
        (("c/adapter_config.json", f"c/{ADAPTER_WEIGHTS}"), "there is c/adapter_config.json"),
        (("model.safetensors", "config.json"), "has no adapter_config.json"),
    ],
)
def test_scn_d9_what_is_no_adapter_is_refused_by_its_files(
    names: tuple[str, ...], said: str
) -> None:
    refusal = choose("o/r", names)
    assert refusal is not None
    assert refusal.code == codes.NOT_AN_ADAPTER
    assert refusal.sentence.count("o/r")
    assert said in refusal.sentence


def test_a_pickle_beside_the_weights_is_passed_over() -> None:
    assert choose("o/r", (*BOTH, "adapter_model.bin", "README.md", "c/adapter_config.json")) is None


def test_the_weights_name_the_set_and_the_configuration_lies_beside_them() -> None:
    assert paths_from(ADAPTER_WEIGHTS) == (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    assert paths_from(f"a/b/{ADAPTER_WEIGHTS}") == (
        f"a/b/{ADAPTER_WEIGHTS}",
        f"a/b/{ADAPTER_CONFIG}",
    )
    assert paths_from(ADAPTER_CONFIG) == (ADAPTER_CONFIG,)
    assert paths_from(f"my_{ADAPTER_WEIGHTS}") == (f"my_{ADAPTER_WEIGHTS}",)


def test_other_contents_are_another_commit_and_other_keys() -> None:
    one, same, other = (sum_of_contents("a" * 64, w * 64) for w in ("b", "b", "c"))
    assert one == same != other
    assert sum_of_contents("c" * 64, "b" * 64) != one
    assert len(one) == COMMIT_DIGITS
    assert file_key("/srv/a", one, ADAPTER_WEIGHTS) != file_key("/srv/a", other, ADAPTER_WEIGHTS)


def test_a_url_s_commit_holds_what_its_server_said_of_the_weights() -> None:
    stamp = stamp_of('"v1"', "", 10)
    commit = sum_of_web("a" * 64, stamp)
    assert len(commit) == COMMIT_DIGITS
    assert stamp_in(commit) == stamp
    assert stamp_of('"v2"', "", 10) != stamp
    assert stamp_of('"v1"', "", 11) != stamp
    assert stamp_of('W/"v1"', "yesterday", 10) == stamp, "a tag comes before a date"
    assert stamp_of("", "yesterday", 10) != stamp_of("", "today", 10)
    assert sum_of_web("b" * 64, stamp) != commit
