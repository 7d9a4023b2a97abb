"""What a profile's arguments say about adapters, and what the yard adds to them."""

import pytest

from schemas import vllm_flags
from schemas.vllm_flags import LoraFlags, lora_args, lora_problems, read_lora


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), LoraFlags()),
        (("--max-model-len", "4096"), LoraFlags()),
        (("--enable-lora",), LoraFlags(enabled=True)),
        (("--no-enable-lora",), LoraFlags(enabled=False)),
        (("--enable_lora", "--no-enable-lora"), LoraFlags(enabled=False)),
        (("--max-lora-rank", "64"), LoraFlags(rank=64)),
        (("--max_lora_rank=64",), LoraFlags(rank=64)),
        (("--max-lora-r", "64"), LoraFlags(rank=64)),
        (("--max-lora-rank", "8", "--max-lora-rank", "32"), LoraFlags(rank=32)),
        (("--max-loras", "4", "--max-cpu-loras", "9"), LoraFlags(on_card=4, in_ram=9)),
        (("--max-cpu", "9"), LoraFlags(in_ram=9)),
        (
            ("--lora-target-modules", "q_proj", "v_proj"),
            LoraFlags(target_modules=("q_proj", "v_proj")),
        ),
        (("--lora-target-modules=q_proj", "--seed", "1"), LoraFlags(target_modules=("q_proj",))),
        # The name of another flag is none of ours, however much they have in common.
        (("--max-logprobs", "5", "--lora-dtype", "auto", "--max-lora", "3"), LoraFlags()),
    ],
)
def test_flags_are_read_in_every_spelling(args: tuple[str, ...], expected: LoraFlags) -> None:
    assert read_lora(args) == expected


@pytest.mark.parametrize("value", ["x", "0", "-1", ""])
def test_a_number_that_is_none_is_a_problem_and_leaves_the_flag_open(value: str) -> None:
    found = read_lora((f"--max-lora-rank={value}",))
    assert found.rank is None
    assert found.problems == (f"--max-lora-rank needs a whole number of at least 1, got {value!r}",)


def test_a_flag_without_its_value_is_a_problem() -> None:
    assert read_lora(("--max-loras", "--seed", "1")).problems == (
        "--max-loras needs a whole number of at least 1, got nothing",
    )
    assert read_lora(("--lora-target-modules",)).problems


def test_the_yard_adds_what_a_profile_leaves_open() -> None:
    """One place more in the engine's own cache than are kept, so that a load needs no eviction before it."""
    assert lora_args((), 4, 0) == (
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "5"),
        *("--max-lora-rank", "16"),
    )
    assert lora_args((), 4, 64)[-2:] == ("--max-lora-rank", "64")


def test_the_yard_adds_nothing_to_a_model_without_adapters() -> None:
    assert lora_args((), 0, 64) == ()
    assert lora_args(("--enable-lora",), 0, 0) == ()


def test_the_yard_adds_nothing_a_profile_says_itself() -> None:
    args = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "20", "--max-lora-rank", "8")
    assert lora_args(args, 4, 64) == ()
    assert vllm_flags.lora_rank(args, 64) == 8
    assert vllm_flags.lora_room(args, 4) == 20


def test_places_on_the_card_are_few_and_never_more_than_the_cache_holds() -> None:
    assert lora_args((), 64, 0)[1:5] == ("--max-loras", "8", "--max-cpu-loras", "65")
    assert lora_args(("--max-cpu-loras", "3"), 3, 0)[:3] == ("--enable-lora", "--max-loras", "3")
    # More on the card than are kept loaded: the cache is made large enough for the engine to start.
    assert lora_args(("--max-loras", "12"), 4, 0)[1:3] == ("--max-cpu-loras", "12")


def test_what_the_yard_adds_never_contradicts_itself() -> None:
    for limit in range(1, 65):
        for args in ((), ("--max-loras", "9"), ("--max-cpu-loras", "64")):
            flags = read_lora((*args, *lora_args(args, limit, 0)))
            assert flags.enabled
            assert flags.on_card is not None
            assert flags.in_ram is not None
            assert flags.on_card <= flags.in_ram
            assert limit <= flags.in_ram
            assert flags.in_ram == vllm_flags.lora_room(args, limit)


def test_a_profile_that_could_not_keep_so_many_is_told_with_both_numbers() -> None:
    (told,) = lora_problems(("--max-cpu-loras", "4"), 8)
    assert "--max-cpu-loras 4" in told
    assert "max_loaded_adapters 8" in told
    (told,) = lora_problems(("--max-loras", "5", "--max-cpu-loras", "4"), 4)
    assert "--max-loras 5" in told
    assert "--max-cpu-loras 4" in told
    (told,) = lora_problems(("--no-enable-lora",), 4)
    assert "max_loaded_adapters is 4" in told
    assert lora_problems(("--max-loras", "4", "--max-cpu-loras", "4"), 4) == ()


def test_the_next_rank_is_one_engines_know() -> None:
    assert [vllm_flags.next_rank(rank) for rank in (1, 8, 9, 16, 17, 129, 257, 321, 512)] == [
        *(8, 8, 16, 16, 32, 256, 320, 512, 512)
    ]
    assert vllm_flags.next_rank(513) is None
