"""Where text ends when stop strings are given, however many tokens a step brings."""

import random

import pytest
from tiny_models import FragmentTokenizer, ScriptedModel, build_engine, run_request

from lookahead.detokenizer import ByteRule, Decoding, IncrementalDetokenizer
from lookahead.stops import StopText

pytestmark = pytest.mark.usefixtures("one_thread")


# The counting model in words, three tokens a step: 0 1 2, 3 4 0, 1 2 3.
WORDS = ["the ", "cat ", "sat. ", "on ", "a "]
SENTENCE = "the cat sat. on a the cat sat. on "


def run_words(stops, shape, eos_token_ids=(), **options):
    script = ScriptedModel(lambda ids: (ids[-1] + 1) % 5, 5, eos_token_ids)
    engine = build_engine(script, FragmentTokenizer(WORDS))
    prompt = [place % 5 for place in range(10)]
    stopped = run_request(engine, prompt, shape, max_new_tokens=9, stop=stops, **options)
    # The next request is as if nothing had happened.
    after, _ = run_request(engine, prompt, shape, max_new_tokens=9, ignore_eos=True)
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
        [0, 1, 2, 3, 4] if shape[2] else [0, 1, 2, 3]
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
