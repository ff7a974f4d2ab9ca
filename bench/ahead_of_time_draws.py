"""Builds what `draw` launches for a GPU that need not be here.

    python bench/ahead_of_time_draws.py ARCHITECTURE

prints a report a line, as JSON; see `ahead_of_time.describe`. As in `ahead_of_time_steps.py`, what is
built is what is launched. Knows no model.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from ahead_of_time_steps import Recorder, compiled

from lookahead.kernels import draw_triton
from lookahead.kernels.warpers import NUM_VALUES, Histories, Warpers

KERNELS = ("count_tokens", "warp_scores", "keep_weights", "pick_tokens")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Vocabulary, sequences, rows of a step, length of a text: what a launch must not be built for.
SIZES = ((32000, 1, 61, 4096), (49152, 4, 1, 1000), (128256, 3, 16, 77))


def launch_draw(
    dtype: torch.dtype, vocab_size: int, batch: int, step_rows: int, text_size: int
) -> None:
    """A draw of all rows, on tensors without meaning."""
    per_sequence = torch.zeros(batch, dtype=torch.int32)
    rows = torch.zeros(batch * step_rows, dtype=torch.int64)
    draw_triton.draw_triton(
        torch.zeros(len(rows), vocab_size, dtype=dtype),
        rows,
        rows,
        Histories(
            text=torch.zeros(batch, text_size, dtype=torch.int32),
            lengths=per_sequence,
            prompt_lengths=per_sequence,
            samples=per_sequence.long(),
            eos_ids=torch.zeros(batch, 1 + batch, dtype=torch.int64),
            tokens=torch.zeros(batch, step_rows, dtype=torch.int32),
            parents=torch.zeros(step_rows, dtype=torch.int64),
            first_candidate=step_rows // 4,
        ),
        Warpers(torch.zeros(NUM_VALUES), torch.zeros(vocab_size), per_sequence[:1].long()),
    )


def reports(architecture: str) -> Iterator[dict[str, Any]]:
    launches: list[tuple[Any, dict[str, Any]]] = []
    for name in KERNELS:
        recorder = Recorder(getattr(draw_triton, name), lambda *launch: launches.append(launch))
        setattr(draw_triton, name, recorder)
    # Nothing runs, so it does not matter that a CPU could not run it.
    draw_triton.check_launch = lambda **tensors: None
    for dtype in DTYPES:
        for sizes in SIZES:
            launch_draw(dtype, *sizes)
    for kernel, arguments in launches:
        report = compiled(kernel, arguments, architecture)
        report["dtype"] = str(arguments["logits_ptr"].dtype) if "logits_ptr" in arguments else None
        yield {"kernel": kernel.__name__, "architecture": architecture} | report


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to compile"
    for report in reports(sys.argv[1]):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
