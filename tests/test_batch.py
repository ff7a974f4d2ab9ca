"""Several prompts in one step: each one's answer is, to the bit, what it is alone."""

import math
import random

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from single_rows import same_bits
from tiny_models import ScriptedModel, build_engine, build_llama

from lookahead.config import LookaheadConfig
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.step_costs import StepCosts

PROMPTS = [[1, 2, 3, 0, 1, 2], [2], [3, 0] * 20, [0, 0, 4, 1], [4, 2, 4, 2, 4, 2, 1], [1] * 30]
SHAPES = [(0, 2, 0), (3, 4, 3), (0, 5, 4), (2, 3, 0)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def llama(request):
    return build_llama(random_checkpoint(3, vocab_size=5), request.param)


class Logits:
    """An `on_logits` that keeps each prompt's rows."""

    def __init__(self):
        self.rows = {}

    def __call__(self, number, logits):
        self.rows.setdefault(number, []).append(logits.clone())

    def of(self, number):
        return torch.cat(self.rows[number])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_and_logits_are_those_of_each_prompt_alone(llama, shape):
    options = {"max_new_tokens": 25, "lookahead": LookaheadConfig(*shape)}
    engine = build_engine(llama)
    alone, rows = [], Logits()
    for number, prompt in enumerate(PROMPTS):
        keep = lambda _, logits, number=number: rows(number, logits)  # noqa: E731
        alone += engine.batch([prompt], on_logits=keep, **options).run_to_end()
    for batch_size in (2, 3, 8):
        together = Logits()
        engine = build_engine(llama, batch_size=batch_size)
        results = engine.batch(PROMPTS, on_logits=together, **options).run_to_end()
        for number, (result, expected) in enumerate(zip(results, alone, strict=True)):
            assert result.token_ids == expected.token_ids
            assert (result.steps, result.finish_reason) == (expected.steps, expected.finish_reason)
            assert result.prompt == expected.prompt
            assert same_bits(together.of(number), rows.of(number))


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("shape", [(0, 6, 3), (3, 4, 3)], ids=str)
def test_rows_that_are_left_out_change_no_bit(llama, shape, slope):
    """Whatever more rows cost, and so whichever are run."""
    costs = StepCosts((1, 100), (1.0, 1 + 99 * slope))
    plain, rows = Logits(), Logits()
    options = {"max_new_tokens": 40, "lookahead": LookaheadConfig(*shape, adaptive=True)}
    engine = build_engine(llama, batch_size=2)
    expected = engine.batch(PROMPTS, on_logits=plain, mode="autoregressive", max_new_tokens=40)
    expected = expected.run_to_end()
    engine.costs = costs
    batch = engine.batch(PROMPTS, on_logits=rows, **options)
    results = batch.run_to_end()
    for number, (result, its) in enumerate(zip(results, expected, strict=True)):
        assert result.token_ids == its.token_ids
        assert same_bits(rows.of(number), plain.of(number))
    shapes = batch.budget.shapes
    full = LookaheadLayout.count_rows(*shape)
    if slope == 0.0:
        assert max(result.rows_per_step for result in results) > full / 2
    else:
        assert len(shapes) > 2
        assert max(result.rows_per_step for result in results) < full
    assert sum(result.steps for result in results) < sum(its.steps for its in expected)


@pytest.mark.parametrize(("batch_size", "returns"), [(1, True), (2, False)])
def test_a_window_that_was_left_returns_when_every_request_is_new(llama, batch_size, returns):
    """With two sequences the third request begins while another's window is old."""
    engine = build_engine(llama, batch_size=batch_size)
    engine.costs = StepCosts((1, 100), (1.0, 1.0))
    config = LookaheadConfig(3, 4, 3, adaptive=True)
    batch = engine.batch(PROMPTS[:3], max_new_tokens=20, lookahead=config)
    next(batch)
    batch.budget.has_window = False
    shapes = batch.budget.shapes
    shapes.clear()
    batch.run_to_end()
    assert any(shape.window for shape in shapes) == returns
    assert any(not shape.window for shape in shapes)


def counter(path):
    """Counts up by one, each time to the first id's successor's successor, and then ends."""
    return (path[-1] + 1) % 9


def test_a_prompt_takes_the_place_of_the_first_that_ends():
    engine = build_engine(ScriptedModel(counter, 9, eos_token_ids=(8,)), batch_size=2)
    prompts = [[1], [6], [5], [7], [3]]
    records = []
    batch = engine.batch(prompts, mode="autoregressive", trace=records.append)
    chunks = [(number, chunk.token_ids) for number, chunk in batch]
    # Two sequences: 0 and 1 begin; 1 ends after two steps, 2 takes its place and ends after three.
    assert [record.sequence for record in records] == [
        *(0, 1), *(0, 1), *(0, 2), *(0, 2), *(0, 2), *(0, 3), *(0, 4), 4, 4, 4, 4,
    ]  # fmt: skip
    assert [number for number, _ in chunks] == [record.sequence for record in records]
    assert [ids for _, ids in chunks] == [record.emitted for record in records]
    results = batch.results
    assert [result.token_ids for result in results] == [
        [2, 3, 4, 5, 6, 7, 8], [7, 8], [6, 7, 8], [8], [4, 5, 6, 7, 8],
    ]  # fmt: skip
    assert [result.steps for result in results] == [7, 2, 3, 1, 5]
    assert {result.finish_reason for result in results} == {"eos"}


def test_a_sequence_that_ended_costs_no_row(monkeypatch):
    model = ScriptedModel(counter, 9, eos_token_ids=(8,))
    engine = build_engine(model, batch_size=3)
    live, rows = [], []
    choose = model.choose

    def choose_noted(*arguments):
        live.append(arguments[5].tolist())
        rows.append(len(arguments[6]))
        return choose(*arguments)

    monkeypatch.setattr(model, "choose", choose_noted)
    config = LookaheadConfig(2, 3, 2, prompt_ngrams=False)
    engine.batch([[5], [6, 7]], lookahead=config, max_new_tokens=9, stop=["i"]).run_to_end()
    # The second prompt ends at once, by an end-of-text id; there is no third.
    assert live[0] == [4, 4, 0]
    assert all(counts[1:] == [0, 0] for counts in live[1:])
    assert rows[0] == 2 * 3
    assert set(rows[1:]) == {3}


def test_a_stop_string_ends_its_own_sequence_only():
    engine = build_engine(ScriptedModel(counter, 9), batch_size=2)
    options = {"max_new_tokens": 10, "stop": ["fg"], "mode": "autoregressive"}
    first, second = engine.generate([[3], [6]], **options)
    assert (first.text, first.finish_reason) == ("e", "stop")
    assert (second.text, second.finish_reason) == ("hiabcde", "stop")
    assert (first.steps, second.steps) == (3, 9)


def test_more_sequences_than_prompts(llama):
    engine = build_engine(llama, batch_size=4)
    expected = build_engine(llama).generate(PROMPTS[0], max_new_tokens=9)
    (result,) = engine.generate([PROMPTS[0]], max_new_tokens=9)
    assert result.token_ids == expected.token_ids


def test_a_batch_closed_early_tells_what_was_there_and_leaves_the_engine_ready(llama):
    engine = build_engine(llama, batch_size=2)
    expected = engine.generate(PROMPTS, max_new_tokens=20)
    batch = engine.batch(PROMPTS, max_new_tokens=20)
    seen = {}
    for _ in range(9):
        number, chunk = next(batch)
        seen.setdefault(number, []).extend(chunk.token_ids)
    with pytest.raises(InputError, match="another stream of this engine is running"):
        engine.generate(PROMPTS)
    batch.close()
    assert list(batch) == []
    for number, (result, whole) in enumerate(zip(batch.results, expected, strict=True)):
        ids = seen.get(number, [])  # the last step's may be more
        assert ids == result.token_ids[: len(ids)]
        assert result.token_ids == whole.token_ids[: result.new_tokens]
        if result.new_tokens < whole.new_tokens:
            assert result.finish_reason == "interrupted"
    assert batch.results[-1].steps == 0
    again = engine.generate(PROMPTS, max_new_tokens=20)
    assert [result.token_ids for result in again] == [result.token_ids for result in expected]


@pytest.mark.parametrize("which", ["trace", "on_logits"])
def test_a_callable_may_close_its_batch(llama, which):
    engine = build_engine(llama, batch_size=2)
    batches, calls = [], []

    def close(*_):
        calls.append(0)
        if len(calls) == 5:
            batches[0].close()

    batches.append(engine.batch(PROMPTS, max_new_tokens=20, **{which: close}))
    results = batches[0].run_to_end()
    assert {result.finish_reason for result in results} == {"interrupted"}
    assert len(calls) <= 6
    again = engine.generate(PROMPTS[:2], max_new_tokens=20)
    assert [result.new_tokens for result in again] == [20, 20]


def test_logits_that_are_not_finite_name_the_prompt():
    def script(path):
        return math.nan if path == (2, 1) else 1

    engine = build_engine(ScriptedModel(script, 5), batch_size=2)
    with pytest.raises(InputError, match="not finite after 1 new tokens of prompt 3: its weights"):
        engine.generate([[1], [0], [2]], max_new_tokens=3, mode="autoregressive")
    assert engine.generate([1], max_new_tokens=3).token_ids == [1, 1, 1]


def test_random_batches(llama):
    """Long and short prompts, cut by limits and end-of-text ids at random."""
    draw = random.Random(1)
    engines = {size: build_engine(llama, batch_size=size) for size in (1, 2, 5)}
    for _ in range(6):
        config = LookaheadConfig(draw.randint(0, 4), draw.randint(2, 5), draw.randint(0, 4))
        options = {"max_new_tokens": draw.randint(1, 30), "lookahead": config}
        prompts = [
            [draw.randrange(5) for _ in range(draw.randint(1, 60))]
            for _ in range(draw.randint(1, 9))
        ]
        ids = [
            [result.token_ids for result in engine.generate(prompts, **options)]
            for engine in engines.values()
        ]
        assert ids[0] == ids[1] == ids[2]
