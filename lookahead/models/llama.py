"""The LLaMA forward pass over a tree of rows and a cache.

Takes tokens, positions, a row tree, the cache and committed lengths; knows nothing of decoding: not
what the rows are for, nor which of them will be kept.
"""

import torch
import torch.nn.functional as F

from lookahead.config import ModelConfig
from lookahead.kernels.attn_mask import attend
from lookahead.kernels.rms_norm import add_rms_norm, rms_norm
from lookahead.kernels.rope_write import rope_write
from lookahead.kernels.silu_mul import silu_mul
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.rope import rope_tables
from lookahead.models.weights import LayerWeights, Linear, LlamaWeights


class Llama:
    """A loaded model that can run rows at positions 0..num_positions-1."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        num_positions: int,
        implementation: str = "torch",
    ) -> None:
        """`implementation` names that of every operation in `kernels/`."""
        self.config = config
        self.implementation = implementation
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        table_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._cos, self._sin = rope_tables(
            config.rope, config.head_dim, num_positions, table_dtype, self.device
        )

    def new_cache(self, batch_size: int, max_length: int, scratch_rows: int) -> KVCache:
        """A cache of this model's shape, dtype and device."""
        config = self.config
        capacity = max_length + scratch_rows
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, capacity, config.head_dim)
        return KVCache(torch.empty(shape, dtype=self.dtype, device=self.device), max_length)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T rows of each sequence; their keys and values go to the cache's scratch rows.

        Args:
            tokens, positions: [B, T] int, token id and absolute position of each row.
            layout: the tree of the T rows.
            cache: holds lengths[b] committed positions of each sequence.
            lengths: [B] int, committed lengths.
            live_rows: [B] int, rows from this number on are dead (see `attend`).

        Returns:
            Hidden states behind the final norm, [B, T, hidden], for `logits`. Undefined at dead rows.
        """
        eps, implementation = self.config.rms_norm_eps, self.implementation
        layers = self.weights.layers
        residual = F.embedding(tokens, self.weights.embedding)
        normed = rms_norm(residual, layers[0].input_norm, eps, implementation)
        following = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            attended = self._attention(
                normed, layer, index, positions, layout, cache, lengths, live_rows
            )
            normed, residual = add_rms_norm(
                attended, residual, layer.post_attention_norm, eps, implementation
            )
            activated = silu_mul(_product(normed, layer.gate_up), implementation)
            normed, residual = add_rms_norm(
                _product(activated, layer.down), residual, next_norm, eps, implementation
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab] of the model's dtype."""
        return F.linear(hidden, self.weights.head)

    def _attention(
        self,
        normed: torch.Tensor,
        layer: LayerWeights,
        index: int,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        batch, num_rows = positions.shape
        keys, values = cache.layer(index)
        qkv = _product(normed, layer.qkv).view(batch, num_rows, -1, self.config.head_dim)
        queries = rope_write(
            qkv,
            self._cos,
            self._sin,
            positions,
            keys,
            values,
            row_start=cache.row_start,
            implementation=self.implementation,
        )
        attended = attend(
            queries,
            keys,
            values,
            lengths,
            layout,
            row_start=cache.row_start,
            live_rows=live_rows,
            implementation=self.implementation,
        )
        return _product(attended.flatten(2), layer.output)


def _product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Every matrix product of the layers: [..., in] -> [..., out]."""
    return F.linear(x, linear.weight, linear.bias)
