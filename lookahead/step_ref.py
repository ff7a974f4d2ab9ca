"""What a step does beside the forward pass, as tensor operations of a shape that depends on no data.

`judge` says what a step emits, `learn` takes it over, `insert_prompt` fills the pool before the first
step. The specification of `step_settle_numba.py`, `step_draft_numba.py` and `step_triton.py`.
Where the host may look at data, `order_by_context` orders a step's candidates.
"""

from typing import NamedTuple

import torch

from lookahead.decode_state import DecodeState
from lookahead.drafting.context import order_by_context
from lookahead.drafting.ngram_pool import OUTPUT, PROMPT, WINDOW, NgramPool
from lookahead.drafting.window import Window
from lookahead.layout_tensors import LayoutTensors
from lookahead.verify import Verdict, verify

__all__ = ["Judgement", "insert_prompt", "judge", "learn", "order_by_context"]

# Prompt n-grams are inserted this many at a time: one insertion's work grows with the square.
INSERT_ITEMS = 32


class Judgement(NamedTuple):
    """What a step emits.

    Attributes:
        verdict: the winning paths; the first counts[b] of `emitted` are what is emitted.
        counts: [B] int64, cut at the text's end; 0 for a sequence that was finished before.
        finished: [B] bool, after the step.
        finite: [B] bool, whether the logits that were used are finite.
    """

    verdict: Verdict
    counts: torch.Tensor
    finished: torch.Tensor
    finite: torch.Tensor


def judge(
    state: DecodeState,
    numbers: LayoutTensors,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    finite: torch.Tensor,
    live: torch.Tensor,
) -> Judgement:
    """Apply the acceptance rule, and cut behind the first end-of-text id and at the limit.

    Args:
        state: before the step.
        numbers: of the step's layout.
        tokens: [B, T] int32, the rows.
        chosen, finite: [B, K], the model's choice at each row with logits, and whether those were
            finite; undefined at dead rows.
        live: [B] int, candidates; 0 for a finished sequence.
    """
    choices = chosen.new_zeros(tokens.shape)
    choices[:, numbers.logit_rows] = chosen
    verdict = verify(tokens, choices, numbers.paths, live)
    counts, finished = _cut(state, verdict)
    kept = _offsets(verdict) < counts.unsqueeze(1)
    used = finite.gather(1, numbers.logit_places[verdict.rows])
    return Judgement(verdict, counts, finished, (used | ~kept).all(1))


def learn(
    state: DecodeState,
    window: Window,
    pool: NgramPool,
    judgement: Judgement,
    next_tokens: torch.Tensor,
) -> None:
    """Append the emitted tokens to the text, insert n-grams into the pool, first the window's, then the
    text's, and shift the window; `next_tokens` [B, W] follow its last level."""
    verdict, counts = judgement.verdict, judgement.counts
    kept = _offsets(verdict) < counts.unsqueeze(1)
    text_index = state.lengths.unsqueeze(1) + 1 + _offsets(verdict)
    state.tokens.scatter_(1, text_index, verdict.emitted.to(torch.int32))
    if pool.guesses:
        starts = text_index - pool.continuation
        keys, grams = _text_ngrams(state.tokens, starts, pool.continuation)
        valid = kept & (starts >= 0)
        origins = torch.full((keys.shape[1],), OUTPUT, device=keys.device)
        if window.columns:
            window_keys, window_grams, window_valid = window.harvest(next_tokens)
            keys = torch.cat([window_keys, keys], dim=1)
            grams = torch.cat([window_grams, grams], dim=1)
            valid = torch.cat([window_valid & (counts > 0).unsqueeze(1), valid], dim=1)
            origins = torch.cat([origins.new_full((window_keys.shape[1],), WINDOW), origins])
        pool.insert(keys, grams, origins, valid)
    state.lengths += counts.to(torch.int32)
    if window.columns:
        window.shift(next_tokens, state.current)
    state.finished.copy_(judgement.finished)


def insert_prompt(
    state: DecodeState, pool: NgramPool, sequence: int, num_tokens: int, in_pool: int = 0
) -> None:
    """Insert the n-grams of one sequence's text, so far a prompt of `num_tokens`, in order; not those
    that lie within its first `in_pool` tokens."""
    text, pool = state.tokens[sequence : sequence + 1], pool.sequence(sequence)
    num_ngrams = num_tokens - pool.continuation
    for first in range(max(in_pool - pool.continuation, 0), num_ngrams, INSERT_ITEMS):
        starts = torch.arange(first, first + INSERT_ITEMS, device=text.device).unsqueeze(0)
        keys, grams = _text_ngrams(text, starts.clamp(max=num_ngrams - 1), pool.continuation)
        pool.insert(keys, grams, torch.full_like(starts[0], PROMPT), starts < num_ngrams)


def _text_ngrams(
    text: torch.Tensor, starts: torch.Tensor, continuation: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, M] and continuations [B, M, continuation] of a text's n-grams that start at `starts`
    ([B, M] int; those below 0 give something meaningless)."""
    index = starts.unsqueeze(2) + torch.arange(continuation + 1, device=starts.device)
    ngrams = text.gather(1, index.clamp(min=0).flatten(1)).view(index.shape)
    return ngrams[:, :, 0], ngrams[:, :, 1:]


def _offsets(verdict: Verdict) -> torch.Tensor:
    """[D], 0, 1, 2, ..."""
    return torch.arange(verdict.rows.shape[1], device=verdict.rows.device)


def _cut(state: DecodeState, verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of emitted tokens [B] and finished [B]."""
    is_eos = (verdict.emitted.unsqueeze(2) == state.eos_ids.unsqueeze(1)).any(2)
    behind_eos = is_eos.cumsum(1) - is_eos.long() > 0
    room = state.limits - state.lengths - 1
    most = torch.minimum(verdict.counts, room)
    kept = _offsets(verdict) < most.unsqueeze(1)
    kept &= ~behind_eos & ~state.finished.unsqueeze(1)
    counts = kept.sum(1)
    return counts, state.finished | (kept & is_eos).any(1) | (counts >= room)
