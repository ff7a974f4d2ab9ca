"""Attention against a loop over rows in float64, and against what a row must not depend on."""

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lookahead.kernels.attn_mask import IMPLEMENTATIONS, attend
from lookahead.layout import LookaheadLayout, RowTree

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LENGTHS = (0, 1, 63, 64, 65, 37, 577)
HEAD_DIMS = (8, 64, 80, 96, 128)
GROUPS = (1, 3, 4, 8)
# What nobody may read is NaN; what a row may read but not see is large.
POISON = float("nan")


def random_tree(seed: int, num_rows: int = 23) -> RowTree:
    draw = random.Random(seed)
    return RowTree([-1, *(draw.randrange(row) for row in range(1, num_rows))])


LAYOUTS = {
    "autoregressive": LookaheadLayout(0, 2, 0),
    "chunk": RowTree.chain(70),
    "5,4,5": LookaheadLayout(5, 4, 5),
    "0,5,8": LookaheadLayout(0, 5, 8),
    "3,2,2": LookaheadLayout(3, 2, 2),
    "tree": random_tree(0),
    "broad tree": random_tree(1, 40),
}


@dataclass(frozen=True)
class Case:
    """The arguments of one call; every cache entry that no row may see is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    layout: RowTree
    row_start: int
    live_rows: torch.Tensor

    def run(self, implementation: str) -> torch.Tensor:
        inputs = (self.q, self.k_cache, self.v_cache)
        before = [tensor.clone() for tensor in inputs]
        out = attend(
            self.q,
            self.k_cache,
            self.v_cache,
            self.lengths,
            self.layout,
            row_start=self.row_start,
            live_rows=self.live_rows,
            implementation=implementation,
        )
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        assert all(map(same_bits, inputs, before))
        return out

    def to(self, dtype: torch.dtype) -> "Case":
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k_cache", "v_cache")}
        return replace(self, **tensors)

    def one(self, sequence: int) -> "Case":
        """The call for one sequence alone."""
        names = ("q", "k_cache", "v_cache", "lengths", "live_rows")
        return replace(
            self, **{name: getattr(self, name)[sequence : sequence + 1] for name in names}
        )

    def seen(self, sequence: int, row: int) -> list[int]:
        """Cache indices that a live row sees: the prefix, then its ancestors and itself."""
        path = [row]
        while self.layout.parents[path[0]] >= 0:
            path.insert(0, self.layout.parents[path[0]])
        prefix = range(int(self.lengths[sequence]))
        return [*prefix, *(self.row_start + ancestor for ancestor in path)]


def make_case(
    layout: RowTree,
    lengths: list[int],
    *,
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    live_rows: list[int] | None = None,
    gap: int = 5,
    seed: int = 0,
) -> Case:
    """Random float64 arguments in the strides that the model has; rows differ in how sharply they
    look."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_rows, row_start = len(lengths), layout.num_rows, max(lengths) + gap
    live_rows = live_rows or [num_rows] * batch
    num_heads = (group + 2) * num_kv_heads
    qkv = torch.empty(batch, num_rows, num_heads, head_dim, dtype=torch.float64)
    qkv.normal_(generator=generator)
    sharpness = torch.tensor([1.0, 4.0, 12.0], dtype=torch.float64)
    qkv *= sharpness[torch.arange(num_rows) % 3].view(-1, 1, 1)
    capacity = row_start + num_rows + 2
    cache = torch.full((2, batch, num_kv_heads, capacity, head_dim), POISON, dtype=torch.float64)
    for sequence, (length, live) in enumerate(zip(lengths, live_rows, strict=True)):
        qkv[sequence, live:] = POISON
        for part in (slice(0, length), slice(row_start, row_start + live)):
            cache[:, sequence, :, part].normal_(generator=generator)
    q = qkv[:, :, : group * num_kv_heads]
    counts = [torch.tensor(values, dtype=torch.int32) for values in (lengths, live_rows)]
    return Case(q, cache[0], cache[1], counts[0], layout, row_start, counts[1])


def by_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as a loop, one row of one head at a time, in float64: the output, 0 at dead rows, and
    how far from it float32 arithmetic may be.

    To first order, an error d of a score moves the output by weight x d x (value - output). A score
    errs by epsilon of its products' magnitudes and of its distance to the largest score, the weighted
    sum by epsilon of its terms' magnitudes, growing as the root of their number.
    """
    out, error = torch.zeros(2, *case.q.shape, dtype=torch.float64)
    num_q_heads, head_dim = case.q.shape[2:]
    group = num_q_heads // case.k_cache.shape[1]
    for sequence, live in enumerate(case.live_rows.tolist()):
        for row in range(live):
            seen = case.seen(sequence, row)
            keys = case.k_cache[sequence][:, seen].double()
            values = case.v_cache[sequence][:, seen].double()
            for head in range(num_q_heads):
                query, value = case.q[sequence, row, head].double(), values[head // group]
                products = keys[head // group] * query / head_dim**0.5
                scores = products.sum(1)
                below = scores.max() - scores
                weights = torch.softmax(scores, dim=0)
                result = weights @ value
                score_error = weights * (products.abs().sum(1) + below + 1)
                out[sequence, row, head] = result
                error[sequence, row, head] = score_error @ (value - result).abs()
                error[sequence, row, head] += (1 + len(seen) ** 0.5) * (weights @ value.abs())
    return out, torch.finfo(torch.float32).eps * error


def unit_in_last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exponents = values.abs().clamp(min=torch.finfo(dtype).tiny).log2().floor()
    return torch.finfo(dtype).eps * exponents.exp2()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    kind = BITS[first.element_size()]
    return torch.equal(first.contiguous().view(kind), second.contiguous().view(kind))


def check_errors(case: Case, implementation: str) -> None:
    """Every element of every dtype is within twice what float32 arithmetic may lose, and one unit in
    the last place for rounding once; dead rows are 0."""
    for dtype in DTYPES:
        rounded = case.to(dtype)
        exact, float32_error = by_rows(rounded)
        error = (rounded.run(implementation).double() - exact).abs()
        worst = (error / (2 * float32_error + unit_in_last_place(exact, dtype))).max()
        assert worst <= 1, f"{dtype}: {worst:.2f} times the allowed error"
        for sequence, live in enumerate(case.live_rows.tolist()):
            assert not error[sequence, live:].any()


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
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


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("layout", ["5,4,5", "tree"])
def test_a_step_row_that_overflowed_is_felt_by_those_who_see_it_alone(
    layout, value, implementation
):
    tree = LAYOUTS[layout]
    case = make_case(tree, [70]).to(torch.float32)
    before = case.run(implementation)
    row = tree.num_rows // 2
    case.v_cache[:, :, case.row_start + row] = value
    after = case.run(implementation)
    for other in range(tree.num_rows):
        if tree.visibility[other][row]:
            assert not after[0, other].isfinite().any()
        else:
            torch.testing.assert_close(after[0, other], before[0, other])


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
    ("q", torch.zeros(2, 5, 8), "[B, T, num_q_heads, head_dim], got shape [2, 5, 8]"),
    ("q", torch.ones(2, 5, 6, 8).int(), "a floating-point tensor, got torch.int32"),
    ("q", torch.zeros(2, 5, 5, 8), "a multiple of 2 heads as k_cache has, got 5"),
    ("k_cache", CACHE[0], "[B, num_kv_heads, C, head_dim], got shape [2, 11, 8]"),
    ("k_cache", CACHE[:1], "shape [2, 2, 11, 8], got [1, 2, 11, 8]"),
    ("k_cache", CACHE.to("meta"), "a tensor on cpu, got one on meta"),
    ("v_cache", CACHE[..., :4], "shape [2, 2, 11, 8], got [2, 2, 11, 4]"),
    ("v_cache", CACHE[:, :, :9], "shape [2, 2, 11, 8], got [2, 2, 9, 8]"),
    ("v_cache", CACHE.half(), "torch.float32, got torch.float16"),
    ("lengths", COUNTS[:1], "shape [2], got [1]"),
    ("lengths", COUNTS.float(), "torch.int32 or torch.int64, got torch.float32"),
    ("layout", RowTree.chain(4), "5 rows as q has, got 4"),
    ("row_start", -1, "0..6 for 5 rows in a cache of 11, got -1"),
    ("row_start", 7, "0..6 for 5 rows in a cache of 11, got 7"),
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
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: expected {expected}')}$"):
        attend(**{**arguments, name: value})
