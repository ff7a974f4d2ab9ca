"""Wrong input at the command line: one line on standard error, exit code 2, nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import edit_json, write_tiny_checkpoint
from vocabularies import write_json

from lookahead.generate import main

WEIGHTS = "model.safetensors"


@pytest.fixture
def refused(checkpoint, capsys) -> Callable[..., str]:
    """Run the command line, which must refuse; returns what it says behind "error: "."""

    def run_main(*options, ckpt=checkpoint, prompt=("--prompt", "abc")):
        where = () if ckpt is None else ("--ckpt", ckpt)
        code = main([str(option) for option in (*where, *prompt, *options)])
        output = capsys.readouterr()
        assert (code, output.out) == (2, "")
        assert output.err.startswith("error: ")
        assert output.err.endswith("\n")
        assert len(output.err.splitlines()) == 1
        return output.err.removeprefix("error: ").removesuffix("\n")

    return run_main


def test_paths_that_are_no_checkpoint(refused, tmp_path):
    none, file, empty = tmp_path / "none", tmp_path / "file", tmp_path / "empty"
    file.write_text("x")
    empty.mkdir()
    no_checkpoint = (
        "is not a checkpoint: expected a directory with config.json and safetensors files"
    )
    assert refused(ckpt=none) == f"no such checkpoint directory: {none}"
    assert refused(ckpt=file) == f"{file} {no_checkpoint}"
    assert refused(ckpt=empty) == f"{empty} {no_checkpoint}"
    assert refused(ckpt="x" * 5000) == f"{'x' * 5000} cannot be read: File name too long"
    assert refused(ckpt="two\nlines") == "no such checkpoint directory: two?lines"


def test_an_unknown_architecture(refused, tmp_path):
    ckpt = write_tiny_checkpoint(tmp_path)
    edit_json(ckpt / "config.json", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    assert refused(ckpt=ckpt) == (
        'config.json: architectures ["Qwen2ForCausalLM"] with model_type "qwen2" is not supported, '
        'expected ["LlamaForCausalLM"] with "llama"'
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "(0 bytes) is not a whole safetensors file, copy it again: "),
        (lambda data: data[:100], "(100 bytes) is not a whole safetensors file, copy it again: "),
        (lambda data: data[:-1], "is not a whole safetensors file, copy it again: "),
        (lambda data: data + b"x", "is not a whole safetensors file, copy it again: "),
        (lambda data: data[:8] + b"?" + data[9:], "invalid JSON in header"),
        (lambda data: b"\xff" * 8 + data[8:], "header too large"),
        (lambda data: data.replace(b"F32", b"F99"), "is not a whole safetensors file"),
        (lambda data: data.replace(b"[257,16]", b"[16,257]"), "has shape [16, 257], expected"),
    ],
)
def test_damaged_weights(refused, tmp_path, damage, said):
    path = write_tiny_checkpoint(tmp_path) / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))
    message = refused(ckpt=tmp_path)
    assert said in message
    assert str(path) in message or message.startswith(f"{WEIGHTS}: ")


@pytest.mark.parametrize(
    "options", [(), ("--json",), ("--compare",), ("--temperature", 1, "--top-p", 0.9)]
)
def test_weights_that_are_not_numbers(refused, tmp_path, options):
    path = write_tiny_checkpoint(tmp_path) / WEIGHTS
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 2] = torch.nan
    save_file(weights, path)
    assert refused("--dtype", "float32", *options, ckpt=tmp_path) == (
        "the model's logits are not finite after 0 new tokens: its weights hold NaN or infinity, or "
        "overflow in float32; check the checkpoint or take another dtype"
    )


def test_checkpoints_that_lack_something(refused, tmp_path):
    (write_tiny_checkpoint(tmp_path / "weights") / WEIGHTS).unlink()
    assert refused(ckpt=tmp_path / "weights") == (
        f"{tmp_path / 'weights'} holds no weights: expected model.safetensors or "
        "model.safetensors.index.json with its files"
    )
    (write_tiny_checkpoint(tmp_path / "tokenizer") / "tokenizer.json").unlink()
    assert refused(ckpt=tmp_path / "tokenizer") == (
        f"no tokenizer in {tmp_path / 'tokenizer'}: looked for tokenizer.json and tokenizer.model; "
        "give the directory of a checkpoint that has one of them"
    )
    write_tiny_checkpoint(tmp_path / "plain", chat_template=None)
    assert refused("--chat", ckpt=tmp_path / "plain") == (
        f"a chat needs a chat template and {tmp_path / 'plain'} has none: looked for "
        "chat_template.jinja and for chat_template in tokenizer_config.json; take a checkpoint "
        "that was made for chats, or give plain prompts (without --chat)"
    )
    write_json(tmp_path / "plain" / "config.json", [])
    assert refused(ckpt=tmp_path / "plain") == (
        f"{tmp_path / 'plain' / 'config.json'} must hold a JSON object, got list"
    )


NOT_A_NUMBER = "invalid int value: 'x'; see --help"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--window -1", "window must be a whole number of at least 0, got -1"),
        ("--ngram 1", "ngram must be a whole number of at least 2, got 1"),
        ("--guesses -1", "guesses must be a whole number of at least 0, got -1"),
        (
            "--window 20 --ngram 5 --guesses 20",
            "(window, ngram, guesses) = (20, 5, 20) takes 160 rows a step, more than max_step_rows "
            "128; (16, 5, 16) fits",
        ),
        ("--max-new-tokens 0", "--max-new-tokens must be a whole number of at least 1, got 0"),
        ("--max-length 0", "max_length must be a whole number of at least 2, got 0"),
        ("--max-length 513", "max_length 513 is more than the 512 positions of the model"),
        ("--seed -1", f"seed must be a whole number from 0 to {2**64 - 1}, got -1"),
        (f"--seed {2**64}", f"seed must be a whole number from 0 to {2**64 - 1}, got {2**64}"),
        ("--device cuda:", "device 'cuda:' is not known, expected auto, cpu, cuda or cuda:INDEX"),
        ("--device gpu", "device 'gpu' is not known, expected auto, cpu, cuda or cuda:INDEX"),
        (
            "--dtype int8",
            "dtype 'int8' is not known, expected auto, bfloat16, float16, float32, float64",
        ),
        ("--batch 0", "--batch must be a whole number of at least 1, got 0"),
        (
            "--prompt=",
            "prompt 2 of 2: the prompt is empty: after tokenising it has no tokens, expected at least "
            "1",
        ),
        ("--system x", "--system is part of a chat: add --chat"),
        ("--stop=", "--stop is empty: give the text to end before, or leave it out"),
        ("--top-k -1", "top_k must be a whole number of at least 0, got -1"),
        ("--top-p 0", "top_p must be a finite number above 0 and at most 1, got 0.0"),
        ("--top-p 1.5", "top_p must be a finite number above 0 and at most 1, got 1.5"),
        ("--min-p 2", "min_p must be a finite number from 0 to 1, got 2.0"),
        ("--repetition-penalty 0", "repetition_penalty must be a finite number above 0, got 0.0"),
        ("--temperature -1", "temperature must be a finite number of at least 0, got -1.0"),
        ("--temperature nan", "temperature must be a finite number of at least 0, got nan"),
        ("--logit-bias 5", "--logit-bias must be a token id, = and a number, got '5'"),
        ("--logit-bias x=1", "--logit-bias must be a token id, = and a number, got 'x=1'"),
        ("--logit-bias 999=1", "logit_bias: token 999 is not in the vocabulary, expected 0..256"),
        ("--ban-token 257", "banned_tokens: token 257 is not in the vocabulary, expected 0..256"),
        ("--num-samples 0", "--num-samples must be a whole number of at least 1, got 0"),
        ("--logprobs 2", "--logprobs are part of the JSON: add --json"),
        ("--json --logprobs -1", "--logprobs must be a whole number of at least 0, got -1"),
        ("--json --logprobs 258", "logprobs must be at most the vocabulary's 257, got 258"),
        (
            "--compare --num-samples 2",
            "--compare takes one answer to each prompt: leave out --num-samples",
        ),
        (
            "--compare --mode autoregressive",
            "--compare runs both modes: leave out --mode autoregressive",
        ),
        ("--frobnicate", "unrecognized arguments: --frobnicate; see --help"),
        ("--prom x", "unrecognized arguments: --prom x; see --help"),
        ("--window", "argument --window: expected one argument; see --help"),
        ("--window x", f"argument --window: {NOT_A_NUMBER}"),
        ("--max-new-tokens x", f"argument --max-new-tokens: {NOT_A_NUMBER}"),
        ("--temperature x", "argument --temperature: invalid float value: 'x'; see --help"),
    ],
)
def test_options(refused, options, said):
    assert refused(*options.split()) == said


def test_a_mode_that_does_not_exist(refused):
    message = refused("--mode", "fast")  # how the choices are quoted varies
    assert message.startswith("argument --mode: invalid choice: 'fast' (choose from ")


@pytest.mark.parametrize(
    ("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:99", 0), ("cuda:99", 2)]
)
def test_devices_that_are_not_there(refused, monkeypatch, device, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert refused("--device", device) == (
        f"device '{device}' is not there: this machine has {count} CUDA devices; use auto or cpu"
    )


def test_options_that_are_missing(refused):
    assert refused(ckpt=None) == "the following arguments are required: --ckpt; see --help"
    assert refused(prompt=()) == "there is no prompt: give --prompt TEXT or --prompt-file FILE"


def test_prompts_that_do_not_fit(refused):
    assert refused(prompt=("--prompt", "")) == (
        "the prompt is empty: after tokenising it has no tokens, expected at least 1"
    )
    assert refused("--max-length", 20, prompt=("--prompt", "a" * 20)) == (
        "the prompt has 20 tokens, at most 19 fit in a context of 20; shorten it or raise max_length "
        "(at most 512)"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin.txt", b"caf\xe9", " is not UTF-8: byte 3 is 0xe9; convert it"),
        (
            "a.jsonl",
            b'{"prompt": "a"\n',
            ", line 1 cannot be read as JSON: Expecting ',' delimiter",
        ),
        ("a.jsonl", b'\n{"prompt": "a"}\nx\n', ", line 3 cannot be read as JSON: Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n', ', line 1: expected an object with a string "prompt"'),
        ("a.jsonl", b'{"prompt": 3}\n', ', line 1: expected an object with a string "prompt"'),
        ("a.jsonl", b'["a"]\n', ", line 1 must hold a JSON object, got list"),
        ("a.jsonl", b"[" * 100_000, ", line 1 cannot be read as JSON: maximum recursion depth"),
        ("a.jsonl", b"\n \n", ' has no prompts: expected a line {"prompt": TEXT} for each'),
        (
            "missing.txt",
            None,
            " cannot be read: No such file or directory; expected a file of UTF-8",
        ),
        (".", None, " cannot be read: Is a directory; expected a file of UTF-8 text"),
    ],
)
def test_prompt_files(refused, tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    message = refused(prompt=("--prompt-file", path))
    assert message.startswith(f"prompt file {path}{said}")


def test_half_a_character_in_a_json_line(refused, tmp_path):
    path = tmp_path / "prompt.jsonl"
    path.write_bytes(b'{"prompt": "a\\ud83d"}')
    assert refused(prompt=("--prompt-file", path)) == (
        "the text has half a character ('\\ud83d') at position 1; expected Unicode text; was it read "
        "from something that is not UTF-8?"
    )


def test_as_a_program_with_a_prompt_that_is_not_text(checkpoint):
    command = [sys.executable, "-m", "lookahead.generate", "--ckpt", checkpoint, "--prompt"]
    done = subprocess.run(
        [*map(os.fsencode, command), b"caf\xe9"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == (
        "error: the text has half a character ('\\udce9') at position 3; expected Unicode text; was "
        "it read from something that is not UTF-8?\n"
    )


def test_standard_input_that_is_closed(refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    said = refused("--prompt-file", "-", prompt=())
    assert said == "standard input is closed: give --prompt TEXT or a file"


def run_program(program: str, checkpoint: Path, *given: str) -> subprocess.CompletedProcess:
    options = ["--ckpt", str(checkpoint), *given, "--max-new-tokens", "3"]
    return subprocess.run(
        [sys.executable, "-c", program, *options],
        input="abc\n",  # a chat's message
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("name", "given"), [("generate", ("--prompt", "abc")), ("chat", ())], ids=["generate", "chat"]
)
def test_output_that_cannot_be_written(checkpoint, name, given):
    done = run_program(
        "import sys; sys.stdout = open('/dev/full', 'w')\n"
        f"from lookahead.{name} import _program; _program()",
        checkpoint,
        *given,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_an_interrupt_while_libraries_are_imported(checkpoint):
    """An importer that is interrupted where torch is looked for."""
    done = run_program(
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from lookahead.generate import _program; _program()",
        checkpoint,
        *("--prompt", "abc"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_wrong_options_are_told_without_torch(checkpoint):
    done = run_program(
        "import sys; sys.argv += ['--window', '-1']; sys.modules['torch'] = None\n"
        "from lookahead.generate import _program; _program()",
        checkpoint,
        *("--prompt", "abc"),
    )
    assert done.returncode == 2
    assert done.stderr == "error: window must be a whole number of at least 0, got -1\n"


def test_output_streams_that_are_closed(checkpoint):
    for name in ("stdout", "stderr"):
        done = run_program(
            f"import sys; sys.{name} = None\nfrom lookahead.generate import _program; _program()",
            checkpoint,
            *("--prompt", "abc"),
        )
        assert done.returncode == 0
        assert "Traceback" not in done.stderr


def test_an_ngram_longer_than_a_step(refused):
    options = ("--window", "0", "--guesses", "0", "--ngram")
    assert refused(*options, 10**19).startswith("ngram must be a whole number from 2 to 2147483647")


@pytest.mark.parametrize(
    ("field", "size", "said"),
    [
        ("num_hidden_layers", 10**9, "config.json says num_hidden_layers 1000000000"),
        ("intermediate_size", 2**31 - 1, "has shape"),
    ],
)
def test_a_configuration_of_wild_sizes(refused, tmp_path, field, size, said):
    ckpt = write_tiny_checkpoint(tmp_path)
    edit_json(ckpt / "config.json", **{field: size})
    assert said in refused(ckpt=ckpt)


def test_a_ban_on_everything(refused):
    bans = [option for token in range(257) for option in ("--ban-token", str(token))]
    assert refused(*bans) == (
        "all 257 tokens are banned by logit_bias, banned_tokens or min_new_tokens: leave at least one"
    )
