"""The Python interface: what can be asked for, what comes back, what is refused and how."""

import dataclasses

import numpy as np
import pytest
import torch
from oracles.naive_llama import naive_greedy, naive_next_token
from tiny_checkpoint import byte_tokenizer, tiny_model, write_tiny_checkpoint

from lookahead import Chunk, Engine, InputError, LookaheadConfig, Result, SamplingConfig
from lookahead.step_costs import StepCosts
from lookahead.step_output import StepRecord

PROMPT = "abc abd abc"
NUM_TOKENS = 24


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def answer() -> list[int]:
    """The ids that follow PROMPT, from the forward pass that recomputes everything."""
    return naive_greedy(naive_next_token(*tiny_model()), prompt_ids(), NUM_TOKENS)


def prompt_ids(text: str = PROMPT) -> list[int]:
    return byte_tokenizer().encode(text).ids


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("mode", ["lookahead", "autoregressive"])
def test_text_and_ids_give_the_models_own_text(engine, answer, mode):
    text = byte_tokenizer().decode(answer)
    for prompt in (PROMPT, prompt_ids()):
        result = engine.generate(prompt, max_new_tokens=NUM_TOKENS, mode=mode)
        assert type(result) is Result
        assert (result.token_ids, result.text) == (answer, text)
        assert (result.prompt, result.prompt_tokens) == (PROMPT, len(PROMPT))
        assert all(type(token) is int for token in result.token_ids)


def test_a_list_of_one_gives_a_list(engine, answer):
    for prompts in ([PROMPT], (PROMPT,), [prompt_ids()], [torch.tensor(prompt_ids()).tolist()]):
        results = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
        assert type(results) is list
        assert [result.token_ids for result in results] == [answer]


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor])
def test_ids_may_come_from_any_library(engine, answer, convert):
    result = engine.generate(convert(prompt_ids()), max_new_tokens=NUM_TOKENS)
    assert (result.token_ids, result.prompt) == (answer, PROMPT)


def test_the_fields_of_a_result(engine):
    result = engine.generate(
        PROMPT,
        max_new_tokens=NUM_TOKENS,
        lookahead=LookaheadConfig(window=3, ngram=3, guesses=2),
        sampling=SamplingConfig(seed=7),
    )
    assert 1 < result.tokens_per_step == NUM_TOKENS / result.steps
    assert result.new_tokens == NUM_TOKENS == len(result.token_ids)
    assert result.prefill_seconds > 0
    assert result.tokens_per_second == NUM_TOKENS / result.decode_seconds
    assert (result.finish_reason, result.mode) == ("length", "lookahead")
    assert (result.device, result.dtype) == ("cpu", "float64")
    assert (result.window, result.ngram, result.guesses, result.seed) == (3, 3, 2, 7)
    assert (result.autoregressive, result.identical, result.difference) == (None, None, None)
    names = [field.name for field in dataclasses.fields(Result)]
    assert names[-4:] == ["logprobs", "autoregressive", "identical", "difference"]
    assert list(result.to_dict()) == names[:-4]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.text = ""
    compared = dataclasses.replace(result, autoregressive=result, identical=True).to_dict()
    assert list(compared) == [name for name in names if name != "logprobs"]
    assert compared["autoregressive"] == result.to_dict()


def test_autoregressive_mode_ignores_the_lookahead_configuration(engine):
    result = engine.generate(
        PROMPT, max_new_tokens=5, mode="autoregressive", lookahead=LookaheadConfig(3, 3, 2)
    )
    assert (result.window, result.guesses, result.steps) == (0, 0, 5)


def test_chunks_are_the_steps(engine, answer):
    records = []
    stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, trace=records.append)
    assert stream.result.finish_reason == "interrupted"
    chunks = list(stream)
    assert {type(chunk) for chunk in chunks} == {Chunk}
    assert [chunk.token_ids for chunk in chunks] == [record.emitted for record in records]
    assert [chunk.text for chunk in chunks] == [
        byte_tokenizer().decode(record.emitted) for record in records
    ]
    assert [token for chunk in chunks for token in chunk.token_ids] == answer
    assert max(len(chunk.token_ids) for chunk in chunks) > 1
    assert len(chunks) == stream.result.steps
    assert stream.result.finish_reason == "length"


def test_the_same_prompt_twice_gives_the_same_result(engine):
    def plain(result):
        return {
            name: value
            for name, value in result.to_dict().items()
            if not name.endswith("_seconds") and name != "tokens_per_second"
        }

    first = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    engine.generate("something else", max_new_tokens=3)
    assert plain(engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)) == plain(first)


def test_a_trace_holds_plain_numbers(engine):
    records = []
    engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, trace=records.append)
    assert {type(record) for record in records} == {StepRecord}
    kinds = set()

    def visit(value):
        if isinstance(value, list):
            for item in value:
                visit(item)
        else:
            kinds.add(type(value))

    for record in records:
        for value in vars(record).values():
            visit(value)
    assert kinds == {int, str, type(None)}
    assert records[0].length == len(PROMPT) - 1
    assert records[0].tokens[0] == prompt_ids()[-1]


def test_default_lookahead(engine, checkpoint):
    assert engine.default_lookahead() == LookaheadConfig(window=4, ngram=3, guesses=2)
    # An engine for few rows has a default that fits.
    small = Engine.load(checkpoint, device="cpu", dtype="float64", max_step_rows=7)
    assert small.default_lookahead() == LookaheadConfig(window=1, ngram=3, guesses=1)


def test_without_a_choice_what_was_measured_decides(engine, answer):
    tuning = engine.tuning
    result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    config = tuning.config
    assert (result.window, result.ngram, result.guesses) == (
        config.window, config.ngram, config.guesses,
    )  # fmt: skip
    assert (result.adaptive, result.choice) == (True, tuning.reason)
    assert result.token_ids == answer
    given = engine.generate(PROMPT, max_new_tokens=1, lookahead=LookaheadConfig(2, 3, 2))
    assert (given.adaptive, given.choice) == (False, "given")
    assert given.rows_per_step >= 4


def test_it_is_tuned_for_as_many_prompts_as_there_are(checkpoint, answer):
    engine = Engine.load(checkpoint, device="cpu", dtype="float64", batch_size=8)
    # Some candidates of one sequence cost nothing, of eight sequences they cost too much.
    engine.costs = StepCosts((1, 8, 9, 10), (1.0, 1.0, 2.0, 4.0))
    of_one, of_all = engine.tuning_for(1), engine.tuning
    assert of_one.config.guesses > of_all.config.guesses == 0
    for num_prompts, tuning in ((1, of_one), (8, of_all), (9, of_all)):
        for result in engine.generate([PROMPT] * num_prompts, max_new_tokens=NUM_TOKENS):
            assert (result.guesses, result.choice) == (tuning.config.guesses, tuning.reason)
            assert result.token_ids == answer
    given = engine.generate([PROMPT] * 8, max_new_tokens=1, lookahead=of_one.config)
    assert [result.choice for result in given] == ["given"] * 8


@pytest.mark.parametrize(
    ("max_step_rows", "asked", "num_rows", "fits"),
    [
        (128, (22, 4, 21), 129, (21, 4, 21)),
        (128, (15, 5, 18), 132, (16, 5, 16)),
        (128, (0, 2, 128), 129, (64, 2, 64)),
        (128, (1, 66, 1), 130, (1, 65, 1)),
        (9, (5, 4, 5), 30, (1, 4, 1)),
        (2, (1, 3, 1), 4, (1, 2, 1)),
    ],
)
def test_too_many_rows_are_refused_with_what_fits(checkpoint, max_step_rows, asked, num_rows, fits):
    engine = Engine.load(checkpoint, device="cpu", dtype="float64", max_step_rows=max_step_rows)
    said = refusal(engine.generate, PROMPT, lookahead=LookaheadConfig(*asked))
    assert said == (
        f"(window, ngram, guesses) = {asked} takes {num_rows} rows a step, more than max_step_rows "
        f"{max_step_rows}; {fits} fits"
    )
    result = engine.generate(PROMPT, max_new_tokens=4, lookahead=LookaheadConfig(*fits))
    assert result.token_ids == engine.generate(PROMPT, max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("positions", "asked", "expected"),
    [(512, None, 512), (5000, None, 4096), (5000, 5000, 5000), (512, 20, 20)],
)
def test_max_length(tmp_path, positions, asked, expected):
    checkpoint = write_tiny_checkpoint(tmp_path, max_position_embeddings=positions)
    engine = Engine.load(checkpoint, device="cpu", dtype="float32", max_length=asked)
    assert engine.max_length == expected
    result = engine.generate(prompt_ids("a") * (expected - 3), max_new_tokens=10)
    assert (result.new_tokens, result.finish_reason) == (3, "context")


def test_a_checkpoint_may_be_given_as_text(checkpoint, answer):
    engine = Engine.load(str(checkpoint), device="cpu", dtype="float64", batch_size=2)
    assert engine.generate(PROMPT, max_new_tokens=NUM_TOKENS).token_ids == answer


def test_every_end_of_text_id_ends_a_text(tmp_path, answer):
    ends = [answer[9], answer[6]]
    first = next(place for place, token in enumerate(answer) if token in ends)
    checkpoint = write_tiny_checkpoint(tmp_path, eos_token_id=ends)
    engine = Engine.load(checkpoint, device="cpu", dtype="float64")
    result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert (result.token_ids, result.finish_reason) == (answer[: first + 1], "eos")
    assert result.text == byte_tokenizer().decode(answer[:first])
    going_on = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert (going_on.token_ids, going_on.finish_reason) == (answer, "length")


def test_chat_ids(engine, tmp_path):
    assert engine.chat_ids("hi") == prompt_ids("u:hi\na:")
    assert engine.chat_ids("hi", system="be brief") == prompt_ids("s:be brief\nu:hi\na:")
    plain = write_tiny_checkpoint(tmp_path, chat_template=None)
    said = refusal(Engine.load(plain, device="cpu", dtype="float32").chat_ids, "hi")
    assert said.startswith(f"a chat needs a chat template and {plain} has none")
