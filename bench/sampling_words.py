"""How tokens are chosen, in words, for tables and records."""

from dataclasses import fields
from typing import Any

from lookahead.config import SamplingConfig


def describe(sampling: SamplingConfig) -> str:
    """All that is not as it is by default; the seed where it matters."""
    parts = [] if sampling.temperature else ["greedy"]
    for field in fields(sampling):
        value, is_seed = getattr(sampling, field.name), field.name == "seed"
        is_given = value not in (field.default, None)
        if sampling.temperature if is_seed else is_given:
            parts.append(f"{field.name.replace('_', ' ')} {_written(value)}")
    return ", ".join(parts)


def _written(value: Any) -> str:
    """A number, ids, or pairs of an id and its bias."""
    if not isinstance(value, tuple):
        return str(value)
    return " ".join(
        "=".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value
    )
