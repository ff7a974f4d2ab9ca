"""Step costs: measured, kept, read again; and the configuration that they come to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from tiny_models import build_llama

from lookahead import step_costs as module
from lookahead.config import LookaheadConfig
from lookahead.layout import LookaheadLayout
from lookahead.step_costs import ROW_COUNTS, StepCosts, measure, step_costs
from lookahead.tune import YIELDS, tune

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def llama():
    return build_llama(random_checkpoint(1), torch.float32)


@pytest.fixture
def measured(monkeypatch):
    """Arguments of each measurement; none takes place."""
    calls = []

    def measure_nothing(model, context, row_counts):
        calls.append((context, tuple(row_counts)))
        return StepCosts((1, 2, 9), (0.5, 0.625, float(len(calls))))

    monkeypatch.setattr(module, "measure", measure_nothing)
    return calls


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_between_and_behind_what_was_measured():
    costs = StepCosts((1, 2, 4), (1.0, 1.5, 2.0))
    found = [costs.at(rows) for rows in (0.5, 1, 1.5, 2, 3, 4, 6)]
    assert found == [1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5]
    assert [StepCosts((1,), (2.0,)).at(rows) for rows in (1, 3)] == [2.0, 6.0]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((), ()),
        ((2,), (1.0,)),
        ((1, 1), (1.0, 1.0)),
        ((1, 2), (1.0,)),
        ((1, 2), (1.0, float("nan"))),
        ((1, 2), (1.0, 0.0)),
        ((1, 2), (1.0, 0.9)),
        ((1, 2), (1.0, 1e308)),
        ((1, 2.5), (1.0, 2.0)),
        ((1, 2), (1, 2)),
    ],
)
def test_costs_that_are_none(rows, seconds):
    with pytest.raises(ValueError, match="rows"):
        StepCosts(rows, seconds)


def test_measuring_runs_every_number_of_rows(llama, monkeypatch):
    counts = []
    choose = llama.choose

    def noted(tokens, positions, layout, cache, lengths, live_rows, rows):
        assert positions.tolist() == [[40 + depth for depth in layout.depths]]
        assert (lengths.tolist(), live_rows.tolist()) == ([40], [tokens.shape[1]])
        counts.append(tokens.shape[1])
        assert rows.tolist() == list(range(tokens.shape[1]))
        return choose(tokens, positions, layout, cache, lengths, live_rows, rows)

    monkeypatch.setattr(llama, "choose", noted)
    monkeypatch.setattr(module, "TOO_SLOW", float("inf"))
    costs = measure(llama, 40, (1, 2, 5))
    assert costs.rows == (1, 2, 5)
    assert list(costs.seconds) == sorted(costs.seconds)
    assert counts[:6] == [1, 1, 2, 2, 5, 5]
    assert counts[6:] == [1, 2, 5] * module.ROUNDS


def test_rows_that_are_far_too_slow_are_left_out(llama, monkeypatch):
    times = iter(
        time for seconds in (1, 2, 9, *(2, 1, 9) * module.ROUNDS) for time in (0.0, float(seconds))
    )
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(module, "_step", lambda *_: lambda: None)
    monkeypatch.setattr(module, "TOO_SLOW", 8.0)
    # What seems to become faster by more rows does not.
    assert measure(llama, 40, (1, 2, 5, 9)) == StepCosts((1, 2, 5), (2.0, 2.0, 9.0))


def test_a_second_time_nothing_is_measured(cache, llama, measured):
    first = step_costs(llama, 512, 64)
    assert step_costs(llama, 512, 64) == first == StepCosts((1, 2, 9), (0.5, 0.625, 1.0))
    assert measured == [(256, tuple(count for count in ROW_COUNTS if count <= 64))]
    assert len(files(cache)) == 1


def test_another_model_or_use_is_measured_anew(cache, llama, measured):
    step_costs(llama, 512, 64)
    step_costs(llama, 100, 64)
    step_costs(llama, 512, 32)
    step_costs(build_llama(random_checkpoint(1), torch.bfloat16), 512, 64)
    step_costs(build_llama(random_checkpoint(1, vocab_size=12), torch.float32), 512, 64)
    torch.set_num_threads(2)
    step_costs(llama, 512, 64)
    torch.set_num_threads(1)
    assert len(measured) == len(files(cache)) == 6
    assert measured[1][0] == 99


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: "\x00\xff",
        lambda text: json.dumps({**json.loads(text), "rows": [1, 2]}),
        lambda text: json.dumps({**json.loads(text), "rows": "no"}),
        lambda text: json.dumps({**json.loads(text), "seconds": [1, -2, 3]}),
        lambda text: json.dumps({**json.loads(text), "seconds": ["1", "2", "3"]}),
        lambda text: json.dumps({**json.loads(text), "key": {}}),
        lambda text: text.replace('"rows"', '"lines"'),
        lambda text: text.replace("0.625", "1" + "0" * 400),
        lambda text: json.dumps({**json.loads(text), "rows": [1, 2, 10**400]}),
        lambda text: json.dumps({**json.loads(text), "seconds": [3.0, 2.0, 1.0]}),
    ],
)
def test_a_damaged_file_is_made_anew(cache, llama, measured, damage):
    step_costs(llama, 512, 64)
    (path,) = files(cache)
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert step_costs(llama, 512, 64).seconds[-1] == 2.0
    assert step_costs(llama, 512, 64).seconds[-1] == 2.0
    assert len(measured) == 2


def test_a_cache_directory_that_cannot_be_written(cache, llama, measured):
    (cache / "lookahead").write_text("a file")
    assert step_costs(llama, 512, 64).seconds[-1] == 1.0
    assert step_costs(llama, 512, 64).seconds[-1] == 2.0


def test_flat_costs_take_the_most_tokens_that_fit():
    flat = StepCosts((1, 2), (1.0, 1.0))
    best = max(YIELDS, key=lambda each: each.tokens)
    tuning = tune(flat, 1000, 1, leaves_out_rows=False)
    shape = (tuning.config.window, tuning.config.ngram, tuning.config.guesses)
    assert shape == best[:3]
    assert (tuning.tokens, tuning.ratio) == (best.tokens, 1.0)
    for most in (10, 30, 2):
        config = tune(flat, most, 1, leaves_out_rows=False).config
        assert LookaheadLayout.count_rows(config.window, config.ngram, config.guesses) <= most


def test_steep_costs_take_plain_decoding():
    tuning = tune(StepCosts((1, 2), (1.0, 2.0)), 128, 1, leaves_out_rows=True)
    assert tuning.config == LookaheadConfig(0, 2, 0, adaptive=True)
    assert tuning.reason == "no other choice pays here, or fits max_step_rows: plain decoding"


def test_the_best_ratio_wins_and_says_why():
    costs = StepCosts((1, 8, 12, 100), (1.0, 1.2, 4.0, 50.0))
    tuning = tune(costs, 128, 1, leaves_out_rows=True)
    ratios = {each[:3]: each.tokens / costs.at(each.rows) for each in YIELDS}
    shape = (tuning.config.window, tuning.config.ngram, tuning.config.guesses)
    assert shape == max(ratios, key=ratios.get)
    assert tuning.config.adaptive
    said = (
        f"{tuning.tokens:.2f} tokens a step expected in {tuning.ratio:.2f} of the time of one row: "
    )
    assert tuning.reason == f"{said}{tuning.tokens / tuning.ratio:.2f}x plain decoding"
    # Eight sequences are where the costs are steep already.
    assert tune(costs, 128, 8, leaves_out_rows=True).config.guesses == 0


def test_yields_are_within_what_their_layout_allows():
    for each in YIELDS:
        most = LookaheadLayout.count_rows(each.window, each.ngram, each.guesses)
        assert 1 < each.tokens < each.ngram
        assert each.rows <= most
    assert replace(tune(StepCosts((1,), (1.0,)), 2, 1, True), tokens=1.0).tokens == 1.0
