"""Several prompts on the command line."""

import io
import json

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, LookaheadConfig
from lookahead.generate import main

PROMPTS = ["abc abd abc", "cab", "dd dd a", "bad cab bad"]
NUM_TOKENS = 24
SHAPE = (3, 4, 3)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    options = {"max_new_tokens": NUM_TOKENS, "lookahead": LookaheadConfig(*SHAPE)}
    return [engine.generate(prompt, **options) for prompt in PROMPTS]


@pytest.fixture
def run(checkpoint, capsys):
    """Run the command line; returns exit code, standard output, standard error."""

    def run_main(*options):
        always = ("--ckpt", checkpoint, "--device", "cpu", "--dtype", "float32")
        shape = zip(("--window", "--ngram", "--guesses"), SHAPE, strict=True)
        always += ("--max-new-tokens", NUM_TOKENS, *(each for pair in shape for each in pair))
        code = main([str(each) for each in (*always, *options)])
        return code, *capsys.readouterr()

    return run_main


def as_options(prompts):
    return [each for prompt in prompts for each in ("--prompt", prompt)]


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_one_object_a_prompt_in_order(run, expected, batch):
    code, out, err = run(*as_options(PROMPTS), "--batch", batch, "--json")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [values["prompt"] for values in found] == PROMPTS
    assert [values["token_ids"] for values in found] == [each.token_ids for each in expected]
    assert [values["steps"] for values in found] == [each.steps for each in expected]
    lines = err.splitlines()
    assert len(lines) == len(PROMPTS)
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"prompt {number} of 4: lookahead {SHAPE}: {NUM_TOKENS} tokens")


@pytest.mark.parametrize("batch", [1, 3])
def test_text_comes_in_order(run, expected, batch):
    code, out, _ = run(*as_options(PROMPTS), "--batch", batch)
    assert code == 0
    assert out == "".join(f"{result.text}\n" for result in expected)


def test_files_of_prompts(run, expected, tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[1:]))
    _, out, _ = run("--prompt", PROMPTS[0], "--prompt-file", file, "--batch", 2, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [values["token_ids"] for values in found] == [each.token_ids for each in expected]

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPTS[2].encode())))
    _, out, _ = run("--prompt-file", "-", "--json")
    assert json.loads(out)["token_ids"] == expected[2].token_ids


def test_both_modes_of_each(run, expected, monkeypatch):
    code, out, err = run(*as_options(PROMPTS[:2]), "--batch", 2, "--json", "--compare")
    assert code == 0
    for line, prompt, result in zip(out.splitlines(), PROMPTS[:2], expected[:2], strict=True):
        values = json.loads(line)
        assert values["identical"] is True
        assert values["autoregressive"]["token_ids"] == result.token_ids
        assert values["autoregressive"]["prompt"] == values["prompt"] == prompt
    assert [line.split(";")[0] for line in err.splitlines()[-2:]] == [
        "prompt 1 of 2: identical ids", "prompt 2 of 2: identical ids",
    ]  # fmt: skip

    batch = Engine.batch

    def batch_otherwise(self, prompts, **options):
        if options["mode"] == "autoregressive":
            prompts = [PROMPTS[0]] * len(prompts)
        return batch(self, prompts, **options)

    monkeypatch.setattr(Engine, "batch", batch_otherwise)
    code, out, err = run(*as_options(PROMPTS[:2]), "--batch", 2, "--json", "--compare")
    assert code == 1
    assert [json.loads(line)["identical"] for line in out.splitlines()] == [True, False]
    assert err.splitlines()[-1].startswith("prompt 2 of 2: different ids from new token ")


def test_ctrl_c_keeps_what_every_prompt_has(run, expected, monkeypatch):
    from lookahead.batch import Batch

    advance, steps = Batch._advance, iter(range(100))

    def advance_or_interrupt(self):
        if next(steps) == 5:
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(Batch, "_advance", advance_or_interrupt)
    code, out, _ = run(*as_options(PROMPTS), "--batch", 2, "--json")
    assert code == 130
    found = [json.loads(line) for line in out.splitlines()]
    assert [values["steps"] for values in found] == [5, 5, 0, 0]
    for values, result in zip(found, expected, strict=True):
        assert values["finish_reason"] == "interrupted"
        assert values["token_ids"] == result.token_ids[: values["new_tokens"]]
    assert found[0]["new_tokens"] >= 5
