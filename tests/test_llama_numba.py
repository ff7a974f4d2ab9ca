"""The compiled forward pass: what it refuses, and what one request leaves behind for the next."""

import math
import signal
import threading

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from single_rows import same_bits
from tiny_models import build_engine, build_llama

from lookahead.errors import InputError
from lookahead.kernels import checks, simd_types
from lookahead.layout import LookaheadLayout
from lookahead.models.llama_numba import NumbaForward

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


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_choosing_is_the_forward_pass_the_head_and_the_largest(dtype, num_threads):
    """Sequences of different lengths, rows in any order, vocabularies of few and many vectors."""
    layout = LookaheadLayout(2, 3, 2)
    for vocab_size in (11, 300):
        checkpoint = random_checkpoint(0, vocab_size=vocab_size)
        models = [build_llama(checkpoint, dtype) for _ in range(2)]
        tokens = torch.arange(2 * layout.num_rows).view(2, -1) % 11
        lengths, live = torch.tensor([0, 3]), torch.tensor([6, layout.num_rows])
        positions = lengths.unsqueeze(1) + torch.tensor(layout.depths)
        rows = torch.tensor([13, 0, 5, 8, 15])
        given = []
        for model in models:
            cache = model.new_cache(2, 8, layout.num_rows)
            cache.data.zero_()
            given.append((tokens, positions, layout, cache, lengths, live))
        hidden = models[0].forward(*given[0])
        expected = models[0].logits(hidden.flatten(0, 1)[rows])
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        logits, chosen, finite = models[1].choose(*given[1], rows)
        torch.set_num_threads(before)
        assert same_bits(logits, expected)
        assert chosen.tolist() == expected.max(1).indices.tolist()
        assert finite.all()
        assert same_bits(given[0][3].data, given[1][3].data)


def test_calls_that_are_kept_read_what_their_tensors_hold_then():
    """The same tensors again with other numbers, more rows, another number of threads; a larger call of
    the model in between, which makes new buffers."""
    layout = LookaheadLayout(2, 3, 2)
    model = build_llama(tiny(), torch.bfloat16)
    tokens = torch.zeros((1, layout.num_rows), dtype=torch.int64)
    positions, lengths, live = torch.zeros_like(tokens), torch.zeros(1).long(), torch.ones(1).long()
    rows = torch.tensor([0, 2, 3, 4])
    some = rows[:2]
    kept: dict = {}
    caches = []
    for _ in range(2):
        caches.append(model.new_cache(1, 8, layout.num_rows))
        caches[-1].data.zero_()
    before = torch.get_num_threads()
    for number, wanted in enumerate([some, rows, some, rows, some]):
        torch.set_num_threads(1 + number % 3)
        tokens[:] = (torch.arange(layout.num_rows) + number) % 11
        lengths[:], live[:] = number, 4 + number
        wanted[-1] = number % 4
        positions[:] = number + torch.tensor(layout.depths)
        found = model.choose(tokens, positions, layout, caches[0], lengths, live, wanted, kept)
        clones = [each.clone() for each in (tokens, positions, lengths, live, wanted)]
        expected = model.choose(*clones[:2], layout, caches[1], *clones[2:])
        assert all(
            same_bits(mine, its) if mine.is_floating_point() else torch.equal(mine, its)
            for mine, its in zip(found, expected, strict=True)
        )
        assert same_bits(caches[0].data, caches[1].data)
        if number == 2:
            many = LookaheadLayout.chain(40)
            new = torch.arange(40)[None] % 11
            model.forward(new, new, many, model.new_cache(1, 8, 40), 0 * live, 0 * live + 40)
    torch.set_num_threads(before)
    with pytest.raises(ValueError, match=r"kept: expected contiguous tensors of torch.int64"):
        model.choose(tokens.int(), positions, layout, caches[0], lengths, live, rows, kept)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_largest_of_all_threads_features(num_threads):
    """Ties go to the lowest id, wherever it lies; what is not finite is told."""
    tensors, fields = random_checkpoint(0, vocab_size=400)
    layout, one = LookaheadLayout(0, 2, 0), torch.ones(1, dtype=torch.int64)

    def chosen(changed):
        weight = tensors["lm_head.weight"].clone()
        for token, value in changed.items():
            weight[token] = value
        model = build_llama((tensors | {"lm_head.weight": weight}, fields), torch.float32)
        cache = model.new_cache(1, 4, 1)
        given = (one[None], 0 * one[None], layout, cache, 0 * one, one, 0 * one)
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        logits, token, finite = model.choose(*given)
        torch.set_num_threads(before)
        assert bool(finite) == bool(logits.max().isfinite())
        return int(token), bool(finite)

    first, _ = chosen({})
    best = tensors["lm_head.weight"][first]
    later = (first + 200) % 400
    assert chosen({later: best}) == (min(first, later), True)
    assert chosen({399: 2 * best}) == (399, True)
    for token in (5, 395):
        assert not chosen({token: math.nan})[1]


@pytest.mark.parametrize(("row", "said"), [(4, "live rows"), (9, "expected 0..8"), (-1, "0..8")])
def test_rows_that_cannot_be_chosen_at_are_refused(row, said):
    model, layout = build_llama(tiny(), torch.float32), LookaheadLayout(0, 3, 4)
    one = torch.ones(1, dtype=torch.int64)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    given = (tokens, tokens, layout, model.new_cache(1, 4, 9), 0 * one, 3 * one)
    with pytest.raises(ValueError, match=said):
        model.choose(*given, torch.tensor([row]))


def test_exactness_is_not_claimed_where_the_trial_fails(monkeypatch):
    choose = NumbaForward._choose

    def by_count(self, *arguments, **options):
        logits, *others = choose(self, *arguments, **options)
        return logits * (1 + 2**-7 * (len(logits) % 3)), *others

    monkeypatch.setattr(NumbaForward, "_choose", by_count)
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
