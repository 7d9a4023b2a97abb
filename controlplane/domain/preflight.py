"""Decides from an adapter's configuration whether the engines of its base could serve it, before any is asked.

A refusal names both sides, as an engine would not: some engines load what they cannot serve and answer as the
base. It reads no weights; what only they tell is the engine's to refuse.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.domain import basenames
from controlplane.domain.adapterconfig import LORA
from controlplane.domain.filesets import Refusal
from controlplane.domain.names import listed
from controlplane.domain.reports import AdapterConfig
from schemas import codes, vllm_flags
from schemas.adapter import Adapter
from schemas.model import Model, Profile

MOST_MODULES: Final = 32
"""Target modules an adapter's state tells; those of one kind in all layers are one."""
LONGEST_MODULE: Final = 64
"""Characters of one of them."""

_EMBEDDINGS: Final = frozenset(
    {
        *("embed_tokens", "lm_head", "wte", "wpe", "word_embeddings", "embed_in", "embed_out"),
        *("tok_embeddings", "input_embeddings", "output_embeddings", "embeddings"),
    }
)
"""Modules that turn tokens into vectors and back, by the names models give them."""

_PACKED: Final[dict[str, frozenset[str]]] = {
    "qkv_proj": frozenset({"q_proj", "k_proj", "v_proj"}),
    "gate_up_proj": frozenset({"gate_proj", "up_proj"}),
}
"""What an engine joins into one module: either name stands for the other where modules are allowed."""


class Fits(Struct, frozen=True, kw_only=True):
    """Every profile of the base that loads adapters can serve it. `warnings` are sentences for the operator."""

    rank: int
    warnings: tuple[str, ...] = ()


class Targets(Struct, frozen=True, kw_only=True):
    """The modules an adapter changes: `names`, or the one pattern it has instead."""

    names: tuple[str, ...] = ()
    by_pattern: bool = False


def preflight(
    config: AdapterConfig, base: Model, *, repo: str = "", trust_base: bool = False
) -> Fits | Refusal:
    """Whether `base` can serve an adapter so configured. The first of these that does not hold refuses it:

    1. the base loads adapters; 2. it is a LoRA; 3. of a kind that engines serve: no whole modules, no DoRA,
    no bias, no embeddings; 4. it was trained on this base, as far as names tell (not with `trust_base`);
    5. its rank is one that engines take, and every profile's; 6. its modules are among those that a profile
    restricts adapters to.

    `repo` is the repository of the base's weights where the mirrors know it.
    """
    if base.max_loaded_adapters <= 0:  # 1
        return _none_loaded(base)
    if config.peft_type != LORA:  # 2
        sentence = f"its peft_type is {config.peft_type or 'missing'}, engines load {LORA} alone"
        return Refusal(code=codes.UNSUPPORTED_ADAPTER, sentence=sentence)
    rank = rank_of(config)
    if min((config.r, *config.rank_pattern.values())) < 1:
        return Refusal(
            code=codes.NOT_AN_ADAPTER, sentence=f"its rank is {rank}, expected 1 or more"
        )
    strange = _strange(config)  # 3
    if strange:
        return Refusal(code=codes.UNSUPPORTED_ADAPTER, sentence=strange)
    warnings: list[str] = []
    if not trust_base:  # 4
        found = _base(config.base_model_name_or_path, base, repo)
        if isinstance(found, Refusal):
            return found
        warnings += [found] if found else []
    targets = Targets(names=config.target_modules, by_pattern=config.targets_by_pattern)
    unfit = refusal_of(rank, targets, base)  # 5, 6
    if unfit is not None:
        return unfit
    if config.targets_by_pattern and _embeddings_in_pattern(config.target_modules):
        warnings.append(
            "its target_modules are an expression that names embeddings; if it adapts them, engines refuse it"
        )
    return Fits(rank=rank, warnings=tuple(warnings))


def rank_of(config: AdapterConfig) -> int:
    """The rank engines need for it: the largest of any module's."""
    return max((config.r, *config.rank_pattern.values()))


def refusal_of(rank: int, targets: Targets, base: Model) -> Refusal | None:
    """Why an adapter of this rank and these modules does not fit what `base` is started with, None when it does."""
    if base.max_loaded_adapters <= 0:
        return _none_loaded(base)
    if vllm_flags.next_rank(rank) is None:
        most = vllm_flags.RANKS[-1]
        sentence = f"its rank {rank} is above {most}, the highest that engines take"
        return Refusal(code=codes.RANK_TOO_HIGH, sentence=sentence)
    for profile in base.profiles:
        flags = vllm_flags.read_lora(profile.args)
        if flags.rank is not None and rank > flags.rank:
            return Refusal(
                code=codes.RANK_TOO_HIGH,
                sentence=f"its rank {rank} is above --max-lora-rank {flags.rank} of profile "
                f"{profile.name!r} of {base.name!r}",
            )
        if flags.target_modules is not None:
            outside = _outside(targets, flags.target_modules)
            if outside:
                return _not_adapted(outside, flags.target_modules, profile, base)
    return None


def misfit(adapter: Adapter, base: Model) -> Refusal | None:
    """Why an adapter that was found to fit does not fit `base` as it is now; None when it does, and for one
    whose configuration was not read yet."""
    if base.max_loaded_adapters <= 0:
        return _none_loaded(base)
    if adapter.phase not in ("fetching", "ready"):
        return None
    return refusal_of(adapter.rank, targets_of(adapter), base)


def loses_base(adapter: Adapter, old: Model, new: Model, *, repo: str = "") -> Refusal | None:
    """Why an adapter of `old` would answer with weights it was not trained on once its base has the source of
    `new`, which came from `repo` if that is known; None when names do not say so."""
    if new.source == old.source or adapter.trust_base or adapter.phase not in ("fetching", "ready"):
        return None
    found = _base(adapter.trained_on, new, repo)
    return found if isinstance(found, Refusal) else None


def with_rank(base: Model, ranks: Iterable[int]) -> Model:
    """The base with the rank its engines are started for raised to the largest of `ranks`, where a profile leaves
    that open; it never shrinks."""
    needed = max(ranks, default=0)
    started = max(base.lora_rank, vllm_flags.DEFAULT_RANK)
    is_open = any(vllm_flags.read_lora(profile.args).rank is None for profile in base.profiles)
    raised = vllm_flags.next_rank(needed)
    if base.max_loaded_adapters <= 0 or not is_open or needed <= started or raised is None:
        return base
    return replace(base, lora_rank=raised)


def modules_of(config: AdapterConfig) -> tuple[str, ...]:
    """Its target modules as its state tells them: each kind once, by name, the first few; or its pattern, cut."""
    if config.targets_by_pattern:
        return tuple(name[:LONGEST_MODULE] for name in config.target_modules)
    kinds = {_kind(name) for name in config.target_modules}
    return tuple(sorted(kind[:LONGEST_MODULE] for kind in kinds)[:MOST_MODULES])


def targets_of(adapter: Adapter) -> Targets:
    """What `modules_of` left of its targets."""
    return Targets(names=adapter.target_modules, by_pattern=adapter.targets_by_pattern)


def _none_loaded(base: Model) -> Refusal:
    return Refusal(
        code=codes.NO_ADAPTERS,
        sentence=f"the model {base.name!r} loads no adapters: its entry has no max_loaded_adapters",
    )


def _strange(config: AdapterConfig) -> str:
    """What engines do not serve of it, as a sentence; empty when nothing."""
    if config.modules_to_save:
        return (
            f"it has whole modules of its own (modules_to_save: {listed(config.modules_to_save)}); "
            "engines load low-rank weights alone"
        )
    if config.use_dora:
        return "it was trained with DoRA (use_dora), which engines do not serve"
    if config.bias not in ("", "none") or config.lora_bias:
        said = f"bias {config.bias!r}" if config.bias not in ("", "none") else "lora_bias"
        return f"it has biases of its own ({said}), which engines do not serve"
    if config.trains_tokens:
        return "it changes embeddings (trainable_token_indices), which engines do not serve"
    if config.replicates_layers:
        return "it repeats layers of its base (layer_replication), which engines do not serve"
    if not config.targets_by_pattern:
        embeddings = [name for name in config.target_modules if _kind(name) in _EMBEDDINGS]
        if embeddings:
            return f"it adapts embeddings ({listed(embeddings)}), which engines do not serve"
    return ""


def _embeddings_in_pattern(patterns: tuple[str, ...]) -> bool:
    return any(name in pattern for pattern in patterns for name in _EMBEDDINGS)


def _base(trained_on: str, base: Model, repo: str) -> Refusal | str:
    """A refusal when names say that it is another model's; a warning when they say nothing; else empty."""
    source = repo or ("" if base.source.startswith("mirror:") else base.source)
    # What somebody calls the model may say that it is the one, and never that it is not; where the repository
    # of its weights is known it says nothing.
    called = () if basenames.repository_of(source) else (base.name, *base.aliases)
    if basenames.likeness(trained_on, called) == "same":
        return ""
    match basenames.likeness(trained_on, (source,)):
        case "same":
            return ""
        case "unknown":
            if not trained_on:
                return f"it names no base that could be compared with {base.name!r}"
            return f"the base it names, {trained_on!r}, could not be compared with {base.name!r}"
        case "other":
            return Refusal(
                code=codes.WRONG_BASE,
                sentence=f"it was trained on {trained_on!r}, and {base.name!r} serves {source!r}; "
                "if these are one model, add it with --trust-base",
            )


def _kind(module: str) -> str:
    """A module's name without the layer it is in."""
    return module.rpartition(".")[2]


def _outside(targets: Targets, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The modules of an adapter that `allowed` leaves out. A pattern, or no names at all, cannot be compared:
    all of it counts as left out, since an engine would load it and answer as the base."""
    if targets.by_pattern or not targets.names:
        return targets.names or ("(none named)",)
    return tuple(name for name in targets.names if not _is_allowed(name, allowed))


def _is_allowed(module: str, allowed: tuple[str, ...]) -> bool:
    kind = _kind(module)
    names = {module, kind}
    for packed, parts in _PACKED.items():
        if kind == packed:
            names |= parts
        elif kind in parts:
            names.add(packed)
    return any(one in names for one in allowed)


def _not_adapted(
    outside: tuple[str, ...], allowed: tuple[str, ...], profile: Profile, base: Model
) -> Refusal:
    return Refusal(
        code=codes.UNSUPPORTED_ADAPTER,
        sentence=f"its target_modules {listed(outside)} are not among --lora-target-modules "
        f"{listed(allowed)} of profile {profile.name!r} of {base.name!r}: the engine would answer as the base",
    )
