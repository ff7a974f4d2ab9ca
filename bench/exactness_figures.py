"""From what `exactness.py` found on each prompt to figures: rows for JSON, and a table of them."""

from collections.abc import Sequence
from typing import Any

import timing

Row = dict[str, Any]


def summarise(found: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for whatever was compared, from what was found on each prompt."""
    rows = []
    for column in zip(*found, strict=True):
        parted = [each for each in column if not each["identical"]]
        first = min(parted, key=lambda each: each["first_difference"], default=None)
        logprobs = [each["logprobs_differ"] for each in column]
        rows.append(
            {
                "name": column[0]["name"],
                "is_promised": column[0]["is_promised"],
                "prompts": len(column),
                "identical": len(column) - len(parted),
                "tokens": sum(each["tokens"] for each in column),
                "logits_compared": sum(each["logits_compared"] for each in column),
                "logits_differ": sum(each["logits_differ"] for each in column),
                "logprobs_differ": None if None in logprobs else sum(logprobs),
                "first_difference": first and first["first_difference"],
                "margin": first and first["margin"],
            }
        )
    return rows


def is_broken(row: Row) -> bool:
    """Whether something differs that is promised to be the same."""
    differs = row["identical"] < row["prompts"] or row["logits_differ"] or row["logprobs_differ"]
    return bool(row["is_promised"] and differs)


def table(rows: Sequence[Row]) -> str:
    header = ("", "identical", "logits differ", "log-probs differ", "first difference", "margin")
    return timing.table(
        header,
        [
            (
                row["name"] if row["is_promised"] else f"{row['name']} (may differ)",
                f"{row['identical']} of {row['prompts']}",
                f"{row['logits_differ']} of {row['logits_compared']}",
                "" if row["logprobs_differ"] is None else str(row["logprobs_differ"]),
                "none" if row["first_difference"] is None else f"token {row['first_difference']}",
                "" if row["margin"] is None else f"{row['margin']:.3g}",
            )
            for row in rows
        ],
    )
