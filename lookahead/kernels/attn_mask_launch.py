"""Shapes, workspace and launch of the attention kernels.

Everything a binary depends on is decided in `plan`, which the ahead-of-time tests call too. Knows
where buffers stand; what the kernels compute is `attn_mask_triton.py`'s business.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lookahead.kernels.attn_mask_triton import PER_SEQUENCE, attend_tiles, merge_partials
from lookahead.kernels.checks import check_launch
from lookahead.kernels.tuning import GROUP_KEYS, Tile, choose_tile
from lookahead.layout import LookaheadLayout, RowTree

# Elements of a merging program's accumulator: more spill.
MERGE_ELEMENTS = 512


@dataclass(frozen=True)
class Shape:
    """What a launch depends on beyond the data."""

    batch: int
    num_rows: int
    num_q_heads: int
    head_dim: int
    num_kv_heads: int
    capacity: int
    row_start: int
    longest: int


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
class Workspace:
    """Partials: acc [B, num_kv_heads, slots, T * group, head_dim], top and total without head_dim."""

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor


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

    def workspace(self, shape: Shape, device: torch.device) -> Workspace:
        """Room for every partial, not initialised."""
        rows = shape.num_rows * (shape.num_q_heads // shape.num_kv_heads)
        partials = (shape.batch, shape.num_kv_heads, self.num_slots, rows)
        sizes = ((*partials, shape.head_dim), partials, partials)
        return Workspace(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))


def plan(shape: Shape, layout: RowTree, use_table: bool, tile: Tile) -> Plan:
    """Grids, run-time numbers and compile-time constants."""
    group = shape.num_q_heads // shape.num_kv_heads
    block_d = max(16, _power_of_2(shape.head_dim))
    tiles = max(1, GROUP_KEYS // tile.block_n)
    if use_table:
        window, levels = 0, 1
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
    num_groups = _blocks(shape.longest, tile.block_n * tiles)
    tail_blocks = _blocks(longest_own * group, tile.block_m)
    row_blocks = _blocks(shape.num_rows * group, tile.block_m)
    heads = shape.batch * shape.num_kv_heads
    merge_rows = MERGE_ELEMENTS // block_d
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
        merge_grid=(_blocks(shape.num_rows * group, merge_rows), heads),
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
        merge_constants=constants | {"BLOCK_R": merge_rows},
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def _blocks(length: int, size: int) -> int:
    """Blocks of `size` that cover `length`."""
    return -(-length // size)


def _power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def attend_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
    longest: int,
    workspace: Workspace | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """See `attend`. `workspace` may be given to be used again; what it holds does not matter. `tile`
    stands in for the tuning table's.

    Raises ValueError where the kernels cannot take the tensors as they are.
    """
    q, lengths, live_rows = q.contiguous(), lengths.contiguous(), live_rows.contiguous()
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    check_launch(**tensors)
    for name, tensor in tensors.items():
        _check_memory(name, tensor)
    batch, num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    shape = Shape(
        batch, num_rows, num_q_heads, head_dim, num_kv_heads, capacity, row_start, longest
    )
    table = None if isinstance(layout, LookaheadLayout) else path_table(layout, q.device)
    tile = tile or choose_tile(architecture(q.device), shape.head_dim, q.itemsize)
    the_plan = plan(shape, layout, table is not None, tile)
    workspace = workspace or the_plan.workspace(shape, q.device)
    out = torch.empty_like(q)
    attend_tiles[the_plan.grid](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        lengths_ptr=lengths,
        live_ptr=live_rows,
        path_rows_ptr=table.rows if table else None,
        path_firsts_ptr=table.firsts if table else None,
        path_counts_ptr=table.counts if table else None,
        acc_ptr=workspace.acc,
        top_ptr=workspace.top,
        total_ptr=workspace.total,
        **the_plan.numbers,
        **the_plan.constants,
        **the_plan.options,
    )
    merge_partials[the_plan.merge_grid](
        out_ptr=out,
        acc_ptr=workspace.acc,
        top_ptr=workspace.top,
        total_ptr=workspace.total,
        lengths_ptr=lengths,
        live_ptr=live_rows,
        depths_ptr=table.depths if table else None,
        **the_plan.merge_numbers,
        **the_plan.merge_constants,
    )
    return out


def architecture(device: torch.device) -> str:
    """The name under which `tuning.py` knows a device; "cpu" is Triton's interpreter."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Where 16 bytes are read at once, and 32 bits count a head's elements."""
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected memory aligned to 16 bytes, got {tensor.data_ptr()}")
    if not 8 <= tensor.shape[3] <= 256:
        raise ValueError(f"{name}: expected a head_dim of 8 to 256, got {tensor.shape[3]}")
    if tensor.shape[2] * tensor.shape[3] >= 2**31:
        raise ValueError(f"{name}: expected fewer than 2^31 elements a head, got {tensor.shape}")


def specialisation(
    kernel: Any, numbers: Mapping[str, int], constants: Mapping[str, Any], dtypes: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """What Triton makes of a launch's arguments: signature, constants and attributes of a binary.

    `dtypes` gives each pointer's element type, "" for one that is None. Every pointer but those of
    per-sequence numbers is aligned to 16 bytes, as `_check_memory` and torch's allocator see to; those
    may point into a batch, and the kernels do not look at how they are aligned.
    """
    signature: dict[str, str] = {}
    constexprs = dict(constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in numbers:
            signature[name] = "i32"
        elif not dtypes[name]:
            signature[name], constexprs[name] = "constexpr", None
        else:
            signature[name] = f"*{dtypes[name]}"
            if name not in PER_SEQUENCE:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attributes
