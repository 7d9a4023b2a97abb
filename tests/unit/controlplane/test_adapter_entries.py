"""What an entry says about adapters, and that a changed one leaves none behind that fitted it before."""

from typing import Any

import pytest

from controlplane.domain import entries
from controlplane.domain.entries import ParsedEntry
from controlplane.domain.revision import profile_revision
from schemas import codes, vllm_flags
from schemas.commands import CatalogApply, ModelRemove, ModelScale, Outcome, Problem
from schemas.slots import MOST_SLOTS
from tests.support.adapter_yard import AdapterYard, adapter_yard, base_model, vllm
from tests.support.worlds import model


def entry(*args: str, name: str = "llama", **over: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": "/models/llama",
        "scaling": {"min": 0, "max": 1},
        "max_loaded_adapters": 4,
        "profiles": [
            {"name": "gpu", "engine": "vllm", "memory": "1GiB", "card": "gpu", "args": list(args)}
        ],
    } | over


def parsed(raw: dict[str, Any]) -> ParsedEntry:
    found = entries.parse(raw, "[0]")
    assert isinstance(found, ParsedEntry), found
    return found


def problems(raw: dict[str, Any]) -> list[Problem]:
    found = entries.parse(raw, "[0]")
    assert not isinstance(found, ParsedEntry)
    return list(found)


def without_limit(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "max_loaded_adapters"}


# -- one entry


def test_req_b1_an_entry_says_how_many_adapters_a_replica_keeps() -> None:
    assert parsed(entry()).max_loaded_adapters == 4
    assert parsed(entry()).as_model(incarnation="i", order=0).max_loaded_adapters == 4
    assert parsed(without_limit(entry())).max_loaded_adapters == 0


@pytest.mark.parametrize("given", [0, -1, MOST_SLOTS + 1, 1.5, "4", True, None])
def test_req_b45_a_limit_that_is_none_is_refused(given: object) -> None:
    """With a limit of nothing every load would flush the replica."""
    (problem,) = problems(entry(max_loaded_adapters=given))
    assert problem.path == "[0].max_loaded_adapters"
    assert f"1 to {MOST_SLOTS}" in problem.sentence


def test_req_b45_who_wants_none_leaves_it_out() -> None:
    (problem,) = problems(entry(max_loaded_adapters=0))
    assert "leave it out" in problem.sentence


def test_an_engine_without_adapters_takes_no_limit() -> None:
    raw = entry()
    raw["profiles"].append(
        {"name": "cpu", "engine": "llamacpp", "memory": "1GiB", "args": ["--ctx-size", "512"]}
    )
    (problem,) = problems(raw)
    assert problem.path == "[0].max_loaded_adapters"
    assert "'cpu'" in problem.sentence
    assert "llamacpp" in problem.sentence
    assert parsed(without_limit(raw)).max_loaded_adapters == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--max-cpu-loras", "3"), ("--max-cpu-loras 3", "max_loaded_adapters 4")),
        (("--max-loras", "6", "--max-cpu-loras", "5"), ("--max-loras 6", "--max-cpu-loras 5")),
        (("--no-enable-lora",), ("--no-enable-lora", "4")),
        (("--max-lora-rank", "much"), ("'much'",)),
        (
            ("--max-lora-rank", "24"),
            ("--max-lora-rank 24", "1, 8, 16, 32, 64, 128, 256, 320 or 512"),
        ),
        (("--max_lora_rank=1024",), ("--max-lora-rank 1024", "512")),
    ],
)
def test_arguments_that_cannot_keep_so_many_are_refused_with_both_numbers(
    args: tuple[str, ...], told: tuple[str, ...]
) -> None:
    (problem,) = problems(entry(*args))
    assert problem.path == "[0].profiles[0].args"
    assert all(text in problem.sentence for text in told), problem.sentence
    assert parsed(without_limit(entry(*args))), "without adapters it is the engine's affair"


@pytest.mark.parametrize("rank", [1, *vllm_flags.RANKS])
def test_every_rank_that_an_engine_starts_with_may_be_said(rank: int) -> None:
    assert parsed(entry("--max-lora-rank", str(rank))).max_loaded_adapters == 4


def test_a_wrong_entry_is_told_of_everything_it_says_of_adapters() -> None:
    raw = entry("--max-cpu-loras", "1", "--max-loras", "2")
    assert len(problems(raw)) == 2


# -- what is started from it


def test_an_entry_without_adapters_keeps_the_revision_its_engines_run_under() -> None:
    """These are of a version that knew no adapters."""
    plain = model("llama", profiles=(vllm(),))
    assert profile_revision(plain, plain.profiles[0]) == "3b03b0ba7dd1"
    raised = model("llama", profiles=(vllm(),), lora_rank=64)
    assert profile_revision(raised, raised.profiles[0]) == "3b03b0ba7dd1"


def test_the_limit_and_the_rank_are_what_an_engine_is_started_for() -> None:
    def revision(*args: str, **fields: Any) -> str:
        one = base_model("llama", *args, **fields)
        return profile_revision(one, one.profiles[0])

    assert revision() != revision(max_loaded_adapters=5)
    assert revision() == revision(lora_rank=16), "the rank engines start for by themselves"
    assert revision() != revision(lora_rank=32)
    said = ("--max-lora-rank", "64")
    assert revision(*said) == revision(*said, lora_rank=32)


# -- entries that have adapters


@pytest.fixture
def yard() -> AdapterYard:
    made = adapter_yard(base_model("other", max_loaded_adapters=0))
    assert apply(made, entry()).status == "accepted"
    made.have("sql")
    made.have("poet")
    return made


def apply(yard: AdapterYard, *raw: dict[str, Any], **more: Any) -> Outcome:
    return yard.do(CatalogApply(entries=list(raw), **more))


def test_a_model_with_adapters_is_not_removed(yard: AdapterYard) -> None:
    outcome = yard.do(ModelRemove(model="llama"))
    assert (outcome.status, outcome.code) == ("rejected", codes.IN_USE)
    assert "2 adapters: poet, sql" in outcome.sentence
    assert "llama" in yard.world.models
    yard.drop("sql")
    yard.drop("poet")
    assert yard.do(ModelRemove(model="llama")).status == "accepted"


def test_a_prune_that_would_remove_one_changes_nothing(yard: AdapterYard) -> None:
    outcome = apply(yard, entry(name="new"), prune=True)
    assert outcome.code == codes.IN_USE
    assert "'llama'" in outcome.sentence
    assert set(yard.world.models) == {"llama", "other"}
    assert apply(yard, entry(name="new"), entry(), prune=True).status == "accepted"
    assert set(yard.world.models) == {"llama", "new"}


def test_a_long_list_of_adapters_is_cut(yard: AdapterYard) -> None:
    for number in range(10):
        yard.add_adapter(f"a{number}")
    assert "a0, a1, a2, a3, a4 and 7 more" in yard.do(ModelRemove(model="llama")).sentence


def test_an_entry_does_not_stop_loading_the_adapters_it_has(yard: AdapterYard) -> None:
    outcome = apply(yard, without_limit(entry()))
    assert outcome.code == codes.CONFLICT
    assert "poet, sql" in outcome.sentence
    assert "max_loaded_adapters" in outcome.sentence
    assert yard.world.models["llama"].max_loaded_adapters == 4


def test_scn_d1_an_entry_does_not_fall_below_the_rank_of_its_adapters(yard: AdapterYard) -> None:
    yard.lay("x/big", r=64)
    yard.have("big")
    outcome = apply(yard, entry("--max-lora-rank", "32"))
    assert outcome.code == codes.CONFLICT
    assert "big" in outcome.sentence
    assert "sql" not in outcome.sentence
    assert "64" in outcome.sentence
    assert "32" in outcome.sentence
    assert apply(yard, entry("--max-lora-rank", "64")).status == "accepted"


def test_an_entry_does_not_leave_out_modules_of_its_adapters(yard: AdapterYard) -> None:
    outcome = apply(yard, entry("--lora-target-modules", "q_proj"))
    assert outcome.code == codes.CONFLICT
    assert "v_proj" in outcome.sentence
    assert apply(yard, entry("--lora-target-modules", "q_proj", "v_proj")).status == "accepted"


def test_scn_d9_an_entry_does_not_get_the_weights_of_another_model(yard: AdapterYard) -> None:
    yard.lay("x/mine", base_model_name_or_path="x/of-mine")
    yard.have("mine", trust_base=True)
    named = entry() | {"name": "chat", "source": "/models/qwen2.5-7b"}
    assert apply(yard, named).status == "accepted"
    yard.lay("x/style", base_model_name_or_path="Qwen/Qwen2.5-7B")
    assert yard.have("style", "chat").phase == "ready"
    outcome = apply(yard, named | {"source": "/models/qwen2.5-14b"})
    assert outcome.code == codes.CONFLICT
    assert "style would not fit" in outcome.sentence
    assert "'Qwen/Qwen2.5-7B'" in outcome.sentence
    assert "'/models/qwen2.5-14b'" in outcome.sentence
    assert apply(yard, named | {"source": "/fast/Qwen2.5-7B-AWQ"}).status == "accepted"
    moved = apply(yard, entry() | {"source": "/models/other"})
    assert moved.status == "accepted", "by its name it is the model, or a person said so"


def test_an_adapter_that_is_refused_hinders_no_change(yard: AdapterYard) -> None:
    yard.lay("x/bad", use_dora=True)
    yard.have("bad")
    yard.drop("sql")
    yard.drop("poet")
    assert apply(yard, without_limit(entry())).status == "accepted"
    assert yard.do(ModelRemove(model="llama")).code == codes.IN_USE, "it still names its base"


def test_one_that_is_still_being_read_is_judged_by_the_entry_as_it_is_then(
    yard: AdapterYard,
) -> None:
    yard.lay("x/big", r=64)
    yard.add_adapter("big")
    assert apply(yard, entry("--max-lora-rank", "32")).status == "accepted"
    yard.run_workers()
    assert yard.adapter("big").code == codes.RANK_TOO_HIGH


def test_one_that_is_still_being_read_hinders_no_restriction(yard: AdapterYard) -> None:
    """Nobody knows its modules yet."""
    for name in ("sql", "poet"):
        yard.drop(name)
    yard.add_adapter("late")
    assert apply(yard, entry("--lora-target-modules", "q_proj")).status == "accepted"


def test_a_change_that_has_nothing_to_do_with_adapters_is_never_refused_for_them(
    yard: AdapterYard,
) -> None:
    """One that does not fit for a reason of before fits no less."""
    yard.lay("x/full", target_modules=("model.layers.0.self_attn.q_proj",))
    restricted = entry(
        "--lora-target-modules", "model.layers.0.self_attn.q_proj", "v_proj", "q_proj"
    )
    assert apply(yard, restricted).status == "accepted"
    yard.drop("sql")
    yard.drop("poet")
    narrow = entry("--lora-target-modules", "model.layers.0.self_attn.q_proj")
    assert apply(yard, narrow).status == "accepted"
    assert yard.have("full").phase == "ready"
    assert apply(yard, narrow | {"description": "new"}).status == "accepted"


def test_the_rank_of_engines_survives_an_apply_and_grows_with_what_it_opens(
    yard: AdapterYard,
) -> None:
    assert apply(yard, entry("--max-lora-rank", "128")).status == "accepted"
    yard.lay("x/big", r=100)
    yard.have("big")
    assert yard.world.models["llama"].lora_rank == 0, "the profile says it"
    assert apply(yard, entry()).status == "accepted"
    assert yard.world.models["llama"].lora_rank == 128
    count = len(yard.events("model"))
    assert apply(yard, entry()).status == "accepted"
    assert len(yard.events("model")) == count, "the same file again changes nothing"
    yard.do(ModelScale(model="llama", min=0, max=2))
    assert yard.world.models["llama"].lora_rank == 128
    yard.drop("big")
    assert apply(yard, entry(description="new")).status == "accepted"
    assert yard.world.models["llama"].lora_rank == 128, "it never shrinks"


def test_the_limit_does_not_fall_below_what_is_pinned(yard: AdapterYard) -> None:
    for name in ("sql", "poet"):
        yard.pin(name)
    outcome = apply(yard, entry(max_loaded_adapters=1))
    assert outcome.code == codes.CONFLICT
    assert "2 of its adapters are pinned" in outcome.sentence
    assert "1" in outcome.sentence
    assert outcome.problems[0].path == "[0].max_loaded_adapters"
    assert apply(yard, entry(max_loaded_adapters=2)).status == "accepted"


def test_a_lower_limit_replaces_the_engines(yard: AdapterYard) -> None:
    yard.request("llama")
    yard.until(lambda: yard.ready("llama"), 30, "ready")
    first = yard.ready("llama")
    outcome = apply(yard, entry(max_loaded_adapters=2))
    assert any("its profile changed" in line for line in outcome.lines)
    yard.until(lambda: yard.ready("llama") not in (first, []), 60, "replaced")
    assert yard.items("llama")[-1][1].launch.adapters == 2


def test_a_model_without_adapters_is_launched_as_ever(yard: AdapterYard) -> None:
    yard.request("other")
    yard.until(lambda: yard.ready("other"), 30, "ready")
    launch = yard.items("other")[0][1].launch
    assert (launch.adapters, launch.lora_rank) == (0, 0)
