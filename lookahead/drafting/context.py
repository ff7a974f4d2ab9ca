"""How well candidates fit what stands before their key, as far as the n-gram pool itself tells.

The pool is addressed by one token. That an n-gram began a token earlier and went on with the key and
the candidate's first token shows in the entries of that earlier token, so nothing more is stored.
Looks at data on the host: for pools on a CPU. The specification of `step_draft_numba.look_up`.
"""

from collections.abc import Sequence

import torch

from lookahead.drafting.ngram_pool import NgramPool

# Tokens before the key that are looked at.
CONTEXT = 2


def context_matches(
    pool: NgramPool, sequence: int, text: Sequence[int], candidates: Sequence[Sequence[int]]
) -> list[int]:
    """For each candidate how many n-grams, begun 1..CONTEXT tokens before the key, lead to its first
    token.

    Args:
        text: the last tokens of the sequence's text, its key at the end.
        candidates: continuations of the key.
    """
    entries, counts = pool.entries[sequence].numpy(), pool.counts[sequence].numpy()
    matches = [0] * len(candidates)
    for back in range(1, min(CONTEXT, len(text) - 1, pool.continuation - 1) + 1):
        begin = text[-1 - back]
        between = list(text[-back:])
        following = {
            gram[back]
            for gram in entries[begin, : counts[begin], : back + 1].tolist()
            if gram[:back] == between
        }
        for number, candidate in enumerate(candidates):
            matches[number] += candidate[0] in following
    return matches


def order_by_context(
    pool: NgramPool,
    text: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    origins: torch.Tensor,
    found: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put candidates that fit their context best first; others stay in their order.

    Args:
        text: [B, M] int32, the key of sequence b at index lengths[b].
        lengths: [B] int.
        candidates, origins, found: as `NgramPool.look_up` gives them.

    Returns:
        candidates and origins in that order, and [B, G] int64 how well each fits, 0..CONTEXT; all of
        them undefined behind those that were found.
    """
    order = torch.arange(candidates.shape[1]).repeat(len(found), 1)
    matches = torch.zeros_like(order)
    for sequence, count in enumerate(found.tolist()):
        length = int(lengths[sequence])
        tail = text[sequence, max(length - CONTEXT, 0) : length + 1].tolist()
        fits = context_matches(pool, sequence, tail, candidates[sequence, :count].tolist())
        best = sorted(range(count), key=[-fit for fit in fits].__getitem__)
        order[sequence, :count] = torch.tensor(best, dtype=torch.int64)
        matches[sequence, :count] = torch.tensor([fits[number] for number in best])
    index = order.unsqueeze(2).expand(candidates.shape)
    return candidates.gather(1, index), origins.gather(1, order), matches
