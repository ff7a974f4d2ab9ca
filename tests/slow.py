"""Parameters of which `make test` takes some and `make test-all` takes all."""

from collections.abc import Collection, Iterable

import pytest


def slow_unless(kept: Collection[object], values: Iterable[object]) -> list[object]:
    """The values, those that are not among `kept` marked as slow."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
