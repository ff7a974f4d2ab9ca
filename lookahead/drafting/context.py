"""How well a candidate fits what stands before its key, as far as the n-gram pool itself tells.

The pool is addressed by one token. That an n-gram began a token earlier and went on with the key and
the candidate's first token shows in the entries of that earlier token, so nothing more is stored.
Looks at data on the host: for pools on a CPU.
"""

from collections.abc import Sequence

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


def best_first(matches: Sequence[int]) -> list[int]:
    """Numbers of the candidates, those that fit best first, else in their order."""
    return sorted(range(len(matches)), key=lambda number: -matches[number])
