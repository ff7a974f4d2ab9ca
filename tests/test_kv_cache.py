"""Committing rows, by hand and against a loop over copies."""

import math
import random

import pytest
import torch

from lookahead.kv_cache import KVCache

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def numbered(batch_size, max_length, scratch_rows, dtype=torch.float64):
    """A cache in which every element is its own number."""
    shape = (LAYERS, 2, batch_size, HEADS, max_length + scratch_rows, HEAD_DIM)
    return KVCache(torch.arange(math.prod(shape), dtype=dtype).view(shape), max_length)


def committed_by_copying(cache, rows, counts, lengths):
    """What the cache must hold afterwards, copied one row at a time."""
    expected = cache.data.clone()
    for sequence, count in enumerate(counts):
        for number in range(count):
            source = cache.max_length + rows[sequence][number]
            target = lengths[sequence] + number
            expected[:, :, sequence, :, target] = cache.data[:, :, sequence, :, source]
    return expected


def commit(cache, rows, counts, lengths):
    cache.commit(torch.tensor(rows), torch.tensor(counts), torch.tensor(lengths, dtype=torch.int32))


def test_accepted_rows_follow_the_committed_ones():
    data = torch.zeros(1, 2, 1, 1, 6 + 5, 1)
    data[0, 0, 0, 0, :, 0] = torch.tensor([10, 11, 0, 0, 0, 0, 20, 21, 22, 23, 24])
    data[0, 1] = -data[0, 0]
    cache = KVCache(data, max_length=6)
    assert cache.row_start == 6
    commit(cache, [[0, 3, 4]], [2], [2])
    keys, values = cache.layer(0)
    assert keys.flatten().tolist() == [10, 11, 20, 23, 0, 0, 20, 21, 22, 23, 24]
    assert torch.equal(values, -keys)
    commit(cache, [[0, 1, 2]], [3], [3])  # over what was committed before, too
    assert keys.flatten().tolist() == [10, 11, 20, 20, 21, 22, 20, 21, 22, 23, 24]
    commit(cache, [[4, 3, 2]], [0], [0])
    assert keys.flatten().tolist() == [10, 11, 20, 20, 21, 22, 20, 21, 22, 23, 24]


def test_a_bound_of_lengths_shares_the_memory():
    cache = numbered(2, 6, 5)
    assert cache.longest == 6
    bounded = cache.up_to(4)
    assert (bounded.longest, bounded.max_length, bounded.row_start) == (4, 6, 6)
    assert bounded.data is cache.data
    for longest in (7, -1):
        with pytest.raises(ValueError, match=f"longest: expected 0..6, got {longest}"):
            cache.up_to(longest)


def test_random_commits_against_copying():
    draw = random.Random(0)
    for _ in range(60):
        batch_size, max_length, scratch_rows = draw.randint(1, 3), draw.randint(4, 9), 7
        cache = numbered(batch_size, max_length, scratch_rows)
        depth = draw.randint(1, 4)
        rows = [sorted(draw.sample(range(scratch_rows), depth)) for _ in range(batch_size)]
        counts = [draw.randint(0, depth) for _ in range(batch_size)]
        lengths = [draw.randint(0, max_length - count) for count in counts]
        expected = committed_by_copying(cache, rows, counts, lengths)
        commit(cache, rows, counts, lengths)
        assert torch.equal(cache.data, expected)


def test_a_chunk_of_a_prompt_is_committed_whole():
    cache = numbered(1, 8, 5, torch.bfloat16)
    expected = committed_by_copying(cache, [[0, 1, 2, 3, 4]], [5], [3])
    commit(cache, [[0, 1, 2, 3, 4]], [5], [3])
    assert torch.equal(cache.data, expected)


def test_rows_that_are_not_accepted_are_not_copied():
    cache = numbered(2, 5, 4)
    cache.data[:, :, :, :, 7:] = math.nan  # rows 2 and 3
    commit(cache, [[0, 1, 2], [1, 2, 3]], [2, 1], [0, 4])
    assert not cache.data[:, :, :, :, :7].isnan().any()
    # Positions at the end of the context that only rows not accepted would reach.
    commit(cache, [[0, 1, 2], [0, 2, 3]], [1, 1], [4, 4])
    assert not cache.data[:, :, :, :, :7].isnan().any()


def test_the_cache_of_one_sequence_shares_its_memory():
    cache = numbered(3, 5, 4)
    before = cache.data.clone()
    one = cache.sequence(1)
    assert (one.max_length, one.row_start) == (5, 5)
    assert one.data.shape == (LAYERS, 2, 1, HEADS, 9, HEAD_DIM)
    one.layer(0)[1].fill_(-1)
    commit(one, [[1, 3]], [2], [2])
    before[0, 1, 1] = -1
    before[:, :, 1, :, 2] = before[:, :, 1, :, 6]
    before[:, :, 1, :, 3] = before[:, :, 1, :, 8]
    assert torch.equal(cache.data, before)


def test_a_layer_is_its_keys_and_values():
    cache = numbered(2, 5, 4)
    for index in range(LAYERS):
        keys, values = cache.layer(index)
        assert keys.shape == values.shape == (2, HEADS, 9, HEAD_DIM)
        keys += 1000
        values += 2000
    expected = numbered(2, 5, 4).data
    expected[:, 0] += 1000
    expected[:, 1] += 2000
    assert torch.equal(cache.data, expected)
