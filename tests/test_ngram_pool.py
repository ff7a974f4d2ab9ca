"""The pool by hand, and against a dictionary of lists filled one n-gram at a time."""

import copy
import random

import pytest
import torch

from lookahead.drafting.ngram_pool import NgramPool

CPU = torch.device("cpu")


def insert(pool, items):
    """Insert [(key, continuation, origin, valid)], or one such list a sequence, all at once."""
    items = items if isinstance(items[0], list) else [items]
    keys, grams, origins, valid = (
        torch.tensor([[item[field] for item in row] for row in items]) for field in range(4)
    )
    pool.insert(keys, grams, origins, valid.bool())


def contents(pool, sequence=0):
    """{key: [(continuation, origin)]}, most recent first, keys with entries only."""
    found = {}
    for key in range(pool.counts.shape[1]):
        count = int(pool.counts[sequence, key])
        if count:
            grams = pool.entries[sequence, key, :count].tolist()
            origins = pool.origins[sequence, key, :count].tolist()
            found[key] = list(zip(map(tuple, grams), origins, strict=True))
    return found


class PlainPool:
    """The rule with a list: to the front, equal ones leave, the last falls out."""

    def __init__(self, guesses):
        self.guesses = guesses
        self.found = {}

    def insert(self, items):
        for key, gram, origin, valid in items:
            if valid:
                others = [entry for entry in self.found.get(key, []) if entry[0] != gram]
                self.found[key] = [(gram, origin), *others][: self.guesses]


def test_newest_first_and_the_last_falls_out():
    pool = NgramPool(1, 4, 2, 3, CPU)
    assert contents(pool) == {}
    insert(pool, [(1, (2, 3), 0, True)])
    assert contents(pool) == {1: [((2, 3), 0)]}
    insert(pool, [(1, (3, 2), 0, True)])
    assert contents(pool) == {1: [((3, 2), 0), ((2, 3), 0)]}
    insert(pool, [(1, (0, 0), 0, True)])
    assert contents(pool) == {1: [((0, 0), 0), ((3, 2), 0)]}
    insert(pool, [(1, (3, 2), 0, True)])
    assert contents(pool) == {1: [((3, 2), 0), ((0, 0), 0)]}
    insert(pool, [(1, (3, 2), 0, True)])
    assert contents(pool) == {1: [((3, 2), 0), ((0, 0), 0)]}
    insert(pool, [(3, (2, 3), 0, True)])
    assert contents(pool) == {1: [((3, 2), 0), ((0, 0), 0)], 3: [((2, 3), 0)]}


def test_an_empty_slot_is_no_entry():
    # Slots that hold nothing are zeros, and so is this continuation.
    pool = NgramPool(1, 3, 3, 3, CPU)
    insert(pool, [(0, (0, 0), 1, True), (2, (1, 1), 1, True), (2, (0, 0), 1, True)])
    assert contents(pool) == {0: [((0, 0), 1)], 2: [((0, 0), 1), ((1, 1), 1)]}


def test_a_batch_is_one_after_the_other():
    pool = NgramPool(1, 5, 3, 2, CPU)
    insert(pool, [(4, (0,), 0, True), (4, (1,), 0, True), (4, (2,), 0, True)])
    assert contents(pool) == {4: [((2,), 0), ((1,), 0), ((0,), 0)]}
    # (1,) moves to the front, (3,) twice counts once and stands where it came last; (0,) falls out.
    insert(pool, [(4, (3,), 1, True), (4, (1,), 1, True), (4, (3,), 2, True)])
    assert contents(pool) == {4: [((3,), 2), ((1,), 1), ((2,), 0)]}
    # More than there is room for, other keys between them.
    insert(pool, [(4 if token < 4 else 0, (token % 4,), 2, True) for token in range(5)])
    assert contents(pool) == {4: [((3,), 2), ((2,), 2), ((1,), 2)], 0: [((0,), 2)]}


def test_what_is_not_valid_is_not_inserted():
    pool = NgramPool(1, 3, 2, 2, CPU)
    insert(pool, [(1, (0,), 0, False), (1, (2,), 0, True), (1, (1,), 0, False)])
    assert contents(pool) == {1: [((2,), 0)]}
    insert(pool, [(1, (0,), 0, True), (1, (2,), 1, False), (2, (2,), 1, False)])
    assert contents(pool) == {1: [((0,), 0), ((2,), 0)]}


def test_an_origin_is_that_of_the_last_insertion():
    pool = NgramPool(1, 3, 2, 2, CPU)
    insert(pool, [(1, (0,), 0, True), (1, (2,), 0, True)])
    insert(pool, [(1, (0,), 1, True), (1, (0,), 2, False)])
    assert contents(pool) == {1: [((0,), 1), ((2,), 0)]}
    keys, grams = torch.tensor([[1, 1]]), torch.tensor([[[0], [2]]])
    pool.insert(keys, grams, torch.tensor([2, 1]), torch.tensor([[True, True]]))  # [M]
    assert contents(pool) == {1: [((2,), 1), ((0,), 2)]}


def test_looking_up_changes_nothing():
    pool = NgramPool(2, 4, 3, 3, CPU)
    insert(
        pool,
        [
            [(1, (2, 3), 0, True), (1, (3, 3), 2, True), (0, (1, 1), 1, True)],
            [(1, (0, 1), 1, True), (2, (2, 2), 0, True), (2, (2, 2), 0, False)],
        ],
    )
    before = [contents(pool, sequence) for sequence in (0, 1)]
    for dtype in (torch.int32, torch.int64):
        entries, origins, counts = pool.look_up(torch.tensor([1, 2], dtype=dtype))
        assert entries.shape == (2, 3, 2)
        assert origins.shape == (2, 3)
        assert counts.tolist() == [2, 1]
        assert entries[0, :2].tolist() == [[3, 3], [2, 3]]
        assert origins[0, :2].tolist() == [2, 0]
        assert entries[1, :1].tolist() == [[2, 2]]
        assert origins[1, :1].tolist() == [0]
    assert pool.look_up(torch.tensor([3, 1]))[2].tolist() == [0, 1]
    assert [contents(pool, sequence) for sequence in (0, 1)] == before


def test_clearing_forgets_one_sequence():
    pool = NgramPool(2, 3, 2, 2, CPU)
    insert(pool, [[(1, (2,), 0, True), (1, (0,), 0, True)], [(1, (1,), 1, True)] * 2])
    pool.clear(0)
    assert [contents(pool, sequence) for sequence in (0, 1)] == [{}, {1: [((1,), 1)]}]
    # What was there before does not come back, nor does it count as equal.
    insert(pool, [[(1, (2,), 2, True)], [(1, (1,), 1, False)]])
    assert contents(pool, 0) == {1: [((2,), 2)]}


def test_no_slots_and_no_items():
    pool = NgramPool(1, 3, 0, 4, CPU)
    insert(pool, [(1, (0, 1, 2), 0, True)])
    entries, origins, counts = pool.look_up(torch.tensor([1]))
    assert (entries.shape, origins.shape, counts.tolist()) == ((1, 0, 3), (1, 0), [0])
    pool = NgramPool(1, 3, 2, 2, CPU)
    empty = torch.zeros((1, 0), dtype=torch.int64)
    pool.insert(empty, empty.unsqueeze(2), empty[0], empty.bool())
    assert contents(pool) == {}


@pytest.mark.parametrize("guesses", [1, 2, 3, 6])
@pytest.mark.parametrize("num_items", [1, 2, 5, 12])
def test_random_batches_against_a_dictionary(guesses, num_items):
    draw = random.Random(100 * guesses + num_items)
    batch_size, vocab_size, overflowed, moved = 3, 4, False, False
    for ngram in (2, 3, 4):
        pool = NgramPool(batch_size, vocab_size, guesses, ngram, CPU)
        plain = [PlainPool(guesses) for _ in range(batch_size)]
        for _ in range(25):
            items = [
                [
                    (
                        draw.randrange(vocab_size),
                        tuple(draw.randrange(3 if ngram == 2 else 2) for _ in range(ngram - 1)),
                        draw.randrange(3),
                        draw.random() < 0.7,
                    )
                    for _ in range(num_items)
                ]
                for _ in range(batch_size)
            ]
            one_by_one = copy.deepcopy(pool)
            for number in range(num_items):
                insert(one_by_one, [[row[number]] for row in items])
            insert(pool, items)
            for sequence in range(batch_size):
                before = copy.deepcopy(plain[sequence].found)
                plain[sequence].insert(items[sequence])
                assert contents(pool, sequence) == plain[sequence].found
                assert contents(one_by_one, sequence) == plain[sequence].found
                for key, entries in before.items():
                    now = [gram for gram, _ in plain[sequence].found[key]]
                    overflowed |= not {gram for gram, _ in entries} <= set(now)
                    moved |= len(entries) > 1 and entries[-1][0] == now[0]
    assert overflowed or guesses > 3  # there are only so many continuations
    assert moved or guesses == 1
