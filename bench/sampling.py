"""What a step's draws cost: microseconds by what is asked of them, for one row and for a step whose
rows are all reached.

A draw that is greedy costs nothing beyond the argmax that a step has anyway; these come on top of it.
All settings run in turn, each time behind a write larger than the caches, for so a step finds them: its
weights have just gone through. On a GPU a captured graph is timed by events. Logits are random, falling
like a model's; with `--ckpt` also that model's own. Progress goes to standard error, a table and a last
line of JSON to standard output. Exit codes: 0; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import torch
from attn_gpu import ColdTimer, capture
from sampling_cases import HISTORY, VOCABULARIES, WARPERS, Draw, draws, model_source, random_source
from sampling_words import describe
from tqdm import tqdm

from lookahead.devices import choose_device, choose_dtype, dtype_name

FLUSH_BYTES = 128 * 2**20  # of a processor; a GPU's timer has its own
IMPLEMENTATIONS = {"cpu": "numba", "cuda": "triton"}


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/sampling.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", type=Path, metavar="PATH", help="checkpoint whose logits are drawn from too")
    add("--dtype", default="auto", help="of the logits")
    add("--device", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
    add("--repeats", type=timing.count, default=30, metavar="COUNT", help="default %(default)s")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> int:
    timing.check_writable(options.json_out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    sources = [] if options.ckpt is None else [model_source(options.ckpt, dtype, device)]
    sources += [random_source(vocab_size, dtype, device) for vocab_size in VOCABULARIES]
    implementation = IMPLEMENTATIONS[device.type]
    calls = list(draws(sources, implementation))
    time_all = _times_on_gpu if device.type == "cuda" else _times_on_cpu
    rows = [
        _row(draw, spread)
        for draw, spread in zip(calls, time_all(calls, options.repeats, device), strict=True)
    ]
    print(
        f"{dtype_name(dtype)} on {device}, {implementation}, {torch.get_num_threads()} threads, "
        f"{options.repeats} draws each behind {HISTORY} tokens; microseconds, medians\n\n"
        f"{table(rows)}\n\n{_legend()}\n"
    )
    record = {
        "benchmark": "sampling",
        "checkpoint": None if options.ckpt is None else options.ckpt.resolve().name,
        "implementation": implementation,
        "history": HISTORY,
        "repeats": options.repeats,
        "rows": rows,
        "provenance": timing.provenance(device, dtype),
    }
    timing.publish(record, options.json_out)
    return 0


@torch.inference_mode()
def _times_on_cpu(calls: Sequence[Draw], repeats: int, device: torch.device) -> list[timing.Spread]:
    """Microseconds of each, in turn; the first turn is not counted."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8)
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in tqdm(range(repeats + 1), desc="timing", unit="turn", leave=False, disable=None):
        for call, of_call in zip(calls, seconds, strict=True):
            flush.zero_()
            of_call.append(timing.time_call(call, device)[1])
    return [timing.spread([1e6 * each for each in of_call[1:]]) for of_call in seconds]


@torch.inference_mode()
def _times_on_gpu(calls: Sequence[Draw], repeats: int, device: torch.device) -> list[timing.Spread]:
    """The same of replayed graphs."""
    replays: dict[str, Callable[[], None]] = {
        str(number): capture(call)[0] for number, call in enumerate(calls)
    }
    return list(ColdTimer(device).times(replays, repeats).values())


def _row(draw: Draw, spread: timing.Spread) -> dict[str, Any]:
    return {
        "logits": draw.source.name,
        "vocab_size": draw.source.logits.shape[1],
        "rows": draw.num_rows,
        "warpers": draw.name,
        "sampling": describe(WARPERS[draw.name]),
        "microseconds": spread.to_dict(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each source of logits and number of rows, a column for each setting."""
    lines: dict[tuple[str, int, int], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["logits"], row["vocab_size"], row["rows"]), {})
        line[row["warpers"]] = f"{row['microseconds']['median']:.0f}"
    return timing.table(
        ["logits", "vocabulary", "rows", *WARPERS],
        [
            [name, str(vocab_size), str(num_rows), *(line[each] for each in WARPERS)]
            for (name, vocab_size, num_rows), line in lines.items()
        ],
    )


def _legend() -> str:
    return "\n".join(f"{name}: {describe(sampling)}" for name, sampling in WARPERS.items())


if __name__ == "__main__":
    sys.exit(main())
