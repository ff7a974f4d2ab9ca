"""What exactness costs: step times of the exact engine over those of the engine without it."""

from collections.abc import Sequence
from typing import Any

import timing

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.tokenizer import Tokenizer

LENGTHS = (300, 1500)
MOST_TOKENS = max(LENGTHS)
NEW_TOKENS = 24
REPEATS = 5
TEXT = """A lighthouse keeper writes down the weather every evening: the wind, the waves and the ships
that pass. Some evenings nothing passes, and then the page says so, and how far one could see. """


def measure(
    exact: Engine, fast: Engine, configs: Sequence[LookaheadConfig], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Milliseconds a step, both engines in turn on the same prompts."""
    ids = tokenizer.encode(TEXT * (1 + MOST_TOKENS // 20))
    rows = []
    for length in LENGTHS:
        for config in (AUTOREGRESSIVE, *configs):
            mode = "autoregressive" if config == AUTOREGRESSIVE else "lookahead"
            times: dict[str, list[float]] = {"exact": [], "fast": []}
            for repeat in range(REPEATS + 1):
                for name, engine in (("exact", exact), ("fast", fast)):
                    result = engine.generate(
                        ids[:length],
                        max_new_tokens=NEW_TOKENS,
                        mode=mode,
                        lookahead=config,
                        ignore_eos=True,
                    )
                    if repeat:  # the first warms up
                        times[name].append(1000 * result.decode_seconds / result.steps)
            spreads = {name: timing.spread(values) for name, values in times.items()}
            ratio = spreads["exact"].median / spreads["fast"].median
            rows.append(
                {
                    "length": length,
                    "window": config.window,
                    "ngram": config.ngram,
                    "guesses": config.guesses,
                    **{f"{name}_ms": spread.to_dict() for name, spread in spreads.items()},
                    "ratio": ratio,
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["length  step          exact ms  without ms  ratio"]
    for row in rows:
        shape = (row["window"], row["ngram"], row["guesses"])
        step = "AR" if row["guesses"] == 0 else str(shape)
        lines.append(
            f"{row['length']:6}  {step:12}  {row['exact_ms']['median']:8.1f}  "
            f"{row['fast_ms']['median']:10.1f}  {row['ratio']:5.2f}"
        )
    return "\n".join(lines)
