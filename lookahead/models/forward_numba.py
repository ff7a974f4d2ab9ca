"""The forward pass on a CPU as one compiled function that a team of threads runs together.

Between loading a token's embedding and its last norm nothing returns to Python. Only live rows are
computed. Each row's arithmetic is its own: no product, norm or attention depends on what else is in the
step, on the number of threads or on how the work is shared between them.
"""

from typing import NamedTuple

import numpy as np

from lookahead.kernels.attn_mask_numba import attend_part, find_live, finish_row
from lookahead.kernels.largest_logit_numba import largest_of_row
from lookahead.kernels.product_numba import multiply_share, share_of_vectors
from lookahead.kernels.rms_norm_numba import add_row, norm_row
from lookahead.kernels.rope_write_numba import write_row
from lookahead.kernels.silu_mul_numba import gate_row
from lookahead.kernels.simd import largest, load, load_one, pointer, store, store_one, zeros
from lookahead.kernels.simd_types import LANES, entry, kernel
from lookahead.kernels.team import meet, meet_and_ask, share

# A thread asks for so many bytes of the next weights while it does something else.
ASKED_BYTES = 384 * 1024
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
    number_bytes: int
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


class Head(NamedTuple):
    """The packed LM head: addresses, vectors of features, and features that there are."""

    weight: int
    bias: int
    num_vectors: int
    size: int


class Choices(NamedTuple):
    """Rows whose logits are wanted, by their numbers sequence * T + row, and what becomes of them.

    Attributes:
        rows: [n] int64, live rows.
        logits: address of [n, num_vectors * LANES] numbers.
        tokens, finite: [n], as of `largest_logit`.
        share_tokens, share_tops, share_are_numbers: [threads, n], what each thread finds.
    """

    rows: np.ndarray
    logits: int
    tokens: np.ndarray
    finite: np.ndarray
    share_tokens: np.ndarray
    share_tops: np.ndarray
    share_are_numbers: np.ndarray


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
    thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, table, places,
    ahead, ahead_end,
):  # fmt: skip
    """This thread's part of a layer's attention. Returns the next `ahead`."""
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
        weights = pointer(at.weights, wide_tag) + offset * LANES
        keys = pointer(cache.data, tag) + (
            layer * cache.layer + sequence * cache.sequence + head * cache.head
        )
        ahead = attend_part(
            pointer(at.q, tag) + offset * stride, sums, pointer(at.tops, wide_tag) + offset,
            weights, sizes.head_dim, stride, group, sizes.scale, keys, keys + cache.values,
            lengths[sequence], cache.row_start, places.depths[start : places.first[sequence + 1]],
            places.paths[sequence], table, begin, end, at.scratch + thread * sizes.scratch_bytes,
            near_tag, wide_tag, ahead, ahead_end,
        )  # fmt: skip
        for row in range(begin, end):
            out = pointer(at.attended, tag) + (start + row // group) * sizes.attended_stride
            finish_row(
                sums + row * stride, weights + row * LANES, sizes.head_dim,
                out + (head * group + row % group) * sizes.head_dim,
            )  # fmt: skip
    return ahead


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


@kernel
def _share_at(weight, vectors, links, sizes, thread, num_threads):
    """The address of this thread's part of a product's weights, and how much of it may be asked for
    ahead: the address behind that."""
    first, last = share_of_vectors(vectors, thread, num_threads)
    vector_bytes = links * LANES * sizes.width * sizes.number_bytes
    start = weight + first * vector_bytes
    return start, start + min(max(last - first, 0) * vector_bytes, ASKED_BYTES)


@kernel
def _gather_rows(places, wanted, tag, at, sizes, begin, end):
    """Copy the normed rows that are wanted, by their numbers sequence * T + row, side by side."""
    for number in range(begin, end):
        row = 0
        while places.rows[row] != wanted[number]:
            row += 1
        source = pointer(at.normed, tag) + row * sizes.hidden_stride
        target = pointer(at.projected, tag) + number * sizes.hidden_stride
        for i in range(0, sizes.hidden_stride, LANES):
            store(target + i, load(source + i))


@kernel
def _largest_of_share(thread, num_threads, tag, head, choices):
    """The largest logit of each row among this thread's features."""
    first, last = share_of_vectors(head.num_vectors, thread, num_threads)
    first, last = first * LANES, min(last * LANES, head.size)
    for row in range(len(choices.rows)):
        choices.share_tokens[thread, row] = -1
        if first < last:
            start = pointer(choices.logits, tag) + (row * head.num_vectors * LANES + first)
            place, most, is_number = largest_of_row(start, last - first)
            choices.share_tokens[thread, row] = first + place
            choices.share_tops[thread, row] = most
            choices.share_are_numbers[thread, row] = is_number


@kernel
def _largest_of_all(choices):
    """The largest logit of each row among the threads' own, the lowest id on a tie."""
    for row in range(len(choices.rows)):
        token, most, is_number = -1, -np.inf, True
        for thread in range(len(choices.share_tokens)):
            if choices.share_tokens[thread, row] >= 0:
                is_number = is_number and choices.share_are_numbers[thread, row]
                if token < 0 or choices.share_tops[thread, row] > most:
                    token = choices.share_tokens[thread, row]
                    most = choices.share_tops[thread, row]
        choices.tokens[row] = token
        choices.finite[row] = is_number and most - most == 0


@entry
def run_forward(
    thread, num_threads, counter, arrivals, tag, near_tag, wide_tag, sizes, at, embedding, first_norm,
    layers, cos, sin, cache, tokens, positions, lengths, live_rows, paths, places, out, head, choices,
):  # fmt: skip
    """Fills the cache's scratch rows; writes the hidden states behind the last norm to `out` unless
    that is 0, and for the rows of `choices` their logits and the largest of each."""
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
    attended_links = _links(attended, sizes.width)
    inner_links = _links(sizes.intermediate, sizes.width)
    for layer in range(sizes.num_layers):
        weight = layers[layer]
        # While a thread waits or attends, the weights that it needs next come from memory.
        ahead, end_ahead = _share_at(
            weight[OUTPUT], hidden_vectors, attended_links, sizes, thread, num_threads
        )
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows, weight[QKV],
            weight[QKV_BIAS], _vectors(heads), hidden_links, sizes.width, at.qkv, sizes.qkv_stride,
            ahead,
        )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
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
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        ahead = _attend_share(
            thread, num_threads, tag, near_tag, wide_tag, sizes, at, cache, layer, lengths, paths.table,
            places, ahead, end_ahead,
        )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        ahead, end_ahead = _share_at(
            weight[GATE_UP],
            _vectors(2 * sizes.intermediate),
            hidden_links,
            sizes,
            thread,
            num_threads,
        )
        multiply_share(
            thread, num_threads, tag, wide_tag, at.attended, sizes.attended_stride, num_rows,
            weight[OUTPUT], weight[OUTPUT_BIAS], hidden_vectors, attended_links, sizes.width,
            at.projected, sizes.hidden_stride, ahead,
        )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[POST_NORM]
        )
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        ahead, end_ahead = _share_at(
            weight[DOWN], hidden_vectors, inner_links, sizes, thread, num_threads
        )
        multiply_share(
            thread, num_threads, tag, wide_tag, at.normed, sizes.hidden_stride, num_rows,
            weight[GATE_UP], weight[GATE_UP_BIAS], _vectors(2 * sizes.intermediate), hidden_links,
            sizes.width, at.gate_up, sizes.gate_up_stride, ahead,
        )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        for row in range(begin, end):
            gate_row(
                pointer(at.gate_up, tag) + row * sizes.gate_up_stride, sizes.intermediate,
                pointer(at.activated, tag) + row * sizes.activated_stride,
            )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        if layer + 1 < sizes.num_layers:
            ahead, end_ahead = _share_at(
                layers[layer + 1, QKV], _vectors(heads), hidden_links, sizes, thread, num_threads
            )
        else:
            ahead, end_ahead = _share_at(
                head.weight, head.num_vectors, hidden_links, sizes, thread, num_threads
            )
        multiply_share(
            thread, num_threads, tag, wide_tag, at.activated, sizes.activated_stride, num_rows,
            weight[DOWN], weight[DOWN_BIAS], hidden_vectors, inner_links, sizes.width, at.projected,
            sizes.hidden_stride, ahead,
        )  # fmt: skip
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
        _norm_share(
            thread, num_threads, tag, wide_tag, sizes, at, num_rows, at.projected, weight[NEXT_NORM]
        )
        arrivals, ahead = meet_and_ask(counter, arrivals, num_threads, ahead, end_ahead)
    if out:
        for row in range(begin, end):
            source = pointer(at.normed, tag) + row * sizes.hidden_stride
            target = pointer(out, tag) + places.rows[row] * sizes.hidden_stride
            for i in range(0, sizes.hidden_stride, LANES):
                store(target + i, load(source + i))
    num_choices = len(choices.rows)
    begin, end = share(num_choices, thread, num_threads)
    _gather_rows(places, choices.rows, tag, at, sizes, begin, end)
    arrivals = meet(counter, arrivals, num_threads)
    multiply_share(
        thread, num_threads, tag, wide_tag, at.projected, sizes.hidden_stride, num_choices, head.weight,
        head.bias, head.num_vectors, hidden_links, sizes.width, choices.logits,
        head.num_vectors * LANES, head.weight,
    )  # fmt: skip
    _largest_of_share(thread, num_threads, tag, head, choices)
    arrivals = meet(counter, arrivals, num_threads)
    if thread == 0:
        _largest_of_all(choices)
