"""File sets of any repository, however its files are named."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.filesets import Refusal, files_of, group, missing, paths_of, pick
from controlplane.domain.repo import Repo, RepoFile

WORDS = st.sampled_from(
    [
        "m", "Model", "7B", "Q4_K_M", "q4_k_m", "UD-Q4_K_M", "IQ3_XXS", "Q8_0", "BF16", "mmproj", "mtp",
        "imatrix", "draft", "00001-of-00002", "00002-of-00002", "00001-of-00001", "00003-of-00002", "gguf",
    ]
)  # fmt: skip
STEMS = st.lists(st.lists(WORDS, min_size=1, max_size=3).map("-".join), min_size=1, max_size=2)
PATHS = st.one_of(
    st.builds(
        lambda parts, ending: "/".join(parts) + ending,
        STEMS,
        st.sampled_from([".gguf", ".gguf", ".gguf", ".GGUF", ".gguf.gguf", ".txt", ""]),
    ),
    st.text(max_size=12).map(lambda text: f"{text}.gguf"),
)
FILES = st.lists(
    st.builds(
        RepoFile,
        path=PATHS,
        bytes=st.integers(0, 2**40),
        sha256=st.sampled_from([None, "ab" * 32]),
    ),
    max_size=8,
)
ASKED = st.one_of(st.none(), WORDS, STEMS.map("/".join), st.text(max_size=8))


def repo_of(files: list[RepoFile]) -> Repo:
    return Repo(id="owner/name", commit="c", files=tuple(files))


@given(files=FILES, quant=ASKED, file=ASKED, data=st.data())
def test_the_order_of_the_files_does_not_matter(
    files: list[RepoFile], quant: str | None, file: str | None, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(files))
    assert group(repo_of(files)) == group(repo_of(shuffled))
    one = pick(repo_of(files), quant=quant, file=file)
    assert one == pick(repo_of(shuffled), quant=quant, file=file)


@given(files=FILES, quant=ASKED, file=ASKED)
def test_what_is_picked_is_a_whole_set_of_the_repository(
    files: list[RepoFile], quant: str | None, file: str | None
) -> None:
    repo = repo_of(files)
    found = pick(repo, quant=quant, file=file)
    if isinstance(found, Refusal):
        assert found.sentence
        assert found.sentence.startswith("owner/name ")
        return
    assert found in group(repo)
    assert missing(repo, found) == ()
    whole = files_of(repo, found)
    assert tuple(one.path for one in whole) == paths_of(found)
    assert len(whole) == found.shards
    assert sum(one.bytes for one in whole) == found.bytes
    assert found.first == whole[0].path


@given(files=FILES)
def test_every_name_means_one_set_and_every_file_is_in_one(files: list[RepoFile]) -> None:
    repo = repo_of(files)
    sets = group(repo)
    assert len({one.name for one in sets}) == len(sets)
    members = [file.path for one in sets for file in files_of(repo, one)]
    assert len(set(members)) == len(members)
    for one in sets:
        if not missing(repo, one):
            assert pick(repo, quant=None, file=one.name) == one
            for path in paths_of(one):
                named = [other for other in sets if other.name == path]
                assert pick(repo, quant=None, file=path) == (named[0] if named else one)


@given(files=FILES)
def test_no_set_has_a_side_file(files: list[RepoFile]) -> None:
    for one in group(repo_of(files)):
        for path in paths_of(one):
            assert "mmproj" not in path.lower()
            assert "imatrix" not in path.lower()
            assert path.lower().endswith(".gguf")
