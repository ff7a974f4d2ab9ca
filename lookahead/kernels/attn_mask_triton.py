"""The attention kernels in Triton: canonical key order, no mask tensor.

A row's keys are numbered by absolute position and summed in absolute tiles of BLOCK_N keys: each tile
has its own maximum and sum, tiles are folded in order within absolute groups of TILES, groups are
folded in order. A tile that lies whole below the committed length is shared by all rows; a tile that
reaches past it takes each row's keys along the row's own path. So a row does the same arithmetic
whether the tokens before it are committed or rows of the same step.

The rows of a step fall into paths: the trunk (row 0 and, with a window, the rest of its level 0), then
what each column adds above level 0, then each candidate. `_path` knows them in closed form; for any
other tree the same numbers come from a table. `attn_mask_launch.py` decides shapes and launches.
"""

import triton
import triton.language as tl

# Arguments that point to one number for each sequence.
PER_SEQUENCE = ["lengths_ptr", "live_ptr"]


@triton.jit
def _path(path, window, levels):
    """The paper's layout: path number -> (trunk, base, stride, count).

    Offsets 0..trunk along the path are the trunk's rows, of those numbers; the path's own rows are
    base, base + stride, ..., `count` of them, at offsets trunk + 1, trunk + 2, ...
    """
    columns = tl.where(levels > 1, window, 0)
    is_trunk = path == 0
    is_column = path <= columns
    candidate_base = tl.maximum(window * levels, 1) + (path - 1 - columns) * levels
    trunk = tl.where(is_trunk, -1, tl.where(is_column, path - 1, 0))
    base = tl.where(is_trunk, 0, tl.where(is_column, window + path - 1, candidate_base))
    stride = tl.where(is_trunk, 1, tl.where(is_column, window, 1))
    own = tl.where(is_column, levels - 1, levels)
    count = tl.where(is_trunk, tl.maximum(window, 1), own)
    return trunk, base, stride, count


@triton.jit
def _depth(row, window, levels):
    """The paper's layout: row number -> depth in the tree."""
    window_rows = tl.maximum(window * levels, 1)
    columns = tl.maximum(window, 1)
    in_window = row // columns + row % columns
    in_candidate = 1 + (row - window_rows) % levels
    return tl.where(row < window_rows, in_window, in_candidate)


@triton.jit
def _fold(top, total, acc, tile_top, tile_total, tile_acc):
    """Fold a later partial (maximum, sum [M], accumulator [M, D]) into an earlier one.

    Folding in an absent partial, (-inf, 0, 0), changes no bit.
    """
    new_top = tl.maximum(top, tile_top)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.math.exp2(top - pivot)
    new = tl.math.exp2(tile_top - pivot)
    total = tl.fma(total, old, tile_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), tile_acc * new[:, None])
    return new_top, total, acc


@triton.jit(
    do_not_specialize=[
        "window", "levels", "num_rows", "num_paths", "path_stride", "num_tails", "tail_blocks",
        "row_blocks", "num_groups", "cache_rows", "row_start",
    ],
    do_not_specialize_on_alignment=PER_SEQUENCE,
)  # fmt: skip
def attend_tiles(
    q_ptr,  # [B, T, num_q_heads, HEAD_DIM]
    k_ptr,  # [B, num_kv_heads, cache_rows, HEAD_DIM]
    v_ptr,  # [B, num_kv_heads, cache_rows, HEAD_DIM]
    lengths_ptr,  # [B]
    live_ptr,  # [B]
    path_rows_ptr,  # [num_paths, path_stride] row by path and offset; None for the closed form
    path_firsts_ptr,  # [num_paths] offset of the path's first own row; None for the closed form
    path_counts_ptr,  # [num_paths] own rows; None for the closed form
    acc_ptr,  # [B, num_kv_heads, num_groups + num_tails, T * GROUP, HEAD_DIM] fp32
    top_ptr,  # [B, num_kv_heads, num_groups + num_tails, T * GROUP] fp32
    total_ptr,  # the same
    window,
    levels,
    num_rows,
    num_paths,
    path_stride,
    num_tails,
    tail_blocks,
    row_blocks,
    num_groups,
    cache_rows,
    row_start,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    TABLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One partial: a tail tile of one path's rows, or a group of whole tiles of any rows.

    Both kinds run the same loop; only rows, addresses and bounds differ.
    """
    pid = tl.program_id(0)
    kv = tl.program_id(1)
    sequence = kv // NUM_KV_HEADS
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    live = tl.load(live_ptr + sequence).to(tl.int32)
    whole_tiles = length // BLOCK_N

    # Tail programs come first: they are the shortest, and there are few of them.
    num_tail_programs = num_paths * tail_blocks * num_tails
    is_tail = pid < num_tail_programs
    tail = pid % num_tails
    path = tl.where(is_tail, pid // num_tails // tail_blocks, 0)
    group = (pid - num_tail_programs) // row_blocks
    block = tl.where(
        is_tail, pid // num_tails % tail_blocks, (pid - num_tail_programs) % row_blocks
    )
    if TABLE:
        first = tl.load(path_firsts_ptr + path)
        count = tl.load(path_counts_ptr + path)
        trunk, base, stride = -1, 0, 1
    else:
        trunk, base, stride, count = _path(path, window, levels)
        first = trunk + 1
    slot = tl.where(is_tail, num_groups + tail, group)
    count = tl.where(is_tail, count, num_rows)

    packed = block * BLOCK_M + tl.arange(0, BLOCK_M)
    own = packed // GROUP  # [M] own row of the path, or row of the step
    head = packed % GROUP
    last_offset = first + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    low = tl.where(is_tail, (whole_tiles + tail) * BLOCK_N, group * (TILES * BLOCK_N))
    high = tl.where(
        is_tail,
        tl.minimum(low + BLOCK_N, length + last_offset + 1),
        tl.minimum(low + TILES * BLOCK_N, whole_tiles * BLOCK_N),
    )
    if TABLE:
        table_row = tl.load(
            path_rows_ptr + path * path_stride + first + own, mask=is_tail & (own < count), other=0
        )
        row = tl.where(is_tail, table_row, own)
    else:
        row = tl.where(is_tail, base + own * stride, own)
    in_block = (own < count) & (row < live)
    if (low >= high) | (tl.max(in_block.to(tl.int32), 0) == 0):
        return
    # Whole tiles are seen by every row; a tail tile up to the row's own position.
    position = tl.where(is_tail, length + first + own, 0x7FFFFFFF)

    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    q_row = (sequence.to(tl.int64) * num_rows + row) * (NUM_KV_HEADS * GROUP)
    q_row += (kv % NUM_KV_HEADS) * GROUP + head
    q = tl.load(
        q_ptr + q_row[:, None] * HEAD_DIM + dim[None, :],
        mask=in_block[:, None] & in_head[None, :],
        other=0.0,
    )  # [M, D]
    # 64 bits reach the head; within one head 32 are enough, which the launcher checks.
    k_ptr += kv.to(tl.int64) * cache_rows * HEAD_DIM
    v_ptr += kv.to(tl.int64) * cache_rows * HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)  # [N] absolute positions
        offset = key - length
        in_tile = key < high
        if TABLE:
            key_row = tl.load(
                path_rows_ptr + path * path_stride + offset, mask=in_tile & (offset >= 0), other=0
            )
        else:
            key_row = tl.where(offset <= trunk, offset, base + (offset - trunk - 1) * stride)
        index = tl.where(offset < 0, key, row_start + key_row)
        address = index[:, None] * HEAD_DIM + dim[None, :]
        # Dead rows come last on a path: no live row of the block sees their keys.
        is_live = in_tile & ((offset < 0) | (key_row < live))
        readable = is_live[:, None] & in_head[None, :]
        k = tl.load(k_ptr + address, mask=readable, other=0.0)  # [N, D]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))  # [M, N]
        tile_top = tl.max(scores, 1)
        pivot = tl.where(tile_top == float("-inf"), 0.0, tile_top)
        weights = tl.math.exp2(scores - pivot[:, None])
        tile_total = tl.sum(weights, 1)
        v = tl.load(v_ptr + address, mask=readable, other=0.0)  # [N, D]
        tile_acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")  # [M, D]
        top, total, acc = _fold(top, total, acc, tile_top, tile_total, tile_acc)

    num_slots = num_groups + num_tails
    partial = (kv.to(tl.int64) * num_slots + slot) * (num_rows * GROUP) + row * GROUP + head
    tl.store(top_ptr + partial, top, mask=in_block)
    tl.store(total_ptr + partial, total, mask=in_block)
    tl.store(
        acc_ptr + partial[:, None] * HEAD_DIM + dim[None, :],
        acc,
        mask=in_block[:, None] & in_head[None, :],
    )


@triton.jit(
    do_not_specialize=["window", "levels", "num_rows", "num_tails", "num_groups"],
    do_not_specialize_on_alignment=PER_SEQUENCE,
)
def merge_partials(
    out_ptr,  # [B, T, num_q_heads, HEAD_DIM]
    acc_ptr,  # as attend_tiles wrote them
    top_ptr,
    total_ptr,
    lengths_ptr,  # [B]
    live_ptr,  # [B]
    depths_ptr,  # [T]; None for the closed form
    window,
    levels,
    num_rows,
    num_tails,
    num_groups,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Finish each group with the row's own tail tiles in order, fold the groups in order, normalise.

    Dead rows become 0.
    """
    kv = tl.program_id(1)
    sequence = kv // NUM_KV_HEADS
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    live = tl.load(live_ptr + sequence).to(tl.int32)
    whole_tiles = length // BLOCK_N
    packed = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = packed // GROUP
    is_row = row < num_rows
    is_live = row < live
    depth = _depth(row, window, levels)
    if TABLE:
        depth = tl.load(depths_ptr + row, mask=is_row, other=0)
    last_tile = tl.where(is_live, (length + depth) // BLOCK_N, -1)  # [R]
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    num_slots = num_groups + num_tails
    first_partial = kv.to(tl.int64) * num_slots * (num_rows * GROUP) + packed  # [R]
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for group in tl.range(0, tl.max(last_tile, 0) // TILES + 1):
        exists = is_live & (group * TILES < whole_tiles)
        partial = first_partial + group * (num_rows * GROUP)
        group_top = tl.load(top_ptr + partial, mask=exists, other=float("-inf"))
        group_total = tl.load(total_ptr + partial, mask=exists, other=0.0)
        group_acc = tl.load(
            acc_ptr + partial[:, None] * HEAD_DIM + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        if (group + 1) * TILES > whole_tiles:
            for tail in tl.range(0, num_tails):
                tile = whole_tiles + tail
                exists = (tile // TILES == group) & (tile <= last_tile)
                partial = first_partial + (num_groups + tail) * (num_rows * GROUP)
                tile_top = tl.load(top_ptr + partial, mask=exists, other=float("-inf"))
                tile_total = tl.load(total_ptr + partial, mask=exists, other=0.0)
                tile_acc = tl.load(
                    acc_ptr + partial[:, None] * HEAD_DIM + dim[None, :],
                    mask=exists[:, None] & in_head[None, :],
                    other=0.0,
                )
                group_top, group_total, group_acc = _fold(
                    group_top, group_total, group_acc, tile_top, tile_total, tile_acc
                )
        top, total, acc = _fold(top, total, acc, group_top, group_total, group_acc)
    out = acc / tl.where(is_live, total, 1.0)[:, None]  # a dead row folded nothing: 0
    out_row = (sequence.to(tl.int64) * num_rows + row) * (NUM_KV_HEADS * GROUP)
    out_row += (kv % NUM_KV_HEADS) * GROUP + packed % GROUP
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & in_head[None, :],
    )
