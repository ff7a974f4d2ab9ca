"""The forward pass on a CPU as one compiled function that a team of threads runs together.

Between loading a token's embedding and its last norm nothing returns to Python. Only live rows are
computed. Each row's arithmetic is its own: no product, norm or attention depends on what else is in the
step, on the number of threads or on how the work is shared between them.
"""

from typing import NamedTuple

import numpy as np

from lookahead.kernels.attn_mask_numba import attend_part, find_live, finish_row
from lookahead.kernels.product_numba import multiply_share
from lookahead.kernels.rms_norm_numba import add_row, norm_row
from lookahead.kernels.rope_write_numba import write_row
from lookahead.kernels.silu_mul_numba import gate_row
from lookahead.kernels.simd import largest, load_one, pointer, store_one, zeros
from lookahead.kernels.simd_types import LANES, entry, kernel
from lookahead.kernels.team import meet, share

# A key/value head's rows are shared between threads if there are so many.
SHARED_ROWS = 24


class Sizes(NamedTuple):
    """Numbers that do not change; strides are those of buffers, in numbers."""

    num_layers: int
    hidden: int
    hidden_stride: int
    num_kv_heads: int
    group: int
    head_dim: int
    head_stride: int
    qkv_stride: int
    attended_stride: int
    intermediate: int
    gate_up_stride: int
    activated_stride: int
    width: int  # inner indices of one link
    scratch_bytes: int  # of one thread
    vocab_vectors_stride: (
        int  # numbers of one vector of features of a packed embedding; 0 if not packed
    )
    eps: float
    scale: float


class Buffers(NamedTuple):
    """Addresses of the buffers of one row capacity."""

    residual: int
    normed: int
    qkv: int
    q: int
    sums: int
    tops: int
    weights: int
    attended: int
    projected: int
    gate_up: int
    activated: int
    scratch: int


class Places(NamedTuple):
    """Which rows there are: `rows` holds sequence * T + row of each live row, `depths` their depths,
    `first` [B + 1] where a sequence's rows begin and `paths` [B, P + 1] where a path's own rows begin,
    counted from there."""

    rows: np.ndarray
    depths: np.ndarray
    first: np.ndarray
    paths: np.ndarray


class CachePlace(NamedTuple):
    """The cache's address, and how many numbers on are the next layer, the values behind the keys, the
    next sequence and the next head."""

    data: int
    row_start: int
    layer: int
    values: int
    sequence: int
    head: int


# What `layers` [layers, 10] holds of each: addresses.
QKV, QKV_BIAS, OUTPUT, OUTPUT_BIAS, POST_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, NEXT_NORM = (
    range(10)
)


@kernel
def _vectors(size):
    return -(-size // LANES)


@kernel
def _links(size, width):
    return -(-size // width)


@kernel
def _embed_row(embedding, token, sizes, out):
    """One token's embedding, filled up with zeros."""
    none = largest(zeros(out))
    packed, width = sizes.vocab_vectors_stride, sizes.width
    for i in range(sizes.hidden):
        if packed:
            at = (
                token // LANES * packed
                + i // width * LANES * width
                + token % LANES * width
                + i % width
            )
        else:
            at = token * sizes.hidden + i
        store_one(out + i, load_one(embedding + at))
    for i in range(sizes.hidden, sizes.hidden_stride):
        store_one(out + i, none)


@kernel
def _attend_share(
    thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, table, places
):  # fmt: skip
    """This thread's part of a layer's attention."""
    group, stride, kv_heads = sizes.group, sizes.head_stride, sizes.num_kv_heads
    num_rows = places.first[-1]
    parts = num_threads if num_rows * group >= SHARED_ROWS * len(lengths) else 1
    for unit in range(thread, len(lengths) * kv_heads * parts, num_threads):
        sequence, head, part = unit // (kv_heads * parts), unit // parts % kv_heads, unit % parts
        start = places.first[sequence]
        count = (places.first[sequence + 1] - start) * group
        begin, end = share(count, part, parts)
        if begin == end:
            continue
        offset = (head * num_rows + start) * group
        sums = pointer(at.sums, wide_tag) + offset * stride
        weights = pointer(at.weights, wide_tag) + offset
        keys = pointer(cache.data, tag) + (
            layer * cache.layer + sequence * cache.sequence + head * cache.head
        )
        attend_part(
            pointer(at.q, tag) + offset * stride, sums, pointer(at.tops, wide_tag) + offset,
            weights, sizes.head_dim, stride, group, sizes.scale, keys, keys + cache.values,
            lengths[sequence], cache.row_start, places.depths[start : places.first[sequence + 1]],
            places.paths[sequence], table, begin, end, at.scratch + thread * sizes.scratch_bytes,
            near_tag, wide_tag,
        )  # fmt: skip
        for row in range(begin, end):
            out = pointer(at.attended, tag) + (start + row // group) * sizes.attended_stride
            finish_row(
                sums + row * stride, weights + row, sizes.head_dim,
                out + (head * group + row % group) * sizes.head_dim,
            )  # fmt: skip


@kernel
def _norm_share(thread, num_threads, tag, wide_tag, sizes, at, num_rows, added, weight):
    """This thread's rows of a norm, behind the addition of `added` to the residual unless that is 0."""
    begin, end = share(num_rows, thread, num_threads)
    for row in range(begin, end):
        start = row * sizes.hidden_stride
        residual = pointer(at.residual, tag) + start
        if added:
            add_row(pointer(added, tag) + start, residual, sizes.hidden)
        norm_row(
            residual, pointer(weight, wide_tag), sizes.eps, sizes.hidden,
            pointer(at.normed, tag) + start,
        )  # fmt: skip


@entry
def run_forward(
    thread, num_threads, counter, arrivals, tag, near_tag, wide_tag, sizes, at, embedding, first_norm,
    layers, cos, sin, cache, tokens, positions, lengths, live_rows, paths, places, out,
):  # fmt: skip
    batch, step_rows = tokens.shape
    if thread == 0:
        count = 0
        for sequence in range(batch):
            places.first[sequence] = count
            live = find_live(
                paths, live_rows[sequence], places.rows[count:], places.depths[count:],
                places.paths[sequence],
            )  # fmt: skip
            for row in range(count, count + live):
                places.rows[row] += sequence * step_rows
            count += live
        places.first[batch] = count
    arrivals = meet(counter, arrivals, num_threads)
    num_rows = places.first[batch]
    begin, end = share(num_rows, thread, num_threads)
    for row in range(begin, end):
        sequence, number = places.rows[row] // step_rows, places.rows[row] % step_rows
        _embed_row(
            pointer(embedding, tag), tokens[sequence, number], sizes,
            pointer(at.residual, tag) + row * sizes.hidden_stride,
        )  # fmt: skip
    _norm_share(thread, num_threads, tag, wide_tag, sizes, at, num_rows, 0, first_norm)
    arrivals = meet(counter, arrivals, num_threads)

    heads = (sizes.group + 2) * sizes.num_kv_heads * sizes.head_dim
    attended = sizes.group * sizes.num_kv_heads * sizes.head_dim
    hidden_vectors, hidden_links = _vectors(sizes.hidden), _links(sizes.hidden, sizes.width)
    half = sizes.head_dim // 2
    for layer in range(sizes.num_layers):
        weight = layers[layer]
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows, weight[QKV],
            weight[QKV_BIAS], _vectors(heads), hidden_links, sizes.width, at.qkv, sizes.qkv_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        for row in range(begin, end):
            sequence, number = places.rows[row] // step_rows, places.rows[row] % step_rows
            keys = pointer(cache.data, tag) + (
                layer * cache.layer
                + sequence * cache.sequence
                + (cache.row_start + number) * sizes.head_dim
            )
            angle = positions[sequence, number] * half
            write_row(
                pointer(at.qkv, tag) + row * sizes.qkv_stride, sizes.num_kv_heads, sizes.group,
                sizes.head_dim, pointer(cos, wide_tag) + angle, pointer(sin, wide_tag) + angle,
                keys, keys + cache.values, cache.head,
                pointer(at.q, tag) + row * sizes.group * sizes.head_stride,
                num_rows * sizes.group * sizes.head_stride, sizes.head_stride,
            )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _attend_share(
            thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, paths.table,
            places,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.attended, sizes.attended_stride, num_rows,
            weight[OUTPUT], weight[OUTPUT_BIAS], hidden_vectors, _links(attended, sizes.width),
            sizes.width, at.projected, sizes.hidden_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[POST_NORM]
        )
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows,
            weight[GATE_UP], weight[GATE_UP_BIAS], _vectors(2 * sizes.intermediate), hidden_links,
            sizes.width, at.gate_up, sizes.gate_up_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        for row in range(begin, end):
            gate_row(
                pointer(at.gate_up, tag) + row * sizes.gate_up_stride, sizes.intermediate,
                pointer(at.activated, tag) + row * sizes.activated_stride,
            )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        multiply_share(
            thread, num_threads, tag, wide_tag, at.activated, sizes.activated_stride, num_rows,
            weight[DOWN], weight[DOWN_BIAS], hidden_vectors, _links(sizes.intermediate, sizes.width),
            sizes.width, at.projected, sizes.hidden_stride,
        )  # fmt: skip
        arrivals = meet(counter, arrivals, num_threads)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[NEXT_NORM]
        )
        arrivals = meet(counter, arrivals, num_threads)
    for row in range(begin, end):
        source = pointer(at.normed, tag) + row * sizes.hidden_stride
        target = pointer(out, tag) + places.rows[row] * sizes.hidden_stride
        for i in range(sizes.hidden_stride):
            store_one(target + i, load_one(source + i))
    meet(counter, arrivals, num_threads)
