"""What `draw` launches, built for GPUs that are not here."""

from collections import Counter

import pytest
from ahead_of_time_builds import builds_of

pytest.importorskip("triton", reason="Triton is not available for this platform")

DTYPES = {"torch.bfloat16", "torch.float16", "torch.float32"}


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "gfx942"])
def builds(request: pytest.FixtureRequest) -> list[dict]:
    return builds_of("ahead_of_time_draws.py", request.param)


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
