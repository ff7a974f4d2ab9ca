"""Steps that differ in their bookkeeping alone, run side by side and compared after every step."""

import random
from itertools import cycle

import torch
from tiny_models import ScriptedModel

from lookahead.config import LookaheadConfig
from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.layout import LookaheadLayout
from lookahead.prefill import prefill
from lookahead.row_budget import RowBudget
from lookahead.step import Step

VOCAB_SIZE = 6
MAX_LENGTH = 60
EOS_IDS = (4, 5)
# Rows that are not all worth their time in a budget's eyes.
COSTS = [1 + 0.01 * rows for rows in range(150)]
SHAPES = [(0, 2, 0), (5, 4, 5), (0, 5, 3), (3, 2, 2), (4, 3, 0), (1, 6, 1)]


def start(implementation, seed, config, prompts, limits, fixed_shape=None):
    """A step over a batch whose prompts are in the cache."""

    def script(path):
        """Repeats itself often, and ends seldom."""
        following = (path[-1] * 3 + path[-2 % len(path)] + seed) % 4
        return 4 if sum(path) % 37 == 0 else following

    model = ScriptedModel(script, VOCAB_SIZE)
    model.implementation = implementation
    num_rows = LookaheadLayout.count_rows(config.window, config.ngram, config.guesses)
    spare = max(128, num_rows)
    cache = model.new_cache(len(prompts), MAX_LENGTH, spare)
    state = DecodeState(len(prompts), MAX_LENGTH, spare, len(EOS_IDS), model.device)
    step = Step(model, cache, state, config, fixed_shape)
    for sequence, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        prefill(model, cache.sequence(sequence), torch.tensor(prompt[:-1]))
        step.start(sequence, prompt, limit, EOS_IDS)
    return step


def everything(step, sequences):
    """All that a step leaves behind of these sequences; what stands behind a count has no meaning."""
    state, pool, window = step.state, step.pool, step.window
    found = []
    for sequence in sequences:
        length = int(state.lengths[sequence])
        entries = [
            (
                pool.entries[sequence, key, :count].tolist(),
                pool.origins[sequence, key, :count].tolist(),
            )
            for key in range(VOCAB_SIZE)
            for count in [int(pool.counts[sequence, key])]
        ]
        found.append(
            (
                state.tokens[sequence, : length + 1].tolist(),
                bool(state.finished[sequence]),
                window.tokens[sequence].tolist(),
                int(window.steps[sequence]),
                entries,
            )
        )
    return found


def emitted(output):
    """Ids of each sequence and what is told of them."""
    ids = [row[:count] for row, count in zip(output.emitted.tolist(), output.counts, strict=True)]
    return ids, output.finished.tolist(), output.finite.tolist()


def logits_told(output):
    """Of each sequence's tokens."""
    return [
        logits[:count].tolist() for logits, count in zip(output.logits, output.counts, strict=True)
    ]


def run_and_read(step, budget, **options):
    """A step, and what the host reads of it; the budget learns of the sequences that ran."""
    output = step.run(budget=budget, **options)
    numbers = step.packing.unpack(step.packing.pack(output).tolist())
    for sequence, ids in enumerate(numbers.token_ids):
        if ids and budget is not None:
            found, from_window = numbers.candidates[sequence], numbers.from_window[sequence]
            budget.observe(found, numbers.matches[sequence], ids, from_window)
    return output, numbers


def check_pair(implementation, shape, seeds, fixed_shape=None, step_shapes=(None,)):
    """Batches of three through torch's bookkeeping and another's; `step_shapes` are the steps' in
    turn. Every third batch's shapes are those that a budget chooses, unless some are given."""
    draw = random.Random(sum(shape))
    counts = set()
    for seed in seeds:
        is_chosen = step_shapes == (None,) and seed % 3 == 2
        config = LookaheadConfig(*shape, prompt_ngrams=seed % 2 == 0, adaptive=is_chosen)
        prompts = [[draw.randrange(4) for _ in range(draw.randint(1, 20))] for _ in range(3)]
        limits = [min(len(prompt) + draw.randint(1, 40), MAX_LENGTH) for prompt in prompts]
        steps = [
            start(name, seed, config, prompts, limits, fixed_shape)
            for name in ("torch", implementation)
        ]
        budgets = [
            RowBudget(config, COSTS, not step.fixed_shape) if is_chosen else None for step in steps
        ]
        traces: list[list] = [[], []]
        turns = cycle(step_shapes)
        while not all(steps[0].state.finished.tolist()):
            running = [b for b, is_over in enumerate(steps[0].state.finished) if not is_over]
            step_shape = next(turns)
            options = {"shape": step_shape, "keep_logits": seed % 2 == 0}
            outputs, numbers = zip(
                *(
                    run_and_read(step, budget, trace=records.append, **options)
                    for step, budget, records in zip(steps, budgets, traces, strict=True)
                ),
                strict=True,
            )
            assert emitted(outputs[0]) == emitted(outputs[1])
            assert numbers[0] == numbers[1]
            if options["keep_logits"]:
                assert logits_told(outputs[0]) == logits_told(outputs[1])
            assert everything(steps[0], running) == everything(steps[1], running)
            counts.update(outputs[0].counts.tolist())
        assert traces[0] == traces[1]
        assert not is_chosen or budgets[0].shapes == budgets[1].shapes
        assert len(traces[0]) >= 3
    assert max(counts) == (shape[1] if shape[2] else 1)


def check_not_finite(implementation):
    """A sequence whose own row is spoiled, beside one that is not: told only where it is used."""
    found = []
    for name in ("torch", implementation):
        step = start(name, 1, LookaheadConfig(2, 3, 2), [[1, 2], [3, 1]], [9, 9])
        step.model.script = lambda path: float("inf") if path[0] == 1 else 2
        found.append(step.run().finite.tolist())
    assert found == [[False, True]] * 2


def check_prompt_in_parts(insert_prompt):
    """A prompt's n-grams inserted at once are those of its beginning and then of what came to it;
    `insert_prompt` takes state, pool, sequence, tokens, and how many of these are in the pool."""
    state = DecodeState(2, 100, 8, 1, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    state.tokens.copy_(torch.randint(3, state.tokens.shape, generator=draw))
    for known, whole in ((1, 40), (2, 3), (4, 5), (20, 40), (40, 40)):
        pools = []
        for ends in ([(whole, 0)], [(known, 0), (whole, known)]):
            pools.append(NgramPool(2, 3, 5, 4, torch.device("cpu")))
            for num_tokens, in_pool in ends:
                state.lengths[1] = num_tokens - 1
                insert_prompt(state, pools[-1], 1, num_tokens, in_pool)
        at_once, in_parts = pools
        assert torch.equal(at_once.counts, in_parts.counts)
        assert torch.equal(at_once.entries, in_parts.entries)
        assert bool(at_once.counts.any()) == (whole > 3)
    # What is known is not inserted again.
    pool = NgramPool(2, 3, 5, 4, torch.device("cpu"))
    insert_prompt(state, pool, 1, 40, 39)
    assert pool.counts.sum() == 1
