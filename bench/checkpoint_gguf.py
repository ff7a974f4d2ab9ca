"""Write a checkpoint's weights as a GGUF file of the llama architecture.

Knows GGUF's names, its order of a rotary pair's rows and the keys that llama.cpp asks for. The file has
no vocabulary: it is for a reader that is given token ids.
"""

from pathlib import Path

import torch

from lookahead.config import ModelConfig, RopeConfig
from lookahead.errors import InputError
from lookahead.models.loader import load_weights
from lookahead.models.rope import inverse_frequencies

KINDS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_gguf(ckpt: Path, config: ModelConfig, dtype: torch.dtype, path: Path) -> None:
    """Norms and biases are float32, matrices of `dtype`. Raises InputError for a dtype that GGUF has
    not, or where the package gguf is missing."""
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            "writing GGUF needs the package gguf: run `pip install gguf` first"
        ) from error
    if dtype not in KINDS:
        raise InputError(f"GGUF has no {dtype}: take bfloat16, float16 or float32")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    weights = load_weights(ckpt, config, dtype, torch.device("cpu"))
    for name, tensor in weights.targets(config).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        ordered = _pairs_side_by_side(name, tensor, config)
        is_matrix = ordered.dim() == 2
        kind = KINDS[dtype] if is_matrix else "F32"
        stored = (ordered if is_matrix else ordered.float()).contiguous()
        writer.add_tensor(
            gguf_name,
            stored.view(torch.uint8).numpy(),
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    if config.rope.rope_type != "default":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs_side_by_side(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """GGUF has the two rows of a rotary pair next to each other, a checkpoint half a head apart."""
    heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _rope_divisors(config: ModelConfig) -> torch.Tensor:
    """What each plain rotary frequency is divided by."""
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
    return (plain / inverse_frequencies(config.rope, config.head_dim)).float()
