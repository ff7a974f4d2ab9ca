"""A conversation: what is said in which order, which ids that comes to, and what is read only once."""

from dataclasses import replace
from functools import partial
from itertools import product, takewhile
from pathlib import Path

import pytest
import torch
from eager_recorder import EagerRecorder
from tiny_checkpoint import CHAT_TEMPLATE, END, byte_tokenizer, tiny_model, write_tiny_checkpoint
from tiny_models import build_llama, engine_cache, one_thread, pool_of

from lookahead import Engine, LookaheadConfig, SamplingConfig, step_graph
from lookahead.detokenizer import IncrementalDetokenizer
from lookahead.errors import InputError
from lookahead.step_graph import PipelinedStep
from lookahead.tokenizer import Tokenizer

SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
SHAPE = LookaheadConfig(3, 4, 3)
MODES = [("lookahead", SHAPE), ("autoregressive", None)]
MESSAGES = ["abc abd abc", "hg", "a bad cab", "x", "abc abd"]
NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def _short_buckets(monkeypatch):
    monkeypatch.setattr(step_graph, "SHORTEST_BUCKET", 128)
    with one_thread():
        yield


def make_engine(
    directory,
    *,
    late=False,
    dtype=torch.float32,
    template=CHAT_TEMPLATE,
    eos=None,
    silent=None,
    max_length=400,
):
    """A tiny model that chats; `late` has its steps recorded and read a step late, `eos` is a
    character that ends a text, `silent` one in whose place the model writes a token without text."""
    write_tiny_checkpoint(directory, chat_template=template)
    weights, fields = tiny_model()
    if silent is not None:
        (token,) = byte_tokenizer().encode(silent).ids
        head = weights["lm_head.weight"]
        head[byte_tokenizer().token_to_id(END)] = head[token]
        head[token] = 0
    fields["eos_token_id"] = [] if eos is None else byte_tokenizer().encode(eos).ids
    dtype, kind = (torch.float64, "torch") if late else (dtype, "numba")
    engine = Engine(
        build_llama((weights, fields), dtype, implementation=kind),
        Tokenizer.load(directory),
        max_length=max_length,
        recorder=EagerRecorder() if late else None,
    )
    engine_cache(engine).data.fill_(torch.nan)  # what is read before it was written shows
    return engine


@pytest.fixture(params=[False, True], ids=["read at once", "read late"])
def engine(request, tmp_path):
    return make_engine(tmp_path, late=request.param)


def say(conversation, text, shape=SHAPE, mode="lookahead", **options):
    """One whole turn; its result."""
    options = {"max_new_tokens": NUM_TOKENS, **options}
    return conversation.say(text, mode=mode, lookahead=shape, **options).run_to_end()


def answer_alone(engine, conversation, shape=SHAPE, mode="lookahead", **options):
    """Ids of the answer to the last turn's ids from an engine that has read nothing."""
    options = {"max_new_tokens": NUM_TOKENS, **options}
    fresh = Engine(engine.model, engine.tokenizer, max_length=engine.max_length)
    ids = conversation.turn.token_ids
    return fresh.generate(ids, mode=mode, lookahead=shape, **options).token_ids


def counts(conversation):
    return conversation.prefilled_tokens, conversation.reused_tokens


@pytest.mark.parametrize(("mode", "shape"), MODES, ids=["lookahead", "autoregressive"])
def test_a_turn_reads_only_what_is_new_and_answers_as_if_it_had_read_all(engine, mode, shape):
    conversation = engine.conversation("be brief")
    expected = [{"role": "system", "content": "be brief"}]
    committed = 0
    for text in MESSAGES:
        result = say(conversation, text, shape, mode)
        expected.append({"role": "user", "content": text})
        ids = conversation.turn.token_ids
        assert ids == engine.tokenizer.chat_ids(expected)
        assert counts(conversation) == (len(ids) - 1 - committed, committed)
        assert not conversation.is_rewritten
        assert result.token_ids == answer_alone(engine, conversation, shape, mode)
        expected.append({"role": "assistant", "content": result.text})
        assert conversation.messages == expected
        committed = len(ids) + len(result.token_ids) - 1
    assert isinstance(engine._steps.pipeline, PipelinedStep) == engine._steps.is_recorded


def with_logits(start, **options):
    """A whole answer and the logits [count, vocab] that its tokens are the choices of."""
    rows = []
    stream = start(on_logits=lambda logits: rows.append(logits.clone()), **options)
    return stream.run_to_end(), torch.cat(rows)


def check_bits(engine, messages, **options):
    """Each turn's ids and logits are those of a fresh engine that is given all the ids at once."""
    conversation = engine.conversation()
    for number, text in enumerate(messages):
        result, logits = with_logits(partial(conversation.say, text), **options)
        assert (conversation.reused_tokens > 0) == (number > 0)
        fresh = Engine(engine.model, engine.tokenizer, max_length=engine.max_length)
        start = partial(fresh.stream, conversation.turn.token_ids)
        expected, expected_logits = with_logits(start, **options)
        assert result.token_ids == expected.token_ids
        assert torch.equal(logits, expected_logits)
    return conversation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "shape"), MODES, ids=["lookahead", "autoregressive"])
def test_the_bits_of_every_logit(tmp_path, dtype, mode, shape):
    engine = make_engine(tmp_path, dtype=dtype)
    check_bits(engine, MESSAGES, mode=mode, lookahead=shape, max_new_tokens=NUM_TOKENS)


def test_the_bits_of_a_sampled_answer(tmp_path):
    """What penalties count, and the random number of a position, know nothing of turns."""
    engine = make_engine(tmp_path)
    sampling = SamplingConfig(temperature=1.5, repetition_penalty=1.3, presence_penalty=0.5, seed=3)
    check_bits(engine, MESSAGES, lookahead=SHAPE, sampling=sampling, max_new_tokens=NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make test` makes the SmolLM2 checkpoint")
@pytest.mark.parametrize("mode", ["lookahead", "autoregressive"])
def test_smollm2_in_bfloat16(mode):
    engine = Engine.load(SMOLLM2, device="cpu", dtype="bfloat16", max_length=1024)
    messages = [
        "What is the capital of France?",
        "Write a short poem about it.",
        "Now list the numbers from one to ten.",
        "Repeat the poem.",
    ]
    shape = LookaheadConfig(5, 4, 5)
    conversation = check_bits(engine, messages, mode=mode, lookahead=shape, max_new_tokens=32)
    assert not conversation.is_rewritten


def test_only_new_tokens_go_through_the_model(tmp_path, monkeypatch):
    engine = make_engine(tmp_path)
    conversation = engine.conversation()
    result = say(conversation, "abc")
    seen = []
    forward = engine.model.forward

    def counting_forward(tokens, *arguments, **options):
        seen.extend(tokens.flatten().tolist())
        return forward(tokens, *arguments, **options)

    monkeypatch.setattr(engine.model, "forward", counting_forward)
    stream = conversation.say("hg", max_new_tokens=1, mode="autoregressive")
    next(stream)
    last = result.token_ids[-1:]
    assert seen == [*last, *engine.tokenizer.encode("\nu:hg\na")]  # the colon is the first step's
    assert counts(conversation) == (len(seen), stream.result.prompt_tokens - len(seen) - 1)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_an_interrupted_answer_stays_as_far_as_it_came(engine, num_chunks):
    conversation = engine.conversation()
    say(conversation, "abc")
    stream = conversation.say("bad", lookahead=SHAPE, max_new_tokens=100)
    text = "".join(next(stream).text for _ in range(num_chunks))
    assert conversation.messages[-1] == {"role": "user", "content": "bad"}
    stream.close()
    assert stream.result.finish_reason == "interrupted"
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    before = conversation.turn.token_ids
    result = say(conversation, "hg")
    assert conversation.turn.token_ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
    assert conversation.reused_tokens == len(before) + len(text) - 1
    assert result.token_ids == answer_alone(engine, conversation)


@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_a_message_whose_answer_had_not_begun_is_left_out(engine, num_turns):
    conversation = engine.conversation("be brief")
    for text in ("abc", "a")[:num_turns]:
        say(conversation, text)
    said = conversation.messages
    last = None if conversation.turn is None else conversation.turn
    for text in ("bad", "worse"):
        conversation.say(text, lookahead=SHAPE)
        assert conversation.messages == [*said, {"role": "user", "content": text}]
        conversation.close()
        assert conversation.messages == said
    result = say(conversation, "hg")
    assert conversation.messages[:-1] == [*said, {"role": "user", "content": "hg"}]
    assert not conversation.is_rewritten
    assert conversation.turn.token_ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
    if last is not None:  # what was there before stays in the cache
        assert conversation.reused_tokens == len(last.token_ids) + len(last.answer_ids) - 1
    assert result.token_ids == answer_alone(engine, conversation)


def test_a_message_that_is_refused_leaves_the_cache_alone(engine):
    conversation = engine.conversation()
    result = say(conversation, "abc")
    reused = len(conversation.turn.token_ids) + len(result.token_ids) - 1
    for options in ({"num_samples": 2}, {"max_new_tokens": 0}, {"trace": 3}):
        with pytest.raises(InputError):
            conversation.say("x", **options)
    say(conversation, "hg")
    assert conversation.reused_tokens == reused


def test_a_pool_that_an_answer_did_not_get_to_fill_is_filled_later(engine):
    shape, counts = LookaheadConfig(0, 4, 8), []
    for is_closed in (False, True):
        conversation = engine.conversation()
        say(conversation, "abcdefgh" * 6, max_new_tokens=40)
        if is_closed:
            conversation.say("zz", lookahead=shape).close()
        records = []
        say(conversation, "abc", shape, max_new_tokens=30, trace=records.append)
        counts.append([len(record.candidates) for record in records])
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def test_an_interruption_while_a_prompt_is_read(tmp_path, monkeypatch):
    engine = make_engine(tmp_path)
    conversation = engine.conversation()
    say(conversation, "abc")
    reused = len(conversation.turn.token_ids) + NUM_TOKENS - 1
    commit = engine_cache(engine).commit

    def interrupted_commit(self, rows, counts, lengths):
        commit_of_sequence(self, rows, counts, lengths)
        raise KeyboardInterrupt

    commit_of_sequence = type(engine_cache(engine)).commit
    monkeypatch.setattr(type(engine_cache(engine)), "commit", interrupted_commit)
    stream = conversation.say("bad " * 50, lookahead=SHAPE)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    assert engine_cache(engine).commit == commit
    assert [each["content"] for each in conversation.messages][:1] == ["abc"]
    assert len(conversation.messages) == 2
    result = say(conversation, "hg")
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.reused_tokens == reused
    assert result.token_ids == answer_alone(engine, conversation)


def test_an_answer_that_a_stop_string_ended(engine):
    conversation = engine.conversation()
    whole = say(conversation, "abc", max_new_tokens=30)
    stop = whole.text[9:11]
    conversation.reset()
    result = say(conversation, "abc", max_new_tokens=30, stop=[stop])
    assert result.finish_reason == "stop"
    assert whole.text.startswith(result.text + stop)
    before = conversation.turn.token_ids
    following = say(conversation, "hg")
    assert not conversation.is_rewritten
    assert conversation.turn.token_ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
    # The stop's own tokens are in the cache too, and are not what was said.
    assert conversation.reused_tokens == len(before) + len(result.text)
    assert following.token_ids == answer_alone(engine, conversation)


@pytest.mark.parametrize("late", [False, True])
def test_the_id_that_ends_a_text_is_not_said(late, tmp_path):
    answer = say(make_engine(tmp_path / "endless").conversation(), "abc").text
    end = answer[-1]
    engine = make_engine(tmp_path / "ending", eos=end, late=late)
    conversation = engine.conversation()
    result = say(conversation, "abc")
    assert (result.finish_reason, result.text) == ("eos", answer[: answer.index(end)])
    before = conversation.turn.token_ids
    following = say(conversation, "hg")
    assert not conversation.is_rewritten
    assert conversation.turn.token_ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
    assert conversation.reused_tokens == len(before) + len(result.text)
    assert following.token_ids == answer_alone(engine, conversation)


def test_an_answer_keeps_the_ids_that_the_model_chose(tmp_path):
    """Also those that the answer's text alone would not come to, here one that has no text."""
    engine = make_engine(tmp_path, silent="c")
    conversation = engine.conversation()
    result = say(conversation, "hg")
    silent = engine.tokenizer.eos_token_id
    assert silent in result.token_ids
    ids = [*conversation.turn.token_ids, *result.token_ids, *engine.tokenizer.encode("\nu:abc\na:")]
    following = say(conversation, "abc")
    assert conversation.turn.token_ids == ids
    assert engine.tokenizer.chat_ids(conversation.messages[:-1]) != ids
    assert not conversation.is_rewritten
    assert following.token_ids == answer_alone(engine, conversation)


NUMBERED = "{{ messages | length }}:{% for m in messages %}{{ m['content'] }}\n{% endfor %}a:"
WITHOUT_OLD_ANSWERS = (
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}\n{% endif %}"
    "{% endfor %}a:"
)
FIRST_ALONE = "{{ messages[0]['content'] }}\na:"  # the next prompt is all in the cache


@pytest.mark.parametrize("template", [NUMBERED, WITHOUT_OLD_ANSWERS, FIRST_ALONE])
@pytest.mark.parametrize("late", [False, True])
def test_a_template_that_rewrites_history(template, late, tmp_path):
    engine = make_engine(tmp_path, template=template, late=late)
    conversation = engine.conversation()
    before = []
    for number, text in enumerate(MESSAGES[:3]):
        result = say(conversation, text)
        ids = conversation.turn.token_ids
        assert conversation.is_rewritten == (number > 0)
        assert ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))
        common = min(len(list(same)), len(ids) - 1)
        assert counts(conversation) == (len(ids) - 1 - common, common)
        assert result.token_ids == answer_alone(engine, conversation)
        before = [*ids, *result.token_ids]
    assert (common > 0) == (template != NUMBERED)


def test_another_system_message(engine):
    conversation = engine.conversation("be brief")
    say(conversation, "abc")
    conversation.system = "be bad"
    result = say(conversation, "hg")
    assert conversation.is_rewritten
    assert conversation.reused_tokens == len("s:be b")
    assert conversation.messages[0] == {"role": "system", "content": "be bad"}
    assert result.token_ids == answer_alone(engine, conversation)
    conversation.system = None
    say(conversation, "x")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3


@pytest.mark.parametrize("how", ["read", "not begun", "dropped"])
def test_a_request_between_two_turns(engine, how):
    conversation = engine.conversation()
    say(conversation, "abc abd")
    other = engine.stream([3, 1, 4, 1, 5] * 9, max_new_tokens=20, lookahead=SHAPE)
    if how == "read":
        other.run_to_end()
    elif how == "not begun":
        other.close()
    else:
        next(other)
        del other
    result = say(conversation, "hg")
    assert counts(conversation) == (len(conversation.turn.token_ids) - 1, 0)
    assert not conversation.is_rewritten
    assert result.token_ids == answer_alone(engine, conversation)
    say(conversation, "x")
    assert conversation.reused_tokens > 0


def test_two_conversations_in_turn(engine):
    conversations = [engine.conversation(), engine.conversation("be brief")]
    for text in MESSAGES[:2]:
        for conversation in conversations:
            result = say(conversation, text)
            assert conversation.reused_tokens == 0
            assert result.token_ids == answer_alone(engine, conversation)


def origins_of(pool):
    """Origin of each n-gram, key and continuation."""
    return {(key, *gram): origin for key, entries in pool.items() for gram, origin in entries}


def test_the_pool_is_kept_and_gets_only_what_is_new(engine):
    conversation = engine.conversation()
    say(conversation, "abc abd")
    step, before = engine._steps.step, pool_of(engine._steps.step)
    ids = [*conversation.turn.token_ids, *conversation.turn.answer_ids]
    stream = conversation.say("hg", max_new_tokens=1, lookahead=SHAPE)
    next(stream)
    assert engine._steps.step is step
    grams, old = set(origins_of(pool_of(step))), set(origins_of(before))
    new_text = [*conversation.turn.token_ids, *stream.result.token_ids]
    size = SHAPE.ngram
    new = {
        tuple(new_text[at : at + size]) for at in range(len(ids) - size, len(new_text) - size + 1)
    }
    assert grams - old <= new
    # What was inserted once more would be of the prompt now.
    answered = {gram for gram, origin in origins_of(before).items() if origin == "output"} - new
    after = origins_of(pool_of(step))
    assert {after.get(gram) for gram in answered} - {None} == {"output"}


def test_another_shape_begins_a_pool_with_the_whole_text(engine):
    conversation = engine.conversation()
    say(conversation, "abc abd", mode="autoregressive", shape=None)
    shape = LookaheadConfig(0, 3, 50)
    stream = conversation.say("hg", max_new_tokens=2, lookahead=shape)
    next(stream)
    ids = conversation.turn.token_ids
    assert conversation.reused_tokens > 0
    grams = set(origins_of(pool_of(engine._steps.step)))
    assert {tuple(ids[at : at + 3]) for at in range(len(ids) - 2)} <= grams


def test_the_end_of_the_context(tmp_path):
    engine = make_engine(tmp_path, max_length=60)
    conversation = engine.conversation()
    assert say(conversation, "abc", max_new_tokens=100).finish_reason == "context"
    messages, turn = conversation.messages, conversation.turn
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            say(conversation, "hg")
        assert str(caught.value) == (
            "with this message the conversation has 68 tokens, at most 59 fit in a context of 60: "
            "shorten the message, or begin anew with reset(), /reset in the chat"
        )
        assert (conversation.messages, conversation.turn) == (messages, turn)
    conversation.reset()
    assert (conversation.messages, counts(conversation)) == ([], (0, 0))
    result = say(conversation, "hg")
    assert conversation.reused_tokens == 0
    assert result.token_ids == answer_alone(engine, conversation)


def test_a_message_as_long_as_the_context_allows(tmp_path):
    engine = make_engine(tmp_path, max_length=60)
    conversation = engine.conversation()
    room = 59 - len("u:\na:")
    assert say(conversation, "a" * room).new_tokens == 1
    with pytest.raises(InputError, match="has 60 tokens, at most 59 fit"):
        say(engine.conversation(), "a" * (room + 1))


def test_what_is_refused(engine, tmp_path):
    conversation = engine.conversation()
    for text in (3, None, b"abc", ["abc"]):
        with pytest.raises(InputError, match="a message must be text"):
            conversation.say(text)
    with pytest.raises(InputError, match="half a character"):
        conversation.say("\ud800")
    with pytest.raises(InputError, match="half a character"):
        conversation.system = "\ud800"
    with pytest.raises(InputError, match="max_new_tokens"):
        conversation.say("abc", max_new_tokens=0)
    with pytest.raises(InputError, match="a message must be text"):
        engine.conversation(7)
    assert (conversation.messages, conversation.turn) == ([], None)
    stream = conversation.say("abc", lookahead=SHAPE)
    next(stream)
    with pytest.raises(InputError, match="the answer to the last message is still running"):
        conversation.say("hg")
    conversation.close()
    assert stream.is_done
    plain = make_engine(tmp_path / "plain", template=None)
    with pytest.raises(InputError, match="a chat needs a chat template"):
        plain.conversation()


def test_messages_are_a_copy(engine):
    conversation = engine.conversation("be brief")
    say(conversation, "abc")
    before = conversation.messages
    conversation.messages.clear()
    conversation.messages[1]["content"] = "changed"
    assert conversation.messages == before


def test_a_vocabulary_that_leaves_out_the_first_space(tmp_path, monkeypatch):
    """As SentencePiece's do; the template then writes the space that the model does."""
    template = "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] }}\n{% endfor %}a:"
    engine = make_engine(tmp_path, template=template)
    decoding = replace(engine.tokenizer._vocabulary.decoding, strip_left=1)
    monkeypatch.setattr(engine.tokenizer, "detokenizer", lambda: IncrementalDetokenizer(decoding))
    space = engine.tokenizer.encode(" ")
    conversation = engine.conversation()
    for text in ("".join(pair) for pair in product("abcdefgh", repeat=2)):
        result = say(conversation, text)
        if result.token_ids[:1] == space:
            break
        conversation.reset()
    assert engine.tokenizer.encode(result.text) == result.token_ids[1:]
    say(conversation, "hg")
    assert not conversation.is_rewritten
    assert conversation.turn.token_ids == engine.tokenizer.chat_ids(conversation.messages[:-1])
