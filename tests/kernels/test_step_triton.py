"""A step's bookkeeping in Triton, through the interpreter, against the operations that specify it."""

import pytest
import torch
from slow import slow_unless
from step_pairs import SHAPES, check_not_finite, check_pair, check_prompt_in_parts

from lookahead import step_ref
from lookahead.config import LookaheadConfig
from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.kernels.commit_rows import commit_rows
from lookahead.row_budget import fixed_shapes

pytest.importorskip("triton", reason="Triton is not available for this platform")
step_triton = pytest.importorskip("lookahead.step_triton")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_do_the_same(shape):
    check_pair("triton", shape, range(2), fixed_shape=True)


@pytest.mark.parametrize(
    "shape", slow_unless([(4, 3, 0)], [(5, 4, 5), (0, 5, 3), (4, 3, 0)]), ids=str
)
def test_both_do_the_same_with_the_rows_that_a_budget_leaves(shape):
    step_shapes = fixed_shapes(LookaheadConfig(*shape))
    assert len(step_shapes) == 1 + (shape[0] > 0) * (shape[2] > 0) + 1
    check_pair("triton", shape, range(4), fixed_shape=True, step_shapes=step_shapes)


def test_logits_that_are_not_finite_are_told_only_where_they_are_used():
    check_not_finite("triton")


def start_pools(guesses: int, ngram: int, vocab_size: int) -> list[NgramPool]:
    """Two pools that are full of what has no meaning."""
    pools = [NgramPool(2, vocab_size, guesses, ngram, torch.device("cpu")) for _ in range(2)]
    for pool in pools:
        pool.entries.fill_(-7)
        pool.origins.fill_(-7)
    return pools


@pytest.mark.parametrize(("guesses", "ngram"), [(1, 2), (3, 4), (15, 5), (5, 3)])
@pytest.mark.parametrize("num_tokens", [1, 3, 37, 150])
def test_a_prompts_ngrams(guesses, ngram, num_tokens):
    """Fewer tokens than an n-gram has, and more n-grams than are inserted at once; few keys, so that
    slots overflow and n-grams recur."""
    state = DecodeState(2, 160, 8, 1, torch.device("cpu"))
    draw = torch.Generator().manual_seed(num_tokens)
    state.tokens.copy_(torch.randint(3, state.tokens.shape, generator=draw))
    expected, found = start_pools(guesses, ngram, 3)
    for sequence in (1, 0):
        # As when it is called: the prompt is committed up to its last token.
        state.lengths[sequence] = num_tokens - 1
        step_ref.insert_prompt(state, expected, sequence, num_tokens)
        step_triton.insert_prompt(state, found, sequence, num_tokens)
        assert torch.equal(found.counts, expected.counts)
        is_filled = torch.arange(guesses) < found.counts.unsqueeze(2)
        assert torch.equal(found.entries[is_filled], expected.entries[is_filled])
        assert torch.equal(found.origins[is_filled], expected.origins[is_filled])
        assert (found.entries[~is_filled] == -7).all(), "what is behind a count is not touched"
    assert bool(found.counts.any()) == (num_tokens >= ngram)


def test_a_prompt_of_which_a_part_is_in_the_pool():
    check_prompt_in_parts(step_triton.insert_prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "depth"), [(64, 5), (80, 1), (8, 40)])
def test_rows_are_committed(head_dim, depth, dtype):
    """Some, none and all of a step's rows; more than are copied at once."""
    generator = torch.Generator().manual_seed(depth)
    data = torch.randn(3, 2, 3, 2, 50 + 64, head_dim, generator=generator).to(dtype)
    rows = torch.stack([torch.randperm(64, generator=generator)[:depth] for _ in range(3)])
    counts, lengths = torch.tensor([depth, 0, depth // 2]), torch.tensor([7, 10, 0]).int()
    results = []
    for name in ("torch", "triton"):
        results.append(data.clone())
        commit_rows(results[-1], rows, counts, lengths, row_start=50, implementation=name)
    assert torch.equal(*results)
    assert not torch.equal(results[0], data)


def test_rows_of_one_sequence_of_a_batch_are_committed():
    """A view of the cache: the other sequences keep what they hold."""
    data = torch.randn(2, 2, 3, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    one = torch.ones(1, dtype=torch.int32)
    expected, found = data.clone(), data.clone()
    for name, whole in (("torch", expected), ("triton", found)):
        view = whole[:, :, 1:2]
        rows = torch.tensor([[0, 3, 5]])
        commit_rows(view, rows, 3 * one, 4 * one, row_start=12, implementation=name)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, :, 1, :, 4:7], data[:, :, 1, :, [12, 15, 17]])
    assert torch.equal(found[:, :, [0, 2]], data[:, :, [0, 2]])


def test_gaps_between_rows_are_refused():
    data = torch.zeros(2, 2, 1, 2, 20, 16)[..., ::2]
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="data: expected last strides"):
        commit_rows(data, one.long().view(1, 1), one, one, row_start=12, implementation="triton")


def test_a_planted_mistake_is_found(monkeypatch):
    """The comparison can fail: an origin that is another's."""
    monkeypatch.setattr(step_triton, "OUTPUT", step_triton.PROMPT)
    with pytest.raises(AssertionError):
        check_pair("triton", (5, 4, 5), range(1), fixed_shape=True)
