"""The library's fused attention on a CPU, for numbers of rows that have the same bits.

Knows queries, keys and values as they are given; which keys a row is to see is `attn_mask_cpu.py`'s
business.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from lookahead.kernels.row_blocks import CPU_BLOCKS, Operation, RowRule, aligned

TRIAL_OUTPUTS = 256


def fused(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [calls, num_kv_heads, rows, head_dim], keys and values [calls, num_kv_heads, keys, head_dim] ->
    (output like q, logarithm of the sum of weights [calls, num_kv_heads, rows]).

    The operation behind `scaled_dot_product_attention`, for that does not tell the logarithms.
    """
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask
    )
    return found[0], found[1]


def is_available() -> bool:
    """Whether this torch has the operation."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused` by the rule of rows; of the mask [1, 1, rows, keys] the first rows are used."""
    calls, num_kv_heads, count, head_dim = q.shape
    num_keys, has_mask = keys.shape[2], mask is not None
    rule = _rule(
        _Kind(num_kv_heads, num_keys, head_dim, q.dtype, has_mask, torch.get_num_threads())
    )
    padded = rule.fitting(calls, count)
    if padded == count:
        return fused(aligned(q), keys, values, None if mask is None else mask[:, :, :count])
    if padded is None and calls > 1:
        parts = [
            attend_rows(q[[call]], keys[[call]], values[[call]], mask) for call in range(calls)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    start = 0

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal start
        part = None if mask is None else mask[:, :, start : start + rows.shape[1]]
        start += rows.shape[1]
        out, weight = fused(rows.transpose(1, 2), keys, values, part)
        return out.transpose(1, 2), weight.transpose(1, 2)

    out, weight = rule.run(run, q.transpose(1, 2))
    return out.transpose(1, 2), weight.transpose(1, 2)


class _Kind(NamedTuple):
    """What, beside the numbers of calls and rows, the library may choose its arithmetic by."""

    num_kv_heads: int
    num_keys: int
    head_dim: int
    dtype: torch.dtype
    has_mask: bool
    num_threads: int


@cache
def _rule(kind: _Kind) -> RowRule:
    return RowRule(CPU_BLOCKS, lambda num_rows: _trials(kind, num_rows))


@lru_cache(maxsize=2)
def _trials(kind: _Kind, num_rows: int) -> list[tuple[Operation, torch.Tensor]]:
    """Operations of this kind and rows for them; several where one would have few outputs."""
    num_seeds = -(-TRIAL_OUTPUTS // (kind.num_kv_heads * kind.head_dim))
    return [trial for seed in range(num_seeds) for trial in _trial(kind, num_rows, seed)]


def _trial(kind: _Kind, num_rows: int, seed: int) -> list[tuple[Operation, torch.Tensor]]:
    """One whose scores cancel but for their rounding, and one whose values do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(num_rows, kind.num_kv_heads, kind.head_dim)
    keys, values = (draw(1, kind.num_kv_heads, kind.num_keys, kind.head_dim) for _ in range(2))
    first, second = _pairs(kind.head_dim, generator)
    # Products so large that their sums' rounding, the whole of a score then, is of the size of 1.
    wide = torch.float64 if kind.dtype == torch.float64 else torch.float32
    size = torch.finfo(wide).eps ** -0.5
    cancelling_rows, cancelling_keys = size * rows, size * keys
    cancelling_rows[..., second] = cancelling_rows[..., first]
    cancelling_keys[..., second] = -cancelling_keys[..., first]
    early, late = _pairs(kind.num_keys, generator)
    keys[:, :, late] = keys[:, :, early]
    cancelling_values = values.clone()
    cancelling_values[:, :, late] = -values[:, :, early]
    hidden = [int(early[0]), int(late[0])]
    return [
        (_operation(kind, cancelling_keys, values, hidden), cancelling_rows.to(kind.dtype)),
        (_operation(kind, keys, cancelling_values, hidden), rows.to(kind.dtype)),
    ]


def _pairs(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """0..size-1 in two halves of random order; of an odd size one is left out."""
    place, half = torch.randperm(size, generator=generator), size // 2
    return place[:half], place[half : 2 * half]


def _operation(
    kind: _Kind, keys: torch.Tensor, values: torch.Tensor, hidden: list[int]
) -> Operation:
    keys, values = keys.to(kind.dtype), values.to(kind.dtype)

    def operation(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls, count = rows.shape[:2]
        mask = None
        if kind.has_mask:
            mask = torch.zeros(1, 1, count, kind.num_keys, dtype=kind.dtype)
            mask[..., hidden] = float("-inf")
        all_keys, all_values = (part.expand(calls, -1, -1, -1) for part in (keys, values))
        out, weight = fused(rows.transpose(1, 2), all_keys, all_values, mask)
        return out.transpose(1, 2), weight.transpose(1, 2)

    return operation
