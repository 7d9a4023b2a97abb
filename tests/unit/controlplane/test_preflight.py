"""Whether a base could serve an adapter, told from its configuration before any engine sees it."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import preflight
from controlplane.domain.preflight import Fits, Refusal
from controlplane.domain.reports import AdapterConfig
from schemas import codes
from schemas.model import Model, Profile
from tests.support.worlds import model, profile


def base(*args: str, **fields: Any) -> Model:
    return with_profiles(vllm(*args), **fields)


def vllm(*args: str, name: str = "gpu") -> Profile:
    return profile(name, engine="vllm", args=args)


def with_profiles(*profiles: Profile, **fields: Any) -> Model:
    return model("llama", profiles=profiles, **{"max_loaded_adapters": 4, **fields})


def config(**fields: Any) -> AdapterConfig:
    known = {"r": 16, "base_model_name_or_path": "x/llama", "target_modules": ("q_proj", "v_proj")}
    return AdapterConfig(**{**known, **fields})


def refused(given: AdapterConfig, by: Model, **more: Any) -> Refusal:
    found = preflight.preflight(given, by, **more)
    assert isinstance(found, Refusal), found
    return found


def test_an_ordinary_adapter_fits() -> None:
    assert preflight.preflight(config(), base()) == Fits(rank=16)


def test_req_b1_a_model_without_a_limit_loads_none() -> None:
    found = refused(config(), base(max_loaded_adapters=0))
    assert found.code == codes.NO_ADAPTERS
    assert "'llama'" in found.sentence
    assert "max_loaded_adapters" in found.sentence


def test_scn_d1_a_rank_above_the_profiles_is_refused_with_both_numbers() -> None:
    found = refused(config(r=64), base("--max-lora-rank", "32"))
    assert found.code == codes.RANK_TOO_HIGH
    assert "64" in found.sentence
    assert "--max-lora-rank 32" in found.sentence
    assert "'gpu'" in found.sentence
    assert preflight.preflight(config(r=32), base("--max-lora-rank", "32")) == Fits(rank=32)


def test_scn_d1_one_profile_of_several_is_enough_to_refuse() -> None:
    """The next replica may start from any of them."""
    found = refused(config(r=64), with_profiles(vllm(), vllm("--max-lora-rank=16", name="small")))
    assert "profile 'small'" in found.sentence


def test_scn_d1_the_largest_rank_of_single_modules_counts() -> None:
    given = config(r=8, rank_pattern={"q_proj": 48, "v_proj": 4})
    assert preflight.preflight(given, base()) == Fits(rank=48)
    assert "48" in refused(given, base("--max-lora-rank", "32")).sentence


def test_scn_d1_no_engine_takes_more_than_the_highest_rank() -> None:
    found = refused(config(r=513), base())
    assert found.code == codes.RANK_TOO_HIGH
    assert "513" in found.sentence
    assert "512" in found.sentence


def test_req_bugb6_what_engines_answer_with_500_is_refused_before_they_are_asked() -> None:
    """Rank and base are 500 InternalServerError in current engines: nobody could tell whose fault it is."""
    assert refused(config(r=64), base("--max-lora-rank", "16")).code == codes.RANK_TOO_HIGH
    assert refused(config(base_model_name_or_path="x/other"), base()).code == codes.WRONG_BASE


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"modules_to_save": ("lm_head",)}, "lm_head"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trains_tokens": True}, "trainable_token_indices"),
        ({"replicates_layers": True}, "layer_replication"),
        ({"target_modules": ("q_proj", "embed_tokens")}, "embed_tokens"),
        ({"target_modules": ("model.embed_tokens", "lm_head")}, "lm_head"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": ""}, "peft_type"),
    ],
)
def test_scn_d9_what_engines_do_not_serve_is_refused(fields: dict[str, Any], told: str) -> None:
    found = refused(config(**fields), base())
    assert found.code == codes.UNSUPPORTED_ADAPTER
    assert told in found.sentence


def test_scn_d9_an_adapter_of_another_base_is_refused_with_both_names() -> None:
    found = refused(config(base_model_name_or_path="x/mistral-7b"), base())
    assert found.code == codes.WRONG_BASE
    assert "'x/mistral-7b'" in found.sentence
    assert "/models/llama.gguf" in found.sentence
    assert "--trust-base" in found.sentence


def test_a_person_may_say_that_the_base_fits() -> None:
    given = config(base_model_name_or_path="x/mistral-7b")
    assert preflight.preflight(given, base(), trust_base=True) == Fits(rank=16)


def test_what_the_model_is_called_may_say_that_it_is_the_base_and_not_that_it_is_none() -> None:
    named = base(aliases=("mistral-7b",))
    assert preflight.preflight(config(base_model_name_or_path="x/mistral-7b"), named) == Fits(
        rank=16
    )
    mirrored = replace(base(), source="mirror:" + "0" * 64)
    found = preflight.preflight(config(base_model_name_or_path="x/y"), mirrored)
    assert isinstance(found, Fits)
    assert "could not be compared" in found.warnings[0]
    silent = preflight.preflight(config(base_model_name_or_path=""), base())
    assert isinstance(silent, Fits)
    assert silent.warnings == ("it names no base that could be compared with 'llama'",)


@pytest.mark.parametrize(
    ("source", "repo"),
    [
        ("mirror:" + "0" * 64, "packer/Big-7B-GGUF"),
        ("/srv/hub/models--packer--Big-7B/snapshots/" + "0" * 40, ""),
    ],
)
def test_what_the_model_is_called_does_not_beat_the_repository_of_its_weights(
    source: str, repo: str
) -> None:
    """Somebody called a model after another one: its adapter would answer with weights it was not trained on."""
    called = replace(base(aliases=("mistral-7b",)), source=source)
    found = refused(config(base_model_name_or_path="x/mistral-7b"), called, repo=repo)
    assert found.code == codes.WRONG_BASE
    assert repr(repo or source) in found.sentence
    assert preflight.preflight(
        config(base_model_name_or_path="packer/Big-7B"), called, repo=repo
    ) == (Fits(rank=16))


def test_weights_of_the_mirror_are_compared_by_their_repository() -> None:
    mirrored = replace(base(), source="mirror:" + "0" * 64)
    given = config(base_model_name_or_path="Owner/Big-7B")
    assert preflight.preflight(given, mirrored, repo="packer/Big-7B-GGUF") == Fits(rank=16)
    assert refused(given, mirrored, repo="packer/Small-1B-GGUF").code == codes.WRONG_BASE


def test_an_adapter_that_names_no_base_fits_with_a_warning() -> None:
    found = preflight.preflight(config(base_model_name_or_path=""), base())
    assert isinstance(found, Fits)
    assert found.warnings


def test_scn_d8_modules_a_profile_leaves_out_are_refused() -> None:
    """An engine would load it with 200 and answer as the base."""
    found = refused(config(), base("--lora-target-modules", "q_proj", "o_proj"))
    assert found.code == codes.UNSUPPORTED_ADAPTER
    assert "v_proj" in found.sentence
    assert "q_proj, o_proj" in found.sentence
    allowed = base("--lora-target-modules", "q_proj", "v_proj", "o_proj")
    assert preflight.preflight(config(), allowed) == Fits(rank=16)


@pytest.mark.parametrize(
    ("targets", "allowed", "fits"),
    [
        (("q_proj", "k_proj"), ("qkv_proj",), True),
        (("gate_proj", "up_proj"), ("gate_up_proj",), True),
        (("qkv_proj",), ("q_proj",), True),
        (("model.layers.0.self_attn.q_proj",), ("q_proj",), True),
        (("q_proj",), ("model.layers.0.self_attn.q_proj",), False),
        (("q_proj", "down_proj"), ("qkv_proj", "gate_up_proj"), False),
    ],
)
def test_joined_modules_stand_for_their_parts(
    targets: tuple[str, ...], allowed: tuple[str, ...], fits: bool
) -> None:
    given = config(target_modules=targets)
    found = preflight.preflight(given, base("--lora-target-modules", *allowed))
    assert isinstance(found, Fits) is fits


def test_scn_d8_a_pattern_cannot_be_compared_with_a_restriction() -> None:
    given = config(target_modules=("all-linear",), targets_by_pattern=True)
    assert isinstance(preflight.preflight(given, base()), Fits)
    assert "all-linear" in refused(given, base("--lora-target-modules", "q_proj")).sentence
    nothing = config(target_modules=())
    assert refused(nothing, base("--lora-target-modules", "q_proj"))


def test_a_pattern_that_names_embeddings_is_left_to_the_engine_with_a_warning() -> None:
    given = config(target_modules=(r"^(?!.*lm_head).*_proj$",), targets_by_pattern=True)
    found = preflight.preflight(given, base())
    assert isinstance(found, Fits)
    assert "embeddings" in found.warnings[0]


def test_a_rank_of_nothing_is_no_adapter() -> None:
    assert refused(config(r=0), base()).code == codes.NOT_AN_ADAPTER
    assert refused(config(rank_pattern={"q_proj": 0}), base()).code == codes.NOT_AN_ADAPTER


@pytest.mark.parametrize(
    ("known", "rank", "after"),
    [(0, 8, 0), (0, 16, 0), (0, 17, 32), (0, 64, 64), (64, 32, 64), (64, 65, 128), (256, 300, 320)],
)
def test_the_rank_engines_start_for_grows_in_their_steps(known: int, rank: int, after: int) -> None:
    assert preflight.with_rank(base(lora_rank=known), (rank,)).lora_rank == after


def test_the_rank_is_left_alone_where_profiles_say_it() -> None:
    assert preflight.with_rank(base("--max-lora-rank", "64"), (64,)).lora_rank == 0
    mixed = with_profiles(vllm(), vllm("--max-lora-rank", "64", name="big"))
    assert preflight.with_rank(mixed, (64,)).lora_rank == 64
    assert preflight.with_rank(base(max_loaded_adapters=0), (64,)).lora_rank == 0


def test_modules_are_told_once_for_all_layers() -> None:
    names = tuple(f"model.layers.{n}.self_attn.q_proj" for n in range(80))
    assert preflight.modules_of(config(target_modules=(*names, "v_proj"))) == ("q_proj", "v_proj")
    many = tuple(f"m{n}" for n in range(500))
    assert len(preflight.modules_of(config(target_modules=many))) == preflight.MOST_MODULES
