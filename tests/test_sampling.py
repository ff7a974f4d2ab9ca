"""Sampling is exact: draws have the model's distribution, and are the same in every mode.

The joint distribution of the first tokens of autoregressive decoding is compared with an exact
enumeration. Lookahead decoding gives each sample's very tokens, so it has that distribution too.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from oracles.naive_llama import naive_logits, random_checkpoint
from oracles.naive_sampling import naive_probabilities
from tiny_models import build_llama, build_step, start_step, text_of

from lookahead import sampling
from lookahead.config import AUTOREGRESSIVE, LookaheadConfig, SamplingConfig
from lookahead.kernels.draw import draw
from lookahead.kernels.warpers import Histories
from lookahead.step import Step

VOCAB_SIZE = 8
PROMPT = (3, 1, 1, 5)
EOS_ID = 2
NUM_TOKENS = 4
LEAST_P = 0.001
# More often than not, where there are candidates, some of their tokens are accepted.
SHAPES = [(3, 3, 2), (5, 4, 5), (0, 5, 8), (2, 2, 3)]

WARPER_SETS = {
    "temperature": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.5,
    },
    "everything": {
        "temperature": 1.5,
        "top_k": 7,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": ((0, 0.7), (4, -0.5)),
        "banned_tokens": (6,),
        "min_new_tokens": 2,
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint() -> tuple[dict, dict]:
    """A random model whose distributions are neither flat nor peaked."""
    tensors, fields = random_checkpoint(11, vocab_size=VOCAB_SIZE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.5
    return tensors, fields


@pytest.fixture(scope="module")
def logits_behind(checkpoint) -> dict[tuple[int, ...], list[float]]:
    """The model's logits behind the prompt and each text of fewer than NUM_TOKENS new ids."""
    found = {}
    for ids in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS - 1):
        rows = naive_logits(*checkpoint, [*PROMPT, *ids])[len(PROMPT) - 1 :]
        for count, row in enumerate(rows.tolist()):
            found[ids[:count]] = row
    return found


def exact_joint(logits_behind, options: dict) -> dict[tuple[int, ...], float]:
    """Probability of each text of NUM_TOKENS new ids, or of fewer with an end-of-text id last."""
    joint, growing = {}, {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for ids, probability in growing.items():
            text = [*PROMPT, *ids]
            following = naive_probabilities(
                logits_behind[ids], text, len(PROMPT), eos_ids=[EOS_ID], **options
            )
            for token, share in enumerate(following):
                if share > 0:
                    target = joint if token == EOS_ID else longer
                    target[(*ids, token)] = probability * share
        growing = longer
    return joint | growing


def build(checkpoint, config: LookaheadConfig, batch: int, options: dict, seed: int = 0) -> Step:
    step = build_step(build_llama(checkpoint), config, max_length=128, batch_size=batch)
    step.sampler.use(SamplingConfig(seed=seed, **options))
    return step


def build_both(checkpoint: tuple, options: dict, shape: tuple[int, int, int]) -> list[Step]:
    """Autoregressive decoding and lookahead."""
    configs = (AUTOREGRESSIVE, LookaheadConfig(*shape))
    return [build(checkpoint, config, 1, options, seed=6) for config in configs]


@torch.inference_mode()
def sample_texts(
    step: Step,
    first_sample: int,
    num_tokens: int = NUM_TOKENS,
    eos_ids: tuple[int, ...] = (EOS_ID,),
) -> list[tuple[int, ...]]:
    """The new ids of samples first_sample, first_sample + 1, ..., one a sequence of the batch."""
    batch = len(step.state.lengths)
    for sequence in range(batch):
        step.sampler.start(sequence, len(PROMPT), first_sample + sequence)
        start_step(step, PROMPT, len(PROMPT) + num_tokens, eos_ids, sequence)
    while not step.state.finished.all():
        step.run()
    return [tuple(text_of(step, sequence)[len(PROMPT) :]) for sequence in range(batch)]


@torch.inference_mode()
def count_samples(step: Step, number: int) -> Counter[tuple[int, ...]]:
    """How often each text is drawn among samples 0, 1, ...; autoregressive, all of a batch at once."""
    batch, state, begin = len(step.state.lengths), step.state, len(PROMPT)
    sample_texts(step, 0)  # the prompt is in the cache from now on
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, number, batch):
        step.sampler.samples.copy_(torch.arange(first, first + batch))
        state.lengths.fill_(begin - 1)
        state.finished.fill_(False)
        while not state.finished.all():
            step.run()
        lengths = state.lengths.tolist()
        new = state.tokens[:, begin : begin + NUM_TOKENS].tolist()
        counts.update(
            tuple(ids[: length + 1 - begin]) for ids, length in zip(new, lengths, strict=True)
        )
    return counts


def p_value(counts: Counter, joint: dict, number: int) -> float:
    """Of Pearson's chi-square test; texts that are expected fewer than ten times are one cell."""
    cells = [(number * share, counts[ids]) for ids, share in joint.items()]
    rare = [(expected, seen) for expected, seen in cells if expected < 10]
    cells = [(expected, seen) for expected, seen in cells if expected >= 10]
    if rare:
        cells.append((sum(e for e, _ in rare), sum(seen for _, seen in rare)))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "everything" else pytest.param(name, marks=pytest.mark.slow)
        for name in WARPER_SETS
    ],
)
def test_samples_have_the_joint_distribution(checkpoint, logits_behind, name):
    number, options = 200_000, WARPER_SETS[name]
    joint = exact_joint(logits_behind, options)
    assert math.isclose(sum(joint.values()), 1.0)
    counts = count_samples(build(checkpoint, AUTOREGRESSIVE, 2000, options, seed=5), number)
    assert sum(counts.values()) == number
    assert set(counts) <= set(joint), "texts that cannot be"
    assert p_value(counts, joint, number) > LEAST_P


@pytest.mark.parametrize("name", WARPER_SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lookahead_draws_the_same_sample_for_sample(checkpoint, name, shape):
    number, length = 12, 60
    steps = build_both(checkpoint, WARPER_SETS[name], shape)
    counts, found = [0, 0], []
    for which, step in enumerate(steps):
        run = step.run

        def counted(which=which, run=run):
            counts[which] += 1
            return run()

        step.run = counted
        found.append([sample_texts(step, sample, length, ())[0] for sample in range(number)])
    assert found[0] == found[1]
    assert len(set(found[0])) == number
    assert counts[0] == number * length
    assert counts[1] < 0.9 * counts[0], "candidates are accepted"


@pytest.mark.parametrize("batch", [2, 4])
def test_a_sequences_place_in_the_batch_does_not_enter(checkpoint, batch):
    options = WARPER_SETS["everything"]
    together = sample_texts(build(checkpoint, LookaheadConfig(3, 3, 2), batch, options), 0)
    alone = build(checkpoint, AUTOREGRESSIVE, 1, options)
    assert together == [sample_texts(alone, sample)[0] for sample in range(batch)]


def test_seeds_and_samples_differ(checkpoint):
    texts = {
        (
            seed,
            *sample_texts(build(checkpoint, AUTOREGRESSIVE, 1, {"temperature": 1.0}, seed), sample),
        )
        for seed in (0, 1, 2**63, 2**64 - 1)
        for sample in (0, 1, 2)
    }
    assert len({text for _, text in texts}) > 6


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-9},
        {"temperature": 9.9e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1e30, "top_k": 1},
    ],
)
def test_little_temperature_and_the_most_probable_token_are_greedy(checkpoint, options):
    greedy = sample_texts(build(checkpoint, AUTOREGRESSIVE, 1, {}), 0)
    for config in (AUTOREGRESSIVE, LookaheadConfig(3, 3, 2)):
        for seed in range(5):
            assert sample_texts(build(checkpoint, config, 1, options, seed), 7) == greedy


# What follows plants errors; each has to be found as the tests above would find it.


def plant_histories(patch: pytest.MonkeyPatch, change: Callable[[Histories], Histories]) -> None:
    """Draw by other histories than the rows have; in torch, which draws rows that are not reached."""

    def spoiled(logits, rows, chosen, histories, warpers, implementation, kept):
        return draw(logits, rows, chosen, change(histories), warpers, "torch")

    patch.setattr(sampling, "draw", spoiled)


def differs(checkpoint: tuple, options: dict, shape: tuple[int, int, int]) -> bool:
    """Whether lookahead draws anything that autoregressive decoding does not."""
    steps = build_both(checkpoint, options, shape)
    return any(
        sample_texts(steps[0], sample, 40, ()) != sample_texts(steps[1], sample, 40, ())
        for sample in range(6)
    )


def test_a_stream_that_two_positions_share_is_found(checkpoint, logits_behind, monkeypatch):
    options, number = WARPER_SETS["temperature"], 20_000
    joint = exact_joint(logits_behind, options)
    step = build(checkpoint, AUTOREGRESSIVE, 2000, options, seed=5)
    assert p_value(count_samples(step, number), joint, number) > LEAST_P

    def shared(logits, rows, chosen, histories, warpers, implementation, kept):
        """Every second text seems a token shorter; without penalties only its position matters."""
        shorter = histories.lengths - histories.lengths % 2
        return draw(
            logits, rows, chosen, histories._replace(lengths=shorter), warpers, implementation, kept
        )

    monkeypatch.setattr(sampling, "draw", shared)
    assert p_value(count_samples(step, number), joint, number) < 1e-9


def test_a_bonus_from_the_wrong_row_is_found(checkpoint, monkeypatch):
    options, shape = WARPER_SETS["temperature"], (0, 4, 4)
    assert not differs(checkpoint, options, shape)

    def spoiled(logits, rows, *others):
        """What follows a candidate is taken from row 0."""
        return tuple(each[:1].expand(each.shape) for each in draw(logits, rows, *others))

    monkeypatch.setattr(sampling, "draw", spoiled)
    assert differs(checkpoint, options, shape)


def test_a_history_without_the_rows_own_path_is_found(checkpoint, monkeypatch):
    options, shape = WARPER_SETS["penalties"], (0, 4, 4)
    plant_histories(monkeypatch, lambda histories: histories)
    assert not differs(checkpoint, options, shape)
    # Other tokens stand on the path, as many as before.
    plant_histories(
        monkeypatch, lambda histories: histories._replace(tokens=histories.tokens * 0 + PROMPT[0])
    )
    assert differs(checkpoint, options, shape)
