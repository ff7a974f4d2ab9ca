"""A LLaMA forward pass that is slow and plain: float64, no cache, no mask, one position at a time.

Knows the tensor names and `config.json` keys of published checkpoints and how greedy decoding
repeats a forward pass. Knows nothing of lookahead decoding or of the engine under test.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def naive_logits(weights: dict[str, Tensor], config: dict, ids: list[int]) -> Tensor:
    """Logits after every position of `ids`, everything recomputed.

    Args:
        weights: tensors by their published name, any floating dtype, computed with as float64.
        config: the keys of `config.json`.
        ids: P token ids, P >= 1.

    Returns:
        [P, vocab] float64.
    """
    if not ids:
        raise ValueError("expected at least one token id, got none")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"expected hidden_act 'silu', got {config['hidden_act']!r}")
    weights = {name: tensor.double() for name, tensor in weights.items()}
    eps = config.get("rms_norm_eps", 1e-6)
    cos, sin = _rope_tables(config, len(ids))

    hidden = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = _rms_norm(hidden, weights[f"{name}.input_layernorm.weight"], eps)
        hidden = hidden + _attention(weights, f"{name}.self_attn", config, normed, cos, sin)
        normed = _rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], eps)
        hidden = hidden + _mlp(weights, f"{name}.mlp", normed)
    hidden = _rms_norm(hidden, weights["model.norm.weight"], eps)

    tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return hidden @ head.T


def naive_next_token(weights: dict[str, Tensor], config: dict) -> Callable[[Sequence[int]], int]:
    """The greedy next token after a sequence of ids, remembered for every prefix seen."""
    known: dict[tuple[int, ...], int] = {}

    def next_token(ids: Sequence[int]) -> int:
        key = tuple(ids)
        if key not in known:
            for position, row in enumerate(naive_logits(weights, config, list(key)).tolist()):
                known[key[: position + 1]] = row.index(max(row))  # the lowest id on a tie
        return known[key]

    return next_token


def naive_greedy(
    next_token: Callable[[Sequence[int]], int],
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """New tokens, one call each; an end-of-text id is kept and ends them."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(next_token(tuple(text)))
        if text[-1] in eos_ids:
            break
    return text[len(prompt) :]


def random_checkpoint(
    seed: int,
    *,
    vocab_size: int = 11,
    hidden_size: int = 16,
    intermediate_size: int = 32,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
    attention_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict | None = None,
    rms_norm_eps: float = 1e-5,
    max_position_embeddings: int = 512,
    eos_token_id: int | None = None,
) -> tuple[dict[str, Tensor], dict]:
    """A tiny random model whose greedy text varies and repeats, as (weights, config).

    The weights are float64 holding bfloat16 values, so that a file of any dtype holds the same
    model. Small embeddings let the layers, not the last token, decide the next one.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "tie_word_embeddings": tie_word_embeddings,
        "attention_bias": attention_bias,
        "mlp_bias": False,
        "rope_theta": rope_theta,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "rms_norm_eps": rms_norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    width = _head_dim(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        values = mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.bfloat16().double()

    def norm(mean: float = 1.0) -> Tensor:
        return draw(hidden_size, std=0.2 * mean, mean=mean)

    weights = {"model.embed_tokens.weight": draw(vocab_size, hidden_size, std=0.1)}
    for layer in range(num_hidden_layers):
        name = f"model.layers.{layer}"
        for projection, rows, columns, gain in (
            ("self_attn.q_proj", num_attention_heads * width, hidden_size, 2.0),
            ("self_attn.k_proj", num_key_value_heads * width, hidden_size, 2.0),
            ("self_attn.v_proj", num_key_value_heads * width, hidden_size, 1.0),
            ("self_attn.o_proj", hidden_size, num_attention_heads * width, 1.5),
            ("mlp.gate_proj", intermediate_size, hidden_size, 1.5),
            ("mlp.up_proj", intermediate_size, hidden_size, 1.5),
            ("mlp.down_proj", hidden_size, intermediate_size, 1.5),
        ):
            std = gain / math.sqrt(columns)
            weights[f"{name}.{projection}.weight"] = draw(rows, columns, std=std)
            if attention_bias and projection.startswith("self_attn"):
                weights[f"{name}.{projection}.bias"] = draw(rows, std=0.3)
        weights[f"{name}.input_layernorm.weight"] = norm()
        weights[f"{name}.post_attention_layernorm.weight"] = norm()
    weights["model.norm.weight"] = norm(mean=12.0)
    if not tie_word_embeddings:
        weights["lm_head.weight"] = draw(vocab_size, hidden_size, std=0.1)
    return weights, config


def _attention(
    weights: dict[str, Tensor], name: str, config: dict, hidden: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    num_q_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_q_heads
    head_dim = _head_dim(config)
    q_all = _linear(weights, f"{name}.q_proj", hidden)
    k_all = _linear(weights, f"{name}.k_proj", hidden)
    v_all = _linear(weights, f"{name}.v_proj", hidden)
    heads = []
    for q_head in range(num_q_heads):
        kv_head = q_head // (num_q_heads // num_kv_heads)
        q = _rotate(q_all[:, q_head * head_dim : (q_head + 1) * head_dim], cos, sin)
        k = _rotate(k_all[:, kv_head * head_dim : (kv_head + 1) * head_dim], cos, sin)
        v = v_all[:, kv_head * head_dim : (kv_head + 1) * head_dim]
        outputs = []
        for position in range(len(hidden)):
            keys, values = k[: position + 1], v[: position + 1]
            scores = keys @ q[position] / math.sqrt(head_dim)
            outputs.append(torch.softmax(scores, dim=0) @ values)
        heads.append(torch.stack(outputs))
    return _linear(weights, f"{name}.o_proj", torch.cat(heads, dim=1))


def _mlp(weights: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    gate = _linear(weights, f"{name}.gate_proj", hidden)
    up = _linear(weights, f"{name}.up_proj", hidden)
    return _linear(weights, f"{name}.down_proj", gate * torch.sigmoid(gate) * up)


def _linear(weights: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    output = hidden @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return output if bias is None else output + bias


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * hidden / torch.sqrt((hidden**2).mean(dim=-1, keepdim=True) + eps)


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = vectors.shape[1] // 2
    turned = torch.cat([-vectors[:, half:], vectors[:, :half]], dim=1)
    return vectors * cos + turned * sin


def _rope_tables(config: dict, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, head_dim], taken in float32 as published models do, then float64."""
    inverse_frequencies = _inverse_frequencies(config)
    positions = torch.arange(num_positions, dtype=torch.float32)
    half = positions[:, None] * inverse_frequencies[None, :]
    angles = torch.cat([half, half], dim=1)
    return angles.cos().double(), angles.sin().double()


def _inverse_frequencies(config: dict) -> Tensor:
    """[head_dim / 2] float32."""
    # newer configs hold one dictionary `rope_parameters`, older ones two keys
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    head_dim = _head_dim(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(f"expected rope type 'default' or 'llama3', got {kind!r}")

    factor = rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original_length = rope["original_max_position_embeddings"]
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original_length / high:
            scaled.append(frequency)
        elif wavelength > original_length / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original_length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.stack(scaled)


def _head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
