"""Calls of `attend` with the answer of a loop over rows in float64."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lookahead.kernels.attn_mask import attend
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
    the last place for rounding once; dead rows are 0. In bfloat16 Numba's may multiply pairs, and then
    errs as a matrix unit does."""
    for dtype in DTYPES:
        rounded = case.to(dtype)
        rounds_weights = implementation == "numba" and dtype == torch.bfloat16
        out = check_within(rounded, lambda each: each.run(implementation), rounds_weights)
        for sequence, live in enumerate(case.live_rows.tolist()):
            assert not out[sequence, live:].any()


def check_matrix_errors(
    case: Case, attend: Callable[[Case], torch.Tensor], units: float = 0.0
) -> None:
    """As `check_errors`; and in 16 bits the weights of the sum are rounded to 16 bits too, for the
    matrix unit takes no others. `units` more in the last place of a row's largest value may be lost."""
    check_within(case, attend, case.q.dtype != torch.float32, units)


def check_within(
    case: Case, attend: Callable[[Case], torch.Tensor], rounds_weights: bool, units: float = 0.0
) -> torch.Tensor:
    """The check of both, and what was checked."""
    dtype = case.q.dtype
    expected, float32_error = by_rows(case)
    allowed = 2 * float32_error + unit_in_last_place(expected, dtype)
    allowed += units * unit_in_last_place(expected.abs().amax(-1, keepdim=True), dtype)
    if rounds_weights:
        sizes = replace(case, v_cache=case.v_cache.abs()).to(torch.float64)
        allowed += torch.finfo(dtype).eps / 2 * by_rows(sizes)[0]
    out = attend(case)
    worst = ((out.double() - expected).abs() / allowed).max()
    assert worst <= 1, f"{dtype}: {worst:.2f} times the allowed error"
    return out


def alone(case: Case, path: tuple[int, ...], depth: int) -> Case:
    """The autoregressive row that `path[depth]` would be, with the rows before it committed."""
    length, start = int(case.lengths[0]), case.row_start
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    for cache in caches:
        rows = cache[:, :, [start + row for row in path[: depth + 1]]].clone()
        cache[:, :, start:] = float("nan")
        cache[:, :, length : length + depth] = rows[:, :, :depth]
        cache[:, :, start] = rows[:, :, depth]
    return Case(
        case.q[:, path[depth] : path[depth] + 1],
        *caches,
        case.lengths + depth,
        LAYOUTS["autoregressive"],
        start,
        torch.ones_like(case.live_rows),
    )


def differing_rows(case: Case, attend: Callable[[Case], torch.Tensor]) -> int:
    """Emittable rows whose bits differ from those of the row alone."""
    together = attend(case)
    return sum(
        not same_bits(together[:, row : row + 1], attend(alone(case, path, depth)))
        for path in case.layout.candidate_paths
        for depth, row in enumerate(path)
    )


def canonical_case(shape: tuple[int, int, int], length: int, num_kv_heads: int = 1) -> Case:
    case = make_case(LookaheadLayout(*shape), [length], num_kv_heads=num_kv_heads, gap=9)
    return case.to(torch.float16)


def check_spoiled_query(case: Case, implementation: str) -> None:
    """One row's queries become NaN: so does its output, and no other changes."""
    before, num_rows = case.run(implementation), case.layout.num_rows
    for row in (num_rows // 2, 1, num_rows - 1):
        q = case.q.clone()
        q[:, row] = float("nan")
        after = replace(case, q=q).run(implementation)
        others = [other for other in range(num_rows) if other != row]
        assert after[:, row].isnan().all()
        assert same_bits(after[:, others], before[:, others])
