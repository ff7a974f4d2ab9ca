"""Lookahead decoding is autoregressive decoding, bit for bit, in every dtype that a CPU computes in."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from single_rows import checked_steps, same_bits
from slow import slow_unless
from tiny_models import ScriptedModel, build_engine, build_llama

from lookahead.config import LookaheadConfig
from lookahead.engine import Engine
from lookahead.kernels.attn_mask_numba import BLOCK
from lookahead.layout import LookaheadLayout
from lookahead.models.llama_numba import NumbaForward
from lookahead.prefill import CHUNK_ROWS

SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Grouped heads, single heads, an odd head size, biases; of few tokens, so that texts repeat.
CHECKPOINTS = (
    {"vocab_size": 8, "head_dim": 16, "num_key_value_heads": 1},
    {"vocab_size": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    {"vocab_size": 10, "hidden_size": 40, "head_dim": 20, "attention_bias": True},
)
MAX_LENGTH = 5 * BLOCK
NUM_NEW = 24


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def engine(number: int, dtype: torch.dtype) -> Engine:
    checkpoint = random_checkpoint(number, **CHECKPOINTS[number])
    return build_engine(build_llama(checkpoint, dtype), max_length=MAX_LENGTH)


def draw_case(draw: random.Random, vocab_size: int) -> tuple[list[int], LookaheadConfig]:
    """A prompt that often ends just before a block of keys, or of a chunk of the prefill, does."""
    borders = (BLOCK, 2 * BLOCK, CHUNK_ROWS + BLOCK, 2 * CHUNK_ROWS)
    length = draw.choice((1, 2, *(border + draw.randint(-12, 3) for border in borders)))
    window, ngram, guesses = draw.randint(0, 8), draw.randint(2, 7), draw.randint(1, 8)
    while LookaheadLayout.count_rows(window, ngram, guesses) > 128:
        window, guesses = window // 2, guesses // 2
    phrase = [draw.randrange(vocab_size) for _ in range(draw.randint(2, 9))]
    prompt = [
        token if draw.random() < 0.9 else draw.randrange(vocab_size)
        for token in (phrase * length)[:length]
    ]
    return prompt, LookaheadConfig(window, ngram, guesses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(CHECKPOINTS)))
def test_every_step_is_single_rows_to_the_bit(number, dtype):
    """Random (W, N, G) and prompts: ids, logits, and what is committed."""
    draw = random.Random(number)
    running = engine(number, dtype)
    assert running.model.inexact_reason is None
    with checked_steps() as counts:
        for _ in range(70 if dtype == torch.bfloat16 else 12):
            prompt, config = draw_case(draw, running.model.config.vocab_size)
            result = running.compare(prompt, max_new_tokens=NUM_NEW, lookahead=config)
            assert result.identical, (config, len(prompt))
            assert result.exact
    assert counts["verified rows"] > 100


def which_hold(running: Engine) -> list[bool]:
    """For a few prompts, whether every step was single rows to the bit."""
    draw = random.Random(7)
    found = []
    for _ in range(12):
        prompt, config = draw_case(draw, running.model.config.vocab_size)
        try:
            with checked_steps():
                running.generate(prompt, max_new_tokens=NUM_NEW, lookahead=config)
            found.append(True)
        except AssertionError:
            found.append(False)
    return found


def test_attention_in_no_fixed_order_is_found_out():
    """With products of as many rows as come. In which dtype it shows depends on the processor."""
    checkpoint, held = random_checkpoint(0, **CHECKPOINTS[0]), []
    for dtype in (torch.bfloat16, torch.float32):
        model = build_llama(checkpoint, dtype, implementation="torch")
        assert model.inexact_reason == "torch's attention has no fixed order of keys"
        assert model.row_block is None
        held += which_hold(build_engine(model, max_length=MAX_LENGTH))
    assert not all(held)


def test_products_that_depend_on_the_number_of_rows_are_found_out(monkeypatch):
    choose = NumbaForward.choose

    def by_count(forward, *arguments):
        logits, *others = choose(forward, *arguments)
        return logits * (1 + 2**-7 * (len(logits) % 3)), *others

    monkeypatch.setattr(NumbaForward, "choose", by_count)
    checkpoint = random_checkpoint(0, **CHECKPOINTS[0])
    running = build_engine(build_llama(checkpoint, torch.bfloat16), max_length=MAX_LENGTH)
    assert not all(which_hold(running))


@pytest.mark.parametrize(
    ("implementation", "exact", "reason"),
    [
        ("numba", True, None),
        ("numba", False, None),  # it costs nothing there
        ("torch", True, "torch's attention has no fixed order of keys"),
        ("torch", False, "exactness is turned off"),
    ],
)
def test_results_tell_whether_and_why_not(implementation, exact, reason):
    checkpoint = random_checkpoint(0, **CHECKPOINTS[0])
    model = build_llama(checkpoint, torch.float32, implementation=implementation, exact=exact)
    result = build_engine(model).generate([1, 2, 3], max_new_tokens=4)
    assert result.exact == (reason is None)
    assert result.inexact_reason == reason
    assert result.row_block == (1 if reason is None else None)


def test_the_text_is_right_up_to_the_end_of_the_context():
    checkpoint = random_checkpoint(0, **CHECKPOINTS[0])
    running = build_engine(build_llama(checkpoint, torch.bfloat16), max_length=40)
    for shape in ((5, 4, 5), (0, 5, 8), (3, 3, 3)):
        for first in range(6):
            prompt = [first, 1, 2, first, 1]
            result = running.compare(
                prompt, max_new_tokens=99, lookahead=LookaheadConfig(*shape), ignore_eos=True
            )
            assert result.finish_reason == "context"
            assert result.identical


def test_threads():
    """With two threads, and after their number changed under a loaded model."""
    running = engine(0, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for threads in (2, 1, 2):
            torch.set_num_threads(threads)
            with checked_steps():
                prompt, config = draw_case(random.Random(threads), 8)
                assert running.compare(prompt, max_new_tokens=NUM_NEW, lookahead=config).identical
    finally:
        torch.set_num_threads(before)


def test_the_comparison_tells_both_candidates_and_their_logits(monkeypatch):
    """Autoregressive decoding is given another prompt."""

    def script(path):
        return (len(path) * 7 + sum(path)) % 5

    running = build_engine(ScriptedModel(script, 5))
    same = running.compare([1, 2], max_new_tokens=20)
    assert (same.identical, same.difference) == (True, None)
    stream = Engine.stream

    def stream_otherwise(engine, prompt, **options):
        prompt = prompt if options["mode"] == "lookahead" else [*prompt[:-1], 4]
        return stream(engine, prompt, **options)

    monkeypatch.setattr(Engine, "stream", stream_otherwise)
    parted = running.compare([1, 2], max_new_tokens=20)
    assert parted.identical is False
    place, ids = parted.difference.place, parted.difference.token_ids
    assert ids == [parted.token_ids[place], parted.autoregressive.token_ids[place]]
    assert parted.token_ids[:place] == parted.autoregressive.token_ids[:place]
    assert parted.difference.logits == [[1.0, 0.0], [0.0, 1.0]]  # the script's are one-hot


def test_logits_are_those_that_the_ids_are_the_choices_of():
    running = engine(0, torch.float32)
    rows = []
    stream = running.stream(
        [1, 2, 3, 1, 2],
        max_new_tokens=30,
        lookahead=LookaheadConfig(3, 4, 3),
        on_logits=lambda logits: rows.append(logits.clone()),
    )
    steps = sum(1 for _ in stream)
    assert len(rows) == steps < 30
    assert torch.cat(rows).argmax(1).tolist() == stream.result.token_ids


@pytest.fixture(scope="module")
def smollm2() -> Engine:
    if not SMOLLM2.is_dir():
        pytest.skip("the SmolLM2 checkpoint is not there; `make test` makes it")
    return Engine.load(SMOLLM2, device="cpu", dtype="bfloat16", max_length=1024)


PROMPTS = (
    "def fibonacci(n):\n",
    "The three laws of motion are as follows. First,",
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome |",
    "Once upon a time, in a village by the sea, there lived a",
    "import json\n\n\nclass Config:\n    def __init__(self, path):\n        self.path = path\n",
    "Q: A farmer has 17 sheep and buys 25 more. How many are there?\nA: Let us count.",
    "Summary of the meeting: " + "we spoke about the harbour, the lights and the weather; " * 12,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17",
    "Dear Sir or Madam,\nI am writing to you because",
    "To bake bread you need flour, water, salt and yeast. " * 4,
)


@pytest.mark.parametrize("number", slow_unless(range(4), range(len(PROMPTS))))
def test_smollm2_in_bfloat16(smollm2, number):
    """Ids and every emitted row of logits, two configurations against autoregressive decoding."""

    def run(**options):
        rows = []
        stream = smollm2.stream(
            PROMPTS[number],
            max_new_tokens=48,
            ignore_eos=True,
            on_logits=lambda logits: rows.append(logits.clone()),
            **options,
        )
        for _ in stream:
            pass
        return stream.result, torch.cat(rows)

    plain, plain_logits = run(mode="autoregressive")
    for shape in ((5, 4, 5), (15, 5, 15)):
        result, logits = run(lookahead=LookaheadConfig(*shape))
        assert result.token_ids == plain.token_ids
        assert result.steps < 48
        assert same_bits(logits, plain_logits)
