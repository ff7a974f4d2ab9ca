"""What only a GPU can show of `draw`: bfloat16, rows side by side, and one recorded graph for all
warpers."""

import math
import random

import pytest
import torch
from draw_cases import check_drawn, make_histories, make_warpers, one_row

from lookahead.kernels.draw import draw
from lookahead.kernels.warpers import Histories, Warpers

pytest.importorskip("triton", reason="Triton is not available for this platform")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use"),
]

CUDA = torch.device("cuda")
SETS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.2, "frequency": 0.1},
    {"temperature": 1.6, "top_k": 40},
    {"top_p": 0.9},
    {"temperature": 4.0, "top_p": 0.999},  # more than the first tokens that are looked at
    {"temperature": 4.0, "top_k": 9000},
    {"min_p": 0.02},
    {"presence": 0.8, "frequency": 0.6, "bias": {3: 2.0, 17: -math.inf}, "min_new": 100},
    {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.02, "repetition": 1.1},
]


def on_gpu(given: Histories | Warpers):
    """The same numbers on the GPU."""
    moved = (each.to(CUDA) if isinstance(each, torch.Tensor) else each for each in given)
    return type(given)(*moved)


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(vocab_size: int) -> tuple[Histories, torch.Tensor]:
    """Three sequences of a row 0, a window's row and two candidates of three tokens; and all rows."""
    draws = random.Random(vocab_size)
    texts = [[draws.randrange(vocab_size) for _ in range(size)] for size in (5, 900, 3000)]
    tokens = [[draws.randrange(vocab_size) for _ in range(8)] for _ in texts]
    histories = make_histories(
        texts, tokens, [-1, 0, 0, 2, 3, 0, 5, 6], first_candidate=2, prompt_lengths=[3, 100, 3000],
        samples=[0, 1, 2], eos_ids=[[1, 2], [3, -1], [-1, -1]],
    )  # fmt: skip
    return histories, torch.arange(24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("values", SETS, ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 49152, 128256])
def test_a_draw_is_where_its_number_stands_in_the_cumulative_sum(vocab_size, values, dtype):
    for seed in range(3):
        logits = random_logits(seed, vocab_size).to(dtype)
        text = logits.float().topk(20).indices.tolist()
        eos = [int(logits.argmax()), -1]
        histories = one_row(text, prompt_lengths=[10], samples=[seed], eos_ids=[eos])
        warpers = make_warpers(vocab_size, seed=seed, **values)
        row = torch.zeros(1, dtype=torch.int64, device=CUDA)
        token, possible = draw(
            logits[None].to(CUDA), row, row, on_gpu(histories), on_gpu(warpers), "triton"
        )
        assert bool(possible)
        check_drawn(int(token), logits, text, warpers, seed, 10, eos[:1])


@pytest.mark.parametrize("values", SETS, ids=str)
def test_most_tokens_are_the_specifications(values):
    """All but those whose number falls within the rounding of a sum."""
    histories, rows = make_batch(32000)
    logits = random_logits(0, len(rows), 32000).to(torch.bfloat16)
    warpers = make_warpers(32000, seed=1, **values)
    expected, _ = draw(logits, rows, rows, histories, warpers)
    found, possible = draw(
        logits.to(CUDA), rows.to(CUDA), rows.to(CUDA), on_gpu(histories), on_gpu(warpers), "triton"
    )
    assert possible.all()
    assert (found.cpu() != expected).sum() <= 1
    assert found[1::8].tolist() == rows[1::8].tolist(), "the window's rows are not drawn"


@pytest.mark.parametrize("values", SETS, ids=str)
def test_a_row_alone_draws_what_it_draws_among_others(values):
    histories, rows = make_batch(49152)
    histories, rows = on_gpu(histories), rows.to(CUDA)
    warpers = on_gpu(make_warpers(49152, seed=2, **values))
    logits = random_logits(3, len(rows), 49152).to(torch.bfloat16).to(CUDA)
    together, _ = draw(logits, rows, rows, histories, warpers, "triton")
    for place in range(len(rows)):
        one = slice(place, place + 1)
        alone, _ = draw(logits[one], rows[one], rows[one], histories, warpers, "triton")
        assert int(alone) == int(together[place])


def test_a_recorded_graph_serves_all_warpers_and_lengths():
    histories, rows = make_batch(32000)
    histories, rows = on_gpu(histories), rows.to(CUDA)
    logits = random_logits(4, len(rows), 32000).to(CUDA)
    warpers = on_gpu(make_warpers(32000))
    arguments = (logits, rows, rows, histories, warpers, "triton")
    draw(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, _ = draw(*arguments)
    results = set()
    for seed, values in enumerate(SETS):
        for given, other in zip(warpers, make_warpers(32000, seed=seed, **values), strict=True):
            given.copy_(other)
        histories.lengths.sub_(1).clamp_(min=3)
        graph.replay()
        expected, _ = draw(*arguments)
        assert torch.equal(drawn, expected)
        results.add(tuple(drawn.tolist()))
    assert len(results) > len(SETS) // 2
