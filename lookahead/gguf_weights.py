"""The tensors of a GGUF file as the weights of a checkpoint: names, order of rows, float32 values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookahead.errors import InputError
from lookahead.gguf_file import damaged

if TYPE_CHECKING:  # gguf is an optional extra, and numpy comes with it
    import numpy as np
    from gguf.gguf_reader import ReaderTensor


@dataclass(frozen=True)
class Weight:
    """A tensor of the checkpoint. `rotary_heads` is 0 for rows that no rotary embedding turns."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def find_weights(
    config: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> list[tuple[Weight, ReaderTensor]]:
    """Every weight that `config` asks for with the tensor that holds it. Raises InputError for a tensor
    that is missing, unexpected, misshapen, or of a type that cannot be read."""
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


def weight_values(weight: Weight, tensor: ReaderTensor) -> np.ndarray:
    """The dequantised values, float32 of `weight.shape`.

    GGUF has the two rows of a rotary pair next to each other, a checkpoint half a head apart.
    """
    import numpy as np
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if not np.isfinite(values).all():
        raise damaged(f"tensor {tensor.name} holds values that are not finite")
    if weight.rotary_heads:
        pairs = weight.shape[0] // weight.rotary_heads // 2
        values = values.reshape(weight.rotary_heads, pairs, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(values.reshape(weight.shape))


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
