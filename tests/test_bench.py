"""The benchmarks: their figures, their prompts, and that they refuse to time what is wrong."""

import hashlib
import inspect
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lookahead import Engine, InputError, LookaheadConfig
from lookahead import engine as engine_module
from lookahead import tokenizer as text_tokenizer
from lookahead.config import AUTOREGRESSIVE
from lookahead.step_costs import StepCosts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import decode
import decode_figures
import decode_modes
import peers
import timing
from decode_modes import Job, Mode, Run

BENCH = timing.DEFAULT_PROMPTS.parent
END = "<|end|>"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two small layers, with a token for each byte and a chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    weights, config = random_checkpoint(3, vocab_size=tokenizer.get_vocab_size())
    config["eos_token_id"] = tokenizer.token_to_id(END)
    save_file(
        {name: weight.float() for name, weight in weights.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        {"id": "first", "category": "chat", "prompt": "abcabcabcabc", "chat": True},
        {"id": "second", "category": "code", "prompt": "def add(a, b):\n    return a"},
    ]
    return write_lines(tmp_path / "prompts.jsonl", lines)


def write_lines(path: Path, objects: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
    return path


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


# The figures


def test_spread_interpolates_between_neighbours() -> None:
    assert timing.spread([6.0, 1.0, 2.0, 5.0, 4.0, 3.0]) == timing.Spread(3.5, 2.0, 5.0)
    assert timing.spread([7.0]) == timing.Spread(7.0, 7.0, 7.0)
    assert timing.quantile([20.0, 10.0], 0.2) == pytest.approx(12.0)
    assert timing.spread([1.0, 3.0]).to_dict() == {
        "median": 2.0,
        "p20": pytest.approx(1.4),
        "p80": pytest.approx(2.6),
    }


def test_time_call_gives_value_and_seconds() -> None:
    value, seconds = timing.time_call(lambda: time.sleep(0.02) or "done", CPU)
    assert value == "done"
    assert 0.02 <= seconds < 5


def test_table_aligns_columns() -> None:
    shown = timing.table(["mode", "speed"], [["a", "1.0"], ["longer", ""]])
    assert shown == "mode    speed\na         1.0\nlonger"


def test_rows_are_called_lookahead_only_with_window_and_ngrams() -> None:
    assert decode_modes.label(LookaheadConfig(1, 3, 1)) == "lookahead"
    bare = LookaheadConfig(1, 3, 1, prompt_ngrams=False)
    assert decode_modes.label(bare) == "lookahead, window only"
    assert decode_modes.label(LookaheadConfig(0, 5, 15)) == "pool only"
    assert "lookahead" not in decode_modes.label(LookaheadConfig(4, 2, 4))
    assert decode_modes.label(LookaheadConfig(0, 5, 15, adaptive=True)) == "tuned"


def test_ratios_are_to_the_fastest_autoregressive_mode_of_each_prompt() -> None:
    def mode(label: str, config: LookaheadConfig | None) -> Mode:
        return Mode(label, config, lambda ids, count, trace: pytest.fail("nothing runs here"))

    modes = [
        mode("autoregressive", AUTOREGRESSIVE),
        mode("another autoregressive", AUTOREGRESSIVE),
        mode("tuned", LookaheadConfig(5, 4, 5, adaptive=True)),
        mode("peer", None),
        mode("lookahead", LookaheadConfig(5, 4, 5)),
    ]
    jobs = [Job(timing.Prompt(name, None, name, False), [0]) for name in ("a", "b")]
    same, other = [1, 2, 3, 4], [1, 2, 3, 5]
    runs = [
        [[Run(same, 4, 4, 1.0), Run(same, 4, 4, 3.0)], [Run(same, 4, 4, 2.0)]],
        [[Run(same, 4, 4, 4.0)], [Run(same, 4, 4, 1.0)]],
        [[Run(same, 4, 2, 0.5, 9.0)], [Run(other, 4, 1, 2.0, 15.0)]],
        [[Run(same[:1], 0, 0, 0.0)], [Run(same, 3, 3, 1.0)]],
        [[Run(same[:1], 0, 0, 0.0)], [Run(same[:1], 0, 0, 0.0)]],
    ]
    counts = [decode_modes.AcceptedTokens() for _ in modes]
    counts[2].counts.update(window=5)
    rows = decode_figures.timed_rows(modes, jobs, runs, counts)

    # The median of 4 and 4/3 tokens a second, and in the second prompt the other mode's 4.
    assert decode_figures.baseline_speeds(modes, runs) == pytest.approx([8 / 3, 4])
    fast = rows[2]
    assert [prompt["ratio"] for prompt in fast["prompts"]] == pytest.approx([3.0, 0.5])
    assert fast["ratio"]["median"] == pytest.approx(1.75)
    assert fast["tokens_per_step"] == pytest.approx(8 / 3)
    assert fast["ms_per_step"]["median"] == pytest.approx((250 + 2000) / 2)
    assert fast["time_ratio"] == {
        "median": pytest.approx((1 / 3 + 2) / 2),
        "worst": pytest.approx(2),
    }
    assert fast["rows_per_step"] == pytest.approx((2 * 9 + 15) / 3)
    assert fast["identical_prompts"] == 1
    assert fast["accepted"] == {"prompt": 0, "window": 5, "output": 0}
    # A peer that emitted one token has no speed on that prompt.
    peer = rows[3]
    assert peer["accepted"] is None
    assert [prompt["ratio"] for prompt in peer["prompts"]] == [None, pytest.approx(0.75)]
    assert peer["tokens_per_step"] == 1
    assert peer["rows_per_step"] is None
    assert peer["time_ratio"] == {"median": pytest.approx(4 / 3), "worst": pytest.approx(4 / 3)}
    assert rows[4]["time_ratio"] is None
    table = decode_figures.timed_table(rows).splitlines()
    assert table[3].split() == (
        "tuned (5, 4, 5) 11.0 2.67 1125.0 5.0 3.2-6.8 1.75 1/2 0 5 0".split()
    )
    assert table[4].split() == ["peer", "1.00", "333.3", "3.0", "3.0-3.0", "0.75", "1/2"]
    assert decode_figures.time_line(rows) == (
        "tuned: a prompt takes 1.17 of the time of autoregressive decoding in the median, 2.00 at worst"
    )
    assert decode_figures.time_line([{**rows[4], "mode": "tuned"}]) == "tuned: no step to time"


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference(first: list[int], second: list[int], place: int | None) -> None:
    assert decode_modes.first_difference(first, second) == place


# Prompts


def test_prompts_of_each_kind(tmp_path: Path, checkpoint: Path) -> None:
    file = write_lines(
        tmp_path / "kinds.jsonl",
        [
            {"prompt": "raw \u2028 text", "task_id": "T/0"},
            {"prompt": "message", "chat": True, "id": "c", "category": "chat"},
            {"turns": ["first", "second"], "question_id": 81},
            {"question": "how?", "answer": "so"},
        ],
    )
    file.write_bytes(file.read_bytes() + b"\n\n")
    read = timing.read_prompts(file)
    assert read == [
        timing.Prompt("T/0", None, "raw \u2028 text", False),
        timing.Prompt("c", "chat", "message", True),
        timing.Prompt("81", None, "first", True),
        timing.Prompt("4", None, "how?", True),
    ]
    assert timing.read_prompts(file, 2) == read[:2]
    with_template = text_tokenizer.Tokenizer.load(checkpoint)
    assert [with_template.decode(prompt.token_ids(with_template)) for prompt in read] == [
        "raw \u2028 text",
        "<message>",
        "<first>",
        "<how?>",
    ]


def test_chat_prompts_are_raw_where_there_is_no_template(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    tokenizer = text_tokenizer.Tokenizer.load(tmp_path)
    ids = timing.Prompt("a", None, "how?", True).token_ids(tokenizer)
    assert tokenizer.decode(ids) == "how?"


def test_line_separators_inside_a_prompt_do_not_end_the_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert timing.read_prompts(file)[0].text == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has no prompts"),
        (b'{"prompt": "a"}\n{', "line 2 is not JSON"),
        (b"[1]\n", "line 1: expected an object"),
        (b'{"text": "a"}\n', "line 1: expected an object"),
        (b'{"prompt": ""}\n', "line 1: expected an object"),
        (b'{"prompt": 3}\n', "line 1: expected an object"),
        (b'{"turns": []}\n', "line 1: expected an object"),
        (b'{"turns": "ab"}\n', "line 1: expected an object"),
        (b"\xff\n", "not UTF-8 at byte 0"),
    ],
)
def test_malformed_prompts_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=expected) as refusal:
        timing.read_prompts(file)
    assert "\n" not in str(refusal.value)


def test_our_own_prompts() -> None:
    ours = timing.read_prompts(timing.DEFAULT_PROMPTS)
    categories = [prompt.category for prompt in ours]
    assert len({prompt.id for prompt in ours}) == 24
    assert {name: categories.count(name) for name in categories} == dict.fromkeys(
        ("chat", "code", "arithmetic", "summary"), 6
    )
    assert len(set(categories[:4])) == 4  # a limit of 4 has one of each
    assert all(prompt.is_chat == (prompt.category != "code") for prompt in ours)
    for prompt in ours:
        if prompt.category == "summary":
            source = prompt.text.split("\n\n", 1)[1]
            assert 150 <= len(source.split()) <= 350


# Provenance


def test_provenance_names_code_machine_and_prompts(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    record = timing.provenance(CPU, torch.bfloat16, file)
    digest = hashlib.sha256(b'{"prompt": "a"}\n').hexdigest()
    assert record["prompts"] == {"file": "mine.jsonl", "sha256": digest}
    assert record["versions"]["torch"] == torch.__version__
    packages = {"torch", "triton", "transformers", "llama-cpp-python", "lookahead"}
    assert set(record["versions"]) == {"python", *packages}
    assert (record["device"], record["dtype"], record["gpu"]) == ("cpu", "bfloat16", None)
    assert record["threads"] == torch.get_num_threads()
    assert record["processor"]
    assert timing.provenance(CPU, torch.float32)["prompts"] is None


def test_provenance_reads_commit_and_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SOURCE", tmp_path.resolve())
    assert timing.provenance(CPU, torch.float32)["commit"] is None
    assert timing.provenance(CPU, torch.float32)["dirty"] is None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    clean = timing.provenance(CPU, torch.float32)
    assert (clean["commit"], clean["dirty"]) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "new.py").touch()
    assert timing.provenance(CPU, torch.float32)["dirty"] is True

    inner = tmp_path / "copy"
    inner.mkdir()
    monkeypatch.setattr(timing, "SOURCE", inner.resolve())
    assert timing.provenance(CPU, torch.float32)["commit"] is None


# bench/decode.py


def test_configs_are_read() -> None:
    expected = [LookaheadConfig(5, 4, 5), LookaheadConfig(15, 5, 15)]
    assert decode_modes.parse_configs("5,4,5;15,5,15; 5, 4, 5") == expected
    assert decode_modes.parse_configs(" ", may_be_empty=True) == []
    with pytest.raises(InputError, match='expected "W,N,G;W,N,G"'):
        decode_modes.parse_configs("")


def test_steps_have_room_for_what_the_engine_chooses() -> None:
    default = inspect.signature(Engine.load).parameters["max_step_rows"].default
    assert decode_modes.step_rows([]) == default
    assert decode_modes.step_rows([LookaheadConfig(4, 3, 2)]) == default
    # 40 columns of 4 rows and 20 candidates of 4.
    assert decode_modes.step_rows([LookaheadConfig(40, 5, 20), LookaheadConfig(4, 3, 2)]) == 240


def test_decode_reports_every_mode(
    checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out.json"
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--dtype", "float32"]
    arguments += ["--max-new-tokens", "24", "--configs", "4,3,4;2,2,2", "--repeats", "2"]
    assert decode.main([*arguments, "--json-out", str(out)]) == 0
    text, progress = capsys.readouterr()
    assert progress == "", "progress bars are for terminals"
    record = last_json(text)
    assert json.loads(out.read_text()) == record
    assert record["check"] == {"dtype": "float32", "prompts": 2, "identical": True}
    assert (record["prompts"], record["chat_prompts"], record["repeats"]) == (2, 1, 2)
    assert record["provenance"]["prompts"]["file"] == "prompts.jsonl"
    assert [row["mode"] for row in record["rows"]] == [
        "autoregressive",
        "tuned",
        "lookahead",
        "lookahead, window only",
        "pool only",
        "window of 2-grams",
        "window of 2-grams, window only",
        "pool only",
    ]
    for row in record["rows"]:
        assert row["identical_prompts"] == 2
        new_tokens = sum(prompt["new_tokens"] for prompt in row["prompts"])
        assert row["tokens"] == 2 * new_tokens
        # Each step gives one token; what is more was accepted, in the same float32.
        steps = sum(prompt["steps"] for prompt in row["prompts"])
        assert new_tokens == steps + sum(row["accepted"].values())
    plain, tuned, full, bare, pool = record["rows"][:5]
    assert (plain["tokens_per_step"], plain["rows_per_step"]) == (1, 1)
    assert plain["time_ratio"] == {"median": 1.0, "worst": 1.0}
    # The best yield among those whose rows cost as much as one, by the tests' step costs.
    assert (tuned["window"], tuned["ngram"], tuned["guesses"]) == (0, 8, 4)
    assert [row["adaptive"] for row in record["rows"]] == [None, True, *[False] * 6]
    assert 1 <= tuned["rows_per_step"] <= 16
    assert tuned["time_ratio"]["worst"] >= tuned["time_ratio"]["median"] > 0
    assert record["choice"] == (
        "1.83 tokens a step expected in 1.00 of the time of one row: 1.83x plain decoding"
    )
    assert 8 <= full["rows_per_step"] <= 16
    assert plain["ratio"]["p80"] == 1.0
    assert (full["window"], full["ngram"], full["guesses"], full["prompt_ngrams"]) == (
        4,
        3,
        4,
        True,
    )
    assert bare["accepted"]["prompt"] == 0
    assert bare["prompt_ngrams"] is False
    assert (pool["window"], pool["accepted"]["window"]) == (0, 0)
    assert max(row["tokens_per_step"] for row in record["rows"]) > 1
    assert re.search(r"^lookahead, window only +\(4, 3, 4\) +\d", text, re.MULTILINE)
    assert re.search(r"^tuned: a prompt takes \d\.\d\d of the time of autoreg", text, re.MULTILINE)


def test_decode_runs_without_configurations(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--configs", ""]
    assert decode.main([*arguments, "--max-new-tokens", "6", "--repeats", "1"]) == 0
    rows = last_json(capsys.readouterr().out)["rows"]
    assert [(row["mode"], row["identical_prompts"]) for row in rows] == [
        ("autoregressive", 2),
        ("tuned", 2),
    ]
    assert decode.main([*arguments, "--steps-only"]) == 2
    assert_one_line(capsys, "--steps-only counts the steps of --configs: give at least one")


def test_what_is_checked_and_timed_is_what_the_timed_engine_chooses(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a device where rows are free in bfloat16 and dear in float32."""
    free, dear = StepCosts((1, 64), (1.0, 1.0)), StepCosts((1, 2), (1.0, 9.0))
    monkeypatch.setattr(
        engine_module, "step_costs", lambda model, *_: free if model.dtype.itemsize == 2 else dear
    )
    configs: list[tuple[str, LookaheadConfig]] = []
    generate = Engine.generate

    def noted(engine: Engine, ids: list[int], **options: object) -> object:
        if options["mode"] == "lookahead":
            configs.append((str(engine.model.dtype), options["lookahead"]))
        return generate(engine, ids, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--configs", ""]
    arguments += ["--max-new-tokens", "6", "--repeats", "1", "--dtype", "bfloat16"]
    assert decode.main(arguments) == 0
    choice = LookaheadConfig(15, 5, 15, adaptive=True)
    assert set(configs) == {("torch.float32", choice), ("torch.bfloat16", choice)}


def test_decode_counts_steps_without_timing(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "12"]
    assert decode.main([*arguments, "--configs", "4,3,4", "--steps-only"]) == 0
    record = last_json(capsys.readouterr().out)
    assert record["benchmark"] == "decode_steps"
    assert [row["prompt_ngrams"] for row in record["rows"]] == [True, False]
    for row in record["rows"]:
        counted = [(prompt["new_tokens"], prompt["steps"]) for prompt in row["prompts"]]
        assert row["tokens_per_step"] == row["tokens"] / row["steps"]
        assert row["tokens"] == sum(tokens for tokens, _ in counted)
        mean = sum(tokens / steps for tokens, steps in counted) / 2
        assert row["mean_tokens_per_step"] == pytest.approx(mean)
        assert row["tokens"] == row["steps"] + sum(row["accepted"].values())
        assert "ms_per_step" not in row


def tamper(monkeypatch: pytest.MonkeyPatch, dtype: str, prompt: str) -> None:
    """One configuration emits another token at place 5 of one prompt, in one dtype."""
    generate = Engine.generate

    def tampered(engine: Engine, ids: list[int], **options: object) -> object:
        result = generate(engine, ids, **options)
        if (result.window, result.dtype) == (4, dtype) and prompt in result.prompt:
            ids = list(result.token_ids)
            ids[5] = (ids[5] + 1) % 256
            return replace(result, token_ids=ids)
        return result

    monkeypatch.setattr(Engine, "generate", tampered)


def test_decode_refuses_to_time_differing_ids(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tamper(monkeypatch, "float32", "def add")
    monkeypatch.setattr(decode_modes, "time_modes", lambda *_: pytest.fail("timed"))
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert decode.main([*arguments, "--configs", "4,3,4"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert "prompt second differs in float32 at new token 5: autoregressive gives " in line
    assert ", lookahead (4, 3, 4) gives " in line


def test_decode_refuses_unchecked_prompts_that_differ_when_timed(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tamper(monkeypatch, "float32", "def add")
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "8"]
    arguments += ["--configs", "4,3,4", "--check-limit", "1", "--repeats", "1"]
    assert decode.main([*arguments, "--dtype", "float32"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prompt second differs in float32 at new token 5" in captured.err


def test_decode_counts_prompts_that_differ_in_16_bits(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tamper(monkeypatch, "bfloat16", "abc")
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "6"]
    arguments += ["--configs", "4,3,4", "--repeats", "1", "--dtype", "bfloat16"]
    assert decode.main(arguments) == 0
    record = last_json(capsys.readouterr().out)
    identical = {row["mode"]: row["identical_prompts"] for row in record["rows"]}
    assert identical["autoregressive"] == 2
    flags = [prompt["identical"] for prompt in record["rows"][2]["prompts"]]
    assert identical["tuned"] == 2
    assert flags[0] is False
    assert sum(flags) == identical["lookahead"]


class WrongPeer:
    """A peer that ends one token early."""

    def __init__(self, path: Path, *_: object) -> None:
        self.engine = Engine.load(path, dtype="float32")

    @staticmethod
    def require() -> None:
        pass

    def run(self, ids: list[int], max_new_tokens: int, trace: object = None) -> Run:
        result = self.engine.generate(ids, max_new_tokens=max_new_tokens - 1, mode="autoregressive")
        return Run(result.token_ids, result.new_tokens, result.steps, result.decode_seconds)


def test_decode_refuses_a_peer_that_differs(
    checkpoint: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(peers.PEERS, "wrong", WrongPeer)
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert decode.main([*arguments, "--configs", "4,3,4", "--peers", "wrong"]) == 1
    assert "at new token 7" in (error := capsys.readouterr().err)
    assert "wrong gives the end" in error


def test_transformers_runs_beside_the_engine(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "8"]
    arguments += ["--configs", "4,3,4", "--repeats", "1", "--dtype", "float32"]
    assert decode.main([*arguments, "--peers", "transformers,transformers-pld"]) == 0
    row, looked_up = last_json(capsys.readouterr().out)["rows"][-2:]
    assert (row["mode"], row["window"], row["accepted"]) == ("transformers", None, None)
    assert (row["tokens_per_step"], row["identical_prompts"]) == (1, 2)
    # The first token of each prompt comes out of its prefill.
    assert row["tokens"] == sum(prompt["new_tokens"] - 1 for prompt in row["prompts"])
    assert looked_up["mode"] == "transformers-pld"
    assert looked_up["tokens_per_step"] > 1  # the model repeats itself
    assert looked_up["identical_prompts"] == 2
    for each in (row, looked_up):
        assert each["ratio"]["median"] > 0


def test_transformers_that_is_not_installed_is_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert decode.main(["--ckpt", str(checkpoint), "--peers", "transformers"]) == 2
    assert_one_line(capsys, "transformers cannot be imported")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ckpt", "nowhere"], "no such checkpoint directory: nowhere"),
        ([], "--ckpt"),
        (["--ckpt", "CKPT", "--prompts", "nowhere.jsonl"], "prompts file nowhere.jsonl"),
        (["--ckpt", "CKPT", "--configs", "5,4"], '--configs: expected "W,N,G;W,N,G"'),
        (["--ckpt", "CKPT", "--configs", "5,4,x"], '--configs: expected "W,N,G;W,N,G"'),
        (["--ckpt", "CKPT", "--configs", "5,1,5"], "ngram must be"),
        (["--ckpt", "CKPT", "--configs", "5,4,0"], "verifies nothing"),
        (["--ckpt", "CKPT", "--limit", "0"], "--limit: expected a whole number of at least 1"),
        (
            ["--ckpt", "CKPT", "--peers", "other"],
            "'other' is not known, expected transformers, transf",
        ),
        (["--ckpt", "CKPT", "--dtype", "int8"], "dtype 'int8' is not known"),
        (["--ckpt", "CKPT", "--max-new-tokens", "500"], "prompt chat-1 has "),
        (["--ckpt", "CKPT", "--json-out", "."], "--json-out"),
    ],
)
def test_decode_refuses_wrong_input_in_one_line(
    arguments: list[str], expected: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(checkpoint) if word == "CKPT" else word for word in arguments]
    assert decode.main(given) == 2
    assert_one_line(capsys, expected)


def assert_one_line(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


@pytest.mark.parametrize("script", ["decode.py", "attn_mask.py"])
def test_a_python_without_the_package_is_told_in_one_line(script: str) -> None:
    command = [sys.executable, "-S", "-E", str(BENCH / script)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: the package ")
    assert run.stderr.count("\n") == 1
