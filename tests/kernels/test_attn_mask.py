"""Attention against a loop over rows in float64, and against what a row must not depend on."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    POISON,
    check_errors,
    check_spoiled_query,
    make_case,
    same_bits,
)

from lookahead.kernels.attn_mask import IMPLEMENTATIONS, attend
from lookahead.layout import LookaheadLayout, RowTree


@pytest.fixture(params=["torch", "numba"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_at_every_length(layout, length, implementation):
    number = list(LAYOUTS).index(layout) + LENGTHS.index(length)
    sizes = {"group": GROUPS[number % 4], "head_dim": HEAD_DIMS[number % 5], "num_kv_heads": 1}
    check_errors(make_case(LAYOUTS[layout], [length], seed=number, **sizes), implementation)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_at_every_head_dim(group, head_dim, implementation):
    case = make_case(LAYOUTS["3,2,2"], [65, 17], group=group, head_dim=head_dim)
    check_errors(case, implementation)


@pytest.mark.parametrize("layout", ["5,4,5", "0,5,8", "chunk", "tree"])
def test_a_batch_is_its_sequences_one_by_one(layout, implementation):
    tree = LAYOUTS[layout]
    case = make_case(tree, [64, 0, 130], live_rows=[tree.num_rows, 12, 9])
    together = case.run(implementation)
    for sequence in range(3):
        assert same_bits(together[sequence : sequence + 1], case.one(sequence).run(implementation))


def test_dead_rows_change_nothing_and_are_zero(implementation):
    layout = LAYOUTS["5,4,5"]
    whole = make_case(layout, [21, 40])
    alive = whole.run(implementation)
    live = (18, 24)  # the window and one candidate, or three
    case = replace(whole, live_rows=torch.tensor(live))
    for tensor in (case.k_cache, case.v_cache):
        for sequence, count in enumerate(live):
            tensor[sequence, :, case.row_start + count :] = POISON
    for sequence, count in enumerate(live):
        case.q[sequence, count:] = POISON
    out = case.run(implementation)
    for sequence, count in enumerate(live):
        torch.testing.assert_close(out[sequence, :count], alive[sequence, :count])
        assert not out[sequence, count:].any()
    check_errors(case, implementation)


@pytest.mark.parametrize("live_rows", [[0, 0], [0, 15], [30, 0]])
def test_no_live_rows(live_rows, implementation):
    check_errors(make_case(LAYOUTS["5,4,5"], [9, 66], live_rows=live_rows), implementation)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("layout", ["5,4,5", "chunk", "tree"])
def test_hidden_keys_and_values_do_not_leak(layout, dtype, implementation):
    """Everything that a row does not see is changed, for one row after the other."""
    tree = LAYOUTS[layout]
    num_rows = tree.num_rows
    case = make_case(tree, [37, 64], live_rows=[num_rows, num_rows - 3], head_dim=80, group=2)
    case = case.to(dtype)
    before = case.run(implementation)
    generator = torch.Generator().manual_seed(1)
    for sequence, live in enumerate(case.live_rows.tolist()):
        readable = [
            *range(int(case.lengths[sequence])),
            *range(case.row_start, case.row_start + live),
        ]
        for row in range(live):
            hidden = sorted(set(readable) - set(case.seen(sequence, row)))
            caches = []
            for cache in (case.k_cache, case.v_cache):
                noise = torch.randn(cache.shape, generator=generator)
                caches.append(cache.clone())
                caches[-1][sequence][:, hidden] = 1000 * noise[sequence][:, hidden].to(dtype)
            after = replace(case, k_cache=caches[0], v_cache=caches[1]).run(implementation)
            assert same_bits(after[sequence, row], before[sequence, row]), (sequence, row)
            assert same_bits(after[1 - sequence], before[1 - sequence])


@pytest.mark.parametrize("layout", ["5,4,5", "tree"])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(layout, implementation):
    check_spoiled_query(make_case(LAYOUTS[layout], [70]).to(torch.float32), implementation)


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("ngram", [2, 3, 4, 5])
@pytest.mark.parametrize("guesses", [0, 1, 3])
def test_each_row_is_the_list_of_what_it_saw(window, ngram, guesses, implementation):
    """Without scores every visible key weighs the same, and its value names its place."""
    layout = LookaheadLayout(window, ngram, guesses)
    lengths = [0, 1, 70]
    row_start, num_rows, head_dim = 75, layout.num_rows, 128
    cache = torch.full((2, 3, 1, row_start + num_rows, head_dim), POISON)
    for sequence, length in enumerate(lengths):
        places = [*range(length), *range(row_start, row_start + num_rows)]
        cache[0, sequence, :, places] = 0.0
        cache[1, sequence, :, places] = torch.eye(len(places), head_dim)
    out = attend(
        torch.zeros(3, num_rows, 2, head_dim),
        cache[0],
        cache[1],
        torch.tensor(lengths),
        layout,
        row_start=row_start,
        live_rows=torch.full((3,), num_rows),
        implementation=implementation,
    )
    for sequence, length in enumerate(lengths):
        for row in range(num_rows):
            names = [True] * length + list(layout.visibility[row])
            names += [False] * (head_dim - len(names))
            for head in range(2):
                seen = out[sequence, row, head]
                assert (seen > 0).tolist() == names
                torch.testing.assert_close(seen, torch.tensor(names) / sum(names))
            assert sum(names) == length + layout.depths[row] + 1


CACHE = torch.zeros(2, 2, 11, 8)
COUNTS = torch.tensor([4, 4])
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("lengths", torch.tensor([0, 7]), "0..6, got [0, 7]"),
    ("lengths", torch.tensor([-1, 3]), "0..6, got [-1, 3]"),
    ("live_rows", torch.tensor([6, 5]), "0..5, got [6, 5]"),
    ("q", torch.zeros(2, 5, 8), "[B, T, num_q_heads, head_dim], got shape [2, 5, 8]"),
    ("q", torch.ones(2, 5, 6, 8).int(), "a floating-point tensor, got torch.int32"),
    ("q", torch.zeros(2, 5, 5, 8), "a multiple of 2 heads as k_cache has, got 5"),
    ("k_cache", CACHE[0], "[B, num_kv_heads, C, head_dim], got shape [2, 11, 8]"),
    ("k_cache", CACHE[:1], "shape [2, 2, 11, 8], got [1, 2, 11, 8]"),
    ("k_cache", CACHE.to("meta"), "a tensor that holds elements, got shape [2, 2, 11, 8] on meta"),
    ("q", torch.zeros(2, 5, 6, 0), "a tensor that holds elements, got shape [2, 5, 6, 0] on cpu"),
    ("q", [1.0], "a tensor, got list"),
    ("lengths", [0, 4], "a tensor, got list"),
    ("layout", (-1, 0, 1, 2, 3), "a RowTree, got tuple"),
    ("row_start", 6.0, "0..6 for 5 rows in a cache of 11, got 6.0"),
    ("row_start", torch.tensor(6), "0..6 for 5 rows in a cache of 11, got tensor(6)"),
    ("k_cache", CACHE[:, :, :4], "room for 5 rows, got 4"),
    ("implementation", ["torch"], f"one of {sorted(IMPLEMENTATIONS)}, got ['torch']"),
    ("v_cache", CACHE[..., :4], "shape [2, 2, 11, 8], got [2, 2, 11, 4]"),
    ("v_cache", CACHE[:, :, :9], "shape [2, 2, 11, 8], got [2, 2, 9, 8]"),
    ("v_cache", CACHE.half(), "torch.float32, got torch.float16"),
    ("lengths", COUNTS[:1], "shape [2], got [1]"),
    ("lengths", COUNTS.float(), "torch.int32 or torch.int64, got torch.float32"),
    ("layout", RowTree.chain(4), "5 rows as q has, got 4"),
    ("row_start", -1, "0..6 for 5 rows in a cache of 11, got -1"),
    ("row_start", 7, "0..6 for 5 rows in a cache of 11, got 7"),
    ("longest", 7, "0..6, got 7"),
    ("longest", -1, "0..6, got -1"),
    ("longest", 4.0, "0..6, got 4.0"),
    ("live_rows", COUNTS[0], "shape [2], got []"),
    ("implementation", "cuda", f"one of {sorted(IMPLEMENTATIONS)}, got 'cuda'"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_expected_and_got(name, value, expected):
    arguments = {
        "q": torch.zeros(2, 5, 6, 8),
        "k_cache": CACHE,
        "v_cache": CACHE,
        "lengths": COUNTS,
        "layout": RowTree.chain(5),
        "row_start": 6,
        "live_rows": COUNTS,
    }
    assert attend(**arguments).shape == (2, 5, 6, 8)
    assert attend(**arguments, longest=4).shape == (2, 5, 6, 8)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: expected {expected}')}$"):
        attend(**{**arguments, name: value})
