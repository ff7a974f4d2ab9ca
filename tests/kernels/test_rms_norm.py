"""RMSNorm, alone and behind a residual, against its formula in float64."""

import re

import pytest
import torch

from lookahead.kernels.rms_norm import (
    ADD_IMPLEMENTATIONS,
    add_rms_norm,
    rms_norm,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN = (1, 7, 64, 576, 1000, 4096)
EPS = 1e-5


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Rows of very different size, as in a residual stream."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 1:
        return 1 + values / 4
    return values * torch.logspace(-4, 3, shape[-2], dtype=torch.float64).unsqueeze(-1)


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def both(x: torch.Tensor, weight: torch.Tensor, eps: float, implementation: str) -> torch.Tensor:
    """What `rms_norm` and, with a residual of zeros, `add_rms_norm` say; they must agree."""
    normed = rms_norm(x, weight, eps, implementation)
    if implementation in ADD_IMPLEMENTATIONS:
        again, total = add_rms_norm(x, torch.zeros_like(x), weight, eps, implementation)
        assert torch.equal(again, normed)
        assert torch.equal(total, x)
    return normed


@pytest.fixture(params=["torch", "numba"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("hidden", HIDDEN)
def test_float32_and_float64_are_the_formula(hidden, implementation):
    x, weight = draw(0, 2, 9, hidden), draw(1, hidden)
    exact = formula(x, weight, EPS)
    torch.testing.assert_close(both(x, weight, EPS, implementation), exact, rtol=1e-14, atol=0)
    x, weight = x.float(), weight.float()
    actual = both(x, weight, EPS, implementation)
    assert actual.dtype == torch.float32
    exact = formula(x, weight, EPS)
    torch.testing.assert_close(actual.double(), exact, rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_half_precision_is_rounded_once(hidden, dtype, implementation):
    x, weight = draw(2, 3, 8, hidden).to(dtype), draw(3, hidden).to(dtype)
    wide = rms_norm(x.float(), weight.float(), EPS, implementation)
    actual = both(x, weight, EPS, implementation)
    assert actual.dtype == dtype
    assert torch.equal(actual, wide.to(dtype))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_eps_is_added_to_the_mean_square(eps, implementation):
    x = torch.tensor([[0.0, 0.0], [3e-3, -4e-3], [3.0, -4.0]], dtype=torch.float64)
    weight = torch.tensor([2.0, 10.0], dtype=torch.float64)
    mean_squares = torch.tensor([[0.0], [12.5e-6], [12.5]], dtype=torch.float64)
    expected = x * weight / (mean_squares + eps).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps, implementation), expected)
    assert not rms_norm(x, weight, eps, implementation)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_half_values_do_not_overflow(dtype, implementation):
    x = torch.full((2, 64), 30000.0, dtype=dtype)
    weight = torch.ones(64, dtype=dtype)
    assert torch.equal(both(x, weight, EPS, implementation), torch.ones_like(x))


@pytest.mark.parametrize("implementation", ["torch"])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_the_rounded_sum_is_kept_and_normalised(dtype, implementation):
    x, residual = draw(4, 2, 5, 96).to(dtype), draw(5, 2, 5, 96).to(dtype)
    weight = draw(6, 96).to(dtype)
    inputs = [tensor.clone() for tensor in (x, residual, weight)]
    normed, total = add_rms_norm(x, residual, weight, EPS, implementation)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert torch.equal(normed, rms_norm(total, weight, EPS, "torch"))
    for tensor, copy in zip((x, residual, weight), inputs, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_row_does_not_depend_on_the_others(hidden, dtype, implementation):
    x, weight = draw(7, 37, hidden).to(dtype), draw(8, hidden).to(dtype)
    together = both(x, weight, EPS, implementation)
    for rows in ([0], [36], [20, 3], list(range(5, 22)), list(reversed(range(37)))):
        assert torch.equal(both(x[rows], weight, EPS, implementation), together[rows])
    x[1:] = float("nan")
    assert torch.equal(rms_norm(x, weight, EPS, implementation)[0], together[0])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(5), "weight: expected shape [4], got [5]"),
        (torch.ones(1, 4), "weight: expected shape [4], got [1, 4]"),
        (torch.ones(4).half(), "weight: expected torch.float32, got torch.float16"),
        (torch.ones(4, device="meta"), "weight: expected a tensor on cpu, got one on meta"),
    ],
)
def test_a_weight_that_does_not_fit(weight, message):
    x = torch.ones(2, 4)
    pattern = f"^{re.escape(message)}$"
    with pytest.raises(ValueError, match=pattern):
        rms_norm(x, weight, EPS)
    with pytest.raises(ValueError, match=pattern):
        add_rms_norm(x, x, weight, EPS)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.ones(1, 4), "residual: expected shape [2, 4], got [1, 4]"),
        (torch.ones(2, 4).bfloat16(), "residual: expected torch.float32, got torch.bfloat16"),
    ],
)
def test_a_residual_that_does_not_fit(residual, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        add_rms_norm(torch.ones(2, 4), residual, torch.ones(4), EPS)


def test_there_is_no_fallback():
    message = re.escape("implementation: expected one of ['numba', 'torch', 'triton'], got 'cuda'")
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=message):
        rms_norm(x, x[0], EPS, "cuda")
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, x, x[0], EPS, "cuda")
