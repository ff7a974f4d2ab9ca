"""`bench/batch.py`: its figures, and that it refuses to time prompts that differ in a batch."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, InputError, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.results import Result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import batch
import batch_figures
from batch_figures import Totals

CONFIG = LookaheadConfig(4, 3, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("batch") / "checkpoint")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    # The same name twice: prompts are told apart by their place.
    lines = [{"id": "same", "prompt": text} for text in ("abc abc", "cab", "dad a", "ee", "fab")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_batches_are_read() -> None:
    assert batch.parse_batches("4,1, 2,4") == [1, 2, 4]
    for text in ("", "0", "1,x", "1,,2", "-1"):
        with pytest.raises(InputError, match="--batches: expected sizes"):
            batch.parse_batches(text)


def test_prompts_are_grouped() -> None:
    assert batch.groups(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert batch.groups(2, 2) == [slice(0, 2)]


def result(new_tokens: int, steps: int, seconds: float) -> Result:
    names = ("prompt", "text", "finish_reason", "mode", "device", "dtype")
    return Result(
        **dict.fromkeys(names, ""),
        token_ids=[1] * new_tokens,
        prompt_tokens=1,
        new_tokens=new_tokens,
        steps=steps,
        tokens_per_step=new_tokens / steps,
        prefill_seconds=0.0,
        decode_seconds=seconds,
        tokens_per_second=new_tokens / seconds,
        window=0,
        ngram=2,
        guesses=0,
        choice="given",
        adaptive=False,
        rows_per_step=1.0,
        seed=0,
        sample=0,
        exact=True,
        inexact_reason=None,
        row_block=1,
    )


def test_a_group_takes_as_long_as_its_longest_result() -> None:
    found = batch_figures.totals([[result(4, 2, 1.0), result(4, 4, 3.0)], [result(4, 3, 0.5)]])
    assert found == Totals(tokens=12, steps=7, seconds=3.5)


def test_ratios_are_to_the_faster_autoregressive_mode_of_each_repeat() -> None:
    modes = [("a", AUTOREGRESSIVE), ("b", AUTOREGRESSIVE), ("lookahead", CONFIG)]
    runs = [
        [Totals(8, 8, 4.0), Totals(8, 8, 1.0)],
        [Totals(8, 8, 2.0), Totals(8, 8, 2.0)],
        [Totals(8, 4, 1.0), Totals(8, 4, 2.0)],
    ]
    rows = batch_figures.rows_of(2, modes, runs)
    assert [row["batch"] for row in rows] == [2, 2, 2]
    assert rows[0]["ratio"] == {"median": 0.75, "p20": 0.6, "p80": 0.9}
    assert rows[2]["ratio"]["median"] == pytest.approx((8 / 4 + 4 / 8) / 2)
    assert rows[2]["ms_per_step"]["median"] == 375
    assert rows[2]["tokens_per_second"]["median"] == 6
    line = batch_figures.table(rows).splitlines()[3]
    assert line.split() == "lookahead (4, 3, 2) 2 2.00 375.0 6.0 4.8-7.2 1.25".split()


def test_where_lookahead_stops_paying() -> None:
    def row(size: int, shape: tuple[int, int, int], ratio: float, mode: str = "lookahead") -> dict:
        names = ("window", "ngram", "guesses")
        return {
            **dict(zip(names, shape, strict=True)),
            "mode": mode,
            "batch": size,
            "ratio": {"median": ratio},
        }

    small, large, plain = (4, 3, 2), (15, 5, 15), (0, 2, 0)
    rows = [row(size, plain, 1.0, "autoregressive") for size in (1, 2, 4)]
    rows += [row(4, small, 1.1), row(1, small, 1.5), row(2, small, 1.2)]
    rows += [row(1, large, 1.3), row(2, large, 0.9), row(4, large, 1.1)]
    # What the engine chooses is another shape at each batch, and at the last no extra row.
    rows += [row(1, small, 1.6, "tuned"), row(2, large, 1.2, "tuned"), row(4, plain, 0.99, "tuned")]
    found = batch_figures.stops_paying(rows)
    assert found == [
        {"mode": "lookahead (4, 3, 2)", "batch": None},
        {"mode": "lookahead (15, 5, 15)", "batch": 2},
        {"mode": "tuned", "batch": 4},
    ]
    assert batch_figures.verdict(found).splitlines() == [
        "lookahead (4, 3, 2): faster at every batch",
        "lookahead (15, 5, 15): no longer faster from batch 2",
        "tuned: no longer faster from batch 4",
    ]


def run(checkpoint: Path, prompts: Path, *options: str) -> int:
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--dtype", "float32"]
    arguments += ["--max-new-tokens", "12", "--configs", "4,3,2", "--repeats", "2"]
    return batch.main([*arguments, "--limit", "5", *options])


def test_batches_are_timed(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, prompts, "--batches", "1,2") == 0
    text, progress = capsys.readouterr()
    assert progress == ""
    record = json.loads(text.splitlines()[-1])
    assert [(row["batch"], row["mode"]) for row in record["rows"]] == [
        (1, "autoregressive"),
        (1, "tuned"),
        (1, "lookahead"),
        (2, "autoregressive"),
        (2, "tuned"),
        (2, "lookahead"),
    ]
    assert [row["tokens"] for row in record["rows"]] == [60] * 6
    assert [row["steps"] for row in record["rows"][::3]] == [5 * 12, 3 * 12]
    assert record["rows"][5]["steps"] < 3 * 12
    assert record["rows"][3]["ratio"]["median"] == 1
    assert [end["mode"] for end in record["stops_paying"]] == ["tuned", "lookahead (4, 3, 2)"]
    # By the tests' step costs, 16 rows are as dear as one: 2 x 4.7 rows are, and 2 x 10.6 are not.
    assert [row["guesses"] for row in record["rows"][1::3]] == [4, 4]


def test_batches_run_without_configurations(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, prompts, "--batches", "4", "--configs", "") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["mode"] for row in rows] == ["autoregressive", "tuned"]


def test_ids_that_differ_in_a_batch_are_not_timed(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = Engine.generate

    def differing(engine: Engine, prompts: list[list[int]], **options: object) -> list[Result]:
        results = generate(engine, prompts, **options)
        if len(prompts) == 2 and options["lookahead"] == CONFIG:
            ids = results[1].token_ids
            results[1] = replace(results[1], token_ids=[*ids[:7], 0, *ids[8:]])
        return results

    monkeypatch.setattr(Engine, "generate", differing)
    assert run(checkpoint, prompts, "--batches", "1,2") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "refused: prompt same in a batch of 2 differs from itself alone at new token 7 with "
        "lookahead (4, 3, 2); no speed is reported\n"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batches", "1,6"], "--batches: 6 is more than the 5 prompts that there are"),
        (["--batches", "two"], "--batches: expected sizes"),
        (["--batches", "1", "--max-new-tokens", "510"], "positions, the model has 512"),
    ],
)
def test_batch_refuses_wrong_input_in_one_line(
    checkpoint: Path,
    prompts: Path,
    options: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(checkpoint, prompts, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
