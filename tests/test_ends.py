"""How a request ends, and what it leaves behind for the next one.

Models with a scripted answer, so that the tokens of each step are known beforehand: the counting model
is right about every n-gram, so a step of N-grams emits N tokens.
"""

import math

import pytest
from tiny_models import (
    ScriptedModel,
    build_engine,
    letters,
    run_request,
)

from lookahead.config import LookaheadConfig
from lookahead.errors import InputError

PERIOD = 12
# Holds every n-gram of the counting model; the answer begins with 0.
PROMPT = [place % PERIOD for place in range(2 * PERIOD)]
N = 5
SHAPES = [(0, N, 1), (3, N, 2)]


pytestmark = pytest.mark.usefixtures("one_thread")


def count(ids):
    return (ids[-1] + 1) % PERIOD


def counted(num_tokens):
    return [place % PERIOD for place in range(num_tokens)]


def counting_engine(eos_token_ids=(), max_length=128):
    return build_engine(ScriptedModel(count, PERIOD, eos_token_ids), max_length=max_length)


def run(engine, prompt=PROMPT, shape=(0, N, 1), **options):
    return run_request(engine, prompt, shape, **options)


def blocks(ids, size=N):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("ngram", [2, 3, 4, 6])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_always_accepted(window, ngram):
    for guesses in (1, 3):
        result, emitted = run(
            counting_engine(), PROMPT, shape=(window, ngram, guesses), max_new_tokens=30
        )
        assert result.token_ids == counted(30)
        assert emitted == blocks(counted(30), ngram)
        assert result.tokens_per_step == 30 / len(emitted)


@pytest.mark.parametrize("ngram", [2, 3, 4, 6])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_never_accepted(window, ngram):
    # 0 is followed by something else each time, and the model sees that only on the right path.
    text = [token for number in range(1, 30) for token in (number, 0)]
    wrong, prompt = 63, text[:8]

    def script(ids):
        return text[len(ids)] if list(ids) == text[: len(ids)] else wrong

    candidates = []
    engine = build_engine(ScriptedModel(script, 64))
    result = engine.generate(
        prompt,
        max_new_tokens=30,
        lookahead=LookaheadConfig(window, ngram, 3),
        trace=lambda record: candidates.append(len(record.candidates)),
    )
    assert result.token_ids == text[8:38]
    assert (result.steps, result.tokens_per_step) == (30, 1.0)
    # After the first steps there are as many candidates as can be at each 0, all of them wrong.
    assert candidates[8::2] == [3] * 11


def test_sometimes_accepted():
    # After 0 comes 1 or 2 in turns; 1 and 2 are followed by 3, and 3 by 0.
    text = [0, 1, 3, 0, 2, 3] * 8
    engine = build_engine(ScriptedModel(lambda ids: text[len(ids)], 4))
    # N = 3, G = 1, from "0 1 3 0 2 3 0": the one candidate of 0 is what followed last time, and wrong.
    # 1 and 2 find (3, 0), which is right, and the step brings the next 2 or 1 along.
    result, emitted = run(engine, text[:7], shape=(0, 3, 1), max_new_tokens=13)
    assert emitted == [[1], [3, 0, 2], [3, 0, 1], [3, 0, 2], [3, 0, 1]]
    assert result.token_ids == text[7:20]
    # With G = 2 the older candidate of 0 is right. The last step is cut at the limit.
    result, emitted = run(engine, text[:7], shape=(0, 3, 2), max_new_tokens=13)
    assert emitted == [[1, 3, 0], [2, 3, 0], [1, 3, 0], [2, 3, 0], [1]]
    assert result.token_ids == text[7:20]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", range(PERIOD))
def test_an_end_of_text_id_at_every_depth_of_a_block(place, shape):
    # It ends the text where it first comes in the answer; in the prompt it ended nothing.
    engine = counting_engine(eos_token_ids=(place,))
    result, emitted = run(engine, shape=shape, max_new_tokens=40)
    assert result.token_ids == counted(place + 1)
    assert emitted == blocks(counted(place + 1))
    assert result.text == letters(PERIOD).decode(counted(place))
    assert result.finish_reason == "eos"
    again, emitted_again = run(engine, shape=shape, max_new_tokens=40)
    assert (again.token_ids, emitted_again) == (result.token_ids, emitted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eos_ids", [(7, 9), (9, 7), (11, 7, 8), (8, 7, 30)])
def test_any_end_of_text_id_ends_the_text_and_the_first_one_counts(eos_ids, shape):
    # 5 to 9 are one block.
    model = ScriptedModel(count, 31, eos_ids)
    result, emitted = run(build_engine(model), shape=shape, max_new_tokens=40)
    assert emitted == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert (result.token_ids, result.finish_reason) == (counted(8), "eos")
    assert result.text == "abcdefg"


@pytest.mark.parametrize("shape", SHAPES)
def test_end_of_text_ids_can_be_ignored(shape):
    engine = counting_engine(eos_token_ids=(3, 7))
    result, _ = run(engine, shape=shape, max_new_tokens=23, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == (counted(23), "length")
    assert result.text == letters(PERIOD).decode(counted(23))
    assert run(engine, shape=shape)[0].finish_reason == "eos"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", range(1, 2 * N + 2))
def test_the_limit_at_every_place_of_a_block(num_tokens, shape):
    result, emitted = run(counting_engine(), shape=shape, max_new_tokens=num_tokens)
    assert (result.token_ids, result.finish_reason) == (counted(num_tokens), "length")
    assert emitted == blocks(counted(num_tokens))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("room", range(1, 2 * N + 2))
def test_the_end_of_the_context_at_every_place_of_a_block(room, shape):
    engine = counting_engine(max_length=len(PROMPT) + room)
    result, emitted = run(engine, shape=shape, max_new_tokens=40)
    assert (result.token_ids, result.finish_reason) == (counted(room), "context")
    assert emitted == blocks(counted(room))
    # Where the limit is met first, or at the same token, it is the limit that ended the text.
    for num_tokens in range(1, room + 1):
        result, _ = run(engine, shape=shape, max_new_tokens=num_tokens)
        assert (result.token_ids, result.finish_reason) == (counted(num_tokens), "length")


def test_end_of_text_is_the_reason_even_at_the_limit():
    engine = counting_engine(eos_token_ids=(6,), max_length=len(PROMPT) + 7)
    for num_tokens, reason in ((6, "length"), (7, "eos"), (8, "eos")):
        result, _ = run(engine, max_new_tokens=num_tokens)
        assert (result.new_tokens, result.finish_reason) == (min(num_tokens, 7), reason)


def counting_but(bad, at):
    """The counting model, but after these paths its logits are all `bad`."""

    def script(ids):
        return bad if ids in at else count(ids)

    return script


@pytest.mark.parametrize("shape", [(0, 2, 0), *SHAPES])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 4, 5, 7])
def test_logits_that_are_not_finite_are_an_error(place, bad, shape):
    script = counting_but(bad, {(*PROMPT, *counted(place))})
    engine = build_engine(ScriptedModel(script, PERIOD))
    shown = place if shape[2] == 0 else place // N * N  # what came in the steps before
    chunks = []
    stream = engine.stream(PROMPT, max_new_tokens=30, lookahead=LookaheadConfig(*shape))
    with pytest.raises(InputError, match=f"not finite after {shown} new tokens.*float64"):
        chunks.extend(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == counted(shown)
    assert stream.result.token_ids == counted(shown)
    assert stream.result.finish_reason == "interrupted"
    # The request is over, and the engine serves another prompt.
    assert list(stream) == []
    assert run(engine, [7, 8], max_new_tokens=3)[0].token_ids == [9, 10, 11]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_behind_the_end_may_be_anything(shape):
    script = counting_but(math.nan, {(*PROMPT, *counted(6))})
    engine = build_engine(ScriptedModel(script, PERIOD, eos_token_ids=(5,)))
    assert run(engine, shape=shape)[0].token_ids == counted(6)
    engine = build_engine(ScriptedModel(script, PERIOD))
    assert run(engine, shape=shape, max_new_tokens=6)[0].token_ids == counted(6)


@pytest.mark.parametrize("window", [0, 3])
def test_logits_of_paths_not_taken_may_be_anything(window):
    text = [0, 1, 3, 0, 2, 3] * 8

    def script(ids):
        return text[len(ids)] if list(ids) == text[: len(ids)] else math.nan

    engine = build_engine(ScriptedModel(script, 4))
    result, emitted = run(engine, text[:7], shape=(window, 3, 1), max_new_tokens=13)
    assert result.token_ids == text[7:20]
    assert emitted[0] == [1]  # the candidate (2, 3) was wrong
