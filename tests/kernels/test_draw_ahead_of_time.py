"""What `draw` launches, built for GPUs that are not here."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not available for this platform")

BENCH = Path(__file__).resolve().parents[2] / "bench"
DTYPES = {"torch.bfloat16", "torch.float16", "torch.float32"}


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "gfx942"])
def builds(request: pytest.FixtureRequest) -> list[dict]:
    """By a process of its own, for this one may hold the kernels as the interpreter's functions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCH.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, BENCH / "ahead_of_time_draws.py", request.param],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_launch_builds_without_a_spill(builds):
    """Three element types, each in three sizes."""
    kernels = ("count_tokens", "warp_scores", "keep_weights", "pick_tokens")
    assert Counter(build["kernel"] for build in builds) == dict.fromkeys(kernels, 9)
    assert [build for build in builds if build["spills"]] == []


def test_vocabulary_batch_and_text_choose_no_binary(builds):
    """Nor does the type of logits, but for the kernel that reads them."""
    assert {build["dtype"] for build in builds} == {None, *DTYPES}
    binaries = {(build["kernel"], build["dtype"], build["digest"]) for build in builds}
    assert Counter(kernel for kernel, _, _ in binaries) == {
        "count_tokens": 1,
        "warp_scores": len(DTYPES),
        "keep_weights": 1,
        "pick_tokens": 1,
    }
