"""The attention kernels built for GPUs that are not here, for each tuning entry."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from slow import slow_unless

pytest.importorskip("triton", reason="Triton is not available for this platform")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import ahead_of_time

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}


@pytest.fixture(scope="module", params=slow_unless(("sm_90", "gfx942"), ARCHITECTURES))
def builds(request: pytest.FixtureRequest) -> list[dict]:
    return list(ahead_of_time.build_all(list(ahead_of_time.table_requests(request.param))))


def test_every_entry_builds(builds):
    """Three element types, three head sizes, three kinds of layout, two kernels."""
    assert len(builds) == 54
    assert Counter(build["element"] for build in builds) == {"bf16": 18, "fp16": 18, "fp32": 18}


def test_nothing_spills(builds):
    assert [build for build in builds if build["spills"]] == []


def test_nothing_spills_for_odd_heads(builds):
    requests = list(ahead_of_time.odd_requests(builds[0]["architecture"]))
    assert [build for build in ahead_of_time.build_all(requests) if build["spills"]] == []


def test_shared_memory_is_within_the_limit(builds):
    assert max(build["shared"] for build in builds) <= SHARED_LIMIT[builds[0]["architecture"]]


def test_16_bit_products_use_the_matrix_unit(builds):
    tiles = [build for build in builds if not build["merge"] and build["element"] != "fp32"]
    assert all(build["matrix"] > 0 for build in tiles)


def test_float32_is_multiplied_in_full(builds):
    assert not any(build["tf32"] for build in builds)


def test_keys_and_values_are_loaded_asynchronously_16_bytes_at_a_time(builds):
    if builds[0]["architecture"].startswith("gfx"):
        pytest.skip("asynchronous copies are NVIDIA's")
    for build in builds:
        if not build["merge"]:
            assert build["async_16"] > 0, build
            # Smaller ones only fetch the path table's row numbers.
            assert build["table"] or build["async_less"] == 0, build


@pytest.mark.parametrize("layout", [(0, 2, 0), (5, 4, 5), (0, 5, 8)], ids=str)
def test_every_kind_of_step_runs_the_same_instructions(builds, layout):
    """Rows of autoregressive decoding, of prompt chunks and of every (W, N, G) have one binary: their
    launches differ in run-time numbers, and no number chooses between binaries."""
    architecture = builds[0]["architecture"]
    requests = [
        replace(request, layout=layout)
        for request in ahead_of_time.table_requests(architecture)
        if not request.table
    ]
    others = list(ahead_of_time.build_all(requests))
    expected = [build for build in builds if not build["table"]]
    assert [build["digest"] for build in others] == [build["digest"] for build in expected]
    assert not any(build["specialised"] for build in (*others, *builds))


def test_the_closed_form_loads_nothing_but_q_k_v_and_two_counters(builds):
    for build in builds:
        if not build["merge"] and not build["table"]:
            assert build["loads"] == 5, build
