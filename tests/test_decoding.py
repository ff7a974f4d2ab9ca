"""Exact decoding: whatever (W, N, G), ids and cache are those of plain greedy decoding.

Tiny random models in float64 against a forward pass that recomputes everything and knows no cache.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from oracles.naive_llama import naive_greedy, naive_logits, naive_next_token, random_checkpoint
from tiny_models import (
    SPARE_ROWS,
    build_engine,
    build_llama,
    build_step,
    engine_cache,
    start_step,
    text_of,
)

from lookahead.config import LookaheadConfig
from lookahead.prefill import prefill

NUM_NEW = 30
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS = [
    {"vocab_size": 4},
    {"vocab_size": 5, "tie_word_embeddings": True},
    {"vocab_size": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    {"vocab_size": 6, "num_key_value_heads": 1, "num_hidden_layers": 3},
    {"vocab_size": 5, "attention_bias": True, "head_dim": 6},
    {"vocab_size": 4, "head_dim": 16, "rope_theta": 100.0, "rope_scaling": LLAMA3_ROPE},
]


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def checkpoint(number):
    return random_checkpoint(number, **CHECKPOINTS[number])


@cache
def model(number):
    return build_llama(checkpoint(number))


@cache
def engine(number):
    """One engine serves all (W, N, G), as a user's would."""
    return build_engine(model(number))


@cache
def next_token(number):
    return naive_next_token(*checkpoint(number))


@cache
def prompt(number, index):
    """Ids of which the first prompts are one token, two tokens, and the longest."""
    draw = random.Random(10 * number + index)
    length = (1, 2, 40)[index] if index < 3 else draw.randint(3, 39)
    return [draw.randrange(CHECKPOINTS[number]["vocab_size"]) for _ in range(length)]


@cache
def expected_ids(number, index):
    return naive_greedy(next_token(number), prompt(number, index), NUM_NEW)


@cache
def fresh_cache(number, index):
    """Keys and values of a prefill of prompt and answer; the last token is never committed."""
    ids = (prompt(number, index) + expected_ids(number, index))[:-1]
    fresh = model(number).new_cache(1, len(ids), SPARE_ROWS)
    with torch.inference_mode():
        prefill(model(number), fresh, torch.tensor(ids))
    return fresh.data[..., : len(ids), :]


def check_decoding(number, index, config):
    """Stream one request and compare all there is to compare; return the ids of each step."""
    running = engine(number)
    stream = running.stream(prompt(number, index), max_new_tokens=NUM_NEW, lookahead=config)
    chunks = list(stream)
    result = stream.result
    expected = expected_ids(number, index)
    assert result.token_ids == expected
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert result.text == running.tokenizer.decode(expected)
    assert (result.new_tokens, result.finish_reason) == (NUM_NEW, "length")
    assert result.prompt_tokens == len(prompt(number, index))
    assert result.steps == len(chunks)
    assert result.tokens_per_step == NUM_NEW / len(chunks)
    committed = fresh_cache(number, index)
    actual = engine_cache(running).data[..., : committed.shape[-2], :]
    torch.testing.assert_close(actual, committed, rtol=1e-9, atol=1e-9)
    return [chunk.token_ids for chunk in chunks]


@pytest.mark.parametrize("window", range(9))
@pytest.mark.parametrize("ngram", range(2, 7))
def test_ids_text_and_cache_equal_greedy_decoding(ngram, window):
    for guesses in range(7):
        place = (ngram * 9 + window) * 7 + guesses
        config = LookaheadConfig(window, ngram, guesses, place % 3 > 0, seed=place)
        for number in (place % len(CHECKPOINTS), place // 7 % len(CHECKPOINTS)):
            steps = check_decoding(number, place % 11, config)
            assert max(map(len, steps)) <= ngram
            if guesses == 0:
                assert len(steps) == NUM_NEW


@pytest.mark.parametrize("number", range(len(CHECKPOINTS)))
def test_candidates_are_accepted_up_to_whole_n_grams(number):
    # An exact decoder that accepts nothing would pass the test above.
    for ngram in range(2, 7):
        for window in (0, 4):
            config = LookaheadConfig(window, ngram, guesses=4)
            lengths = [
                len(ids) for index in range(8) for ids in check_decoding(number, index, config)
            ]
            assert max(lengths) == ngram
            assert len(lengths) < 0.8 * sum(lengths)


@pytest.mark.parametrize("length", [127, 128, 129, 130, 257])
def test_prompts_around_the_size_of_a_prefill_chunk(length):
    draw = random.Random(length)
    ids = [draw.randrange(4) for _ in range(length)]
    long_engine = build_engine(model(0), max_length=320)
    expected = naive_greedy(next_token(0), ids, 12)
    for shape in ((0, 2, 0), (3, 4, 3)):
        config = LookaheadConfig(*shape)
        assert long_engine.generate(ids, max_new_tokens=12, lookahead=config).token_ids == expected


def test_autoregressive_mode_is_greedy_decoding_one_token_a_step():
    result = engine(0).generate(
        prompt(0, 3), max_new_tokens=NUM_NEW, mode="autoregressive", lookahead=LookaheadConfig()
    )
    assert result.token_ids == expected_ids(0, 3)
    assert result.steps == NUM_NEW
    assert (result.window, result.guesses, result.mode) == (0, 0, "autoregressive")


def test_an_engine_for_a_batch_serves_one_request():
    wide = build_engine(model(3), batch_size=3)
    for index in (4, 5):
        result = wide.generate(
            prompt(3, index), max_new_tokens=NUM_NEW, lookahead=LookaheadConfig(3, 4, 3)
        )
        assert result.token_ids == expected_ids(3, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 4])
def test_smaller_dtypes_agree_until_two_tokens_are_close(number, dtype):
    margin = {torch.float32: 1e-3, torch.bfloat16: 2.0}[dtype]
    small = build_engine(build_llama(checkpoint(number), dtype))
    compared = 0
    for index in range(11):
        ids, expected = prompt(number, index), expected_ids(number, index)
        best = naive_logits(*checkpoint(number), ids + expected).topk(2).values
        is_clear = (best[:, 0] - best[:, 1] > margin)[len(ids) - 1 : -1].tolist()
        sure = (*is_clear, False).index(False)
        for shape in ((0, 2, 0), (4, 4, 4)):
            config = LookaheadConfig(*shape)
            result = small.generate(ids, max_new_tokens=NUM_NEW, lookahead=config)
            assert result.token_ids[:sure] == expected[:sure]
        compared += sure
    assert compared > 20


def records(step, requests, started_later=()):
    """Run a batch to its end, some requests taking the place of the first one to finish; return each
    request's records, in order of `requests` and then `started_later`."""
    waiting = list(started_later)
    taken = []  # for each sequence the records of the request that it runs
    all_records = [[] for _ in range(len(requests) + len(waiting))]
    for sequence, request in enumerate(requests):
        start_step(step, *request, sequence=sequence)
        taken.append(all_records[sequence])
    while not step.state.finished.all():
        before = step.state.finished.tolist()
        unfinished = [sequence for sequence, is_done in enumerate(before) if not is_done]
        seen = []
        output = step.run(seen.append)
        assert len(seen) == len(unfinished)
        for sequence, record in zip(unfinished, seen, strict=True):
            assert record.sequence == sequence
            taken[sequence].append(replace(record, sequence=0))
            emitted = output.emitted[sequence, : output.counts[sequence]].tolist()
            assert emitted == record.emitted
        assert not output.counts[torch.tensor(before)].any()
        for sequence, is_done in enumerate(output.finished.tolist()):
            if is_done and waiting:
                taken[sequence] = all_records[len(all_records) - len(waiting)]
                start_step(step, *waiting.pop(0), sequence=sequence)
    return all_records


@pytest.mark.parametrize(
    "shape", [(0, 2, 0), (0, 3, 4), (3, 2, 2), (2, 4, 0), (4, 4, 4), (1, 6, 1), (5, 3, 6)]
)
@pytest.mark.parametrize("batch_size", [2, 3])
def test_sequences_in_one_step_are_each_as_if_alone(batch_size, shape):
    number, config = 5, LookaheadConfig(*shape, seed=batch_size)
    eos = expected_ids(number, 6)[8]
    # Long and short prompts; one ends early at its limit and others by an end-of-text id.
    requests = [
        (prompt(number, index), len(prompt(number, index)) + size, (eos,))
        for index, size in ((2, 30), (0, 5), (6, 30), (4, 20), (1, 30))
    ]
    together = build_step(model(number), config, batch_size=batch_size)
    actual = records(together, requests[:batch_size], requests[batch_size:])
    for request, in_batch in zip(requests, actual, strict=True):
        alone = build_step(model(number), config)
        assert in_batch == records(alone, [request])[0]
        ids, limit, _ = request
        expected = ids + naive_greedy(next_token(number), ids, limit - len(ids), (eos,))
        assert text_of(alone) == expected
        assert expected == [*ids, *(token for record in in_batch for token in record.emitted)]


def test_a_batch_leaves_each_sequence_its_own_cache():
    config = LookaheadConfig(3, 4, 3)
    step = build_step(model(1), config, batch_size=3)
    requests = [(prompt(1, index), len(prompt(1, index)) + NUM_NEW) for index in (2, 5, 0)]
    records(step, requests)
    for sequence, index in enumerate((2, 5, 0)):
        committed = fresh_cache(1, index)
        assert int(step.state.lengths[sequence]) == committed.shape[-2]
        actual = step.kv_cache.sequence(sequence).data[..., : committed.shape[-2], :]
        torch.testing.assert_close(actual, committed, rtol=1e-9, atol=1e-9)
