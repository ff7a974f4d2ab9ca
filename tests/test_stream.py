"""What a request leaves behind for the next one: nothing, however it ended."""

import math

import pytest
from oracles.naive_llama import naive_greedy, naive_next_token, random_checkpoint
from tiny_models import build_engine, build_llama, engine_cache

from lookahead import step_numba
from lookahead.config import LookaheadConfig
from lookahead.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


REQUESTS = [([1, 2, 3, 0, 1, 2], (3, 4, 3)), ([2], (0, 3, 4)), ([3, 0] * 9, (3, 4, 3))]


@pytest.fixture(scope="module")
def llama():
    """A random model, and for each of REQUESTS its greedy answer."""
    checkpoint = random_checkpoint(0, vocab_size=4)
    next_token = naive_next_token(*checkpoint)
    answers = [naive_greedy(next_token, prompt, 20) for prompt, _ in REQUESTS]
    return build_llama(checkpoint), answers


def trace_of(engine, prompt, shape):
    records = []
    config = LookaheadConfig(*shape)
    result = engine.generate(prompt, max_new_tokens=20, lookahead=config, trace=records.append)
    return result.token_ids, records


def expect_as_on_a_fresh_engine(engine, model, answers):
    for (prompt, shape), answer in zip(REQUESTS, answers, strict=True):
        actual = trace_of(engine, prompt, shape)
        assert actual == trace_of(build_engine(model), prompt, shape)
        assert actual[0] == answer


def test_requests_do_not_influence_one_another(llama):
    engine = build_engine(llama[0])
    for _ in range(2):
        expect_as_on_a_fresh_engine(engine, *llama)


def test_a_request_reads_nothing_that_it_did_not_write(llama):
    model, answers = llama
    engine = build_engine(model)
    for (prompt, shape), answer in zip(REQUESTS, answers, strict=True):
        engine_cache(engine).data.fill_(math.nan)  # between two requests all of it is old
        stream = engine.stream(prompt, max_new_tokens=20, lookahead=LookaheadConfig(*shape))
        ids = []
        for chunk in stream:
            ids += chunk.token_ids
            committed = len(prompt) + len(ids) - 1
            engine_cache(engine).data[..., committed:, :] = math.nan
            engine._steps.state.tokens[:, committed + 1 :] = 10**6
        assert ids == answer


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
@pytest.mark.parametrize("how", ["closed", "left", "dropped"])
def test_a_stream_ended_early_leaves_the_engine_ready(how, num_chunks, llama):
    model, answers = llama
    engine = build_engine(model)
    stream = engine.stream([3, 0, 3], max_new_tokens=20, lookahead=LookaheadConfig(3, 4, 3))
    ids = [token for _ in range(num_chunks) for token in next(stream).token_ids]
    if how == "closed":
        stream.close()
        stream.close()
    elif how == "left":
        with stream:
            pass
    if how == "dropped":
        del stream
    else:
        assert (stream.result.token_ids, stream.result.finish_reason) == (ids, "interrupted")
        assert stream.result.steps == num_chunks
        assert list(stream) == []
    expect_as_on_a_fresh_engine(engine, model, answers)


class Interruption(BaseException):
    """As Ctrl-C, which is no Exception either."""


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["look_up", "fill", "choose", "settle", "trace"])
def test_an_exception_leaves_the_engine_ready(where, calls, llama, monkeypatch):
    model, answers = llama
    engine = build_engine(model)
    config, left = LookaheadConfig(3, 4, 3), calls

    def fail_in_the_end(*arguments, **options):
        nonlocal left
        left -= 1
        if not left:
            raise Interruption
        return original(*arguments, **options)

    original = (lambda record: None) if where == "trace" else None
    stream = engine.stream(
        [3, 0, 3, 1, 0], max_new_tokens=20, lookahead=config, trace=original and fail_in_the_end
    )
    if where != "trace":
        owner = model if where == "choose" else step_numba
        original = getattr(owner, where)
        monkeypatch.setattr(owner, where, fail_in_the_end)
    with pytest.raises(Interruption):
        list(stream)
    monkeypatch.undo()
    assert stream.result.finish_reason == "interrupted"
    expect_as_on_a_fresh_engine(engine, model, answers)


def test_two_streams_at_once_are_refused(llama):
    model, answers = llama
    engine = build_engine(model)
    prompt, shape = REQUESTS[0]
    options = {"max_new_tokens": 20, "lookahead": LookaheadConfig(*shape)}
    first = engine.stream(prompt, **options)
    ids = []
    for _ in range(3):  # before it started, and while it runs
        with pytest.raises(InputError, match="another stream of this engine is running"):
            engine.stream([1, 2], lookahead=LookaheadConfig(1, 2, 1))
        with pytest.raises(InputError, match="another stream of this engine is running"):
            engine.generate([1, 2], mode="autoregressive")
        ids += next(first).token_ids
    for chunk in first:
        ids += chunk.token_ids
    assert ids == first.result.token_ids == answers[0]
    second = engine.stream(prompt, **options)
    first.close()  # has ended by itself: changes nothing, for either
    assert first.result.finish_reason == "length"
    assert [token for chunk in second for token in chunk.token_ids] == answers[0]


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_stream_that_is_over_never_disturbs_the_running_one(num_chunks, llama):
    model, answers = llama
    engine = build_engine(model)
    over = engine.stream([3, 0, 3], max_new_tokens=20, lookahead=LookaheadConfig(3, 4, 3))
    for _ in range(num_chunks):
        next(over)
    over.close()
    prompt, shape = REQUESTS[0]
    running = engine.stream(prompt, max_new_tokens=20, lookahead=LookaheadConfig(*shape))
    ids = list(next(running).token_ids)
    assert list(over) == []
    ids += [token for chunk in running for token in chunk.token_ids]
    assert ids == answers[0]
    if num_chunks == 0:
        assert over.result.prefill_seconds == 0.0
