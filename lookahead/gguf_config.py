"""The keys of a GGUF file that describe the model, as a checkpoint's `config.json`.

Whatever a file says that would change the model's arithmetic is carried over or refused by name.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from lookahead.config import MAX_COUNT
from lookahead.errors import InputError
from lookahead.gguf_file import read_list, shown

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

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


def refuse_unsupported(metadata: dict[str, Any]) -> None:
    """Raise InputError for another kind of file or model, or a key that is not honoured."""
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if metadata.get(key) != expected:
            found = shown(metadata.get(key))
            raise InputError(f"{key} is {found}; only {expected!r} can be imported")
    if metadata.get("general.type", "model") != "model":
        raise InputError(f"general.type is {shown(metadata['general.type'])}, expected 'model'")
    if metadata.get("split.count", 1) not in (0, 1):
        raise InputError("split.count: it is one part of several; merge them into one file first")
    for key, value in metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in HONOURED_KEYS or value in NEUTRAL_VALUES.get(name, ()):
            continue
        neutral = " or ".join(map(repr, NEUTRAL_VALUES.get(name, ()))) or "no such key"
        raise InputError(f"{key} is {shown(value)}, which is not supported; expected {neutral}")


def read_config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """What config.json says of the model's shape and arithmetic. Takes `rope_freqs.weight`, which is
    configuration, out of `tensors`."""
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
    vocab_size = len(read_list(metadata, "tokenizer.ggml.tokens", str))
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


def _number(metadata: dict[str, Any], key: str, default: float | None = None) -> Any:
    """A positive number; whole where the format has a whole number, the key ending tells which."""
    value = metadata.get(key, default)
    fractional = key.endswith(("epsilon", "freq_base"))
    kind = float if fractional else int
    largest = sys.float_info.max if fractional else MAX_COUNT
    if type(value) is not kind or not 0 < value <= largest:
        expected = "a number above 0" if fractional else f"a whole number from 1 to {largest}"
        raise InputError(f"{key} is {shown(value)}, expected {expected}")
    return value


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
    try:
        for pair in range(head_dim // 2):
            turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)
            blend = min(1.0, max(0.0, (turns - low) / (high - low)))
            expected.append(1 / (blend + (1 - blend) / max(factor, 1.0)))
    except ArithmeticError:  # an infinite factor, or a base close to 0: no scaling at all
        expected = []
    same = len(found) == len(expected) == head_dim // 2 and all(map(_close, found, expected))
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
