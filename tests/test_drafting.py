"""Live drafting: step by step the engine drafts what a lookahead of lists and dictionaries drafts.

Window, pool, candidates, rows and verdict of every step are compared, so a step that is merely slower
than it should be is found too.
"""

import random
from functools import cache

import pytest
import torch
from oracles.naive_llama import naive_next_token, random_checkpoint
from oracles.plain_lookahead import PlainLookahead
from tiny_models import (
    ScriptedModel,
    build_llama,
    build_step,
    pool_of,
    start_step,
    text_of,
)

from lookahead.config import LookaheadConfig

MAX_LENGTH = 128
GRID = [(window, ngram) for window in range(9) for ngram in range(2, 7)]
CHECKPOINTS = [
    {"vocab_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1},
    {"vocab_size": 3, "num_attention_heads": 2, "num_key_value_heads": 2},
    {"vocab_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
]


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def llama(number):
    """A random model for the engine, and its next token for the oracle."""
    checkpoint = random_checkpoint(number, **CHECKPOINTS[number])
    return build_llama(checkpoint), naive_next_token(*checkpoint)


def sum_modulo_5(ids):
    """Depends on every id of the path, so a wrong ancestor or a missing one shows."""
    return sum(ids) % 5


def two_back(ids):
    return (3 * ids[-1] + ids[max(0, len(ids) - 2)] + len(ids) // 9) % 7


def periodic(ids):
    return len(ids) % 5


def count(ids):
    return (ids[-1] + 1) % 5


SCRIPTS = {"sum": (sum_modulo_5, 5), "two back": (two_back, 7), "periodic": (periodic, 5)}


def check_drafting(step, next_token, prompt, max_new_tokens, eos_ids=()):
    """Run a request beside the oracle; return the oracle's steps."""
    limit = min(len(prompt) + max_new_tokens, MAX_LENGTH)
    start_step(step, prompt, limit, eos_ids)
    config, initial_window = step.config, step.window.tokens[0].tolist()
    if config.window:
        assert initial_window[0][0] == prompt[-1]
        assert {token for level in initial_window for token in level} <= set(prompt)
    oracle = PlainLookahead(
        next_token,
        prompt,
        initial_window,
        config.window,
        config.ngram,
        config.guesses,
        config.prompt_ngrams,
        eos_ids,
        max_new_tokens,
        MAX_LENGTH,
    )
    assert pool_of(step) == oracle.pool
    steps, records = [], []
    while not oracle.finished:
        steps.append(oracle.step())
        assert not step.state.finished[0]
        output = step.run(records.append)
        check_step(step, oracle, steps[-1], records[-1], output)
    assert step.state.finished.all()
    assert len(records) == len(steps)
    return steps


def check_step(step, oracle, expected, record, output):
    """Everything that a step saw, did and left behind."""
    levels = step.config.ngram - 1
    assert record.length == expected.committed_before
    assert record.candidates == [list(candidate) for candidate in expected.candidates]
    assert record.origins == expected.origins
    assert record.tokens == expected.tokens
    assert record.parents == expected.parents
    positions = []
    for parent in expected.parents:
        positions.append(positions[parent] + 1 if parent >= 0 else expected.committed_before)
    assert record.positions == positions
    accepted = expected.accepted[: len(expected.emitted)]
    assert record.accepted == accepted
    if len(accepted) > 1:
        first_candidate_row = max(1, step.config.window * levels)
        assert record.winner == (accepted[1] - first_candidate_row) // levels
    else:
        assert record.winner is None
    assert record.emitted == expected.emitted
    assert output.emitted[0, : output.counts[0]].tolist() == expected.emitted
    assert bool(output.finished[0]) == bool(step.state.finished[0]) == oracle.finished
    assert bool(output.finite[0])
    if step.config.window:
        assert step.window.tokens[0].tolist() == expected.window_after
    assert pool_of(step) == oracle.pool
    assert {key: [entry[0] for entry in kept] for key, kept in oracle.pool.items()} == (
        expected.pool_after
    )
    assert int(step.state.lengths[0]) == expected.committed_after
    assert text_of(step) == expected.text_after


def draw_prompt(seed, vocab_size, longest=24):
    draw = random.Random(seed)
    length = draw.randint(1, longest)
    return [draw.randrange(vocab_size) for _ in range(length)]


@pytest.mark.parametrize(("window", "ngram"), GRID)
def test_random_models_over_the_grid(window, ngram):
    for guesses in range(7):
        place = (ngram * 9 + window) * 7 + guesses
        number = place % len(CHECKPOINTS)
        model, next_token = llama(number)
        prompt = draw_prompt(place % 8, CHECKPOINTS[number]["vocab_size"], longest=12)
        for prompt_ngrams in (True, False):
            config = LookaheadConfig(window, ngram, guesses, prompt_ngrams, seed=place % 2)
            step = build_step(model, config, MAX_LENGTH)
            steps = check_drafting(step, next_token, prompt, max_new_tokens=14)
            if not guesses:
                assert len(steps) == 14


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("window", "ngram"), GRID)
def test_scripts_over_the_grid(window, ngram, name):
    script, vocab_size = SCRIPTS[name]
    model = ScriptedModel(script, vocab_size)
    for guesses in range(7):
        place = (ngram * 9 + window) * 7 + guesses
        config = LookaheadConfig(window, ngram, guesses, place % 2 == 0, seed=place)
        step = build_step(model, config, MAX_LENGTH)
        # The same step serves one request after the other, as the engine has it.
        check_drafting(step, script, draw_prompt(place, vocab_size), max_new_tokens=24)
        eos_ids = ((2,), (4, 0), ())[place % 3]
        prompt = draw_prompt(place + 1000, vocab_size)
        check_drafting(step, script, prompt, 3 + place % 11, eos_ids)


def test_every_origin_is_drafted_and_accepted():
    accepted_from = set()
    for seed in range(6):
        model, next_token = llama(seed % len(CHECKPOINTS))
        prompt = draw_prompt(seed, model.config.vocab_size)
        step = build_step(model, LookaheadConfig(4, 3, 3, seed=seed), MAX_LENGTH)
        for expected in check_drafting(step, next_token, prompt, max_new_tokens=20):
            if len(expected.accepted) > 1:
                guess = (expected.accepted[1] - 4 * 2) // 2
                accepted_from.add(expected.origins[guess])
    assert accepted_from == {"prompt", "window", "output"}


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 34, 35, 36, 63, 64, 65, 66, 67, 68, 100])
def test_prompts_of_any_length_fill_the_pool(length, ngram):
    # Prompt n-grams go in 32 at a time.
    draw = random.Random(length)
    prompt = [draw.randrange(5) for _ in range(length)]
    config = LookaheadConfig(2, ngram, 4)
    step = build_step(ScriptedModel(sum_modulo_5, 5), config, MAX_LENGTH)
    check_drafting(step, sum_modulo_5, prompt, max_new_tokens=6)


def test_the_context_ends_inside_a_block():
    # Every n-gram is right, so each step brings 4 tokens, and the last what there is room for.
    model = ScriptedModel(count, 5)
    for room in range(1, 10):
        prompt = [place % 5 for place in range(MAX_LENGTH - room)]
        step = build_step(model, LookaheadConfig(2, 4, 2), MAX_LENGTH)
        steps = check_drafting(step, count, prompt, max_new_tokens=50)
        whole, rest = divmod(room, 4)
        assert [len(each.emitted) for each in steps] == [4] * whole + [rest] * (rest > 0)


def test_sequences_of_a_batch_keep_their_pools_apart():
    step = build_step(
        ScriptedModel(sum_modulo_5, 5), LookaheadConfig(3, 3, 3), MAX_LENGTH, batch_size=2
    )
    start_step(step, [1, 2, 4, 3, 1], 40, sequence=0)
    before = pool_of(step, 0)
    window = step.window.tokens[0].clone()
    start_step(step, [0, 4, 4, 1, 2, 2], 40, sequence=1)
    assert pool_of(step, 0) == before
    assert torch.equal(step.window.tokens[0], window)
    for _ in range(4):
        step.run()
    later = pool_of(step, 1)
    assert later
    start_step(step, [3, 3, 3, 0], 40, sequence=0)
    assert pool_of(step, 1) == later
    assert pool_of(step, 0) == {3: [((3, 0), "prompt"), ((3, 3), "prompt")]}


def test_slots_that_hold_nothing_are_no_candidates():
    # What they hold by accident would even be right, and another sequence has all its candidates.
    config = LookaheadConfig(0, 4, 2)
    step = build_step(ScriptedModel(count, 5), config, MAX_LENGTH, batch_size=2)
    start_step(step, [0, 1, 2, 3, 4, 0, 1, 2, 4, 0], 40, sequence=0)
    start_step(step, [0], 40, sequence=1)
    step.pool.entries[1] = torch.tensor([1, 2, 3])
    records = []
    output = step.run(records.append)
    assert [record.emitted for record in records] == [[1, 2, 3, 4], [1]]
    assert [len(record.candidates) for record in records] == [2, 0]
    assert output.finite.tolist() == [True, True]


def test_rows_without_a_candidate_are_left_out(monkeypatch):
    model, rows = ScriptedModel(count, 5), []
    forward = model.forward

    def recording_forward(tokens, positions, layout, cache, lengths, live_rows):
        rows.append((layout.num_rows, live_rows.tolist()))
        return forward(tokens, positions, layout, cache, lengths, live_rows)

    step = build_step(model, LookaheadConfig(0, 4, 2), MAX_LENGTH, batch_size=2)
    start_step(step, [0, 1, 2, 3, 4, 0, 1, 2, 4, 0], 12, sequence=0)
    start_step(step, [0], 4, sequence=1)
    monkeypatch.setattr(model, "forward", recording_forward)
    emitted = []
    while not step.state.finished.all():
        step.run(lambda record: emitted.append(record.emitted))
    # The first one ends in the first step; the second one never has a candidate.
    assert emitted == [[1, 2], [1], [2], [3]]
    assert rows == [(1 + 2 * 3, [7, 1]), (1, [0, 1]), (1, [0, 1])]
