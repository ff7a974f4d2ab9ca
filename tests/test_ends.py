"""How a request ends, and what it leaves behind for the next one.

Models with a scripted answer, so that the tokens of each step are known beforehand: the counting model
is right about every n-gram, so a step of N-grams emits N tokens.
"""

import math
import random

import pytest
from oracles.naive_llama import naive_greedy, naive_next_token, random_checkpoint
from tiny_models import (
    FragmentTokenizer,
    ScriptedModel,
    build_engine,
    build_llama,
    engine_cache,
    letters,
    one_thread,
)

from lookahead.config import LookaheadConfig
from lookahead.detokenizer import ByteRule, Decoding, IncrementalDetokenizer
from lookahead.errors import InputError
from lookahead.stops import StopText

PERIOD = 12
# Holds every n-gram of the counting model; the answer begins with 0.
PROMPT = [place % PERIOD for place in range(2 * PERIOD)]
N = 5
SHAPES = [(0, N, 1), (3, N, 2)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def count(ids):
    return (ids[-1] + 1) % PERIOD


def counted(num_tokens):
    return [place % PERIOD for place in range(num_tokens)]


def counting_engine(eos_token_ids=(), max_length=128):
    return build_engine(ScriptedModel(count, PERIOD, eos_token_ids), max_length=max_length)


def run(engine, prompt=PROMPT, shape=(0, N, 1), **options):
    """Stream one request; check what always holds; return the result and the ids of each step."""
    records = []
    config = LookaheadConfig(*shape)
    stream = engine.stream(prompt, lookahead=config, trace=records.append, **options)
    chunks = list(stream)
    result = stream.result
    assert stream.is_done
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert result.new_tokens == len(result.token_ids)
    assert result.steps == len(records)
    return result, [record.emitted for record in records]


def blocks(ids, size=N):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("ngram", [2, 3, 4, 6])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_always_accepted(window, ngram):
    for guesses in (1, 3):
        result, emitted = run(counting_engine(), shape=(window, ngram, guesses), max_new_tokens=30)
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
    # N = 3, G = 1, from "0 1 3 0 2 3 0": the one candidate of 0 is always last time's, and wrong;
    # 1 and 2 know (3, 0), which is right and brings the next 1 or 2 along. So every second step of
    # key 0 is never seen: the first finds (2, 3), 1 finds (3, 0), then 2 finds (3, 0), and so on.
    result, emitted = run(engine, text[:7], shape=(0, 3, 1), max_new_tokens=13)
    assert emitted == [[1], [3, 0, 2], [3, 0, 1], [3, 0, 2], [3, 0, 1]]
    assert result.token_ids == text[7:20]
    # With two candidates the right one of 0 is the older, and the last step is cut at the limit.
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


# The counting model in words, three tokens a step: 0 1 2, 3 4 0, 1 2 3.
WORDS = ["the ", "cat ", "sat. ", "on ", "a "]
SENTENCE = "the cat sat. on a the cat sat. on "


def run_words(stops, shape, eos_token_ids=(), **options):
    script = ScriptedModel(lambda ids: (ids[-1] + 1) % 5, 5, eos_token_ids)
    engine = build_engine(script, FragmentTokenizer(WORDS))
    prompt = [place % 5 for place in range(10)]
    stopped = run(engine, prompt, shape, max_new_tokens=9, stop=stops, **options)
    # The next request is as if nothing had happened.
    after, _ = run(engine, prompt, shape, max_new_tokens=9, ignore_eos=True)
    assert (after.text, after.finish_reason) == (SENTENCE, "length")
    return stopped


@pytest.mark.parametrize("shape", [(0, 3, 1), (2, 3, 2), (0, 2, 0)])
@pytest.mark.parametrize(
    ("stops", "text", "num_ids", "completed_by"),
    [
        (["at"], "the c", 1, 2),  # within a token
        (["t s"], "the ca", 1, 3),  # across the border of two
        (["sat. "], "the cat ", 2, 3),  # a token, to its end
        (["."], "the cat sat", 2, 3),
        ([". on"], "the cat sat", 2, 4),  # across the border of two steps
        (["at sat. on a t"], "the c", 1, 6),
        (["sat. on a the cat s"], "the cat ", 2, 8),  # in three steps
        (["the "], "", 0, 1),
        ([SENTENCE], "", 0, 9),  # complete with the last token there is room for
        (["sat. on", "t."], "the cat sa", 2, 3),  # the second begins later and is complete first
        (["t.", "sat. on"], "the cat sa", 2, 3),
        (["cat sat", "t s"], "the ca", 1, 3),
        (["at ", "cat "], "the ", 1, 2),  # both complete at once: the longer
        (["cat ", "at "], "the ", 1, 2),
        (["e c", "the cat"], "th", 0, 2),
        (["dog", "the cat sat. off", "a the"], "the cat sat. on ", 4, 6),
    ],
)
def test_the_text_ends_before_the_first_stop_that_is_complete(
    stops, text, num_ids, completed_by, shape
):
    result, emitted = run_words(stops, shape)
    assert (result.text, result.finish_reason) == (text, "stop")
    assert result.token_ids == [place % 5 for place in range(num_ids)]
    tokens_a_step = 3 if shape[2] else 1
    assert len(emitted) == -(-completed_by // tokens_a_step)


@pytest.mark.parametrize("shape", [(0, 3, 1), (2, 3, 2), (0, 2, 0)])
@pytest.mark.parametrize(
    "stops",
    [["dog"], ["sat. off", "cats"], ["on a dog"], ["the cat sat. on a tree", SENTENCE + "a"]],
)
def test_a_stop_that_never_comes_takes_nothing(stops, shape):
    result, _ = run_words(stops, shape)
    assert (result.text, result.finish_reason) == (SENTENCE, "length")
    assert result.token_ids == [place % 5 for place in range(9)]


@pytest.mark.parametrize("shape", [(0, 3, 1), (2, 3, 2), (0, 2, 0)])
def test_stops_and_end_of_text(shape):
    # The answer is 0 1 2 3 4, and 4 has no text then.
    result, _ = run_words(["on a"], shape, eos_token_ids=(4,))
    assert (result.text, result.finish_reason) == ("the cat sat. on ", "eos")
    assert result.token_ids == [0, 1, 2, 3, 4]
    result, emitted = run_words(["on"], shape, eos_token_ids=(4,))
    assert (result.text, result.finish_reason) == ("the cat sat. ", "stop")
    assert result.token_ids == [0, 1, 2]
    assert [token for ids in emitted for token in ids] == (
        [0, 1, 2, 3, 4] if shape[2] else counted(4)
    )
    result, _ = run_words(["on a"], shape, eos_token_ids=(4,), ignore_eos=True)
    assert (result.text, result.token_ids) == ("the cat sat. ", [0, 1, 2])


def chunks_of(stops, fragments, groups, rule=ByteRule.SEQUENCE, end_id=None):
    """Push ids in groups as a stream does; return the StopText and what each call released."""
    decoding = Decoding(fragments.__getitem__, rule, strip_left=0)
    text = StopText(IncrementalDetokenizer(decoding), stops)
    plain = IncrementalDetokenizer(decoding)
    chunks, whole = [], ""
    for ids in groups:
        chunks.append(text.push(ids))
        whole += plain.push(ids)
        if text.stopped:
            break
        # Held back is the longest end that a stop begins with, no more and no less.
        ends = [whole[start:] for start in range(len(whole) + 1)]
        held = next(end for end in ends if not end or any(s.startswith(end) for s in stops))
        assert text.text + held == whole
    chunks.append(text.finish(end_id))
    assert "".join(chunk for chunk, _ in chunks) == text.text
    assert [token for _, ids in chunks for token in ids] == text.token_ids
    return text, chunks


def test_text_is_held_while_a_stop_may_take_it_and_then_released():
    groups = [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    _, chunks = chunks_of(["sat. off"], WORDS, groups)
    assert chunks == [
        ("the cat ", [0, 1]),
        ("sat. on a the ", [2, 3, 4, 0]),
        ("cat sat. on ", [1, 2, 3]),
        ("", []),
    ]
    _, chunks = chunks_of(["cat sat. on a tree"], WORDS, groups)
    assert chunks == [
        ("the ", [0]),
        ("cat sat. on a the ", [1, 2, 3, 4, 0]),
        ("", []),
        ("cat sat. on ", [1, 2, 3]),
    ]
    _, chunks = chunks_of([], WORDS, groups, end_id=7)
    assert chunks[2:] == [("cat sat. on ", [1, 2, 3]), ("", [7])]
    text, chunks = chunks_of(["sat"], WORDS, groups, end_id=7)
    assert chunks == [("the cat ", [0, 1]), ("", [])]
    assert text.push([3]) == ("", [])


FRAGMENTS = ["a", "b", "ab", "ba", "aab", "", None, b"\xc3", b"\xa9", b"a", "é", b"\xa9b"]
STOPS = [
    "a",
    "b",
    "ab",
    "aa",
    "ba",
    "bab",
    "aba",
    "abab",
    "é",
    "éa",
    "aé",
    "bé",
    "\ufffd",
    "\ufffdb",
]


def expected_text_and_ids(stops, rule, ids):
    """From all ids at once: the earliest end of a stop, and of those that end there the longest."""
    detokenizer = IncrementalDetokenizer(Decoding(FRAGMENTS.__getitem__, rule, strip_left=0))
    text = detokenizer.push(ids) + detokenizer.flush()
    found = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not found:
        return text, ids, False
    start = min(found)[1]
    taken = [end > start for end in detokenizer.text_ends]
    return text[:start], ids[: (*taken, True).index(True)], True


@pytest.mark.parametrize("rule", ByteRule)
def test_where_text_ends_does_not_depend_on_how_ids_come(rule):
    draw = random.Random(0)
    num_stopped = 0
    for _ in range(1500):
        ids = [draw.randrange(len(FRAGMENTS)) for _ in range(draw.randint(1, 14))]
        stops = draw.sample(STOPS, draw.randint(0, 3))
        expected = expected_text_and_ids(stops, rule, ids)
        num_stopped += expected[2]
        for largest in (1, 3, 6, 14):
            groups, rest = [], ids
            while rest:
                size = draw.randint(min(1, largest - 1), largest)
                groups.append(rest[:size])
                rest = rest[size:]
            text, _ = chunks_of(stops, FRAGMENTS, groups, rule)
            assert (text.text, text.token_ids, text.stopped) == expected
    assert 500 < num_stopped < 1400


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
            engine._state.tokens[:, committed + 1 :] = 10**6
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
@pytest.mark.parametrize("where", ["forward", "commit", "insert", "shift", "trace"])
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
        step = engine._step
        owner = {
            "forward": model,
            "commit": step.kv_cache,
            "insert": step.pool,
            "shift": step.window,
        }[where]
        original = getattr(owner, where)
        monkeypatch.setattr(owner, where, fail_in_the_end)
    with pytest.raises(Interruption), stream:
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
