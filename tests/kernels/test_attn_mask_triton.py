"""The Triton kernel through the interpreter: right numbers, right keys, and canonical order to the bit.

bfloat16 is left to machines with a GPU: the interpreter multiplies it wrongly.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    GROUPS,
    HEAD_DIMS,
    LAYOUTS,
    LENGTHS,
    Case,
    canonical_case,
    check_matrix_errors,
    check_spoiled_query,
    differing_rows,
    make_case,
    random_tree,
    same_bits,
)
from slow import slow_unless

from lookahead.layout import LookaheadLayout, RowTree

pytest.importorskip("triton", reason="Triton is not available for this platform")
from lookahead.kernels import attn_mask_launch
from lookahead.kernels.attn_mask_launch import attend_triton
from lookahead.kernels.attn_mask_ref import attend_ref

DTYPES = (torch.float32, torch.float16)
AUTOREGRESSIVE = LAYOUTS["autoregressive"]


def run(case: Case, longest: int | None = None) -> torch.Tensor:
    return attend_triton(
        case.q,
        case.k_cache,
        case.v_cache,
        case.lengths,
        case.layout,
        case.row_start,
        case.live_rows,
        case.row_start if longest is None else longest,
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_at_every_length(layout, length):
    number = list(LAYOUTS).index(layout) + LENGTHS.index(length)
    sizes = {"group": GROUPS[number % 4], "head_dim": HEAD_DIMS[number % 5], "num_kv_heads": 1}
    exact = make_case(LAYOUTS[layout], [length], seed=number, **sizes)
    for dtype in DTYPES:
        check_matrix_errors(exact.to(dtype), run)


@pytest.mark.parametrize("head_dim", slow_unless((20, 64, 80, 128), [*HEAD_DIMS, 20, 256]))
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_at_every_head_dim(group, head_dim):
    exact = make_case(LAYOUTS["3,2,2"], [65, 17], group=group, head_dim=head_dim)
    for dtype in DTYPES:
        check_matrix_errors(exact.to(dtype), run)


@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_groups_of_keys(length):
    exact = make_case(LAYOUTS["3,2,2"], [length], group=8, num_kv_heads=1, head_dim=128)
    for dtype in DTYPES:
        check_matrix_errors(exact.to(dtype), run)


def mask_case(layout: RowTree, length: int) -> Case:
    """Q = K = 0 and V one-hot by cache index: each output is the even share of what the row saw."""
    row_start = length + 3
    capacity = row_start + layout.num_rows
    zeros = torch.zeros(1, 1, capacity, 128)
    values = torch.zeros(1, 1, capacity, 128)
    values[0, 0, torch.arange(capacity), torch.arange(capacity)] = 1.0
    counts = [torch.tensor([number], dtype=torch.int32) for number in (length, layout.num_rows)]
    q = torch.zeros(1, layout.num_rows, 1, 128)
    return Case(q, zeros, values, counts[0], layout, row_start, counts[1])


@pytest.mark.parametrize(
    "layout",
    [
        *(
            LookaheadLayout(window, ngram, guesses)
            for window in (0, 1, 2, 5)
            for ngram in (2, 3, 4, 5)
            for guesses in (0, 1, 3)
        ),
        RowTree.chain(20),
        *(random_tree(seed, 25) for seed in range(6)),
    ],
)
def test_each_row_is_the_list_of_what_it_saw(layout):
    length = 62  # the rows' own keys lie in two tiles
    out = run(mask_case(layout, length))[0, :, 0] > 0
    saw = [set(row.nonzero().flatten().tolist()) for row in out]
    for row in range(layout.num_rows):
        assert saw[row] == {*range(length), *(length + 3 + step for step in layout.path(row))}


@pytest.mark.usefixtures("sequential_dot")
@pytest.mark.parametrize("shape", [(5, 4, 5), (0, 5, 3), (3, 2, 2), (1, 3, 0)])
def test_a_table_of_the_papers_tree_is_its_closed_form_to_the_bit(shape):
    layout = LookaheadLayout(*shape)
    case = make_case(layout, [577, 63]).to(torch.float16)
    assert same_bits(run(case), run(replace(case, layout=RowTree(layout.parents))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", [LookaheadLayout(3, 3, 2), random_tree(3, 9)], ids=["3,3,2", "tree"]
)
def test_hidden_keys_and_values_do_not_leak(layout, dtype):
    """Everything that a row does not see is changed, for one row after the other."""
    live = layout.num_rows - (2 if isinstance(layout, LookaheadLayout) else 0)
    case = make_case(layout, [62], live_rows=[live], num_kv_heads=1, group=2).to(dtype)
    before = run(case)
    noise = torch.randn(case.k_cache.shape, generator=torch.Generator().manual_seed(1))
    for row in range(live):
        hidden = torch.ones(case.k_cache.shape[2], dtype=torch.bool)
        hidden[case.seen(0, row)] = False
        caches = [cache.clone() for cache in (case.k_cache, case.v_cache)]
        for cache in caches:
            cache[:, :, hidden] = 1000 * noise[:, :, hidden].to(dtype)
        after = run(replace(case, k_cache=caches[0], v_cache=caches[1]))
        assert same_bits(after[0, row], before[0, row]), row


@pytest.mark.parametrize("layout", ["5,4,5", "tree"])
def test_a_batch_is_its_sequences_one_by_one(layout):
    tree = LAYOUTS[layout]
    case = make_case(tree, [64, 0, 130], live_rows=[tree.num_rows, 15, 9]).to(torch.float16)
    together = run(case)
    for sequence in range(3):
        assert same_bits(together[sequence : sequence + 1], run(case.one(sequence)))
    assert together.isfinite().all()
    assert not together[2, 9:].any()


@pytest.mark.parametrize(
    ("layout", "length", "live"),
    [
        ("chunk", 10, 61),
        ("5,4,5", 64, 1),
        ("5,4,5", 64, 17),
        ("5,4,5", 130, 9),
        ("tree", 63, 9),
        ("tree", 5, 0),
    ],
)
def test_dead_rows_are_not_read_even_inside_a_path(layout, length, live):
    """Their queries, keys and values are NaN; each live row's path is live."""
    case = make_case(LAYOUTS[layout], [length], live_rows=[live], num_kv_heads=1)
    for dtype in DTYPES:
        check_matrix_errors(case.to(dtype), run)


@pytest.mark.parametrize(
    ("layout", "group", "length"),
    [
        (LookaheadLayout(0, 10, 2), 8, 5),  # a candidate's rows take two tiles of rows
        (RowTree([row - 1 for row in range(12)]), 8, 60),  # ... a path of the table's too
        (LookaheadLayout(2, 10, 0), 8, 5),  # ... a column's too
        (RowTree([-1, 0, 0]), 1, 63),  # the last row's key is the first of the next tile
        (LookaheadLayout(0, 2, 3), 1, 63),
    ],
)
def test_paths_longer_than_a_tile(layout, group, length):
    case = make_case(layout, [length], group=group, num_kv_heads=1)
    check_matrix_errors(case.to(torch.float16), run)


@pytest.mark.parametrize("layout", ["5,4,5", "tree"])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(layout):
    check_spoiled_query(
        make_case(LAYOUTS[layout], [62], num_kv_heads=1).to(torch.float16), "triton"
    )


@pytest.mark.parametrize("layout", ["autoregressive", "5,4,5", "tree"])
@pytest.mark.parametrize("lengths", [[0, 0], [512, 37], [513, 1100]], ids=str)
def test_what_bounds_the_lengths_changes_no_bit(layout, lengths, monkeypatch):
    """Fewer groups of keys are launched, whether the bound is a length itself, the next bucket or the
    whole cache; partials hold NaN where nobody wrote."""
    grids = []

    def planned(*arguments, plan=attn_mask_launch.plan):
        the_plan = plan(*arguments)
        grids.append(the_plan.grid[0])
        return the_plan

    monkeypatch.setattr(attn_mask_launch, "plan", planned)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: empty(*size, **options).fill_(math.nan)
    )
    case = make_case(LAYOUTS[layout], lengths, num_kv_heads=1, gap=1200).to(torch.float16)
    expected = run(case)
    bounds = (max(lengths), -(-max(lengths) // 512) * 512, max(lengths) + 1)
    for longest in bounds:
        assert same_bits(run(case, longest), expected)
    assert grids[0] > grids[1], "the bound is used"


def test_heads_that_lie_beyond_what_32_bits_count():
    """The third head begins 2^31 elements behind the first. Only the pages that are used exist."""
    layout, capacity = LAYOUTS["3,2,2"], 2**24
    small = make_case(layout, [70], group=1, num_kv_heads=3).to(torch.float16)
    cache = torch.empty(1, 3, capacity, 64, dtype=torch.float16)
    cache[:, :, : small.k_cache.shape[2]] = small.k_cache
    values_too = replace(small, v_cache=small.k_cache)
    assert same_bits(run(replace(small, k_cache=cache, v_cache=cache)), run(values_too))


def test_counters_may_be_parts_of_larger_tensors():
    case = make_case(LAYOUTS["5,4,5"], [64, 3], live_rows=[30, 18], num_kv_heads=1)
    case = case.to(torch.float32)
    spread = torch.stack([case.lengths, case.live_rows], 1)
    strided = replace(case, lengths=spread[:, 0], live_rows=spread[:, 1])
    assert same_bits(run(strided), run(case))


def test_what_workspace_and_output_held_does_not_matter(monkeypatch):
    case = make_case(LAYOUTS["5,4,5"], [600, 3], live_rows=[30, 18]).to(torch.float16)
    expected = run(case)

    def poisoned(*size, **options):
        return torch.full(size[0] if len(size) == 1 else size, float("nan"), **options)

    monkeypatch.setattr(attn_mask_launch.torch, "empty", poisoned)
    monkeypatch.setattr(attn_mask_launch.torch, "empty_like", lambda x: x * float("nan"))
    assert same_bits(run(case), expected)


@pytest.fixture
def sequential_dot(monkeypatch):
    """The interpreter's product in sequential order of the reduction, as the host's library may
    choose another order by shape."""
    import numpy
    from triton.runtime import interpreter

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (handle.data.astype(numpy.float32) for handle in (a, b))
        total = d.data.astype(numpy.float32).copy()
        for inner in range(x.shape[1]):
            total = total + x[:, inner : inner + 1] * y[inner : inner + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("sequential_dot")
@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((3, 4, 2), 1086),  # three groups of keys; the path crosses into the next tile
        ((0, 5, 2), 1021),  # ... and into the next group
        ((2, 3, 1), 62),
        ((0, 4, 1), 0),
    ],
)
def test_a_verified_row_is_the_autoregressive_row_to_the_bit(shape, length):
    assert differing_rows(canonical_case(shape, length), run) == 0


@pytest.mark.usefixtures("sequential_dot")
@pytest.mark.parametrize("offset", slow_unless((*range(0, 60, 5), 63), range(64)))
def test_at_every_offset_of_a_tile(offset):
    shapes = [(2, 3, 1), (0, 4, 1), (1, 2, 2), (3, 3, 1)]
    assert differing_rows(canonical_case(shapes[offset % 4], 1024 + offset), run) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("sequential_dot")
@pytest.mark.parametrize("offset", range(64))
def test_larger_steps_at_every_offset_of_a_tile(offset):
    shapes = [(5, 4, 3), (0, 5, 2), (15, 5, 1), (1, 2, 2)]
    case = canonical_case(shapes[offset % 4], 1024 + offset, num_kv_heads=2)
    assert differing_rows(case, run) == 0


@pytest.mark.usefixtures("sequential_dot")
def test_an_ordinary_order_of_keys_differs():
    """The test above can fail: prefix, then local keys, as attention is usually computed."""

    def ordinary(case: Case) -> torch.Tensor:
        arguments = (case.q.float(), case.k_cache.float(), case.v_cache.float())
        numbers = (case.lengths, case.layout, case.row_start, case.live_rows, case.row_start)
        return attend_ref(*arguments, *numbers)

    assert differing_rows(canonical_case((3, 4, 2), 1086), ordinary) > 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"q": torch.zeros(1, 1, 3, 64, dtype=torch.float64)}, "got torch.float64"),
        ({"k_cache": torch.zeros(1, 1, 64, 10, dtype=torch.float16).mT}, "contiguous"),
        ({"q": torch.zeros(1, 1, 3, 64, requires_grad=True)}, "no gradient"),
        ({"v_cache": torch.zeros(641, dtype=torch.float16)[1:].view(1, 1, 10, 64)}, "16 bytes"),
    ],
)
def test_memory_that_the_kernel_cannot_read_is_refused(change, expected):
    case = make_case(AUTOREGRESSIVE, [5], num_kv_heads=1, gap=2).to(torch.float16)
    with pytest.raises(ValueError, match=expected):
        run(replace(case, **change))


def test_bfloat16_is_refused_in_the_interpreter():
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
    with pytest.raises(ValueError, match="bfloat16, which its interpreter computes wrongly"):
        run(make_case(AUTOREGRESSIVE, [5]).to(torch.bfloat16))


def test_without_the_interpreter_a_cpu_is_refused():
    """By an operation, and by the engine before it reads any weights."""
    program = """
import torch
from lookahead import Engine, InputError
from lookahead.kernels.silu_mul import silu_mul
for call in (
    lambda: silu_mul(torch.ones(1, 2), "triton"),
    lambda: Engine.load(".", device="cpu", dtype="float32", implementation="triton"),
):
    try:
        call()
    except (ValueError, InputError) as error:
        print(type(error).__name__, error)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    reason = "implementation: expected torch on a CPU, got triton, which runs there only in its"
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ValueError", "InputError"]
    assert all(reason in line for line in lines)
