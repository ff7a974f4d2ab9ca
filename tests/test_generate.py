"""The command line: what it prints where, and what reaches the engine."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest
from tiny_checkpoint import byte_tokenizer, write_tiny_checkpoint

from lookahead import Engine, LookaheadConfig, Result
from lookahead.generate import main

PROMPT = "abc abd abc"
NUM_TOKENS = 30
KEYS = """
    prompt text token_ids prompt_tokens new_tokens steps tokens_per_step prefill_seconds
    decode_seconds tokens_per_second finish_reason mode device dtype window ngram guesses choice
    adaptive rows_per_step seed sample exact inexact_reason row_block
""".split()
SUMMARY = re.compile(
    r"(lookahead \(\d+, \d+, \d+\)|autoregressive): (\d+) tokens, (\d+) steps, "
    r"(\d+\.\d\d) tokens/step, \d+\.\d ms/step, \d+\.\d tokens/s \(cpu, float32, ended by (\w+)\)"
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def expected(engine) -> Result:
    return engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)


@pytest.fixture
def run(checkpoint, capsys):
    """Run the command line in this process; returns exit code, standard output, standard error."""

    def run_main(*options, prompt=("--prompt", PROMPT), ckpt=checkpoint):
        always = ["--ckpt", ckpt, "--device", "cpu", "--dtype", "float32"]
        length = [] if "--max-new-tokens" in options else ["--max-new-tokens", NUM_TOKENS]
        code = main([str(option) for option in (*always, *prompt, *length, *options)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_main


@pytest.fixture
def run_json(run):
    """Run with --json; returns exit code and the object, the only thing on standard output."""

    def run_main(*options, **where):
        code, out, _ = run("--json", *options, **where)
        assert out.count("\n") == 1
        assert out.endswith("\n")
        return code, json.loads(out)

    return run_main


def without_times(values: dict) -> dict:
    times = ("prefill_seconds", "decode_seconds", "tokens_per_second")
    return {name: value for name, value in values.items() if name not in times}


def test_text_goes_to_standard_output_and_a_summary_to_standard_error(run, expected):
    code, out, err = run()
    assert code == 0
    assert out == expected.text + "\n"
    assert len(expected.text) == NUM_TOKENS
    match = SUMMARY.fullmatch(err.removesuffix("\n"))
    assert match is not None
    steps, ratio = expected.steps, f"{NUM_TOKENS / expected.steps:.2f}"
    shape = (expected.window, expected.ngram, expected.guesses)
    assert match.groups() == (
        f"lookahead {shape}", str(NUM_TOKENS), str(steps), ratio, "length",
    )  # fmt: skip


def test_the_autoregressive_mode(run, expected):
    code, out, err = run("--mode", "autoregressive")
    assert (code, out) == (0, expected.text + "\n")
    match = SUMMARY.fullmatch(err.removesuffix("\n"))
    assert match is not None
    assert match.groups() == ("autoregressive", "30", "30", "1.00", "length")


def test_json_is_one_object_with_the_keys_in_order(run_json, expected, engine):
    code, values = run_json()
    assert code == 0
    assert list(values) == KEYS
    assert without_times(values) == without_times(expected.to_dict())
    assert values["prompt"] == PROMPT
    assert values["tokens_per_second"] == NUM_TOKENS / values["decode_seconds"]


def test_json_stands_alone_on_a_terminal_too(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(json.loads(run("--json")[1])) == KEYS


def test_json_keeps_text_of_every_script(run, checkpoint):
    prompt = '漢字 é \\ "\u2028\x1b'
    _, out, _ = run("--json", prompt=("--prompt", prompt))
    assert json.loads(out)["prompt"] == prompt
    assert "漢字 é" in out


def test_compare(run_json, run, expected):
    code, values = run_json("--compare")
    assert code == 0
    assert list(values) == [*KEYS, "autoregressive", "identical", "difference"]
    assert values["identical"] is True
    assert values["difference"] is None
    other = values["autoregressive"]
    assert list(other) == KEYS
    assert (other["mode"], other["steps"], other["window"], other["guesses"]) == (
        "autoregressive", NUM_TOKENS, 0, 0,
    )  # fmt: skip
    for name in ("prompt", "text", "token_ids", "prompt_tokens", "finish_reason", "seed"):
        assert other[name] == values[name]

    code, out, err = run("--compare")
    assert (code, out) == (0, expected.text + "\n")
    first, second, verdict = err.splitlines()
    assert SUMMARY.fullmatch(first)
    assert SUMMARY.fullmatch(second)
    speed = r"identical ids; lookahead runs at \d+\.\d\dx the speed of autoregressive"
    assert re.fullmatch(speed, verdict)


def test_compare_where_nothing_is_generated(run, expected):
    code, out, err = run("--compare", "--stop", expected.text[0])
    assert (code, out) == (0, "\n")
    assert err.splitlines()[-1] == "identical ids"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (
            {"prompt": "another"},
            "different ids from new token 0 on: lookahead gives {} '",
        ),
        (
            {"max_new_tokens": 5},
            "different ids from new token 5 on: lookahead gives {} '",
        ),
    ],
)
def test_a_difference_is_exit_code_1(run, run_json, expected, engine, monkeypatch, change, verdict):
    batch = Engine.batch

    def batch_otherwise(self, prompts, **options):
        options = {"prompts": prompts, **options}
        if options["mode"] != "lookahead":
            options |= {"prompts": [change["prompt"]]} if "prompt" in change else change
        return batch(self, **options)

    first = {"prompt": PROMPT, "max_new_tokens": NUM_TOKENS, **change}
    other = engine.generate(**first).token_ids
    place = 0 if "prompt" in change else 5
    ids = [result[place] for result in (expected.token_ids, other) if place < len(result)]
    monkeypatch.setattr(Engine, "batch", batch_otherwise)
    code, _, err = run("--compare")
    assert code == 1
    assert err.splitlines()[-1].startswith(verdict.format(*ids))
    code, values = run_json("--compare")
    assert (code, values["identical"]) == (1, False)
    difference = values["difference"]
    assert (difference["place"], difference["token_ids"][0]) == (place, ids[0])
    mine, its = difference["logits"]
    if "prompt" in change:  # each mode chose the token with its larger logit
        assert f"autoregressive {ids[1]} '" in err.splitlines()[-1]
        assert mine[0] > mine[1]
        assert its[1] > its[0]
    else:  # one text has ended there
        assert "autoregressive the end" in err.splitlines()[-1]
        assert (mine[1], its) == (None, [None, None])
    assert (values["token_ids"], values["autoregressive"]["token_ids"]) == (
        expected.token_ids, other,
    )  # fmt: skip


def test_stop_strings(run, run_json, expected):
    text = expected.text
    late, early = text[20:23], text[7:9]
    end = min(text.find(late), text.find(early))
    assert 0 < end < 20
    assert run("--stop", late, "--stop", early)[1] == text[:end] + "\n"
    _, values = run_json("--stop", late, "--stop", early)
    assert (values["text"], values["finish_reason"]) == (text[:end], "stop")
    assert values["token_ids"] == expected.token_ids[:end]
    # What might have become a stop string, and did not, is shown at the end.
    assert run("--stop", text[-2:] + "never")[1] == text + "\n"


def test_end_of_text_and_ignore_eos(run, run_json, expected, tmp_path):
    end_id = expected.token_ids[8]
    place = expected.token_ids.index(end_id)
    ckpt = write_tiny_checkpoint(tmp_path, eos_token_id=end_id)
    _, values = run_json(ckpt=ckpt)
    assert (values["text"], values["finish_reason"]) == (expected.text[:place], "eos")
    assert values["token_ids"] == expected.token_ids[: place + 1]
    assert run(ckpt=ckpt)[1] == expected.text[:place] + "\n"
    assert run("--ignore-eos", ckpt=ckpt)[1] == expected.text + "\n"


def test_max_length_ends_the_context(run_json, expected):
    _, values = run_json("--max-length", len(PROMPT) + 9)
    assert (values["text"], values["finish_reason"]) == (expected.text[:9], "context")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompt.txt", PROMPT.encode()),
        ("one.jsonl", json.dumps({"prompt": PROMPT, "more": 1}).encode()),
        ("lines.jsonl", b'\r\n{"prompt": "abc abd\\u0020abc"}\r\n\r\n'),
    ],
)
def test_prompt_files(run, expected, tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert run(prompt=("--prompt-file", path))[:2] == (0, expected.text + "\n")


def test_a_file_that_is_not_jsonl_is_one_prompt_as_it_is(run_json, tmp_path):
    content = '{"prompt": "a"}\r\n\n é\n'
    path = tmp_path / "prompt.json"
    path.write_bytes(content.encode())
    assert run_json(prompt=("--prompt-file", path))[1]["prompt"] == content


def test_a_json_line_may_hold_any_line_end_but_its_own(run_json, tmp_path):
    prompt = "a\u2028b\u0085c\x7f"
    path = tmp_path / "prompt.jsonl"
    path.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert run_json(prompt=("--prompt-file", path))[1]["prompt"] == prompt


def test_the_prompt_may_come_from_standard_input(run, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert run(prompt=("--prompt-file", "-"))[:2] == (0, expected.text + "\n")


def test_chat(run_json, engine):
    expected = engine.generate(engine.chat_ids("hi", "be brief"), max_new_tokens=NUM_TOKENS)
    options = ("--chat", "--system", "be brief", "--compare")
    _, values = run_json(*options, prompt=("--prompt", "hi"))
    assert values["token_ids"] == expected.token_ids
    assert values["prompt_tokens"] == len(byte_tokenizer().encode("s:be brief\nu:hi\na:").ids)
    assert (values["prompt"], values["autoregressive"]["prompt"]) == ("hi", "hi")


def test_the_tuned_configuration(run, run_json, expected, engine):
    _, values = run_json("--no-prompt-ngrams")
    assert (values["adaptive"], values["choice"]) == (True, engine.tuning.reason)
    assert values["token_ids"] == expected.token_ids
    # It is that of one prompt, however many might share a step.
    _, values = run_json("--batch", 8)
    assert values["choice"] == engine.tuning.reason
    _, out, err = run("--stats")
    assert out == expected.text + "\n"
    shape = (expected.window, expected.ngram, expected.guesses)
    _, chosen, yields, *others = err.splitlines()
    assert chosen == f"stats: (window, ngram, guesses): {shape}, {engine.tuning.reason}"
    rows = f"rows per step {expected.rows_per_step:.2f}"
    assert yields == f"stats: tokens per step {expected.tokens_per_step:.2f}, {rows}"
    assert others[-1] == "stats: ms of a step by rows: 1: 1000.00, 16: 1000.00, 32: 3000.00"


def test_parts_of_a_configuration(run_json, expected):
    for options, shape in (
        (("--window", 7), (7, 3, 2)),
        (("--ngram", 4), (4, 4, 2)),
        (("--guesses", 0), (4, 3, 0)),
        (("--window", 0, "--ngram", 6, "--guesses", 2), (0, 6, 2)),
    ):
        _, values = run_json(*options)
        assert (values["window"], values["ngram"], values["guesses"]) == shape
        assert (values["adaptive"], values["choice"]) == (False, "given")
        assert values["token_ids"] == expected.token_ids


def test_options_reach_the_engine(run, engine, monkeypatch):
    loads, batches = [], []
    load, batch = Engine.load, Engine.batch

    def record_load(*arguments, **options):
        loads.append(options)
        return load(*arguments, **options)

    def record_batch(self, prompts, **options):
        batches.append(options)
        return batch(self, prompts, **options)

    monkeypatch.setattr(Engine, "load", record_load)
    monkeypatch.setattr(Engine, "batch", record_batch)
    run("--max-length", 100, "--no-prompt-ngrams", "--seed", 3, "--stop", "x", "--ignore-eos")
    run("--window", 2, "--mode", "autoregressive", "--dtype", "bfloat16", "--batch", 3)
    assert loads == [
        {"device": "cpu", "dtype": "float32", "max_length": 100, "batch_size": 1},
        {"device": "cpu", "dtype": "bfloat16", "max_length": None, "batch_size": 3},
    ]
    assert batches[0]["lookahead"] == replace(engine.tuning.config, prompt_ngrams=False, seed=3)
    assert batches[1]["lookahead"] == LookaheadConfig(2, 3, 2)
    assert [options["sampling"].seed for options in batches] == [3, 0]
    assert [options["stop"] for options in batches] == [["x"], []]
    assert [options["ignore_eos"] for options in batches] == [True, False]
    assert [options["mode"] for options in batches] == ["lookahead", "autoregressive"]
    assert [options["max_new_tokens"] for options in batches] == [NUM_TOKENS] * 2


def test_the_seed_is_reported_and_does_not_change_the_text(run_json, expected):
    for seed in (5, 2**64 - 1):
        _, values = run_json("--seed", seed)
        assert (values["seed"], values["token_ids"]) == (seed, expected.token_ids)
