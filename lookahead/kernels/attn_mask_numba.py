"""`attend` on a CPU: blocks of BLOCK keys at absolute positions, folded in order.

A row keeps a running maximum and sum; a block that reaches beyond the committed length takes each row's
keys along the row's own path. All sums are chains in order of position (`tile.multiply_near`), so a
row's bits depend on its keys and values by position and on nothing else: a verified row does what the
autoregressive row would have done.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lookahead.kernels.checks import check_contiguous, wide_dtype
from lookahead.kernels.product_numba import filled_up
from lookahead.kernels.simd import (
    copy_pair,
    join,
    keep_first,
    larger,
    largest,
    load,
    load_one,
    pointer,
    same,
    splat,
    store,
    store_one,
    total,
    transpose,
    zeros,
)
from lookahead.kernels.simd_exp import exp_to_one
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel, whole_numbers
from lookahead.kernels.tile import TILE_ROWS, multiplies_pairs, multiply_near, width_of
from lookahead.layout import RowTree

BLOCK = 64


class Paths(NamedTuple):
    """The rows of a tree by path; rows come in the order of the path that owns them.

    Attributes:
        order: [T] int64, row numbers in that order.
        depths: [T] int64, depth of each row, in that order.
        first: [P + 1] int64, where each path's own rows begin in the order.
        table: [P, deepest + 1] int64, the row at each depth of a path, 0 behind its end.
    """

    order: np.ndarray
    depths: np.ndarray
    first: np.ndarray
    table: np.ndarray


@lru_cache(maxsize=64)
def paths_of(layout: RowTree) -> Paths:
    """The paths of a tree."""
    owned = [path[shared:] for path, shared in layout.owned_paths]
    order = [row for rows in owned for row in rows]
    table = np.zeros((len(owned), max(layout.depths) + 1), dtype=np.int64)
    for number, (path, _) in enumerate(layout.owned_paths):
        table[number, : len(path)] = path
    return Paths(
        np.array(order, dtype=np.int64),
        np.array([layout.depths[row] for row in order], dtype=np.int64),
        np.cumsum([0, *map(len, owned)], dtype=np.int64),
        table,
    )


@kernel
def find_live(paths, live, rows, depths, first):
    """Leave out dead rows: fills `rows`, `depths` and `first` as `paths` has them, returns how many
    rows there are."""
    count = 0
    for path in range(len(paths.first) - 1):
        first[path] = count
        for place in range(paths.first[path], paths.first[path + 1]):
            if paths.order[place] < live:
                rows[count] = paths.order[place]
                depths[count] = paths.depths[place]
                count += 1
    first[len(paths.first) - 1] = count
    return count


def scratch_size(head_dim: int) -> int:
    """Wide numbers that `attend_part` needs for itself."""
    return _near_size(head_dim, filled_up(head_dim)) + BLOCK * (TILE_ROWS + 1)


@kernel
def _near_size(head_dim, stride):
    """Numbers of a block's keys and values and of the rows' weights."""
    return BLOCK * (head_dim + stride + TILE_ROWS)


def near_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a block's keys and values, and the rows' weights, are held in: as they are where pairs of
    them are multiplied, else as wide as the computation."""
    return dtype if multiplies_pairs(dtype) else wide_dtype(dtype)


@kernel
def attend_part(
    q, sums, tops, weights, head_dim, stride, group, scale, keys, values, length, row_start, depths,
    first, table, begin, end, scratch, near_tag, wide_tag, ahead, ahead_end,
):  # fmt: skip
    """Rows begin..end-1 of one sequence and one key/value head; a row here is one query head of a
    step's row: number `r * group + member`.

    Args:
        q: pointer to the queries, `stride` apart.
        sums, tops, weights: pointers to what is left behind for each row: weighted sum of values,
            `stride` apart, largest score, LANES sums of weights.
        scale: what products of queries and keys are multiplied by.
        keys, values: pointers to the head's cache, [C, head_dim].
        depths, first, table: of the live rows, as in `Paths`.
        scratch: address of `scratch_size` wide numbers, all of them finite as `near_tag` too.
        near_tag: of `near_dtype`.
        ahead, ahead_end: addresses from and to which memory is asked for meanwhile.

    Returns:
        The next `ahead`.
    """
    block_keys = pointer(scratch, near_tag)  # [head_dim / width, BLOCK, width]
    block_values = block_keys + BLOCK * head_dim  # [BLOCK / width, stride, width]
    shares = block_values + BLOCK * stride  # [TILE_ROWS, BLOCK]
    scores = pointer(scratch, wide_tag) + _near_size(head_dim, stride)  # [TILE_ROWS, BLOCK]
    none = scores + BLOCK * TILE_ROWS  # [BLOCK] zeros
    zero = zeros(scores)
    for i in range(0, BLOCK, LANES):
        store(none + i, zero)
    for row in range(begin, end):
        for i in range(0, stride, LANES):
            store(sums + (row * stride + i), zero)
        store_one(tops + row, largest(same(zero, -np.inf)))
        store(weights + row * LANES, zero)

    whole = length // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _load_keys(keys + start * head_dim, BLOCK, head_dim, block_keys)
        _load_values(values + start * head_dim, BLOCK, head_dim, block_values, stride)
        ahead = _fold(
            q, sums, tops, weights, begin, end, depths, length - start, group, head_dim, stride, scale,
            block_keys, block_values, shares, scores, none, ahead, ahead_end,
        )  # fmt: skip
    deepest = 0
    for depth in depths:
        deepest = max(deepest, depth)
    for start in range(whole, length + deepest + 1, BLOCK):
        committed = min(max(length - start, 0), BLOCK)
        _load_keys(keys + start * head_dim, committed, head_dim, block_keys)
        _load_values(values + start * head_dim, committed, head_dim, block_values, stride)
        for path in range(len(first) - 1):
            low = max(first[path] * group, begin)
            high = min(first[path + 1] * group, end)
            if low >= high:
                continue
            behind = length + depths[first[path + 1] - 1] + 1  # the position behind the path
            for position in range(start + committed, min(behind, start + BLOCK)):
                at = (row_start + table[path, position - length]) * head_dim
                _load_key(keys + at, position - start, 0, head_dim, block_keys)
                _load_value(values + at, position - start, 0, head_dim, block_values, stride)
            ahead = _fold(
                q, sums, tops, weights, low, high, depths, length - start, group, head_dim, stride,
                scale, block_keys, block_values, shares, scores, none, ahead, ahead_end,
            )  # fmt: skip
    return ahead


@kernel
def _load_key(key, place, start, head_dim, block_keys):
    """Numbers start..head_dim-1 of one key into the block's column `place`."""
    width = width_of(block_keys)
    pairs = start
    if width == 2:
        pairs = head_dim // 2 * 2
        for i in range(start, pairs, 2):
            copy_pair(key + i, block_keys + (i // 2 * BLOCK + place) * 2)
    for i in range(pairs, head_dim):
        store_one(
            block_keys + ((i // width * BLOCK + place) * width + i % width), load_one(key + i)
        )


@kernel
def _load_keys(keys, count, head_dim, block_keys):
    """The first `count` keys as the block's columns."""
    width = width_of(block_keys)
    squares = count // LANES * LANES
    sides = head_dim // (LANES * width) * (LANES * width)
    for place in range(0, squares, LANES):
        for i in range(0, sides, LANES * width):
            transpose(
                keys + (place * head_dim + i), head_dim, block_keys + (i * BLOCK + place * width),
                BLOCK * width,
            )  # fmt: skip
        if sides < head_dim:
            for each in range(place, place + LANES):
                _load_key(keys + each * head_dim, each, sides, head_dim, block_keys)
    for place in range(squares, count):
        _load_key(keys + place * head_dim, place, 0, head_dim, block_keys)


@kernel
def _load_value(value, place, start, head_dim, block_values, stride):
    """Numbers start..head_dim-1 of one value into the block's row `place`."""
    width = width_of(block_values)
    row = block_values + (place // width * stride * width + place % width)
    for i in range(start, head_dim):
        store_one(row + i * width, load_one(value + i))


@kernel
def _load_values(values, count, head_dim, block_values, stride):
    """The first `count` values as the block's rows; what fills a row up is left as it is."""
    width = width_of(block_values)
    full = head_dim // LANES * LANES
    groups = count // width * width
    for place in range(0, groups, width):
        source, target = values + place * head_dim, block_values + place * stride
        for i in range(0, full, LANES):
            join(source + i, source + (head_dim * (width - 1) + i), target + i * width)
        if full < head_dim:
            for each in range(place, place + width):
                _load_value(values + each * head_dim, each, full, head_dim, block_values, stride)
    for place in range(groups, count):
        _load_value(values + place * head_dim, place, 0, head_dim, block_values, stride)


@kernel
def _fold(
    q, sums, tops, weights, begin, end, depths, offset, group, head_dim, stride, scale, block_keys,
    block_values, shares, scores, none, ahead, ahead_end,
):  # fmt: skip
    """Fold a block into rows begin..end-1; the committed length is `offset` behind the block's start. A
    row whose position is before the block is left as it is. Returns the next `ahead`."""
    width = width_of(block_keys)
    row = begin
    while row < end:
        if depths[row // group] + offset < 0:
            row += 1
            continue
        count = min(end - row, TILE_ROWS)
        row_sums = sums + row * stride
        ahead = multiply_near(
            q + row * stride, stride, count, block_keys, BLOCK * width, LANES * width, BLOCK // LANES,
            head_dim // width, none, 0, scores, BLOCK, ahead, ahead_end,
        )  # fmt: skip
        for i in range(count):
            visible = min(depths[(row + i) // group] + offset + 1, BLOCK)
            _weigh(
                scores + i * BLOCK, scale, visible, shares + i * BLOCK, row_sums + i * stride, stride,
                tops + (row + i), weights + (row + i) * LANES,
            )  # fmt: skip
        ahead = multiply_near(
            shares, BLOCK, count, block_values, stride * width, LANES * width, stride // LANES,
            BLOCK // width, row_sums, stride, row_sums, stride, ahead, ahead_end,
        )  # fmt: skip
        row += count
    return ahead


@kernel
def _weigh(scores, scale, visible, shares, sums, stride, top, weight):
    """Turn a row's scores into weights, of which the first `visible` are not 0, and scale what the row
    has summed up so far for its new maximum."""
    hidden = same(zeros(scores), -np.inf)
    factor = same(hidden, scale)
    best = hidden
    for i in range(0, BLOCK, LANES):
        score = keep_first(load(scores + i) * factor, visible - i, hidden)
        store(scores + i, score)
        best = larger(score, best)
    old_top = load_one(top)
    new_top = splat(largest(larger(splat(old_top), best)))
    if largest(new_top) != old_top:  # or else the factor is 1
        shrink = exp_to_one(splat(old_top) - new_top)
        for i in range(0, stride, LANES):
            store(sums + i, load(sums + i) * shrink)
        store(weight, load(weight) * shrink)
        store_one(top, largest(new_top))
    block_weight = zeros(scores)
    for i in range(0, BLOCK, LANES):
        value = exp_to_one(load(scores + i) - new_top)
        store(shares + i, value)
        block_weight = block_weight + value
    store(weight, load(weight) + block_weight)


@kernel
def finish_row(sums, weight, head_dim, out):
    """out = sums over the sum of the LANES numbers at `weight`, for pointers to one row's."""
    all_weight = total(load(weight))
    divisor = splat(all_weight)
    i = 0
    while i + LANES <= head_dim:
        store(out + i, load(sums + i) / divisor)
        i += LANES
    while i < head_dim:
        store_one(out + i, load_one(sums + i) / all_weight)
        i += 1


@entry
def _attend(
    tag, near_tag, wide_tag, q, num_rows, num_kv_heads, group, head_dim, stride, scale, keys, values,
    capacity, lengths, row_start, live_rows, paths, rows, depths, first, sums, tops, weights, scratch,
    out,
):  # fmt: skip
    """All sequences and heads; q is [B, num_kv_heads, T in the order of paths, group, stride]."""
    sums_at, tops_at = pointer(sums, wide_tag), pointer(tops, wide_tag)
    weights_at = pointer(weights, wide_tag)
    for sequence in range(len(lengths)):
        count = find_live(paths, live_rows[sequence], rows, depths, first)
        for head in range(num_kv_heads):
            place = sequence * num_kv_heads + head
            cached = place * capacity * head_dim
            attend_part(
                pointer(q, tag) + place * num_rows * group * stride, sums_at, tops_at, weights_at,
                head_dim, stride, group, scale, pointer(keys, tag) + cached,
                pointer(values, tag) + cached, lengths[sequence], row_start, depths[:count], first,
                paths.table, 0, count * group, scratch, near_tag, wide_tag, 0, 0,
            )  # fmt: skip
            for row in range(count * group):
                at = (sequence * num_rows + rows[row // group]) * num_kv_heads + head
                finish_row(
                    sums_at + row * stride, weights_at + row * LANES, head_dim,
                    pointer(out, tag) + (at * group + row % group) * head_dim,
                )  # fmt: skip


def attend_numba(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """See `attend`. Caches are contiguous; lengths are read, so their bound is not needed."""
    check_contiguous(k_cache=k_cache, v_cache=v_cache)
    batch, num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    group, stride, dtype = num_q_heads // num_kv_heads, filled_up(head_dim), wide_dtype(q.dtype)
    paths = paths_of(layout)
    by_head = q.new_zeros((batch, num_kv_heads, num_rows, group, stride))
    ordered = q[:, torch.from_numpy(paths.order)]
    by_head[..., :head_dim] = ordered.unflatten(2, (num_kv_heads, group)).transpose(1, 2)
    sums = torch.empty((num_rows * group, stride), dtype=dtype)
    tops, weights = sums.new_empty(num_rows * group), sums.new_empty((num_rows * group, LANES))
    scratch = sums.new_zeros(scratch_size(head_dim))
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    _attend(
        TAGS[q.dtype], TAGS[near_dtype(q.dtype)], TAGS[dtype], by_head.data_ptr(), num_rows,
        num_kv_heads, group, head_dim, stride, head_dim**-0.5,
        k_cache.data_ptr(), v_cache.data_ptr(), capacity, whole_numbers(lengths), row_start,
        whole_numbers(live_rows), paths, np.empty_like(paths.order), np.empty_like(paths.depths),
        np.empty_like(paths.first),
        sums.data_ptr(), tops.data_ptr(), weights.data_ptr(), scratch.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out
