"""Does lookahead still pay when several prompts are decoded at once?

For each batch size the same prompts run in groups of that size: autoregressively, with what the engine
chooses by itself for that size ("tuned"), and with each configuration, in turn. First every prompt's
ids must be those that it gives alone: nothing is timed otherwise. Tokens per second are those of all
prompts over the groups' decoding time, a ratio is to autoregressive decoding at the same batch size,
the faster one where there are two. Progress goes to standard error, a table and a last line of JSON to
standard output. Exit codes: 0; 1 when ids differ; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import batch_figures
import decode_modes
import torch
from batch_figures import Totals
from decode_modes import Job, OutputsDiffer
from tqdm import tqdm

from lookahead import Engine, LookaheadConfig
from lookahead.compare import first_difference
from lookahead.config import AUTOREGRESSIVE
from lookahead.devices import choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError
from lookahead.models.checkpoint_config import read_model_config
from lookahead.results import Result
from lookahead.tokenizer import Tokenizer


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/batch.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", required=True, type=Path, metavar="PATH", help="checkpoint directory")
    add("--prompts", type=Path, default=timing.DEFAULT_PROMPTS, metavar="FILE")
    add("--limit", type=timing.count, default=8, metavar="COUNT", help="prompts; default 8")
    add("--batches", default="1,2,4,8", metavar="B,B,...", help="default %(default)s")
    add(
        "--configs",
        default="4,3,2;15,5,15",
        metavar="W,N,G;...",
        help='beside the engine\'s own choice; "" for none, default %(default)s',
    )
    add("--max-new-tokens", type=timing.count, default=64, metavar="COUNT")
    add("--repeats", type=timing.count, default=3, metavar="COUNT", help="default %(default)s")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(), _run, arguments)


@dataclass(frozen=True)
class BatchMode:
    """A way of decoding several prompts at once."""

    label: str
    engine: Engine
    config: LookaheadConfig

    @property
    def is_autoregressive(self) -> bool:
        return self.config == AUTOREGRESSIVE

    def run(self, group: Sequence[Job], max_new_tokens: int) -> list[Result]:
        """Decode a group to its end, in order; no text ends before it is full."""
        return self.engine.generate(
            [job.token_ids for job in group],
            max_new_tokens=max_new_tokens,
            mode="autoregressive" if self.is_autoregressive else "lookahead",
            lookahead=self.config,
            ignore_eos=True,
        )

    def __str__(self) -> str:
        return decode_modes.full_label(self.config)


def parse_batches(text: str) -> list[int]:
    """ "1,2,4" -> sizes, ascending. Raises InputError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise InputError(f'--batches: expected sizes of at least 1 like "1,2,4", got {text!r}')
    return sorted(set(map(int, parts)))


def groups(count: int, batch: int) -> list[slice]:
    """So many prompts in groups of a batch; the last may be smaller."""
    return [slice(start, min(start + batch, count)) for start in range(0, count, batch)]


def require_same_ids(
    mode: BatchMode,
    group: Sequence[Job],
    results: Sequence[Result],
    alone: Sequence[list[int]],
) -> None:
    """Raise OutputsDiffer unless each result's ids are those that its prompt gives alone."""
    for job, result, expected in zip(group, results, alone, strict=True):
        place = first_difference(expected, result.token_ids)
        if place is not None:
            raise OutputsDiffer(
                f"prompt {job.prompt.id} in a batch of {len(group)} differs from itself alone at new "
                f"token {place} with {mode}"
            )


def _run(options: argparse.Namespace) -> int:
    batches = parse_batches(options.batches)
    configs = decode_modes.parse_configs(options.configs, may_be_empty=True)
    prompts = timing.read_prompts(options.prompts, options.limit)
    timing.check_writable(options.json_out)
    if len(prompts) < batches[-1]:
        raise InputError(
            f"--batches: {batches[-1]} is more than the {len(prompts)} prompts that there are"
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    tokenizer = Tokenizer.load(options.ckpt)
    jobs = [Job(prompt, prompt.token_ids(tokenizer)) for prompt in prompts]
    longest = max(len(job.token_ids) for job in jobs) + options.max_new_tokens
    positions = read_model_config(options.ckpt).max_position_embeddings
    if longest > positions:
        raise InputError(f"the longest prompt needs {longest} positions, the model has {positions}")

    def load(batch: int, exact: bool = True) -> Engine:
        return Engine.load(
            options.ckpt,
            device=str(device),
            dtype=dtype_name(dtype),
            max_length=longest,
            batch_size=batch,
            max_step_rows=decode_modes.step_rows(configs),
            exact=exact,
        )

    def load_modes(batch: int) -> list[BatchMode]:
        engine = load(batch)
        modes = [BatchMode("autoregressive", engine, AUTOREGRESSIVE)]
        modes += [
            BatchMode(decode_modes.label(config), engine, config)
            for config in (engine.tuning.config, *configs)
        ]
        if device.type == "cuda":  # on a CPU exactness costs nothing
            inexact = BatchMode(decode_modes.NOT_EXACT, load(batch, exact=False), AUTOREGRESSIVE)
            modes.insert(1, inexact)
        return modes

    plain = BatchMode("autoregressive", load(1), AUTOREGRESSIVE)
    alone = [plain.run([job], options.max_new_tokens)[0].token_ids for job in jobs]
    del plain
    rows = []
    try:
        for batch in batches:
            modes = load_modes(batch)
            runs = _time(batch, modes, jobs, alone, options)
            rows += batch_figures.rows_of(
                batch, [(mode.label, mode.config) for mode in modes], runs
            )
            del modes
    except OutputsDiffer as difference:
        print(f"refused: {difference}; no speed is reported", file=sys.stderr)
        return 1
    ends = batch_figures.stops_paying(rows)
    print(
        f"{dtype_name(dtype)} on {device}, {torch.get_num_threads()} threads, {len(jobs)} prompts x "
        f"{options.repeats}, {options.max_new_tokens} new tokens each\n"
        "every prompt's ids are those that it gives alone\n\n"
        f"{batch_figures.table(rows)}\n\n{batch_figures.verdict(ends)}\n"
    )
    record = {
        "benchmark": "batch",
        "checkpoint": options.ckpt.resolve().name,
        "prompts": len(jobs),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "rows": rows,
        "stops_paying": ends,
        "provenance": timing.provenance(device, dtype, options.prompts),
    }
    timing.publish(record, options.json_out)
    return 0


def _time(
    batch: int,
    modes: Sequence[BatchMode],
    jobs: Sequence[Job],
    alone: Sequence[list[int]],
    options: argparse.Namespace,
) -> list[list[Totals]]:
    """Check everything once, then run it `repeats` times, modes in turn. Totals by mode and repeat."""
    parts = groups(len(jobs), batch)
    runs: list[list[Totals]] = [[] for _ in modes]
    total = (1 + options.repeats) * len(parts) * len(modes)
    with tqdm(total=total, desc=f"batch {batch}", unit="run", leave=False, disable=None) as bar:
        for turn in range(1 + options.repeats):
            results: list[list[list[Result]]] = [[] for _ in modes]
            for number, part in enumerate(parts):
                for place in range(len(modes)):
                    index = (turn + number + place) % len(modes)
                    found = modes[index].run(jobs[part], options.max_new_tokens)
                    if modes[index].label != decode_modes.NOT_EXACT:
                        require_same_ids(modes[index], jobs[part], found, alone[part])
                    results[index].append(found)
                    bar.update()
            if turn:  # the first warmed up
                for of_mode, found_groups in zip(runs, results, strict=True):
                    of_mode.append(batch_figures.totals(found_groups))
    return runs


if __name__ == "__main__":
    sys.exit(main())
