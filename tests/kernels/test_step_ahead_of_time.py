"""What a step launches beside the forward pass, built for GPUs that are not here."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not available for this platform")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "gfx942"])
def builds(request: pytest.FixtureRequest) -> list[dict]:
    """By a process of its own, for this one may hold the kernels as the interpreter's functions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCH.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, BENCH / "ahead_of_time_steps.py", request.param],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


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
