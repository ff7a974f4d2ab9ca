"""The forward pass as a sequence of the operations in `kernels/`, on any device.

Knows which operation follows which; how one runs is its named implementation's business.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.config import ModelConfig
from lookahead.kernels.attn_mask import attend
from lookahead.kernels.attn_trial import keeps_bits
from lookahead.kernels.largest_logit import largest_logit
from lookahead.kernels.rms_norm import add_rms_norm, rms_norm
from lookahead.kernels.rope_write import rope_write
from lookahead.kernels.row_blocks import GPU_BLOCKS
from lookahead.kernels.silu_mul import silu_mul
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.products import Product
from lookahead.models.weights import Linear, LlamaWeights


class _Layer(NamedTuple):
    """One layer; `qkv` gives query, key and value heads in this order, `gate_up` gate, then up."""

    qkv: Product
    output: Product
    post_attention_norm: torch.Tensor
    gate_up: Product
    down: Product
    next_norm: torch.Tensor


class OpsForward:
    """A model's products and norms. Attributes as those of `Llama`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        implementation: str,
        exact: bool,
    ) -> None:
        """Takes the layers out of `weights` one by one."""
        self._config = config
        self._implementation = implementation
        self._cos, self._sin = cos, sin
        self._embedding = weights.embedding
        self._first_norm = weights.layers[0].input_norm
        device = weights.embedding.device
        # torch's attention has no fixed order of keys, so that fixed products would be in vain.
        blocks = GPU_BLOCKS if exact and implementation == "triton" else None

        def product(linear: Linear) -> Product:
            return Product(linear.weight, linear.bias, blocks)

        self._head = product(Linear(weights.head, None))
        self._layers: list[_Layer] = []
        while weights.layers:
            layer = weights.layers.pop(0)
            following = weights.layers[0].input_norm if weights.layers else weights.norm
            self._layers.append(
                _Layer(
                    product(layer.qkv),
                    product(layer.output),
                    layer.post_attention_norm,
                    product(layer.gate_up),
                    product(layer.down),
                    following,
                )
            )
        self.inexact_reason = self._find_inexact_reason(exact, device, weights.embedding.dtype)
        found = [product.row_block for product in self._products]
        self.row_block = None if self.inexact_reason else min(block or 0 for block in found)

    @property
    def _products(self) -> list[Product]:
        """One of each kind."""
        layer = self._layers[0]
        return [layer.qkv, layer.output, layer.gate_up, layer.down, self._head]

    def _find_inexact_reason(
        self, exact: bool, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        if not exact:
            return "exactness is turned off"
        if self._implementation == "torch":
            return "torch's attention has no fixed order of keys"
        if device.type == "cpu":
            return "Triton's interpreter sums as the processor's library likes"
        if any(product.row_block is None for product in self._products):
            return "this device's matrix products depend on a row's place in its block"
        config = self._config
        heads = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        if not keeps_bits(self._implementation, *heads, dtype, device):
            return "attention gave a verified row other bits than the autoregressive row"
        return None

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None:
        """See `Llama.prepare`."""
        *products, head = self._products
        for product in products:
            product.prepare(row_counts)
        head.prepare(logit_counts)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `Llama.forward`."""
        eps, implementation = self._config.rms_norm_eps, self._implementation
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
        """See `Llama.logits`."""
        return self._head(hidden)

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
        kept: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Llama.choose`."""
        hidden = self.forward(tokens, positions, layout, cache, lengths, live_rows)
        logits = self.logits(hidden.flatten(0, 1).index_select(0, rows))
        return logits, *largest_logit(logits, self._implementation)

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
        qkv = layer.qkv(normed).view(batch, num_rows, -1, self._config.head_dim)
        queries = rope_write(
            qkv,
            self._cos,
            self._sin,
            positions,
            keys,
            values,
            row_start=cache.row_start,
            implementation=self._implementation,
        )
        attended = attend(
            queries,
            keys,
            values,
            lengths,
            layout,
            row_start=cache.row_start,
            live_rows=live_rows,
            longest=cache.longest,
            implementation=self._implementation,
        )
        return layer.output(attended.flatten(2))
