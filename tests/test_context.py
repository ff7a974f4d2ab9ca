"""How well candidates fit what stands before their key, by hand and against the text itself."""

import random

import torch

from lookahead.drafting.context import CONTEXT, context_matches, order_by_context
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.step_draft_numba import look_up

CPU = torch.device("cpu")


def pool_of(text, guesses, ngram, vocab_size=9):
    """A pool with the n-grams of the second of two sequences' text."""
    pool = NgramPool(2, vocab_size, guesses, ngram, CPU)
    for start in range(len(text) - ngram + 1):
        gram = text[start : start + ngram]
        keys = torch.tensor([[0], [gram[0]]])
        grams = torch.tensor([[gram[1:]], [gram[1:]]])
        pool.insert(keys, grams, torch.tensor([0]), torch.tensor([[False], [True]]))
    return pool


def look_up_by_context(pool, text, lengths, most=CONTEXT):
    """The compiled function; no sequence is over. Candidates, origins, how well each fits, counts."""
    shape = pool.origins.shape[0], pool.guesses
    found = (
        torch.zeros(*shape, pool.continuation, dtype=torch.int32),
        torch.zeros(shape, dtype=torch.int8),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape[0], dtype=torch.int32),
    )
    candidates, origins, matches, counts = (each.numpy() for each in found)
    look_up(
        text.numpy(), lengths.numpy(), torch.zeros(shape[0], dtype=torch.bool).numpy(),
        pool.entries.numpy(), pool.origins.numpy(), pool.counts.numpy(), most, candidates, origins,
        counts, matches, *torch.zeros((2, pool.guesses), dtype=torch.int64).numpy(),
    )  # fmt: skip
    return found


def test_by_hand():
    #       1 2 3 led to 4 and 5 2 3 to 6; 7 3 to 8
    text = [1, 2, 3, 4, 0, 5, 2, 3, 6, 0, 7, 3, 8, 0, 0]
    pool = pool_of(text, guesses=4, ngram=4)
    candidates = [[8, 0, 0], [6, 0, 7], [4, 0, 5]]
    assert context_matches(pool, 1, [0, 1, 2, 3], candidates) == [0, 1, 2]
    assert context_matches(pool, 1, [5, 2, 3], candidates) == [0, 2, 1]
    assert context_matches(pool, 1, [2, 3], candidates) == [0, 1, 1]
    assert context_matches(pool, 1, [0, 7, 3], candidates) == [2, 0, 0]
    assert context_matches(pool, 1, [3], candidates) == [0, 0, 0]
    assert context_matches(pool, 0, [1, 2, 3], candidates) == [0, 0, 0]
    assert context_matches(pool, 1, [1, 2, 3], []) == []


def test_short_ngrams_know_less():
    text = [1, 2, 3, 4, 0, 1]
    assert context_matches(pool_of(text, 4, ngram=3), 1, [1, 2, 3], [[4, 0]]) == [1]
    assert context_matches(pool_of(text, 4, ngram=2), 1, [1, 2, 3], [[4]]) == [0]


def test_a_pool_that_forgets_nothing_knows_what_the_text_says():
    draw = random.Random(3)
    seen = set()
    for _ in range(50):
        text = [draw.randrange(4) for _ in range(draw.randint(4, 40))]
        ngram = draw.randint(4, 6)
        pool = pool_of(text, guesses=40, ngram=ngram)
        tail = [draw.randrange(4) for _ in range(CONTEXT + 1)]
        candidates = [[draw.randrange(4)] * (ngram - 1) for _ in range(3)]
        starts = range(len(text) - ngram + 1)
        expected = [
            sum(
                any(text[s : s + back + 2] == [*tail[-1 - back :], each[0]] for s in starts)
                for back in range(1, CONTEXT + 1)
            )
            for each in candidates
        ]
        assert context_matches(pool, 1, tail, candidates) == expected
        seen.update(expected)
    assert seen == {0, 1, 2}


def test_the_best_come_first_and_equals_keep_their_order():
    text = [1, 2, 3, 4, 0, 5, 2, 3, 6, 0, 7, 3, 8, 0, 0]
    pool = pool_of(text, guesses=4, ngram=4)
    both = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3]], dtype=torch.int32)
    lengths = torch.tensor([3, 3], dtype=torch.int32)
    keys = torch.tensor([3, 3])
    for candidates, origins, matches in (
        order_by_context(pool, both, lengths, *pool.look_up(keys)),
        look_up_by_context(pool, both, lengths)[:3],
    ):
        assert candidates[1, :3].tolist() == [[4, 0, 5], [6, 0, 7], [8, 0, 0]]
        assert matches[1, :3].tolist() == [2, 1, 0]
        assert origins.shape == (2, 4)


def test_both_implementations_give_the_same_order():
    draw = random.Random(8)
    fits = set()
    for seed in range(60):
        guesses, ngram = draw.randint(1, 5), draw.randint(2, 6)
        pool = NgramPool(3, 4, guesses, ngram, CPU)
        shape, generator = (3, 30), torch.Generator().manual_seed(seed)
        keys = torch.randint(4, shape, generator=generator)
        grams = torch.randint(4, (*shape, ngram - 1), generator=generator)
        is_valid = torch.rand(shape, generator=generator) < 0.9
        pool.insert(keys, grams, torch.arange(30) % 3, is_valid)
        text = torch.randint(4, (3, 12), generator=generator).int()
        lengths = torch.randint(12, (3,), generator=generator).int()
        found = pool.look_up(text.gather(1, lengths.long().unsqueeze(1)).squeeze(1))
        expected = order_by_context(pool, text, lengths, *found)
        *actual, counts = look_up_by_context(pool, text, lengths)
        assert counts.tolist() == found[2].tolist()
        *in_order, matches, _ = look_up_by_context(pool, text, lengths, most=0)
        for sequence, count in enumerate(found[2].tolist()):
            for mine, its in zip(in_order, found, strict=False):
                assert mine[sequence, :count].tolist() == its[sequence, :count].tolist()
            assert not matches.any()
            for mine, its in zip(actual, expected, strict=True):
                assert mine[sequence, :count].tolist() == its[sequence, :count].tolist()
            fits.update(actual[2][sequence, :count].tolist())
    assert fits == {0, 1, 2}
