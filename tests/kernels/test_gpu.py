"""What only a GPU can show of the Triton kernels: bfloat16, the matrix unit's order of a sum, and the
machine's own arithmetic in a whole model."""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    DTYPES,
    LAYOUTS,
    Case,
    check_matrix_errors,
    differing_rows,
    make_case,
    same_bits,
)
from oracles.naive_llama import random_checkpoint
from tiny_models import build_engine, build_llama

from lookahead.config import LookaheadConfig
from lookahead.kernels.attn_mask import attend
from lookahead.kernels.rms_norm import add_rms_norm, rms_norm
from lookahead.kernels.rope_write import rope_write
from lookahead.kernels.silu_mul import silu_mul
from lookahead.layout import LookaheadLayout, RowTree

pytest.importorskip("triton", reason="Triton is not available for this platform")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use"),
]

CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 3, 1, 4]


def on_gpu(case: Case) -> Case:
    names = ("q", "k_cache", "v_cache", "lengths", "live_rows")
    return replace(case, **{name: getattr(case, name).to(CUDA) for name in names})


def run(case: Case) -> torch.Tensor:
    """The kernel on the GPU; back on the device of the case."""
    return on_gpu(case).run("triton").to(case.q.device)


# Attention


@pytest.mark.parametrize(
    ("layout", "lengths", "group", "head_dim"),
    [
        ("autoregressive", [0, 1], 1, 8),
        ("autoregressive", [63, 577], 4, 96),
        ("autoregressive", [1100], 8, 128),
        ("5,4,5", [64], 3, 64),
        ("5,4,5", [31, 32, 33], 1, 128),
        ("0,5,8", [37, 65], 1, 80),
        ("3,2,2", [1100], 8, 128),  # three groups of keys
        ("3,2,2", [70], 1, 256),
        ("chunk", [61], 1, 16),
        ("tree", [63], 3, 64),
        ("broad tree", [577], 4, 128),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_numbers(layout, lengths, group, head_dim, dtype):
    case = make_case(LAYOUTS[layout], lengths, group=group, num_kv_heads=1, head_dim=head_dim)
    check_matrix_errors(case.to(dtype), run)


def contract_case(
    shape: tuple[int, int, int], length: int, group: int, head_dim: int, dtype: torch.dtype
) -> Case:
    layout = LookaheadLayout(*shape)
    case = make_case(layout, [length], group=group, num_kv_heads=2, head_dim=head_dim, gap=9)
    return on_gpu(case.to(dtype))


def attend_on_gpu(case: Case) -> torch.Tensor:
    return case.run("triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (4, 128), (3, 64), (8, 128), (1, 80)])
@pytest.mark.parametrize(
    "shape", [(15, 5, 15), (7, 5, 7), (5, 4, 5), (0, 5, 8), (1, 2, 2)], ids=str
)
def test_a_verified_row_is_the_autoregressive_row_to_the_bit(shape, group, head_dim, dtype):
    """At a length within a tile, near the end of a group of keys, and from an empty cache."""
    for length in (1000, 1022, 0):
        case = contract_case(shape, length, group, head_dim, dtype)
        assert differing_rows(case, attend_on_gpu) == 0, length


@pytest.mark.parametrize("group", [1, 4])
def test_at_every_offset_of_a_tile(group):
    shapes = [(5, 4, 3), (0, 5, 2), (15, 5, 1), (1, 2, 2)]
    for offset in range(64):
        case = contract_case(shapes[offset % 4], 1024 + offset, group, 128, torch.bfloat16)
        assert differing_rows(case, attend_on_gpu) == 0, offset


def test_an_ordinary_order_of_keys_differs():
    """The tests above can fail."""
    case = contract_case((5, 4, 5), 1000, 4, 128, torch.bfloat16).to(torch.float32)
    assert differing_rows(case, lambda case: case.run("torch")) > 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_committed_row_is_the_same_in_a_longer_cache_and_a_larger_batch(dtype):
    """What the grid was sized for, and who else is in the batch, changes no bit."""
    case = make_case(LAYOUTS["5,4,5"], [600, 37, 0], group=4, head_dim=128).to(dtype)
    together = run(case)
    for sequence in range(3):
        alone = case.one(sequence)
        assert same_bits(together[sequence : sequence + 1], run(alone))
        caches = {}
        for name in ("k_cache", "v_cache"):
            cache = getattr(alone, name)
            start = case.row_start
            gap = torch.full_like(cache[:, :, :1], float("nan")).expand(-1, -1, 3000, -1)
            caches[name] = torch.cat([cache[:, :, :start], gap, cache[:, :, start:]], dim=2)
        longer = replace(alone, **caches, row_start=case.row_start + 3000)
        assert same_bits(together[sequence : sequence + 1], run(longer))


@pytest.mark.parametrize("shape", [(5, 4, 5), (15, 5, 15), (0, 5, 3)], ids=str)
def test_a_table_of_the_papers_tree_is_its_closed_form_to_the_bit(shape):
    case = contract_case(shape, 577, 4, 128, torch.bfloat16)
    table = replace(case, layout=RowTree(case.layout.parents))
    assert same_bits(attend_on_gpu(case), attend_on_gpu(table))


def test_lengths_are_read_on_the_device():
    """A captured graph gives what another length asks for."""
    case = contract_case((5, 4, 5), 600, 4, 128, torch.bfloat16)
    arguments = (case.q, case.k_cache, case.v_cache, case.lengths, case.layout)
    options = {"row_start": case.row_start, "live_rows": case.live_rows}
    attend(*arguments, **options, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments, **options, implementation="triton")
    for length, live in ((600, 30), (37, 30), (512, 15)):
        case.lengths.fill_(length)
        case.live_rows.fill_(live)
        graph.replay()
        assert same_bits(out, attend_on_gpu(case)), (length, live)


# Companions


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def expect_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums, so in 16 bits up to one unit in the last place."""
    assert actual.dtype == expected.dtype
    tolerance = max(1e-6, torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 64, 576, 4096])
def test_rms_norm(hidden, dtype):
    x, residual, weight = (
        draw(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate([(2, 3, hidden), (2, 3, hidden), (hidden,)])
    )
    normed = rms_norm(x, weight, 1e-5, "triton")
    expect_close(normed, rms_norm(x, weight, 1e-5))
    for row in range(3):  # a row does not depend on the others
        assert same_bits(rms_norm(x[:1, row], weight, 1e-5, "triton")[0], normed[0, row])
    results = (add_rms_norm(x, residual, weight, 1e-5, name) for name in ("triton", "torch"))
    (normed, total), (expected, expected_total) = results
    assert torch.equal(total, expected_total)
    expect_close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("intermediate", [1, 172, 1536])
def test_silu_mul(intermediate, dtype):
    gate_up = (4 * draw(2, 3, 2 * intermediate)).to(dtype)
    expect_close(silu_mul(gate_up, "triton"), silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 80)])
def test_rope_write(num_q_heads, num_kv_heads, head_dim, dtype):
    qkv = draw(2, 5, num_q_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = draw(50, head_dim // 2, seed=1)
    positions = torch.arange(10, device=CUDA, dtype=torch.int32).view(2, 5) * 4
    results = []
    for name in ("triton", "torch"):
        size = (2, num_kv_heads, 20, head_dim)
        caches = [torch.full(size, 7.0, dtype=dtype, device=CUDA) for _ in range(2)]
        tables = (angles.cos(), angles.sin(), positions)
        queries = rope_write(qkv, *tables, *caches, row_start=12, implementation=name)
        results.append((queries, *caches))
    for actual, expected in zip(*results, strict=True):
        # Two products are added, which may cancel: one unit in the last place of a product.
        atol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=atol)
    assert torch.equal(results[0][2], results[1][2])  # values are copied


# A whole model


@pytest.mark.parametrize("mode", ["lookahead", "autoregressive"])
def test_a_tiny_model_writes_what_it_writes_through_torch(mode):
    checkpoint = random_checkpoint(1, vocab_size=8, head_dim=16)
    results = []
    for name in ("triton", "torch"):
        model = build_llama(checkpoint, torch.float32, implementation=name, device=CUDA)
        results.append(
            build_engine(model).generate(
                PROMPT, max_new_tokens=64, mode=mode, lookahead=LookaheadConfig(3, 4, 2)
            )
        )
    assert results[0].token_ids == results[1].token_ids
    assert results[0].steps == results[1].steps
    assert results[0].new_tokens == 64
