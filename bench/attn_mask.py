"""Time `attend` beside torch's own attention with a dense mask, each result checked first.

Runs the torch reference on the CPU, at shapes scaled down from a model's. A result that is wrong is
never timed. Progress goes to standard error, a table and a last line of JSON to standard output. Exit
codes: 0; 1 when a result is wrong; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from tqdm import tqdm

from lookahead.errors import InputError
from lookahead.kernels.attn_mask import attend
from lookahead.layout import LookaheadLayout

CPU = torch.device("cpu")
DTYPE = torch.float32
DEFAULT_LENGTHS = "128,512,2048"
AUTOREGRESSIVE = (0, 2, 0)
SHAPES = (AUTOREGRESSIVE, (5, 4, 5), (7, 5, 7), (15, 5, 15))
# Both sum in float32 what the expectation sums in float64; values are of size 1.
TOLERANCE = 1e-5
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


MODELS = (Heads("MHA 8", 8, 8, 64), Heads("GQA 8:2", 8, 2, 64))


class WrongResult(Exception):
    """An implementation is not computing attention. Says which, for what, and how far off it is."""


@dataclass(frozen=True)
class Case:
    """One call: a layer's heads, a step's (W, N, G) and a committed length."""

    heads: Heads
    shape: tuple[int, int, int]
    length: int

    def __str__(self) -> str:
        return f"{self.heads.name}, (W, N, G) = {self.shape}, length {self.length}"

    @property
    def layout(self) -> LookaheadLayout:
        return LookaheadLayout(*self.shape)

    @property
    def bytes_moved(self) -> int:
        """Queries and output, and each key and value once."""
        heads, num_rows = self.heads, self.layout.num_rows
        elements = 2 * num_rows * heads.num_q_heads
        elements += 2 * (self.length + num_rows) * heads.num_kv_heads
        return elements * heads.head_dim * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Two products of the visible keys only; a multiplication and an addition count as two."""
        layout = self.layout
        visible = layout.num_rows * self.length + sum(map(sum, layout.visibility))
        return 4 * visible * self.heads.num_q_heads * self.heads.head_dim


@dataclass(frozen=True)
class Inputs:
    """What `attend` is given, and the same as torch's attention wants it.

    The cache is NaN wherever no row may look. `keys` and `values` are gathered from it: committed, then
    the step's; `mask` [T, L + T] is True where a row sees a key.
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


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs of batch 1."""
    generator = torch.Generator().manual_seed(seed)
    heads, layout, length = case.heads, case.layout, case.length
    num_rows = layout.num_rows
    row_start = length + UNSEEN
    capacity = row_start + num_rows + UNSEEN
    seen = torch.cat([torch.arange(length), row_start + torch.arange(num_rows)])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE)

    def cache() -> torch.Tensor:
        whole = torch.full((1, heads.num_kv_heads, capacity, heads.head_dim), float("nan"))
        whole[:, :, seen] = draw(1, heads.num_kv_heads, length + num_rows, heads.head_dim)
        return whole

    k_cache, v_cache = cache(), cache()
    prefix = torch.ones(num_rows, length, dtype=torch.bool)
    return Inputs(
        q=draw(1, num_rows, heads.num_q_heads, heads.head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=torch.tensor([length], dtype=torch.int32),
        live_rows=torch.tensor([num_rows], dtype=torch.int32),
        row_start=row_start,
        keys=k_cache[:, :, seen],
        values=v_cache[:, :, seen],
        mask=torch.cat([prefix, torch.tensor(layout.visibility)], dim=1),
    )


def dense_attention(inputs: Inputs, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """torch's attention with a dense mask -> [1, T, num_q_heads, head_dim]."""
    out = F.scaled_dot_product_attention(
        inputs.q.to(dtype).transpose(1, 2),
        inputs.keys.to(dtype),
        inputs.values.to(dtype),
        attn_mask=inputs.mask,
        enable_gqa=inputs.q.shape[2] != inputs.keys.shape[1],
    )
    return out.transpose(1, 2)


def check(name: str, case: Case, got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of any element; raises WrongResult where it is too large or not a number."""
    if got.shape != expected.shape:
        raise WrongResult(
            f"{name} at {case}: expected shape {list(expected.shape)}, got {list(got.shape)}"
        )
    error = (got.double() - expected).abs().max().item()
    if not error <= TOLERANCE:
        raise WrongResult(
            f"{name} at {case}: off by {error:.3g} somewhere, expected at most {TOLERANCE:g}"
        )
    return error


def measure(case: Case, repeats: int, operation: Attend) -> dict[str, Any]:
    """Check both implementations, then time them in turn; the first turn of each is not counted."""
    inputs = make_inputs(case)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "attend": partial(
            operation,
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.lengths,
            case.layout,
            row_start=inputs.row_start,
            live_rows=inputs.live_rows,
        ),
        "dense": partial(dense_attention, inputs),
    }
    expected = dense_attention(inputs, torch.float64)
    errors = {name: check(name, case, call(), expected) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timing.time_call(call, CPU)[1])
    milliseconds = {
        name: timing.spread([1000 * value for value in values]) for name, values in seconds.items()
    }
    return {
        "heads": case.heads.name,
        "num_q_heads": case.heads.num_q_heads,
        "num_kv_heads": case.heads.num_kv_heads,
        "head_dim": case.heads.head_dim,
        **dict(zip(("window", "ngram", "guesses"), case.shape, strict=True)),
        "rows": case.layout.num_rows,
        "length": case.length,
        "bytes": case.bytes_moved,
        "flops": case.flops,
        "attend_ms": milliseconds["attend"].to_dict(),
        "dense_ms": milliseconds["dense"].to_dict(),
        "ratio": milliseconds["dense"].median / milliseconds["attend"].median,
        "max_error": errors["attend"],
    }


def cases(lengths: Sequence[int]) -> Iterator[Case]:
    for heads in MODELS:
        for shape in SHAPES:
            for length in lengths:
                yield Case(heads, shape, length)


def parse_lengths(text: str) -> list[int]:
    """ "128,512" -> numbers; raises InputError for anything else."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise InputError(f'--lengths: expected numbers like "{DEFAULT_LENGTHS}", got {text!r}')
    return [int(number) for number in numbers]


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/attn_mask.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--lengths", default=DEFAULT_LENGTHS, help="committed lengths, default %(default)s")
    add("--repeats", type=timing.count, default=10, metavar="COUNT", help="default %(default)s")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None, operation: Attend = attend) -> int:
    """Run the benchmark on an implementation of `attend`; returns the exit code."""
    return timing.run_main(build_parser(), partial(_run, operation), arguments)


def _run(operation: Attend, options: argparse.Namespace) -> int:
    lengths = parse_lengths(options.lengths)
    timing.check_writable(options.json_out)
    print(f"nothing was timed on a GPU: {_reason()}; these are torch on the CPU", flush=True)
    rows = []
    try:
        # disable=None: a bar on a terminal, nothing elsewhere
        for case in tqdm(list(cases(lengths)), unit="case", leave=False, disable=None):
            rows.append(measure(case, options.repeats, operation))
    except WrongResult as wrong:
        print(f"refused: {wrong}; no time is reported", file=sys.stderr)
        return 1
    print(
        f"\n{_table(rows)}\n\nratio: time of dense over time of attend, above 1 attend is faster;"
    )
    print("dense: scaled_dot_product_attention, its mask and its gathered keys made beforehand\n")
    record = {"benchmark": "attn_mask", "timed_on_gpu": False, "repeats": options.repeats}
    record |= {"rows": rows, "provenance": timing.provenance(CPU, DTYPE)}
    timing.publish(record, options.json_out)
    return 0


def _reason() -> str:
    if torch.cuda.is_available():
        return "there is no kernel for one yet"
    return "this machine has none that torch can use"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["heads", "(W, N, G)", "rows", "length", "MB", "MFLOP"]
    header += ["attend ms", "p20-p80", "dense ms", "p20-p80", "ratio", "max error"]
    return timing.table(header, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    shape = row["window"], row["ngram"], row["guesses"]
    times = [
        text
        for spread in (row["attend_ms"], row["dense_ms"])
        for text in (f"{spread['median']:.3f}", f"{spread['p20']:.3f}-{spread['p80']:.3f}")
    ]
    return [
        row["heads"],
        "AR" if shape == AUTOREGRESSIVE else str(shape),
        str(row["rows"]),
        str(row["length"]),
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['flops'] / 1e6:.1f}",
        *times,
        f"{row['ratio']:.2f}",
        f"{row['max_error']:.1e}",
    ]


if __name__ == "__main__":
    sys.exit(main())
