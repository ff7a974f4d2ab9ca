"""The compiled forward pass: what it refuses, and what one request leaves behind for the next."""

import signal
import threading

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from tiny_models import build_engine, build_llama

from lookahead.errors import InputError
from lookahead.kernels import checks, simd_types
from lookahead.layout import LookaheadLayout
from lookahead.models import llama_numba

CPU = torch.device("cpu")


def tiny(**fields):
    return random_checkpoint(0, vocab_size=11, **fields)


@pytest.mark.parametrize("hidden_size", [16, 20, 34])
def test_a_request_that_failed_leaves_nothing_behind(hidden_size):
    """Where a row is filled up, too: what filled it up took part in the norm."""
    tensors, fields = tiny(hidden_size=hidden_size, head_dim=8)
    embedding = tensors["model.embed_tokens.weight"]
    tensors = tensors | {"lm_head.weight": embedding.clone()}
    fields = fields | {"tie_word_embeddings": False}
    for dtype in (torch.bfloat16, torch.float32):
        sound = build_engine(build_llama((tensors, fields), dtype))
        expected = sound.generate([1, 2, 3, 4], max_new_tokens=5, ignore_eos=True).token_ids
        spoiled = next(token for token in range(5, 11) if token not in expected)
        infinite = embedding.clone()
        infinite[spoiled] = float("inf")
        changed = tensors | {"model.embed_tokens.weight": infinite}
        engine = build_engine(build_llama((changed, fields), dtype))
        with pytest.raises(InputError, match="not finite after 0 new tokens"):
            engine.generate([1, 3, spoiled], max_new_tokens=5)
        after = engine.generate([1, 2, 3, 4], max_new_tokens=5, ignore_eos=True)
        assert after.token_ids == expected


@pytest.mark.parametrize(
    ("token", "position", "expected"),
    [
        (11, 0, "tokens: expected 0..10, got [[11]]"),
        (-1, 0, "tokens: expected 0..10, got [[-1]]"),
        (0, 512, "positions: expected 0..511, got [[512]]"),
    ],
)
def test_rows_outside_the_tables_are_refused(token, position, expected):
    model = build_llama(tiny(), torch.float32)
    row, one = LookaheadLayout(0, 2, 0), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected") as error:
        model.forward(
            torch.tensor([[token]]), torch.tensor([[position]]), row, model.new_cache(1, 8, 1),
            0 * one, one,
        )  # fmt: skip
    assert str(error.value) == expected
    layout, rows = LookaheadLayout(2, 3, 2), torch.zeros((1, 8), dtype=torch.int64)
    with pytest.raises(ValueError, match="cache: expected room for 8 rows, got 1"):
        model.forward(rows, rows, layout, model.new_cache(1, 8, 1), 0 * one, 8 * one)


def test_two_engines_of_one_model_in_two_threads():
    """Their steps come one after the other; a larger step makes new buffers meanwhile."""
    model = build_llama(tiny(), torch.float32)
    expected = build_engine(model).generate([1, 2, 3], max_new_tokens=40).token_ids
    found = []

    def run():
        for _ in range(5):
            found.append(build_engine(model).generate([1, 2, 3], max_new_tokens=40).token_ids)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [expected] * 15


def test_exactness_is_not_claimed_where_the_trial_fails(monkeypatch):
    product = llama_numba.product

    def by_count(team, x, packed, y):
        product(team, x, packed, y)
        y *= 1 + 2**-7 * (x.shape[0] % 3)

    monkeypatch.setattr(llama_numba, "product", by_count)
    model = build_llama(tiny(), torch.float32)
    reason = "a verified row had other bits than the autoregressive row on a trial"
    assert (model.inexact_reason, model.row_block) == (reason, None)


def test_functions_that_cannot_be_kept_on_disk_are_compiled_all_the_same(monkeypatch):
    njit = simd_types.njit

    def without_a_folder(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(simd_types, "njit", without_a_folder)

    def double(number):
        return 2 * number

    assert simd_types.entry(double)(21) == 42


def test_processors_and_devices_that_it_cannot_run_on(monkeypatch):
    with pytest.raises(ValueError, match="expected torch or triton on cuda, got numba"):
        checks.check_can_run("numba", torch.device("cuda"), torch.float32)
    checks.check_can_run("numba", CPU, torch.float16)
    monkeypatch.setattr("lookahead.kernels.tile.HAS_FLOAT16", False)
    checks._import_from.cache_clear()
    with pytest.raises(ValueError, match="no instructions for it"):
        checks.check_can_run("numba", CPU, torch.float16)
    checks._import_from.cache_clear()


def test_a_signal_during_a_step_ends_it_and_no_more():
    """A handler that raises, as that of Ctrl-C does, at some moment of a request."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    engine = build_engine(build_llama(tiny(), torch.bfloat16))
    expected = engine.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True).token_ids
    handler = signal.getsignal(signal.SIGALRM)
    interrupted = 0

    def interrupt(*_):
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGALRM, interrupt)
        for microseconds in range(200, 6200, 150):
            try:
                signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
                engine.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            result = engine.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True)
            assert result.token_ids == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        torch.set_num_threads(before)
    assert interrupted
