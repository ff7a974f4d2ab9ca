"""SiLU(gate) x up against its formula in float64."""

import re

import pytest
import torch

from lookahead.kernels.silu_mul import silu_mul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERMEDIATE = (1, 5, 32, 1000, 1536)


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(shape, generator=generator, dtype=torch.float64)


def formula(gate_up: torch.Tensor) -> torch.Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up.double()[..., :half], gate_up.double()[..., half:]
    return gate / (1 + (-gate).exp()) * up


@pytest.fixture(params=["torch", "numba"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_float32_and_float64_are_the_formula(intermediate, implementation):
    gate_up = draw(0, 2, 9, 2 * intermediate)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 5e-7)):
        given = gate_up.to(dtype)
        actual = silu_mul(given, implementation)
        assert actual.dtype == dtype
        assert actual.shape == (2, 9, intermediate)
        torch.testing.assert_close(actual.double(), formula(given), rtol=tolerance, atol=0)
        assert torch.equal(given, gate_up.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_half_precision_is_rounded_once(intermediate, dtype, implementation):
    gate_up = draw(1, 3, 8, 2 * intermediate).to(dtype)
    actual = silu_mul(gate_up, implementation)
    assert actual.dtype == dtype
    assert torch.equal(actual, silu_mul(gate_up.float(), implementation).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_far_gates(dtype, implementation):
    gates, ups = [-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], [3.0, 2.0, 5.0, 5.0, -2.0, 0.5]
    actual = silu_mul(torch.tensor([gates + ups], dtype=dtype), implementation)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, -200.0, 5000.0]], dtype=dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-40)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_a_row_does_not_depend_on_the_others(intermediate, dtype, implementation):
    gate_up = draw(2, 61, 2 * intermediate).to(dtype)
    together = silu_mul(gate_up, implementation)
    for rows in ([0], [60], [20, 3], list(range(5, 22)), list(reversed(range(61)))):
        assert torch.equal(silu_mul(gate_up[rows], implementation), together[rows])
    gate_up[1:] = float("nan")
    assert torch.equal(silu_mul(gate_up, implementation)[0], together[0])


def test_bad_arguments_are_named_with_expected_and_got():
    message = "gate_up: expected an even last dimension, got shape [2, 5]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        silu_mul(torch.ones(2, 5))
    message = "implementation: expected one of ['numba', 'torch', 'triton'], got 'cuda'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        silu_mul(torch.ones(2, 4), "cuda")
