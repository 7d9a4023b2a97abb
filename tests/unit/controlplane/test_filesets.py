"""Which files make one model, and which set is meant: by value, from names alone."""

import hashlib

import pytest

from controlplane.domain.filesets import (
    NAMES_SHOWN,
    Refusal,
    file_key,
    files_of,
    group,
    missing,
    paths_from,
    paths_of,
    pick,
    suggest_name,
)
from controlplane.domain.repo import Repo, RepoFile
from schemas.job import FileSet

SHA = "ab" * 32


def repo_of(*paths: str, repo_id: str = "owner/Model-GGUF") -> Repo:
    files = tuple(RepoFile(path=path, bytes=10, sha256=SHA) for path in paths)
    return Repo(id=repo_id, commit="c0ffee", files=files)


def shards(stem: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1))


def picked(repo: Repo, *, quant: str | None = None, file: str | None = None) -> FileSet:
    found = pick(repo, quant=quant, file=file)
    assert isinstance(found, FileSet), found
    return found


def refused(repo: Repo, *, quant: str | None = None, file: str | None = None) -> Refusal:
    found = pick(repo, quant=quant, file=file)
    assert isinstance(found, Refusal), found
    return found


def names(repo: Repo) -> list[str]:
    return [one.name for one in group(repo)]


def test_req_c22_only_gguf_files_count_and_neither_projectors_nor_matrices() -> None:
    repo = repo_of(
        "README.md",
        "model.safetensors",
        "a-Q4_K_M.GGUF",
        "mmproj-a-f16.gguf",
        "MMPROJ/a-Q8_0.gguf",
        "a.imatrix.gguf",
        "iMatrix/b/a-Q8_0.gguf",
        "a-Q4_K_M.gguf.part1of2",
    )
    assert names(repo) == ["a-Q4_K_M"]


@pytest.mark.parametrize(
    "side",
    [
        "mmproj-model-f16.gguf",
        "model-mmproj.gguf",
        "model.imatrix.gguf",
        "imatrix/model-Q4_K_M.gguf",
        "mtp-model-Q4_K_M.gguf",
        "MTP/model-Q4_K_M.gguf",
        "model-Q4_K_M-mtp.gguf",
        "model_draft_Q4_K_M.gguf",
        "draft/model-Q4_K_M.gguf",
        "model-eagle3-Q4_K_M.gguf",
    ],
)
def test_scn_c1_side_files_never_count_as_the_model(side: str) -> None:
    assert refused(repo_of(side)).code == "no_gguf"
    assert picked(repo_of(side, "model-Q4_K_M.gguf")).first == "model-Q4_K_M.gguf"
    # A word that only contains one of these is another word.
    assert names(repo_of("smtp-overdraft.gguf")) == ["smtp-overdraft"]


def test_a_repository_of_draft_models_alone_has_what_its_name_says() -> None:
    repo = repo_of("Model-DRAFT-0.6B-Q4_K_M.gguf", repo_id="owner/Model-DRAFT-0.6B-GGUF")
    assert picked(repo).name == "Model-DRAFT-0.6B-Q4_K_M"
    built_in = repo_of(
        *("X-7B-MTP-Q4_K_M.gguf", "mtp-X-7B-MTP-Q4_K_M.gguf", "X-7B-Q4_K_M.gguf"),
        repo_id="owner/X-7B-MTP-GGUF",
    )
    assert names(built_in) == ["X-7B-MTP-Q4_K_M", "X-7B-Q4_K_M"]
    both = repo_of("mtp-x-Q4_K_M.gguf", "x-Q4_K_M.gguf", repo_id="owner/x-MTP-GGUF")
    assert names(both) == ["x-Q4_K_M"]


def test_scn_c2_a_folder_that_is_named_as_the_quant_counts() -> None:
    repo = repo_of(*shards("Q4_K_M/model", 3), *shards("Q8_0/model", 2), *shards("BF16/model", 4))
    found = picked(repo, quant="q8_0")
    assert (found.name, found.first, found.shards, found.quant) == (
        "Q8_0/model",
        "Q8_0/model-00001-of-00002.gguf",
        2,
        "Q8_0",
    )
    assert picked(repo, quant="bf16").shards == 4


def test_scn_c3_a_projector_beside_the_folder_of_the_model_changes_nothing() -> None:
    repo = repo_of("mmproj-F16.gguf", *shards("UD-Q4_K_XL/model-UD-Q4_K_XL", 2))
    found = picked(repo, quant="UD-Q4_K_XL")
    assert found.first == "UD-Q4_K_XL/model-UD-Q4_K_XL-00001-of-00002.gguf"
    assert names(repo) == ["UD-Q4_K_XL/model-UD-Q4_K_XL"]


def test_scn_c4_a_prefixed_quant_is_taken_when_it_is_the_only_one() -> None:
    only = repo_of("model-UD-Q4_K_XL.gguf", "model-Q8_0.gguf")
    assert picked(only, quant="Q4_K_XL").quant == "UD-Q4_K_XL"
    two = repo_of("model-UD-Q4_K_XL.gguf", "model-i1-Q4_K_XL.gguf")
    refusal = refused(two, quant="Q4_K_XL")
    assert refusal.code == "ambiguous"
    assert "model-UD-Q4_K_XL, model-i1-Q4_K_XL" in refusal.sentence


def test_scn_c5_a_missing_shard_is_refused_and_the_first_shard_is_the_source() -> None:
    whole = shards("model-Q4_K_M", 3)
    assert picked(repo_of(*whole)).first == whole[0]
    for absent in whole:
        refusal = refused(repo_of(*(path for path in whole if path != absent)))
        assert refusal.code == "shard_missing"
        assert absent in refusal.sentence
        assert "1 of the 3 shards" in refusal.sentence


def test_a_complete_copy_is_taken_before_one_that_lacks_a_shard() -> None:
    repo = repo_of("a/model-Q4_K_M-00001-of-00002.gguf", *shards("b/model-Q4_K_M", 3))
    assert picked(repo).name == "b/model-Q4_K_M"


def test_req_c23_shards_make_one_set() -> None:
    repo = repo_of(*shards("big-Q4_K_M", 3), "small-Q8_0.gguf")
    big, small = group(repo)
    assert (big.name, big.first, big.shards, big.bytes, big.published) == (
        "big-Q4_K_M",
        "big-Q4_K_M-00001-of-00003.gguf",
        3,
        30,
        3,
    )
    assert (small.name, small.first, small.shards) == ("small-Q8_0", "small-Q8_0.gguf", 1)
    assert paths_of(big) == shards("big-Q4_K_M", 3)
    assert [file.path for file in files_of(repo, big)] == list(paths_of(big))
    assert paths_of(small) == ("small-Q8_0.gguf",)


def test_a_number_that_no_shard_can_have_is_part_of_a_name() -> None:
    odd = ("m-00004-of-00003.gguf", "m-00000-of-00000.gguf", "m-1-of-2.gguf")
    assert names(repo_of(*odd)) == sorted(path[: -len(".gguf")] for path in odd)
    for one in group(repo_of(*odd)):
        assert one.shards == 1
        assert paths_of(one) == (one.first,)


def test_a_set_of_one_shard_keeps_the_number_in_its_path() -> None:
    (one,) = group(repo_of("m-Q4_K_M-00001-of-00001.gguf"))
    assert (one.name, one.first, one.shards) == ("m-Q4_K_M", "m-Q4_K_M-00001-of-00001.gguf", 1)
    assert paths_of(one) == (one.first,)


def test_names_are_unique_where_a_split_and_a_joined_copy_lie_side_by_side() -> None:
    repo = repo_of("m-Q4_K_M.gguf", *shards("m-Q4_K_M", 2))
    assert names(repo) == ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M.gguf"]
    assert picked(repo).first == "m-Q4_K_M.gguf"
    assert picked(repo, file="m-Q4_K_M-00001-of-00002.gguf").shards == 2


def test_files_outside_lfs_are_counted_as_not_published() -> None:
    files = (
        RepoFile(path="m-Q4_K_M-00001-of-00002.gguf", bytes=3, sha256=SHA),
        RepoFile(path="m-Q4_K_M-00002-of-00002.gguf", bytes=4),
    )
    (one,) = group(Repo(id="o/m", commit="c", files=files))
    assert (one.bytes, one.published) == (7, 1)


def test_req_c24_a_repository_without_gguf_files_is_told_of_in_one_sentence() -> None:
    refusal = refused(repo_of("model.safetensors", "mmproj-a.gguf"))
    assert refusal == Refusal(
        code="no_gguf",
        sentence="owner/Model-GGUF has no GGUF files; the nodes run llama.cpp, which needs one",
    )


def test_req_c25_a_file_is_named_by_its_set_or_by_any_path_of_it() -> None:
    repo = repo_of(*shards("Q8_0/m", 2), "m-Q4_K_M.gguf", "mmproj-m.gguf")
    for name in ("Q8_0/m", "Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"):
        # The quant is not looked at, not even one that there is not.
        assert picked(repo, file=name, quant="Q2_K").name == "Q8_0/m"
    for other in ("q8_0/m", "m", "Q8_0", "mmproj-m.gguf", "Q8_0/m-00003-of-00002.gguf", ""):
        assert refused(repo, file=other).code == "no_such_file"


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("m-Q4_K_M.gguf", "q4_k_m"),
        ("m.q4_k_m.gguf", "Q4_K_M"),
        ("m_Q4_K_M.gguf", "Q4_K_M"),
        ("m-Q4_K_M-imat.gguf", "Q4_K_M"),
        ("m-Q4_K_M_v2.gguf", "Q4_K_M"),
        ("m-IQ3_XXS.gguf", "iq3_xxs"),
        ("m-IQ4_NL.gguf", "IQ4_NL"),
        ("m-UD-IQ1_S.gguf", "UD-IQ1_S"),
        ("m-UD-IQ1_S.gguf", "IQ1_S"),
        ("m.i1-Q4_K_M.gguf", "Q4_K_M"),
        ("m-BF16.gguf", "bf16"),
        ("m-f16.gguf", "F16"),
        ("m-MXFP4.gguf", "MXFP4"),
        ("m-mxfp4_moe.gguf", "MXFP4_MOE"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("m-Q6_K.gguf", "Q6_K"),
        ("m-Q3_K_XL.gguf", " Q3_K_XL "),
        ("Q5_K_S/m.gguf", "Q5_K_S"),
        ("m-instruct.gguf", "Instruct"),
        ("m-UD-IQ2_M-heretic.gguf", "heretic"),
        ("m-I-Compact.gguf", "I-COMPACT"),
    ],
)
def test_req_c26_a_quant_is_matched_as_a_whole_word_in_any_case(path: str, quant: str) -> None:
    assert picked(repo_of(path, "other-Q2_K.gguf"), quant=quant).first == path


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("m-Q4_K_M.gguf", "Q4_K"),
        ("m-Q4_K_M.gguf", "Q4"),
        ("m-Q4_K_M.gguf", "K_M"),
        ("m-Q4_K_M.gguf", "4_K_M"),
        ("m-IQ4_XS.gguf", "Q4_XS"),
        ("m-BF16.gguf", "F16"),
        ("m-Q4_0_4_4.gguf", "Q4_0"),
        ("m-Q4_K_M_L.gguf", "Q4_K_M"),
        ("m-Q4_K_M.gguf", "UD-Q4_K_M"),
        ("mQ4_K_M.gguf", "Q4_K_M"),
        ("F16/m-Q8_0.gguf", "F16"),
        ("m-Q4_K_M.gguf", ""),
        ("m-Q4_K_M.gguf", "---"),
    ],
)
def test_req_c26_a_part_of_a_word_is_no_match(path: str, quant: str) -> None:
    assert refused(repo_of(path), quant=quant).code == "no_such_file"


def test_req_c27_of_copies_of_one_quant_the_fewest_shards_win() -> None:
    repo = repo_of(*shards("Q4_K_M/m-Q4_K_M", 3), *shards("two/m-Q4_K_M", 2), "m-Q4_K_M.gguf")
    assert picked(repo).first == "m-Q4_K_M.gguf"
    assert picked(repo_of(*shards("Q4_K_M/m", 3), *shards("x/m-Q4_K_M", 2))).shards == 2
    even = repo_of("b/m-Q4_K_M.gguf", "a/m-Q4_K_M.gguf")
    assert picked(even).first == "a/m-Q4_K_M.gguf"


def test_req_c27_the_exact_quant_wins_over_a_prefixed_one() -> None:
    repo = repo_of("m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf")
    assert picked(repo, quant="Q4_K_M").first == "m-Q4_K_M.gguf"
    assert picked(repo, quant="ud-q4_k_m").first == "m-UD-Q4_K_M.gguf"


def test_req_c27_two_models_of_one_quant_are_no_copies_of_each_other() -> None:
    refusal = refused(repo_of("m-1.5B-Q4_K_M.gguf", "m-7B-Q4_K_M.gguf"))
    assert refusal.code == "ambiguous"
    assert refusal.sentence == (
        'owner/Model-GGUF has several files matching "Q4_K_M": m-1.5B-Q4_K_M, m-7B-Q4_K_M; '
        "name one of them with --file"
    )


def test_a_word_that_several_names_have_is_not_guessed_at() -> None:
    repo = repo_of("m-Compact.gguf", "m-I-Compact.gguf")
    assert refused(repo, quant="Compact").code == "ambiguous"
    assert picked(repo, quant="I-Compact").name == "m-I-Compact"


def test_req_c28_no_match_names_what_there_is() -> None:
    repo = repo_of("a-Q8_0.gguf", "b-Q6_K.gguf", *shards("F16/c", 2))
    has = "it has: F16/c, a-Q8_0, b-Q6_K"
    assert refused(repo, quant="Q2_K").sentence == (
        f'owner/Model-GGUF has no file matching "Q2_K"; {has}'
    )
    assert refused(repo, file="x.gguf", quant="Q8_0").sentence == (
        f'owner/Model-GGUF has no file matching "x.gguf"; {has}'
    )
    # Neither given: what is looked for then is named.
    assert refused(repo).sentence == f'owner/Model-GGUF has no file matching "Q4_K_M"; {has}'


def test_a_sentence_names_a_bounded_number_of_sets() -> None:
    many = repo_of(*(f"m{index:03d}-Q8_0.gguf" for index in range(NAMES_SHOWN + 5)))
    assert refused(many).sentence.endswith(f"m{NAMES_SHOWN - 1:03d}-Q8_0 and 5 more")


def test_what_is_missing_of_a_set_is_told_in_order() -> None:
    whole = shards("m-Q4_K_M", 3)
    repo = repo_of(whole[1])
    (one,) = group(repo)
    assert missing(repo, one) == (whole[0], whole[2])
    assert [file.path for file in files_of(repo, one)] == [whole[1]]


@pytest.mark.parametrize(
    ("repo_id", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct-GGUF", "smollm2-135m-instruct"),
        ("someone/Model-7B-i1-GGUF", "model-7b"),
        ("someone/Model_GGUF", "model"),
        ("someone/model.gguf", "model"),
        ("someone/Qwen2.5-7B", "qwen2.5-7b"),
        ("someone/GGUF", "gguf"),
        ("gpt2", "gpt2"),
    ],
)
def test_req_c20_a_name_is_suggested_from_the_registrys_own_spelling(
    repo_id: str, name: str
) -> None:
    assert suggest_name(repo_id) == name


def test_a_key_is_the_sha256_of_repository_commit_and_path() -> None:
    said = b"owner/name@c0ffee/dir/m.gguf"
    assert file_key("owner/name", "c0ffee", "dir/m.gguf") == hashlib.sha256(said).hexdigest()


def test_a_set_follows_from_the_path_of_its_first_file() -> None:
    assert paths_from("q/M-00001-OF-00002.GGUF") == (
        "q/M-00001-OF-00002.GGUF",
        "q/M-00002-OF-00002.GGUF",
    )
    assert paths_from("M-00002-of-00003.gguf") == ("M-00002-of-00003.gguf",)
    assert paths_from("M-00001-of-00000.gguf") == ("M-00001-of-00000.gguf",)
    assert paths_from("M.gguf") == ("M.gguf",)
