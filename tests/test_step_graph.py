"""The pipeline around a recorded step; in a GPU's place stands what runs the step as it is started."""

import pytest
import torch
from eager_recorder import EagerRecorder
from oracles.naive_llama import random_checkpoint
from tiny_models import build_llama, build_step, start_step, text_of

from lookahead import step_graph
from lookahead.config import LookaheadConfig
from lookahead.prefill import prefill
from lookahead.step import Step
from lookahead.step_graph import PipelinedStep, buckets

PROMPTS = ([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 3, 1, 4], [2, 7, 1])
LIMITS = (60, 33)
MAX_LENGTH = 100


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _short_buckets(monkeypatch):
    monkeypatch.setattr(step_graph, "SHORTEST_BUCKET", 16)


def new_step(shape=(3, 4, 2), batch_size=2, fixed_shape=True):
    model = build_llama(random_checkpoint(1, vocab_size=8), torch.float64, implementation="torch")
    config = LookaheadConfig(*shape)
    step = build_step(model, config, MAX_LENGTH, batch_size)
    return Step(model, step.kv_cache, step.state, config, fixed_shape)


def begin(pipeline, sequence, prompt, limit, eos_ids=()):
    pipeline.start(sequence, prompt, limit, eos_ids)
    cache = pipeline.step.kv_cache.sequence(sequence)
    with torch.inference_mode():
        prefill(pipeline.step.model, cache, torch.tensor(prompt[:-1]))


def eager(shape=(3, 4, 2), eos_ids=()):
    """What each step emits, a list of ids for each sequence."""
    step = new_step(shape)
    for sequence, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        start_step(step, prompt, limit, eos_ids, sequence)
    steps = []
    while not step.state.finished.all():
        output = step.run()
        counts = output.counts.tolist()
        steps.append(
            [row[:count] for row, count in zip(output.emitted.tolist(), counts, strict=True)]
        )
    return steps, [text_of(step, sequence) for sequence in range(2)]


def pipelined(shape=(3, 4, 2)):
    """A pipeline with both requests begun."""
    recorder = EagerRecorder()
    pipeline = PipelinedStep(new_step(shape), recorder)
    recorder.log.clear()
    for sequence, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        begin(pipeline, sequence, prompt, limit)
    return pipeline, recorder


def read_to_end(pipeline):
    """Numbers of each step up to the one after which all is over; the step behind it is thrown away."""
    found = []
    while not found or not all(found[-1].finished):
        found.append(pipeline.run() or pipeline.run())
    idle = pipeline.drain()
    assert idle.token_ids == [[], []]
    return found


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(8, [8]), (16, [16]), (17, [16, 17]), (100, [16, 32, 64, 100]), (128, [16, 32, 64, 128])],
)
def test_buckets_double(max_length, expected):
    assert buckets(max_length) == expected


@pytest.mark.parametrize("shape", [(3, 4, 2), (0, 2, 0), (5, 4, 5)], ids=str)
def test_every_step_emits_what_it_emits_alone(shape):
    steps, texts = eager(shape)
    pipeline, _ = pipelined(shape)
    numbers = read_to_end(pipeline)
    assert [each.token_ids for each in numbers] == steps
    assert [text_of(pipeline.step, sequence) for sequence in range(2)] == texts
    assert all(all(each.finite) for each in numbers)
    over = [each.finished for each in numbers]
    assert over[-1] == [True, True]
    assert over.index([False, True]) == max(i for i, ids in enumerate(steps) if ids[1])


def test_a_step_is_started_before_the_one_before_is_read():
    pipeline, recorder = pipelined()
    assert pipeline.run() is None
    assert recorder.log[1:] == ["copy 1"]
    for _ in range(3):
        pipeline.run()
    order = [entry.partition(" ")[0] for entry in recorder.log]
    assert order == ["start", "copy", *["start", "copy", "read"] * 3]
    assert [entry for entry in recorder.log if entry.startswith("read")] == [
        "read 1", "read 2", "read 1",
    ]  # fmt: skip
    pipeline.drain()
    assert recorder.log[-1] == "read 2"
    assert pipeline.drain() is None


def test_the_least_bucket_that_must_do_is_started():
    """Lengths are at most what was read and one step more; each bucket gets its turn."""
    pipeline, recorder = pipelined()
    bounds = [longest for longest, _ in pipeline._programs]  # in the order of their recording
    lengths = pipeline.step.state.lengths
    used = []
    known = [len(prompt) - 1 for prompt in PROMPTS]
    unread = None
    while unread is None or not all(pipeline.step.state.finished.tolist()):
        before = max(lengths.tolist())
        most = max(known) + (0 if unread is None else 4)
        numbers = pipeline.run()
        bound = bounds[int([e for e in recorder.log if e.startswith("start")][-1].split()[1])]
        assert before <= most
        assert bound == min(each for each in bounds if each >= min(most, MAX_LENGTH))
        used.append(bound)
        if numbers is not None:
            known = [had + len(ids) for had, ids in zip(known, numbers.token_ids, strict=True)]
        unread = True
    assert sorted(set(used)) == [16, 32, 64]
    assert used == sorted(used)


def test_a_bound_that_is_too_low_is_refused():
    """The test above stands on this: where numbers are checked, a wrong bucket is found out."""
    step = new_step()
    start_step(step, PROMPTS[0], 60)
    with pytest.raises(ValueError, match=r"lengths: expected 0\.\.8, got \[12, 0\]"):
        step.run(longest=8)


def test_a_stopped_sequence_says_no_more():
    """As at a stop string: read a step late, the step in flight is not shown nor counted, and the other
    sequence goes on as if nothing was."""
    steps, _ = eager()
    pipeline, _ = pipelined()
    shown = [pipeline.run() or pipeline.run() for _ in range(4)]
    pipeline.stop(0)
    length = int(pipeline.step.state.lengths[0])
    rest = read_to_end_of(pipeline, 1)
    assert [each.token_ids for each in shown] == steps[:4]
    assert all(each.token_ids[0] == [] for each in rest)
    assert [each.token_ids[1] for each in rest] == [ids[1] for ids in steps[4:] if ids[1]]
    assert int(pipeline.step.state.lengths[0]) == length
    assert steps[4][0], "something was dropped"


def read_to_end_of(pipeline, sequence):
    found = []
    while not found or not found[-1].finished[sequence]:
        found.append(pipeline.run() or pipeline.run())
    pipeline.drain()
    return found


def test_a_request_that_begins_in_flight_gets_its_own_tokens_alone():
    steps, _ = eager()
    alone = [ids[1] for ids in steps if ids[1]]
    pipeline, _ = pipelined()
    for _ in range(3):
        pipeline.run()
    pipeline.stop(0)
    begin(pipeline, 0, PROMPTS[1], LIMITS[1])
    first = pipeline.run()
    assert first.token_ids[0] == []
    assert first.finished[0] is False
    assert [each.token_ids[0] for each in read_to_end_of(pipeline, 0)] == alone


def test_an_end_that_is_read_late_is_not_told_of_the_next_request():
    """The step in flight ran for the old request, which was over; so it says nothing of the new one."""
    pipeline, _ = pipelined()
    read = pipeline.run() or pipeline.run()
    while not read.finished[1]:
        read = pipeline.run()
    begin(pipeline, 1, PROMPTS[1], LIMITS[1])
    assert pipeline.run().finished[1] is False


def test_logits_that_are_not_finite_are_told():
    pipeline, _ = pipelined()
    with torch.inference_mode():
        pipeline.step.kv_cache.data[:, 1, 1, :, 0] = float("inf")
    assert (pipeline.run() or pipeline.run()).finite == [True, False]


def test_recording_moves_nothing():
    step = new_step()
    recorder = EagerRecorder()
    pipeline = PipelinedStep(step, recorder)
    assert recorder.recorded == len(buckets(MAX_LENGTH)) == 4
    assert pipeline.capture_seconds > 0
    assert step.state.lengths.tolist() == [0, 0]
    assert step.state.finished.tolist() == [True, True]
    assert not step.pool.counts.any()


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(
        ValueError, match="expected one of fixed shape, got one that leaves rows out"
    ):
        PipelinedStep(new_step(fixed_shape=False), EagerRecorder())
    step = new_step()
    start_step(step, PROMPTS[0], 60)
    with pytest.raises(ValueError, match=r"expected no sequence to be running .* \[False, True\]"):
        PipelinedStep(step, EagerRecorder())
