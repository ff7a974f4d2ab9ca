"""The LLaMA forward pass over a tree of rows and a cache.

Takes tokens, positions, a row tree, the cache and committed lengths; knows nothing of decoding: not
what the rows are for, nor which of them will be kept.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from lookahead.config import ModelConfig
from lookahead.kernels.checks import wide_dtype
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.rope import rope_tables
from lookahead.models.weights import LlamaWeights


class Forward(Protocol):
    """A way to run the forward pass; `Llama` tells what its methods and attributes mean."""

    inexact_reason: str | None
    row_block: int | None

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None: ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class Llama:
    """A loaded model that can run rows at positions 0..num_positions-1.

    Attributes:
        inexact_reason: why a row's bits may depend on the rows beside it; None if they do not.
        row_block: rows of the smallest block among those of the products, None if not exact.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        num_positions: int,
        implementation: str = "torch",
        exact: bool = True,
    ) -> None:
        """Takes the layers out of `weights` one by one: they may be laid out anew.

        `implementation` names that of every operation in `kernels/`. Without `exact`, products are the
        fastest that there are.
        """
        self.config = config
        self.implementation = implementation
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        table_dtype = wide_dtype(self.dtype)
        tables = rope_tables(config.rope, config.head_dim, num_positions, table_dtype, self.device)
        self._forward = _choose(config, weights, *tables, implementation, exact)
        self.inexact_reason = self._forward.inexact_reason
        self.row_block = self._forward.row_block

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None:
        """Make ready for steps of these numbers of rows and of rows with logits, before they are
        timed."""
        self._forward.prepare(row_counts, logit_counts)

    def new_cache(self, batch_size: int, max_length: int, scratch_rows: int) -> KVCache:
        """A cache of this model's shape, dtype and device."""
        config = self.config
        capacity = max_length + scratch_rows
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, capacity, config.head_dim)
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return KVCache(data, max_length, self.implementation)

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
        return self._forward.forward(tokens, positions, layout, cache, lengths, live_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab] of the model's dtype."""
        return self._forward.logits(hidden)

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
        """`forward`, and at some of the rows the token of the largest logit, the lowest id on a tie.

        Args:
            rows: [n] int64, numbers sequence * T + row; on a CPU live ones.
            kept: where an implementation may keep what it makes of these tensors, empty at first, for
                a caller that gives the same ones again with other numbers, which are then not checked.
                What is returned holds until the next call with it.

        Returns:
            logits [n, vocab], tokens [n] int64, and finite [n] bool, whether the largest logit is a
            finite number (it is not if any logit is NaN).
        """
        given = (tokens, positions, layout, cache, lengths, live_rows)
        return self._forward.choose(*given, rows, kept)


def _choose(
    config: ModelConfig,
    weights: LlamaWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    implementation: str,
    exact: bool,
) -> Forward:
    """The forward pass of an implementation; imported when asked for, for some machines cannot have
    all of them."""
    if implementation == "numba":
        from lookahead.models.llama_numba import NumbaForward

        return NumbaForward(config, weights, cos, sin)
    from lookahead.models.forward_ops import OpsForward

    return OpsForward(config, weights, cos, sin, implementation, exact)
