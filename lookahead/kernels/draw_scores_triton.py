"""The warpers before the temperature, in Triton: logits to scores, block by block.

A block of a row is a program of its own: nothing here is summed but whole numbers, so how the work is
cut changes no bit. Knows nothing of a draw; launched by `draw_triton.py`.
"""

import triton
import triton.language as tl

from lookahead.kernels.warpers import FREQUENCY, HAS_BIAS, MIN_NEW, PRESENCE, REPETITION

_REPETITION = tl.constexpr(REPETITION)
_PRESENCE = tl.constexpr(PRESENCE)
_FREQUENCY = tl.constexpr(FREQUENCY)
_MIN_NEW = tl.constexpr(MIN_NEW)
_HAS_BIAS = tl.constexpr(HAS_BIAS)


@triton.jit
def _has_penalty(values_ptr):
    is_repetition = tl.load(values_ptr + _REPETITION) != 1
    is_presence = tl.load(values_ptr + _PRESENCE) != 0
    return is_repetition | is_presence | (tl.load(values_ptr + _FREQUENCY) != 0)


@triton.jit
def is_drawn(row, first_candidate):
    """Whether a row of a step is one of those that are drawn."""
    return (row == 0) | (row >= first_candidate)


@triton.jit
def depth_of(row, parents_ptr):
    """How many rows there are on a row's path behind row 0."""
    depth = 0
    while row > 0:
        depth += 1
        row = tl.load(parents_ptr + row)
    return depth


@triton.jit(do_not_specialize=["text_size", "num_blocks"])
def count_tokens(
    text_ptr,  # [B, text_size] int32
    lengths_ptr,  # [B]
    prompt_lengths_ptr,  # [B]
    values_ptr,  # [NUM_VALUES] float32
    tallies_ptr,  # [B, num_blocks * BLOCK] int32, written if there is a penalty
    text_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Of each id of a block twice how often it is among a sequence's new tokens; one if it is in the
    prompt alone, or one more."""
    if not _has_penalty(values_ptr):
        return
    block = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    text_ptr += sequence * text_size
    tallies_ptr += (sequence * num_blocks + block) * BLOCK
    tl.store(tallies_ptr + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32))
    tl.debug_barrier()  # all is zero before any is counted
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    prompt_length = tl.load(prompt_lengths_ptr + sequence).to(tl.int32)
    one = tl.full([BLOCK_T], 1, tl.int32)
    for first in tl.range(0, length + 1, BLOCK_T):
        index = first + tl.arange(0, BLOCK_T)  # [T]
        place = tl.load(text_ptr + index, mask=index <= length, other=-1) - block * BLOCK
        is_own = (place >= 0) & (place < BLOCK) & (index <= length)
        is_new = index >= prompt_length
        tl.atomic_or(tallies_ptr + place, one, mask=is_own & ~is_new, sem="relaxed")
        tl.atomic_add(tallies_ptr + place, 2 * one, mask=is_own & is_new, sem="relaxed")


@triton.jit(
    do_not_specialize=["vocab_size", "num_blocks", "step_rows", "first_candidate", "num_eos_ids"]
)
def warp_scores(
    logits_ptr,  # [n, vocab_size]
    rows_ptr,  # [n] int64
    tallies_ptr,  # [B, num_blocks * BLOCK] int32
    lengths_ptr,  # [B]
    prompt_lengths_ptr,  # [B]
    eos_ids_ptr,  # [B, num_eos_ids] int64
    tokens_ptr,  # [B, step_rows]
    parents_ptr,  # [step_rows] int64
    values_ptr,  # [NUM_VALUES] float32
    bias_ptr,  # [vocab_size] float32
    scores_ptr,  # [n, num_blocks * BLOCK] float32, written, with -inf behind the vocabulary
    tops_ptr,  # [n, num_blocks] float32, written: the largest, infinity if any is not a number
    vocab_size,
    num_blocks,
    step_rows,
    first_candidate,
    num_eos_ids,
    BLOCK: tl.constexpr,
):
    """A block of a row's scores."""
    block = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    number = tl.load(rows_ptr + place)
    sequence, row = number // step_rows, number % step_rows
    if not is_drawn(row, first_candidate):
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    score = tl.load(logits_ptr + place * vocab_size + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)  # [BLOCK]
    index = tl.load(lengths_ptr + sequence).to(tl.int32) + depth_of(row, parents_ptr)
    prompt_length = tl.load(prompt_lengths_ptr + sequence).to(tl.int32)
    if _has_penalty(values_ptr):
        count = tl.load(tallies_ptr + sequence * num_blocks * BLOCK + token)
        above, above_index = row, index
        while above > 0:
            is_own = token == tl.load(tokens_ptr + sequence * step_rows + above)
            more = tl.where(above_index >= prompt_length, count + 2, count | 1)
            count = tl.where(is_own, more, count)
            above = tl.load(parents_ptr + above)
            above_index -= 1
        penalty = tl.load(values_ptr + _REPETITION)
        # Divided as the specification divides, to the nearest number.
        penalised = tl.where(
            score > 0, tl.div_rn(score, penalty + tl.zeros_like(score)), score * penalty
        )
        score = tl.where(count > 0, penalised, score)
        num_new = count >> 1
        score -= tl.where(num_new > 0, tl.load(values_ptr + _PRESENCE), 0.0)
        score -= tl.load(values_ptr + _FREQUENCY) * num_new.to(tl.float32)
    if tl.load(values_ptr + _HAS_BIAS) != 0:
        score += tl.load(bias_ptr + token, mask=inside, other=0.0)
    if tl.maximum(index + 1 - prompt_length, 0) < tl.load(values_ptr + _MIN_NEW):
        for each in tl.range(0, num_eos_ids):
            eos_id = tl.load(eos_ids_ptr + sequence * num_eos_ids + each)
            score = tl.where(token == eos_id, float("-inf"), score)
    tl.store(scores_ptr + place * num_blocks * BLOCK + token, score)
    top = tl.max(tl.where(score == score, score, float("inf")), 0)
    tl.store(tops_ptr + place * num_blocks + block, top)
