"""Scores to weights, and what of them top-k, top-p and min-p keep, in Triton: one program a row.

The largest weight is 1. Weights are summed as whole numbers, which makes a sum exact and so the same in
any order. Thresholds are found by halving among the bits of weights: those of numbers that are not
negative are in the numbers' order. Knows nothing of random numbers; launched by `draw_triton.py`.
"""

import triton
import triton.language as tl

from lookahead.kernels.draw_scores_triton import is_drawn
from lookahead.kernels.warpers import MIN_P, TEMPERATURE, TOP_K, TOP_P

_TEMPERATURE = tl.constexpr(TEMPERATURE)
_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_MIN_P = tl.constexpr(MIN_P)

# What a weight of 1 is as a whole number; a million of them fit into 64 bits. Less than one of these
# parts of the largest weight is nothing.
_SCALE = tl.constexpr(2.0**42)
# Where to look for the most probable tokens: those with at least this share of the largest weight, and
# each time more where they do not suffice, down to what a sum does not know any more.
_FIRST_SHARE = tl.constexpr(2.0**-7)
_NEXT_SHARE = tl.constexpr(2.0**-7)
_LAST_SHARE = tl.constexpr(2.0**-42)
# A place behind every list's.
_EVERYWHERE = tl.constexpr(2**31 - 1)
_BITS_OF_ONE = tl.constexpr(0x3F800000)


@triton.jit
def whole(weights):
    """Weights as whole numbers."""
    return (weights * _SCALE).to(tl.int64)


@triton.jit
def largest_of_tops(tops_ptr, num_blocks, CHUNK: tl.constexpr):
    """The largest score of a row; infinity if one is not a number."""
    top = tl.full([], float("-inf"), tl.float32)
    for first in tl.range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)  # [CHUNK]
        tops = tl.load(tops_ptr + block, mask=block < num_blocks, other=float("-inf"))
        top = tl.maximum(top, tl.max(tops, 0))
    return top


@triton.jit
def has_cut(values_ptr, vocab_size):
    """Whether there is a warper that leaves tokens out; then weights stand in a list with their ids."""
    is_cut = _has_top_k(values_ptr, vocab_size) | (tl.load(values_ptr + _TOP_P) < 1)
    return is_cut | (tl.load(values_ptr + _MIN_P) > 0)


@triton.jit
def _has_top_k(values_ptr, vocab_size):
    top_k = tl.load(values_ptr + _TOP_K)
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _bits(weights):
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _is_kept(weights, place, least, last):
    """Weights whose bits are more than `least`, and those equal to it up to place `last`."""
    bits = _bits(weights)
    return (bits > least) | ((bits == least) & (place <= last))


@triton.jit
def _weigh(
    scores_ptr, sums_ptr, num_blocks, top, temperature, BLOCK: tl.constexpr, SPAN: tl.constexpr
):
    """Scores to weights in their place, and the sum of each span; returns the sum of all."""
    SPANS: tl.constexpr = BLOCK // SPAN
    span = tl.arange(0, SPANS)
    factor = 1 / temperature
    total = tl.zeros([SPANS], tl.int64)
    for block in tl.range(0, num_blocks):
        token = block * BLOCK + span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        weights = tl.exp((tl.load(scores_ptr + token) - top) * factor)  # [SPANS, SPAN]
        sums = tl.sum(whole(weights), 1)
        tl.store(scores_ptr + token, weights)
        tl.store(sums_ptr + block * SPANS + span, sums)
        total += sums
    tl.debug_barrier()  # all is written before any is read
    return tl.sum(total, 0)


@triton.jit
def _measure(list_ptr, count, at_least, least, last, by_sum, BLOCK: tl.constexpr):
    """How many of the kept weights of a list have bits of `at_least` or more, or their sum."""
    found = tl.zeros([BLOCK], tl.int64)
    for first in tl.range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)  # [BLOCK]
        inside = place < count
        weights = tl.load(list_ptr + place, mask=inside, other=0.0)
        counts = inside & _is_kept(weights, place, least, last) & (_bits(weights) >= at_least)
        found += tl.where(counts, tl.where(by_sum, whole(weights), 1), 0)
    return tl.sum(found, 0)


@triton.jit
def _gather(list_ptr, ids_ptr, num_blocks, share, BLOCK: tl.constexpr):
    """Move the weights of at least `share` to the front, in their order, with their places as ids;
    returns how many there are."""
    count = 0
    for block in tl.range(0, num_blocks):
        place = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        weights = tl.load(list_ptr + place)
        is_found = weights >= share
        target = count + tl.cumsum(is_found.to(tl.int32), 0) - 1
        tl.debug_barrier()  # a block is read before it is written
        tl.store(list_ptr + target, weights, mask=is_found)
        tl.store(ids_ptr + target, place, mask=is_found)
        count += tl.sum(is_found.to(tl.int32), 0)
    tl.debug_barrier()  # the list stands before it is read
    return count


@triton.jit
def _cut(list_ptr, count, least, last, goal, by_sum, BLOCK: tl.constexpr):
    """`least` and `last` of the fewest kept weights, largest first and among equal ones those that come
    first, that are `goal` in number or sum; the list holds as much, and the goal is not 0."""
    low, behind, above = least, _BITS_OF_ONE + 1, goal * 0
    while behind - low > 1:
        middle = (low + behind) // 2
        found = _measure(list_ptr, count, middle, least, last, by_sum, BLOCK)
        if found >= goal:
            low = middle
        else:
            behind, above = middle, found
    each = tl.where(by_sum, whole(low.to(tl.float32, bitcast=True)), 1)
    num_equal = (goal - above + each - 1) // each
    end, num_seen = 0, 0
    for first in tl.range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)  # [BLOCK]
        weights = tl.load(list_ptr + place, mask=place < count, other=0.0)
        is_equal = (place < count) & (_bits(weights) == low)
        rank = num_seen + tl.cumsum(is_equal.to(tl.int32), 0)
        end = tl.maximum(end, tl.max(tl.where(is_equal & (rank <= num_equal), place, 0), 0))
        num_seen += tl.sum(is_equal.to(tl.int32), 0)
    return low, end


@triton.jit
def _leave(list_ptr, sums_ptr, count, least, last, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Leave the kept weights in a list, 0 for the others, and the sum of each span of its blocks."""
    SPANS: tl.constexpr = BLOCK // SPAN
    span = tl.arange(0, SPANS)
    for first in tl.range(0, count, BLOCK):
        place = first + span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        weights = tl.load(list_ptr + place, mask=place < count, other=0.0)  # [SPANS, SPAN]
        weights = tl.where(_is_kept(weights, place, least, last), weights, 0.0)
        tl.store(list_ptr + place, weights)
        tl.store(sums_ptr + first // SPAN + span, tl.sum(whole(weights), 1))


@triton.jit
def _share_of(total, top_p):
    """The least whole number that is `top_p` of the total, and not 0."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "step_rows", "first_candidate"])
def keep_weights(
    rows_ptr,  # [n] int64
    values_ptr,  # [NUM_VALUES] float32
    tops_ptr,  # [n, num_blocks] float32
    list_ptr,  # [n, num_blocks * BLOCK] float32, scores become a list of weights
    ids_ptr,  # [n, num_blocks * BLOCK] int32, written if there is a cut: whose weights these are
    counts_ptr,  # [n] int32, written: how long the list is
    sums_ptr,  # [n, num_blocks * BLOCK / SPAN] int64, written: of each span of the list
    vocab_size,
    num_blocks,
    step_rows,
    first_candidate,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row; nothing where nothing is drawn by weights."""
    place = tl.program_id(0).to(tl.int64)
    tops_ptr += place * num_blocks
    list_ptr += place * num_blocks * BLOCK
    ids_ptr += place * num_blocks * BLOCK
    sums_ptr += place * num_blocks * (BLOCK // SPAN)
    top = largest_of_tops(tops_ptr, num_blocks, CHUNK)
    temperature = tl.load(values_ptr + _TEMPERATURE)
    is_row = is_drawn(tl.load(rows_ptr + place) % step_rows, first_candidate)
    if (temperature == 0) | (tl.abs(top) == float("inf")) | ~is_row:
        return
    total = _weigh(list_ptr, sums_ptr, num_blocks, top, temperature, BLOCK, SPAN)
    count = num_blocks * BLOCK
    if has_cut(values_ptr, vocab_size):
        has_top_k = _has_top_k(values_ptr, vocab_size)
        top_k = tl.load(values_ptr + _TOP_K).to(tl.int64)
        top_p = tl.load(values_ptr + _TOP_P)
        min_p = tl.load(values_ptr + _MIN_P)
        # What the tokens that are looked at must be in number or sum; nothing, if all that counts is
        # how probable they are.
        goal = tl.where(has_top_k, top_k, tl.where(top_p < 1, _share_of(total, top_p), 0))
        share = tl.where(min_p > 0, tl.minimum(min_p, _FIRST_SHARE), _FIRST_SHARE) / _NEXT_SHARE
        found = goal - 1
        while (found < goal) & (share > _LAST_SHARE):
            share *= _NEXT_SHARE
            found = _measure(list_ptr, count, _bits(share), 0, 0, not has_top_k, BLOCK)
        count = _gather(list_ptr, ids_ptr, num_blocks, share, BLOCK)
        least, last = _bits(share), _EVERYWHERE
        if has_top_k:
            goal = tl.minimum(top_k, count.to(tl.int64))
            least, last = _cut(list_ptr, count, least, last, goal, False, BLOCK)
            total = _measure(list_ptr, count, least, least, last, True, BLOCK)
        if top_p < 1:
            goal = _share_of(total, top_p)
            least, last = _cut(list_ptr, count, least, last, goal, True, BLOCK)
        last = tl.where(_bits(min_p) > least, _EVERYWHERE, last)
        least = tl.maximum(_bits(min_p), least)
        _leave(list_ptr, sums_ptr, count, least, last, BLOCK, SPAN)
    tl.store(counts_ptr + place, count)
