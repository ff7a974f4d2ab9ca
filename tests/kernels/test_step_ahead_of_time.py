"""What a step launches beside the forward pass, built for GPUs that are not here."""

from collections import Counter

import pytest
from ahead_of_time_builds import builds_of

pytest.importorskip("triton", reason="Triton is not available for this platform")


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "gfx942"])
def builds(request: pytest.FixtureRequest) -> list[dict]:
    return builds_of("ahead_of_time_steps.py", request.param)


def test_every_launch_builds(builds):
    """Four shapes of a step, two of them with a pool, each with a prompt; and commits in three element
    types, of four head sizes, of counts in 32 and 64 bits."""
    assert Counter(build["kernel"] for build in builds) == {
        "judge_sequences": 4,
        "insert_ngrams": 4,
        "advance_sequences": 4,
        "copy_rows": 24,
    }


def test_nothing_spills(builds):
    assert [build for build in builds if build["spills"]] == []


def test_where_a_barrier_stands_there_is_one_warp(builds):
    """It costs next to nothing there; commits have none, and move more."""
    warps = {build["kernel"]: build["warps"] for build in builds}
    assert warps == {
        "judge_sequences": 1,
        "insert_ngrams": 1,
        "advance_sequences": 1,
        "copy_rows": 4,
    }
