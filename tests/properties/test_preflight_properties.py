"""Properties of what is judged of an adapter before any engine sees it, each a sentence, over any configuration."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.domain import basenames, preflight
from controlplane.domain.preflight import Fits, Refusal
from controlplane.domain.reports import AdapterConfig
from schemas import vllm_flags
from schemas.model import Model
from tests.support.adapter_yard import base_model, vllm

TEXT = st.text(max_size=30)
MODULES = st.sampled_from(
    ["q_proj", "k_proj", "qkv_proj", "down_proj", "lm_head", "model.layers.0.self_attn.q_proj"]
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *(
                "--enable-lora",
                "--no-enable-lora",
                "--max-lora-rank",
                "--max_loras=4",
                "--max-loras",
            ),
            *(
                "--max-cpu-loras",
                "--lora-target-modules",
                "q_proj",
                "8",
                "16",
                "64",
                "--seed",
                "-1",
            ),
        ]
    ),
    TEXT,
)
ARGS = st.lists(WORDS, max_size=6).map(tuple)
CONFIGS = st.builds(
    AdapterConfig,
    r=st.integers(1, 600),
    peft_type=st.sampled_from(["LORA", "lora", "IA3", ""]),
    base_model_name_or_path=st.one_of(st.sampled_from(["x/llama", "x/other", ""]), TEXT),
    rank_pattern=st.dictionaries(TEXT, st.integers(1, 600), max_size=3),
    target_modules=st.lists(st.one_of(MODULES, TEXT), max_size=4).map(tuple),
    targets_by_pattern=st.booleans(),
    modules_to_save=st.sampled_from([(), (), ("lm_head",)]),
    use_dora=st.booleans(),
    bias=st.sampled_from(["none", "none", "all"]),
)


def base(*profiles: tuple[str, ...]) -> Model:
    made = tuple(vllm(*args, name=f"p{at}") for at, args in enumerate(profiles))
    return base_model("llama", profiles=made)


@given(CONFIGS, st.lists(ARGS, min_size=1, max_size=3))
def test_every_configuration_gets_an_answer_with_a_reason(
    config: AdapterConfig, profiles: list[tuple[str, ...]]
) -> None:
    found = preflight.preflight(config, base(*profiles))
    if isinstance(found, Refusal):
        assert found.code
        assert found.sentence
    else:
        assert found.rank == preflight.rank_of(config)


@given(CONFIGS, st.lists(ARGS, min_size=1, max_size=2), ARGS)
def test_another_profile_never_turns_no_into_yes(
    config: AdapterConfig, profiles: list[tuple[str, ...]], more: tuple[str, ...]
) -> None:
    if isinstance(preflight.preflight(config, base(*profiles)), Refusal):
        assert isinstance(preflight.preflight(config, base(*profiles, more)), Refusal)


@given(CONFIGS, st.lists(ARGS, min_size=1, max_size=2), st.integers(1, 600))
def test_a_smaller_rank_fits_where_a_larger_one_does(
    config: AdapterConfig, profiles: list[tuple[str, ...]], rank: int
) -> None:
    model = base(*profiles)
    if isinstance(preflight.preflight(config, model), Fits) and rank <= config.r:
        smaller = replace(config, r=rank)
        assert isinstance(preflight.preflight(smaller, model), Fits)


@given(CONFIGS, st.lists(ARGS, min_size=1, max_size=3))
def test_what_fits_is_within_what_every_engine_is_started_for(
    config: AdapterConfig, profiles: list[tuple[str, ...]]
) -> None:
    model = base(*profiles)
    found = preflight.preflight(config, model)
    if isinstance(found, Refusal):
        return
    raised = preflight.with_rank(model, (found.rank,))
    assert preflight.with_rank(raised, (found.rank,)) == raised
    for profile in raised.profiles:
        assert found.rank <= vllm_flags.lora_rank(profile.args, raised.lora_rank)


@given(ARGS, st.integers(1, 64), st.sampled_from((0, *vllm_flags.RANKS)))
def test_what_the_yard_adds_makes_the_arguments_whole_or_they_were_refused(
    args: tuple[str, ...], limit: int, rank: int
) -> None:
    if vllm_flags.problems(args) or vllm_flags.lora_problems(args, limit):
        return
    added = vllm_flags.lora_args(args, limit, rank)
    whole = vllm_flags.read_lora((*args, *added))
    assert whole.enabled
    assert whole.rank == vllm_flags.lora_rank(args, rank)
    assert whole.in_ram == vllm_flags.lora_room(args, limit)
    assert whole.in_ram is not None
    assert whole.on_card is not None
    assert whole.in_ram >= limit
    assert 1 <= whole.on_card <= whole.in_ram
    assert vllm_flags.lora_args((*args, *added), limit, rank) == ()


@given(TEXT, TEXT)
def test_likeness_does_not_depend_on_who_is_asked_first(one: str, other: str) -> None:
    assert basenames.likeness(one, (other,)) == basenames.likeness(other, (one,))


@given(st.text(min_size=1, max_size=30))
def test_a_name_is_like_itself_or_names_nothing(name: str) -> None:
    assert basenames.likeness(name, (name,)) in ("same", "unknown")
