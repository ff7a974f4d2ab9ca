"""The oracles against another implementation, against each other, and against paper and pencil."""

import copy

import pytest
import torch

from .naive_llama import (
    _inverse_frequencies,
    naive_greedy,
    naive_logits,
    naive_next_token,
    random_checkpoint,
)
from .plain_lookahead import PlainLookahead, PlainStep

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
        {"tie_word_embeddings": True},
        {"head_dim": 10},
        {"attention_bias": True},
        {"head_dim": 16, "rope_theta": 100.0, "rope_scaling": LLAMA3_ROPE},
        {"head_dim": 16, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    ],
    ids=lambda fields: ",".join(name for name in fields),
)
def test_naive_logits_equal_transformers(fields, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def rms_norm_in_own_dtype(self, hidden):  # theirs goes through float32
        eps = self.variance_epsilon
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, eps)

    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm_in_own_dtype)
    weights, config = random_checkpoint(3, vocab_size=23, **fields)
    model = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**copy.deepcopy(config)), attn_implementation="sdpa"
    )
    model = model.double().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else [])

    ids = torch.randint(0, 23, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    actual = naive_logits(weights, config, ids)
    assert actual.shape == (70, 23)
    assert actual.dtype == expected.dtype == torch.float64
    worst_by_position = (actual - expected).abs().amax(dim=1)
    assert (worst_by_position / expected.abs().amax(dim=1)).max() < 1e-9


def test_llama3_frequencies_by_hand():
    # theta 16, head_dim 8: frequencies 1, 1/2, 1/4, 1/8, wavelengths 2 pi * 1, 2, 4, 8.
    # Original length 48: below 12 kept (6.3), above 48 divided by 8 (50.3), 12.6 and 25.1 mixed:
    # smooth = (48 / wavelength - 1) / 3 = 0.9399 and 0.3033
    weights, config = random_checkpoint(0, head_dim=8, rope_theta=16.0)
    smooth = [(48 / (4 * torch.pi) - 1) / 3, (48 / (8 * torch.pi) - 1) / 3]
    expected = [
        1.0,
        (1 - smooth[0]) / 2 / 8 + smooth[0] / 2,
        (1 - smooth[1]) / 4 / 8 + smooth[1] / 4,
        1 / 8 / 8,
    ]
    scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": 48}
    actual = _inverse_frequencies({**config, "rope_scaling": scaling})
    assert actual.dtype == torch.float32
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)
    newer = {**scaling, "rope_theta": 16.0}
    del config["rope_scaling"], config["rope_theta"]
    assert torch.equal(_inverse_frequencies({**config, "rope_parameters": newer}), actual)
    with pytest.raises(ValueError, match="yarn"):
        naive_logits(weights, {**config, "rope_scaling": {"rope_type": "yarn"}}, [1, 2])


def test_next_token_of_a_prefix_is_that_of_the_prefix_alone():
    weights, config = random_checkpoint(1)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 3, 1, 4]
    after_whole = naive_next_token(weights, config)
    after_whole(ids)
    for length in range(1, len(ids) + 1):
        alone = naive_logits(weights, config, ids[:length])[-1].argmax().item()
        assert after_whole(ids[:length]) == alone


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 11, 32])
def test_random_checkpoints_vary_and_have_no_near_ties(vocab_size, tied):
    for seed in range(4):
        fields = {"vocab_size": vocab_size, "tie_word_embeddings": tied}
        weights, config = random_checkpoint(seed, **fields)
        next_token = naive_next_token(weights, config)
        outputs = set()
        for prompt in ([1, 2, 3, 4], [4, 0, 3], [0, 1, 1, 2, 4, 3]):
            new = naive_greedy(next_token, prompt, 24)
            assert new == naive_greedy(next_token, prompt, 24)
            outputs.update(new)
            best = naive_logits(weights, config, prompt + new).topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 1e-6
        assert len(outputs) >= 3
        again, _ = random_checkpoint(seed, **fields)
        assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_greedy_stops_after_an_end_of_text_id():
    def counting(ids):
        return ids[-1] + 1

    assert naive_greedy(counting, [1, 2], 4) == [3, 4, 5, 6]
    assert naive_greedy(counting, [1, 2], 4, eos_ids=(2, 5)) == [3, 4, 5]
    assert naive_greedy(counting, [1, 2], 0) == []


def sum_modulo_5(ids):
    """Depends on every id of the path, so a wrong ancestor or a missing one shows."""
    return sum(ids) % 5


def lookahead(next_token, prompt, initial_window, w, n, g, **options) -> PlainLookahead:
    settings = {"prompt_ngrams": True, "eos_ids": (), "max_new_tokens": 64, "max_length": 512}
    return PlainLookahead(next_token, prompt, initial_window, w, n, g, **{**settings, **options})


def run(decoder: PlainLookahead) -> list[PlainStep]:
    steps = []
    while not decoder.finished:
        steps.append(decoder.step())
    return steps


def test_four_steps_by_hand():
    # W = 2, N = 3, G = 2. Rows: 0 x, 1 (0, 1), 2 (1, 0), 3 (1, 1), then 4 5 and 6 7.
    # Text 1 2 4 3 1 goes on 1 2 4 3 1 2 4 3: each token after the first doubles modulo 5.
    decoder = lookahead(sum_modulo_5, [1, 2, 4, 3, 1], [[0, 2], [3, 0]], 2, 3, 2, max_new_tokens=8)
    assert decoder.committed == 4
    step = decoder.step()
    # Prompt n-grams 1 2 4, 2 4 3, 4 3 1. Committed sum 10.
    assert step == PlainStep(
        number=1,
        committed_before=4,
        window=[[1, 2], [3, 0]],
        candidates=[(2, 4)],
        origins=["prompt"],
        tokens=[1, 2, 3, 0, 2, 4],
        parents=[-1, 0, 0, 1, 0, 4],
        predictions={0: 1, 2: 4, 3: 3},  # 11; 10 + 1 + 3; 10 + 1 + 2 + 0
        accepted=[0],  # 2 is not 1
        emitted=[1],
        window_after=[[1, 0], [4, 3]],
        pool_after={1: [(2, 4)], 2: [(4, 3)], 4: [(3, 1)], 3: [(1, 1)]},  # no window n-gram yet
        committed_after=5,
        text_after=[1, 2, 4, 3, 1, 1],
    )
    step = decoder.step()
    # Committed sum 11. Key 1: (4, 1) of the window, then (1, 2) and (2, 4) of the text come in
    # front of (2, 4); it fell out and is new again. Key 0: (3, 0).
    assert step == PlainStep(
        number=2,
        committed_before=5,
        window=[[1, 0], [4, 3]],
        candidates=[(2, 4)],
        origins=["prompt"],
        tokens=[1, 0, 4, 3, 2, 4],
        parents=[-1, 0, 0, 1, 0, 4],
        predictions={0: 2, 2: 1, 3: 0, 4: 4, 5: 3},  # 12; 16; 15; 14; 18
        accepted=[0, 4, 5],
        emitted=[2, 4, 3],
        window_after=[[3, 3], [1, 0]],
        pool_after={
            1: [(2, 4), (1, 2)],
            2: [(4, 3)],
            4: [(3, 1)],
            3: [(1, 1)],
            0: [(3, 0)],
        },
        committed_after=8,
        text_after=[1, 2, 4, 3, 1, 1, 2, 4, 3],
    )
    step = decoder.step()
    # Committed sum 18. Key 3: (1, 2) and (0, 4) of the window push (1, 1) out, then the text's
    # 3 1 2 moves (1, 2) to the front. Key 4: the text's 4 3 1 was there.
    assert step == PlainStep(
        number=3,
        committed_before=8,
        window=[[3, 3], [1, 0]],
        candidates=[(1, 1)],
        origins=["output"],
        tokens=[3, 3, 1, 0, 1, 1],
        parents=[-1, 0, 0, 1, 0, 4],
        predictions={0: 1, 2: 2, 3: 4, 4: 2},  # 21; 22; 24; 22
        accepted=[0, 4],
        emitted=[1, 2],
        window_after=[[2, 0], [2, 4]],
        pool_after={
            1: [(2, 4), (1, 2)],
            2: [(4, 3)],
            4: [(3, 1)],
            3: [(1, 2), (0, 4)],
            0: [(3, 0)],
        },
        committed_after=10,
        text_after=[1, 2, 4, 3, 1, 1, 2, 4, 3, 1, 2],
    )
    step = decoder.step()
    # Committed sum 22. Both candidate tokens are right, and then 1, which is the ninth new
    # token and is cut. Key 2: (2, 1) of the window, then (4, 3) of the text again to the front.
    # Key 0: (4, 3) of the window. Key 1: (2, 4) again.
    assert step == PlainStep(
        number=4,
        committed_before=10,
        window=[[2, 0], [2, 4]],
        candidates=[(4, 3)],
        origins=["output"],
        tokens=[2, 0, 2, 4, 4, 3],
        parents=[-1, 0, 0, 1, 0, 4],
        predictions={0: 4, 2: 1, 3: 3, 4: 3, 5: 1},  # 24; 26; 28; 28; 31
        accepted=[0, 4, 5],
        emitted=[4, 3],
        window_after=[[3, 4], [1, 3]],
        pool_after={
            1: [(2, 4), (1, 2)],
            2: [(4, 3), (2, 1)],
            4: [(3, 1)],
            3: [(1, 2), (0, 4)],
            0: [(4, 3), (3, 0)],
        },
        committed_after=12,
        text_after=[1, 2, 4, 3, 1, 1, 2, 4, 3, 1, 2, 4, 3],
    )
    assert decoder.finished
    with pytest.raises(RuntimeError, match="unfinished"):
        decoder.step()


def test_bigrams_by_hand():
    # W = 2, N = 2, G = 1: one level, rows 0 x, 1 (0, 1), 2 the candidate.
    decoder = lookahead(sum_modulo_5, [1, 2], [[0, 4]], 2, 2, 1)
    first, second, third = decoder.step(), decoder.step(), decoder.step()
    assert (first.window, first.candidates) == ([[2, 4]], [])
    assert first.predictions == {0: 3, 1: 2}
    assert (first.emitted, first.window_after) == ([3], [[3, 2]])
    assert first.pool_after == {1: [(2,)], 2: [(3,)], 4: [(2,)]}

    assert (second.window, second.candidates) == ([[3, 2]], [])
    assert second.predictions == {0: 1, 1: 3}
    assert (second.emitted, second.window_after) == ([1], [[1, 3]])
    assert second.pool_after == {1: [(2,)], 2: [(3,)], 4: [(2,)], 3: [(1,)]}

    assert (third.window, third.candidates, third.origins) == ([[1, 3]], [(2,)], ["prompt"])
    assert (third.tokens, third.parents) == ([1, 3, 2], [-1, 0, 0])
    assert third.predictions == {0: 2, 1: 0, 2: 4}
    assert (third.accepted, third.emitted) == ([0, 2], [2, 4])
    assert third.window_after == [[4, 0]]
    assert third.pool_after == {1: [(2,)], 2: [(4,)], 4: [(2,)], 3: [(0,)]}
    assert third.committed_after == 5


def test_later_columns_are_more_recent():
    step = lookahead(sum_modulo_5, [1], [[0, 4, 4]], 3, 2, 2).step()
    assert step.predictions == {0: 1, 1: 0, 2: 4}  # 1; 1 + 4; 1 + 4 + 4
    assert step.pool_after == {1: [(1,)], 4: [(4,), (0,)]}


@pytest.mark.parametrize(
    ("after_1", "options", "accepted", "emitted", "finished"),
    [
        (4, {}, [0, 1], [1, 4], False),  # both candidates one deep: the lower row
        (2, {}, [0, 3, 4], [1, 2, 5], False),  # the second candidate is right throughout
        (3, {}, [0, 1, 2], [1, 3, 5], False),
        (2, {"eos_ids": (2, 7)}, [0, 3, 4], [1, 2], True),
        (2, {"eos_ids": (1,)}, [0, 3, 4], [1], True),
        (2, {"eos_ids": (5,)}, [0, 3, 4], [1, 2, 5], True),  # of the prompt it ends nothing
        (2, {"max_new_tokens": 2}, [0, 3, 4], [1, 2], True),
        (2, {"max_length": 9}, [0, 3, 4], [1, 2], True),
        (2, {"max_length": 10}, [0, 3, 4], [1, 2, 5], True),
        (2, {"max_length": 11}, [0, 3, 4], [1, 2, 5], False),
    ],
)
def test_pool_alone_by_hand(after_1, options, accepted, emitted, finished):
    # W = 0, N = 3, G = 3: rows 0 x, 1 2 the candidate (1, 3), 3 4 the older one (1, 2).
    following = {5: 1, 1: after_1, 2: 5, 3: 5, 4: 5}
    decoder = lookahead(
        lambda ids: following[ids[-1]], [5, 1, 2, 5, 1, 3, 5], [], 0, 3, 3, **options
    )
    step = decoder.step()
    assert step.candidates == [(1, 3), (1, 2)]
    assert step.tokens == [5, 1, 3, 1, 2]
    assert step.parents == [-1, 0, 1, 0, 3]
    assert (step.window, step.window_after) == ([], [])
    assert (step.accepted, step.emitted) == (accepted, emitted)
    assert decoder.finished == finished
    assert step.committed_after == 6 + len(emitted)
    # 3 5 1, then 5 1 `after_1`, then 1 `after_1` 5, as far as the text goes
    assert step.pool_after[3] == [(5, 1)]
    if len(emitted) > 1:
        assert step.pool_after[5][0] == (1, after_1)
    else:
        assert step.pool_after[5] == [(1, 3), (1, 2)]
    first_of_1 = {1: (3, 5), 2: (3, 5), 3: (after_1, 5)}[len(emitted)]
    assert step.pool_after[1][0] == first_of_1


def test_without_prompt_ngrams_the_text_still_fills_the_pool():
    decoder = lookahead(sum_modulo_5, [1, 2, 4], [], 0, 3, 2, prompt_ngrams=False)
    assert decoder.pool == {}
    assert decoder.step().pool_after == {2: [(4, 2)]}  # across the border
    short = lookahead(sum_modulo_5, [1], [], 0, 4, 2)
    assert [short.step().pool_after for _ in range(3)] == [{}, {}, {1: [(1, 2, 4)]}]


def test_window_ngrams_wait_for_their_levels():
    # N = 4: steps 1 and 2 complete n-grams with drawn levels, step 3 is the first without.
    decoder = lookahead(
        lambda ids: len(ids) % 7, [6], [[0, 50], [51, 52], [53, 54]], 2, 4, 4, prompt_ngrams=False
    )
    first, second, third = decoder.step(), decoder.step(), decoder.step()
    assert first.pool_after == second.pool_after == {}
    # text 6, then 1 2 3; the window is (x, 52), (53, 54), (3 4), then (x, 54), (3, 4), (4, 5)
    assert second.window == [[1, 52], [53, 54], [3, 4]]
    assert third.window == [[2, 54], [3, 4], [4, 5]]
    # committed length 2, x, two more rows: position of the new token is 5, and 6 a column later
    assert third.pool_after == {2: [(3, 4, 5)], 54: [(4, 5, 6)], 6: [(1, 2, 3)]}


def test_rows_see_their_own_path():
    visible = """
        x.. ... ... ... ...
        xx. ... ... ... ...
        xxx ... ... ... ...
        x.. x.. ... ... ...
        xx. .x. ... ... ...
        xxx ..x ... ... ...
        x.. x.. x.. ... ...
        xx. .x. .x. ... ...
        xxx ..x ..x ... ...
        x.. ... ... x.. ...
        x.. ... ... xx. ...
        x.. ... ... xxx ...
        x.. ... ... ... x..
        x.. ... ... ... xx.
        x.. ... ... ... xxx
    """
    prompt = [7, 1, 2, 3, 7, 4, 5, 6, 7]
    drawn = [[9, 11, 12], [20, 21, 22], [30, 31, 32]]
    step = lookahead(lambda ids: 8, prompt, drawn, 3, 4, 2).step()
    assert step.tokens == [7, 11, 12, 20, 21, 22, 30, 31, 32, 4, 5, 6, 1, 2, 3]
    for row, line in enumerate(visible.strip().splitlines()):
        seen, ancestor = set(), row
        while ancestor >= 0:
            seen.add(ancestor)
            ancestor = step.parents[ancestor]
        flags = line.replace(" ", "")
        assert seen == {column for column, flag in enumerate(flags) if flag == "x"}


def two_back(ids):
    return (3 * ids[-1] + ids[max(0, len(ids) - 2)] + len(ids) // 9) % 7


MODELS = {"sum": sum_modulo_5, "two_back": two_back, "periodic": lambda ids: len(ids) % 5}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("guesses", [0, 1, 3])
@pytest.mark.parametrize("ngram", [2, 3, 4, 5])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
def test_lookahead_equals_greedy(window, ngram, guesses, model):
    next_token = MODELS[model]
    generator = torch.Generator().manual_seed(window)
    for prompt in ([3], [1, 2], [1, 2, 4, 3, 1, 2, 4, 0, 1]):
        shape = (ngram - 1, window)
        drawn = torch.randint(0, 5, shape, generator=generator).tolist() if window else []
        for eos_ids in ((), (4,)):
            for prompt_ngrams in (False, True):
                decoder = lookahead(
                    next_token,
                    prompt,
                    drawn,
                    window,
                    ngram,
                    guesses,
                    prompt_ngrams=prompt_ngrams,
                    eos_ids=eos_ids,
                    max_new_tokens=40,
                    max_length=len(prompt) + 31,
                )
                steps = run(decoder)
                expected = naive_greedy(next_token, prompt, 31, eos_ids)
                assert decoder.text == prompt + expected
                assert [token for step in steps for token in step.emitted] == expected
                for step in steps:
                    check_invariants(step, window, ngram, guesses)
                if guesses == 0:
                    assert len(steps) == len(expected)


def check_invariants(step: PlainStep, window: int, ngram: int, guesses: int) -> None:
    assert 1 <= len(step.emitted) <= len(step.accepted) <= ngram
    assert step.committed_after == step.committed_before + len(step.emitted)
    assert step.committed_after == len(step.text_after) - 1
    assert len(step.candidates) == len(step.origins) <= guesses
    num_window_rows = window * (ngram - 1) if window else 1
    assert len(step.tokens) == num_window_rows + len(step.candidates) * (ngram - 1)
    assert len(step.tokens) == len(step.parents)
    assert all(parent < row for row, parent in enumerate(step.parents))
    for kept in step.pool_after.values():
        assert 1 <= len(kept) == len(set(kept)) <= guesses
        assert all(len(continuation) == ngram - 1 for continuation in kept)
    if window:
        assert step.window_after[0][0] == step.text_after[-1]
        assert step.window_after[0][1:] == (step.window[1:] or step.window_after)[0][1:]
        assert step.window_after[1:-1] == step.window[2:]


@pytest.mark.parametrize("tied", [False, True])
def test_lookahead_on_a_random_model_equals_greedy_in_fewer_steps(tied):
    weights, config = random_checkpoint(3, vocab_size=5, tie_word_embeddings=tied)
    next_token = naive_next_token(weights, config)
    prompt = [4, 0, 3]
    expected = naive_greedy(next_token, prompt, 40)
    accepted_from = set()
    for w, n, g in ((0, 2, 0), (0, 3, 2), (2, 2, 2), (3, 3, 3), (4, 5, 4)):
        drawn = [[(c + level) % 5 for c in range(w)] for level in range(n - 1)]
        decoder = lookahead(next_token, prompt, drawn, w, n, g, max_new_tokens=40)
        steps = run(decoder)
        assert decoder.text == prompt + expected
        assert len(steps) == 40 if g == 0 else len(steps) < 40
        first = max(1, w * (n - 1))
        for step in steps:
            if len(step.accepted) > 1:
                accepted_from.add(step.origins[(step.accepted[1] - first) // (n - 1)])
    assert accepted_from >= {"window", "output"}


def test_a_request_without_room_is_finished_at_once():
    assert lookahead(sum_modulo_5, [1, 2], [], 0, 3, 1, max_new_tokens=0).finished
    assert lookahead(sum_modulo_5, [1, 2], [], 0, 3, 1, max_length=2).finished
    with pytest.raises(ValueError, match="2 levels of 3 columns"):
        lookahead(sum_modulo_5, [1, 2], [[1, 2, 3]], 3, 3, 1)
