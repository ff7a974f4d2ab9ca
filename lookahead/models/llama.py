"""The LLaMA forward pass over a tree of rows and a cache.

Takes tokens, positions, a row tree, the cache and committed lengths; knows nothing of decoding: not
what the rows are for, nor which of them will be kept.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.config import ModelConfig
from lookahead.kernels.attn_mask import attend
from lookahead.kernels.attn_mask_cpu import BLOCK
from lookahead.kernels.attn_trial import keeps_bits
from lookahead.kernels.fused_attention import is_available
from lookahead.kernels.rms_norm import add_rms_norm, rms_norm
from lookahead.kernels.rope_write import rope_write
from lookahead.kernels.silu_mul import silu_mul
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.products import Product
from lookahead.models.rope import rope_tables
from lookahead.models.weights import LlamaWeights


class _Layer(NamedTuple):
    """One layer; `qkv` gives query, key and value heads in this order, `gate_up` gate, then up."""

    qkv: Product
    output: Product
    post_attention_norm: torch.Tensor
    gate_up: Product
    down: Product
    next_norm: torch.Tensor


class Llama:
    """A loaded model that can run rows at positions 0..num_positions-1.

    Attributes:
        inexact_reason: why a row's bits may depend on the rows beside it; None if they do not.
        row_block: rows of the smallest block among those of the products, None if not exact.
        emit_block: a step's rows are exact as far as their positions lie in the block of so many
            positions that holds the committed length; None where they are exact anywhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        num_positions: int,
        implementation: str = "torch",
        exact: bool = True,
    ) -> None:
        """Takes the layers out of `weights` one by one: products may lay theirs out anew.

        `implementation` names that of every operation in `kernels/`. Without `exact`, products and
        attention are the fastest that there are.
        """
        self.config = config
        self.implementation = implementation
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        table_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._cos, self._sin = rope_tables(
            config.rope, config.head_dim, num_positions, table_dtype, self.device
        )
        self._embedding = weights.embedding
        self._first_norm = weights.layers[0].input_norm
        self._head = Product(weights.head, None, exact)
        self._layers: list[_Layer] = []
        while weights.layers:
            layer = weights.layers.pop(0)
            following = weights.layers[0].input_norm if weights.layers else weights.norm
            self._layers.append(
                _Layer(
                    Product(layer.qkv.weight, layer.qkv.bias, exact),
                    Product(layer.output.weight, layer.output.bias, exact),
                    layer.post_attention_norm,
                    Product(layer.gate_up.weight, layer.gate_up.bias, exact),
                    Product(layer.down.weight, layer.down.bias, exact),
                    following,
                )
            )
        self._attention_name = self._choose_attention(exact)
        self.inexact_reason = self._find_inexact_reason(exact)
        blocks = [product.row_block for product in self._products]
        self.row_block = None if self.inexact_reason else min(block or 0 for block in blocks)
        self.emit_block = BLOCK if self._attention_name == "canonical" else None

    @property
    def _products(self) -> list[Product]:
        """One of each kind."""
        layer = self._layers[0]
        return [layer.qkv, layer.output, layer.gate_up, layer.down, self._head]

    def _choose_attention(self, exact: bool) -> str:
        if self.implementation != "torch" or self.device.type != "cpu":
            return self.implementation
        if exact and not is_available():
            return "torch"
        return "canonical" if exact else "sdpa"

    def _find_inexact_reason(self, exact: bool) -> str | None:
        if not exact:
            return "exactness is turned off"
        if any(product.row_block is None for product in self._products):
            return "this device's matrix products depend on a row's place in its block"
        if self._attention_name == "triton" and self.device.type == "cpu":
            return "Triton's interpreter sums as the processor's library likes"
        if self._attention_name == "torch":
            return "torch's attention has no fixed order of keys on this device"
        heads = (self.config.num_q_heads, self.config.num_kv_heads, self.config.head_dim)
        if not keeps_bits(self._attention_name, *heads, self.dtype, self.device):
            return "attention gave a verified row other bits than the autoregressive row"
        return None

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None:
        """Try steps of these numbers of rows and of rows with logits, before they are timed."""
        *products, head = self._products
        for product in products:
            product.prepare(row_counts)
        head.prepare(logit_counts)

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
        residual = F.embedding(tokens, self._embedding)
        normed = rms_norm(residual, self._first_norm, eps, implementation)
        for index, layer in enumerate(self._layers):
            attended = self._attention(
                normed, layer, index, positions, layout, cache, lengths, live_rows
            )
            normed, residual = add_rms_norm(
                attended, residual, layer.post_attention_norm, eps, implementation
            )
            activated = silu_mul(layer.gate_up(normed), implementation)
            normed, residual = add_rms_norm(
                layer.down(activated), residual, layer.next_norm, eps, implementation
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab] of the model's dtype."""
        return self._head(hidden)

    def _attention(
        self,
        normed: torch.Tensor,
        layer: _Layer,
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
        qkv = layer.qkv(normed).view(batch, num_rows, -1, self.config.head_dim)
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
            implementation=self._attention_name,
        )
        return layer.output(attended.flatten(2))
