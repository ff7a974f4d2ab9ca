"""`draw` in Triton: four launches of fixed shapes, whatever is drawn and by which warpers.

Tokens of the texts are counted and logits become scores (`draw_scores_triton.py`), scores become
weights of which some are kept (`draw_kept_triton.py`), and a token is picked. What the warpers are is
read on the device, so one recorded graph serves all of them. Whatever is summed is summed as whole
numbers: what a row draws cannot depend on an order.
"""

import torch
import triton
import triton.language as tl

from lookahead.kernels.checks import check_launch
from lookahead.kernels.draw_kept_triton import has_cut, keep_weights, largest_of_tops, whole
from lookahead.kernels.draw_scores_triton import count_tokens, depth_of, is_drawn, warp_scores
from lookahead.kernels.warpers import TEMPERATURE, Histories, Warpers

_TEMPERATURE = tl.constexpr(TEMPERATURE)

# Tokens of a row that are handled at once, and those of it whose sum is remembered.
BLOCK = 4096
SPAN = 128
# Numbers of a row that are few are handled so many at once: tokens of a text, largest scores of blocks,
# sums of spans.
CHUNK = 1024


@triton.jit
def _first_of_largest(
    scores_ptr, tops_ptr, num_blocks, top, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """The lowest id with the largest score."""
    lowest = num_blocks
    for first in tl.range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)  # [CHUNK]
        tops = tl.load(tops_ptr + block, mask=block < num_blocks, other=float("-inf"))
        lowest = tl.minimum(lowest, tl.min(tl.where(tops == top, block, num_blocks), 0))
    token = lowest * BLOCK + tl.arange(0, BLOCK)
    is_largest = tl.load(scores_ptr + token) == top  # [BLOCK]
    return tl.min(tl.where(is_largest, token, (lowest + 1) * BLOCK), 0)


@triton.jit
def _pick(list_ptr, sums_ptr, num_spans, bits, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    """The first place at which the cumulative sum of a list exceeds `bits` 2^-24 of the total."""
    parts = tl.zeros([CHUNK], tl.int64)
    for first in tl.range(0, num_spans, CHUNK):
        span = first + tl.arange(0, CHUNK)  # [CHUNK]
        parts += tl.load(sums_ptr + span, mask=span < num_spans, other=0)
    total = tl.sum(parts, 0)
    # In two parts, for the product of both may take more than 64 bits.
    bound = bits * (total >> 24) + (bits * (total & 0xFFFFFF) >> 24)
    num_passed, passed, running = 0, bound * 0, bound * 0
    for first in tl.range(0, num_spans, CHUNK):
        span = first + tl.arange(0, CHUNK)  # [CHUNK]
        sums = tl.load(sums_ptr + span, mask=span < num_spans, other=0)
        is_passed = (running + tl.cumsum(sums, 0) <= bound) & (span < num_spans)
        num_passed += tl.sum(is_passed.to(tl.int32), 0)
        passed += tl.sum(tl.where(is_passed, sums, 0), 0)
        running += tl.sum(sums, 0)
    first_place = num_passed * SPAN
    weights = tl.load(list_ptr + first_place + tl.arange(0, SPAN))  # [SPAN]
    is_passed = passed + tl.cumsum(whole(weights), 0) <= bound
    return first_place + tl.sum(is_passed.to(tl.int32), 0)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "step_rows", "first_candidate"])
def pick_tokens(
    rows_ptr,  # [n] int64
    chosen_ptr,  # [n] int64
    lengths_ptr,  # [B]
    samples_ptr,  # [B]
    parents_ptr,  # [step_rows] int64
    values_ptr,  # [NUM_VALUES] float32
    seed_ptr,  # [1] int64
    tops_ptr,  # [n, num_blocks] float32
    list_ptr,  # [n, num_blocks * BLOCK] float32, weights; scores if the temperature is 0
    ids_ptr,  # [n, num_blocks * BLOCK] int32, whose weights these are, if there is a cut
    counts_ptr,  # [n] int32, how many weights there are
    sums_ptr,  # [n, num_blocks * BLOCK / SPAN] int64
    picked_ptr,  # [n] int64, written
    possible_ptr,  # [n] int8, written
    vocab_size,
    num_blocks,
    step_rows,
    first_candidate,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row."""
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(rows_ptr + place)
    sequence, row = number // step_rows, number % step_rows
    token = tl.load(chosen_ptr + place)
    is_possible = tl.full([], 1, tl.int1)
    if is_drawn(row, first_candidate):
        tops_ptr += place * num_blocks
        list_ptr += place * num_blocks * BLOCK
        top = largest_of_tops(tops_ptr, num_blocks, CHUNK)
        is_possible = tl.abs(top) < float("inf")
        if is_possible:
            if tl.load(values_ptr + _TEMPERATURE) == 0:
                token = _first_of_largest(list_ptr, tops_ptr, num_blocks, top, BLOCK, CHUNK).to(
                    tl.int64
                )
            else:
                length = tl.load(lengths_ptr + sequence).to(tl.int32)
                position = length + 1 + depth_of(row, parents_ptr)
                sample = tl.load(samples_ptr + sequence).to(tl.int32)
                word, _, _, _ = tl.philox(tl.load(seed_ptr), position, 0, sample, 0)
                num_spans = tl.cdiv(tl.load(counts_ptr + place), BLOCK) * (BLOCK // SPAN)
                sums_ptr += place * num_blocks * (BLOCK // SPAN)
                bits = (word >> 8).to(tl.int64)
                token = _pick(list_ptr, sums_ptr, num_spans, bits, CHUNK, SPAN).to(tl.int64)
                if has_cut(values_ptr, vocab_size):
                    token = tl.load(ids_ptr + place * num_blocks * BLOCK + token).to(tl.int64)
    tl.store(picked_ptr + place, token)
    tl.store(possible_ptr + place, is_possible.to(tl.int8))


def draw_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    histories: Histories,
    warpers: Warpers,
    kept: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw`. Every row is drawn, whether it is reached or not."""
    logits = logits.contiguous()
    check_launch(logits=logits)
    num_rows, vocab_size = logits.shape
    batch, step_rows = histories.tokens.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    room = num_blocks * BLOCK
    numbers = {
        "num_blocks": num_blocks,
        "vocab_size": vocab_size,
        "step_rows": step_rows,
        "first_candidate": histories.first_candidate,
        "BLOCK": BLOCK,
    }
    rows, parents = rows.contiguous(), histories.parents.contiguous()
    lengths, prompt_lengths = histories.lengths.contiguous(), histories.prompt_lengths.contiguous()
    tallies = logits.new_empty((batch, room), dtype=torch.int32)
    count_tokens[(num_blocks, batch)](
        text_ptr=histories.text.contiguous(),
        lengths_ptr=lengths,
        prompt_lengths_ptr=prompt_lengths,
        values_ptr=warpers.values,
        tallies_ptr=tallies,
        text_size=histories.text.shape[1],
        num_blocks=num_blocks,
        BLOCK=BLOCK,
        BLOCK_T=CHUNK,
        num_warps=8,
    )
    scores = logits.new_empty((num_rows, room), dtype=torch.float32)
    tops = logits.new_empty((num_rows, num_blocks), dtype=torch.float32)
    warp_scores[(num_blocks, num_rows)](
        logits_ptr=logits,
        rows_ptr=rows,
        tallies_ptr=tallies,
        lengths_ptr=lengths,
        prompt_lengths_ptr=prompt_lengths,
        eos_ids_ptr=histories.eos_ids.contiguous(),
        tokens_ptr=histories.tokens.contiguous(),
        parents_ptr=parents,
        values_ptr=warpers.values,
        bias_ptr=warpers.bias,
        scores_ptr=scores,
        tops_ptr=tops,
        num_eos_ids=histories.eos_ids.shape[1],
        num_warps=8,
        **numbers,
    )
    ids = logits.new_empty((num_rows, room), dtype=torch.int32)
    counts = logits.new_empty(num_rows, dtype=torch.int32)
    sums = logits.new_empty((num_rows, room // SPAN), dtype=torch.int64)
    keep_weights[(num_rows,)](
        rows_ptr=rows,
        values_ptr=warpers.values,
        tops_ptr=tops,
        list_ptr=scores,
        ids_ptr=ids,
        counts_ptr=counts,
        sums_ptr=sums,
        SPAN=SPAN,
        CHUNK=CHUNK,
        num_warps=16,
        **numbers,
    )
    picked = torch.empty_like(rows)
    possible = torch.empty_like(rows, dtype=torch.bool)
    pick_tokens[(num_rows,)](
        rows_ptr=rows,
        chosen_ptr=chosen.contiguous(),
        lengths_ptr=lengths,
        samples_ptr=histories.samples.contiguous(),
        parents_ptr=parents,
        values_ptr=warpers.values,
        seed_ptr=warpers.seed,
        tops_ptr=tops,
        list_ptr=scores,
        ids_ptr=ids,
        counts_ptr=counts,
        sums_ptr=sums,
        picked_ptr=picked,
        possible_ptr=possible.view(torch.int8),
        SPAN=SPAN,
        CHUNK=CHUNK,
        num_warps=4,
        **numbers,
    )
    return picked, possible
