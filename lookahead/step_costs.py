"""What a step costs by its number of rows, on this machine and with this model.

Measured once and kept in the user's cache directory under a key of everything that it may depend on.
Knows nothing of what rows are good for.
"""

import json
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from tqdm import tqdm

from lookahead.config import MAX_STEP_ROWS
from lookahead.devices import dtype_name
from lookahead.errors import InputError
from lookahead.json_file import read_json_object
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.models.llama import Llama

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 256  # committed tokens while measuring
ROUNDS = 7
LONGEST = 1000.0  # seconds that a step may seem to take
# More rows than those at which a step takes so many times as long as with one are of no use.
TOO_SLOW = 4.0


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step for ascending numbers of rows, the first of them 1."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (len(self.rows) == len(self.seconds) >= 1 and self.rows[0] == 1):
            raise ValueError("rows: expected numbers from 1 on, with seconds for each")
        are_counts = all(type(count) is int and count <= MAX_STEP_ROWS for count in self.rows)
        if not are_counts or not _ascends(self.rows, True):
            raise ValueError(f"rows: expected ascending whole numbers up to {MAX_STEP_ROWS}")
        are_times = all(type(value) is float and 0 < value < LONGEST for value in self.seconds)
        if not are_times or not _ascends(self.seconds, False):
            raise ValueError(f"seconds: expected times up to {LONGEST} that rows never shorten")

    def at(self, rows: float) -> float:
        """Seconds of a step with so many rows; straight lines between and behind what was measured."""
        if len(self.rows) == 1:
            return self.seconds[0] * max(1.0, rows)
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        left = right - 1
        share = (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        between = self.seconds[left] + share * (self.seconds[right] - self.seconds[left])
        return max(between, self.seconds[0])


def _ascends(values: Sequence[float], strictly: bool) -> bool:
    return all(a < b or (a == b and not strictly) for a, b in pairwise(values))


def step_costs(model: Llama, max_length: int, max_step_rows: int) -> StepCosts:
    """Those that are kept for this machine and model, or else measured and kept.

    `max_length` is that of the contexts that the model may run.
    """
    context = min(CONTEXT, max_length - 1)
    key = _key(model, context, max_step_rows)
    name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = user_cache_path("lookahead") / "step_costs" / f"{name}.json"
    with suppress(InputError, ValueError, TypeError, KeyError, OverflowError):  # none, or damaged
        kept = read_json_object(path)
        if kept["key"] == key:
            return StepCosts(tuple(kept["rows"]), tuple(kept["seconds"]))
    costs = measure(model, context, [count for count in ROW_COUNTS if count <= max_step_rows])
    with suppress(OSError):  # then it is measured anew each time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{time.time_ns()}")
        try:
            partial.write_text(json.dumps({"key": key, **asdict(costs)}), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return costs


def _key(model: Llama, context: int, max_step_rows: int) -> dict[str, Any]:
    """All that step costs may depend on, as plain values."""
    device = model.device
    on_gpu = device.type == "cuda"
    versions = {}
    for package in ("lookahead", "torch", "triton", "numba"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return json.loads(
        json.dumps(
            {
                "model": asdict(model.config),
                "dtype": dtype_name(model.dtype),
                "implementation": model.implementation,
                "exact": model.inexact_reason is None,
                "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
                "threads": None if on_gpu else torch.get_num_threads(),
                "context": context,
                "max_step_rows": max_step_rows,
                "versions": versions,
            }
        )
    )


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@torch.inference_mode()
def measure(model: Llama, context: int, row_counts: Sequence[int]) -> StepCosts:
    """Time steps of these numbers of rows in turn, several rounds; the shortest times, for whatever
    else runs on the machine only makes them longer.

    A step is candidates of one token behind `context` committed tokens. Row counts that are far too
    slow end it.
    """
    cache = model.new_cache(1, context, max(row_counts))
    cache.data.zero_()
    # Each number of rows once, to leave out what is too slow before it is timed often.
    first: list[float] = []
    steps = []
    for count in row_counts:
        steps.append(_step(model, cache, count, context))
        steps[-1]()  # compiles, warms up
        first.append(_timed(steps[-1]))
        if first[-1] > TOO_SLOW * first[0]:
            break
    counts = tuple(row_counts[: len(first)])
    times: list[list[float]] = [[] for _ in counts]
    for _ in tqdm(range(ROUNDS), desc="measuring steps", leave=False, disable=None):
        for step, seconds in zip(steps, times, strict=True):
            seconds.append(_timed(step))
    shortest = [min(seconds) for seconds in times]
    # What more rows cost less is the noise of the machine.
    return StepCosts(counts, tuple(accumulate(shortest, max)))


def _timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _step(model: Llama, cache: KVCache, num_rows: int, length: int) -> Callable[[], None]:
    """What the model does in a step, run to its end, on a GPU too."""
    device = model.device
    layout = LookaheadLayout(0, 2, num_rows - 1)
    rows = torch.arange(num_rows, device=device)
    tokens = rows.unsqueeze(0) % model.config.vocab_size
    positions = length + torch.tensor(layout.depths, device=device).unsqueeze(0)
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    live_rows = torch.full_like(lengths, num_rows)

    def run() -> None:
        _, chosen, _ = model.choose(tokens, positions, layout, cache, lengths, live_rows, rows)
        chosen.sum().item()

    return run
