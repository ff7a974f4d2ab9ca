"""`draw`: the random stream, the warpers and their order, histories, and what a row depends on."""

import math
import random
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from draw_cases import check_drawn, make_histories, make_warpers, one_row
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from lookahead.kernels.draw import draw
from lookahead.kernels.draw_ref import kept_weights, warped_scores
from lookahead.kernels.philox import philox, uniform

NEEDS_TRITON = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not available")
IMPLEMENTATIONS = ["torch", "numba", pytest.param("triton", marks=NEEDS_TRITON)]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
VOCAB_SIZE = 1000
ROW_0 = torch.zeros(1, dtype=torch.int64)


def draw_one(logits, histories, warpers, implementation):
    """The draw of a single sequence's row 0."""
    tokens, possible = draw(
        logits.unsqueeze(0), ROW_0, ROW_0 - 1, histories, warpers, implementation
    )
    return int(tokens), bool(possible)


def seeds(implementation, number):
    """Fewer where an interpreter runs."""
    return range(max(2, number // 5) if implementation == "triton" else number)


def random_logits(seed, *shape, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(seed, counter, expected):
    assert " ".join(f"{word:08x}" for word in philox(seed, counter)) == expected


@each_implementation
def test_the_random_number_is_of_seed_sample_and_position(implementation):
    """With equal weights of 1 every sum is exact, so the token tells twelve bits of the number."""
    size, seen = 4096, set()
    for seed in (0, 1, 2**31, 2**63 - 1, -1, -(2**63)):
        for sample in (0, 1, 1000):
            for length in (1, 2, 77):
                histories = one_row([5] * length, samples=[sample])
                warpers = make_warpers(size, seed=seed)
                token, _ = draw_one(torch.full((size,), 2.5), histories, warpers, implementation)
                assert token == math.floor(uniform(seed % 2**64, sample, length) * size)
                seen.add(token)
    assert len(seen) > 45


WARPER_SETS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 40},
    {"top_k": 1},
    {"top_k": VOCAB_SIZE},
    {"top_k": 5 * VOCAB_SIZE},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 0.001},
    {"min_p": 1.0},
    {"repetition": 1.3},
    {"presence": 0.8},
    {"frequency": 0.6},
    {"presence": -0.8, "frequency": -0.2, "repetition": 0.7},
    {"bias": {3: 2.0, 17: -math.inf, 999: -1.0}},
    {"min_new": 100},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.2, "frequency": 0.1},
    {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition": 1.1,
        "presence": 0.2,
        "frequency": 0.1,
        "bias": {3: 2.0, 17: -math.inf},
        "min_new": 100,
    },
]


@each_implementation
@pytest.mark.parametrize("values", WARPER_SETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_draw_is_where_its_number_stands_in_the_cumulative_sum(implementation, values, dtype):
    if implementation == "triton" and dtype in (torch.bfloat16, torch.float64):
        pytest.skip("refused: one by the interpreter, one by the kernels")
    draws = random.Random(5)
    for seed in seeds(implementation, 6):
        text = [draws.randrange(VOCAB_SIZE // 4) for _ in range(draws.randint(2, 60))]
        prompt_length = draws.randint(1, len(text))
        logits = random_logits(seed, VOCAB_SIZE, scale=draws.choice([1.0, 4.0])).to(dtype)
        warpers = make_warpers(VOCAB_SIZE, seed=seed, **values)
        histories = one_row(
            text,
            prompt_lengths=[prompt_length],
            samples=[seed],
            eos_ids=[[int(logits.argmax()), -1]],
        )
        token, possible = draw_one(logits, histories, warpers, implementation)
        assert possible
        check_drawn(token, logits, text, warpers, seed, prompt_length, [int(logits.argmax())])


THEIRS = {
    "repetition": theirs.RepetitionPenaltyLogitsProcessor,
    "bias": lambda bias: theirs.SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()]),
    "temperature": theirs.TemperatureLogitsWarper,
    "top_k": theirs.TopKLogitsWarper,
    "top_p": theirs.TopPLogitsWarper,
    "min_p": theirs.MinPLogitsWarper,
}
THEIR_SETS = [
    {"repetition": 1.3},
    {"repetition": 0.8},
    {"bias": {3: 2.0, 999: -1.5}},
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 100, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.03},
    {"repetition": 1.2, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"repetition": 1.1, "bias": {1: 4.0}, "temperature": 1.5, "top_k": 200, "top_p": 0.7},
]


@pytest.mark.parametrize("values", THEIR_SETS, ids=str)
def test_warpers_are_those_of_transformers(values):
    """Probabilities on random logits, each warper alone and in combination, in the same order."""
    processors = LogitsProcessorList(
        [THEIRS[name](values[name]) for name in THEIRS if name in values]
    )
    for seed in range(20):
        logits, text = random_logits(seed, VOCAB_SIZE), [1, 5, 5, 900 + seed, 3]
        expected = processors(torch.tensor([text]), logits.clone().unsqueeze(0))[0].softmax(0)
        warpers = make_warpers(VOCAB_SIZE, **values)
        weights = kept_weights(warped_scores(logits, text, [], [], warpers), warpers)
        assert torch.equal(weights > 0, expected > 0)
        torch.testing.assert_close(weights / weights.sum(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("num_new", [0, 2, 3, 4])
def test_no_end_before_the_least_new_tokens_as_in_transformers(num_new):
    logits, prompt = random_logits(0, VOCAB_SIZE), [5, 6]
    new = list(range(10, 10 + num_new))
    process = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), 3, [8, 9], device="cpu")
    expected = process(torch.tensor([prompt + new]), logits.unsqueeze(0))[0]
    warpers = make_warpers(VOCAB_SIZE, min_new=3)
    assert torch.equal(warped_scores(logits, prompt + new, new, [8, 9, -1], warpers), expected)


def test_presence_and_frequency_count_new_tokens():
    logits = torch.tensor([1.0, 2.0, 3.0, -1.0])
    warpers = make_warpers(4, presence=0.5, frequency=0.25)
    scores = warped_scores(logits, [1, 1, 2, 2, 3], [2, 2, 3], [], warpers)
    assert scores.tolist() == [1.0, 2.0, 3.0 - 0.5 - 2 * 0.25, -1.0 - 0.5 - 0.25]


@each_implementation
@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_p": 0.5}, {1, 3}),  # four equal ones: two are half of all
        ({"top_p": 0.51}, {1, 3, 4}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
        ({"min_p": 0.9}, {1, 3, 4, 6}),
        ({"temperature": 0.0}, {1}),
        ({"temperature": 1e-30}, {1, 3, 4, 6}),
    ],
)
def test_among_equal_ones_the_lowest_ids_stay(implementation, values, kept):
    logits = torch.tensor([0.0, 2.0, -math.inf, 2.0, 2.0, -9.0, 2.0, 1.0])
    logits[[0, 5, 7]] = -60.0  # hardly any weight
    warpers = [make_warpers(8, seed=seed, **values) for seed in seeds(implementation, 60)]
    drawn = {draw_one(logits, one_row([1]), each, implementation)[0] for each in warpers}
    assert drawn == kept


@each_implementation
def test_a_candidates_row_draws_what_its_text_alone_draws(implementation):
    """The same logits behind the same text: bit by bit the same, whatever is beside the row, in
    whichever place of the batch, with penalties over the row's own path."""
    for seed in seeds(implementation, 12):
        warpers = make_warpers(
            VOCAB_SIZE, seed=seed, temperature=1.2, top_p=0.95, repetition=1.5, presence=0.5,
            frequency=0.7, min_new=3,
        )  # fmt: skip
        text, eos = [4, 8, 15], [[16, -1]]
        options = {"prompt_lengths": [2], "samples": [3], "eos_ids": eos}
        logits = random_logits(seed, 4, VOCAB_SIZE, scale=1.0)
        alone, ids = [], list(text)
        for row in logits[1:]:
            alone.append(draw_one(row, one_row(ids, **options), warpers, implementation)[0])
            ids.append(alone[-1])
        # A window's rows 1 and 2, a wrong candidate of one token, then one of what is drawn.
        wrong = (alone[0] + 1) % VOCAB_SIZE
        tokens, parents = [15, 1, 2, wrong, alone[0], alone[1]], [-1, 0, 1, 0, 0, 4]
        histories = make_histories(
            [[9, 9], text], [[9] * 6, tokens], parents, first_candidate=3, prompt_lengths=[1, 2],
            samples=[0, 3], eos_ids=[[-1, -1], *eos],
        )  # fmt: skip
        rows = torch.tensor([6, 8, 9, 10, 11])  # of the second sequence; 8 is the window's
        given = torch.stack([logits[1], logits[0], logits[0], logits[2], logits[3]])
        chosen = torch.tensor([100, 101, 102, 103, 104])
        drawn, possible = draw(given, rows, chosen, histories, warpers, implementation)
        assert [int(drawn[place]) for place in (0, 3, 4)] == alone
        assert int(drawn[1]) == 101, "the window's row is not drawn"
        assert possible[[0, 1, 3, 4]].all()


@NEEDS_TRITON
def test_penalties_of_a_path_are_the_specifications():
    """All rows of two sequences, of which one's first candidates are still its prompt; numbers without
    rounding, of few tokens, so that every count decides."""
    draws, parents = random.Random(3), [-1, 0, 1, 2, 3, 0, 5, 6]
    drawn = []
    for seed in range(5):
        texts = [[draws.randrange(6) for _ in range(size)] for size in (4, 9)]
        tokens = [[draws.randrange(6) for _ in parents] for _ in texts]
        histories = make_histories(texts, tokens, parents, prompt_lengths=[6, 3])
        logits = (8 * random_logits(seed, 16, 6, scale=1.0)).round() / 8
        warpers = make_warpers(
            6, temperature=0.0, repetition=1.0 + seed % 2, presence=0.125, frequency=0.5
        )
        rows = torch.arange(16)
        arguments = (logits, rows, rows, histories, warpers)
        expected, found = (draw(*arguments, name)[0] for name in ("torch", "triton"))
        assert torch.equal(found, expected)
        drawn += expected.tolist()
    assert set(drawn) == set(range(6))


def test_rows_that_are_not_reached_are_not_drawn_on_a_cpu():
    logits = random_logits(0, 4, VOCAB_SIZE)
    first = draw_one(logits[0], one_row([3]), make_warpers(VOCAB_SIZE), "numba")[0]
    histories = make_histories([[3]], [[3, first, 0, first + 1]], [-1, 0, 1, 0])
    chosen = torch.tensor([-1, -2, -3, -4])
    drawn, _ = draw(logits, torch.arange(4), chosen, histories, make_warpers(VOCAB_SIZE), "numba")
    assert drawn[0] == first
    assert drawn[1] >= 0
    assert drawn[3] == -4
    assert (drawn[2] >= 0) == (drawn[1] == 0)


@each_implementation
@pytest.mark.parametrize(
    ("spoil", "is_possible"),
    [
        (lambda logits: logits, True),
        (lambda logits: logits.index_fill(0, torch.tensor([5]), -math.inf), True),
        (lambda logits: logits.index_fill(0, torch.tensor([5]), math.nan), False),
        (lambda logits: logits.index_fill(0, torch.tensor([VOCAB_SIZE - 1]), math.nan), False),
        (lambda logits: logits.index_fill(0, torch.tensor([5]), math.inf), False),
        (lambda logits: torch.full_like(logits, -math.inf), False),
    ],
)
def test_what_cannot_be_drawn_is_told(implementation, spoil, is_possible):
    for values in ({}, {"temperature": 0.0, "repetition": 1.1}, {"top_p": 0.9}):
        warpers = make_warpers(VOCAB_SIZE, **values)
        logits = spoil(random_logits(0, VOCAB_SIZE))
        assert draw_one(logits, one_row([3]), warpers, implementation)[1] is is_possible


@each_implementation
def test_everything_banned_is_told(implementation):
    banned = dict.fromkeys(range(VOCAB_SIZE), -math.inf)
    logits = random_logits(0, VOCAB_SIZE)
    run = partial(draw_one, logits, one_row([3]), implementation=implementation)
    assert run(warpers=make_warpers(VOCAB_SIZE, bias=banned))[1] is False
    del banned[77]
    assert run(warpers=make_warpers(VOCAB_SIZE, bias=banned)) == (77, True)


@pytest.mark.parametrize("sizes", [(1,), (5,), (16,), (17,), (300,)])
@each_implementation
def test_vocabularies_of_any_size(implementation, sizes):
    for size in sizes:
        drawn = set()
        for seed in seeds(implementation, 80):
            logits, warpers = random_logits(1, size, scale=0.3), make_warpers(size, seed=seed)
            token = draw_one(logits, one_row([0]), warpers, implementation)[0]
            check_drawn(token, logits, [0], warpers)
            drawn.add(token)
        assert len(drawn) >= min(size, 5)


@each_implementation
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 3.0, "top_p": 0.999},
        {"temperature": 2.0, "top_k": 6000, "min_p": 1e-3},
        {"temperature": 0.0, "repetition": 1.5, "frequency": 0.2},
        {"presence": 1.0, "frequency": 0.5, "top_k": 70, "top_p": 0.9},
    ],
    ids=str,
)
def test_large_vocabularies_and_long_texts(implementation, values):
    """More than is handled at once, of all that there is; many logits are equal."""
    size, length = 9001, 2500
    for seed in range(2):
        logits = (4 * random_logits(seed, size, scale=1.0)).round() / 4
        logits[-1] = 0.3 + logits.max() if seed else logits.max()
        text = [(seed + 7 * i * i) % size for i in range(length)]
        warpers = make_warpers(size, seed=seed, **values)
        histories = one_row(text, prompt_lengths=[1100])
        token, possible = draw_one(logits, histories, warpers, implementation)
        assert possible
        check_drawn(token, logits, text, warpers, prompt_length=1100)


@each_implementation
def test_the_end_of_a_very_large_vocabulary(implementation):
    """Of equal weights one of the last, behind sums of all the others."""
    size = 140_000
    numbers = [uniform(seed, 0, 1) for seed in range(60)]
    seed = max(range(60), key=lambda each: numbers[each])
    assert numbers[seed] > 0.95
    token, _ = draw_one(
        torch.zeros(size), one_row([0]), make_warpers(size, seed=seed), implementation
    )
    assert abs(token - numbers[seed] * size) <= 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rows": ROW_0.int()}, "rows: expected torch.int64, got torch.int32"),
        ({"chosen": torch.zeros(2, dtype=torch.int64)}, r"chosen: expected shape \[1\], got \[2\]"),
        ({"logits": torch.zeros(1, 8, dtype=torch.int64)}, "logits: expected a floating-point"),
        ({"logits": torch.zeros(1, 9)}, r"bias: expected shape \[9\], got \[8\]"),
        ({"implementation": "cuda"}, "implementation: expected one of"),
        pytest.param(
            {"implementation": "triton", "logits": torch.zeros(1, 8, dtype=torch.float64)},
            "logits: expected float16, bfloat16 or float32, got torch.float64",
            marks=NEEDS_TRITON,
        ),
    ],
)
def test_wrong_arguments_are_refused(change, expected):
    given = {"logits": torch.zeros(1, 8), "rows": ROW_0, "chosen": ROW_0, "implementation": "torch"}
    given |= {"histories": one_row([1]), "warpers": make_warpers(8)}
    with pytest.raises(ValueError, match=expected):
        draw(**given | change)
