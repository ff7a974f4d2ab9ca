"""What memory decoding takes beyond weights and cache, and whether it stays the same over many steps.

First one request a mode fills the context: the most memory that was held during loading and during
each, less the program, the weights and the keys and values of that many tokens. The program is what a
tiny model of random weights leaves behind once it has run. Then requests follow each other for
`--steps` steps, and memory is read ten times on the way. On a CPU memory is what the process has
resident, on a GPU what torch has allocated there. Progress goes to standard error, tables and a last
line of JSON to standard output. Exit codes: 0; 2 for wrong input.
"""

import argparse
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import decode_modes
import shapes
import torch
from decode_modes import Job
from tqdm import tqdm

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE, ModelConfig
from lookahead.devices import choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.models.checkpoint_config import read_model_config
from lookahead.models.weights import LlamaWeights
from lookahead.tokenizer import Tokenizer

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
SAMPLES = 10
MEGABYTE = 10**6


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/memory.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", required=True, type=Path, metavar="PATH", help="checkpoint directory")
    add("--prompts", type=Path, default=timing.DEFAULT_PROMPTS, metavar="FILE")
    add("--length", type=timing.count, default=2048, metavar="TOKENS", help="default %(default)s")
    add("--configs", default="4,3,2;15,5,15", metavar="W,N,G;...", help="default %(default)s")
    add("--max-new-tokens", type=timing.count, default=64, metavar="COUNT", help="of one request")
    add("--steps", type=timing.count, default=10000, metavar="COUNT", help="default %(default)s")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(), _run, arguments)


class Meter:
    """Bytes that the process holds on a device: now, and the most since the last `reset`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        if not self._is_gpu and not (STATUS.exists() and CLEAR_REFS.exists()):
            raise InputError(f"memory on a CPU is read from {STATUS}, which only Linux has")

    def reset(self) -> None:
        gc.collect()
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._is_gpu else resident("VmRSS")

    @property
    def most(self) -> int:
        if self._is_gpu:
            return torch.cuda.max_memory_allocated(self._device)
        return resident("VmHWM")


def resident(field: str) -> int:
    """Bytes of a field of the process's status."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of all parameters, each once."""
    weights = LlamaWeights.empty(config, dtype, torch.device("meta"))
    return sum(target.nbytes for target in weights.targets(config).values())


def cache_bytes(config: ModelConfig, dtype: torch.dtype, length: int) -> int:
    """Of the keys and values of so many tokens."""
    shape = (config.num_layers, 2, config.num_kv_heads, length, config.head_dim)
    return math.prod(shape) * dtype.itemsize


def _run(options: argparse.Namespace) -> int:
    configs = [AUTOREGRESSIVE, *decode_modes.parse_configs(options.configs)]
    prompts = timing.read_prompts(options.prompts)
    timing.check_writable(options.json_out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    config = read_model_config(options.ckpt)
    room = min(options.length, config.max_position_embeddings) - options.max_new_tokens
    if options.length > config.max_position_embeddings or room < 1:
        raise InputError(
            f"--length must be more than --max-new-tokens {options.max_new_tokens} and at most the "
            f"{config.max_position_embeddings} positions of the model, got {options.length}"
        )
    tokenizer = Tokenizer.load(options.ckpt)
    jobs = [Job(prompt, prompt.token_ids(tokenizer)[:room]) for prompt in prompts]
    meter = Meter(device)
    _run_tiny_model(device, dtype)
    meter.reset()
    known = {
        "program": meter.now,
        "weights": weight_bytes(config, dtype),
        "cache": cache_bytes(config, dtype, options.length),
    }
    sizes = [(each.window, each.ngram, each.guesses) for each in configs]
    engine = Engine.load(
        options.ckpt,
        device=str(device),
        dtype=dtype_name(dtype),
        max_length=options.length,
        max_step_rows=max(LookaheadLayout.count_rows(*size) for size in sizes),
    )
    rows = [_row("loading", meter, known)]
    long_text = [token for job in jobs for token in job.token_ids] * (1 + room // len(jobs))
    for each in configs:
        meter.reset()
        _generate(engine, long_text[:room], each, options.max_new_tokens)
        rows.append(_row(decode_modes.full_label(each), meter, known))
    samples = list(_samples(engine, configs[-1], jobs, options, meter))
    growth = samples[-1]["bytes"] - samples[0]["bytes"]
    where = f"{dtype_name(dtype)} on {device}, {options.length} tokens"
    print(
        f"{where}\nprogram {_mb(known['program'])}, weights {_mb(known['weights'])}, cache "
        f"{_mb(known['cache'])} MB\n\n{_peak_table(rows)}\n\n{_sample_table(samples)}\n\n"
        f"{rows[-1]['name']}, from {samples[0]['steps']} to {samples[-1]['steps']} steps: "
        f"{growth / MEGABYTE:+.1f} MB\n"
    )
    record = {
        "benchmark": "memory",
        "checkpoint": options.ckpt.resolve().name,
        "length": options.length,
        "max_new_tokens": options.max_new_tokens,
        "bytes": known,
        "rows": rows,
        "samples": samples,
        "growth_bytes": growth,
        "provenance": timing.provenance(device, dtype, options.prompts),
    }
    timing.publish(record, options.json_out)
    return 0


def _run_tiny_model(device: torch.device, dtype: torch.dtype) -> None:
    """Have everything imported and compiled that decoding needs, and leave nothing else."""
    config = LookaheadConfig(2, 3, 2)
    engine = shapes.random_engine(shapes.SHAPES["tiny"], dtype, device, 64, step_rows=16)
    for each in (AUTOREGRESSIVE, config):
        _generate(engine, [1, 2, 3], each, 8)


def _row(name: str, meter: Meter, known: dict[str, int]) -> dict[str, Any]:
    now, most = meter.now, meter.most  # in this order, so that the one is part of the other
    return {"name": name, "most": most, "now": now, "beyond": most - sum(known.values())}


def _generate(
    engine: Engine, token_ids: list[int], config: LookaheadConfig, max_new_tokens: int
) -> int:
    """Decode one request; returns its steps."""
    stream = engine.stream(
        token_ids,
        max_new_tokens=max_new_tokens,
        mode="autoregressive" if config == AUTOREGRESSIVE else "lookahead",
        lookahead=config,
        ignore_eos=True,
    )
    return stream.run_to_end().steps


def _samples(
    engine: Engine,
    config: LookaheadConfig,
    jobs: Sequence[Job],
    options: argparse.Namespace,
    meter: Meter,
) -> Iterator[dict[str, int]]:
    """Memory after each tenth of the steps, at the end of the request that reached it."""
    steps = reached = 0
    with tqdm(total=options.steps, unit="step", leave=False, disable=None) as bar:
        for job in cycle(jobs):
            count = _generate(engine, job.token_ids, config, options.max_new_tokens)
            steps += count
            bar.update(count)
            if steps * SAMPLES // options.steps > reached:
                reached = steps * SAMPLES // options.steps
                gc.collect()
                yield {"steps": steps, "bytes": meter.now}
            if steps >= options.steps:
                return


def _mb(number: int) -> str:
    return f"{number / MEGABYTE:.1f}"


def _peak_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ("MB", "most", "beyond program, weights, cache", "at its end")
    return timing.table(
        header,
        [[row["name"], _mb(row["most"]), _mb(row["beyond"]), _mb(row["now"])] for row in rows],
    )


def _sample_table(samples: Sequence[dict[str, int]]) -> str:
    lines = [[str(each["steps"]), _mb(each["bytes"])] for each in samples]
    return timing.table(("steps", "MB"), lines)


if __name__ == "__main__":
    sys.exit(main())
