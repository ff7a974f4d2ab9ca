"""The smaller Triton kernels through the interpreter, against their specifications in torch.

bfloat16 is left to machines with a GPU: the interpreter rounds it wrongly.
"""

import pytest
import torch

from lookahead.kernels.rms_norm import add_rms_norm, rms_norm
from lookahead.kernels.rope_write import rope_write
from lookahead.kernels.silu_mul import silu_mul

pytest.importorskip("triton", reason="Triton is not available for this platform")

DTYPES = (torch.float32, torch.float16)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expect_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums, so in 16 bits up to one unit in the last place."""
    assert actual.dtype == expected.dtype
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 576])
def test_rms_norm(hidden, dtype):
    x, residual, weight = (
        draw(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate([(2, 3, hidden), (2, 3, hidden), (hidden,)])
    )
    expect_close(rms_norm(x, weight, 1e-5, "triton"), rms_norm(x, weight, 1e-5))
    normed, total = add_rms_norm(x, residual, weight, 1e-5, "triton")
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    expect_close(normed, expected)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, "triton"))  # of the rounded sum
    for row in range(3):  # a row does not depend on the others
        assert torch.equal(rms_norm(x[:1, row], weight, 1e-5, "triton")[0], _row(x, weight, row))


def _row(x: torch.Tensor, weight: torch.Tensor, row: int) -> torch.Tensor:
    return rms_norm(x, weight, 1e-5, "triton")[0, row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 172, 1536])
def test_silu_mul(intermediate, dtype):
    gate_up = (4 * draw(2, 3, 2 * intermediate)).to(dtype)
    together = silu_mul(gate_up, "triton")
    expect_close(together, silu_mul(gate_up))
    for row in range(3):  # a row does not depend on the others
        assert torch.equal(silu_mul(gate_up[1:, row], "triton"), together[1:, row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 80)])
def test_rope_write(num_q_heads, num_kv_heads, head_dim, dtype):
    qkv = draw(2, 5, num_q_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = draw(50, head_dim // 2, seed=1)
    positions = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(2))
    results = []
    for implementation in ("triton", "torch"):
        caches = [torch.full((2, num_kv_heads, 20, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        queries = rope_write(
            qkv,
            angles.cos(),
            angles.sin(),
            positions.int(),
            *caches,
            row_start=12,
            implementation=implementation,
        )
        results.append((queries, *caches))
    for actual, expected in zip(*results, strict=True):
        expect_close(actual, expected)
        assert actual.shape == expected.shape
    assert torch.equal(results[0][2], results[1][2])  # values are copied


def test_a_rotated_row_depends_on_itself_alone():
    """Alone, in another place of another step, or beside others: the same query, key and value."""
    qkv = draw(2, 5, 7, 80).to(torch.float16)
    angles = draw(50, 40, seed=1)
    positions = torch.tensor([[9, 3, 30, 49, 0], [1, 1, 2, 3, 17]], dtype=torch.int32)

    def written(
        qkv: torch.Tensor, positions: torch.Tensor, row_start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        caches = [torch.zeros(len(qkv), 2, 20, 80, dtype=torch.float16) for _ in range(2)]
        tables = (angles.cos(), angles.sin())
        queries = rope_write(
            qkv, *tables, positions, *caches, row_start=row_start, implementation="triton"
        )
        rows = slice(row_start, row_start + qkv.shape[1])
        return queries, *(cache[:, :, rows].transpose(1, 2) for cache in caches)

    together = written(qkv, positions, 15)
    for sequence in range(2):
        for row in range(5):
            place = (slice(sequence, sequence + 1), slice(row, row + 1))
            for one, all_rows in zip(
                written(qkv[place], positions[place], 4), together, strict=True
            ):
                assert torch.equal(one, all_rows[place])


WIDE = torch.zeros(2, 2, 20, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_cache", WIDE[..., ::2]),
        ("v_cache", WIDE[:, :, :, 8:]),
        ("cos", torch.zeros(4, 50).T),
        ("sin", torch.zeros(1, 4).expand(50, 4)),
    ],
)
def test_gaps_in_what_is_addressed_are_refused(name, change):
    arguments = {
        "qkv": torch.zeros(2, 5, 7, 8),
        "cos": torch.zeros(50, 4),
        "sin": torch.zeros(50, 4),
        "positions": torch.zeros(2, 5, dtype=torch.int32),
        "k_cache": torch.zeros(2, 2, 20, 8),
        "v_cache": torch.zeros(2, 2, 20, 8),
    }
    with pytest.raises(ValueError, match=f"{name}: expected a contiguous tensor, got strides"):
        rope_write(**arguments | {name: change}, row_start=0, implementation="triton")


def test_what_the_kernels_cannot_take_is_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight: expected a contiguous tensor"):
        rms_norm(x, torch.ones(16)[::2], 1e-5, "triton")
    for call in (
        lambda: rms_norm(x.double(), torch.ones(8).double(), 1e-5, "triton"),
        lambda: silu_mul(x.double(), "triton"),
    ):
        with pytest.raises(ValueError, match="expected float16, bfloat16 or float32"):
            call()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.ones(2, 8).int(), "a floating-point tensor"),
        (torch.tensor(1.0), "got shape \\[\\]"),
        (torch.ones(2, 0), "holds elements"),
        ([1.0, 2.0], "a tensor, got list"),
    ],
)
def test_rows_that_are_none_are_refused(x, expected, implementation):
    weight = torch.ones(8)
    for call in (
        lambda: rms_norm(x, weight, 1e-5, implementation),
        lambda: add_rms_norm(x, x, weight, 1e-5, implementation),
        lambda: silu_mul(x, implementation),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
