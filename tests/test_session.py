"""Sessions, logits processors, log-probabilities and several samples: what the caller sees."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, InputError, LookaheadConfig, SamplingConfig

DOCS = Path(__file__).parent.parent / "docs" / "sampling.md"
PROMPT = "abc abd abc"
NUM_TOKENS = 30
MODES = [("autoregressive", None), ("lookahead", (5, 4, 5)), ("lookahead", (0, 5, 8))]
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=3),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("session") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32", batch_size=3)


def run(engine, processor=None, shape=None, mode="autoregressive", **options):
    """All steps of a session."""
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True} | options
    config = None if shape is None else LookaheadConfig(*shape)
    with engine.session(
        PROMPT, logits_processor=processor, mode=mode, lookahead=config, **options
    ) as session:
        return list(session), session.result


def ids_of(steps) -> list[int]:
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("mode", "shape"), MODES)
def test_a_session_is_the_request_step_by_step(engine, mode, shape, sampling):
    config = None if shape is None else LookaheadConfig(*shape)
    rows = []
    stream = engine.stream(
        PROMPT, mode=mode, lookahead=config, sampling=sampling, max_new_tokens=NUM_TOKENS,
        ignore_eos=True, on_logits=lambda logits: rows.append(logits.clone()),
    )  # fmt: skip
    expected = stream.run_to_end()
    steps, result = run(engine, None, shape, mode, sampling=sampling)
    assert ids_of(steps) == expected.token_ids == result.token_ids
    assert "".join(step.text for step in steps) == expected.text
    assert torch.equal(torch.cat([step.logits for step in steps]), torch.cat(rows))
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]
    assert len(steps) == expected.steps
    current = engine.tokenizer.encode(PROMPT)[-1]
    for step in steps:
        assert step.path == [current, *step.token_ids[:-1]]
        assert step.logits.shape[0] == len(step.token_ids)
        assert step.record.emitted == step.token_ids
        current = step.token_ids[-1]


def odd_or_repeated(logits, histories):
    """Bans even ids, and favours what followed the same token before, by each row's history."""
    logits[:, ::2] = -math.inf
    for row, history in zip(logits, histories, strict=True):
        followers = [b for a, b in itertools.pairwise(history) if a == history[-1]]
        row[[token for token in followers if token % 2]] += 1.5
    return logits


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_processor_gives_the_same_text_in_every_mode(engine, sampling):
    found = [run(engine, odd_or_repeated, shape, mode, sampling=sampling) for mode, shape in MODES]
    ids = [ids_of(steps) for steps, _ in found]
    assert ids[0] == ids[1] == ids[2]
    assert all(token % 2 for token in ids[0])
    assert ids[0] != ids_of(run(engine, sampling=sampling)[0])
    assert min(len(steps) for steps, _ in found) < NUM_TOKENS, "candidates are accepted"


def test_histories_are_those_of_the_text(engine):
    """In autoregressive decoding the text so far; in lookahead decoding that and paths behind it."""
    prompt, seen = engine.tokenizer.encode(PROMPT), []

    def watch(logits, histories):
        seen.append([list(history) for history in histories])
        return logits

    steps, _ = run(engine, watch)
    text = [*prompt, *ids_of(steps)]
    first_calls = seen[::2]  # the last row is given again each time
    assert first_calls == [[text[: len(prompt) + i]] for i in range(NUM_TOKENS)]
    seen.clear()
    steps, _ = run(engine, watch, (5, 4, 5), "lookahead")
    assert ids_of(steps) == text[len(prompt) :]
    for step, call in zip(steps, seen[::2], strict=True):
        record = step.record
        begin = text[: record.length + 1]
        paths = [[]]
        for candidate in record.candidates:
            paths += [candidate[: depth + 1] for depth in range(len(candidate))]
        assert call == [begin + path for path in paths]
    assert any(len(call) > 1 for call in seen)


def test_the_example_of_the_documentation_runs(checkpoint, engine, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    example = code.replace("checkpoints/smollm2-135m-instruct", str(checkpoint))
    assert example != code
    exec(example, {})
    text = "".join(line.split("] ")[1] for line in capsys.readouterr().out.splitlines())
    assert text
    assert text.isdigit()


@pytest.mark.parametrize("mode", ["autoregressive", "lookahead"])
def test_little_temperature_is_greedy_where_logits_are_equal(engine, mode):
    def texts(**options):
        return {
            engine.generate(
                [1, 2, 3],
                max_new_tokens=12,
                mode=mode,
                lookahead=LookaheadConfig(5, 4, 5),
                sampling=SamplingConfig(seed=seed, **options),
                logits_processor=lambda logits, _: (logits / 4).round(),
                ignore_eos=True,
            ).text
            for seed in range(4)
        }

    greedy = texts()
    assert len(greedy) == 1
    assert texts(temperature=9e-6) == texts(temperature=1e30, top_k=1) == greedy
    assert len(texts(temperature=1e-4)) == 4, "equal logits are drawn by the seed"


class Counting:
    """Depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logits, histories):
        self.calls += 1
        return logits + self.calls * torch.arange(logits.shape[1])


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (Counting(), "logits_processor gave a row other logits when it was called again"),
        (lambda logits, _: logits * len(logits), "logits_processor gave a row other logits"),
        (lambda logits, _: logits[:, :-1], "logits_processor must return logits"),
        (lambda logits, _: logits.double(), "logits_processor must return logits"),
        (lambda logits, _: None, "logits_processor must return logits"),
        (
            lambda logits, _: logits - math.inf,
            "no token can be drawn after 0 new tokens: the largest logit is not a finite",
        ),
        (
            lambda logits, _: logits * math.nan,
            "no token can be drawn after 0 new tokens: the largest logit is not a finite",
        ),
        (5, "logits_processor must take logits and histories and return logits, got 5"),
    ],
)
def test_what_a_processor_must_not_do(engine, processor, said):
    with pytest.raises(InputError) as caught:
        run(engine, processor, (5, 4, 5), "lookahead")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert len(ids_of(run(engine)[0])) == NUM_TOKENS, "the engine is ready for the next request"


def test_an_error_of_the_processors_own_comes_out(engine):
    def broken(logits, histories):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(engine, broken)
    assert len(ids_of(run(engine)[0])) == NUM_TOKENS


def test_a_session_that_is_dropped_leaves_the_engine_ready(engine):
    for _ in engine.session(PROMPT, max_new_tokens=NUM_TOKENS):
        break
    assert engine.generate(PROMPT, max_new_tokens=3).new_tokens == 3


def test_a_steps_logits_are_the_callers_own(engine):
    with engine.session(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True) as session:
        first = session.step()
        before = first.logits.clone()
        session.step()
        assert torch.equal(first.logits, before)
        first.logits.add_(1).requires_grad_()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 1.0, "top_p": 1e-46}, {"temperature": 1.0, "top_k": 1}),
        ({"temperature": 1.0, "top_p": 5e-324, "banned_tokens": (0,)}, {"banned_tokens": (0,)}),
        ({"temperature": 5e-324, "banned_tokens": (0,)}, {"banned_tokens": (0,)}),
    ],
)
def test_numbers_that_are_zero_in_float32(engine, sampling, expected):
    ids = [
        engine.generate(PROMPT, max_new_tokens=8, sampling=SamplingConfig(**options)).token_ids
        for options in (sampling, expected)
    ]
    assert ids[0] == ids[1]


def test_the_largest_temperature_draws_from_all_that_is_left(engine):
    size = engine.model.config.vocab_size
    for options in ({"banned_tokens": (size - 1, 7)}, {"top_k": 100}):
        sampling = SamplingConfig(temperature=1e30, seed=1, **options)
        ids = engine.generate(
            PROMPT, max_new_tokens=40, ignore_eos=True, sampling=sampling
        ).token_ids
        assert len(set(ids)) > 20
        assert not {size - 1, 7}.intersection(ids) or "top_k" in options


def test_a_session_that_is_closed_leaves_the_engine_ready(engine):
    with engine.session(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True) as session:
        assert session.step().token_ids
        with pytest.raises(InputError, match="another stream of this engine is running"):
            engine.session(PROMPT)
    assert session.is_done
    assert session.step() is None
    assert session.result.finish_reason == "interrupted"
    assert len(ids_of(run(engine)[0])) == NUM_TOKENS


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probabilities_are_the_models_and_the_same_in_every_mode(engine, sampling):
    found = []
    for mode, shape in MODES:
        result = engine.generate(
            PROMPT, mode=mode, lookahead=shape and LookaheadConfig(*shape), sampling=sampling,
            max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3,
        )  # fmt: skip
        found.append(result.logprobs)
        assert [each.token_id for each in result.logprobs] == result.token_ids
    assert found[0] == found[1] == found[2], "to the bit"
    steps, _ = run(engine, sampling=sampling)
    for step, told in zip(steps, found[0], strict=True):
        expected = torch.log_softmax(step.logits[0].double(), 0)
        assert told.logprob == pytest.approx(float(expected[told.token_id]), abs=1e-5)
        values, ids = expected.sort(descending=True, stable=True)
        assert [token for token, _ in told.top] == ids[:3].tolist()
        assert [value for _, value in told.top] == pytest.approx(values[:3].tolist(), abs=1e-5)


def test_log_probabilities_end_where_the_text_does(engine):
    text = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).text
    stop = text[10:12]
    result = engine.generate(
        PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop], logprobs=0
    )
    assert result.finish_reason == "stop"
    assert [each.token_id for each in result.logprobs] == result.token_ids
    assert all(each.top == [] for each in result.logprobs)
    values = json.loads(json.dumps(result.to_dict()))["logprobs"]
    assert values[0] == {
        "token_id": result.token_ids[0], "logprob": result.logprobs[0].logprob, "top": []
    }  # fmt: skip
    plain = engine.generate(PROMPT, max_new_tokens=2)
    assert plain.logprobs is None
    assert "logprobs" not in plain.to_dict()


def test_several_samples_are_those_of_each_alone(engine):
    sampling = SamplingConfig(temperature=1.5, seed=9)
    options = {"max_new_tokens": 12, "ignore_eos": True, "sampling": sampling}
    results = engine.generate(PROMPT, num_samples=4, **options)
    assert [result.sample for result in results] == [0, 1, 2, 3]
    assert len({tuple(result.token_ids) for result in results}) == 4
    assert engine.generate(PROMPT, **options).token_ids == results[0].token_ids
    both = engine.generate([PROMPT, "xyz"], num_samples=2, **options)
    assert [(each.prompt, each.sample) for each in both] == [
        (PROMPT, 0), (PROMPT, 1), ("xyz", 0), ("xyz", 1)
    ]  # fmt: skip
    assert [each.token_ids for each in both[:2]] == [each.token_ids for each in results[:2]]
    # A prompt is read once, whichever sequences its answers run in: 4 of 3 sequences.
    batch = engine.batch([PROMPT, "xyz"], num_samples=2, **options)
    assert [each.token_ids for each in batch.run_to_end()] == [each.token_ids for each in both]
    lengths = [len(engine.tokenizer.encode(text)) - 1 for text in (PROMPT, "xyz")]
    assert [each.prefilled_tokens for each in batch.answers] == [lengths[0], 0, lengths[1], 0]
    # One prompt and one sample is one result; the seed alone makes another text.
    other = SamplingConfig(temperature=1.5, seed=10)
    assert engine.generate(PROMPT, **options | {"sampling": other}).token_ids not in [
        each.token_ids for each in results
    ]
