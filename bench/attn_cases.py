"""Calls of `attend` to time: their inputs, their figures, and what a right result is.

Knows one layer's attention and the answer in float64. Times nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lookahead.layout import LookaheadLayout

CPU = torch.device("cpu")
AUTOREGRESSIVE = (0, 2, 0)
SHAPES = (AUTOREGRESSIVE, (5, 4, 5), (7, 5, 7), (15, 5, 15))
# float32 sums of what the expectation sums in float64; values are of size 1.
TOLERANCE = 2e-5
# Queries differ in how sharply they look. A sharp one moves its output by whatever single key it is
# denied or wrongly shown, where an even look at thousands of keys hides the mistake in rounding.
SHARPNESS = (1.0, 2.0, 4.0)
# Cache entries behind the committed keys, and again behind the step's, that no row may look at.
UNSEEN = 64

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Heads:
    """The attention of one layer."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


class WrongResult(Exception):
    """An implementation is not computing attention. Says which, for what, and how far off it is."""


@dataclass(frozen=True)
class Case:
    """One call: a layer's heads, a step's (W, N, G), a committed length, sequences and their dtype."""

    heads: Heads
    shape: tuple[int, int, int]
    length: int
    batch: int = 1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"{self.heads.name}, (W, N, G) = {self.shape}, length {self.length}{batch}"

    @property
    def shape_name(self) -> str:
        return "AR" if self.shape == AUTOREGRESSIVE else str(self.shape)

    @property
    def layout(self) -> LookaheadLayout:
        return LookaheadLayout(*self.shape)

    @property
    def bytes_moved(self) -> int:
        """Queries and output, and each key and value once."""
        heads, num_rows = self.heads, self.layout.num_rows
        elements = 2 * num_rows * heads.num_q_heads
        elements += 2 * (self.length + num_rows) * heads.num_kv_heads
        return self.batch * elements * heads.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Two products of the visible keys only; a multiplication and an addition count as two."""
        layout = self.layout
        visible = layout.num_rows * self.length + sum(map(sum, layout.visibility))
        return self.batch * 4 * visible * self.heads.num_q_heads * self.heads.head_dim

    def to_dict(self) -> dict[str, Any]:
        return {
            "heads": self.heads.name,
            "num_q_heads": self.heads.num_q_heads,
            "num_kv_heads": self.heads.num_kv_heads,
            "head_dim": self.heads.head_dim,
            **dict(zip(("window", "ngram", "guesses"), self.shape, strict=True)),
            "rows": self.layout.num_rows,
            "length": self.length,
            "batch": self.batch,
            "bytes": self.bytes_moved,
            "flops": self.flops,
        }


@dataclass(frozen=True)
class Inputs:
    """What `attend` is given, and the same as torch's attention wants it.

    The cache is NaN wherever no row may look. `keys` and `values` [B, num_kv_heads, L + T, head_dim]
    are gathered from it: committed, then the step's; `mask` [T, L + T] is True where a row sees a key.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    live_rows: torch.Tensor
    row_start: int
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    def one(self, sequence: int) -> "Inputs":
        """One sequence alone."""
        names = ("q", "k_cache", "v_cache", "lengths", "live_rows", "keys", "values")
        return replace(
            self, **{name: getattr(self, name)[sequence : sequence + 1] for name in names}
        )

    def call(
        self, operation: Attend, layout: LookaheadLayout, **options: Any
    ) -> Callable[[], torch.Tensor]:
        """`operation` with everything that it needs."""
        return partial(
            operation,
            self.q,
            self.k_cache,
            self.v_cache,
            self.lengths,
            layout,
            row_start=self.row_start,
            live_rows=self.live_rows,
            **options,
        )


def make_inputs(case: Case, device: torch.device = CPU, seed: int = 0) -> Inputs:
    """Random inputs; all sequences have the same length."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, layout, length, batch = case.heads, case.layout, case.length, case.batch
    num_rows = layout.num_rows
    row_start = length + UNSEEN
    capacity = row_start + num_rows + UNSEEN
    seen = torch.cat([torch.arange(length), row_start + torch.arange(num_rows)]).to(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=case.dtype, device=device)

    def cache() -> torch.Tensor:
        size = (batch, heads.num_kv_heads, capacity, heads.head_dim)
        whole = torch.full(size, float("nan"), dtype=case.dtype, device=device)
        whole[:, :, seen] = draw(batch, heads.num_kv_heads, length + num_rows, heads.head_dim)
        return whole

    def count(value: int) -> torch.Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    k_cache, v_cache = cache(), cache()
    places = torch.arange(num_rows)[:, None] + torch.arange(heads.num_q_heads)
    sharpness = torch.tensor(SHARPNESS, dtype=case.dtype)[places % len(SHARPNESS)].to(device)
    prefix = torch.ones(num_rows, length, dtype=torch.bool)
    return Inputs(
        q=draw(batch, num_rows, heads.num_q_heads, heads.head_dim) * sharpness[..., None],
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=count(length),
        live_rows=count(num_rows),
        row_start=row_start,
        keys=k_cache[:, :, seen],
        values=v_cache[:, :, seen],
        mask=torch.cat([prefix, torch.tensor(layout.visibility)], dim=1).to(device),
    )


def dense_attention(inputs: Inputs, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch's attention with a dense mask -> [B, T, num_q_heads, head_dim]."""
    dtype = dtype or inputs.q.dtype
    out = F.scaled_dot_product_attention(
        inputs.q.to(dtype).transpose(1, 2),
        inputs.keys.to(dtype),
        inputs.values.to(dtype),
        attn_mask=inputs.mask,
        enable_gqa=inputs.q.shape[2] != inputs.keys.shape[1],
    )
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Expected:
    """The result in float64, and how far from it each element may be."""

    values: torch.Tensor
    allowed: torch.Tensor


def expect(inputs: Inputs) -> Expected:
    """The answer for these inputs, one sequence at a time, for in float64 they are large.

    With 16-bit inputs the weights are rounded to 16 bits too, for the matrix unit takes no others, and
    so is the result.
    """
    sequences = [inputs.one(sequence) for sequence in range(len(inputs.q))]
    values = torch.cat([dense_attention(one, torch.float64) for one in sequences])
    allowed = torch.full_like(values, TOLERANCE)
    if inputs.q.itemsize == 2:
        sizes = [replace(one, values=one.values.abs()) for one in sequences]
        weighted = torch.cat([dense_attention(one, torch.float64) for one in sizes])
        epsilon = torch.finfo(inputs.q.dtype).eps
        allowed += epsilon * values.abs() + epsilon / 2 * weighted
    return Expected(values, allowed)


def check(
    name: str, case: Case, got: torch.Tensor, expected: Expected, slack: float = 1.0
) -> float:
    """The largest error of any element; raises WrongResult where one is above `slack` times what is
    allowed, or not a number."""
    if got.shape != expected.values.shape:
        raise WrongResult(
            f"{name} at {case}: expected shape {list(expected.values.shape)}, got {list(got.shape)}"
        )
    error = (got.double() - expected.values).abs()
    if not (error <= slack * expected.allowed).all():
        place = (error / expected.allowed).nan_to_num(nan=torch.inf).argmax()
        worst, allowed = error.flatten()[place].item(), expected.allowed.flatten()[place].item()
        raise WrongResult(
            f"{name} at {case}: off by {worst:.3g} somewhere, expected at most {slack * allowed:.3g}"
        )
    return error.max().item()
