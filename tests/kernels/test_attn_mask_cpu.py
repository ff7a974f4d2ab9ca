"""Attention of a CPU: right numbers, and in canonical order the same bits wherever a row runs.

Hidden keys that are not finite are left to the specification: here they meet a weight of 0.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_cases import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LAYOUTS,
    Case,
    alone,
    check_matrix_errors,
    check_spoiled_query,
    differing_rows,
    make_case,
    same_bits,
)

from lookahead.kernels import fused_attention
from lookahead.kernels.attn_mask_cpu import BLOCK
from lookahead.kernels.attn_mask_sdpa import attend_sdpa
from lookahead.kernels.attn_trial import keeps_bits
from lookahead.layout import LookaheadLayout

LENGTHS = (0, 1, 37, BLOCK - 1, BLOCK, BLOCK + 1, 577)
ALL_DTYPES = (*DTYPES, torch.float64)


def run_canonical(case: Case) -> torch.Tensor:
    return case.run("canonical")


def check_numbers(case: Case, implementation: str) -> None:
    """Partial sums are rounded too, so a row may err by a unit more of the largest of its values."""
    for dtype in DTYPES:
        rounded = within_block(case.to(dtype)) if implementation == "canonical" else case.to(dtype)
        check_matrix_errors(rounded, lambda each: each.run(implementation), units=1.0)


def within_block(case: Case) -> Case:
    """Rows beyond the block of the committed length are dead: their output is undefined."""
    room = [BLOCK - length % BLOCK for length in case.lengths.tolist()]
    layout = case.layout
    dead = [
        min(
            [row for row in range(layout.num_rows) if layout.depths[row] >= most and row >= first],
            default=layout.num_rows,
        )
        for most in room
        for first in [getattr(layout, "num_window_rows", 1)]
    ]
    live = torch.minimum(case.live_rows, torch.tensor(dead, dtype=torch.int32))
    return replace(case, live_rows=live)


@pytest.mark.parametrize("implementation", ["canonical", "sdpa"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_at_every_length(layout, length, implementation):
    number = list(LAYOUTS).index(layout) + LENGTHS.index(length)
    sizes = {"group": GROUPS[number % 4], "head_dim": HEAD_DIMS[number % 5], "num_kv_heads": 2}
    gap = LAYOUTS[layout].num_rows
    check_numbers(
        make_case(LAYOUTS[layout], [length], seed=number, gap=gap, **sizes), implementation
    )


@pytest.mark.parametrize("implementation", ["canonical", "sdpa"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_at_every_head_dim(group, head_dim, implementation):
    case = make_case(LAYOUTS["3,2,2"], [65, 17], group=group, head_dim=head_dim, gap=9)
    check_numbers(case, implementation)


def test_dead_rows_and_batches():
    layout = LAYOUTS["5,4,5"]
    case = make_case(layout, [64, 0, 130], live_rows=[30, 0, 20]).to(torch.bfloat16)
    together = run_canonical(case)
    for sequence in range(3):
        assert same_bits(together[sequence : sequence + 1], run_canonical(case.one(sequence)))
    assert not together[1].any()
    assert not together[2, 20:].any()
    check_spoiled_query(make_case(layout, [70]).to(torch.float32), "canonical")


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("offset", range(0, BLOCK, 3))
def test_a_verified_row_is_the_autoregressive_row_to_the_bit(offset, dtype):
    """Three whole blocks before it, or none; rows beyond the block of the committed length aside."""
    shapes = [(5, 4, 5), (0, 5, 2), (15, 5, 15), (1, 2, 2), (0, 5, 1), (0, 3, 8)]
    layout = LookaheadLayout(*shapes[offset % 6])
    length = offset + (3 * BLOCK if offset % 2 else 0)
    case = make_case(layout, [length], group=(1, 3, 4)[offset % 3], gap=9).to(dtype)
    together = run_canonical(case)
    compared = 0
    for path in layout.candidate_paths:
        for depth, row in enumerate(path[: BLOCK - offset]):
            assert same_bits(together[:, row : row + 1], run_canonical(alone(case, path, depth)))
            compared += 1
    assert compared


def test_a_chunk_before_does_not_decide_how_a_candidate_is_run():
    """Both have the same tree."""
    for layout in (LookaheadLayout(5, 2, 0), LookaheadLayout(0, 5, 1)):
        case = make_case(layout, [300], gap=9).to(torch.bfloat16)
        together = run_canonical(case)
        for path in layout.candidate_paths:
            for depth, row in enumerate(path):
                single = run_canonical(alone(case, path, depth))
                assert same_bits(together[:, row : row + 1], single)


def test_another_order_differs():
    """What the test above could not tell from canonical order would be no test."""
    exact = make_case(LookaheadLayout(5, 4, 5), [3 * BLOCK + 7], gap=40)
    for dtype, other in (
        (torch.bfloat16, "sdpa"),
        (torch.float32, "sdpa"),
        (torch.float32, "torch"),
    ):
        case = exact.to(dtype)
        assert differing_rows(case, run_canonical) == 0
        assert differing_rows(case, lambda each: each.run(other)) > 0  # noqa: B023


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_hidden_keys_and_values_do_not_leak(dtype):
    case = make_case(LAYOUTS["5,4,5"], [300], live_rows=[26], num_kv_heads=1, group=2).to(dtype)
    before = run_canonical(case)
    noise = torch.randn(case.k_cache.shape, generator=torch.Generator().manual_seed(1))
    for row in range(26):
        hidden = torch.ones(case.k_cache.shape[2], dtype=torch.bool)
        hidden[case.seen(0, row)] = False
        caches = [part.clone() for part in (case.k_cache, case.v_cache)]
        for part in caches:
            part[:, :, hidden] = 100 * noise[:, :, hidden].to(dtype)
        after = run_canonical(replace(case, k_cache=caches[0], v_cache=caches[1]))
        assert same_bits(after[0, row], before[0, row]), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_trial_tells_canonical_order_from_another(dtype):
    sizes = (6, 2, 64, dtype, torch.device("cpu"))
    assert keeps_bits("canonical", *sizes)
    assert not keeps_bits("sdpa", *sizes)


@pytest.mark.parametrize("gap", [0, 3, 40])
def test_the_fast_one_keeps_committed_keys_and_the_steps(gap):
    case = make_case(LAYOUTS["5,4,5"], [37], gap=gap).to(torch.float32)
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    attend_sdpa(case.q, *caches, case.lengths, case.layout, case.row_start, case.live_rows)
    for mine, before in zip(caches, (case.k_cache, case.v_cache), strict=True):
        for kept in (slice(0, 37), slice(case.row_start, None)):
            assert same_bits(mine[:, :, kept], before[:, :, kept])


@pytest.mark.parametrize("rows", [1, 2, 5, 30, 33, 70])
@pytest.mark.parametrize("calls", [1, 3])
def test_rows_of_a_library_that_looks_at_their_number(rows, calls, monkeypatch):
    """Its rows come out as in single calls, filled up or cut as they must be, each with its mask."""
    true_fused = fused_attention.fused
    seen = []

    def faulty(q, keys, values, mask):
        seen.append(q.shape[2])
        out, weight = true_fused(q, keys, values, mask)
        fault = 1 + 2**-6 * (q.shape[2] not in (8, 16, 24, 32)) + 2**-6 * (len(q) > 2)
        return out * fault, weight

    monkeypatch.setattr(fused_attention, "fused", faulty)
    monkeypatch.setattr(fused_attention, "_rule", cache(fused_attention._rule.__wrapped__))
    fused_attention._trials.cache_clear()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(calls, 2, rows, 16, generator=generator)
    keys, values = torch.randn(2, calls, 2, 64, 16, generator=generator)
    mask = torch.zeros(1, 1, 128, 64).masked_fill_(
        torch.arange(64) > torch.arange(128)[:, None], -1e9
    )
    out, weight = fused_attention.attend_rows(q, keys, values, mask)
    for call in range(calls):
        for row in (0, rows // 2, rows - 1):
            one = slice(row, row + 1)
            single = fused_attention.attend_rows(
                q[[call], :, one], keys[[call]], values[[call]], mask[:, :, row:]
            )
            assert same_bits(out[[call], :, one], single[0])
            assert same_bits(weight[[call], :, one], single[1])
    fused_attention._trials.cache_clear()
