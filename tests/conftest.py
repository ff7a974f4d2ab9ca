"""No test depends on how fast the machine is, or leaves anything in the user's cache directory."""

from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_checkpoint
from tiny_models import one_thread

from lookahead import engine
from lookahead.step_costs import StepCosts

# Up to 16 rows cost as much as one.
COSTS = StepCosts((1, 16, 32), (1.0, 1.0, 3.0))


@pytest.fixture(autouse=True, scope="session")
def _same_step_costs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(engine, "step_costs", lambda *_: COSTS)
        yield


@pytest.fixture(scope="module", name="one_thread")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint's directory, for the tests of one file."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
