"""What a step does beside the forward pass, on a GPU: the same as `step_ref.py`'s tensor operations.

Three launches stand in for a hundred small ones: the verdict of each sequence, its n-grams into the
pool, its text and window one step on. `step_ref.py` is the specification; tests compare the two after
every step. Knows nothing of the forward pass and of no dtype of logits.
"""

import torch
import triton
import triton.language as tl

from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import OUTPUT, PROMPT, WINDOW, NgramPool
from lookahead.drafting.ngram_pool_triton import insert_ngrams
from lookahead.drafting.window import Window
from lookahead.layout_tensors import LayoutTensors
from lookahead.step_ref import INSERT_ITEMS, Judgement
from lookahead.verify import Verdict


@triton.jit(do_not_specialize=["num_rows", "num_choices", "num_paths", "path_rows", "num_eos_ids"])
def judge_sequences(
    tokens_ptr,  # [B, num_rows] int32
    chosen_ptr,  # [B, num_choices] int64
    finite_ptr,  # [B, num_choices] int8
    places_ptr,  # [num_rows] int64
    paths_ptr,  # [num_paths, path_rows] int64
    live_ptr,  # [B] int32
    lengths_ptr,  # [B] int32
    limits_ptr,  # [B] int32
    finished_ptr,  # [B] int8
    eos_ids_ptr,  # [B, num_eos_ids] int64
    rows_ptr,  # [B, path_rows] int64, written; so are all below
    emitted_ptr,  # [B, path_rows] int64
    counts_ptr,  # [B] int64
    winners_ptr,  # [B] int64
    ends_ptr,  # [B] int8
    are_finite_ptr,  # [B] int8
    num_rows,
    num_choices,
    num_paths,
    path_rows,
    num_eos_ids,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One sequence: all paths are walked at once, a depth at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    tokens_ptr += sequence * num_rows
    chosen_ptr += sequence * num_choices
    path = tl.arange(0, BLOCK_P)  # [P]
    is_path = path < num_paths
    live = tl.load(live_ptr + sequence).to(tl.int32)
    is_right = is_path & (path < live)
    accepted = tl.zeros([BLOCK_P], tl.int32)
    row = tl.load(paths_ptr + path * path_rows, mask=is_path, other=0)
    for depth in tl.range(1, path_rows):
        choice = tl.load(chosen_ptr + tl.load(places_ptr + row))
        row = tl.load(paths_ptr + path * path_rows + depth, mask=is_path, other=0)
        is_right = is_right & (tl.load(tokens_ptr + row).to(tl.int64) == choice)
        accepted += is_right.to(tl.int32)
    deepest = tl.max(accepted, 0)
    winner = tl.min(tl.where(accepted == deepest, path, BLOCK_P), 0)  # the lowest of them

    offset = tl.arange(0, BLOCK_D)  # [D]
    on_path = offset < path_rows
    rows = tl.load(paths_ptr + winner * path_rows + offset, mask=on_path, other=0)
    place = tl.load(places_ptr + rows)
    emitted = tl.load(chosen_ptr + place)
    end = tl.arange(0, BLOCK_E)  # [E]
    eos_ids = tl.load(eos_ids_ptr + sequence * num_eos_ids + end, mask=end < num_eos_ids, other=-1)
    # Chosen tokens are never negative, as what fills up the ids is.
    is_eos = tl.max((emitted[:, None] == eos_ids[None, :]).to(tl.int32), 1) > 0
    first_eos = tl.min(tl.where(is_eos & on_path, offset, BLOCK_D), 0)
    is_finished = tl.load(finished_ptr + sequence) != 0
    room = tl.load(limits_ptr + sequence) - tl.load(lengths_ptr + sequence) - 1
    kept = (offset < tl.minimum(deepest + 1, room)) & (offset <= first_eos) & ~is_finished
    count = tl.sum(kept.to(tl.int32), 0)
    is_over = is_finished | (first_eos < count) | (count >= room)
    is_finite = tl.load(finite_ptr + sequence * num_choices + place) != 0
    all_finite = tl.min((is_finite | ~kept).to(tl.int32), 0)
    tl.store(rows_ptr + sequence * path_rows + offset, rows, mask=on_path)
    tl.store(emitted_ptr + sequence * path_rows + offset, emitted, mask=on_path)
    tl.store(counts_ptr + sequence, count.to(tl.int64))
    tl.store(winners_ptr + sequence, winner.to(tl.int64))
    tl.store(ends_ptr + sequence, is_over.to(tl.int8))
    tl.store(are_finite_ptr + sequence, all_finite.to(tl.int8))


def judge(
    state: DecodeState,
    numbers: LayoutTensors,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    finite: torch.Tensor,
    live: torch.Tensor,
) -> Judgement:
    """See `step_ref.judge`; `verdict.counts` are those that are emitted."""
    num_paths, path_rows = numbers.paths.shape
    batch, num_rows = tokens.shape
    num_eos_ids = state.eos_ids.shape[1]
    rows, emitted = chosen.new_empty((2, batch, path_rows))
    counts, winners = chosen.new_empty((2, batch))
    ends, are_finite = finite.new_empty((2, batch))
    judge_sequences[(batch,)](
        tokens_ptr=tokens.contiguous(),
        chosen_ptr=chosen.contiguous(),
        finite_ptr=finite.contiguous().view(torch.int8),
        places_ptr=numbers.logit_places,
        paths_ptr=numbers.paths,
        live_ptr=live,
        lengths_ptr=state.lengths,
        limits_ptr=state.limits,
        finished_ptr=state.finished.view(torch.int8),
        eos_ids_ptr=state.eos_ids,
        rows_ptr=rows,
        emitted_ptr=emitted,
        counts_ptr=counts,
        winners_ptr=winners,
        ends_ptr=ends.view(torch.int8),
        are_finite_ptr=are_finite.view(torch.int8),
        num_rows=num_rows,
        num_choices=chosen.shape[1],
        num_paths=num_paths,
        path_rows=path_rows,
        num_eos_ids=num_eos_ids,
        BLOCK_P=triton.next_power_of_2(num_paths),
        BLOCK_D=triton.next_power_of_2(path_rows),
        BLOCK_E=triton.next_power_of_2(max(1, num_eos_ids)),
        num_warps=1,
    )
    return Judgement(Verdict(rows, emitted, counts, winners), counts, ends, are_finite)


@triton.jit(do_not_specialize=["text_size", "path_rows", "columns", "levels"])
def advance_sequences(
    text_ptr,  # [B, text_size] int32, changed
    lengths_ptr,  # [B] int32, changed
    finished_ptr,  # [B] int8, changed
    emitted_ptr,  # [B, path_rows] int64
    counts_ptr,  # [B] int64
    ends_ptr,  # [B] int8
    next_ptr,  # [B, columns] int64
    window_ptr,  # [B, levels, columns] int32, changed
    steps_ptr,  # [B] int32, changed
    text_size,
    path_rows,
    columns,
    levels,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One sequence: append what was emitted and shift the window; a sequence that was finished before
    stays as it is."""
    sequence = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    length = tl.load(lengths_ptr + sequence)
    step = tl.load(steps_ptr + sequence)
    offset = tl.arange(0, BLOCK_D)  # [D]
    is_kept = offset < count
    emitted = tl.load(emitted_ptr + sequence * path_rows + offset, mask=is_kept, other=0)
    emitted = emitted.to(tl.int32)
    current = tl.sum(tl.where(offset == count - 1, emitted, 0), 0)
    level = tl.arange(0, BLOCK_L)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    moves = (level < levels) & (column < columns) & (count > 0)
    is_last = level == levels - 1
    window_ptr += sequence * levels * columns
    above = tl.load(window_ptr + (level + 1) * columns + column, mask=moves & ~is_last, other=0)
    new = tl.load(next_ptr + sequence * columns + column, mask=moves & is_last, other=0)
    shifted = tl.where(is_last, new.to(tl.int32), above)  # [L, W]
    shifted = tl.where((level == 0) & (column == 0), current, shifted)
    tl.debug_barrier()  # all is read before any is written
    tl.store(text_ptr + sequence * text_size + length + 1 + offset, emitted, mask=is_kept)
    tl.store(window_ptr + level * columns + column, shifted, mask=moves)
    tl.store(lengths_ptr + sequence, length + count)
    tl.store(steps_ptr + sequence, step + 1, mask=(count > 0) & (columns > 0))
    tl.store(finished_ptr + sequence, tl.load(ends_ptr + sequence))


def learn(
    state: DecodeState,
    window: Window,
    pool: NgramPool,
    judgement: Judgement,
    next_tokens: torch.Tensor,
) -> None:
    """See `step_ref.learn`; nothing moves in a sequence that was finished before."""
    batch, path_rows = judgement.verdict.emitted.shape
    next_tokens = next_tokens.contiguous()
    if pool.guesses:
        num_items = window.columns + path_rows
        insert_ngrams[(num_items, batch)](
            text_ptr=state.tokens,
            lengths_ptr=state.lengths,
            emitted_ptr=judgement.verdict.emitted,
            counts_ptr=judgement.counts,
            next_ptr=next_tokens,
            window_ptr=window.tokens,
            steps_ptr=window.steps,
            first_sequence=0,
            path_rows=path_rows,
            columns=window.columns,
            num_items=num_items,
            prompt_first=0,
            prompt_behind=0,
            IS_PROMPT=False,
            TEXT_ORIGIN=OUTPUT,
            BLOCK_M=triton.next_power_of_2(num_items),
            **_pool_arguments(state, pool),
        )
    advance_sequences[(batch,)](
        text_ptr=state.tokens,
        lengths_ptr=state.lengths,
        finished_ptr=state.finished.view(torch.int8),
        emitted_ptr=judgement.verdict.emitted,
        counts_ptr=judgement.counts,
        ends_ptr=judgement.finished.view(torch.int8),
        next_ptr=next_tokens,
        window_ptr=window.tokens,
        steps_ptr=window.steps,
        text_size=state.tokens.shape[1],
        path_rows=path_rows,
        columns=window.columns,
        levels=window.levels,
        BLOCK_D=triton.next_power_of_2(path_rows),
        BLOCK_L=triton.next_power_of_2(window.levels),
        BLOCK_W=triton.next_power_of_2(max(1, window.columns)),
        num_warps=1,
    )


def insert_prompt(
    state: DecodeState, pool: NgramPool, sequence: int, num_tokens: int, in_pool: int = 0
) -> None:
    """See `step_ref.insert_prompt`."""
    num_ngrams = num_tokens - pool.continuation
    for first in range(max(in_pool - pool.continuation, 0), num_ngrams, INSERT_ITEMS):
        insert_ngrams[(INSERT_ITEMS, 1)](
            text_ptr=state.tokens,
            lengths_ptr=state.lengths,
            emitted_ptr=None,
            counts_ptr=None,
            next_ptr=None,
            window_ptr=None,
            steps_ptr=None,
            first_sequence=sequence,
            path_rows=0,
            columns=0,
            num_items=INSERT_ITEMS,
            prompt_first=first,
            prompt_behind=num_ngrams,
            IS_PROMPT=True,
            TEXT_ORIGIN=PROMPT,
            BLOCK_M=INSERT_ITEMS,
            **_pool_arguments(state, pool),
        )


def _pool_arguments(state: DecodeState, pool: NgramPool) -> dict[str, object]:
    """What every insertion is given of pool and text."""
    return {
        "entries_ptr": pool.entries,
        "origins_ptr": pool.origins,
        "filled_ptr": pool.counts,
        "text_size": state.tokens.shape[1],
        "levels": pool.continuation,
        "guesses": pool.guesses,
        "vocab_size": pool.counts.shape[1],
        "WINDOW_ORIGIN": WINDOW,
        "BLOCK_E": triton.next_power_of_2(pool.continuation + 1),
        "BLOCK_G": triton.next_power_of_2(pool.guesses),
        # One warp: a barrier among more would cost more than their work saves.
        "num_warps": 1,
    }
