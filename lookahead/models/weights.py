"""The parameters of a LLaMA model, preallocated and fused as the forward pass wants them.

`LlamaWeights.targets` is the one place that knows which published tensor name belongs where. Knows
nothing of files.
"""

from dataclasses import dataclass

import torch

from lookahead.config import ModelConfig


@dataclass(frozen=True)
class Linear:
    """A product with `weight` [out, in] and, where the checkpoint has one, `bias` [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer; `qkv` holds query, key and value rows in this order, `gate_up` gate, then up."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class LlamaWeights:
    """All parameters; `head` is the very tensor `embedding` where the checkpoint ties them."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def empty(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "LlamaWeights":
        """Allocate without initialising."""

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def linear(out_size: int, in_size: int, has_bias: bool) -> Linear:
            return Linear(tensor(out_size, in_size), tensor(out_size) if has_bias else None)

        hidden, intermediate = config.hidden_size, config.intermediate_size
        num_heads = config.num_q_heads + 2 * config.num_kv_heads
        attention_size = config.num_q_heads * config.head_dim
        layers = [
            LayerWeights(
                input_norm=tensor(hidden),
                qkv=linear(num_heads * config.head_dim, hidden, config.attention_bias),
                output=linear(hidden, attention_size, config.attention_bias),
                post_attention_norm=tensor(hidden),
                gate_up=linear(2 * intermediate, hidden, config.mlp_bias),
                down=linear(hidden, intermediate, config.mlp_bias),
            )
            for _ in range(config.num_layers)
        ]
        embedding = tensor(config.vocab_size, hidden)
        head = embedding if config.tie_word_embeddings else tensor(config.vocab_size, hidden)
        return cls(embedding, layers, tensor(hidden), head)

    def targets(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """Published tensor name -> the tensor, or part of a fused tensor, that it is copied into."""
        targets = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            targets["lm_head.weight"] = self.head
        q_size, kv_size = (
            heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads)
        )
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            targets[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            targets[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_norm
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            _add(targets, attention, layer.qkv, {"q": q_size, "k": kv_size, "v": kv_size})
            _add(targets, attention, layer.output, {"o": config.hidden_size})
            size = config.intermediate_size
            _add(targets, mlp, layer.gate_up, {"gate": size, "up": size})
            _add(targets, mlp, layer.down, {"down": config.hidden_size})
        return targets


def _add(
    targets: dict[str, torch.Tensor], prefix: str, linear: Linear, parts: dict[str, int]
) -> None:
    """Add the named parts of a fused product, each so many of its output rows, in order."""
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for name, part in zip(parts, fused.split(list(parts.values())), strict=True):
                targets[f"{prefix}.{name}_proj.{kind}"] = part
