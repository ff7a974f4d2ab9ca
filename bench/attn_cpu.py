"""What can be done for `attend` without a GPU: the torch reference timed, the kernel interpreted.

The interpreter shows that the kernel is right; its speed says nothing and is not reported.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import timing
import torch
from attn_cases import (
    CPU,
    SHAPES,
    Attend,
    Case,
    Heads,
    check,
    dense_attention,
    expect,
    make_inputs,
)
from tqdm import tqdm

from lookahead.errors import InputError

DEFAULT_LENGTHS = (128, 512, 2048)
DEFAULT_REPEATS = 10
MODELS = (Heads("MHA 8", 8, 8, 64), Heads("GQA 8:2", 8, 2, 64))
# The interpreter runs programs one after the other and multiplies bfloat16 wrongly.
INTERPRETED = tuple(
    Case(heads, shape, length, dtype=dtype)
    for heads in (Heads("MHA 2", 2, 2, 64), Heads("GQA 2:1", 2, 1, 64))
    for shape in SHAPES
    for length, dtype in ((64, torch.float32), (200, torch.float16))
)


def cases(lengths: Sequence[int]) -> Iterator[Case]:
    for heads in MODELS:
        for shape in SHAPES:
            for length in lengths:
                yield Case(heads, shape, length)


def time_reference(lengths: Sequence[int], repeats: int, operation: Attend) -> list[dict[str, Any]]:
    """A row for each case. Raises WrongResult."""
    progress = tqdm(list(cases(lengths)), unit="case", leave=False, disable=None)
    return [measure(case, repeats, operation) for case in progress]


def measure(case: Case, repeats: int, operation: Attend) -> dict[str, Any]:
    """Check both implementations, then time them in turn; the first turn of each is not counted."""
    inputs = make_inputs(case)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "attend": inputs.call(operation, case.layout),
        "dense": lambda: dense_attention(inputs),
    }
    expected = expect(inputs)
    errors = {name: check(name, case, call(), expected) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timing.time_call(call, CPU)[1])
    milliseconds = {
        name: timing.spread([1000 * value for value in values]) for name, values in seconds.items()
    }
    return {
        **case.to_dict(),
        "attend_ms": milliseconds["attend"].to_dict(),
        "dense_ms": milliseconds["dense"].to_dict(),
        "ratio": milliseconds["dense"].median / milliseconds["attend"].median,
        "max_error": errors["attend"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["heads", "(W, N, G)", "rows", "length", "MB", "MFLOP"]
    header += ["attend ms", "p20-p80", "dense ms", "p20-p80", "ratio", "max error"]
    return timing.table(header, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    times = [
        text
        for spread in (row["attend_ms"], row["dense_ms"])
        for text in (f"{spread['median']:.3f}", f"{spread['p20']:.3f}-{spread['p80']:.3f}")
    ]
    shape = "AR" if row["rows"] == 1 else str((row["window"], row["ngram"], row["guesses"]))
    return [
        row["heads"],
        shape,
        str(row["rows"]),
        str(row["length"]),
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['flops'] / 1e6:.1f}",
        *times,
        f"{row['ratio']:.2f}",
        f"{row['max_error']:.1e}",
    ]


def check_interpreted(operation: Attend) -> dict[str, Any] | None:
    """Run the Triton kernel in Triton's interpreter, which must be chosen before Triton is imported;
    None without Triton. Raises WrongResult."""
    if find_spec("triton") is None:
        return None
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import JITFunction
    from triton import language as tl

    from lookahead.kernels.attn_mask_triton import attend_tiles

    if isinstance(attend_tiles, JITFunction) or isinstance(tl.max, JITFunction):
        raise InputError("Triton was imported before its interpreter could be chosen")
    rows = []
    for case in tqdm(INTERPRETED, unit="case", leave=False, disable=None):
        inputs = make_inputs(case)
        got = inputs.call(operation, case.layout, implementation="triton")()
        error = check("the Triton kernel", case, got, expect(inputs))
        dtype = str(case.dtype).removeprefix("torch.")
        rows.append(case.to_dict() | {"dtype": dtype, "max_error": error})
    return {"cases": len(rows), "max_error": max(row["max_error"] for row in rows), "rows": rows}
