"""From the runs of `decode_modes.py` to figures: rows for JSON, and the same rows as a table.

Knows what a ratio is taken to; runs nothing.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import timing
from decode_modes import TUNED, AcceptedTokens, Job, Mode, Run

from lookahead.drafting.ngram_pool import ORIGINS

Row = dict[str, Any]


def timed_rows(
    modes: Sequence[Mode],
    jobs: Sequence[Job],
    runs: Sequence[Sequence[Sequence[Run]]],
    accepted: Sequence[AcceptedTokens],
) -> list[Row]:
    """One row a mode, from its runs by prompt and repeat. A ratio is that of a prompt's speed to its
    baseline's; ids are compared with those of the first mode."""
    baselines = baseline_speeds(modes, runs)
    rows = []
    for mode, of_mode, counts in zip(modes, runs, accepted, strict=True):
        prompts = [
            _timed_prompt(job, repeats, plain[0], baseline)
            for job, repeats, plain, baseline in zip(jobs, of_mode, runs[0], baselines, strict=True)
        ]
        rows.append(
            {
                **_description(mode),
                **_timed_totals(of_mode, prompts),
                "accepted": None if mode.config is None else counts.to_dict(),
                "prompts": prompts,
            }
        )
    return rows


def baseline_speeds(modes: Sequence[Mode], runs: Sequence[Sequence[Sequence[Run]]]) -> list[float]:
    """Tokens per second of the fastest autoregressive mode, prompt by prompt."""
    plain = [of_mode for mode, of_mode in zip(modes, runs, strict=True) if mode.is_autoregressive]
    return [
        max(_speed(repeats) or 0.0 for repeats in of_prompt)
        for of_prompt in zip(*plain, strict=True)
    ]


def _description(mode: Mode) -> Row:
    config = mode.config if mode.shape else None
    return {
        "mode": mode.label,
        "window": config and config.window,
        "ngram": config and config.ngram,
        "guesses": config and config.guesses,
        "prompt_ngrams": config and config.prompt_ngrams,
        "adaptive": config and config.adaptive,
    }


def _timed_prompt(job: Job, repeats: Sequence[Run], plain: Run, baseline: float) -> Row:
    speed = _speed(repeats)
    return {
        "id": job.prompt.id,
        "category": job.prompt.category,
        "new_tokens": len(repeats[0].token_ids),
        "steps": repeats[0].steps,
        "tokens_per_second": speed,
        "ratio": None if speed is None else speed / baseline,
        "identical": all(run.token_ids == plain.token_ids for run in repeats),
    }


def _timed_totals(runs: Sequence[Sequence[Run]], prompts: Sequence[Row]) -> Row:
    timed = [run for repeats in runs for run in repeats if run.steps]
    tokens, steps = sum(run.tokens for run in timed), sum(run.steps for run in timed)
    ratios = [row["ratio"] for row in prompts if row["ratio"] is not None]
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps if steps else None,
        "rows_per_step": _rows_per_step(timed),
        "ms_per_step": _spread([1000 * run.seconds / run.steps for run in timed]),
        "tokens_per_second": _spread([run.tokens / run.seconds for run in timed]),
        "ratio": _spread(ratios),
        "time_ratio": _time_ratio(ratios),
        "identical_prompts": sum(row["identical"] for row in prompts),
    }


def _speed(repeats: Sequence[Run]) -> float | None:
    """Median tokens per second of one prompt; None where there was no step to time."""
    speeds = [run.tokens / run.seconds for run in repeats if run.steps]
    return statistics.median(speeds) if speeds else None


def _rows_per_step(runs: Sequence[Run]) -> float | None:
    """Mean over the steps of all runs; None where they are not known."""
    known = [run for run in runs if run.rows_per_step is not None]
    steps = sum(run.steps for run in known)
    return sum((run.rows_per_step or 0.0) * run.steps for run in known) / steps if steps else None


def _time_ratio(ratios: Sequence[float]) -> dict[str, float] | None:
    """A prompt's time over that of its baseline for the same tokens: the median and the worst."""
    times = [1 / ratio for ratio in ratios]
    return {"median": statistics.median(times), "worst": max(times)} if times else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return timing.spread(values).to_dict() if values else None


def step_rows(
    modes: Sequence[Mode],
    jobs: Sequence[Job],
    runs: Sequence[Sequence[Run]],
    accepted: Sequence[AcceptedTokens],
) -> list[Row]:
    """One row a mode, from its one run a prompt."""
    return [
        {
            **_description(mode),
            "tokens": sum(run.tokens for run in of_mode),
            "steps": sum(run.steps for run in of_mode),
            "tokens_per_step": sum(run.tokens for run in of_mode)
            / sum(run.steps for run in of_mode),
            "mean_tokens_per_step": statistics.fmean(run.tokens / run.steps for run in of_mode),
            "accepted": counts.to_dict(),
            "prompts": [_counted_prompt(job, run) for job, run in zip(jobs, of_mode, strict=True)],
        }
        for mode, of_mode, counts in zip(modes, runs, accepted, strict=True)
    ]


def _counted_prompt(job: Job, run: Run) -> Row:
    return {
        "id": job.prompt.id,
        "category": job.prompt.category,
        "new_tokens": len(run.token_ids),
        "steps": run.steps,
    }


def timed_table(rows: Sequence[Row]) -> str:
    header = [
        "mode",
        "(W, N, G)",
        "rows/step",
        "tokens/step",
        "ms/step",
        "tokens/s",
        "p20-p80",
        "x AR",
        "same ids",
    ]
    return timing.table(
        [*header, *ORIGINS],
        [
            [
                row["mode"],
                _shape(row),
                _number(row["rows_per_step"], 1),
                _number(row["tokens_per_step"], 2),
                _number(_median(row["ms_per_step"]), 1),
                _number(_median(row["tokens_per_second"]), 1),
                _range(row["tokens_per_second"]),
                _number(_median(row["ratio"]), 2),
                f"{row['identical_prompts']}/{len(row['prompts'])}",
                *_accepted(row),
            ]
            for row in rows
        ],
    )


def time_line(rows: Sequence[Row]) -> str:
    """What the engine's own choice costs a prompt at worst, in words."""
    times = next(row["time_ratio"] for row in rows if row["mode"] == TUNED)
    if times is None:
        return "tuned: no step to time"
    return (
        f"tuned: a prompt takes {times['median']:.2f} of the time of autoregressive decoding in the "
        f"median, {times['worst']:.2f} at worst"
    )


def steps_table(rows: Sequence[Row]) -> str:
    header = ["mode", "(W, N, G)", "tokens", "steps", "tokens/step", "mean of prompts"]
    return timing.table(
        [*header, *ORIGINS],
        [
            [
                row["mode"],
                _shape(row),
                str(row["tokens"]),
                str(row["steps"]),
                _number(row["tokens_per_step"], 3),
                _number(row["mean_tokens_per_step"], 3),
                *_accepted(row),
            ]
            for row in rows
        ],
    )


def _shape(row: Row) -> str:
    if row["ngram"] is None:
        return ""
    return f"({row['window']}, {row['ngram']}, {row['guesses']})"


def _accepted(row: Row) -> list[str]:
    """Accepted tokens by source; nothing for a mode that has no candidates."""
    return [str(row["accepted"][origin]) if row["ngram"] else "" for origin in ORIGINS]


def _median(spread: dict[str, float] | None) -> float | None:
    return spread["median"] if spread else None


def _range(spread: dict[str, float] | None) -> str:
    return f"{spread['p20']:.1f}-{spread['p80']:.1f}" if spread else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
