"""Builds what a step launches beside the forward pass for a GPU that need not be here.

    python bench/ahead_of_time_steps.py ARCHITECTURE

prints a report a line, as JSON; see `ahead_of_time.describe`. The launchers run with a recorder in each
kernel's place, so that what is built is what is launched. Knows no layer of a model.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from ahead_of_time import describe, target_of
from triton.compiler import ASTSource

from lookahead import step_triton
from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels import commit_rows_triton
from lookahead.layout import LookaheadLayout
from lookahead.layout_tensors import LayoutTensors

CPU = torch.device("cpu")
TYPES = {
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
SHAPES = ((15, 5, 15), (0, 2, 0), (0, 5, 8), (7, 4, 0))
KERNELS = (
    (step_triton, "judge_sequences"),
    (step_triton, "insert_ngrams"),
    (step_triton, "advance_sequences"),
    (commit_rows_triton, "copy_rows"),
)


class Recorder:
    """Takes a kernel's launches and builds what each would run."""

    def __init__(self, kernel: Any, build: Callable[[Any, dict[str, Any]], None]) -> None:
        self.kernel, self.build = kernel, build

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.build(self.kernel, arguments)


def compiled(kernel: Any, arguments: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What a launch with these arguments runs, as Triton's launcher would specialise it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            assert parameter.do_not_specialize, f"{name} would choose between binaries"
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: value for name, value in arguments.items() if name == "num_warps"}
    return describe(triton.compile(source, target=target_of(architecture), options=options))


def launch_steps(shape: tuple[int, int, int]) -> None:
    """All that a step of this (W, N, G) launches, on tensors without meaning."""
    window, ngram, guesses = shape
    numbers = LayoutTensors(LookaheadLayout(*shape), CPU)
    state = DecodeState(1, 64, 8, 2, CPU)
    choices = torch.zeros(1, len(numbers.logit_rows), dtype=torch.int64)
    tokens = torch.zeros(1, numbers.layout.num_rows, dtype=torch.int32)
    live = torch.zeros(1, dtype=torch.int32)
    judgement = step_triton.judge(state, numbers, tokens, choices, choices.bool(), live)
    pool = NgramPool(1, 128, guesses, ngram, CPU)
    next_tokens = torch.zeros(1, window, dtype=torch.int64)
    step_triton.learn(state, Window(1, window, ngram, CPU), pool, judgement, next_tokens)
    if guesses:
        step_triton.insert_prompt(state, pool, 0, ngram)


def launch_commits() -> None:
    rows, one = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 80, 128, 256):
            data = torch.zeros(2, 2, 1, 4, 64, head_dim, dtype=dtype)
            for counts in (one, one.long()):
                commit_rows_triton.commit_rows_triton(data, rows, counts, one, 32)


def reports(architecture: str) -> Iterator[dict[str, Any]]:
    launches: list[tuple[Any, dict[str, Any]]] = []
    for module, name in KERNELS:
        recorder = Recorder(getattr(module, name), lambda *launch: launches.append(launch))
        setattr(module, name, recorder)
    # Nothing runs, so it does not matter that a CPU could not run it.
    commit_rows_triton.check_can_run = lambda *arguments: None
    for shape in SHAPES:
        launch_steps(shape)
    launch_commits()
    for kernel, arguments in launches:
        report = compiled(kernel, arguments, architecture)
        yield {"kernel": kernel.__name__, "architecture": architecture} | report


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to compile"
    for report in reports(sys.argv[1]):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
