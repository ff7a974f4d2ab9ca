"""Rotation and cache write against the formula in float64; nothing else of the cache may change."""

import re
from typing import Any

import pytest
import torch

from lookahead.kernels.rope_write import IMPLEMENTATIONS, rope_write

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# query heads, key/value heads, head_dim
SHAPES = ((1, 1, 2), (4, 4, 8), (9, 3, 64), (8, 1, 80), (6, 2, 96), (8, 2, 128))
BATCH, ROWS, CAPACITY, ROW_START, NUM_POSITIONS = 2, 5, 19, 11, 40
POISON = float("nan")


def make(shape: tuple[int, int, int], dtype: torch.dtype, rows: int = ROWS) -> dict[str, Any]:
    """Arguments with tables of unrelated numbers, so that each element of each table counts, and
    positions in no order, some of them twice."""
    num_q_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(rows + head_dim)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cache = torch.full((2, BATCH, num_kv_heads, CAPACITY, head_dim), POISON, dtype=dtype)
    positions = torch.randint(NUM_POSITIONS, (BATCH, rows), generator=generator)
    positions[:, 0] = torch.tensor([0, NUM_POSITIONS - 1])
    positions[:, -1] = positions[:, 0]
    return {
        "qkv": draw(BATCH, rows, num_q_heads + 2 * num_kv_heads, head_dim).to(dtype),
        "cos": draw(NUM_POSITIONS, head_dim // 2).to(wide),
        "sin": draw(NUM_POSITIONS, head_dim // 2).to(wide),
        "positions": positions,
        "k_cache": cache[0],
        "v_cache": cache[1],
        "row_start": ROW_START,
    }


def rotated(arguments: dict[str, Any]) -> torch.Tensor:
    """All heads [B, T, heads, head_dim], each pair of elements turned, in float64."""
    qkv, half = arguments["qkv"].double(), arguments["qkv"].shape[-1] // 2
    out = torch.empty_like(qkv)
    for sequence, row, pair in torch.cartesian_prod(
        torch.arange(BATCH), torch.arange(qkv.shape[1]), torch.arange(half)
    ).tolist():
        position = arguments["positions"][sequence, row]
        cos = arguments["cos"][position, pair].double()
        sin = arguments["sin"][position, pair].double()
        first, second = qkv[sequence, row, :, pair], qkv[sequence, row, :, pair + half]
        out[sequence, row, :, pair] = first * cos - second * sin
        out[sequence, row, :, pair + half] = first * sin + second * cos
    return out


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    kind = BITS[first.element_size()]
    return torch.equal(first.contiguous().view(kind), second.contiguous().view(kind))


@pytest.fixture(params=["torch", "numba"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-7)])
def test_queries_and_keys_are_turned_and_values_copied(shape, dtype, tolerance, implementation):
    arguments = make(shape, dtype)
    num_q_heads, num_kv_heads, head_dim = shape
    queries = rope_write(**arguments, implementation=implementation)
    assert queries.shape == (BATCH, ROWS, num_q_heads, head_dim)
    assert queries.dtype == dtype
    expected = rotated(arguments)
    written = slice(ROW_START, ROW_START + ROWS)
    keys = arguments["k_cache"][:, :, written].transpose(1, 2)
    values = arguments["v_cache"][:, :, written].transpose(1, 2)
    # the two products may cancel: the error is one of their size, not of the result's
    allowed = tolerance * expected.abs().max()
    first_key, first_value = num_q_heads, num_q_heads + num_kv_heads
    torch.testing.assert_close(
        queries.double(), expected[:, :, :first_key], rtol=tolerance, atol=allowed
    )
    torch.testing.assert_close(
        keys.double(), expected[:, :, first_key:first_value], rtol=tolerance, atol=allowed
    )
    assert same_bits(values, arguments["qkv"][:, :, first_value:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_half_precision_is_rounded_once(shape, dtype, implementation):
    arguments = make(shape, dtype)
    wide = {name: arguments[name].float() for name in ("qkv", "k_cache", "v_cache")}
    expected = rope_write(**{**arguments, **wide}, implementation=implementation)
    queries = rope_write(**arguments, implementation=implementation)
    assert queries.dtype == dtype
    assert torch.equal(queries, expected.to(dtype))
    written = slice(ROW_START, ROW_START + ROWS)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name][:, :, written], wide[name][:, :, written].to(dtype))


@pytest.mark.parametrize("row_start", [0, 7, CAPACITY - ROWS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_rows_of_this_step_are_written(dtype, row_start, implementation):
    arguments = {**make((6, 2, 8), dtype), "row_start": row_start}
    before = {name: arguments[name].clone() for name in ("qkv", "cos", "sin", "positions")}
    poison = arguments["k_cache"].clone()
    rope_write(**arguments, implementation=implementation)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        assert cache[:, :, row_start : row_start + ROWS].isfinite().all()
        for rest in (slice(0, row_start), slice(row_start + ROWS, CAPACITY)):
            assert same_bits(cache[:, :, rest], poison[:, :, rest])
    for name, copy in before.items():
        assert torch.equal(arguments[name], copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype, implementation):
    together = make((9, 3, 64), dtype)
    queries = rope_write(**together, implementation=implementation)
    for rows in ([0], [4], [3, 1], [4, 3, 2, 1, 0]):
        alone = make((9, 3, 64), dtype)
        alone["qkv"], alone["positions"] = alone["qkv"][:, rows], alone["positions"][:, rows]
        assert torch.equal(rope_write(**alone, implementation=implementation), queries[:, rows])
        for name in ("k_cache", "v_cache"):
            written = alone[name][:, :, ROW_START : ROW_START + len(rows)]
            assert torch.equal(written, together[name][:, :, [ROW_START + row for row in rows]])


def test_position_0_turns_nothing_and_a_quarter_turn_swaps(implementation):
    arguments = make((2, 1, 4), torch.float32, rows=2)
    arguments["cos"] = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    arguments["sin"] = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    arguments["positions"] = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    arguments["qkv"][:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    queries = rope_write(**arguments, implementation=implementation)
    still, turned = [1.0, 2.0, 3.0, 4.0], [-3.0, 2.0, 1.0, 4.0]
    assert queries[:, :, 1].tolist() == [[still, turned], [turned, still]]
    keys = arguments["k_cache"][:, 0, ROW_START : ROW_START + 2]
    assert keys.tolist() == [[still, turned], [turned, still]]


CACHE = make((6, 2, 8), torch.float32)["k_cache"]
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("qkv", torch.zeros(5, 10, 8), "[B, T, num_q_heads + 2 * num_kv_heads, head_dim], got shape"),
    ("qkv", torch.ones(2, 5, 10, 8).long(), "a floating-point tensor, got torch.int64"),
    ("qkv", torch.zeros(2, 5, 4, 8), "more than 4 heads for 2 key/value heads, got 4"),
    ("cos", torch.zeros(40, 8), "shape [40, 4], got [40, 8]"),
    ("sin", torch.zeros(39, 4), "shape [40, 4], got [39, 4]"),
    ("cos", torch.zeros(40, 4).double(), "torch.float32, got torch.float64"),
    ("sin", torch.zeros(40, 4).half(), "torch.float32, got torch.float16"),
    ("positions", torch.zeros(2, 4).int(), "shape [2, 5], got [2, 4]"),
    ("positions", torch.zeros(2, 5), "torch.int32 or torch.int64, got torch.float32"),
    ("k_cache", CACHE[0], "[B, num_kv_heads, C, head_dim], got shape [2, 19, 8]"),
    ("k_cache", CACHE[:1], "shape [2, 2, 19, 8], got [1, 2, 19, 8]"),
    ("v_cache", CACHE[:, :1], "shape [2, 2, 19, 8], got [2, 1, 19, 8]"),
    ("v_cache", CACHE.double(), "torch.float32, got torch.float64"),
    ("v_cache", CACHE.to("meta"), "a tensor on cpu, got one on meta"),
    ("qkv", torch.zeros(2, 5, 10, 15), "an even head_dim, got 15"),
    ("cos", torch.zeros(0, 4), "a tensor that holds elements, got shape [0, 4]"),
    ("cos", torch.tensor(1.0), "[P, head_dim / 2], got shape []"),
    ("positions", torch.full((2, 5), 40), "0..39, got [[40, 40"),
    ("positions", torch.full((2, 5), -1), "0..39, got [[-1, -1"),
    ("row_start", -1, "0..14 for 5 rows in a cache of 19, got -1"),
    ("row_start", 15, "0..14 for 5 rows in a cache of 19, got 15"),
    ("implementation", "cuda", f"one of {sorted(IMPLEMENTATIONS)}, got 'cuda'"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_expected_and_got(name, value, expected):
    arguments = make((6, 2, 8), torch.float32)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: expected {expected}')}"):
        rope_write(**{**arguments, name: value})
    assert arguments["k_cache"].isnan().all()
    assert arguments["v_cache"].isnan().all()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("head", "name"), [(9 + 1, "k_cache"), (9 + 3 + 1, "v_cache")])
def test_a_row_that_is_not_finite_spoils_itself_alone(head, name, value, implementation):
    """Its queries become NaN; what it stores is finite."""
    plain, spoiled = make((9, 3, 64), torch.float16), make((9, 3, 64), torch.float16)
    spoiled["qkv"][1, 2, head, [3, 63]] = value
    queries, others = (
        rope_write(**arguments, implementation=implementation) for arguments in (spoiled, plain)
    )
    assert queries[1, 2].isnan().all()
    others[1, 2] = queries[1, 2]
    assert same_bits(queries, others)
    place = (1, 1, ROW_START + 2)
    changed = spoiled[name][place] != plain[name][place]
    assert changed[[3, 63]].all()
    assert not spoiled[name][place][changed].any()
    assert changed.sum() == (4 if name == "k_cache" else 2)  # a key's elements turn in pairs
    for cache in ("k_cache", "v_cache"):
        spoiled[cache][place] = plain[cache][place]
        assert same_bits(spoiled[cache], plain[cache])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_finite_rows_are_finite_however_large_their_sums(implementation):
    arguments = make((8, 8, 128), torch.float16)
    arguments["qkv"].fill_(70.0)
    arguments["cos"].fill_(1.0)
    arguments["sin"].fill_(0.0)
    assert (rope_write(**arguments, implementation=implementation) == 70.0).all()
