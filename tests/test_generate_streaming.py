"""The command line as a program: text as it comes, on a terminal, in a pipe, and up to Ctrl-C."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, LookaheadConfig, Result
from lookahead.batch import Batch
from lookahead.display import COLOURS
from lookahead.generate import INTERRUPTED, main

PROMPT = "abc abd abc"
# More tokens than can come before a test has seen the first few and has acted.
SHAPE = LookaheadConfig(4, 3, 2)
LONG = 200_000
# A shell that started the tests in the background may have had them ignore Ctrl-C.
WITH_SIGINT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from lookahead.generate import main; sys.exit(main())"
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_tiny_checkpoint(directory, max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32", max_length=LONG)


@pytest.fixture
def options(checkpoint) -> list[str]:
    return [
        *("--ckpt", str(checkpoint), "--prompt", PROMPT),
        *("--device", "cpu", "--dtype", "float32", "--max-length", str(LONG)),
        *("--window", "4", "--ngram", "3", "--guesses", "2"),
    ]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def generate_with(engine: Engine, num_tokens: int) -> Result:
    result = engine.generate(PROMPT, max_new_tokens=num_tokens, lookahead=SHAPE)
    assert isinstance(result, Result)
    return result


def test_in_a_pipe_the_text_is_plain(options, engine):
    command = python("-m", "lookahead.generate", *options, "--max-new-tokens", "40")
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode() == generate_with(engine, 40).text + "\n"
    assert done.stderr.decode().startswith("lookahead (4, 3, 2): 40 tokens, ")
    assert done.stderr.count(b"\n") == 1


class Writes(io.RawIOBase):
    """A file that remembers what each write brought it."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.pieces.append(bytes(data).decode())
        return len(data)


def test_the_text_of_a_step_is_written_at_once(options, engine, monkeypatch):
    writes = Writes()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(writes)))
    assert main([*options, "--max-new-tokens", "40"]) == 0
    steps = [chunk.text for chunk in engine.stream(PROMPT, max_new_tokens=40, lookahead=SHAPE)]
    assert writes.pieces == [*steps, "\n"]


def test_on_a_terminal_a_step_has_one_colour_and_the_next_step_another(options, engine):
    pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX only")
    terminal, its_other_end = pty.openpty()
    command = python("-m", "lookahead.generate", *options, "--max-new-tokens", "40")
    with subprocess.Popen(command, stdout=its_other_end, stderr=subprocess.PIPE) as process:
        os.close(its_other_end)
        shown = read_to_end(terminal).decode()
        _, said = process.communicate()
    assert process.returncode == 0
    assert said.startswith(b"lookahead (4, 3, 2): 40 tokens, ")
    pieces = re.findall(r"\033\[(\d+)m(.*?)\033\[0m", shown)
    steps = [chunk.text for chunk in engine.stream(PROMPT, max_new_tokens=40, lookahead=SHAPE)]
    assert max(map(len, steps)) > 1
    assert pieces == [
        (str(colour), text) for colour, text in zip(cycle(COLOURS), steps, strict=False)
    ]
    assert "".join(f"\033[{colour}m{text}\033[0m" for colour, text in pieces) + "\r\n" == shown


def read_to_end(terminal: int) -> bytes:
    data = b""
    with open(terminal, "rb", buffering=0) as stream:
        while True:
            try:
                piece = stream.read(4096)
            except OSError:  # how Linux says that the other end is closed
                return data
            if not piece:
                return data
            data += piece


def test_json_is_utf8_whatever_the_surroundings_say(options):
    surroundings = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = python("-m", "lookahead.generate", *options, "--max-new-tokens", "1", "--json")
    command[command.index(PROMPT)] = "漢字"
    done = subprocess.run(command, capture_output=True, check=True, env=surroundings)
    assert json.loads(done.stdout.decode("utf-8"))["prompt"] == "漢字"


def test_a_reader_that_leaves_ends_it_quietly(options):
    command = python("-m", "lookahead.generate", *options, "--max-new-tokens", str(LONG))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


def test_ctrl_c_prints_what_was_generated(options, engine):
    command = python("-c", WITH_SIGINT, *options, "--max-new-tokens", str(LONG))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, **pipes) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate()
    assert process.returncode == INTERRUPTED == 130
    text = (first + rest).decode()
    assert text.endswith("\n")
    text = text.removesuffix("\n")
    assert 1 <= len(text) < LONG
    assert text == generate_with(engine, len(text)).text
    summary = r"lookahead \(4, 3, 2\): \d+ tokens, .* ended by interrupted\)\n"
    assert re.fullmatch(summary, said.decode())


@pytest.fixture
def interrupt_at(monkeypatch):
    """Have Ctrl-C come during a step, counted over both modes from 1."""

    def set_step(step: int) -> None:
        advance = Batch._advance
        steps = iter(range(1, step + 1))

        def advance_or_interrupt(self):
            if next(steps) == step:
                raise KeyboardInterrupt
            return advance(self)

        monkeypatch.setattr(Batch, "_advance", advance_or_interrupt)

    return set_step


def test_ctrl_c_with_json(options, engine, interrupt_at, capsys):
    steps = list(engine.stream(PROMPT, max_new_tokens=40, lookahead=SHAPE))[:3]
    interrupt_at(4)
    assert main([*options, "--json", "--compare"]) == 130
    values = json.loads(capsys.readouterr().out)
    assert (values["finish_reason"], values["steps"]) == ("interrupted", 3)
    assert values["text"] == "".join(step.text for step in steps)
    assert values["token_ids"] == [token for step in steps for token in step.token_ids]
    assert "autoregressive" not in values


def test_ctrl_c_in_the_comparison_keeps_the_first_result(options, engine, interrupt_at, capsys):
    expected = generate_with(engine, 20)
    interrupt_at(expected.steps + 2)
    assert main([*options, "--max-new-tokens", "20", "--json", "--compare"]) == 130
    values = json.loads(capsys.readouterr().out)
    assert (values["finish_reason"], values["token_ids"]) == ("length", expected.token_ids)
    assert "identical" not in values


def test_ctrl_c_before_the_first_step(options, interrupt_at, capsys):
    interrupt_at(1)
    assert main(options) == 130
    output = capsys.readouterr()
    assert output.out == "\n"
    assert output.err.startswith("lookahead (4, 3, 2): 0 tokens, 0 steps, 0.00 tokens/step, ")


def test_ctrl_c_shows_what_a_stop_string_held_back(options, engine, interrupt_at, capsys):
    text = "".join(
        chunk.text for chunk in list(engine.stream(PROMPT, max_new_tokens=40, lookahead=SHAPE))[:3]
    )
    interrupt_at(4)
    assert main([*options, "--stop", text[-2:] + "never"]) == 130
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("where", ["load", "batch"])
def test_ctrl_c_while_loading(options, monkeypatch, capsys, where):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, where, interrupt)
    assert main(options) == 130
    assert capsys.readouterr() == ("", "")
