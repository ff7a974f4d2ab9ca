"""What was chosen for a run, why, and what came of it, as lines for people."""

from collections.abc import Sequence

from lookahead.results import Result
from lookahead.row_budget import RowBudget
from lookahead.step_costs import StepCosts

LISTED_SHAPES = 6


def stats(
    results: Sequence[Result],
    budget: RowBudget | None,
    costs: StepCosts | None,
    capture_seconds: float = 0.0,
) -> str:
    """Lines about the results of one batch; `costs` where they are known, `capture_seconds` where its
    steps were recorded."""
    first = results[0]
    steps, tokens = sum(each.steps for each in results), sum(each.new_tokens for each in results)
    rows = sum(each.rows_per_step * each.steps for each in results)
    lines = [
        f"(window, ngram, guesses): {(first.window, first.ngram, first.guesses)}, {first.choice}",
        f"tokens per step {_ratio(tokens, steps)}, rows per step {_ratio(rows, steps)}",
    ]
    if budget is not None:
        chosen = budget.shapes.most_common(LISTED_SHAPES)
        lines.append(
            "steps by candidates x tokens of each: "
            + ", ".join(
                f"{'window + ' if shape.window else ''}{shape.guesses} x "
                f"{shape.depth if shape.guesses else 0}: {count}"
                for shape, count in chosen
            )
        )
        for name, rates in budget.rates.items():
            if rates:
                lines.append(f"{name}: {', '.join(f'{rate:.2f}' for rate in rates)}")
    if capture_seconds:
        lines.append(f"recording the steps took {capture_seconds:.2f} s")
    if costs is not None:
        pairs = zip(costs.rows, costs.seconds, strict=True)
        lines.append(
            "ms of a step by rows: "
            + ", ".join(f"{rows}: {1000 * seconds:.2f}" for rows, seconds in pairs)
        )
    return "\n".join(f"stats: {line}" for line in lines)


def _ratio(value: float, count: int) -> str:
    return f"{value / count:.2f}" if count else "none"
