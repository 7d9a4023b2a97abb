"""Writes small complete GGUF files of every kind of model the estimate tells apart; an engine really loads them.

The weights are random and mean nothing, the vocabulary is bytes: what is real is the shape. The same
arguments give the same bytes, so a file may be compared by its sha256. `shards` splits one as
llama-gguf-split does.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.hub.ggufkinds import CONTEXT, KINDS, VOCABULARY, Keys, Model, Shape, Sizes, basic_keys

__all__ = [
    "CONTEXT",
    "KINDS",
    "VOCABULARY",
    "Model",
    "Quant",
    "Sizes",
    "basic_keys",
    "shards",
    "write",
]

Quant = gguf.GGMLQuantizationType


def write(
    path: Path,
    kind: str,
    *,
    seed: int = 0,
    sizes: Sizes | None = None,
    quant: Quant = gguf.GGMLQuantizationType.F16,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A complete GGUF of `kind` (a name in KINDS) at `path`. `quant` is the type of the large tensors;
    `extra` adds keys, or replaces some."""
    sizes = sizes or Sizes()
    model = KINDS[kind](sizes)
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name(f"{kind} of random weights")
    writer.add_file_type(_FILE_TYPES[quant])
    for key, value in {**model.general, **_prefixed(model), **(extra or {})}.items():
        _add(writer, key, value)
    _TOKENIZERS[model.tokenizer](writer, sizes.vocabulary)
    random = np.random.default_rng(seed)
    for name, shape in model.tensors.items():
        _add_tensor(writer, name, shape, quant, random)
    _finish(writer)
    return path


def shards(source: Path, folder: Path, count: int) -> list[Path]:
    """`source` split into `count` files of `folder`, named `<name>-00001-of-00003.gguf` as an engine expects.

    The first holds the model's keys; each has its part of the tensors and says which part it is.
    """
    reader = gguf.GGUFReader(source)
    share = -(-len(reader.tensors) // count)
    architecture = reader.fields["general.architecture"].contents()
    paths: list[Path] = []
    for number in range(count):
        path = folder / f"{source.stem}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        if number == 0:
            _copy_fields(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
        paths.append(path)
    return paths


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_PROJECTIONS: Final = ("ssm_in.weight", "ssm_out.weight", "in_proj.weight", "out_proj.weight")


def _prefixed(model: Model) -> Keys:
    return {f"{model.architecture}.{key}": value for key, value in model.keys.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    shape: Shape,
    quant: Quant,
    random: np.random.Generator,
) -> None:
    """Matrices take the type asked for; norms, biases and small states are F32, as converters write them."""
    spread = 1.0 / math.sqrt(shape[0])
    values = random.normal(0.0, spread, size=tuple(reversed(shape))).astype(np.float32)
    if "norm" in name or name.endswith((".ssm_d", ".ssm_a")):
        values = np.abs(values) + 1.0
        if name.endswith(".ssm_a"):
            values = -values
    small = len(shape) == 1 or shape[0] % 32 != 0 or name.endswith(".bias")
    plain = small or any(part in name for part in ("norm", "ssm_", "conv", "gate_inp"))
    if small or (plain and not name.endswith(_PROJECTIONS)):
        writer.add_tensor(name, values)
        return
    packed = gguf.quants.quantize(values, quant)
    writer.add_tensor(name, packed, raw_dtype=quant)


_FILE_TYPES: Final = {
    Quant.F32: gguf.LlamaFileType.ALL_F32,
    Quant.F16: gguf.LlamaFileType.MOSTLY_F16,
    Quant.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Quant.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Quant.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}


# Vocabularies ----------------------------------------------------------------------------------------


def _bytes_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Three control tokens, every byte, and words nobody needs up to the size."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    if size < len(tokens):
        raise ValueError(f"a vocabulary of bytes has at least {len(tokens)} tokens")
    more = size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"▁word{index}" for index in range(more))])
    writer.add_token_scores([0.0] * len(tokens) + [-1.0 - index for index in range(more)])
    writer.add_token_types([*kinds, *([gguf.TokenType.NORMAL] * more)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def _pieces_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The pieces of a BERT: control tokens, letters that begin a word and letters within one."""
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
    tokens = [*control, *(f"▁{letter}" for letter in letters), *letters]
    tokens += [f"▁word{index}" for index in range(size - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * len(control)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(control))
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    for name, token in (("padding", 0), ("unknown", 1), ("bos", 2), ("seperator", 3), ("mask", 4)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_uint32("tokenizer.ggml.cls_token_id", 2)


_TOKENIZERS: Final[dict[str, Callable[[gguf.GGUFWriter, int], None]]] = {
    "llama": _bytes_vocabulary,
    "bert": _pieces_vocabulary,
}
