"""The benchmarks where tokens are drawn: what is the same, what is told, and what a draw costs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, SamplingConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import decode
import peers
import sampling
import sampling_cases
from sampling_words import describe

DRAWN = ("--temperature", "1.1", "--top-p", "0.9", "--seed", "5")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sampling") / "checkpoint")


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc abc"}\n{"prompt": "def add"}\n')
    return [
        *("--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "16"),
        *("--configs", "4,3,4", "--dtype", "float32", "--repeats", "1"),
    ]


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SamplingConfig(), "greedy"),
        (SamplingConfig(seed=3), "greedy"),
        (SamplingConfig(repetition_penalty=1.1), "greedy, repetition penalty 1.1"),
        (SamplingConfig(temperature=0.7), "temperature 0.7, seed 0"),
        (
            SamplingConfig(
                temperature=1.0, top_k=5, logit_bias=((3, 1.5), (4, -1.0)), banned_tokens=(7, 8)
            ),
            "temperature 1.0, top k 5, logit bias 3=1.5 4=-1.0, banned tokens 7 8, seed 0",
        ),
    ],
)
def test_sampling_in_words(config: SamplingConfig, words: str) -> None:
    assert describe(config) == words


# decode.py


def test_every_mode_draws_the_same(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, texts = [], set()
    generate = Engine.generate

    def noted(engine: Engine, ids: list[int], **options: object) -> object:
        result = generate(engine, ids, **options)
        drawn.append(options["sampling"])
        if options["max_new_tokens"] == 16 and len(result.token_ids) == 16:
            texts.add(tuple(result.token_ids))
        return result

    monkeypatch.setattr(Engine, "generate", noted)
    assert decode.main([*arguments, *DRAWN]) == 0
    text = capsys.readouterr().out
    record = last_json(text)
    assert set(drawn) == {SamplingConfig(temperature=1.1, top_p=0.9, seed=5)}
    words = "temperature 1.1, top p 0.9, seed 5"
    assert record["sampling"] == words
    assert f"at most 16 new tokens, {words}\n" in text
    assert [row["identical_prompts"] for row in record["rows"]] == [2] * len(record["rows"])
    of_first_seed = set(texts)
    texts.clear()
    assert decode.main([*arguments, *DRAWN, "--seed", "6"]) == 0
    assert texts
    assert not texts & of_first_seed


def test_a_mode_that_draws_otherwise_is_not_timed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = Engine.generate

    def with_another_seed(engine: Engine, ids: list[int], **options: object) -> object:
        given = options["sampling"]
        if getattr(options["lookahead"], "window", 0) == 4:
            given = replace(given, seed=given.seed + 1)
        return generate(engine, ids, **{**options, "sampling": given})

    monkeypatch.setattr(Engine, "generate", with_another_seed)
    assert decode.main([*arguments, *DRAWN]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "differs in float32 at new token" in captured.err
    assert ", lookahead (4, 3, 4) gives " in captured.err


def test_steps_and_profile_are_of_drawn_texts_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--steps-only", "--profile"):
        assert decode.main([*arguments, *DRAWN, option]) == 0
        assert last_json(capsys.readouterr().out)["sampling"].startswith("temperature 1.1")


class AnyPeer:
    """Installed, and never run."""

    @staticmethod
    def require() -> None:
        pass


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "-1"], "temperature must be a finite number of at least 0"),
        (["--top-p", "2"], "top_p must be a finite number above 0 and at most 1"),
        (["--logit-bias", "x"], "--logit-bias must be a token id, = and a number"),
        (["--ban-token", "99999"], "banned_tokens: token 99999 is not in the vocabulary"),
        (["--peers", "any", "--temperature", "1"], "--peers decode greedily: leave out --peers or"),
        (["--peers", "any", "--repetition-penalty", "1.1"], "--peers decode greedily"),
    ],
)
def test_sampling_that_cannot_be_is_refused_in_one_line(
    options: list[str],
    expected: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(peers.PEERS, "any", AnyPeer)
    assert decode.main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {expected}")
    assert error.count("\n") == 1


# sampling.py


def test_random_logits_fall_like_a_model_s() -> None:
    logits = sampling_cases.random_source(49152, torch.float32, torch.device("cpu")).logits
    assert logits.shape == (13, 49152)
    probabilities = logits.softmax(1).sort(descending=True).values
    needed = 1 + (probabilities.cumsum(1) < 0.95).sum(1)
    assert 0.3 < probabilities[:, 0].median() < 0.8
    assert 2 < needed.median() < 60


@pytest.mark.parametrize("name", sampling_cases.WARPERS)
@pytest.mark.parametrize("implementation", ["torch", "numba"])
def test_every_row_of_a_step_is_reached(implementation: str, name: str) -> None:
    source = sampling_cases.random_source(500, torch.float32, torch.device("cpu"))
    for shape in sampling_cases.SHAPES:
        draw = sampling_cases.Draw(source, shape, name, implementation)
        assert draw.is_reached
        changed = draw().clone()
        if draw.num_rows > 1:
            assert len(set(changed.tolist())) > 1
            draw.tokens[0, 1] += 1
            assert not draw.is_reached


def test_draws_are_timed(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sampling, "VOCABULARIES", (600,))
    monkeypatch.setattr(sampling_cases, "HISTORY", 90)
    monkeypatch.setattr(sampling_cases, "NEW_TOKENS", 30)
    out = tmp_path / "out.json"
    given = ["--repeats", "2", "--dtype", "float32", "--json-out", str(out)]
    assert sampling.main(["--ckpt", str(checkpoint), *given]) == 0
    text = capsys.readouterr().out
    record = last_json(text)
    assert json.loads(out.read_text()) == record
    assert (record["implementation"], record["checkpoint"]) == ("numba", "checkpoint")
    names = list(sampling_cases.WARPERS)
    rows = record["rows"]
    assert [row["warpers"] for row in rows] == names * 4
    assert [(row["logits"], row["rows"]) for row in rows[::6]] == [
        ("checkpoint", 1),
        ("checkpoint", 13),
        ("random", 1),
        ("random", 13),
    ]
    assert {row["vocab_size"] for row in rows[12:]} == {600}
    assert all(row["microseconds"]["p20"] > 0 for row in rows)
    assert rows[5]["sampling"] == describe(sampling_cases.WARPERS["all"])
    header = text.splitlines()[2]
    assert all(name in header for name in names)
    assert record["provenance"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--repeats", "0"], "expected a whole number of at least 1"),
        (["--dtype", "int8"], "dtype 'int8' is not known"),
        (["--ckpt", "nowhere"], "nowhere"),
        (["--json-out", "."], "--json-out . cannot be written"),
    ],
)
def test_draws_of_nothing_are_refused_in_one_line(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = sampling.main(options)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert expected in error.splitlines()[-1]
