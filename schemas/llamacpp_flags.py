"""The flags of llama-server a profile may use, each with the attribute of xllamacpp.CommonParams it sets.

The catalog refuses what is not here and the embedded driver sets what is, both through `read`, so an
argument accepted at `model add` is one the engine understands. It imports no engine: names and numbers
are data, and a test holds them against the installed xllamacpp.
"""

from difflib import get_close_matches
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import Struct

Value = bool | int | float | str | dict[str, str] | tuple[float, ...]
Kind = Literal["none", "int", "float", "inverse", "str", "enum", "json", "split"]

_KIND_WORDS: Final[dict[Kind, str]] = {
    "none": "no value",
    "int": "a whole number",
    "float": "a number",
    "inverse": "a number above 0",
    "str": "a text",
    "enum": "a word",
    "json": "a JSON object",
    "split": "numbers separated by commas",
}


class Flag(Struct, frozen=True, kw_only=True):
    """One flag with all its spellings.

    kind      value on the command line   what is set
    none      none                        `sets`: each attribute to its constant
    int, float, str                       each of `paths` to the value
    inverse   N                           each of `paths` to 1/N
    enum      a word of `words`           each of `paths` to that word's number
    json      an object                   each of `paths` to a mapping of key -> JSON text
    split     1,2,…                       each of `paths` to that list, filled with zeros to `length`

    An int may also take one of `words`. `refused` says why a profile may not use the flag; a refused
    flag has neither `paths` nor `sets`. `low` is the smallest number accepted.
    """

    names: tuple[str, ...]
    kind: Kind = "none"
    paths: tuple[str, ...] = ()
    sets: dict[str, bool | int] = {}
    words: dict[str, int] = {}
    low: int | None = None
    length: int = 0
    refused: str = ""


class Setting(Struct, frozen=True, kw_only=True):
    """One attribute to set on CommonParams, e.g. `cpuparams.n_threads` to 4, and the flag it came from."""

    path: str
    value: Value
    flag: str


class FlagProblem(Struct, frozen=True, kw_only=True):
    """What is wrong with the argument at `index`."""

    index: int
    sentence: str


def _int(*names: str, to: str, low: int | None = None, words: dict[str, int] | None = None) -> Flag:
    return Flag(names=names, kind="int", paths=(to,), low=low, words=words or {})


def _float(*names: str, to: str) -> Flag:
    return Flag(names=names, kind="float", paths=(to,))


def _str(*names: str, to: str) -> Flag:
    return Flag(names=names, kind="str", paths=(to,))


def _enum(*names: str, to: str, words: dict[str, int]) -> Flag:
    return Flag(names=names, kind="enum", paths=(to,), words=words)


def _on(*names: str, to: str) -> Flag:
    return Flag(names=names, sets={to: True})


def _off(*names: str, to: str) -> Flag:
    return Flag(names=names, sets={to: False})


def _no(why: str, *names: str) -> Flag:
    return Flag(names=names, refused=why)


CACHE_TYPES: Final = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
"""ggml_type numbers of the KV cache types llama-server allows."""

LOAD_MODES: Final = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
POOLING: Final = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
ROPE_SCALING: Final = {"none": 0, "linear": 1, "yarn": 2}
FLASH_ATTENTION: Final = {"auto": -1, "off": 0, "on": 1}
SPLIT_MODES: Final = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
NUMA: Final = {"distribute": 1, "isolate": 2, "numactl": 3}
REASONING_FORMATS: Final = {"none": 0, "auto": 1, "deepseek-legacy": 2, "deepseek": 3}
PRIORITIES: Final = {"-1": -1, "0": 0, "1": 1, "2": 2, "3": 3}
ON_OFF: Final = {"on": 1, "off": 0}

_AGENT = "the agent sets it"
_NAME = "the engine runs under the catalog name; give `aliases` in the entry instead"
_SOURCE = "the entry's `source` says which weights to load"
_DOOR = "it opens routes or files that no client may reach"
_LOG = "the launcher keeps the engine's log"
_IDLE = "the control plane decides when a model gives its memory back (`scaling.idle_timeout`)"
_LATER = "adapters are a later version"
_ABSENT = "the embedded engine cannot set it"

FLAGS: Final[tuple[Flag, ...]] = (
    # Context, slots, batches
    _int("-c", "--ctx-size", to="n_ctx", low=0),
    _int("-np", "--parallel", to="n_parallel", low=1),
    _int("-b", "--batch-size", to="n_batch", low=1),
    _int("-ub", "--ubatch-size", to="n_ubatch", low=1),
    _int("-n", "--predict", "--n-predict", to="n_predict", low=-1),
    _int("--keep", to="n_keep", low=-1),
    _on("-cb", "--cont-batching", to="cont_batching"),
    _off("-nocb", "--no-cont-batching", to="cont_batching"),
    _on("-kvu", "--kv-unified", to="kv_unified"),
    _off("-no-kvu", "--no-kv-unified", to="kv_unified"),
    _int("--kv-unified-per-slot", to="kv_unified_per_slot", low=1),
    _on("--context-shift", to="ctx_shift"),
    _off("--no-context-shift", to="ctx_shift"),
    _on("--swa-full", to="swa_full"),
    _int("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", to="n_ctx_checkpoints", low=0),
    _int("-cms", "--checkpoint-min-step", to="checkpoint_min_step", low=0),
    # Caches
    _enum("-ctk", "--cache-type-k", to="cache_type_k", words=CACHE_TYPES),
    _enum("-ctv", "--cache-type-v", to="cache_type_v", words=CACHE_TYPES),
    _int("-cram", "--cache-ram", to="cache_ram_mib", low=-1),
    _int("--cache-reuse", to="n_cache_reuse", low=0),
    _on("--cache-prompt", to="cache_prompt"),
    _off("--no-cache-prompt", to="cache_prompt"),
    _on("--cache-idle-slots", to="cache_idle_slots"),
    _off("--no-cache-idle-slots", to="cache_idle_slots"),
    _float("-sps", "--slot-prompt-similarity", to="slot_prompt_similarity"),
    # Processor
    _int("-t", "--threads", to="cpuparams.n_threads", low=-1),
    _int("-tb", "--threads-batch", to="cpuparams_batch.n_threads", low=-1),
    _int("--threads-http", to="n_threads_http", low=-1),
    _enum("--prio", to="cpuparams.priority", words=PRIORITIES),
    _enum("--prio-batch", to="cpuparams_batch.priority", words=PRIORITIES),
    _int("--poll", to="cpuparams.poll", low=0),
    _int("--poll-batch", to="cpuparams_batch.poll", low=0),
    _enum("--cpu-strict", to="cpuparams.strict_cpu", words={"0": 0, "1": 1}),
    _enum("--cpu-strict-batch", to="cpuparams_batch.strict_cpu", words={"0": 0, "1": 1}),
    _enum("--numa", to="numa", words=NUMA),
    # Memory and devices. The two older spellings set the same mode as the newer one.
    _enum("-lm", "--load-mode", to="load_mode", words=LOAD_MODES),
    Flag(names=("--mlock",), sets={"load_mode": LOAD_MODES["mmap+mlock"]}),
    Flag(names=("--mmap",), sets={"load_mode": LOAD_MODES["mmap"]}),
    Flag(names=("--no-mmap",), sets={"load_mode": LOAD_MODES["none"]}),
    _enum("-lzm", "--lazy-mode", to="lazy_mode", words={"off": 0, "auto": 1, "on": 2}),
    _int(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        to="n_gpu_layers",
        low=0,
        words={"auto": -1, "all": -2},
    ),
    _enum("-sm", "--split-mode", to="split_mode", words=SPLIT_MODES),
    Flag(names=("-ts", "--tensor-split"), kind="split", paths=("tensor_split",), length=128),
    _int("-mg", "--main-gpu", to="main_gpu", low=0),
    _str("-ot", "--override-tensor", to="tensor_buft_overrides"),
    _int("--moe-cache-mib", to="moe_cache_size", low=0),
    _off("-kvo", "--kv-offload", to="no_kv_offload"),
    _on("-nkvo", "--no-kv-offload", to="no_kv_offload"),
    _off("--op-offload", to="no_op_offload"),
    _on("--no-op-offload", to="no_op_offload"),
    _off("--repack", to="no_extra_bufts"),
    _on("-nr", "--no-repack", to="no_extra_bufts"),
    _on("--no-host", to="no_host"),
    _enum("-fit", "--fit", to="fit_params", words=ON_OFF),
    _int("-fitc", "--fit-ctx", to="fit_params_min_ctx", low=0),
    _on("--check-tensors", to="check_tensors"),
    _on("--warmup", to="warmup"),
    _off("--no-warmup", to="warmup"),
    # Attention and position
    _enum("-fa", "--flash-attn", to="flash_attn_type", words=FLASH_ATTENTION),
    _enum("--rope-scaling", to="rope_scaling_type", words=ROPE_SCALING),
    Flag(names=("--rope-scale",), kind="inverse", paths=("rope_freq_scale",)),
    _float("--rope-freq-base", to="rope_freq_base"),
    _float("--rope-freq-scale", to="rope_freq_scale"),
    _int("--yarn-orig-ctx", to="yarn_orig_ctx", low=0),
    _float("--yarn-ext-factor", to="yarn_ext_factor"),
    _float("--yarn-attn-factor", to="yarn_attn_factor"),
    _float("--yarn-beta-slow", to="yarn_beta_slow"),
    _float("--yarn-beta-fast", to="yarn_beta_fast"),
    # What it answers
    _on("--embedding", "--embeddings", to="embedding"),
    Flag(
        names=("--rerank", "--reranking"),
        sets={"embedding": True, "pooling_type": POOLING["rank"]},
    ),
    _enum("--pooling", to="pooling_type", words=POOLING),
    _int("--embd-normalize", to="embd_normalize", low=-1),
    _on("--jinja", to="use_jinja"),
    _off("--no-jinja", to="use_jinja"),
    _str("--chat-template", to="chat_template"),
    Flag(names=("--chat-template-kwargs",), kind="json", paths=("default_template_kwargs",)),
    _enum("-rea", "--reasoning", to="enable_reasoning", words={"auto": -1, **ON_OFF}),
    _enum("--reasoning-format", to="reasoning_format", words=REASONING_FORMATS),
    _int("--reasoning-budget", to="sampling.reasoning_budget_tokens", low=-1),
    _str("--reasoning-budget-message", to="sampling.reasoning_budget_message"),
    _on("--prefill-assistant", to="prefill_assistant"),
    _off("--no-prefill-assistant", to="prefill_assistant"),
    _on("-sp", "--special", to="special"),
    _str("-mm", "--mmproj", to="mmproj.path"),
    _on("--mmproj-offload", to="mmproj_use_gpu"),
    _off("--no-mmproj-offload", to="mmproj_use_gpu"),
    _int("--image-min-tokens", to="image_min_tokens", low=1),
    _int("--image-max-tokens", to="image_max_tokens", low=1),
    # Sampling defaults, used where a request names none
    _int("-s", "--seed", to="sampling.seed", low=-1),
    _str("--samplers", to="sampling.samplers"),
    _on("--ignore-eos", to="sampling.ignore_eos"),
    _float("--temp", "--temperature", to="sampling.temp"),
    _int("--top-k", to="sampling.top_k", low=0),
    _float("--top-p", to="sampling.top_p"),
    _float("--min-p", to="sampling.min_p"),
    _float("--typical", "--typical-p", to="sampling.typ_p"),
    _float("--xtc-probability", to="sampling.xtc_probability"),
    _float("--xtc-threshold", to="sampling.xtc_threshold"),
    _int("--repeat-last-n", to="sampling.penalty_last_n", low=-1),
    _float("--repeat-penalty", to="sampling.penalty_repeat"),
    _float("--presence-penalty", to="sampling.penalty_present"),
    _float("--frequency-penalty", to="sampling.penalty_freq"),
    _float("--dry-multiplier", to="sampling.dry_multiplier"),
    _float("--dry-base", to="sampling.dry_base"),
    _int("--dry-allowed-length", to="sampling.dry_allowed_length", low=0),
    _int("--dry-penalty-last-n", to="sampling.dry_penalty_last_n", low=-1),
    _float("--dynatemp-range", to="sampling.dynatemp_range"),
    _float("--dynatemp-exp", to="sampling.dynatemp_exponent"),
    _enum("--mirostat", to="sampling.mirostat", words={"0": 0, "1": 1, "2": 2}),
    _float("--mirostat-lr", to="sampling.mirostat_eta"),
    _float("--mirostat-ent", to="sampling.mirostat_tau"),
    _on("-bs", "--backend-sampling", to="sampling.backend_sampling"),
    # The server
    Flag(names=("-to", "--timeout"), kind="int", paths=("timeout_read", "timeout_write"), low=0),
    _int("--sse-ping-interval", to="sse_ping_interval", low=-1),
    _int("-lv", "--verbosity", "--log-verbosity", to="verbosity", low=0),
    # Refused
    _no(_AGENT, "--host", "--port", "--reuse-port", "--api-key", "--api-key-file"),
    _no(_AGENT, "--metrics", "--slots", "--no-slots", "--slot-save-path", "--api-prefix"),
    _no(_AGENT, "--ssl-key-file", "--ssl-cert-file", "--offline"),
    _no(_NAME, "-a", "--alias", "--tags"),
    _no(_SOURCE, "-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo"),
    _no(_SOURCE, "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token"),
    _no(_SOURCE, "-mmu", "--mmproj-url", "--models-dir", "--models-preset", "--models-max"),
    _no(_SOURCE, "--models-autoload", "--no-models-autoload"),
    _no(_DOOR, "--props", "--path", "--media-path", "--tools", "--tools-runtime"),
    _no(_DOOR, "--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent"),
    _no(_DOOR, "--ui", "--webui", "--no-ui", "--no-webui", "--ui-mcp-proxy", "--webui-mcp-proxy"),
    _no(_DOOR, "--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials"),
    _no(_LOG, "--log-disable", "--log-file", "--log-jsonl", "--log-colors", "--log-prefix"),
    _no(_LOG, "--log-timestamps", "-v", "--verbose", "--log-verbose"),
    _no(_IDLE, "--sleep-idle-seconds"),
    _no(_LATER, "--lora", "--lora-scaled", "--lora-init-without-apply"),
    _no(_ABSENT, "-dev", "--device", "--rpc", "--override-kv", "-cmoe", "--cpu-moe"),
    _no(_ABSENT, "-ncmoe", "--n-cpu-moe", "-C", "--cpu-mask", "-Cr", "--cpu-range"),
    _no(_ABSENT, "--chat-template-file", "--grammar", "--grammar-file", "-j", "--json-schema"),
    _no(_ABSENT, "--control-vector", "--control-vector-scaled", "-md", "--model-draft"),
)

BY_NAME: Final[dict[str, Flag]] = {name: flag for flag in FLAGS for name in flag.names}


def read(args: tuple[str, ...]) -> tuple[tuple[Setting, ...], tuple[FlagProblem, ...]]:
    """The attributes these arguments set, and everything that is wrong with them.

    An attribute may be set by one argument only: the engine would silently keep the last.
    """
    settings: list[Setting] = []
    problems: list[FlagProblem] = []
    owners: dict[str, str] = {}
    index = 0
    while index < len(args):
        at, text = index, args[index]
        index += 1
        flag = BY_NAME.get(text)
        if flag is None:
            problems.append(FlagProblem(index=at, sentence=_unknown(text)))
            # Its value, if it has one, would only be reported a second time.
            if index < len(args) and not args[index].startswith("-"):
                index += 1
            continue
        if flag.refused:
            problems.append(
                FlagProblem(index=at, sentence=f"{text} may not be used: {flag.refused}")
            )
            if index < len(args) and not args[index].startswith("-"):
                index += 1
            continue
        found: list[tuple[str, Value]]
        if flag.kind == "none":
            found = list(flag.sets.items())
        else:
            if index >= len(args):
                problems.append(FlagProblem(index=at, sentence=f"{text} needs {_wanted(flag)}"))
                continue
            value = _value(flag, args[index])
            index += 1
            if value is None:
                sentence = f"{text} takes {_wanted(flag)}, not {args[index - 1]!r}"
                problems.append(FlagProblem(index=index - 1, sentence=sentence))
                continue
            found = [(path, value) for path in flag.paths]
        for path, value in found:
            if path in owners:
                earlier = owners[path]
                both = f"{text} is given twice" if earlier == text else f"{earlier} and {text}"
                sentence = f"{both}; each setting may be given once (both set {path})"
                problems.append(FlagProblem(index=at, sentence=sentence))
                break
            owners[path] = text
            settings.append(Setting(path=path, value=value, flag=text))
    return tuple(settings), tuple(problems)


def _unknown(text: str) -> str:
    if not text.startswith("-"):
        return f"expected a llama-server flag, got {text!r}"
    name = text.partition("=")[0]
    if name != text and name in BY_NAME:
        return f"write {name} and its value as two arguments, not {text!r}"
    near = get_close_matches(name, BY_NAME, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{text} is not a llama-server flag this version knows{hint}"


def _wanted(flag: Flag) -> str:
    if flag.kind == "enum":
        return "one of " + ", ".join(flag.words)
    wanted = _KIND_WORDS[flag.kind]
    if flag.low is not None:
        wanted += f" of at least {flag.low}"
    if flag.words:
        wanted += " or one of " + ", ".join(flag.words)
    return wanted


_INT_MAX = 2**31 - 1


def _value(flag: Flag, text: str) -> Value | None:
    """The value `text` stands for, None when it does not fit the flag's kind."""
    if text in flag.words:
        return flag.words[text]
    match flag.kind:
        case "none" | "enum":
            return None
        case "str":
            return text
        case "int":
            number = _number(text)
            if number is None or number != int(number) or "." in text or "e" in text.lower():
                return None
            low = -_INT_MAX if flag.low is None else flag.low
            return int(number) if low <= number <= _INT_MAX else None
        case "float":
            return _number(text)
        case "inverse":
            number = _number(text)
            return 1.0 / number if number is not None and number > 0 else None
        case "json":
            return _object(text)
        case "split":
            parts = [_number(part) for part in text.split(",")]
            numbers = [part for part in parts if part is not None and part >= 0]
            if len(numbers) != len(parts) or len(numbers) > flag.length:
                return None
            return (*numbers, *([0.0] * (flag.length - len(numbers))))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None


def _object(text: str) -> dict[str, str] | None:
    try:
        decoded: Any = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return None
    if not isinstance(decoded, dict):
        return None
    members = cast("dict[str, Any]", decoded)
    return {key: msgspec.json.encode(value).decode() for key, value in members.items()}
