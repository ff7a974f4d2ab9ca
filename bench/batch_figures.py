"""From the runs of `batch.py` to figures: rows, a table, and where lookahead stops paying.

Knows what a ratio is taken to; runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import timing
from decode_modes import TUNED

from lookahead import LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.results import Result

Row = dict[str, Any]


@dataclass(frozen=True)
class Totals:
    """All groups once: their new tokens, steps and seconds."""

    tokens: int
    steps: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def totals(of_groups: Sequence[Sequence[Result]]) -> Totals:
    """A group takes as long, and as many steps, as the one of its results that takes longest."""
    return Totals(
        sum(result.new_tokens for results in of_groups for result in results),
        sum(max(result.steps for result in results) for results in of_groups),
        sum(max(result.decode_seconds for result in results) for results in of_groups),
    )


def rows_of(
    batch: int,
    modes: Sequence[tuple[str, LookaheadConfig]],
    runs: Sequence[Sequence[Totals]],
) -> list[Row]:
    """A row a mode, given by label and configuration, from its repeats; a ratio is to the same repeat
    of the faster autoregressive mode."""
    plain = [
        of_mode
        for (_, config), of_mode in zip(modes, runs, strict=True)
        if config == AUTOREGRESSIVE
    ]
    baseline = [max(each.speed for each in repeat) for repeat in zip(*plain, strict=True)]
    return [
        {
            "batch": batch,
            "mode": label,
            "window": config.window,
            "ngram": config.ngram,
            "guesses": config.guesses,
            "tokens": of_mode[0].tokens,
            "steps": of_mode[0].steps,
            "ms_per_step": timing.spread(
                [1000 * each.seconds / each.steps for each in of_mode]
            ).to_dict(),
            "tokens_per_second": timing.spread([each.speed for each in of_mode]).to_dict(),
            "ratio": timing.spread(
                [each.speed / speed for each, speed in zip(of_mode, baseline, strict=True)]
            ).to_dict(),
        }
        for (label, config), of_mode in zip(modes, runs, strict=True)
    ]


def stops_paying(rows: Sequence[Row]) -> list[Row]:
    """For each configuration, and for the engine's own choices at all batch sizes together, the
    smallest batch at which it is no faster, None if it always is."""
    found: dict[str, int | None] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        if row["mode"] != TUNED and not row["guesses"]:
            continue
        name = TUNED if row["mode"] == TUNED else _name(row)
        found.setdefault(name, None)
        if found[name] is None and row["ratio"]["median"] <= 1:
            found[name] = row["batch"]
    return [{"mode": name, "batch": at} for name, at in found.items()]


def table(rows: Sequence[Row]) -> str:
    header = ["mode", "batch", "tokens/step", "ms/step", "tokens/s", "p20-p80", "x AR"]
    lines = []
    for row in rows:
        speed = row["tokens_per_second"]
        lines.append(
            [
                _name(row),
                str(row["batch"]),
                f"{row['tokens'] / row['steps']:.2f}",
                f"{row['ms_per_step']['median']:.1f}",
                f"{speed['median']:.1f}",
                f"{speed['p20']:.1f}-{speed['p80']:.1f}",
                f"{row['ratio']['median']:.2f}",
            ]
        )
    return timing.table(header, lines)


def _name(row: Row) -> str:
    if not row["guesses"] and row["mode"] != TUNED:
        return row["mode"]
    return f"{row['mode']} ({row['window']}, {row['ngram']}, {row['guesses']})"


def verdict(ends: Sequence[Row]) -> str:
    return "\n".join(
        f"{end['mode']}: "
        + (
            "faster at every batch"
            if end["batch"] is None
            else f"no longer faster from batch {end['batch']}"
        )
        for end in ends
    )
