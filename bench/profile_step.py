"""Where a decoding step's time goes: products, attention, norm, rest, head and argmax, host.

Decodes prompts with each configuration, in turn with and without clocks, so that what the clocks cost
shows. The host's share is what is left of a step: n-gram pool, draws, verification, and Python between
them.
Knows how parts become rows; how they are timed is `profile_numba.py`'s and `profile_ops.py`'s business.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import timing
import torch
from decode_modes import Job, label
from tqdm import tqdm

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE, SamplingConfig
from lookahead.errors import InputError
from lookahead.models.llama import Llama
from lookahead.step_output import StepRecord

PARTS = ("products", "attention", "norm", "rest", "head + argmax", "host")
# Within it the model's parts are timed; what it gives has their seconds at its end.
Clocks = Callable[[Llama], AbstractContextManager[Counter[str]]]


@dataclass
class Profile:
    """One configuration's steps: how many, their time with and without clocks, and its parts."""

    config: LookaheadConfig
    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    steps: int = 0
    clocked_seconds: float = 0.0
    parts: Counter[str] = field(default_factory=Counter)
    plain_ms: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """`ms` by part add up to `ms_with_clocks`."""
        parts = {name: 1000 * self.parts[name] / self.steps for name in PARTS}
        whole = 1000 * self.clocked_seconds / self.steps
        is_plain = self.config == AUTOREGRESSIVE
        return {
            "mode": "autoregressive" if is_plain else label(self.config),
            "window": self.config.window,
            "ngram": self.config.ngram,
            "guesses": self.config.guesses,
            "rows": fmean(self.rows),
            "length": fmean(self.lengths),
            "steps": self.steps,
            "ms_per_step": timing.spread(self.plain_ms).to_dict(),
            "ms_with_clocks": whole,
            "ms": parts,
            "percent": {name: 100 * value / whole for name, value in parts.items()},
        }


def measure(
    engine: Engine,
    configs: Sequence[LookaheadConfig],
    jobs: Sequence[Job],
    max_new_tokens: int,
    repeats: int,
    sampling: SamplingConfig,
) -> list[dict[str, Any]]:
    """One row for autoregressive decoding and each configuration. A request's first step, which comes
    with the prefill, is left out. Raises InputError where no operation was seen."""
    clocks = _compiled_clocks if engine.model.implementation == "numba" else _operation_clocks
    run = partial(_run, engine, sampling)
    profiles = [Profile(config) for config in (AUTOREGRESSIVE, *configs)]
    for profile in profiles:
        for job in jobs:  # warm, and counted
            run(profile.config, job, max_new_tokens, trace=_count_into(profile))
    # Once for nothing: code with clocks is compiled when it is first run.
    run(AUTOREGRESSIVE, jobs[0], 2, clocks=clocks)
    total = repeats * len(jobs) * len(profiles)
    with tqdm(total=total, desc="profiling", unit="run", leave=False, disable=None) as progress:
        for turn in range(repeats * len(jobs)):
            for place in range(len(profiles)):
                profile, job = profiles[(turn + place) % len(profiles)], jobs[turn % len(jobs)]
                steps, seconds, _ = run(profile.config, job, max_new_tokens)
                if steps:
                    profile.plain_ms.append(1000 * seconds / steps)
                steps, seconds, parts = run(profile.config, job, max_new_tokens, clocks=clocks)
                profile.steps += steps
                profile.clocked_seconds += seconds
                profile.parts += parts
                progress.update()
    for profile in profiles:
        if not profile.steps:
            raise InputError("--profile needs steps behind the first: take more --max-new-tokens")
        missing = [name for name in ("products", "attention") if not profile.parts[name]]
        if missing:
            raise InputError(
                f"--profile saw no {missing[0]}: this model's steps are replayed as a whole, or its "
                "kernels cannot be told apart here"
            )
        profile.parts["host"] = profile.clocked_seconds - profile.parts.total()
    return [profile.to_dict() for profile in profiles]


def _count_into(profile: Profile) -> Callable[[StepRecord], None]:
    def count(record: StepRecord) -> None:
        profile.rows.append(len(record.tokens))
        profile.lengths.append(record.length)

    return count


def _run(
    engine: Engine,
    sampling: SamplingConfig,
    config: LookaheadConfig,
    job: Job,
    max_new_tokens: int,
    trace: Callable[[StepRecord], None] | None = None,
    clocks: Clocks | None = None,
) -> tuple[int, float, Counter[str]]:
    """Steps behind the first, their seconds, and the seconds of their parts."""
    stream = engine.stream(
        job.token_ids,
        max_new_tokens=max_new_tokens,
        mode="autoregressive" if config == AUTOREGRESSIVE else "lookahead",
        lookahead=config,
        sampling=sampling,
        trace=trace,
    )
    next(stream, None)
    first = stream.result
    if clocks is None:
        stream.run_to_end()
        parts: Counter[str] = Counter()
    else:
        with clocks(engine.model) as parts:
            stream.run_to_end()
    last = stream.result
    return last.steps - first.steps, last.decode_seconds - first.decode_seconds, parts


def _compiled_clocks(model: Llama) -> AbstractContextManager[Counter[str]]:
    from profile_numba import forward_phases

    return forward_phases(torch.get_num_threads())


def _operation_clocks(model: Llama) -> AbstractContextManager[Counter[str]]:
    from profile_ops import operation_times

    return operation_times(model)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds and percent of the step with clocks, by part."""
    header = ["step", "rows", "length", "ms/step", "with clocks", *PARTS]
    return timing.table(
        header,
        [
            [
                f"{row['mode']} {_shape(row)}".strip(),
                f"{row['rows']:.1f}",
                f"{row['length']:.0f}",
                f"{row['ms_per_step']['median']:.2f}",
                f"{row['ms_with_clocks']:.2f}",
                *(f"{row['ms'][name]:.2f} {row['percent'][name]:3.0f}%" for name in PARTS),
            ]
            for row in rows
        ],
    )


def _shape(row: dict[str, Any]) -> str:
    return f"({row['window']}, {row['ngram']}, {row['guesses']})" if row["guesses"] else ""
