"""What lookahead would gain on a model too large to be here: real acceptance, the large model's cost.

`--record FILE` decodes prompts with a checkpoint, autoregressively and with each configuration, and
writes down which token it chose at every row of every step. `--replay FILE` runs a model of another
shape with random weights through the same steps: its forward pass and head are computed in full, and
then the recorded tokens are chosen, so that steps accept what they accepted. A step whose rows are not
the recorded ones is refused. Progress goes to standard error, a table and a last line of JSON to
standard output. Exit codes: 0; 1 when a replay leaves the recording; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import decode_figures
import decode_modes
import replay_cost
import torch
import trace_record
from decode_modes import Job, OutputsDiffer
from replayer import Replayer
from shapes import SHAPES
from trace_file import RecordedPrompt, read_trace
from trace_model import RowsDiffer

from lookahead import LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.devices import choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError

CONFIGS = "4,3,2;15,5,15"
LABEL = "replayed acceptance"


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/replay.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE", help="record a checkpoint's choices")
    what.add_argument("--replay", type=Path, metavar="FILE", help="replay them on another shape")
    add("--ckpt", type=Path, metavar="PATH", help="checkpoint directory, to record")
    add("--prompts", type=Path, default=timing.DEFAULT_PROMPTS, metavar="FILE", help="to record")
    add(
        "--prompt-tokens",
        type=timing.count,
        default=1,
        metavar="COUNT",
        help="to record: put the file's other prompts before a prompt of fewer tokens",
    )
    add("--max-new-tokens", type=timing.count, default=128, metavar="COUNT", help="to record")
    add(
        "--configs",
        metavar="W,N,G;...",
        help=f"default to record {CONFIGS}, to replay all recorded",
    )
    add("--shape", default="llama-2-7b", metavar="|".join(SHAPES), help="to replay on")
    add("--repeats", type=timing.count, default=3, metavar="COUNT", help="of a replay")
    add("--limit", type=timing.count, metavar="COUNT", help="only the first prompts")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
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
    try:
        if options.record:
            configs = decode_modes.parse_configs(options.configs or CONFIGS)
            record = trace_record.record(options, configs, device, dtype)
        else:
            record = _replay(options, device, dtype)
    except (OutputsDiffer, RowsDiffer) as difference:
        print(f"refused: {difference}; nothing is reported", file=sys.stderr)
        return 1
    record["provenance"] = timing.provenance(
        device, dtype, options.prompts if options.record else options.replay
    )
    timing.publish(record, options.json_out)
    return 0


def chosen(prompt: RecordedPrompt, configs: Sequence[LookaheadConfig]) -> RecordedPrompt:
    """The prompt with its runs of these configurations."""
    runs = {run.config: run for run in prompt.runs}
    for config in configs:
        if config not in runs:
            names = [f"{each.window},{each.ngram},{each.guesses}" for each in runs if each.guesses]
            raise InputError(
                f"--configs: {config.window},{config.ngram},{config.guesses} was not recorded, "
                f"expected some of {';'.join(names)}"
            )
    return replace(prompt, runs=[runs[config] for config in configs])


def _replay(
    options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    if options.shape not in SHAPES:
        raise InputError(f"--shape {options.shape!r} is not known, expected {', '.join(SHAPES)}")
    trace = read_trace(options.replay)
    wanted = trace.configs
    if options.configs is not None:
        wanted = [AUTOREGRESSIVE, *decode_modes.parse_configs(options.configs)]
    prompts = [chosen(prompt, wanted) for prompt in trace.prompts[: options.limit]]
    shape = SHAPES[options.shape]
    config = replace(shape, vocab_size=max(shape.vocab_size, trace.vocab_size))
    longest = max(len(prompt.token_ids) + len(prompt.runs[0].token_ids) for prompt in prompts)
    if longest > config.max_position_embeddings:
        raise InputError(
            f"the longest recording needs {longest} positions, {options.shape} has "
            f"{config.max_position_embeddings}"
        )
    replayer = Replayer(prompts, config, dtype, device, longest)
    jobs = [
        Job(timing.Prompt(prompt.id, prompt.category, "", False), prompt.token_ids)
        for prompt in prompts
    ]
    most = max(len(prompt.runs[0].token_ids) for prompt in prompts)
    replayer.is_checked = True
    accepted = decode_modes.check_modes(replayer.modes, jobs, most, str)
    replayer.is_checked = False
    runs = decode_modes.time_modes(replayer.modes, jobs, most, options.repeats)
    rows = decode_figures.timed_rows(replayer.modes, jobs, runs, accepted)
    cost = replay_cost.measure(replayer.modes, jobs, rows, config, dtype, device)
    enlarged = "" if config == shape else (
        f"vocabulary enlarged from {shape.vocab_size} to {config.vocab_size} for the recorded ids\n"
    )  # fmt: skip
    print(
        f"{LABEL}: choices of {trace.source['checkpoint']}, cost of random weights of the shape "
        f"{options.shape}\n{enlarged}{dtype_name(dtype)} on {device}, {len(prompts)} prompts x "
        f"{options.repeats}, {min(map(len, (job.token_ids for job in jobs)))} to {longest} tokens"
        f"\n\n{decode_figures.timed_table(rows)}\n\n{replay_cost.table(cost)}\n"
    )
    return {
        "benchmark": "replay",
        "acceptance": LABEL,
        "source": trace.source,
        "shape": options.shape,
        "vocab_size": config.vocab_size,
        "prompts": len(prompts),
        "longest": longest,
        "repeats": options.repeats,
        "rows": rows,
        "cost": cost,
    }


if __name__ == "__main__":
    sys.exit(main())
