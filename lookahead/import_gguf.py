"""A GGUF file to a checkpoint directory: `python -m lookahead.import_gguf FILE OUT_DIR`.

Knows the GGUF format's `llama` architecture and the Hugging Face layout of files, names and
weights. Whatever the file says that would change the model's arithmetic or its tokens is carried
over or refused by name; weights become float32 with exactly the values that dequantising gives.
Knows nothing of running a model, and nothing that runs one needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm

from lookahead.errors import InputError

if TYPE_CHECKING:  # gguf is an optional extra, and numpy comes with it
    import numpy as np
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderField, ReaderTensor

SHARD_BYTES = 2_000_000_000

HONOURED_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    # These two matter only to the scaling types that are refused.
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
}
# Values that leave the arithmetic as it is. Other values are refused, and so is every other key.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scale_linear": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # GGUF's token types

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's own split for files that name none better. It is not GPT-2's.
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Weight:
    """A tensor of the checkpoint. `rotary_heads` is 0 for rows that no rotary embedding turns."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What is to be written: weights and where they come from, tokenizer, JSON files by name."""

    weights: list[tuple[Weight, ReaderTensor]]
    tokenizer: Tokenizer
    json_files: dict[str, dict[str, Any]]


def import_gguf(file: Path, out_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in `file` as a checkpoint to `out_dir`, which must be new or empty.

    Raises InputError for anything wrong with either; then, as after an interrupt, nothing is left
    behind. Holds at most `shard_bytes` of weights in memory, or one tensor where that is more.
    """
    out_dir = Path(out_dir).resolve()
    try:
        free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    except OSError as error:
        raise InputError(f"{out_dir} cannot be used: {error.strerror}; name a new one") from error
    if not free:
        raise InputError(f"{out_dir} exists and is not an empty directory; name a new one")
    try:
        checkpoint = _checkpoint(_open(Path(file)))
        _write(checkpoint, out_dir, shard_bytes)
    except InputError as error:
        # Names out of a damaged file may hold anything, and the message is to be one line.
        text = "".join(char if char.isprintable() else "?" for char in str(error))
        raise InputError(f"cannot import {file}: {text}") from error


def _checkpoint(reader: GGUFReader) -> Checkpoint:
    """Check everything but the weights' values, so that what can fail fails before writing."""
    metadata = _metadata(reader)
    _refuse_unsupported(metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _model_config(metadata, tensors)
    weights = _weights(config, tensors)
    special_ids = _special_ids(metadata, config["vocab_size"])
    end_ids = [special_ids[name] for name in ("eos", "eot", "eom") if name in special_ids]
    generation = {
        "bos_token_id": special_ids.get("bos"),
        "eos_token_id": list(dict.fromkeys(end_ids)) or None,
        "pad_token_id": special_ids.get("pad"),
    }
    config |= {**generation, "eos_token_id": special_ids.get("eos")}
    json_files = {
        "tokenizer_config.json": _tokenizer_config(metadata, special_ids),
        "generation_config.json": generation,
        "config.json": config,
    }
    return Checkpoint(weights, _tokenizer(metadata, special_ids), json_files)


def _open(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("it needs the gguf package; pip install 'lookahead[gguf]'") from error

    class WholeReader(GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            # The library reads past the end as if nothing stood there, and loops on wild counts.
            if int(count) < 0 or int(offset) + int(count) > len(self.data):
                raise ValueError(f"{count} values at byte {offset} of {len(self.data)}")
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < int(count):
                raise ValueError(f"{count} values at byte {offset} of {len(self.data)}")
            return values

    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise InputError(f"{error.strerror}; expected a GGUF file that can be read") from error
    if magic != b"GGUF":
        raise InputError(f"it begins with {magic!r}, a GGUF file begins with b'GGUF'")
    try:
        reader = WholeReader(file)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise _damaged(" ".join(str(error).split())) from error
    if reader.byte_order != "I":
        raise InputError("its byte order is not this machine's; expected a little-endian file")
    spans = sorted((part.data_offset, part.n_bytes, part.name) for part in reader.tensors)
    for (start, size, name), (following, _, other) in pairwise(spans):
        if start + size > following:
            raise _damaged(f"tensors {name} and {other} overlap")
    return reader


def _damaged(what: str) -> InputError:
    return InputError(f"the file is damaged or cut short ({what}); download or convert it again")


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    try:
        return {name: _value(field) for name, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise _damaged(f"text that is not UTF-8: {error}") from error


def _value(field: ReaderField) -> Any:
    kind = field.types[-1].name
    values: list[Any] = [field.parts[index] for index in field.data]
    if kind == "STRING":
        values = [bytes(value).decode() for value in values]
    elif kind == "FLOAT32":  # as the shortest number that it is: 1e-05, not 9.999999747378752e-06
        values = [float(str(value[0])) for value in values]
    else:
        values = [value[0].item() for value in values]
    return values if field.types[0].name == "ARRAY" else values[0]


def _refuse_unsupported(metadata: dict[str, Any]) -> None:
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if metadata.get(key) != expected:
            found = _shown(metadata.get(key))
            raise InputError(f"{key} is {found}; only {expected!r} can be imported")
    if metadata.get("general.type", "model") != "model":
        raise InputError(f"general.type is {_shown(metadata['general.type'])}, expected 'model'")
    if metadata.get("split.count", 1) not in (0, 1):
        raise InputError("split.count: it is one part of several; merge them into one file first")
    for key, value in metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in HONOURED_KEYS or value in NEUTRAL_VALUES.get(name, ()):
            continue
        neutral = " or ".join(map(repr, NEUTRAL_VALUES.get(name, ()))) or "no such key"
        raise InputError(f"{key} is {_shown(value)}, which is not supported; expected {neutral}")


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


def _number(metadata: dict[str, Any], key: str, default: float | None = None) -> Any:
    """A positive number; whole where the format has a whole number, the key ending tells which."""
    value = metadata.get(key, default)
    fractional = key.endswith(("epsilon", "freq_base"))
    kind = float if fractional else int
    if type(value) is not kind or not 0 < value < math.inf:
        expected = "a number above 0" if fractional else "a whole number of at least 1"
        raise InputError(f"{key} is {_shown(value)}, expected {expected}")
    return value


def _model_config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    hidden_size = _number(metadata, "llama.embedding_length")
    heads = _number(metadata, "llama.attention.head_count")
    kv_heads = _number(metadata, "llama.attention.head_count_kv", heads)
    head_dim = _number(metadata, "llama.attention.key_length", hidden_size // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _number(metadata, key, head_dim) != head_dim:
            raise InputError(f"{key} is {metadata[key]}, expected the head size {head_dim}")
    if heads % kv_heads or head_dim % 2:
        raise InputError(
            f"llama.attention.head_count {heads}, head_count_kv {kv_heads}, head size {head_dim}; "
            "expected a multiple of head_count_kv and an even size"
        )
    vocab_size = len(_list(metadata, "tokenizer.ggml.tokens", str))
    if _number(metadata, "llama.vocab_size", vocab_size) != vocab_size:
        found = metadata["llama.vocab_size"]
        raise InputError(f"llama.vocab_size is {found}, expected the {vocab_size} listed tokens")
    theta = _number(metadata, "llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(tensors.pop("rope_freqs.weight", None), theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": _any_ends(tensors, "attn_q attn_k attn_v attn_output"),
        "mlp_bias": _any_ends(tensors, "ffn_gate ffn_up ffn_down"),
    }


def _any_ends(tensors: dict[str, ReaderTensor], stems: str) -> bool:
    endings = tuple(f".{stem}.bias" for stem in stems.split())
    return any(name.endswith(endings) for name in tensors)


def _rope_scaling(
    tensor: ReaderTensor | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The parameters behind `rope_freqs.weight`, which divides each rotary frequency by its entry.

    All published llama3 scalings differ in their factor only, which is the largest entry. The rest
    is taken as published, and accepted only if that gives the whole tensor.
    """
    if tensor is None:
        return None
    found = [float(value) for value in tensor.data.ravel()]
    factor, low, high, original = max(found, default=0.0), 1.0, 4.0, 8192
    expected = []
    for pair in range(head_dim // 2):
        turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / (blend + (1 - blend) / max(factor, 1.0)))
    same = len(found) == len(expected) and all(map(_close, found, expected))
    if tensor.tensor_type.name != "F32" or not same:
        raise InputError(
            "tensor rope_freqs.weight is not of the one supported scaling, llama3 with "
            "low_freq_factor 1, high_freq_factor 4 and 8192 original positions"
        )
    if factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-5)


def _weights(
    config: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> list[tuple[Weight, ReaderTensor]]:
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize
    from numpy import uint8, zeros

    weights = []
    for gguf_name, weight in _expected_weights(config):
        tensor = tensors.pop(gguf_name, None)
        if tensor is None:
            raise InputError(f"tensor {gguf_name} is missing; expected one of shape {weight.shape}")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != weight.shape:
            raise InputError(f"tensor {gguf_name} has shape {shape}, expected {weight.shape}")
        weights.append((weight, tensor))
    if tensors:
        raise InputError(f"tensor {min(tensors)} is unexpected; a plain llama model has none such")
    for kind in {tensor.tensor_type for _, tensor in weights}:
        try:  # on one block of zeros
            dequantize(zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=uint8), kind)
        except NotImplementedError as error:
            raise InputError(f"tensor type {kind.name} cannot be turned into float32") from error
    return weights


def _expected_weights(config: dict[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Every tensor that `config` asks for, by its GGUF name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    linears = {
        "attn_q": ("self_attn.q_proj", (q_rows, hidden), heads),
        "attn_k": ("self_attn.k_proj", (kv_rows, hidden), kv_heads),
        "attn_v": ("self_attn.v_proj", (kv_rows, hidden), 0),
        "attn_output": ("self_attn.o_proj", (hidden, q_rows), 0),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden), 0),
        "ffn_up": ("mlp.up_proj", (inner, hidden), 0),
        "ffn_down": ("mlp.down_proj", (hidden, inner), 0),
    }
    vocabulary = (config["vocab_size"], hidden)
    yield "token_embd.weight", Weight("model.embed_tokens.weight", vocabulary)
    for layer in range(config["num_hidden_layers"]):
        block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        for stem, name in norms.items():
            yield f"{block}{stem}.weight", Weight(f"{prefix}{name}.weight", (hidden,))
        for stem, (name, shape, rotary_heads) in linears.items():
            yield f"{block}{stem}.weight", Weight(f"{prefix}{name}.weight", shape, rotary_heads)
            if config["attention_bias" if stem.startswith("attn") else "mlp_bias"]:
                bias = Weight(f"{prefix}{name}.bias", shape[:1], rotary_heads)
                yield f"{block}{stem}.bias", bias
    yield "output_norm.weight", Weight("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", Weight("lm_head.weight", vocabulary)


def _values(weight: Weight, tensor: ReaderTensor) -> np.ndarray:
    """The dequantised values, float32 of `weight.shape`.

    GGUF has the two rows of a rotary pair next to each other, a checkpoint half a head apart.
    """
    import numpy as np
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if not np.isfinite(values).all():
        raise _damaged(f"tensor {tensor.name} holds values that are not finite")
    if weight.rotary_heads:
        pairs = weight.shape[0] // weight.rotary_heads // 2
        values = values.reshape(weight.rotary_heads, pairs, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(values.reshape(weight.shape))


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise InputError(f"{key} is {_shown(values)}, expected a list of {kind.__name__} values")
    return values


def _special_ids(metadata: dict[str, Any], vocab_size: int) -> dict[str, int]:
    """The ids of those of bos, eos, eot, eom, unk and pad that the file names."""
    gguf_names = {"unk": "unknown", "pad": "padding"}
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "unk", "pad"):
        key = f"tokenizer.ggml.{gguf_names.get(name, name)}_token_id"
        if key not in metadata:
            continue
        if type(metadata[key]) is not int or not 0 <= metadata[key] < vocab_size:
            raise InputError(f"{key} is {_shown(metadata[key])}, expected an id below {vocab_size}")
        ids[name] = metadata[key]
    return ids


def _adds(metadata: dict[str, Any], name: str, special_ids: dict[str, int]) -> bool:
    """Whether every text begins (bos) or ends (eos) with the token of that name."""
    # llama.cpp adds bos to Llama 3 text unless a file says that it should not.
    usual = name == "bos" and metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    adds = bool(metadata.get(f"tokenizer.ggml.add_{name}_token", usual))
    if adds and name not in special_ids:
        raise InputError(f"tokenizer.ggml.{name}_token_id is missing, and texts are to have it")
    return adds


def _tokenizer_config(metadata: dict[str, Any], special_ids: dict[str, int]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos", special_ids),
        "add_eos_token": _adds(metadata, "eos", special_ids),
    }
    for name in ("bos", "eos", "unk", "pad"):
        if name in special_ids:
            config[f"{name}_token"] = tokens[special_ids[name]]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _tokenizer(metadata: dict[str, Any], special_ids: dict[str, int]) -> Tokenizer:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    kinds = _list(metadata, "tokenizer.ggml.token_type", int)
    merges = _list(metadata, "tokenizer.ggml.merges", str)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(kinds) != len(tokens):
        raise InputError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(ids)} different ones, and "
            f"tokenizer.ggml.token_type {len(kinds)}; expected three equal numbers"
        )
    pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    ignore_merges = metadata["tokenizer.ggml.pre"] == "llama-bpe"
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"tokenizer.ggml.merges cannot be used: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, kinds))
    begin, end = (
        [tokens[special_ids[name]]] if _adds(metadata, name, special_ids) else []
        for name in ("bos", "eos")
    )
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(token, ids[token]) for token in {*begin, *end}],
        )
    return tokenizer


def _pre_tokenizer(name: Any) -> pre_tokenizers.PreTokenizer:
    def splits(*expressions: str) -> list[pre_tokenizers.PreTokenizer]:
        return [pre_tokenizers.Split(Regex(text), "isolated") for text in expressions]

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "gpt-2": [gpt2],
        "default": [*splits(*DEFAULT_SPLITS), to_bytes],
        "llama-bpe": [*splits(LLAMA3_SPLIT), to_bytes],
    }
    if name not in known:
        raise InputError(
            f"tokenizer.ggml.pre is {_shown(name)}, expected one of {', '.join(known)}"
        )
    return pre_tokenizers.Sequence(known[name])


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[AddedToken]:
    """The tokens that are found in a text as a whole, before anything splits it."""
    added = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            raise InputError(f"tokenizer.ggml.token_type {kind} of {token!r} is not supported")
        if kind not in (NORMAL, UNUSED):
            added.append(AddedToken(token, special=kind != USER_DEFINED, normalized=False))
    return added


def _write(checkpoint: Checkpoint, out_dir: Path, shard_bytes: int) -> None:
    """Write next to `out_dir`, then rename. config.json, which loading needs, is written last."""
    scratch = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        _require_space(checkpoint, scratch)
        checkpoint.tokenizer.save(str(scratch / "tokenizer.json"))
        _write_weights(checkpoint.weights, scratch, shard_bytes)
        for name, content in checkpoint.json_files.items():
            _write_json(scratch / name, content)
        scratch.replace(out_dir)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise InputError(f"{out_dir} cannot be written: {error}") from error
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _bytes(weight: Weight) -> int:
    return 4 * math.prod(weight.shape)


def _require_space(checkpoint: Checkpoint, directory: Path) -> None:
    needed = sum(_bytes(weight) for weight, _ in checkpoint.weights)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(f"the float32 weights need {needed:,} bytes of disk, {free:,} are free")


def _write_weights(
    weights: list[tuple[Weight, ReaderTensor]], directory: Path, shard_bytes: int
) -> None:
    from safetensors.numpy import save_file

    shards: list[list[tuple[Weight, ReaderTensor]]] = [[]]
    for entry in weights:
        filled = sum(_bytes(weight) for weight, _ in shards[-1])
        if shards[-1] and filled + _bytes(entry[0]) > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    weight_map = {}
    # disable=None: a bar on a terminal, nothing elsewhere
    with tqdm(total=len(weights), desc="importing", unit="tensor", disable=None) as progress:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                name = "model.safetensors"
            values = {}
            for weight, tensor in shard:
                values[weight.name] = _values(weight, tensor)
                weight_map[weight.name] = name
                progress.update()
            save_file(values, directory / name, metadata={"format": "pt"})
            # The library makes files that only their owner can read.
            shutil.copymode(directory / "tokenizer.json", directory / name)
    if len(shards) > 1:
        total = sum(_bytes(weight) for weight, _ in weights)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lookahead.import_gguf",
        description="Turn a GGUF file of the llama architecture into a checkpoint directory.",
    )
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument(
        "out_dir", type=Path, help="the directory to make, which must not exist yet"
    )
    options = parser.parse_args(arguments)
    try:
        import_gguf(options.file, options.out_dir)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"wrote {options.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
