"""Shapes, workspace and launch of the attention kernels.

Everything a binary depends on is decided in `plan`, which the ahead-of-time tests call too. Knows
where buffers stand; what the kernels compute is `attn_mask_triton.py`'s business.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from lookahead.kernels.attn_mask_triton import attend_tiles, merge_partials
from lookahead.kernels.tuning import GROUP_KEYS, Tile, choose_tile
from lookahead.layout import LookaheadLayout, RowTree

MERGE_ROWS = 4


@dataclass(frozen=True)
class Shape:
    """What a launch depends on beyond the data."""

    batch: int
    num_rows: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    row_start: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PathTable:
    """A row tree as tensors: row by path and offset, each path's first own offset and own rows."""

    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    depths: torch.Tensor


@lru_cache(maxsize=64)
def path_table(layout: RowTree, device: torch.device) -> PathTable:
    """The paths of any tree, each row owned by one of them."""
    paths = layout.owned_paths
    longest = max(len(path) for path, _ in paths)

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PathTable(
        rows=tensor([[*path, *[0] * (longest - len(path))] for path, _ in paths]),
        firsts=tensor([first for _, first in paths]),
        counts=tensor([len(path) - first for path, first in paths]),
        depths=tensor(layout.depths),
    )


@dataclass(frozen=True)
class Plan:
    """Arguments of both kernels that are the same for every call with this shape and layout."""

    grid: tuple[int, int]
    merge_grid: tuple[int, int]
    num_slots: int
    numbers: dict[str, int]
    constants: dict[str, Any]
    merge_numbers: dict[str, int]
    merge_constants: dict[str, Any]
    options: dict[str, int]


def plan(shape: Shape, layout: RowTree, use_table: bool, tile: Tile) -> Plan:
    """Grids, run-time numbers and compile-time constants."""
    group = shape.num_q_heads // shape.num_kv_heads
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    tiles = max(1, GROUP_KEYS // tile.block_n)
    if use_table:
        window, levels = 0, 0
        paths = layout.owned_paths
        num_paths, longest_own = len(paths), max(len(path) - first for path, first in paths)
        path_stride = max(len(path) for path, _ in paths)
    else:
        assert isinstance(layout, LookaheadLayout)
        window, levels, path_stride = layout.window, layout.levels, 0
        num_paths = 1 + (window if levels > 1 else 0) + layout.guesses
        longest_own = max(window, levels, 1)
    # A row's last key lies at most max(depths) past the committed length, anywhere in a tile.
    num_tails = (tile.block_n - 1 + max(layout.depths)) // tile.block_n + 1
    num_groups = triton.cdiv(shape.row_start, tile.block_n * tiles)
    tail_blocks = triton.cdiv(longest_own * group, tile.block_m)
    row_blocks = triton.cdiv(shape.num_rows * group, tile.block_m)
    heads = shape.batch * shape.num_kv_heads
    shared = {
        "window": window,
        "levels": levels,
        "num_rows": shape.num_rows,
        "num_tails": num_tails,
        "num_groups": num_groups,
    }
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": block_d,
        "BLOCK_N": tile.block_n,
        "TILES": tiles,
        "TABLE": use_table,
    }
    return Plan(
        grid=(num_paths * tail_blocks * num_tails + num_groups * row_blocks, heads),
        merge_grid=(triton.cdiv(shape.num_rows * group, MERGE_ROWS), heads),
        num_slots=num_groups + num_tails,
        numbers=shared
        | {
            "num_paths": num_paths,
            "path_stride": path_stride,
            "tail_blocks": tail_blocks,
            "row_blocks": row_blocks,
            "cache_rows": shape.capacity,
            "row_start": shape.row_start,
        },
        constants=constants
        | {
            "BLOCK_M": tile.block_m,
            "SCALE_LOG2": math.log2(math.e) / math.sqrt(shape.head_dim),
            "STAGES": tile.num_stages,
        },
        merge_numbers=shared,
        merge_constants=constants | {"BLOCK_R": MERGE_ROWS},
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def attend_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
) -> torch.Tensor:
    """See `attend`."""
    batch, num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    shape = Shape(
        batch, num_rows, num_q_heads, num_kv_heads, head_dim, capacity, row_start, q.dtype
    )
    use_table = not isinstance(layout, LookaheadLayout)
    the_plan = plan(shape, layout, use_table, choose_tile("interpreter", head_dim, q.itemsize))
    partials = (batch, num_kv_heads, the_plan.num_slots, num_rows * (num_q_heads // num_kv_heads))
    acc = torch.empty((*partials, head_dim), dtype=torch.float32, device=q.device)
    top, total = torch.empty((2, *partials), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    table = path_table(layout, q.device) if use_table else None
    attend_tiles[the_plan.grid](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        lengths_ptr=lengths,
        live_ptr=live_rows,
        path_rows_ptr=table and table.rows,
        path_firsts_ptr=table and table.firsts,
        path_counts_ptr=table and table.counts,
        acc_ptr=acc,
        top_ptr=top,
        total_ptr=total,
        **the_plan.numbers,
        **the_plan.constants,
        **the_plan.options,
    )
    merge_partials[the_plan.merge_grid](
        out_ptr=out,
        acc_ptr=acc,
        top_ptr=top,
        total_ptr=total,
        lengths_ptr=lengths,
        live_ptr=live_rows,
        depths_ptr=table and table.depths,
        **the_plan.merge_numbers,
        **the_plan.merge_constants,
    )
    return out
