"""A batch whose steps are recorded and read a step late answers as one whose steps are read at once.

In a GPU's place stands what runs a step as it is started.
"""

import gc
import math
import random
from dataclasses import replace

import pytest
import torch
from eager_recorder import EagerRecorder
from oracles.naive_llama import random_checkpoint
from tiny_models import ScriptedModel, build_engine, build_llama, one_thread

from lookahead import engine as engine_module
from lookahead import step_graph
from lookahead.config import LookaheadConfig, SamplingConfig
from lookahead.errors import InputError
from lookahead.row_budget import RowBudget, StepShape
from lookahead.stats import stats
from lookahead.step_costs import StepCosts
from lookahead.step_graph import PipelinedStep
from lookahead.step_numbers import NumberPacking

PROMPTS = [[1, 2, 3, 0, 1, 2], [2], [3, 0] * 20, [0, 0, 4, 1], [4, 2, 4, 2, 4, 2, 1], [1] * 30]
SHAPES = [(0, 2, 0), (3, 4, 3), (0, 5, 4), (2, 3, 0)]
FLAT, STEEP = StepCosts((1, 200), (1.0, 1.01)), StepCosts((1, 2), (1.0, 2.0))


@pytest.fixture(autouse=True)
def _short_buckets(monkeypatch):
    monkeypatch.setattr(step_graph, "SHORTEST_BUCKET", 16)
    with one_thread():
        yield


@pytest.fixture(scope="module")
def llama():
    checkpoint = random_checkpoint(3, vocab_size=5)
    return build_llama(checkpoint, torch.float64, implementation="torch")


def untimed(results):
    return [replace(each, prefill_seconds=0, decode_seconds=0, tokens_per_second=0)
            for each in results]  # fmt: skip


def engines(model, batch_size, costs=None):
    """One whose steps are read at once, and one whose steps are read late."""
    options = {"batch_size": batch_size, "costs": costs}
    return build_engine(model, **options), build_engine(model, **options, recorder=EagerRecorder())


def compare(model, prompts, batch_size, costs=None, **options):
    """Answer all prompts both ways; the results, which are the same."""
    eager, late = engines(model, batch_size, costs)
    expected = untimed(eager.generate(prompts, **options))
    batch = late.batch(prompts, **options)
    chunks = list(batch)
    assert isinstance(batch._steps, PipelinedStep)
    assert untimed(batch.results) == expected
    for number, result in enumerate(expected):
        own = [chunk for index, chunk in chunks if index == number]
        assert "".join(chunk.text for chunk in own) == result.text
        assert [token for chunk in own for token in chunk.token_ids] == result.token_ids
    return expected


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_are_those_that_are_read_at_once(llama, shape, batch_size):
    config = LookaheadConfig(*shape)
    results = compare(llama, PROMPTS, batch_size, max_new_tokens=25, lookahead=config)
    assert {result.new_tokens for result in results} == {25}
    if shape[2]:
        assert min(result.steps for result in results) < 25


SAMPLED = SamplingConfig(temperature=4.0, top_p=0.9, repetition_penalty=1.2, seed=4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_samples_are_those_that_are_read_at_once(llama, batch_size):
    given = {"max_new_tokens": 20, "lookahead": LookaheadConfig(2, 3, 2), "num_samples": 2}
    results = compare(llama, PROMPTS[:2], batch_size, sampling=SAMPLED, **given)
    assert len({tuple(result.token_ids) for result in results}) == 4


def test_steps_that_draw_are_recorded_beside_those_that_do_not(llama):
    """Another way to draw is the same recording; drawing or not is another one."""
    eager, late = engines(llama, 1)
    pipelines = []
    for sampling in (None, SAMPLED, replace(SAMPLED, seed=5, top_k=3), SamplingConfig(top_k=2)):
        given = {"max_new_tokens": 9, "lookahead": LookaheadConfig(2, 3, 2), "sampling": sampling}
        assert late.generate([1, 2, 3], **given).token_ids == (
            eager.generate([1, 2, 3], **given).token_ids
        )
        pipelines.append(late._steps.pipeline)
    first, drawing, still_drawing, last = pipelines
    assert drawing is still_drawing
    assert len({id(each) for each in (first, drawing, last)}) == 3


def alphabet(path):
    """Counts on, now and then in steps of two."""
    return (path[-1] + 1 + (sum(path) % 5 == 0)) % 12


def test_every_way_to_end(llama):
    """Stop strings, end-of-text ids, limits and the end of the context, in batches at random."""
    draw = random.Random(7)
    seen = set()
    for _ in range(25):
        eos_ids = tuple(draw.sample(range(12), draw.choice([0, 0, 1, 2])))
        stops = ["".join(draw.choices("abcdefghijkl", k=draw.randint(1, 2))) for _ in range(2)]
        prompts = [
            [draw.randrange(12) for _ in range(draw.choice([1, 2, 5, 30, 90]))]
            for _ in range(draw.randint(1, 6))
        ]
        results = compare(
            ScriptedModel(alphabet, 12, eos_token_ids=eos_ids),
            prompts,
            draw.randint(1, 3),
            max_new_tokens=draw.choice([1, 2, 17, 60]),
            stop=stops[: draw.randint(0, 2)],
            lookahead=LookaheadConfig(draw.randint(0, 3), draw.randint(2, 5), draw.randint(0, 3)),
        )
        seen |= {result.finish_reason for result in results}
    assert seen == {"stop", "eos", "length", "context"}


def test_a_step_past_a_stop_is_neither_shown_nor_counted():
    recorder = EagerRecorder()
    model = ScriptedModel(lambda path: path[-1] + 1, 26)
    engine = build_engine(model, recorder=recorder)
    result = engine.generate([3], max_new_tokens=9, stop=["g"], mode="autoregressive")
    assert (result.text, result.token_ids, result.steps) == ("ef", [4, 5], 3)
    assert sum(entry.startswith("start") for entry in recorder.log) == 4
    assert engine._steps.state.tokens[0, :5].tolist() == [3, 4, 5, 6, 7], "it ran"
    assert engine._steps.state.finished.tolist() == [True], "and no other does"
    assert engine.generate([8], max_new_tokens=2).token_ids == [9, 10]


def dropping_nothing(monkeypatch):
    unpack = NumberPacking.unpack
    monkeypatch.setattr(NumberPacking, "unpack", lambda self, rows, _=(): unpack(self, rows))


def starting_afresh(monkeypatch):
    """A request begins as if no step were in flight."""
    start = PipelinedStep.start

    def start_and_forget(self, *arguments):
        start(self, *arguments)
        self._dropped.clear()

    monkeypatch.setattr(PipelinedStep, "start", start_and_forget)


@pytest.mark.parametrize("plant", [dropping_nothing, starting_afresh])
def test_a_mistake_about_what_is_in_flight_is_found(monkeypatch, plant):
    model = ScriptedModel(lambda path: (path[-1] + 1) % 26, 26)
    options = {"batch_size": 1, "max_new_tokens": 9, "stop": ["g"], "mode": "autoregressive"}
    prompts = [[3], [10], [4]]
    compare(model, prompts, **options)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(model, prompts, **options)


@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.parametrize("num_chunks", [0, 1, 5, 11])
def test_a_batch_that_ends_early_leaves_nothing_behind(llama, how, num_chunks):
    """Then two prompts more, and fewer sequences in use than before."""
    options = {"max_new_tokens": 20, "lookahead": LookaheadConfig(3, 4, 3)}
    eager, late = engines(llama, batch_size=2)
    expected = untimed(eager.generate(PROMPTS, **options))
    batch = late.batch(PROMPTS, **options)
    seen = {}
    for _ in range(num_chunks):
        number, chunk = next(batch)
        seen.setdefault(number, []).extend(chunk.token_ids)
    if how == "closed":
        batch.close()
        assert list(batch) == []
        assert late._steps.state.finished.all()
        for number, (result, whole) in enumerate(zip(batch.results, expected, strict=True)):
            ids = seen.get(number, [])
            assert ids == result.token_ids[: len(ids)]
            assert result.token_ids == whole.token_ids[: result.new_tokens]
            assert result.steps <= whole.steps
    del batch
    gc.collect()
    for prompts in (PROMPTS[3:4], PROMPTS):
        again = late.batch(prompts, **options)
        assert late._steps.state.finished.all()
        assert untimed(again.run_to_end()) == [
            each for each in expected if each.prompt in {late.tokenizer.decode(p) for p in prompts}
        ]


def test_a_batch_that_is_over_does_not_disturb_the_next(llama):
    options = {"max_new_tokens": 20, "lookahead": LookaheadConfig(3, 4, 3)}
    eager, late = engines(llama, batch_size=1)
    (expected,) = eager.generate(PROMPTS[:1], **options)
    first = late.batch(PROMPTS[:1], **options)
    while not first.is_done:
        next(first)
    second = late.batch(PROMPTS[:1], **options)
    next(second)
    first.close()
    assert list(first) == []
    assert second.run_to_end()[0].token_ids == expected.token_ids
    assert second.results[0].steps == expected.steps


def test_logits_that_are_not_finite_name_the_prompt():
    def script(path):
        return math.nan if path == (2, 1) else 1

    _, late = engines(ScriptedModel(script, 5), batch_size=2)
    with pytest.raises(InputError, match="not finite after 1 new tokens of prompt 3: its weights"):
        late.generate([[1], [0], [2]], max_new_tokens=3, mode="autoregressive")
    assert late.generate([1], max_new_tokens=3).token_ids == [1, 1, 1]


class Interruption(BaseException):
    """As Ctrl-C, which is no Exception either."""


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("where", ["choose", "commit"])
def test_an_exception_leaves_the_engine_ready(llama, monkeypatch, where, calls):
    options = {"max_new_tokens": 20, "lookahead": LookaheadConfig(3, 4, 3)}
    eager, late = engines(llama, batch_size=2)
    expected = untimed(eager.generate(PROMPTS, **options))
    late.generate(PROMPTS[1], **options)
    batch = late.batch(PROMPTS[:2], **options)
    next(batch)
    left = calls
    # A step works on what `up_to` gives.
    owner = llama if where == "choose" else type(late._steps.kv_cache)
    original = getattr(owner, where)

    def fail_in_the_end(*arguments):
        nonlocal left
        left -= 1
        if not left:
            raise Interruption
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fail_in_the_end)
        with pytest.raises(Interruption):
            list(batch)
    assert [result.finish_reason for result in batch.results] == ["interrupted"] * 2
    assert untimed(late.generate(PROMPTS, **options)) == expected


# Which rows run


class LateBudget(RowBudget):
    """Told of each step when the next one is."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._untold = None

    def observe(self, *observation):
        if self._untold is not None:
            super().observe(*self._untold)
        self._untold = observation


def recorded(config, costs, prompt, model, trace=None):
    """One request's result, and its budget; read at once where there is a trace."""
    engine = build_engine(model, costs=costs, recorder=EagerRecorder())
    options = {"max_new_tokens": 60, "lookahead": config, "trace": trace}
    batch = engine.batch([prompt], **options)
    return untimed(batch.run_to_end()), batch.budget


@pytest.mark.parametrize("slope", [0.001, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("shape", [(3, 4, 3), (0, 5, 2), (2, 3, 0), (0, 2, 0)], ids=str)
def test_a_budget_chooses_by_the_steps_that_were_read(llama, monkeypatch, shape, slope):
    """As one that looks at each step a step late, in all that is told of a step."""
    config = LookaheadConfig(*shape, adaptive=True)
    costs = StepCosts((1, 101), (1.0, 1.0 + 100 * slope))
    late, budget = recorded(config, costs, PROMPTS[2], llama)
    monkeypatch.setattr(engine_module, "RowBudget", LateBudget)
    expected, other = recorded(config, costs, PROMPTS[2], llama, trace=lambda record: None)
    assert late == expected
    assert (budget.shapes - other.shapes).total() == 1, "the step behind the last"
    assert not other.shapes - budget.shapes


def test_a_budget_runs_everything_then_the_pool_alone_then_one_row(llama):
    config = LookaheadConfig(3, 4, 3, adaptive=True)
    seen = set()
    for slope in (0.001, 0.02, 0.05, 0.2):
        costs = StepCosts((1, 101), (1.0, 1.0 + 100 * slope))
        for prompt in PROMPTS:
            seen |= set(recorded(config, costs, prompt, llama)[1].shapes)
    assert seen == {StepShape(True, 3, 3), StepShape(False, 3, 3), StepShape(False, 0, 1)}


@pytest.mark.parametrize("slope", [0.001, 0.02, 0.05, 0.2])
def test_a_budget_changes_no_text(llama, slope):
    costs = StepCosts((1, 101), (1.0, 1.0 + 100 * slope))
    expected = build_engine(llama).generate(PROMPTS, max_new_tokens=30, mode="autoregressive")
    for batch_size in (1, 3):
        for shape in ((3, 4, 3), (0, 5, 2)):
            _, late = engines(llama, batch_size, costs)
            config = LookaheadConfig(*shape, adaptive=True)
            for _ in range(2):
                results = late.generate(PROMPTS, max_new_tokens=30, lookahead=config)
                for result, plain in zip(results, expected, strict=True):
                    assert result.token_ids == plain.token_ids
                    assert result.finish_reason == plain.finish_reason


def test_a_budget_is_asked_for_those_that_were_running_when_last_read(llama, monkeypatch):
    asked = []
    choose = RowBudget.choose
    monkeypatch.setattr(
        RowBudget, "choose", lambda self, matches: asked.append(matches) or choose(self, matches)
    )
    model = ScriptedModel(lambda path: path[-1] + 1, 26, eos_token_ids=(9,))
    _, late = engines(model, 3, STEEP)
    config = LookaheadConfig(0, 3, 2, prompt_ngrams=False, adaptive=True)
    results = late.generate([[1], [7], [5]], lookahead=config, stop=["h"])
    assert [result.steps for result in results] == [6, 2, 2]
    # The second and third end in the second step, by an id and by a string; the third step runs
    # already. There is one step behind the last.
    assert asked == [[[0, 0]] * 3] * 3 + [[[0, 0]]] * 4


def test_a_window_that_was_left_out_begins_anew_with_the_next_batch(llama):
    """Its tokens are old then, also of a sequence that the dropped batch left running."""
    config = LookaheadConfig(3, 4, 3, adaptive=True)
    _, fresh = engines(llama, 2, FLAT)
    _, late = engines(llama, 2, FLAT)
    options = {"max_new_tokens": 30, "lookahead": config}
    expected = untimed(fresh.generate(PROMPTS[:1], **options))
    batch = late.batch(PROMPTS[1:3], **options)
    next(batch)
    batch.budget.has_window = False
    for _ in range(5):
        next(batch)
    steps = late._steps.step.window.steps.tolist()
    next(batch)
    next(batch)
    assert late._steps.step.window.steps.tolist() == steps, "the window stood still"
    del batch
    gc.collect()
    batch = late.batch(PROMPTS[:1], **options)
    next(batch)
    assert late._steps.step.window.steps.tolist()[0] == 2, "two steps ran, one was read"
    assert late._steps.state.lengths.tolist()[1] == 0, "nothing runs in the other sequence"
    assert untimed(batch.run_to_end()) == expected


# What is recorded, and when


def test_it_is_tuned_for_every_sequence_that_a_step_has(llama):
    """One whose steps are recorded runs them all."""
    eager, late = engines(llama, 8, StepCosts((1, 8, 9, 10), (1.0, 1.0, 2.0, 4.0)))
    assert eager.tuning_for(1).config.guesses > eager.tuning_for(8).config.guesses
    assert late.tuning_for(1) == late.tuning_for(8) == eager.tuning


def test_steps_are_recorded_before_the_first_request_that_needs_it(llama):
    recorder = EagerRecorder()
    engine = build_engine(llama, recorder=recorder, costs=STEEP)  # 16, 32, 64, 128
    options = {"max_new_tokens": 2, "lookahead": LookaheadConfig(3, 4, 3)}
    engine.generate([1, 2], trace=lambda record: None, **options)
    engine.stream([1, 2], on_logits=lambda logits: None, **options).run_to_end()
    assert (recorder.recorded, engine.capture_seconds) == (0, 0.0)
    engine.generate([1, 2], **options)
    seconds = engine.capture_seconds
    assert recorder.recorded == 4
    assert seconds > 0
    engine.generate([1, 2], **options)
    assert (recorder.recorded, engine.capture_seconds) == (4, seconds)
    adaptive = {**options, "lookahead": LookaheadConfig(3, 4, 3, adaptive=True)}
    engine.generate([1, 2], **adaptive)
    assert recorder.recorded == 4 + 3 * 4
    engine.generate([1, 2], mode="autoregressive")
    assert recorder.recorded == 16 + 4


def test_between_a_request_that_is_watched_and_one_that_is_not(llama):
    """The one runs a step without the pipeline, which then knows nothing of lengths."""
    eager, late = engines(llama, batch_size=2)
    options = {"max_new_tokens": 20, "lookahead": LookaheadConfig(3, 4, 3)}
    expected = untimed(eager.generate(PROMPTS, **options))
    for trace in (None, lambda record: None, None):
        assert untimed(late.generate(PROMPTS, trace=trace, **options)) == expected
        assert untimed(late.generate(PROMPTS[1:2], **options)) == expected[1:2]


def test_nothing_is_recorded_on_a_cpu(llama):
    engine = build_engine(llama)
    result = engine.generate([1, 2], max_new_tokens=2, lookahead=LookaheadConfig(3, 4, 3))
    assert engine.capture_seconds == 0.0
    assert "recording" not in stats([result], None, None, engine.capture_seconds)
    told = stats([result], None, None, 1.5)
    assert told.splitlines()[-1] == "stats: recording the steps took 1.50 s"
