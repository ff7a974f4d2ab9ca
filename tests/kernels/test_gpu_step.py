"""What only a GPU can show of a whole step: recorded and replayed, without a wait, in every bucket, and
through the engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from attention_cases import same_bits
from oracles.naive_llama import random_checkpoint
from tiny_models import build_engine, build_llama, build_step

from lookahead.config import LookaheadConfig
from lookahead.engine import Engine
from lookahead.prefill import prefill
from lookahead.step import Step
from lookahead.step_costs import StepCosts
from lookahead.step_graph import PipelinedStep, buckets

pytest.importorskip("triton", reason="Triton is not available for this platform")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use"),
]

CUDA = torch.device("cuda")
MAX_LENGTH = 1500  # three buckets
SHAPES = [(5, 4, 5), (15, 5, 15), (0, 5, 3), (0, 2, 0)]


def draw_prompt(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(8, (num_tokens,), generator=generator).tolist()


def new_step(shape: tuple[int, int, int], batch_size: int = 1, dtype=torch.bfloat16) -> Step:
    checkpoint = random_checkpoint(1, vocab_size=8, head_dim=16, max_position_embeddings=4096)
    model = build_llama(checkpoint, dtype, 2048, implementation="triton", device=CUDA)
    return build_step(model, LookaheadConfig(*shape), MAX_LENGTH, batch_size)


@torch.inference_mode()
def begin(starter: Step | PipelinedStep, step: Step, sequence: int, prompt: list[int], new: int):
    """Start a request of `new` tokens."""
    starter.start(sequence, prompt, len(prompt) + new, ())
    tokens = torch.tensor(prompt[:-1], device=CUDA)
    prefill(step.model, step.kv_cache.sequence(sequence), tokens)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def left_behind(step: Step) -> list[torch.Tensor]:
    """Text, committed keys and values, window and pool, of a step over one sequence."""
    length = int(step.state.lengths[0])
    pool = step.pool
    is_filled = torch.arange(pool.guesses, device=CUDA) < pool.counts.unsqueeze(2)
    return [
        step.state.tokens[0, : length + 1],
        step.kv_cache.data[:, :, 0, :, :length].contiguous().view(torch.uint8),
        step.window.tokens,
        step.window.steps,
        pool.counts,
        pool.entries[is_filled],
        pool.origins[is_filled],
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_replayed_request_is_the_eager_one_to_the_bit(shape):
    """From one bucket into the next and on, every step's tokens and all that is left behind."""
    prompt, new = draw_prompt(480), 600
    eager = new_step(shape)
    begin(eager, eager, 0, prompt, new)
    expected = []
    while not bool(eager.state.finished[0]):
        output = eager.run()
        expected.append(output.emitted[0, : int(output.counts[0])].tolist())
    step = new_step(shape)
    pipeline = PipelinedStep(step)
    assert len(buckets(MAX_LENGTH)) == 3
    begin(pipeline, step, 0, prompt, new)
    found = []
    finished = False
    while not finished:
        numbers = pipeline.run() or pipeline.run()
        found.append(numbers.token_ids[0])
        finished = numbers.finished[0]
    assert found == expected
    assert sum(map(len, found)) == new
    idle = pipeline.drain()
    assert idle is not None
    assert idle.token_ids == [[]]
    for mine, other in zip(left_behind(step), left_behind(eager), strict=True):
        assert torch.equal(mine, other)
    assert pipeline.capture_seconds > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_step_makes_the_host_wait(shape):
    """Eager or replayed; the copy to the host is waited for by its event alone."""
    step = new_step(shape, batch_size=2)
    pipeline = PipelinedStep(step)
    for starter in (step, pipeline):
        for sequence in range(2):
            begin(starter, step, sequence, draw_prompt(100 + sequence), 200)
        with no_waiting():
            for _ in range(8):
                starter.run()
    numbers = pipeline.drain()
    assert numbers is not None
    assert all(numbers.token_ids)


def test_a_wait_would_be_found():
    step = new_step((5, 4, 5))
    begin(step, step, 0, draw_prompt(100), 100)
    with no_waiting(), pytest.raises(RuntimeError):
        step.run().counts.max().item()


def test_looking_at_a_trace_waits():
    """A trace is read on the host, which is why there is none in a pipeline."""
    step = new_step((5, 4, 5))
    begin(step, step, 0, draw_prompt(100), 100)
    step.run()
    with no_waiting(), pytest.raises(RuntimeError):
        step.run(trace=lambda record: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_bit_of_the_logits_depends_on_the_bucket(dtype):
    prompt = draw_prompt(500)
    logits = []
    for longest in (512, 600, 1024, MAX_LENGTH, None):
        step = new_step((5, 4, 5), dtype=dtype)
        begin(step, step, 0, prompt, 12)
        outputs = [step.run(keep_logits=True, longest=longest) for _ in range(3)]
        counts = [int(output.counts[0]) for output in outputs]
        logits.append(
            torch.cat(
                [
                    output.logits[0, :count]
                    for output, count in zip(outputs, counts, strict=True)
                    if output.logits is not None
                ]
            )
        )
    for other in logits[1:]:
        assert same_bits(logits[0], other)


def test_a_stopped_sequence_says_no_more_and_the_other_goes_on():
    alone = new_step((5, 4, 5), batch_size=2)
    for sequence in range(2):
        begin(alone, alone, sequence, draw_prompt(60 + sequence), 80)
    expected = []
    while not bool(alone.state.finished[1]):
        output = alone.run()
        expected += output.emitted[1, : int(output.counts[1])].tolist()
    step = new_step((5, 4, 5), batch_size=2)
    pipeline = PipelinedStep(step)
    for sequence in range(2):
        begin(pipeline, step, sequence, draw_prompt(60 + sequence), 80)
    found, finished, steps = [], False, 0
    while not finished:
        numbers = pipeline.run() or pipeline.run()
        found += numbers.token_ids[1]
        finished = numbers.finished[1]
        assert numbers.token_ids[0] == [] if steps >= 3 else numbers.token_ids[0]
        steps += 1
        if steps == 3:
            pipeline.stop(0)
    assert found == expected


# Through the engine


def new_engine(batch_size: int, implementation: str = "triton") -> Engine:
    checkpoint = random_checkpoint(1, vocab_size=8, head_dim=16, max_position_embeddings=4096)
    model = build_llama(checkpoint, torch.bfloat16, 2048, implementation, device=CUDA)
    # Rows cost so much that a budget leaves some out.
    costs = StepCosts((1, 101), (1.0, 3.0))
    return build_engine(model, max_length=MAX_LENGTH, batch_size=batch_size, costs=costs)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shape", [(5, 4, 5), (0, 5, 3)], ids=str)
def test_an_engine_answers_by_replays_what_it_answers_eagerly(shape, batch_size):
    """Across buckets, and with a stop string that the host finds while the next step runs."""
    engine = new_engine(batch_size)
    prompts = [draw_prompt(count) for count in (480, 30, 700, 3, 100)]
    text = engine.generate(prompts[1], max_new_tokens=60, mode="autoregressive").text
    options = {"max_new_tokens": 150, "lookahead": LookaheadConfig(*shape), "stop": [text[40:45]]}
    eager = engine.generate(prompts, **options, trace=lambda record: None)
    replayed = engine.generate(prompts, **options)
    assert engine.capture_seconds > 0
    for mine, other in zip(replayed, eager, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert (mine.steps, mine.finish_reason) == (other.steps, other.finish_reason)
        assert mine.rows_per_step == other.rows_per_step
    assert eager[1].finish_reason == "stop"
    # With rows left out as a budget says, steps may be others and ids may not.
    options["lookahead"] = LookaheadConfig(*shape, adaptive=True)
    for _ in range(2):
        adaptive = engine.generate(prompts, **options)
        assert [each.token_ids for each in adaptive] == [each.token_ids for each in eager]


@pytest.mark.parametrize("adaptive", [False, True])
def test_no_batch_makes_the_host_wait_between_its_steps(adaptive):
    engine = new_engine(batch_size=2)
    config = LookaheadConfig(5, 4, 5, adaptive=adaptive)
    prompts = [draw_prompt(100), draw_prompt(101)]
    with engine.batch(prompts, max_new_tokens=200, lookahead=config) as batch:
        next(batch)  # prompts are copied and prefilled
        with no_waiting():
            for _ in range(40):
                next(batch)
    assert [result.steps for result in batch.results] == [21, 21]


def test_operations_that_look_at_numbers_are_not_recorded():
    engine = new_engine(1, implementation="torch")
    assert engine.generate(draw_prompt(30), max_new_tokens=5, mode="autoregressive").new_tokens == 5
    assert engine.capture_seconds == 0.0
