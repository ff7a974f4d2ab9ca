"""The benchmark of exactness: what it counts, what it resumes, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import exactness
import exactness_cost
import exactness_plan
from exactness_texts import Text, compare_texts
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine
from lookahead import batch as batch_module
from lookahead.kernels.largest_logit import largest_logit
from lookahead.models.llama import Llama
from lookahead.results import TokenLogprob

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": name, "prompt": name * 9} for name in ("abc ", "ab", "hello there ")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        *("--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "20"),
        *("--configs", "4,3,4;0,4,3", "--dtype", "bfloat16"),
    ]


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_everything_is_the_same(arguments, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert exactness.main([*arguments, "--json-out", str(out)]) == 0
    text = capsys.readouterr().out
    record = last_json(text)
    assert json.loads(out.read_text()) == record
    assert [row["name"] for row in record["rows"]] == ["lookahead (4, 3, 4)", "pool only (0, 4, 3)"]
    for row in record["rows"]:
        assert (row["prompts"], row["identical"], row["logits_differ"]) == (3, 3, 0)
        assert row["logits_compared"] == row["tokens"] == 60
        assert (row["first_difference"], row["margin"]) == (None, None)
    assert "pool only (0, 4, 3)     3 of 3        0 of 60" in text
    assert record["sampling"] == "greedy"
    assert record["provenance"]["dtype"] == "bfloat16"


def test_a_difference_is_told_with_its_margin(arguments, monkeypatch, capsys):
    """Every logit of one kind of step is another."""
    choose = Llama.choose

    def by_count(model, *arguments):
        *_, rows, _ = arguments
        logits = choose(model, *arguments)[0] * (-1) ** (len(rows) > 1)
        return logits, *largest_logit(logits)

    monkeypatch.setattr(Llama, "choose", by_count)
    assert exactness.main(arguments) == 1
    row = last_json(capsys.readouterr().out)["rows"][0]
    assert row["identical"] == 0
    assert row["logits_differ"] > 0
    assert row["first_difference"] == 0
    assert row["margin"] >= 0


def test_finished_prompts_are_kept(arguments, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept.jsonl"
    assert exactness.main([*arguments, "--resume", str(kept), "--limit", "2"]) == 0
    assert len(kept.read_text().splitlines()) == 2
    generated = []
    batch = Engine.batch

    def counted(engine, *arguments, **options):
        generated.append(arguments)
        return batch(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "batch", counted)
    assert exactness.main([*arguments, "--resume", str(kept)]) == 0
    assert len(generated) == 3  # one prompt, plain and twice
    assert last_json(capsys.readouterr().out)["prompts"] == 3
    with kept.open("a") as file:
        file.write('{"key": "2 ')  # a run that was stopped while it wrote
    assert exactness.main([*arguments, "--resume", str(kept)]) == 0
    for change in (
        ["--dtype", "float32"],
        ["--configs", "4,3,4"],
        ["--max-new-tokens", "9"],
        ["--temperature", "1"],
        ["--seed", "1"],
        ["--batches", "1,2"],
        ["--logprobs", "0"],
    ):
        assert exactness.main([*arguments, "--resume", str(kept), *change]) == 2
        assert "line 1 is of another run" in capsys.readouterr().err
    for broken in ("[]", "{}", "nonsense"):
        kept.write_text(broken + "\n")
        assert exactness.main([*arguments, "--resume", str(kept)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --resume {kept}, line 1")
        assert error.count("\n") == 1


def test_cost(arguments, monkeypatch, capsys):
    monkeypatch.setattr(exactness_cost, "LENGTHS", (30, 70))
    monkeypatch.setattr(exactness_cost, "MOST_TOKENS", 70)
    monkeypatch.setattr(exactness_cost, "REPEATS", 2)
    assert exactness.main([*arguments, "--cost"]) == 0
    record = last_json(capsys.readouterr().out)
    shapes = [(row["length"], row["window"], row["guesses"]) for row in record["rows"]]
    assert shapes == [(30, 0, 0), (30, 4, 4), (30, 0, 3), (70, 0, 0), (70, 4, 4), (70, 0, 3)]
    for row in record["rows"]:
        assert row["ratio"] == row["exact_ms"]["median"] / row["fast_ms"]["median"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--peers", "other"], "--peers: 'other' is not known"),
        (["--least-tokens", "9999"], "no prompt has 9999.."),
        (["--configs", "1"], "--configs: expected"),
        (["--cost", "--resume", "x.jsonl"], "--cost decodes a text of its own"),
        (["--cost", "--temperature", "1"], "--cost decodes one text at a time, greedily"),
        (["--batches", "0"], "--batches: expected sizes of at least 1"),
        (["--batches", "1,4"], "--batches: 4 is more than the 3 prompts"),
        (["--logprobs", "-1"], "--logprobs must be a whole number of at least 0"),
        (["--logprobs", "9999"], "logprobs must be at most the vocabulary's"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0"),
        (["--ban-token", "9999"], "banned_tokens: token 9999 is not in the vocabulary"),
        (["--resume", "."], "--resume . cannot be written"),
        (["--dtype", "int8"], "dtype 'int8' is not known"),
        (["--max-new-tokens", "99999"], "--max-new-tokens must be less than the "),
        (["--configs", "5000,9,5000"], "--configs: 5000,9,5000 takes 80000 rows a step, expected"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, more, expected, capsys):
    assert exactness.main([*arguments, *more]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {expected}")
    assert captured.err.count("\n") == 1


def test_an_engine_that_is_not_exact_is_refused(arguments, monkeypatch, capsys):
    load = exactness_plan.Engine.load
    monkeypatch.setattr(
        exactness_plan.Engine,
        "load",
        lambda *given, **named: load(*given, **named, implementation="torch"),
    )
    assert exactness.main(arguments) == 2
    assert "this engine is not exact here: torch's attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"my notes, line 1\nmy notes, last line without newline",
        b"one line without its end",
        b'{"key": "of another run", "request": {}, "found": []}\n{"key": "ha',
        b"\xff\xfe\x00 no text\n",
    ],
)
def test_a_file_that_is_not_of_this_run_is_refused_and_kept(content, arguments, tmp_path, capsys):
    path = tmp_path / "notes"
    path.write_bytes(content)
    assert exactness.main([*arguments, "--resume", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --resume {path}")
    assert path.read_bytes() == content


def test_texts_are_compared_up_to_where_they_part():
    logits = torch.tensor([[1.0, 3.0], [2.0, 0.5], [0.0, 4.0]])
    other = logits.clone()
    other[1] = torch.tensor([2.0, 2.5])
    found = compare_texts(Text([1, 0, 1], logits), Text([1, 1, 1], other))
    assert found == {
        "tokens": 3,
        "identical": False,
        "first_difference": 1,
        "margin": 1.5,
        "logits_compared": 2,
        "logits_differ": 1,
        "logprobs_differ": None,
    }
    same = compare_texts(Text([1, 0, 1], logits), Text([1, 0, 1], logits.clone()))
    assert (same["identical"], same["logits_compared"], same["logits_differ"]) == (True, 3, 0)
    signed = compare_texts(Text([1], torch.tensor([[0.0]])), Text([1], torch.tensor([[-0.0]])))
    assert signed["logits_differ"] == 1  # bits, not values


def test_log_probabilities_are_compared_before_the_place_where_texts_part():
    logits = torch.zeros(3, 2)
    plain = [TokenLogprob(token, -0.5, [(1, -0.5)]) for token in (1, 0, 1)]
    other = [plain[0], TokenLogprob(0, -0.5, [(1, -0.25)]), TokenLogprob(0, -0.5, [])]
    same = compare_texts(Text([1, 0, 1], logits, plain), Text([1, 0, 1], logits, list(plain)))
    assert same["logprobs_differ"] == 0
    parted = compare_texts(Text([1, 0, 1], logits, plain), Text([1, 0, 0], logits, other))
    assert (parted["first_difference"], parted["logprobs_differ"]) == (2, 1)


SAMPLED = (
    *("--temperature", "1.2", "--top-p", "0.95", "--repetition-penalty", "1.1", "--seed", "3"),
    *("--batches", "1,2", "--logprobs", "3"),
)


def test_drawn_texts_are_the_same_in_batches_too_and_others_under_another_seed(arguments, capsys):
    assert exactness.main([*arguments, *SAMPLED]) == 0
    text = capsys.readouterr().out
    record = last_json(text)
    assert [row["name"] for row in record["rows"]] == [
        "lookahead (4, 3, 4)",
        "pool only (0, 4, 3)",
        "autoregressive, batch 2",
        "lookahead (4, 3, 4), batch 2",
        "pool only (0, 4, 3), batch 2",
        "autoregressive, another seed",
    ]
    *promised, other = record["rows"]
    for row in promised:
        found = row["identical"], row["logits_differ"], row["logprobs_differ"]
        assert found == (3, 0, 0)
    assert (other["identical"], other["is_promised"]) == (0, False)
    sampling = "temperature 1.2, top p 0.95, repetition penalty 1.1, seed 3"
    assert record["sampling"] == sampling
    assert f"3 prompts, {sampling}\n" in text
    assert "autoregressive, another seed (may differ)     0 of 3" in text


def test_a_draw_that_depends_on_the_place_in_the_batch_is_found(arguments, monkeypatch, capsys):
    start = batch_module.Step.start

    def with_another_sample(step, sequence, *rest, **named):
        step.sampler.samples[sequence] = sequence
        return start(step, sequence, *rest, **named)

    monkeypatch.setattr(batch_module.Step, "start", with_another_sample)
    assert exactness.main([*arguments, *SAMPLED]) == 1
    rows = {row["name"]: row for row in last_json(capsys.readouterr().out)["rows"]}
    assert rows["lookahead (4, 3, 4)"]["identical"] == 3
    assert rows["lookahead (4, 3, 4), batch 2"]["identical"] < 3
    assert rows["lookahead (4, 3, 4), batch 2"]["logits_differ"] == 0


def test_a_log_probability_that_depends_on_the_step_is_found(arguments, monkeypatch, capsys):
    tell = batch_module.token_logprobs

    def by_count(logits, token_ids, num_top):
        return tell(logits * (1 + (len(token_ids) > 1)), token_ids, num_top)

    monkeypatch.setattr(batch_module, "token_logprobs", by_count)
    assert exactness.main([*arguments, "--logprobs", "0"]) == 1
    row = last_json(capsys.readouterr().out)["rows"][0]
    assert (row["identical"], row["logits_differ"]) == (3, 0)
    assert row["logprobs_differ"] > 0
